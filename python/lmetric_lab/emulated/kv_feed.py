"""KV cache events over ZMQ, framed and bound as vLLM's."""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

from lmetric.engines.endpoints import at_rank
from lmetric.engines.errors import EngineStartError

_END = (2**64 - 1).to_bytes(8, "big")


Message = Callable[[tuple[Any, ...], int], dict[str, Any]]


def vllm_message(event: tuple[Any, ...], block_tokens: int) -> dict[str, Any]:
    """The map that vLLM sends for an event of the engine model."""
    match event:
        case ("stored", medium, parent, hashes, tokens, salt):
            extra_keys: list[list[str] | None] = [None] * len(hashes)
            if salt is not None and parent is None:
                extra_keys[0] = [salt]
            return {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": block_tokens,
                "lora_id": None,
                "medium": medium,
                "lora_name": None,
                "extra_keys": extra_keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case ("removed", medium, block):
            return {"type": "BlockRemoved", "block_hashes": [block], "medium": medium, "group_idx": 0}
        case _:
            return {"type": "AllBlocksCleared"}


def open_socket(socket: zmq.Socket[bytes], endpoint: str, bind: bool, what: str = "KV events") -> str:
    """Binds or connects. Returns the endpoint, with the actual port instead of 0 or *."""
    try:
        if not bind:
            socket.connect(endpoint)
            return endpoint
        chosen = endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint
        socket.bind(chosen)
    except zmq.ZMQError as error:
        verb = "bind" if bind else "connect to"
        reason = zmq.strerror(error.errno or 0)
        if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT):
            reason = "expected tcp://HOST:PORT or ipc://PATH"
        raise EngineStartError(f"cannot {verb} {what} endpoint {endpoint!r}: {reason}") from error
    if not chosen.endswith(":*"):
        return endpoint
    port = bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode().rpartition(":")[2]
    return f"{chosen[:-1]}{port}"


def _at_rank(endpoint: str, rank: int) -> str:
    """A rank adds its number to the port, unless any port will do."""
    return endpoint if endpoint.endswith((":0", ":*")) else at_rank(endpoint, rank)


class KvFeed:
    """Publishes batches of events, and plays past ones again to those who ask."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        topic: str,
        buffer_steps: int,
        block_tokens: int,
        rank: int = 0,
        clock_ahead_seconds: float = 0.0,
        message: Message = vllm_message,
    ) -> None:
        self._topic = topic.encode()
        self._message = message
        self._block_tokens = block_tokens
        self._rank = rank
        self._ahead = clock_ahead_seconds
        self._sequence = 0
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(100_000)
        self._replay: zmq.Socket[bytes] | None = None
        self._watched: int | None = None
        try:
            bind = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
            self.endpoint = open_socket(self._publisher, _at_rank(endpoint, rank), bind)
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # A replay is longer than any mark, and a ROUTER drops what is over it.
                self._replay.set_hwm(0)
                self.replay_endpoint = open_socket(self._replay, _at_rank(replay_endpoint, rank), True)
        except EngineStartError:
            self._context.destroy(linger=0)
            raise
        if self._replay is not None:
            self._watched = int(self._replay.getsockopt(zmq.FD))
            asyncio.get_running_loop().add_reader(self._watched, self._answer)

    def publish(self, events: list[tuple[Any, ...]]) -> None:
        """Sends the events of one step as a batch."""
        told = [self._message(event, self._block_tokens) for event in events]
        batch = [time.time() + self._ahead, told, self._rank]
        frame, payload = self._sequence.to_bytes(8, "big"), msgpack.packb(batch)
        self._sequence += 1
        self._past.append((frame, payload))
        self._publisher.send_multipart((self._topic, frame, payload), zmq.NOBLOCK)

    def close(self) -> None:
        """Closes the sockets."""
        if self._watched is not None:
            asyncio.get_running_loop().remove_reader(self._watched)
        self._context.destroy(linger=100)

    def _answer(self) -> None:
        """Plays batches again for every request that has come: ZMQ signals only the edge, so all
        are read."""
        assert self._replay is not None
        while int(self._replay.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            client, *frames = self._replay.recv_multipart()
            if len(frames) != 2 or len(frames[1]) != 8:
                continue  # not a request for a replay: nobody there would understand an answer
            for frame, payload in list(self._past):
                if frame >= frames[1]:  # big-endian, so bytes order as numbers do
                    self._replay.send_multipart((client, b"", self._topic, frame, payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))
