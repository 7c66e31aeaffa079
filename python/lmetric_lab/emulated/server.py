"""One emulated engine as a server: started, stopped, or run as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
from typing import Any

import orjson
import uvloop
from aiohttp import web

from lmetric._core import Engine
from lmetric.engines.errors import EngineStartError
from lmetric.profiles import Profile, ProfileError
from lmetric_lab.emulated.app import Api
from lmetric_lab.emulated.driver import Clock, Driver
from lmetric_lab.emulated.kv_feed import KvFeed, vllm_message
from lmetric_lab.emulated.metrics import EngineMetrics
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.ranks import Rank, consecutive_ports
from lmetric_lab.emulated.sglang import SglangApi, SglangMetrics, sglang_message
from lmetric_lab.emulated.text import shared_text
from lmetric_lab.queueing import HostTier, Swap

_DRAIN_SECONDS = 2.0
KV_BYTES_PER_TOKEN = (
    131_072  # where the profile has none: a model of 8B parameters with 8 KV heads, in 16 bits
)


class EngineServer:
    """An emulated engine in this event loop: ``async with EngineServer(options) as engine:
    engine.url``.

    Raises:
        EngineStartError: the port is in use, an endpoint cannot be bound, the profile does not fit.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._ranks: list[Rank] = []
        self._api: Api | None = None

    async def start(self) -> None:
        """Binds and serves."""
        options, text = self.options, shared_text()
        try:
            profile = options.resolved_profile()
        except ProfileError as error:
            raise EngineStartError(str(error)) from error
        capacity = profile.cache_blocks * profile.block_tokens
        max_model_len = options.max_model_len or capacity
        if max_model_len > capacity and options.admission == "vllm":
            message = f"max_model_len is {max_model_len} tokens, but the KV blocks hold {capacity}"
            raise EngineStartError(f"{message}: lower it or raise cache_blocks")
        try:
            events, replay = options.kv_events_endpoint, options.kv_events_replay_endpoint
            if options.api == "sglang":  # whose pages name the port of the first rank alone
                events = events and consecutive_ports(events, options.ranks)
                replay = replay and consecutive_ports(replay, options.ranks)
            for number in range(options.ranks):
                self._ranks.append(self._rank(number, profile, events, replay))
        except EngineStartError:
            await self.stop()
            raise
        make_api = SglangApi if options.api == "sglang" else Api
        api = make_api(
            options,
            ranks=tuple(self._ranks),
            text=text,
            max_model_len=max_model_len,
            kv_bytes_per_token=profile.kv_bytes_per_token or KV_BYTES_PER_TOKEN,
        )
        self._api = api
        try:
            await api.start()
        except EngineStartError:
            await self.stop()
            raise
        self._runner = web.AppRunner(
            api.application(), access_log=None, handler_cancellation=True, shutdown_timeout=_DRAIN_SECONDS
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, options.host, options.port, backlog=1024).start()
        except OSError as error:
            await self.stop()
            if error.errno == errno.EADDRINUSE:
                hint = (
                    f"port {options.port} on {options.host} is in use; choose another, or 0 for any free one"
                )
                raise EngineStartError(hint) from error
            reason = f"cannot listen on {options.host}:{options.port}: {error.strerror or error}"
            raise EngineStartError(reason) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _rank(self, number: int, profile: Profile, events: str | None, replay: str | None) -> Rank:
        options, text = self.options, shared_text()
        sglang = options.api == "sglang"
        feed = None
        if options.kv_events and events is not None:
            feed = KvFeed(
                events,
                replay,
                topic=options.kv_events_topic,
                buffer_steps=options.kv_events_buffer_steps,
                block_tokens=profile.block_tokens,
                rank=number,
                clock_ahead_seconds=options.clock_ahead_seconds,
                message=sglang_message if sglang else vllm_message,
            )
        engine = Engine(
            profile.constants(),
            text.words,
            text.vocabulary,
            admission=options.admission,
            order=options.order,
            order_slo_seconds=options.order_slo,
            swap=None if (swap := Swap.of(options.preempt)) is None else swap.constants(profile),
            host_tier=None if (tier := HostTier.of(options.host_tier)) is None else tier.constants(profile),
            kv_events=feed is not None,
        )
        cache_config = {
            "block_size": str(profile.block_tokens),
            "enable_prefix_caching": "True",
            "num_gpu_blocks": str(profile.cache_blocks),
        }
        if not sglang:  # vLLM repeats the blocks of all ranks together for each rank
            cache_config |= {
                "effective_attention_block_size": str(profile.block_tokens),
                "kv_cache_size_tokens": str(profile.cache_blocks * profile.block_tokens),
                "num_gpu_blocks": str(profile.cache_blocks * options.ranks),
            }
        make_metrics = SglangMetrics if sglang else EngineMetrics
        metrics = make_metrics(options.model, cache_config, engine.load, number)
        driver = Driver(engine, Clock(options.clock_speed), metrics, feed.publish if feed else None)
        return Rank(driver, metrics, feed)

    async def stop(self) -> None:
        """Ends running requests with finish_reason abort, then the server."""
        for rank in self._ranks:
            rank.driver.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._api is not None:
            await self._api.stop()
        for rank in self._ranks:
            if rank.kv_feed is not None:
                rank.kv_feed.close()
        self._ranks.clear()

    def description(self) -> dict[str, Any]:
        """The content of the line on standard output when the engine is ready."""
        feed = self._ranks[0].kv_feed
        return {
            "event": "ready",
            "url": self.url,
            "model": self.options.model,
            "pid": os.getpid(),
            "kv_events_endpoint": feed.endpoint if feed else None,
            "kv_events_replay_endpoint": feed.replay_endpoint if feed else None,
        }

    async def __aenter__(self) -> EngineServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def _serve(options: EngineOptions) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    async with EngineServer(options) as server:
        # All objects so far live as long as the process, so the garbage collector can skip them.
        gc.collect()
        gc.freeze()
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.buffer.write(orjson.dumps(server.description(), option=orjson.OPT_APPEND_NEWLINE))
            sys.stdout.flush()
        if options.exit_with_parent:
            # Input is ignored. Its end means that the parent has ended.
            loop.add_reader(0, lambda: None if os.read(0, 4096) else over.set())
        await over.wait()
        if options.exit_with_parent:
            loop.remove_reader(0)


def run_engine(options: EngineOptions) -> None:
    """Runs an engine until SIGINT or SIGTERM; prints one JSON line (`url`, ...) on standard output
    when it is ready.

    Raises:
        EngineStartError: it cannot start; the message is one line.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    uvloop.run(_serve(options))
