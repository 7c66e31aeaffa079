"""The demo: compares policies on a slice of a real trace, with emulated engines and empty
caches."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import aiohttp
import numpy as np
import orjson

from lmetric._core import LmetricError
from lmetric.defaults import SLICE
from lmetric.engines.embedded import EmbeddedEngines, stop_process
from lmetric.engines.emulated import EngineOptions
from lmetric.engines.emulated.options import BOTH_WAYS
from lmetric.profiles import load_profile
from lmetric.replay import Client, Player, Record, Report, Slo, summarize
from lmetric.sim.prompts import PromptWriter
from lmetric.sim.run import simulate
from lmetric.sim.synthetic import read_synthetic
from lmetric.sim.traces import Trace, load_trace

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.5
_OVERHEAD_SECONDS = 5.0  # to start and stop engines and router, on two cores
# On the engines' clock, at the server's default interval.
_SHARING_SECONDS = 0.1


class DemoError(LmetricError):
    """A part of the demo did not start or did not stay up."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of the demo, equal for all policies."""

    policies: Sequence[str]
    engines: int
    profile: str
    clock_speed: float  # of the engines' clock relative to real time
    speed: float  # arrival rate on the engines' clock relative to the trace
    requests: int
    max_input_tokens: int | None
    priorities: Sequence[str] = ("none",)
    source: str | None = None  # trace: a file or a description; None: the shipped slice
    max_sequences: int | None = None  # batch size of an engine; None: as in the profile
    routers: int = 1  # number of routers; each request arrives at one of them

    @property
    def runs(self) -> list[tuple[str, str, str]]:
        """Label, policy and priority of each run."""
        pairs = list(product(self.policies, self.priorities))
        named = [policy if len(self.priorities) == 1 else f"{policy}, {order}" for policy, order in pairs]
        return [(label, *pair) for label, pair in zip(named, pairs, strict=True)]

    def expected_seconds(self, trace: Trace) -> float:
        """The expected duration of all runs in real time, from a simulation with `round_robin`."""
        profile = load_profile(self.profile)
        if self.max_sequences is not None:
            profile = profile.model_copy(update={"max_sequences": self.max_sequences})
        simulated = simulate(
            trace.faster(1 / self.clock_speed), policy="round_robin", instances=self.engines, profile=profile
        )
        ends = simulated.arrival_seconds + simulated.e2e_seconds
        seconds = float(np.nanmax(ends)) / self.clock_speed
        return len(self.runs) * (seconds + _OVERHEAD_SECONDS)

    def trace(self) -> Trace:
        """The trace, with arrivals in seconds of real time."""
        trace = load_trace(SLICE) if self.source is None else named_trace(self.source)
        if self.max_input_tokens is not None:
            trace = trace.at_most(self.max_input_tokens)
        return trace.first(self.requests).faster(self.speed * self.clock_speed)


@dataclass(frozen=True, slots=True)
class EngineState:
    """The metrics of one engine at one moment."""

    running: int
    waiting: int
    hit_rate: float | None  # of prompt tokens so far
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Moment:
    """The content of the live view."""

    policy: str
    player: Player
    engines: Sequence[EngineState | None]  # None: no answer
    clock_speed: float


async def run(
    setting: Setting, trace: Trace, show: Callable[[Moment], None]
) -> AsyncIterator[tuple[str, Report]]:
    """Runs the trace with each policy and priority, on new engines, and yields each report.

    After SIGINT, the report of the running policy is the last, marked as interrupted.
    """
    prompts = PromptWriter()
    for label, policy, priority in setting.runs:
        report = await _play((label, policy, priority), setting, trace, prompts, show)
        yield label, report
        if report.interrupted:
            return


async def _play(
    run: tuple[str, str, str],
    setting: Setting,
    trace: Trace,
    prompts: PromptWriter,
    show: Callable[[Moment], None],
) -> Report:
    label, policy, priority = run
    options = EngineOptions.model_validate(
        BOTH_WAYS
        | {
            "profile": setting.profile,
            "clock_speed": setting.clock_speed,
            "max_sequences": setting.max_sequences,
            "order": "fcfs" if priority == "none" else "priority",
        }
    )
    async with (
        EmbeddedEngines(setting.engines, options) as engines,
        contextlib.AsyncExitStack() as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
    ):
        flags = ["--experimental", "--policy", policy, "--priority", priority]
        flags += [word for engine in engines.urls for word in ("--engine", engine)]
        ports = _free_ports(setting.routers)
        if setting.routers > 1:
            interval = max(_SHARING_SECONDS / setting.clock_speed, 0.01)
            flags += ["--set", f"replicas.urls={[_url(port) for port in ports]}"]
            flags += ["--set", f"replicas.interval={interval:g}"]
        urls = [await stack.enter_async_context(_router(port, flags)) for port in ports]
        clients = [await stack.enter_async_context(Client(url)) for url in urls]
        player = Player(trace, _Drawn(clients), prompts)
        with _on_interrupt(player.stop):
            running = asyncio.create_task(player.run())
            while not running.done():
                states = await asyncio.gather(*(_state(session, engine) for engine in engines.urls))
                show(Moment(label, player, states, setting.clock_speed))
                await asyncio.wait([running], timeout=_POLL_SECONDS)
            await running
        return summarize(
            player.records,
            player.seconds,
            slo=Slo(),
            clock_speed=setting.clock_speed,
            interrupted=player.interrupted,
        )


def named_trace(source: str) -> Trace:
    """Loads a trace file, or makes a synthetic trace from a description that begins with a brace.

    Raises:
        LmetricError: the trace is invalid.
        OSError: the file cannot be read.
    """
    return read_synthetic(source).make() if source.lstrip().startswith("{") else load_trace(source)


@contextlib.contextmanager
def _on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Drawn:
    """Sends each request to a random router."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = clients
        self._rng = random.Random(0)

    def body(self, prompt: str | orjson.Fragment, output_tokens: int) -> bytes:
        return self._clients[0].body(prompt, output_tokens)

    async def send(self, body: bytes, record: Record, start: float) -> None:
        await self._rng.choice(self._clients).send(body, record, start)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def _router(port: int, flags: Sequence[str]) -> AsyncIterator[str]:
    """Runs `lmetric-router serve` as a child process; yields its URL."""
    command = [sys.executable, "-m", "lmetric.cli", "serve", "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        # A new session, so that Ctrl-C in the terminal reaches only the demo, which forwards it.
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, start_new_session=True
        )
        url = _url(port)
        try:
            if not await _ready(url, process):
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()
                raise DemoError("the router did not become ready: " + " / ".join(said[-3:]))
            yield url
        finally:
            await stop_process(process, _STOP_SECONDS)


async def _ready(url: str, process: asyncio.subprocess.Process) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while process.returncode is None and time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return True
            await asyncio.sleep(0.05)
    return False


async def _state(session: aiohttp.ClientSession, engine: str) -> EngineState | None:
    try:
        async with session.get(f"{engine}/metrics") as answer:
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError):
        return None
    figures: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, _, value = line.rpartition(" ")
            figures[name.partition("{")[0]] = float(value)
    queries = figures.get("vllm:prefix_cache_queries_total", 0.0)
    return EngineState(
        running=int(figures.get("vllm:num_requests_running", 0)),
        waiting=int(figures.get("vllm:num_requests_waiting", 0)),
        hit_rate=figures.get("vllm:prefix_cache_hits_total", 0.0) / queries if queries else None,
        kv_usage=figures.get("vllm:kv_cache_usage_perc", 0.0),
    )
