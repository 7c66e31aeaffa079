"""The planner against the best of all rivals, each tuned, at each load; on scenarios it was not
designed for; and the value of each part."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from goal_bound import TWICE, alone
from goal_parts import KEPT, ablations
from goal_rivals import LIKELY_ROLES, families
from goal_tables import NINE
from goal_world import AZURE, CONVERSATION, LMETRIC, PLANNER, PULLING, Outcome, Rival, Stage, most, play

from lmetric_lab.sim.max_load import Rule
from rerun import Pool, columns

Row = dict[str, Any]
Found = dict[Rival, Outcome]

SHARES = (0.3, 0.5, 0.7, 0.8, 0.95)  # shares of the maximum load
STRONGEST = 6  # families that are shown one by one
SLACK = 0.02  # change of a figure that does not count as worse
LEAST_KEPT_UP = Rule().keep_up
ROUTERS = 4  # routers side by side
SHARING_SECONDS = 0.1  # seconds between two exchanges of load, as in the server


def at(share: float, recording: str = CONVERSATION, *, shared: bool = True) -> Stage:
    """Returns a recording at a share of the maximum load: of LMETRIC's sustained speed there."""
    return Stage(load=round(share * most(recording, shared), 3), recording=recording, shared=shared)


def named(share: float, stage: Stage) -> str:
    """Returns the name of a scenario, its share of the maximum load first."""
    what = [stage.recording] if stage.recording != CONVERSATION else []
    return ", ".join([f"{share:.0%} ({stage.load:g} times as fast)", *what, *stage.differs])


def changes(ours: Outcome, theirs: Outcome) -> list[float]:
    """Returns logarithms of the nine figures' ratios, below 0 if ours is less."""
    return [float(np.log(getattr(ours, name) / getattr(theirs, name))) for name in NINE]


def keeping_up(found: Found) -> Found:
    """Returns the rivals under which the fleet keeps up: the rule of `lmetric_lab.sim.max_load`."""
    return {rival: each for rival, each in found.items() if each.kept_up >= LEAST_KEPT_UP}


def counts(planner: Outcome, others: Found) -> dict[str, int]:
    """Returns the number of others, and of others that keep up. Of these, `worse_in_all` are
    worse than the planner in all nine figures; `within_slack` are better in some, by at most the
    slack."""
    kept = keeping_up(others)
    least = [min(changes(each, planner)) for each in kept.values()]
    return {
        "others": len(others),
        "kept_up": len(kept),
        "worse_in_all": len([change for change in least if change > 0]),
        "within_slack": len([change for change in least if -np.log(1 + SLACK) <= change <= 0]),
    }


def tuned(found: Found, planner: Outcome) -> tuple[Rival, float] | None:
    """Returns the member of a family with the least geometric mean of the nine figures, and the
    logarithm of its mean over the planner's. None: no member keeps up."""
    means = {rival: float(np.mean(changes(each, planner))) for rival, each in keeping_up(found).items()}
    return min(means.items(), key=lambda pair: pair[1]) if means else None


def strongest(by_family: Mapping[str, Found], planner: Outcome) -> dict[str, Rival]:
    """Returns the families that, tuned, have the least geometric mean of the nine figures."""
    picked = {name: each for name, found in by_family.items() if (each := tuned(found, planner))}
    order = sorted(picked, key=lambda name: picked[name][1])[:STRONGEST]
    return {name: picked[name][0] for name in order}


def best(world: Pool) -> Row:
    """Screens all rivals with one seed at each load. Returns the strongest and the best in a
    figure, with all seeds."""
    everyone = families()
    if world.quick:
        everyone = {name: rivals[-1:] for name, rivals in everyone.items()}
    stages = {share: at(share) for share in (SHARES[:1] if world.quick else SHARES)}
    loads = [load(world, named(share, stage), stage, everyone) for share, stage in stages.items()]
    return {"most": [] if world.quick else carried(), **by_stage(loads)}


def by_stage(found: Sequence[Row]) -> Row:
    """Returns tables with a column `stage`, made from the results per scenario."""
    told: Row = {"rows": [], "families": []}
    for one in found:
        stage = {"stage": one["stage"]}
        told["rows"] += [stage | row for row in one["rows"]]
        told["families"] += [
            stage | {"family": name, "policy": each} for name, each in one["families"].items()
        ]
        if "counts" in one:
            told.setdefault("counts", []).append(stage | {name: str(n) for name, n in one["counts"].items()})
            told.setdefault("leading", []).extend(stage | {"policy": label} for label in one["leading"])
    return told


def carried() -> list[dict[str, str]]:
    """Returns the sustained speed of each rival, times the recorded arrivals."""
    recordings = {
        CONVERSATION: (CONVERSATION, True),
        f"{CONVERSATION}, nothing shared": (CONVERSATION, False),
        AZURE: (AZURE, True),
    }
    return [
        {"recording": name}
        | {rival.label: f"{most(*told, rival):.2f}" for rival in (LMETRIC, PULLING, PLANNER)}
        for name, told in recordings.items()
    ]


def load(world: Pool, name: str, stage: Stage, everyone: Mapping[str, Sequence[Rival]]) -> Row:
    """Returns the results at a load."""
    by_family, planner = screened(world, stage, everyone)
    flat = {rival: each for found in by_family.values() for rival, each in found.items()}
    kept = keeping_up(flat)
    leading = {min(kept, key=lambda rival: getattr(kept[rival], figure)) for figure in NINE}
    strong = strongest(by_family, planner)
    print(f"{name}: {len(flat)} rivals; {', '.join(strong)}", file=sys.stderr, flush=True)
    return {
        "stage": name,
        "counts": counts(planner, flat),
        "families": {family: rival.label for family, rival in strong.items()},
        "leading": [rival.label for rival in flat if rival in leading],
        "rows": rows(world, stage, [r for r in flat if r in leading or r in strong.values()]),
    }


def screened(
    world: Pool, stage: Stage, everyone: Mapping[str, Sequence[Rival]]
) -> tuple[dict[str, Found], Outcome]:
    """Returns all rivals by family, and the planner, with the first seed."""
    cases = [(stage, PLANNER), *((stage, rival) for rivals in everyone.values() for rival in rivals)]
    found = {rival: each[0] for (_, rival), each in world.each(play, cases, lambda *_: 1)}
    return {name: {rival: found[rival] for rival in rivals} for name, rivals in everyone.items()}, found[
        PLANNER
    ]


def rows(world: Pool, stage: Stage, rivals: Sequence[Rival]) -> list[Row]:
    """Returns rivals, the planner and the two bounds with all seeds."""
    cases = [(stage, rival) for rival in [*rivals, PLANNER, TWICE]]
    told = [{"policy": rival.label, **columns(found)} for (_, rival), found in world.each(play, cases)]
    ((_, bound),) = world.each(alone, [(stage,)])
    return [*told, {"policy": "alone", **columns(bound)}]


def worlds() -> dict[str, Stage]:
    """Returns scenarios that were not used for tuning, by name."""
    told = {}
    for share in (0.5, 0.8, 0.95):
        usual = at(share)
        stages = [
            usual,
            replace(usual, believed=0.5),
            replace(usual, believed=2.0),
            replace(usual, signals="delayed", event_delay=1.0),
            replace(usual, signals="delayed", routers=ROUTERS, sharing=SHARING_SECONDS),
            replace(usual, signals="delayed", routers=ROUTERS),
            replace(usual, redrawn=True),
            at(share, shared=False),
            at(share, AZURE),
        ]
        told |= {named(share, stage): stage for stage in stages}
    return told


def robust(world: Pool) -> Row:
    """Returns figures against LMETRIC, with and without prefix fetches, and against the fixed roles
    with the best mean E2E latency there."""
    stages = worlds()
    if world.quick:
        stages = dict([list(stages.items())[1]])
    told = []
    for name, stage in stages.items():
        by_family, _ = screened(
            world, stage, {"fixed roles": LIKELY_ROLES[-1:] if world.quick else LIKELY_ROLES}
        )
        kept = keeping_up(by_family["fixed roles"])
        chosen = {LMETRIC.label: LMETRIC}
        if stage.shared and stage.recording == CONVERSATION:  # else there is nothing to fetch
            chosen[PULLING.label] = PULLING
        if kept:
            chosen["best of fixed roles"] = min(kept, key=lambda rival: kept[rival].e2e)
        print(f"{name}: {[rival.label for rival in chosen.values()]}", file=sys.stderr, flush=True)
        labels = {family: rival.label for family, rival in chosen.items()}
        told.append({"stage": name, "families": labels, "rows": rows(world, stage, list(chosen.values()))})
    return by_stage(told)


def ablation(world: Pool) -> Row:
    """Returns figures of the parts alone, together, and with features missing."""
    stages = {share: at(share) for share in (SHARES[:1] if world.quick else (0.5, 0.7, 0.8, 0.95))}
    told = []
    cases = [(stage, rival) for stage in stages.values() for rival in [*ablations(), *KEPT]]
    names = {stage: named(share, stage) for share, stage in stages.items()}
    for (stage, rival), found in world.each(play, cases):
        told.append({"stage": names[stage], "policy": rival.label, **columns(found)})
        print(f"{stage.label}: {rival.label}: E2E {told[-1]['e2e']}", file=sys.stderr, flush=True)
    return {"base": PLANNER.label, "rows": told}
