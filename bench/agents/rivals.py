"""Routing rules of others, tuned on one half of recorded agent sessions, judged on the other half.

    python bench/agents/rivals.py sessions.jsonl.xz --tune
    python bench/agents/rivals.py sessions.jsonl.xz
    python bench/agents/rivals.py sessions.jsonl.xz --instances 4 --rates 0.0175,0.025,0.05

`--tune` prints the best parameters on the first half. Each rule may try 12 settings, each in one
run at both `TUNING_RATES`. The cost of a setting is its mean end-to-end time relative to the
shipped parameters, averaged over the rates. Without `--tune`, shipped and tuned parameters are
judged on the second half. Cells are means over the orders of the sessions, spreads in brackets.
`--figure NAME` keeps the figure of each seed in bench/agents/results.

Sources: docs/reference/policies.md for built-in policies, and llm-d 0.10's documentation of
prefix-cache-affinity-filter and token-load-scorer. ai-dynamo/dynamo#13447 has Dynamo's agentic
preset, vllm-project/router#235 sticky sessions, and arXiv 2602.11688 GORGO (all networks equal).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import recorded
from recorded import PROFILE, Row, numbers, sessions, trace_of

from lmetric import policy_function
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload, prepare

HALVES_SEED = 12345
TUNING_RATES = (0.035, 0.05)
Parameters = dict[str, float]
Arguments = dict[str, Any]  # of `simulate`

# Holders stay alone unless their shortest backlog exceeds that of the others by the limit.
LLMD = (
    "where((kv_hit >= affinity) & (min(where(kv_hit >= affinity, queued_prefill_tokens, 1e15))"
    " - min(where(kv_hit >= affinity, 1e15, queued_prefill_tokens))"
    " <= 15928 * max_ttft_seconds), 0, 1e9)"
    " + minimum(queued_prefill_tokens + new_tokens, 4194304)"
)
DYNAMO_AGENTIC = (
    "scale * maximum(0, queued_prefill_tokens + prompt_tokens - credit * hit_tokens) / 16"
    " + tokens / 16 + requests * bs"
)


def sticky_least_loaded(trace: Trace, expiry: float) -> Arguments:
    """The arguments for sticky sessions, forgotten after `expiry` idle seconds."""
    assert trace.sessions is not None
    # Policies see no clock. The last start of a session gives the time: exact when one is placed.
    starts = np.sort(trace.arrival_seconds[np.unique(trace.sessions, return_index=True)[1]])
    homes: dict[float, int] = {}
    last: dict[float, float] = {}
    known: set[float] = set()
    ties = np.random.default_rng(0)

    def score(columns: Mapping[str, Any]) -> Any:
        session, instances = float(columns["tenant"]), len(columns["bs"])  # a session is a tenant
        known.add(session)
        now = float(starts[len(known) - 1])
        for idle in [each for each, used in last.items() if now - used >= expiry]:
            del homes[idle], last[idle]
        if session not in homes:
            counts = np.bincount(list(homes.values()), minlength=instances)
            homes[session] = int(np.argmin(counts + 0.5 * ties.random(instances)))
        last[session] = now
        return np.arange(instances) != homes[session]

    return {"policy": policy_function(score, reads=["tenant", "bs"], name="sticky_least_loaded")}


def thunder_agent(trace: Trace, **settings: float) -> Arguments:
    """The arguments for a rule like ThunderAgent's."""
    return {"policy": "lmetric", "programs": {"kind": "thunder_agent", **settings}}


def grid(**values: Sequence[float]) -> list[Parameters]:
    """All combinations of the values."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


class Rival(NamedTuple):
    """A rule with its parameters, and the settings among which tuning chooses."""

    rule: str | Callable[..., Arguments]  # a policy, or a function of trace and parameters
    shipped: Parameters
    tuned: Parameters
    settings: list[Parameters]  # empty: an evolution strategy chooses them


LLMD_SHIPPED: Parameters = {"affinity": 0.8, "max_ttft_seconds": 18}
LLMD_SETTINGS = grid(affinity=[0.5, 0.8, 0.95], max_ttft_seconds=[2, 6, 18, 54])
SCORERS = [(2, 2), (2, 0.5), (0.5, 2)]
EXPIRY = [60, 120, 300, 600, 900, 1200, 1800, 2700, 3600, 5400, 7200, 14400]
OVERLOAD: Parameters = {"theta": 0.7, "resume": 0.7, "half_life_seconds": 120}
LAMBDAS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99]
RIVALS = {
    "total_delay, auto, guard": Rival(
        lambda trace: {"policy": "total_delay", "programs": "auto", "guard": True}, {}, {}, []
    ),
    "lmetric": Rival(
        "lmetric", {"bs_offset": 1}, {"bs_offset": 1}, grid(bs_offset=np.linspace(0, 1, 12).tolist())
    ),
    "llmd_affinity": Rival(
        "llmd_affinity", LLMD_SHIPPED, {"affinity": 0.5, "max_ttft_seconds": 18}, LLMD_SETTINGS
    ),
    "llm-d 0.10": Rival(LLMD, LLMD_SHIPPED, LLMD_SHIPPED, LLMD_SETTINGS),
    "llmd_scorers": Rival(
        "llmd_scorers",
        {"queue": 2, "usage": 2, "prefix": 3},
        {"queue": 2, "usage": 0.5, "prefix": 3},
        [{"queue": q, "usage": u, "prefix": p} for q, u in SCORERS for p in (1, 3, 9, 27)],
    ),
    "linear": Rival("linear", {"lam": 0.7}, {"lam": 0.6}, grid(lam=LAMBDAS)),
    "dynamo": Rival(
        "dynamo",
        {"overlap_credit": 1, "w": 1},
        {"overlap_credit": 1.5, "w": 0.06},
        grid(overlap_credit=[1, 1.5, 2], w=[1, 0.25, 0.06, 0.015]),
    ),
    "dynamo, agentic preset": Rival(
        DYNAMO_AGENTIC,
        {"credit": 2, "scale": 4, "requests": 64},
        {"credit": 2, "scale": 16, "requests": 64},
        grid(credit=[1, 2], scale=[4, 16], requests=[64, 256, 1024]),
    ),
    "sticky_least_loaded": Rival(
        sticky_least_loaded, {"expiry": 7200}, {"expiry": 2700}, grid(expiry=EXPIRY)
    ),
    "GORGO": Rival("new_tokens + queue * tokens", {"queue": 0.5}, {"queue": 0.118}, []),
    "ThunderAgent-like": Rival(
        thunder_agent,
        {"theta": 1, "resume": 1, "half_life_seconds": 30},
        {"theta": 0.9, "resume": 0.85, "half_life_seconds": 30},
        grid(theta=[0.9, 1, 1.1], resume=[0.85, 1], half_life_seconds=[30, 120]),
    ),
    "ThunderAgent-like, for overload": Rival(  # the best of 36 settings on four instances
        thunder_agent, OVERLOAD, OVERLOAD, [OVERLOAD]
    ),
}


def mean_seconds(
    workload: Workload, seed: int, rival: Rival, parameters: Parameters, instances: int = recorded.INSTANCES
) -> float:
    """The mean end-to-end time on engines as those of recorded.py."""
    arguments: Arguments = {"policy": rival.rule, "knobs": parameters}
    if not isinstance(rival.rule, str):
        arguments = rival.rule(workload.trace, **parameters)
    arguments = arguments | {"instances": instances}
    return float(np.nanmean(recorded.run(workload, seed, arguments).e2e_seconds))


def evolved(cost: Callable[[Parameters], float], shipped: Parameters) -> Parameters:
    """The best parameters of a (1+1) evolution strategy: steps in the logarithm, 1/5 rule."""
    draws, step = np.random.default_rng(1), 1.0
    best, least = shipped, cost(shipped)
    for _ in range(11):
        child = {name: value * float(np.exp(step * draws.normal())) for name, value in best.items()}
        if (found := cost(child)) < least:
            best, least, step = child, found, step * 1.5
        else:
            step *= 1.5**-0.25
    return best


def tune(name: str, rival: Rival, workloads: list[Workload]) -> None:
    """Prints the cost of each setting, then the best setting."""
    shipped = [mean_seconds(each, 1, rival, rival.shipped) for each in workloads]

    def cost(setting: Parameters) -> float:
        found = [mean_seconds(each, 1, rival, setting) for each in workloads]
        relative = float(np.mean(np.array(found) / shipped))
        print(f"{name}, {setting}: {relative:.3f}", flush=True)
        return relative

    best = min(rival.settings, key=cost) if rival.settings else evolved(cost, rival.shipped)
    print(f"{name}: tuned {best}", flush=True)


def judge(lines: list[str], cells: Iterable[tuple[int, float]], instances: int, tuned: bool) -> list[Row]:
    """A row per rate, rival and version, with the mean end-to-end seconds of each seed.

    Args:
        cells: seeds and rates.
        tuned: no shipped parameters.
    """
    rows: dict[tuple[float, str], Row] = {}
    for seed, rate in cells:
        workload = prepare(trace_of(lines, seed, rate), PROFILE)
        for name, rival in RIVALS.items():
            versions = {f"{name}, shipped": rival.shipped}
            if rival.tuned != rival.shipped:
                versions = {f"{name}, tuned": rival.tuned} | ({} if tuned else versions)
            for version, parameters in versions.items():
                found = mean_seconds(workload, seed, rival, parameters, instances)
                print(f"seed {seed}, {rate:g} sessions/s, {version}: {found}", file=sys.stderr, flush=True)
                stage = f"{rate:g} sessions/s, {instances} instances"
                row = {"stage": stage, "policy": version, "e2e": []}
                rows.setdefault((rate, version), row)["e2e"].append(found)
    return list(rows.values())


def shown(rows: list[Row]) -> str:
    """A row per rival and version, a column per rate."""
    cells: dict[str, str] = {}
    for row in rows:
        cell = f"{np.mean(row['e2e']):.1f} [{min(row['e2e']):.1f}, {max(row['e2e']):.1f}]"
        cells[row["policy"]] = f"{cells.get(row['policy'], '|')} {cell} |"
    stages = list(dict.fromkeys(row["stage"] for row in rows))
    head = ["| |" + "".join(f" {stage} |" for stage in stages), "| --- |" + " --- |" * len(stages)]
    return "\n".join([*head, *(f"| {version} {row}" for version, row in cells.items())])


def main() -> None:
    """Tunes on the first half of the sessions, or judges on the second half."""
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tune", action="store_true", help="print the best parameters")
    parser.add_argument("--tuned", action="store_true", help="judge tuned parameters only")
    parser.add_argument("--rates", type=numbers, default=[0.02, 0.035, 0.05, 0.08, 0.1])
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="orders of the sessions")
    parser.add_argument("--instances", type=int, default=recorded.INSTANCES)
    parser.add_argument("--figure", help="name in bench/agents/results")
    options = parser.parse_args()
    lines = sessions(options.file)
    order = np.random.default_rng(HALVES_SEED).permutation(len(lines))
    first, second = np.split(order, [len(lines) // 2])
    if not options.tune:
        seeds = [int(seed) for seed in options.seeds]
        judged = [lines[each] for each in second]
        rows = judge(judged, product(seeds, options.rates), options.instances, options.tuned)
        if options.figure:
            recorded.keep(options.figure, "Rivals on the judged half", seeds, rows)
        print(shown(rows))
        return
    traces = [trace_of([lines[each] for each in first], 1, rate) for rate in TUNING_RATES]
    workloads = [prepare(trace, PROFILE) for trace in traces]
    for name, rival in list(RIVALS.items())[1:]:
        tune(name, rival, workloads)


if __name__ == "__main__":
    main()
