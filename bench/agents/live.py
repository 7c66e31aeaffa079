"""Recorded agent sessions on emulated engines over HTTP: do policies keep the order that the
simulator gives them?

    python bench/agents/live.py sessions.jsonl.xz --policies lmetric,total_delay
    python bench/agents/live.py sessions.jsonl.xz --simulate
    python bench/agents/live.py sessions.jsonl.xz --simulate --draws 7 --programs observe

20 sessions are cut at 32,000 tokens, pauses at 20 s. Their prompts are written from the block
hashes. Each policy gets new engines and a router as `serve` starts it. Times are on the engines'
clock. `lag` is how far an engine was behind its clock at most, in real seconds.

`--draws N` simulates N draws of 20 sessions: the file's first ones, then random ones. Cells are
means over the draws, least and most in brackets. `held` is the mean time for which requests were
held.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import numpy as np
import orjson
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lmetric.profiles import load_profile
from lmetric_lab.demo import running_router
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.packed import open_packed
from lmetric_lab.ports import free_ports
from lmetric_lab.replay import Client, Player
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace

ENGINES = 4
SESSIONS = 20
LONGEST_TOKENS = 32_000  # of a prompt and its answer
LEAST_TURNS = 8
LONGEST_PAUSE_SECONDS = 20.0
START_SECONDS = 100.0  # in which the sessions begin
CACHE_TOKENS = 96_000  # of an engine: all contexts together need about 1.5 times the caches
BLOCK_TOKENS = 64
POLICIES = "round_robin,vllm,linear,lmetric,llmd_scorers,total_delay"


def cut(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The sessions without subagents, up to the turn that would be too long."""
    for line in lines:
        session = orjson.loads(line)
        turns = list(itertools.takewhile(is_short, session["requests"]))
        if len(turns) >= LEAST_TURNS:
            time = 0.0
            for turn in turns:
                pause = min(turn.get("think_time", 0.0), LONGEST_PAUSE_SECONDS)
                turn |= {"t": time + pause, "think_time": pause}
                time += pause + turn.get("api_time", 0.0)
            yield orjson.dumps(session | {"requests": turns})


def drawn(file: Path, draws: int) -> list[Trace]:
    """Traces of `SESSIONS` sessions: the first ones of the file, then random ones."""
    with open_packed(file) as opened:
        kept = list(itertools.islice(cut(opened), SESSIONS if draws == 1 else None))
    orders = [np.random.default_rng(seed).permutation(len(kept)) for seed in range(1, draws)]
    return [trace_of(kept[:SESSIONS])] + [trace_of([kept[i] for i in each[:SESSIONS]]) for each in orders]


def trace_of(kept: Sequence[bytes]) -> Trace:
    """The sessions as a trace, in this order."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "sessions.jsonl"
        file.write_bytes(b"\n".join(kept))
        return load_trace(file, session_rate=SESSIONS / START_SECONDS, block_tokens=BLOCK_TOKENS)


def is_short(turn: dict[str, Any]) -> bool:
    """Whether a turn is one of the agent itself and fits."""
    return "in" in turn and turn["in"] + turn["out"] <= LONGEST_TOKENS


def profile_file(folder: str, cache_tokens: int) -> str:
    """Writes the engines' profile: small caches."""
    profile = load_profile("independent-sim").in_blocks_of(BLOCK_TOKENS)
    profile = profile.model_copy(update={"cache_blocks": cache_tokens // BLOCK_TOKENS})
    path = Path(folder) / "engines.yaml"
    path.write_text(yaml.safe_dump(profile.model_dump(mode="json", exclude_none=True)))
    return str(path)


def simulated(trace: Trace, policy: str, profile: str, programs: str) -> tuple[float, float]:
    """Mean end to end in the simulator, and the mean hold, in seconds."""
    run = simulate(
        trace,
        policy=policy,
        instances=ENGINES,
        profile=load_profile(profile),
        admission="vllm",
        programs=programs,
    )
    return float(np.nanmean(run.e2e_seconds)), float(run.hold_seconds.mean())


async def live(trace: Trace, policy: str, profile: str, clock: float) -> tuple[float, float]:
    """Mean end to end over HTTP, in seconds of the engines' clock, and their greatest lag, in real
    seconds."""
    options = EngineOptions(profile=profile, clock_speed=clock, block_tokens=BLOCK_TOKENS)
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(EmbeddedEngines(ENGINES, options, kv_events=True))
        flags = ["--experimental", "--policy", policy]
        flags += [word for engine in engines.urls for word in ("--engine", engine)]
        url = await stack.enter_async_context(running_router(free_ports(1)[0], flags))
        client = await stack.enter_async_context(Client(url))
        player = Player(trace.faster(clock), client, PromptWriter().prompt)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        playing = asyncio.create_task(player.run())
        late = 0.0
        while not playing.done():
            late = max([late, *[await late_seconds(session, each) for each in engines.urls]])
            await asyncio.wait([playing], timeout=1.0)
        await playing
        failed = [record.error for record in player.records if record.error]
        if failed or len(player.records) < len(trace):
            raise SystemExit(f"{policy}: {len(failed)} of {len(trace)} requests failed, first: {failed[:1]}")
    taken = [record.last_token - record.due for record in player.records if record.last_token is not None]
    return float(np.mean(taken)) * clock, late


async def late_seconds(session: aiohttp.ClientSession, engine: str) -> float:
    """How far an engine is behind its clock now, in real seconds."""
    async with session.get(f"{engine}/metrics") as answer:
        metrics = text_string_to_metric_families(await answer.text())
    return next(each.samples[0].value for each in metrics if each.name == "lmetric_engine_late_seconds")


def pairs(simulation: dict[str, float], measured: dict[str, float]) -> Iterator[tuple[str, str, bool]]:
    """The pairs that differ by more than 10% in the simulator; whether they keep their order."""
    for one, other in itertools.combinations(simulation, 2):
        better, worse = sorted((one, other), key=lambda each: simulation[each])
        if simulation[worse] > 1.1 * simulation[better]:
            yield better, worse, measured[better] < measured[worse]


def main() -> None:
    """Prints a row per policy, and the pairs that change their order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--clock", type=float, default=4.0, help="speed of the engines' clock")
    parser.add_argument("--simulate", action="store_true", help="run no engines")
    parser.add_argument("--draws", type=int, default=1, help="with --simulate: draws of the sessions")
    parser.add_argument("--programs", default="auto", help="with --simulate: none, observe, auto or admit")
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS, help="of an engine")
    options = parser.parse_args()
    if not options.simulate and (options.draws, options.programs) != (1, "auto"):
        parser.error("--draws and --programs need --simulate")
    traces = drawn(options.file, options.draws)
    trace = traces[0]
    print(f"{len(trace)} requests, {trace.input_tokens.mean():,.0f} prompt tokens each")
    print("| policy | simulated, s | held, s | live, s | lag, s |\n| --- | ---: | ---: | ---: | ---: |")
    simulation, measured = {}, {}
    with TemporaryDirectory() as folder:
        profile = profile_file(folder, options.cache_tokens)
        for policy in options.policies.split(","):
            found = np.array([simulated(each, policy, profile, options.programs) for each in traces])
            simulation[policy] = float(found[:, 0].mean())
            spread = f" [{found[:, 0].min():.2f}, {found[:, 0].max():.2f}]" if len(traces) > 1 else ""
            cells = ["", ""]
            if not options.simulate:
                measured[policy], lag = asyncio.run(live(trace, policy, profile, options.clock))
                cells = [f"{measured[policy]:.2f}", f"{lag:.3f}"]
            held = f"{found[:, 1].mean():.2f}"
            row = [policy, f"{simulation[policy]:.2f}{spread}", held, *cells]
            print(f"| {' | '.join(row)} |", flush=True)
    if measured:
        kept = list(pairs(simulation, measured))
        changed = [f"{better} < {worse}" for better, worse, same in kept if not same]
        print(
            f"{len(kept)} pairs differ by more than 10%; change their order: {', '.join(changed) or 'none'}"
        )


if __name__ == "__main__":
    main()
