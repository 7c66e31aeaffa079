"""An emulated SGLang: endpoints, metrics, KV events and pushed load, with the same engine model.

It follows the sources of SGLang 0.5.23 and was never compared with a running SGLang. It shows only
that the router follows the protocol in those sources. It has the endpoints that the router and
`lmetric-router doctor` use. Completions and chats are those of the emulated vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from importlib.metadata import version
from typing import Any

import msgpack
import orjson
import zmq
from aiohttp import web
from prometheus_client.metrics_core import Metric

from lmetric.engines.endpoints import at_rank
from lmetric_lab.emulated.app import Api
from lmetric_lab.emulated.errors import EngineError
from lmetric_lab.emulated.generation import Generation
from lmetric_lab.emulated.handover import PeerError, Rooms, fetch
from lmetric_lab.emulated.kv_feed import open_socket
from lmetric_lab.emulated.metrics import EngineMetrics
from lmetric_lab.emulated.protocol import Body, Kind
from lmetric_lab.emulated.ranks import Rank, consecutive_ports
from lmetric_lab.emulated.text import TOKENIZER_PATH

_BOOTSTRAP_PORT = 8998  # where a request names none
SGLANG = "0.5.23"  # whose protocol this is
LOAD_TOPIC = "load"
_HEARTBEAT_SECONDS = 1.0  # an unchanged load is pushed again after this long
_LOOK_SECONDS = 0.05  # SGLang looks after steps; this looks twenty times a second


def sglang_message(event: tuple[Any, ...], block_tokens: int) -> dict[str, Any]:
    """The map that SGLang sends for an event of the engine model.

    Hashes are signed, and the salt stands beside them. Blocks that follow each other come in one
    event (in earlier versions each in its own).
    """
    match event:
        case ("stored", _, parent, hashes, tokens, salt):
            stored = {
                "type": "BlockStored",
                "block_hashes": [_signed(one) for one in hashes],
                "parent_block_hash": None if parent is None else _signed(parent),
                "token_ids": tokens,
                "block_size": block_tokens,
                "lora_id": None,
                "medium": "GPU",
            }
            return stored if salt is None else stored | {"cache_salt": salt}
        case ("removed", _, block):
            return {"type": "BlockRemoved", "block_hashes": [_signed(block)], "medium": "GPU"}
        case _:
            return {"type": "AllBlocksCleared"}


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


class SglangMetrics(EngineMetrics):
    """The metrics with SGLang's names."""

    prefix = "sglang:"
    rank_label = "dp_rank"

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        load, capacity = self._load(), int(self.cache_config["num_gpu_blocks"])
        page = int(self.cache_config["block_size"])
        queries = load["prefix_cache_queries"]
        for name, text, value in [
            ("num_running_reqs", "Running requests.", load["running"]),
            ("num_queue_reqs", "Waiting requests.", load["waiting"]),
            ("token_usage", "Share of the KV tokens in use.", load["kv_usage"]),
            ("num_used_tokens", "KV tokens in use.", round(load["kv_usage"] * capacity * page)),
            ("max_total_num_tokens", "KV tokens there are.", capacity * page),
            ("page_size", "Tokens of a page.", page),
            ("cache_hit_rate", "Cached share of the prompts.", load["prefix_cache_hits"] / max(queries, 1)),
        ]:
            yield self._gauge(name, text, value)
        for name, text, value in [
            ("prompt_tokens", "Prompt tokens.", load["prompt_tokens"]),
            ("cached_tokens", "Those out of the cache.", load["cached_prompt_tokens"]),
            ("generation_tokens", "Output tokens.", load["generation_tokens"]),
            ("num_requests", "Requests ended.", load["finished"]),
            ("num_aborted_requests", "Requests dropped.", load["aborted"]),
        ]:
            yield self._counter(name, text, value)
        yield self._gauge("num_decode_transfer_queue_reqs", "Waiting for a KV cache.", self.transfers)
        for name, text, measured in [
            ("time_to_first_token_seconds", "Arrival to first token.", None),
            ("inter_token_latency_seconds", "Between tokens of one request.", None),
            ("e2e_request_latency_seconds", "Arrival to last token.", None),
            ("queue_time_seconds", "Arrival to the first step that runs it.", "request_queue_time_seconds"),
        ]:
            yield self._histogram(name, text, measured)


class SglangApi(Api):
    """The handlers of one engine, with SGLang's pages."""

    _full_reports = False
    _echoes_ids = False
    _rooms: Rooms | None = None

    async def start(self) -> None:
        """Opens what decode engines and routers need. Raises EngineStartError."""
        options, count = self._options, len(self._ranks)
        self._load_feeds: list[LoadFeed] = []
        if options.load_publish_endpoint is not None:
            first = consecutive_ports(options.load_publish_endpoint, count)
            for number, rank in enumerate(self._ranks):
                self._load_feeds.append(LoadFeed(at_rank(first, number), partial(self._counts, rank), number))
        if options.role == "prefill":
            self._rooms = Rooms(options.kv_patience_seconds)
            await self._rooms.channel.start(options.host, options.kv_port)

    async def stop(self) -> None:
        """Closes it."""
        for feed in self._load_feeds:
            await feed.close()
        if self._rooms is not None:
            await self._rooms.channel.stop()

    def _rank_of(self, header: str | None, body: Body) -> Rank:
        """By the header; else a prefill engine follows the room, and others take the ranks in
        turn."""
        count = len(self._ranks)
        if header is None:
            self._requests += 1
            turn = body.bootstrap_room if self._options.role == "prefill" else self._requests
            return self._ranks[(turn or 0) % count]
        try:
            number = int(header)
        except ValueError:
            message = f"Invalid X-Data-Parallel-Rank header: must be an integer, got '{header}'"
            raise EngineError(400, message) from None
        if not 0 <= number < count:
            raise EngineError(400, f"routed_dp_rank={number} out of range [0, {count})")
        return self._ranks[number]

    async def _run(self, generation: Generation, rank: Rank, priority: int, body: Body) -> None:
        """As the emulated vLLM's; halves of a request wait for each other."""
        room = body.bootstrap_room
        if self._options.role == "both":
            await super()._run(generation, rank, priority, body)
            return
        if room is None:
            raise EngineError(400, "Disaggregated request received without bootstrap room id")
        try:
            if self._rooms is not None:
                await self._prefill(self._rooms, room, generation, rank, priority, body)
            else:
                await self._decode(room, generation, rank, priority, body)
        except PeerError as error:
            raise EngineError(500, f"KVTransferError: {error}") from None

    async def _prefill(
        self,
        rooms: Rooms,
        number: int,
        generation: Generation,
        rank: Rank,
        priority: int,
        body: Body,
    ) -> None:
        """Produces exactly one token, and waits until the prompt is fetched."""
        generation.max_tokens = 1
        implied = number % len(self._ranks)
        if rank is not self._ranks[implied]:
            rooms.leave(number)
            raise PeerError(
                f"follow_bootstrap_room conflict: dispatched to dp_rank {self._ranks.index(rank)} but "
                f"bootstrap_room {number} implies dp_rank {implied}."
            )
        room = rooms.enter(number)
        running = asyncio.ensure_future(super()._run(generation, rank, priority, body))
        try:
            await asyncio.wait((running, room.fetched), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                room.fetched.result()  # raises: nobody can have fetched it yet
            await running
            await rooms.give(number, generation.shape.prompt)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            rooms.leave(number)

    async def _decode(
        self, number: int, generation: Generation, rank: Rank, priority: int, body: Body
    ) -> None:
        """Waits for the prompt's KV cache, then decodes."""
        prompt = generation.shape.prompt
        await fetch(body.bootstrap_host or "", body.bootstrap_port or _BOOTSTRAP_PORT, number, prompt)
        generation.fetched_tokens = len(prompt)
        await self._transfer(rank, len(prompt))
        await super()._run(generation, rank, priority, body)

    def _add_own(self, router: web.UrlDispatcher) -> None:
        router.add_get("/server_info", self._server_info)
        router.add_get("/get_server_info", self._server_info)
        router.add_get("/model_info", self._model_info)
        router.add_get("/get_model_info", self._model_info)
        router.add_get("/v1/loads", self._loads)
        router.add_get("/health_generate", self._health)
        router.add_route("*", "/flush_cache", self._reset_prefix_cache)

    def _refusal(self, error: EngineError) -> web.Response:
        """The error object stands bare in a plain answer."""
        fields = orjson.loads(error.body())["error"]
        return web.Response(
            status=error.status,
            body=orjson.dumps({"object": "error", **fields}),
            content_type="application/json",
        )

    def _answer_limit(self, prompt_tokens: int, body: Body, kind: Kind) -> int:
        """SGLang refuses a prompt and an answer that together are too long."""
        model, wanted = self._max_model_len, body.limit[1] or 0
        if prompt_tokens >= model:
            raise EngineError(
                400,
                f"The input ({prompt_tokens} tokens) is longer than the model's context length ({model} "
                "tokens).",
            )
        if prompt_tokens + wanted > model:
            raise EngineError(
                400,
                f"Requested token count exceeds the model's maximum context length of {model} tokens: "
                f"{prompt_tokens} of the prompt and {wanted} of the completion.",
            )
        return super()._answer_limit(prompt_tokens, body, kind)

    @staticmethod
    def _priority(_request: web.Request, priority: int) -> int:
        """Higher runs first here; the engine model runs lower first. There is no header for it."""
        return -priority

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self._options.model,
            "object": "model",
            "created": self._created,
            "owned_by": "sglang",
            "root": self._options.model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _model_info(self, _request: web.Request) -> web.Response:
        folder = str(TOKENIZER_PATH.parent)
        info = {
            "model_path": folder,
            "served_model_name": self._options.model,
            "tokenizer_path": folder,
            "is_generation": True,
            "disaggregation_mode": self._mode,
        }
        return web.json_response(info)

    @property
    def _mode(self) -> str:
        return "null" if self._options.role == "both" else self._options.role

    async def _server_info(self, _request: web.Request) -> web.Response:
        options = self._options
        events = None
        if (feed := self._ranks[0].kv_feed) is not None:
            events = _address(feed.endpoint, "endpoint_host", "endpoint_port_base")
        if events is not None and feed is not None:
            events |= {
                "publisher": "zmq",
                "topic": options.kv_events_topic,
                "block_size": self._page,
                "dp_size": len(self._ranks),
            }
            replay = feed.replay_endpoint and _address(feed.replay_endpoint, "", "replay_endpoint_port_base")
            if replay:
                events["replay_endpoint_port_base"] = replay["replay_endpoint_port_base"]
            if self._load_feeds:
                _, _, port = self._load_feeds[0].endpoint.rpartition(":")
                events |= {"load_endpoint_port_base": int(port), "load_topic": LOAD_TOPIC}
        info: dict[str, Any] = {
            "page_size": self._page,
            "dp_size": len(self._ranks),
            "max_total_num_tokens": self._page * self._pages,
            "disable_radix_cache": False,
            "enable_cache_report": options.cached_tokens,
            "enable_metrics": options.metrics,
            "enable_priority_scheduling": options.order == "priority",
            "schedule_low_priority_values_first": False,
            "kv_events": events,
            "internal_states": [],
            "disaggregation_mode": self._mode,
            "disaggregation_bootstrap_port": self._rooms.channel.port if self._rooms else _BOOTSTRAP_PORT,
            "version": f"{SGLANG}+lmetric.{version('lmetric-router')}",
        }
        return web.json_response(info)

    @cached_property
    def _sequences(self) -> int:
        return self._options.resolved_profile().max_sequences

    @property
    def _page(self) -> int:
        return int(self._ranks[0].metrics.cache_config["block_size"])

    @property
    def _pages(self) -> int:
        return int(self._ranks[0].metrics.cache_config["num_gpu_blocks"])

    async def _loads(self, request: web.Request) -> web.Response:
        if request.query.get("include", "all") not in ("core", "all"):
            raise EngineError(400, "include: core and all are what this stand-in has", "include")
        loads = {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "version": SGLANG,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [
                {"timestamp": time.time(), "dp_rank": number, "max_running_requests": self._sequences}
                | self._counts(rank)
                for number, rank in enumerate(self._ranks)
            ],
        }
        return web.json_response(loads)

    def _counts(self, rank: Rank) -> dict[str, float]:
        """A rank's load, under the names of /v1/loads."""
        load, capacity = rank.driver.engine.load(), self._page * self._pages
        used = round(load["kv_usage"] * capacity)
        return {
            "num_running_reqs": load["running"],
            "num_waiting_reqs": load["waiting"],
            "num_waiting_uncached_tokens": load["remaining_prefill_tokens"],
            "num_used_tokens": used,
            "num_total_tokens": used + load["remaining_prefill_tokens"],
            "max_total_num_tokens": capacity,
            "token_usage": load["kv_usage"],
        }


def _address(endpoint: str, host_key: str, port_key: str) -> dict[str, Any] | None:
    """Host and port of a tcp endpoint under these keys. Others are not told of."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    return {host_key: host, port_key: int(port)} if scheme == "tcp" else None


class LoadFeed:
    """Pushes the load of one rank over ZMQ as `LoadStat`: when it changed, and once a second."""

    def __init__(self, endpoint: str, counts: Callable[[], Mapping[str, float]], rank: int) -> None:
        self._counts = counts
        self._rank = rank
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._sequence = 0
        try:
            self.endpoint = open_socket(self._socket, endpoint, True, "load")
        except Exception:
            self._context.destroy(linger=0)
            raise
        self._task = asyncio.create_task(self._run(), name="load feed")

    async def close(self) -> None:
        """Stops it."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def _run(self) -> None:
        last: list[Any] = []
        sent_at = 0.0
        while True:
            stat, now = self._stat(), time.monotonic()
            if stat != last or now - sent_at >= _HEARTBEAT_SECONDS:
                frames = (LOAD_TOPIC.encode(), self._sequence.to_bytes(8, "big"), msgpack.packb(stat))
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                self._sequence += 1
                last, sent_at = stat, now
            await asyncio.sleep(_LOOK_SECONDS)

    def _stat(self) -> list[Any]:
        counts = self._counts()
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
        more = ("num_waiting_uncached_tokens", "num_total_tokens")
        # Then its limit of running requests, and two sums over time that nobody here reads.
        return ["LoadStat", *(counts[n] for n in names), self._rank, *(counts[n] for n in more), 0, 0, 0]
