"""The demo: compares policies on a slice of a real trace or on agent programs, with emulated
engines and empty caches."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric._core import LmetricError
from lmetric.engines.embedded import stop_process
from lmetric.profiles import Profile, load_profile
from lmetric_lab.defaults import AGENTS_PROFILE, SLICE, TOUR_ENGINES
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.emulated.options import BOTH_WAYS
from lmetric_lab.ports import free_ports
from lmetric_lab.replay import Client, Player, Record, Report, Slo, summarize, summarize_programs
from lmetric_lab.sim.agents import AgentsTrace
from lmetric_lab.sim.comparison import Comparison, compare
from lmetric_lab.sim.distributions import LogNormal, Quantiles
from lmetric_lab.sim.programs import working_set_tokens
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import read_synthetic
from lmetric_lab.sim.traces import FINISH, Trace, load_trace

# The tour: simulations, then agents on engines in real time. A slower clock follows if the share
# of the mean TTFT that the machine adds is above the bound.
CLOCK_SPEEDS = (10.0, 5.0, 2.0)
CHECK_SECONDS = 8.0
MACHINE_SHARE = 1 / 3

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.5
_OVERHEAD_SECONDS = 5.0  # to start and stop engines and router, on two cores
# On the engines' clock, at the server's default interval.
_SHARING_SECONDS = 0.1

# Agents: the working set of all live programs over all caches, the smallest cache in longest
# contexts, and a cache that holds all contexts.
PRESSURE = 1.1
_LEAST_CONTEXTS = 1.2
_ENDLESS_BLOCKS = 1_000_000
# Times of admission, in seconds of the engines' clock.
_ADMISSION_SECONDS = {
    "forget_seconds": 30.0,
    "backfill_seconds": 120.0,
    "others_seconds": 15.0,
}
# The contexts are short. Clients name sessions only for the policy `session_affinity`. No program
# is refused, so that all runs complete the same programs.
_ADMISSION = {"min_tokens": 512, "sessions": False, "max_hold_seconds": 3600.0}


class DemoError(LmetricError):
    """A part of the demo did not start or did not stay up."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A run: its name, and the settings of its router."""

    label: str
    policy: str
    priority: str = "none"
    programs: Mapping[str, Any] = field(default_factory=dict)  # settings of `programs: admit`; empty: observe

    def flags(self) -> list[str]:
        """The router's flags."""
        flags = ["--experimental", "--policy", self.policy, "--priority", self.priority]
        if self.programs:
            settings = ",".join(
                f"{name}={orjson.dumps(each).decode()}" for name, each in self.programs.items()
            )
            flags += ["--programs", "admit", "--programs-settings", settings]
        else:
            flags += ["--programs", "observe"]
        return flags


@dataclass(frozen=True, slots=True)
class Memory:
    """The caches of a run with agent programs.

    Attributes:
        cache_blocks: blocks of each engine.
        min_computed_tokens: prompt tokens of each request that any cache must compute.
    """

    cache_blocks: int
    min_computed_tokens: NDArray[np.int64]


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
    agents: bool = False  # play agent programs on engines with small caches

    @property
    def runs(self) -> list[Arm]:
        """The runs, in order."""
        if self.agents:
            # The router accepts no shorter time to forget than 1 s.
            times = {name: max(1.0, each / self.clock_speed) for name, each in _ADMISSION_SECONDS.items()}
            return [
                Arm("lmetric", "lmetric"),
                Arm("sticky sessions", "session_affinity"),
                Arm("lmetric, admission", "lmetric", programs=_ADMISSION | times),
            ]
        pairs = list(product(self.policies, self.priorities))
        named = [policy if len(self.priorities) == 1 else f"{policy}, {order}" for policy, order in pairs]
        return [Arm(label, *pair) for label, pair in zip(named, pairs, strict=True)]

    @property
    def _profile(self) -> Profile:
        profile = load_profile(self.profile)
        if self.max_sequences is not None:
            profile = profile.model_copy(update={"max_sequences": self.max_sequences})
        return profile

    def expected_seconds(self, trace: Trace) -> float:
        """The expected duration of all runs in real time, from simulations: one of each run with
        agents, else one with `round_robin`."""
        slow = trace.faster(1 / self.clock_speed)
        if self.agents:
            blocks = self.memory(trace).cache_blocks
            profile = self._profile.model_copy(update={"cache_blocks": blocks})
            runs = [
                simulate(
                    slow,
                    policy=arm.policy,
                    instances=self.engines,
                    profile=profile,
                    admission="vllm",
                    programs={"kind": "admit", **_ADMISSION, **_ADMISSION_SECONDS}
                    if arm.programs
                    else "none",
                )
                for arm in self.runs
            ]
        else:
            runs = [simulate(slow, policy="round_robin", instances=self.engines, profile=self._profile)]
            runs *= len(self.runs)
        ends = [float(np.nanmax(run.arrival_seconds + run.e2e_seconds)) for run in runs]
        return sum(end / self.clock_speed + _OVERHEAD_SECONDS for end in ends)

    def memory(self, trace: Trace) -> Memory:
        """The caches of agent programs: all programs together need `PRESSURE` times their size."""
        profile = self._profile.model_copy(update={"cache_blocks": _ENDLESS_BLOCKS})
        slow = trace.faster(1 / self.clock_speed)
        run = simulate(slow, policy="lmetric", instances=self.engines, profile=profile, admission="vllm")
        assert run.min_computed_tokens is not None
        needed = working_set_tokens(slow, run, (0.0, 1.0)) / self.engines / PRESSURE
        longest = _LEAST_CONTEXTS * int((trace.input_tokens + trace.output_tokens).max())
        return Memory(round(max(needed, longest) / profile.block_tokens), run.min_computed_tokens)

    def trace(self) -> Trace:
        """The trace, with arrivals in seconds of real time."""
        if self.agents:
            return programs(self.engines, load_profile(self.profile).block_tokens).faster(self.clock_speed)
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
    memory = setting.memory(trace) if setting.agents else None
    for arm in setting.runs:
        report = await _play(arm, setting, trace, memory, prompts, show)
        yield arm.label, report
        if report.interrupted:
            return


async def _play(
    arm: Arm,
    setting: Setting,
    trace: Trace,
    memory: Memory | None,
    prompts: PromptWriter,
    show: Callable[[Moment], None],
) -> Report:
    options = _engine_options(setting, memory, "fcfs" if arm.priority == "none" else "priority")
    async with (
        EmbeddedEngines(setting.engines, options, kv_events=memory is not None) as engines,
        contextlib.AsyncExitStack() as stack,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
    ):
        flags = arm.flags()
        flags += [word for engine in engines.urls for word in ("--engine", engine)]
        ports = free_ports(setting.routers)
        if setting.routers > 1:
            interval = max(_SHARING_SECONDS / setting.clock_speed, 0.01)
            flags += ["--set", f"replicas.urls={[_url(port) for port in ports]}"]
            flags += ["--set", f"replicas.interval={interval:g}"]
        urls = [await stack.enter_async_context(running_router(port, flags)) for port in ports]
        clients = [await stack.enter_async_context(Client(url)) for url in urls]
        told = {} if memory is None else {"fields": partial(_agent_fields, trace)}
        player = Player(trace, _Drawn(clients), prompts.prompt, **told)
        with _on_interrupt(player.stop):
            running = asyncio.create_task(player.run())
            while not running.done():
                states = await asyncio.gather(*(_state(session, engine) for engine in engines.urls))
                show(Moment(arm.label, player, states, setting.clock_speed))
                await asyncio.wait([running], timeout=_POLL_SECONDS)
            await running
        report = summarize(
            player.records,
            player.seconds,
            slo=Slo(),
            clock_speed=setting.clock_speed,
            interrupted=player.interrupted,
        )
        if memory is None:
            return replace(report, added_ttft_seconds=await _added_ttft(session, engines.urls, report))
        figures = summarize_programs(
            trace,
            player.records,
            memory.min_computed_tokens,
            clock_speed=setting.clock_speed,
            longest_hold_seconds=await _longest_hold_seconds(session, urls),
        )
        return replace(report, programs=figures)


def _engine_options(setting: Setting, memory: Memory | None, order: str = "fcfs") -> EngineOptions:
    return EngineOptions.model_validate(
        BOTH_WAYS
        | {
            "profile": setting.profile,
            "clock_speed": setting.clock_speed,
            "max_sequences": setting.max_sequences,
            "order": order,
            "cache_blocks": None if memory is None else memory.cache_blocks,
        }
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """One workload of the tour: its name, and its policies on simulated engines, best first."""

    workload: str
    comparison: Comparison


def simulated(policies: Sequence[str]) -> list[Simulated]:
    """Compares policies on recorded chat and on agent programs. The result is always the same."""
    chat = compare(policies, SLICE, instances=8)
    profile = load_profile(AGENTS_PROFILE)
    agents = compare(
        policies,
        programs(TOUR_ENGINES, profile.block_tokens),
        instances=TOUR_ENGINES,
        profile=AGENTS_PROFILE,
        admission="vllm",
    )
    return [Simulated("chat", chat), Simulated("agents", agents)]


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Agents that play on emulated engines in real time.

    Attributes:
        report: times in seconds of the engines' clock.
        machine_share: the larger of two shares that a busy machine causes. The first is the time
            outside of the engines, of the mean TTFT. The second is the engines' mean lag behind
            their own clock, of the mean TPOT. None: no first token yet.
    """

    clock_speed: float
    report: Report
    machine_share: float | None

    @property
    def keeps_up(self) -> bool:
        """Whether the times are those of the engines, and not of a busy machine."""
        return self.machine_share is not None and self.machine_share <= MACHINE_SHARE


class LiveAgents:
    """The running engines and the router of a live part, with the player of its agents."""

    def __init__(
        self,
        setting: Setting,
        url: str,
        engines: Sequence[str],
        player: Player,
        client: aiohttp.ClientSession,
    ) -> None:
        self.url = url
        self.interrupted = False  # by Ctrl-C
        self._setting = setting
        self._engines = engines
        self._player = player
        self._client = client

    async def play(self, seconds: float) -> LiveRun:
        """Plays for some seconds. Ends early if the engines fall behind their own clock."""
        player = self._player
        began = time.monotonic()
        with _on_interrupt(self._interrupt):
            running = asyncio.create_task(player.run())
            while not running.done() and (passed := time.monotonic() - began) < seconds:
                await asyncio.wait([running], timeout=_POLL_SECONDS)
                if passed >= CHECK_SECONDS:
                    state = await self._state()
                    # Twice the bound: a short time has few requests.
                    if state.machine_share is not None and state.machine_share > 2 * MACHINE_SHARE:
                        break
            player.stop()
            await running
        return await self._state()

    def _interrupt(self) -> None:
        self.interrupted = True
        self._player.stop()

    async def _state(self) -> LiveRun:
        player, clock_speed = self._player, self._setting.clock_speed
        seconds = max(player.seconds, 1e-3)
        report = summarize(player.records, seconds, slo=Slo(), clock_speed=clock_speed, interrupted=False)
        added = await _added_ttft(self._client, self._engines, report)
        figures = await asyncio.gather(*(_figures(self._client, engine) for engine in self._engines))
        late = max((each or {}).get("lmetric_engine_mean_late_seconds", 0.0) for each in figures)
        ttft, tpot = report.ttft_seconds, report.tpot_seconds
        if added is None or ttft is None or tpot is None or not ttft.mean > 0 or not tpot.mean > 0:
            return LiveRun(clock_speed, report, None)
        # An engine that is late by a step changes what the router sees, and so where requests go.
        share = max(added / ttft.mean, late * clock_speed / tpot.mean)
        return LiveRun(clock_speed, report, share)


@contextlib.asynccontextmanager
async def live_agents(
    policy: str, clock_speed: float, port: int, *, seconds: float
) -> AsyncIterator[LiveAgents]:
    """Starts emulated engines, and a router before them at a port.

    ``seconds``: how long agents arrive, in real time.
    """
    setting = Setting(
        policies=[policy],
        engines=TOUR_ENGINES,
        profile=AGENTS_PROFILE,
        clock_speed=clock_speed,
        speed=1.0,
        requests=0,
        max_input_tokens=None,
        agents=True,
    )
    block_tokens = load_profile(setting.profile).block_tokens
    trace = programs(setting.engines, block_tokens, seconds=seconds * clock_speed).faster(clock_speed)
    options = _engine_options(setting, None)
    async with (
        EmbeddedEngines(setting.engines, options, kv_events=True) as engines,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
    ):
        flags = Arm(policy, policy).flags()
        flags += [word for engine in engines.urls for word in ("--engine", engine)]
        async with running_router(port, flags) as url, Client(url) as client:
            fields = partial(_agent_fields, trace)
            player = Player(trace, _Drawn([client]), PromptWriter().prompt, fields=fields)
            yield LiveAgents(setting, url, engines.urls, player, session)


def programs(engines: int, block_tokens: int, *, seconds: float = 50) -> Trace:
    """Agent programs that arrive in some seconds: about 7 per engine in 50 s, with a median of 9
    turns.

    Contexts are a tenth of those of coding agents, so that the machine can write and tokenize them.
    """
    return AgentsTrace(
        seed=1,
        instances=engines,
        rate=0.15,
        duration_seconds=seconds,
        system_prompts=(2000,),
        turns=LogNormal(p50=9, p90=11),
        input_tokens=LogNormal(p50=700, p90=1300),
        output_tokens=LogNormal(p50=30, p90=50),
        gap_seconds=LogNormal(p50=2, p99=20),
        gap_sigma=0.2,
        max_context_tokens=9000,
        fork_share=0.3,
        subagents=Quantiles(quantiles={0: 0.51, 1: 2.49}),  # 1 or 2
        subagent_turns=Quantiles(quantiles={0: 0.51, 1: 3.49}),  # 1 to 3
        chat_rate=0,
        block_tokens=block_tokens,
    ).make()


def named_trace(source: str) -> Trace:
    """Loads a trace file, or makes a synthetic trace from a description that begins with a brace.

    Raises:
        LmetricError: the trace is invalid.
        OSError: the file cannot be read.
    """
    return read_synthetic(source).make() if source.lstrip().startswith("{") else load_trace(source)


def _agent_fields(trace: Trace, index: int) -> dict[str, Any]:
    """The session of a request, and a stop string that ends its answer where the trace says so.

    All other answers end at `max_tokens`. So the finish reason tells which programs go on.
    """
    assert trace.sessions is not None
    assert trace.finish is not None
    fields: dict[str, Any] = {"session_id": str(trace.sessions[index])}
    if FINISH[trace.finish[index]] == "stop":  # each word of the engines begins with a space
        fields |= {"stop": [" "], "min_tokens": max(0, int(trace.output_tokens[index]) - 1)}
    return fields


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

    def body(self, prompt: str | orjson.Fragment, output_tokens: int, **fields: Any) -> bytes:
        return self._clients[0].body(prompt, output_tokens, **fields)

    async def send(self, body: bytes, record: Record, start: float) -> None:
        await self._rng.choice(self._clients).send(body, record, start)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def running_router(
    port: int, flags: Sequence[str], program: Sequence[str] = ("-m", "lmetric_lab.tuned")
) -> AsyncIterator[str]:
    """Runs `lmetric-router serve` as a child process; yields its URL. Flags may set constants.

    ``program``: Python's words for another program that takes the flags of `lmetric-router`.
    """
    command = [sys.executable, *program, "serve", "--port", str(port), *flags]
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


async def _longest_hold_seconds(session: aiohttp.ClientSession, routers: Sequence[str]) -> float:
    longest = 0.0
    for router in routers:
        async with session.get(f"{router}/debug/programs") as answer:
            models = orjson.loads(await answer.read())
        longest = max([longest, *(each["longest_hold_seconds"] for each in models.values() if each)])
    return longest


async def _added_ttft(session: aiohttp.ClientSession, engines: Sequence[str], report: Report) -> float | None:
    """The mean TTFT of clients less that of the engines, which count by their own clock."""
    if report.ttft_seconds is None:
        return None
    seconds = requests = 0.0
    for engine in engines:
        figures = await _figures(session, engine) or {}
        seconds += figures.get("vllm:time_to_first_token_seconds_sum", 0.0)
        requests += figures.get("vllm:time_to_first_token_seconds_count", 0.0)
    return max(report.ttft_seconds.mean - seconds / requests, 0.0) if requests else None


async def _figures(session: aiohttp.ClientSession, engine: str) -> dict[str, float] | None:
    """The engine's metrics without labels; None: no answer."""
    try:
        async with session.get(f"{engine}/metrics") as answer:
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError):
        return None
    figures: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith(("vllm:", "lmetric_engine_")):
            name, _, value = line.rpartition(" ")
            figures[name.partition("{")[0]] = float(value)
    return figures


async def _state(session: aiohttp.ClientSession, engine: str) -> EngineState | None:
    figures = await _figures(session, engine)
    if figures is None:
        return None
    queries = figures.get("vllm:prefix_cache_queries_total", 0.0)
    return EngineState(
        running=int(figures.get("vllm:num_requests_running", 0)),
        waiting=int(figures.get("vllm:num_requests_waiting", 0)),
        hit_rate=figures.get("vllm:prefix_cache_hits_total", 0.0) / queries if queries else None,
        kv_usage=figures.get("vllm:kv_cache_usage_perc", 0.0),
    )
