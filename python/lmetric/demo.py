"""The demo: a slice of a real trace, played under several policies over emulated engines with cold caches."""

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
import orjson

from lmetric._core import LmetricError
from lmetric.defaults import SLICE
from lmetric.engines.embedded import EmbeddedEngines, stop_process
from lmetric.engines.emulated import EngineOptions
from lmetric.engines.emulated.options import BOTH_WAYS
from lmetric.replay import Client, Player, Record, Report, Slo, summarize
from lmetric.sim.prompts import PromptWriter
from lmetric.sim.synthetic import read_synthetic
from lmetric.sim.traces import Trace, load_trace

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.5
# On the engines' clock, as seldom as a server's is on the wall's.
_SHARING_SECONDS = 0.1


class DemoError(LmetricError):
    """A part of the demo did not start or did not stay up."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, the same for every policy."""

    policies: Sequence[str]
    engines: int
    profile: str
    clock_speed: float  # of the engines' clock against the wall's
    speed: float  # arrivals on the engines' clock against the trace's
    requests: int
    max_input_tokens: int | None
    priorities: Sequence[str] = ("none",)
    source: str | None = None  # of the arrivals: a file, or a description; None: the shipped slice
    max_sequences: int | None = None  # of an engine's batch; None: the profile's
    routers: int = 1  # side by side; each request comes to one of them

    @property
    def runs(self) -> list[tuple[str, str, str]]:
        """Label, policy and priority of each."""
        pairs = list(product(self.policies, self.priorities))
        named = [policy if len(self.priorities) == 1 else f"{policy}, {order}" for policy, order in pairs]
        return [(label, *pair) for label, pair in zip(named, pairs, strict=True)]

    def trace(self) -> Trace:
        """The arrivals, in wall seconds."""
        trace = load_trace(SLICE) if self.source is None else named_trace(self.source)
        if self.max_input_tokens is not None:
            trace = trace.at_most(self.max_input_tokens)
        return trace.first(self.requests).faster(self.speed * self.clock_speed)


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine's own figures at one moment."""

    running: int
    waiting: int
    hit_rate: float | None  # of the prompt tokens looked up so far
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Moment:
    """What the live view shows."""

    policy: str
    player: Player
    engines: Sequence[EngineState | None]  # None: it did not answer
    clock_speed: float


async def run(setting: Setting, show: Callable[[Moment], None]) -> AsyncIterator[tuple[str, Report]]:
    """Play the trace under each policy and priority in turn; yields each one's report. Engines are fresh.

    After SIGINT the running policy's report is the last, marked as interrupted.
    """
    trace, prompts = setting.trace(), PromptWriter()
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
    """A trace's file, or the description of a synthetic one where it begins with a brace.

    Raises `LmetricError`, `OSError`.
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
    """Sends each request to one of several routers, drawn for it."""

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
    """`lmetric-router serve` as a process of its own, as a user would run it."""
    command = [sys.executable, "-m", "lmetric.cli", "serve", "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C in the terminal is for the demo to pass on.
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
