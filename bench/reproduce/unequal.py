"""Fleets of unequal GPUs: LMETRIC with its work in tokens and in learned seconds, and its rivals,
untuned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from book import Made, Row, figure, rounded
from comparisons import columns
from world import INSTANCES, LMETRIC, PROFILE, SIMULATION, VLLM, Choice, Part, Stage, World, values

from lmetric.policies import Columns, policy_function
from lmetric.profiles import Profile
from lmetric_lab.sim.workload import prepare

SECONDS = Choice("lmetric_seconds")
RIVALS = [
    LMETRIC,
    SECONDS,
    VLLM,
    Choice("least_requests"),
    Choice("round_robin"),
    Choice("dynamo"),
    SIMULATION,
]
LOADS = (0.5, 0.9)  # shares of LMETRIC's maximum on the fleet
FASTER = "qwen3-30b-a3b-h200"  # the same model on the GPU with 6.7 times the FLOPs of an H20
HALF_FLEET = INSTANCES // 2
SLOWER = {"8 + 8 of half the speed": 2.0, "8 + 8 of a quarter": 4.0}
KNOWN = "speeds given"
SHOWN = {
    "mean TTFT": "ttft_mean_s",
    "P99 TTFT": "ttft_p99_s",
    "mean TPOT": "tpot_mean_ms",
}


def halves(slow: Callable[[Profile], Profile]) -> Callable[[Profile], tuple[Profile, ...]]:
    """Returns profiles with half of the instances unchanged and the others changed by `slow`."""
    return lambda profile: (profile,) * HALF_FLEET + (slow(profile),) * HALF_FLEET


def fleets(world: World) -> dict[str, Callable[[Profile], tuple[Profile, ...]]]:
    """Returns the fleets, made from a scenario's profile."""
    made = {
        "16 equal": lambda profile: (profile,) * INSTANCES,
        **{
            name: halves(lambda profile, times=times: profile.slower(times))  # type: ignore[misc]
            for name, times in SLOWER.items()
        },
    }
    if world.scenario_profile == PROFILE:
        made["8 H20 + 8 H200"] = halves(lambda profile: world.profile(FASTER, profile.block_tokens))
    return made


def stages(world: World) -> list[Stage]:
    """Returns each trace on each fleet; the maximum load is found on the first seed's trace."""
    if world.scenarios:
        labels = list(world.scenarios)
    else:
        labels = ["conversation"] if world.quick else ["conversation", "chat", "coder"]
    found = []
    for label in labels:
        profile, (_, *measured) = world.traces_of(label)
        workloads = [prepare(trace, profile) for trace in measured]
        for name, make in fleets(world).items():
            profiles = make(profile)
            speed = world.max_speed(workloads[0], profiles, LMETRIC)
            judge = tuple(Part(workload, speed) for workload in workloads)
            found.append(Stage(f"{label}, {name}", profiles, judge[0], judge))
    return found


@figure("unequal", "Unequal GPUs: work in tokens and in seconds")
def unequal(world: World) -> Made:
    runs, shown = [], []
    for stage in stages(world):
        slower = next((times for name, times in SLOWER.items() if stage.label.endswith(name)), None)
        choices = [*RIVALS, *([known(slower)] if slower else [])]
        for load in LOADS:
            found = world.many(stage, choices, fraction=load)
            rows: list[Row] = [
                {
                    "stage": stage.label, "load": f"{load:.0%}", "policy": choice.name, **columns(each),
                    "first_half": rounded(values(each, "first_half")),
                }
                for choice, each in zip(choices, found, strict=True)
            ]  # fmt: skip
            runs += rows
            for title, name in SHOWN.items():
                shown.append(compared(rows, stage.label, load, title, name))
    return Made(tables={"traces": shown, "runs": runs})


def known(slower: float) -> Choice:
    """Returns `lmetric_seconds` without its guard and with the slowdown of the second half of the
    instances given."""
    times = np.repeat([1.0, slower], HALF_FLEET)

    def score(given: Columns) -> np.ndarray:
        return np.asarray(given["p_token"]) * (np.asarray(given["bs"]) + 1) * times

    reads = ["p_token", "bs"]
    return Choice(policy_function(score, reads=reads, name=KNOWN, guard=False), label=KNOWN)


def compared(rows: list[Row], stage: str, load: float, title: str, name: str) -> Row:
    """Returns a quantity under LMETRIC, and the others' over it: mean over seeds, least and
    most."""
    base = np.asarray(rows[0][name])
    digits, unit = (2, "s") if name.endswith("_s") else (1, "ms")
    line: Row = {"trace and fleet": stage, "load": f"{load:.0%}", "": title}
    line["`lmetric`"] = f"{base.mean():.{digits}f} {unit}"
    for row in rows[1 : len(RIVALS)]:
        each = np.asarray(row[name]) / base
        line[f"`{row['policy']}`"] = f"{each.mean():.2f} [{each.min():.2f}, {each.max():.2f}]"
    return line
