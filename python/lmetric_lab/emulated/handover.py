"""KV transfers between emulated engines, with the external behavior of vLLM's NIXL and SGLang's
bootstrap.

No data moves, because these engines have no KV cache. Over a side channel, the decode engine asks
the prefill engine whether it still holds the prompt, and waits for the transfer time. It gets no
other information. Failures are the same as in real engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from lmetric.engines.errors import EngineStartError

_CONNECT_SECONDS = 2.0
JSON = dict[str, Any]


class PeerError(Exception):
    """The other engine is not there, is another one, or has given up; says which."""


def digest(tokens: array[int], count: int) -> str:
    """Stands for the KV cache of the first `count` tokens."""
    return hashlib.blake2b(tokens[:count].tobytes(), digest_size=16).hexdigest()


class SideChannel:
    """Where other engines ask: a line of JSON each way, one question a connection."""

    def __init__(self, answer: Callable[[JSON], Awaitable[JSON]]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self.host = ""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listens. Raises EngineStartError."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            why = error.strerror or error
            raise EngineStartError(f"cannot listen for other engines on {host}:{port}: {why}") from error
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        """Leaves those who ask without an answer."""
        if self._server is not None:
            self._server.close()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        try:
            question = orjson.loads(await reader.readline())
            answering = asyncio.ensure_future(self._answer(question))
            # The other engine can disconnect before the answer.
            left = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait((answering, left), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    writer.write(orjson.dumps(answering.result()) + b"\n")
                    await writer.drain()
            finally:
                for future in (answering, left):
                    future.cancel()
                await asyncio.gather(answering, left, return_exceptions=True)
        except (ConnectionError, orjson.JSONDecodeError, PeerError):
            pass  # the end of the connection says it
        finally:
            writer.close()


async def ask(host: str, port: int, question: JSON) -> JSON:
    """An answer from an engine's side channel. Raises PeerError."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise PeerError(f"no engine at {host}:{port}: {error or 'no connection'}") from None
    try:
        writer.write(orjson.dumps(question) + b"\n")
        line = await reader.readline()
        if not line:
            raise PeerError(f"the engine at {host}:{port} broke off")
        answer: JSON = orjson.loads(line)
        return answer
    except (OSError, orjson.JSONDecodeError) as error:
        raise PeerError(f"the engine at {host}:{port} broke off: {error}") from None
    finally:
        writer.close()


@dataclass(slots=True)
class _Held:
    """Tokens whose KV cache waits to be fetched."""

    tokens: array[int]
    expiry: asyncio.TimerHandle


class WrongParams(Exception):
    """Parameters that crash an engine."""


class WrongCount(Exception):
    """A prompt that does not match the held blocks.

    Up to the end of a block, vLLM accepts it, and returns wrong text or crashes later. Here it is
    an error.
    """


class Nixl:
    """vLLM's NIXL connector in pull mode.

    `bidirectional`: an engine can fetch the front of a prompt, compute the rest, and transfer it
    again (vLLM's `bidirectional_kv_xfer`). Times are in seconds: `lease` for blocks of a first
    segment, `decoder_ttl` for blocks of a segment that fetched its whole prompt.
    """

    def __init__(
        self, block_tokens: int, lease: float, *, bidirectional: bool = False, decoder_ttl: float = 480.0
    ) -> None:
        self._block_tokens = block_tokens
        self._lease = lease
        self._decoder_ttl = decoder_ttl
        self.bidirectional = bidirectional
        self._held: dict[str, _Held] = {}
        self._next_block = 1
        self.engine_id = secrets.token_hex(16)
        self.expired = 0
        self.channel = SideChannel(self._pulled)

    @property
    def holding(self) -> int:
        """Requests whose blocks wait to be fetched."""
        return len(self._held)

    def after(self, asked: Mapping[str, Any], request_id: str, tokens: array[int]) -> JSON | None:
        """Holds what a request leaves, where its parameters ask for that; the `kv_transfer_params`
        of its answer. `tokens`: those with a KV cache, which are all but the last one generated."""
        if asked.get("do_remote_decode"):
            return self._hold(request_id, tokens, self._lease)
        if asked.get("do_remote_prefill") and self.bidirectional:
            return self._hold(request_id, tokens, self._decoder_ttl)
        return None

    def _hold(self, request_id: str, tokens: array[int], seconds: float) -> JSON:
        key = f"{request_id}-{secrets.token_hex(4)}"
        blocks = -(-len(tokens) // self._block_tokens)
        expiry = asyncio.get_running_loop().call_later(seconds, self._expire, key)
        self._held[key] = _Held(tokens, expiry)
        first, self._next_block = self._next_block, self._next_block + blocks
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(first, first + blocks))],
            "remote_engine_id": self.engine_id,
            "remote_request_id": key,
            "remote_host": self.channel.host,
            "remote_port": self.channel.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(tokens),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }

    def _expire(self, key: str) -> None:
        del self._held[key]
        self.expired += 1

    async def _pulled(self, question: JSON) -> JSON:
        """Answers a fetch of another engine. After the lease it returns the current content of the
        blocks."""
        if question["engine"] != self.engine_id:
            return {"known": False}
        held = self._held.pop(question["request"], None)
        if held is None:
            return {"known": True, "same": False}
        held.expiry.cancel()
        count = question["tokens"]
        same = count <= len(held.tokens) and question["digest"] == digest(held.tokens, count)
        return {"known": True, "same": same}

    def pulls(self, params: Mapping[str, Any], prompt: array[int]) -> int | None:
        """Tokens of the prompt that are to be fetched; 0: none, None: vLLM would wait for them for
        ever.

        Raises WrongCount, and WrongParams for what kills vLLM.
        """
        blocks, count = params.get("remote_block_ids"), params.get("remote_num_tokens")
        front = bool(params.get("do_remote_decode"))  # the rest of the prompt is computed here
        if front and not blocks:
            return 0
        if front and not self.bidirectional:
            return None
        if not front and not params.get("do_remote_prefill"):
            return 0
        names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        if not blocks or not count or not all(params.get(name) for name in names):
            raise WrongParams("do_remote_prefill without the blocks to fetch")
        if not front and len(prompt) > len(blocks[0]) * self._block_tokens:
            raise WrongParams("the prompt has more blocks than were computed for it")
        if len(prompt) < count or (not front and len(prompt) > count):
            least = "at least " if front else ""
            raise WrongCount(
                f"the prompt has {len(prompt)} tokens, and remote_num_tokens is {count}: it must have {least}"
                "as many"
            )
        return int(count)

    async def pull(self, params: Mapping[str, Any], prompt: array[int], count: int) -> bool:
        """Fetches the KV cache of a prompt's first tokens, as many as `pulls` says; whether it is
        theirs, which no real engine can tell. Raises PeerError."""
        question = {
            "engine": params["remote_engine_id"],
            "request": params["remote_request_id"],
            "tokens": count,
            "digest": digest(prompt, count),
        }
        answer = await ask(params["remote_host"], params["remote_port"], question)
        if not answer["known"]:
            raise PeerError(f"the engine at port {params['remote_port']} is not the one that was meant")
        return bool(answer["same"])


@dataclass(slots=True)
class Room:
    """Where prefill and decode of one request meet."""

    ready: asyncio.Future[array[int]]  # the prompt that was computed
    fetched: asyncio.Future[None]

    def decode_left(self, number: int) -> None:
        """The prefill side need not go on."""
        if not self.fetched.done():
            self.fetched.set_exception(PeerError(f"the decode engine left room {number}"))
            self.fetched.exception()  # nobody may be waiting


class Rooms:
    """SGLang's bootstrap: where prefill waits for decode."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._rooms: dict[int, Room] = {}
        self.channel = SideChannel(self._entered)

    @property
    def waiting(self) -> int:
        """Rooms that somebody is in."""
        return len(self._rooms)

    def enter(self, number: int) -> Room:
        """The room, whoever comes first."""
        if number not in self._rooms:
            loop = asyncio.get_running_loop()
            self._rooms[number] = Room(loop.create_future(), loop.create_future())
        return self._rooms[number]

    def leave(self, number: int) -> None:
        """The prefill side is done, or gives up."""
        room = self._rooms.pop(number, None)
        if room is not None:
            room.ready.cancel()

    async def give(self, number: int, prompt: array[int]) -> None:
        """Waits until the decode side has fetched this prompt's KV cache. Raises PeerError."""
        room = self.enter(number)
        room.ready.set_result(prompt)
        try:
            async with asyncio.timeout(self._patience_seconds):
                await asyncio.shield(room.fetched)
        except TimeoutError:
            raise PeerError(f"no decode engine came to room {number}") from None

    async def _entered(self, question: JSON) -> JSON:
        number = question["room"]
        room = self.enter(number)
        try:
            async with asyncio.timeout(self._patience_seconds):
                prompt = await asyncio.shield(room.ready)
        except (TimeoutError, asyncio.CancelledError):
            gone = room.ready.cancelled()
            room.decode_left(number)
            if self._rooms.get(number) is room:
                del self._rooms[number]
            if gone:
                raise PeerError(f"the prefill engine left room {number}") from None
            raise
        room.fetched.set_result(None)
        count = question["tokens"]
        return {"same": count == len(prompt) and question["digest"] == digest(prompt, count)}


async def fetch(host: str, port: int, room: int, prompt: array[int]) -> None:
    """Fetches a prompt's KV cache from a room at a prefill engine. Raises PeerError."""
    question = {"room": room, "tokens": len(prompt), "digest": digest(prompt, len(prompt))}
    if not (await ask(host, port, question))["same"]:
        raise PeerError(f"room {room} at {host}:{port} is that of another prompt")
