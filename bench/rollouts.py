"""Routing policies on the rollouts of RL trainers: groups of long sessions, simulated.

    python bench/rollouts.py [--seeds 1 2 3] [--pressures 0.4 0.7 1 1.3]

A group has `SAMPLES` rollouts of one task, and ends with the slowest one. A *synchronous* step
starts all groups at once. In *asynchronous* training, each of `WORKERS` workers starts the next
group of its own list when the last one has ended.

The pressure is the mean working set of asynchronous training with caches without an end, divided by
all caches. A synchronous step has the same caches. No rollout is aborted: `late_tokens` is the part
of the answers in rollouts above `LIMIT_SECONDS`. Clients repeat refused requests. Sticky policies
free a session when its last turn is sent.

Sources: NovaSky-AI/SkyRL#1791 and vllm-project/router#235 (`sticky_least_loaded`),
PrimeIntellect-ai/prime-rl#3255 (hashing), verl-project/verl#6533 (gate) and #7435 (margin). Turns,
gaps and tokens are our choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common import about, write_result
from lmetric import policy_function
from lmetric.profiles import load_profile
from lmetric_lab.sim.distributions import LogNormal, draw, draw_whole
from lmetric_lab.sim.programs import working_set_tokens
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload, prepare

ENGINES = 8
WORKERS = 16  # groups at the same time
SAMPLES = 8  # rollouts of a group
ROUNDS = 6  # groups of a worker in asynchronous training
BLOCK_TOKENS = 64
PROFILE = load_profile("independent-sim").in_blocks_of(BLOCK_TOKENS)
ENDLESS_BLOCKS = 4_000_000  # of an engine: more than a run ever names
LIMIT_SECONDS = 1800.0  # of a rollout
WINDOW_SECONDS = 300.0  # of `worst_hits`
WINDOW_REQUESTS = 20  # least of an engine's window

SYSTEM_TOKENS = 1024  # shared by all groups
TASK_TOKENS = LogNormal(p50=1500, mean=2500, max=12_000)  # shared by a group
TURNS = LogNormal(p50=20, p90=45, min=2, max=80)  # of a group
TURNS_SIGMA = 0.4  # of the log-normal factor of a rollout's turns
TOOL_TOKENS = LogNormal(p50=500, mean=900, max=8000)
ANSWER_TOKENS = LogNormal(p50=250, mean=450, max=6000)
TOOL_SECONDS = LogNormal(p50=2, p99=60, max=300)
MAX_CONTEXT = 60_000

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Turn:
    """A request before the trace is sorted."""

    earliest: float  # arrival with immediate answers
    prompt: int
    answer: int
    blocks: list[int]  # ids of the prompt's whole blocks
    session: int
    think: float
    previous: Turn | None
    joins: list[Turn]
    number: int = -1


def new(ids: Iterator[int], tokens: int, blocks: list[int]) -> list[int]:
    """The ids of all whole blocks of a context of `tokens` that begins with `blocks`."""
    return blocks + list(islice(ids, max(0, tokens // BLOCK_TOKENS - len(blocks))))


def rollout(rng: np.random.Generator, first: Turn, turns: int, ids: Iterator[int]) -> Iterator[Turn]:
    """The turns of a rollout, at least one, up to `MAX_CONTEXT`."""
    tools = draw_whole(TOOL_TOKENS, turns, rng, least=1).tolist()
    answers = draw_whole(ANSWER_TOKENS, turns, rng, least=1).tolist()
    seconds = draw(TOOL_SECONDS, turns, rng).tolist()
    turn = replace(first, answer=answers[0])
    yield turn
    for tool, answer, think in zip(tools[1:], answers[1:], seconds[1:], strict=True):
        prompt = turn.prompt + turn.answer + tool
        if prompt + answer > MAX_CONTEXT:
            return
        blocks = new(ids, prompt, turn.blocks)
        turn = Turn(turn.earliest + think, prompt, answer, blocks, turn.session, think, turn, [])
        yield turn


def rollouts(seed: int, rounds: int) -> Trace:
    """The rollouts of all workers, each with `rounds` groups one after the other."""
    rng, ids = np.random.default_rng([seed, 52]), count()
    system = new(ids, SYSTEM_TOKENS, [])
    turns: list[Turn] = []
    ends: dict[int, list[Turn]] = {}
    for group in range(WORKERS * rounds):
        prompt = SYSTEM_TOKENS + int(draw_whole(TASK_TOKENS, 1, rng, least=1)[0])
        blocks = new(ids, prompt, system)
        typical = draw(TURNS, 1, rng)[0]
        joins = ends.get(group % WORKERS, [])
        begin = max((each.earliest for each in joins), default=0.0)
        ends[group % WORKERS] = []
        for session in range(group * SAMPLES, (group + 1) * SAMPLES):
            factor = np.exp(TURNS_SIGMA * rng.standard_normal())
            number = int(np.clip(round(typical * factor), TURNS.min, TURNS.max or np.inf))
            first = Turn(begin, prompt, 1, blocks, session, 0.0, None, joins)
            turns += rollout(rng, first, number, ids)
            ends[group % WORKERS].append(turns[-1])
    return traced(f"rollouts-{seed}", sorted(turns, key=lambda turn: turn.earliest), ids)


def traced(name: str, turns: list[Turn], ids: Iterator[int]) -> Trace:
    """The trace of sorted turns."""
    for number, turn in enumerate(turns):
        turn.number = number
    blocks = [turn.blocks + list(islice(ids, int(turn.prompt % BLOCK_TOKENS > 0))) for turn in turns]
    joins = [(turn.number, each.number) for turn in turns for each in turn.joins]
    previous = [-1 if turn.previous is None else turn.previous.number for turn in turns]
    return Trace(
        name=name,
        arrival_seconds=np.array([turn.earliest for turn in turns]),
        input_tokens=np.array([turn.prompt for turn in turns], np.int64),
        output_tokens=np.array([turn.answer for turn in turns], np.int64),
        hash_offsets=np.cumsum([0, *map(len, blocks)], dtype=np.int64),
        hash_ids=np.concatenate([np.array(each, np.uint64) for each in blocks]),
        block_tokens=BLOCK_TOKENS,
        sessions=np.array([turn.session for turn in turns], np.int64),
        previous=np.array(previous, np.int64),
        think_seconds=np.array([turn.think for turn in turns]),
        joins=np.array(joins, np.int64).reshape(-1, 2),
    )


@cache
def workload(seed: int, rounds: int) -> Workload:
    """The prepared trace of a seed."""
    return prepare(rollouts(seed, rounds), PROFILE)


def turns_of(trace: Trace) -> dict[float, int]:
    """The number of turns of each session, by the number that policies see as its tenant."""
    _, first, turns = np.unique(np.asarray(trace.sessions), return_index=True, return_counts=True)
    starts = replace(trace.take(first).open_loop(), arrival_seconds=np.arange(len(first), dtype=float))
    seen: list[float] = []

    def score(columns: Mapping[str, Any]) -> Floats:
        seen.append(float(columns["tenant"]))
        return np.zeros(len(columns["bs"]))

    policy = policy_function(score, reads=["tenant", "bs"], name="turns_of")
    simulate(starts, policy=policy, instances=1, profile=PROFILE, programs="none")
    return dict(zip(seen, turns[np.asarray(starts.sessions)].tolist(), strict=True))


def sticky(trace: Trace, moves: Callable[[Floats, int], bool] | None = None) -> dict[str, Any]:
    """Sessions that stay on their engine.

    Without `moves`, a new session goes to the engine with the fewest active sessions. With `moves`,
    it goes to the engine with the fewest requests, and again if `moves(bs, engine)` is true.
    """
    left, homes, ties = turns_of(trace), dict[float, int](), np.random.default_rng(0)

    def score(columns: Mapping[str, Any]) -> NDArray[np.bool_]:
        session, bs = float(columns["tenant"]), np.asarray(columns["bs"])
        load = bs if moves else np.bincount(list(homes.values()), minlength=len(bs))
        if session not in homes or (moves and moves(bs, homes[session])):
            homes[session] = int(np.argmin(load + 0.5 * ties.random(len(load))))
        home = homes[session]
        left[session] -= 1
        if not left[session]:
            del homes[session]  # POST /finish_session
        return np.arange(len(bs)) != home

    return {"policy": policy_function(score, reads=["tenant", "bs"], name="sticky")}


DEFAULT = {"policy": "total_delay", "programs": "auto", "guard": True}
FINAL = {**DEFAULT, "session_final": True}
PATIENT = {"kind": "auto", "max_hold_seconds": 3600.0}
POLICIES: dict[str, Callable[[Trace], dict[str, Any]]] = {
    "default": lambda trace: DEFAULT,
    "default, finish_session": lambda trace: FINAL,
    "default, max_hold_seconds": lambda trace: {**DEFAULT, "programs": PATIENT},
    "default, both": lambda trace: {**FINAL, "programs": PATIENT},
    "default, both, oldest first": lambda trace: {**FINAL, "programs": {**PATIENT, "shortest_first": False}},
    "programs: admit, finish_session": lambda trace: {**FINAL, "programs": "admit"},
    "programs: none": lambda trace: {**DEFAULT, "programs": "none"},
    "lmetric": lambda trace: {"policy": "lmetric"},
    "cache_aware": lambda trace: {"policy": "cache_aware"},
    "session hash": lambda trace: {"policy": "session_affinity"},
    "sticky_least_loaded": sticky,
    # verl's balancer as shipped, with the rule of #6533 (low thresholds), and with that of #7435.
    "verl": lambda trace: sticky(trace, lambda bs, home: False),
    "verl, gate": lambda trace: sticky(trace, lambda bs, home: bs.max() > max(bs.min() + 2, 1.2 * bs.min())),
    "verl, margin 2": lambda trace: sticky(trace, lambda bs, home: bs[home] > bs.min() + 2),
}
MODES = {"synchronous": 1, "asynchronous": ROUNDS}  # groups of a worker


def run(made: Workload, policy: str, blocks: int, seed: int) -> Run:
    """Simulates a policy on engines with this many blocks."""
    fixed: dict[str, Any] = {"instances": ENGINES, "admission": "vllm", "cached_answers": True}
    fixed |= {"output_known": False, "programs": "none", "seed": seed}
    fixed["profile"] = PROFILE.model_copy(update={"cache_blocks": blocks})
    return simulate(made, **{**fixed, **POLICIES[policy](made.trace)})


@cache
def working_set(seed: int) -> float:
    """The mean working set in tokens after the first groups. A group's prompt counts once."""
    endless = run(made := workload(seed, ROUNDS), "session hash", ENDLESS_BLOCKS, seed)
    groups = replace(made.trace, programs=np.asarray(made.trace.sessions) // SAMPLES)
    return working_set_tokens(groups, endless, (1 / ROUNDS, 1.0))


def figures(trace: Trace, played: Run) -> dict[str, float]:
    """The figures of a run. Raises RuntimeError if a request has no end."""
    ends, engine, sessions = played.finished_seconds, played.instance, np.asarray(trace.sessions)
    if np.isnan(ends).any() or played.min_computed_tokens is None:
        raise RuntimeError(f"{trace.name}: requests without an end")
    groups = spans(sessions // SAMPLES, played.arrival_seconds, ends)
    late = spans(sessions, played.arrival_seconds, ends) > LIMIT_SECONDS
    last = np.array([ends[engine == each].max(initial=0.0) for each in range(ENGINES)])
    inputs, outputs = trace.input_tokens, trace.output_tokens
    hits = np.bincount(engine, played.hit_tokens) / np.bincount(engine, inputs)
    token_seconds = np.bincount(engine, ends - played.first_token_seconds) / np.bincount(engine, outputs)
    window = (played.scheduled_seconds // WINDOW_SECONDS).astype(np.int64) * ENGINES + engine
    many = np.bincount(window) >= WINDOW_REQUESTS
    in_window = np.bincount(window, played.hit_tokens)[many] / np.bincount(window, inputs)[many]
    return {
        "makespan": float(ends.max()),
        "group_mean": float(groups.mean()),
        "group_max": float(groups.max()),
        "hits": float(played.hit_tokens.sum() / inputs.sum()),
        "engine_hits_min": float(hits.min()),
        "engine_hits_max": float(hits.max()),
        "worst_hits": float(in_window.min()),  # of an engine in a window
        "slowdown": float(token_seconds.max() / token_seconds.min()),  # slowest engine over fastest
        "recomputed": float((played.computed_tokens - played.min_computed_tokens).sum() / inputs.sum()),
        "late_tokens": float(outputs[late[sessions]].sum() / outputs.sum()),
        "idle": float(np.mean(1 - last / ends.max())),  # after an engine's last request
        "preemptions": float(played.preemptions.sum()),
        "hold": float(played.hold_seconds.max()),
    }


def spans(which: Ints, begin: Floats, end: Floats) -> Floats:
    """From the first begin to the last end of each session or group."""
    first, last = np.full(which.max() + 1, np.inf), np.zeros(which.max() + 1)
    np.minimum.at(first, which, begin)
    np.maximum.at(last, which, end)
    return last - first


def play(job: tuple[int, str, float, str]) -> dict[str, float]:
    """The figures of a seed, mode, pressure and policy."""
    seed, mode, pressure, policy = job
    blocks = round(working_set(seed) / pressure / ENGINES / BLOCK_TOKENS)
    made = workload(seed, MODES[mode])
    return figures(made.trace, run(made, policy, blocks, seed)) | {"cache": float(blocks * BLOCK_TOKENS)}


SHOWN = ("makespan", "group_mean", "group_max", "hits", "worst_hits", "recomputed", "late_tokens", "hold")


def main() -> None:
    """Prints a row per mode, pressure and policy: means over the seeds, the spread in brackets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pressures", type=float, nargs="+", default=[0.4, 0.7, 1, 1.3])
    parser.add_argument("--json", type=Path, help="result file; default: bench/results/DATE-rollouts.json")
    options, rows, began = parser.parse_args(), [], about(None, [])
    scenarios = list(product(MODES, options.pressures, POLICIES))
    print(f"| mode | pressure | policy | {' | '.join(SHOWN)} |\n|{' --- |' * (len(SHOWN) + 3)}")
    with ProcessPoolExecutor(2) as pool:
        played = pool.map(play, [(seed, *each) for each in scenarios for seed in options.seeds])
        for mode, pressure, policy in scenarios:
            each = list(islice(played, len(options.seeds)))
            found = {name: [one[name] for one in each] for name in each[0]}
            rows.append({"mode": mode, "pressure": pressure, "policy": policy, **found})
            cells = [f"{np.mean(found[n]):.4g} [{min(found[n]):.4g}, {max(found[n]):.4g}]" for n in SHOWN]
            print(f"| {mode} | {pressure:g} | {policy} | {' | '.join(cells)} |", flush=True)
    print(write_result({"about": began, "seeds": options.seeds, "rows": rows}, "rollouts", options.json))


if __name__ == "__main__":
    main()
