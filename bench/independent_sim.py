"""Compares our simulator with an independent one: the same rules, their table, our means over
tie-breaking seeds.

The table and its rules were written outside this project: first come, first served, colocated
engines, exact indicators as of the end of the running step, reserving admission. It plays the
Mooncake conversation trace at 2.2 times its speed over 16 engines of 4,000 blocks of 512 tokens.
Usage::

    python bench/independent_sim.py TRACE [--seeds 8] [--their-ties] [--json OUT]
    python bench/independent_sim.py TRACE --plain

Their row is one run whose ties go to the first instance in order from the request's number on. Ours
is a mean over seeds that draw ties at random. With ``--their-ties``, we use their rule, and the
seeds move each arrival by up to a millisecond, to show the distance between runs. The report lists
means (TTFT, TPOT, hit) and p99s that are more than 3 % off and outside the seeds' range. A further
run is outside the range of n runs with a chance of 2 in n + 1. Of 20 p99s, this is four or five for
8 seeds, and one for 32. Exits with 1 if a mean is off.

``--plain`` decides between the two: it compares the rules in plain Python (`plain_simulator.py`),
their ties included, with one run of ours. Exits with 1 if a request's figure differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

import lmetric as lm
import plain_simulator as plain
from lmetric._core import Program
from lmetric.profiles import load_profile
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.workload import Workload, prepare

PROFILE = "independent-sim"
INSTANCES = 16
SPEED = 2.2
TOLERANCE = 0.03
# Floats are summed in another order. A difference of one step would be 0.009.
SAME_SECONDS = 1e-6

_BACKLOG = "queued_prefill_tokens + new_tokens"
POLICIES: dict[str, str | lm.Policy] = {
    "rr": "round_robin",
    "vllm": "4 * q_bs + r_bs",
    **{
        f"filter{r}": lm.Policy(score=f"where(max(bs) - min(bs) > {r}, bs, -hit_tokens)", then="bs")
        for r in (4, 16)
    },
    **{
        f"lin{w}": f"{w} * (1 - hit_tokens / prompt_tokens) + {1 - w:.1f} * bs / maximum(1, max(bs))"
        for w in (0.4, 0.7, 0.9)
    },
    "dynamo": f"({_BACKLOG} + tokens) / 512",
    "lmetric": f"({_BACKLOG}) * (bs + 1)",
    "lmetric, BS alone": f"({_BACKLOG}) * bs",
}


def with_their_ties(policy: str | lm.Policy) -> lm.PolicyFunction:
    """Returns the policy with ties going to the first instance in order from the request's number
    on."""
    if policy == "round_robin":
        policy = "0 * bs"
    texts = [policy] if isinstance(policy, str) else [policy.score, *(text for text, _ in policy.then)]
    programs = [Program(text, "score") for text in texts]
    requests = itertools.count()

    def score(columns: Mapping[str, Any]) -> NDArray[np.float64]:
        values = {name: np.atleast_1d(value) for name, value in columns.items()}
        instances = max(map(len, values.values()))
        order = np.roll(np.arange(instances), -(next(requests) % instances))
        keys = [program.evaluate(values).ravel()[order] for program in reversed(programs)]
        chosen = np.ones(instances)
        chosen[order[np.lexsort(keys)[0]]] = 0
        return chosen

    reads = sorted({name for program in programs for name in program.reads})
    return lm.policy_function(score, reads=reads, name="rotating ties")


# TTFT mean, p50, p99 (s); TPOT mean, p50, p99 (ms); share of the blocks hit.
FIGURES = ("ttft mean", "ttft p50", "ttft p99", "tpot mean", "tpot p50", "tpot p99", "hit")
MEANS = ("ttft mean", "tpot mean", "hit")
TAILS = ("ttft p99", "tpot p99")
THEIRS = {
    "rr": (4.613, 1.806, 27.763, 68.6, 25.0, 519.8, 0.090),
    "vllm": (2.246, 1.049, 18.608, 31.1, 21.1, 224.5, 0.085),
    "filter4": (1.907, 0.761, 18.172, 20.6, 13.8, 127.8, 0.283),
    "filter16": (1.851, 0.653, 18.545, 19.4, 12.6, 125.1, 0.358),
    "lin0.4": (1.665, 0.635, 16.285, 19.2, 12.9, 111.9, 0.325),
    "lin0.7": (1.742, 0.637, 17.032, 18.3, 12.6, 101.3, 0.356),
    "lin0.9": (1.786, 0.644, 17.771, 18.6, 12.7, 119.4, 0.358),
    "dynamo": (1.415, 0.863, 11.538, 30.4, 18.6, 321.8, 0.220),
    "lmetric": (1.141, 0.457, 11.728, 18.6, 13.2, 86.5, 0.311),
    "lmetric, BS alone": (1.170, 0.471, 12.285, 18.9, 13.4, 104.1, 0.300),
}


def figures(run: Run) -> tuple[float, ...]:
    """Returns a run's row of the table."""
    ttft, tpot = run.ttft_seconds, run.tpot_seconds[run.output_tokens > 1] * 1e3
    # Their percentiles are the lower of two values: round robin, which has no ties, agrees to all
    # digits.
    shares = (50, 99)
    spread = [f for x in (ttft, tpot) for f in (x.mean(), *np.percentile(x, shares, method="lower"))]
    return (*map(float, spread), float(run.hit_blocks.sum() / run.prompt_blocks.sum()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--their-ties", action="store_true")
    parser.add_argument("--plain", action="store_true", help="against the rules in plain Python instead")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    workload = prepare(load_trace(options.trace).faster(SPEED), PROFILE)
    if options.plain:
        return arbitrate(workload)
    rows, off, failed = [], [], False
    print("policy".ljust(18), *(name.rjust(21) for name in FIGURES), "  (ours, theirs, ratio)")
    for name, policy in POLICIES.items():
        runs = np.array([play(workload, policy, seed, options.their_ties) for seed in range(options.seeds)])
        ours, theirs, low, high = (
            runs.mean(axis=0),
            np.array(THEIRS[name]),
            runs.min(axis=0),
            runs.max(axis=0),
        )
        ratios = ours / theirs
        cells = (f"{o:8.3f}{t:8.3f} {r:4.3f}" for o, t, r in zip(ours, theirs, ratios, strict=True))
        print(name.ljust(18), *(cell.rjust(21) for cell in cells))
        for i, figure in enumerate(FIGURES):
            inside = low[i] <= theirs[i] <= high[i]
            if not inside and abs(ratios[i] - 1) > TOLERANCE and figure in MEANS + TAILS:
                failed |= figure in MEANS
                off.append(
                    f"{name}: {figure} {ours[i]:.4g} ({low[i]:.4g} to {high[i]:.4g}), theirs {theirs[i]:g}: "
                    f"{ratios[i] - 1:+.1%}"
                )
        rows.append({"policy": name, "ours": runs.tolist(), "theirs": list(theirs), "figures": FIGURES})
    if options.json:
        options.json.write_bytes(orjson.dumps(rows, option=orjson.OPT_INDENT_2))
    print(*(off or ["All means within 3 % or the seeds' range, all p99 within it or 3 %."]), sep="\n")
    return int(failed)


def arbitrate(workload: Workload) -> int:
    """Compares one run of ours per policy with the rules in plain Python. Returns 1 if a request
    differs, else 0."""
    failed = False
    for name, policy in POLICIES.items():
        ours = simulated(workload, with_their_ties(policy))
        theirs = plainly(workload.trace, name)
        largest = float(np.abs(columns(ours) - theirs).max())
        verdict = "equal" if largest <= SAME_SECONDS else f"DIFFERENT, up to {largest:g}"
        row = "  ".join(f"{what} {value:.4g}" for what, value in zip(FIGURES, figures(ours), strict=True))
        print(f"{name:18} {verdict}  {row}", flush=True)
        failed |= largest > SAME_SECONDS
    return int(failed)


def plainly(trace: Trace, policy: str, instances: int = INSTANCES) -> NDArray[np.float64]:
    """Returns (n, 4): arrival, first token, last token, blocks hit, from the plain simulator."""
    profile = load_profile(PROFILE)
    engines = [plain.Engine(profile.cache_blocks, profile.block_tokens) for _ in range(instances)]
    rows = zip(trace.arrival_seconds, trace.input_tokens, trace.output_tokens, strict=True)
    requests = [
        plain.Request(float(arrival), int(prompt), max(1, int(output)), trace.blocks(i).tolist())
        for i, (arrival, prompt, output) in enumerate(rows)
    ]
    return plain.play(requests, policy, engines)


def columns(run: Run) -> NDArray[np.float64]:
    """Returns (n, 4): arrival, first token, last token, blocks hit, from a run of ours."""
    return np.stack(
        [run.arrival_seconds, run.first_token_seconds, run.finished_seconds, run.hit_blocks], axis=1
    )


def play(workload: Workload, policy: str | lm.Policy, seed: int, their_ties: bool) -> tuple[float, ...]:
    """Simulates one run. Returns its row."""
    chosen: str | lm.Policy | lm.PolicyFunction = policy
    if their_ties:
        chosen, trace = with_their_ties(policy), workload.trace
        if seed:
            workload = prepare(_jittered(trace, seed), PROFILE)
    return figures(simulated(workload, chosen, seed))


def simulated(
    workload: Workload, policy: str | lm.Policy | lm.PolicyFunction, seed: int = 0, instances: int = INSTANCES
) -> Run:
    """Simulates one run with our simulator, set up by the rules."""
    return simulate(
        workload,
        programs="none",
        policy=policy,
        instances=instances,
        profile=PROFILE,
        seed=seed,
        signals="step_end",
        guard=False,
    )


def _jittered(trace: Trace, seed: int) -> Trace:
    moved = trace.arrival_seconds + np.random.default_rng(seed).uniform(0, 1e-3, len(trace))
    return replace(trace, arrival_seconds=np.sort(moved))


if __name__ == "__main__":
    sys.exit(main())
