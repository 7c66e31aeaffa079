"""The study of the planner: each request decodes on the instance where all requests lose least,
against whole requests and fixed roles."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import goal_best
import goal_best_tables
import goal_tables
from goal_world import FIXED, LMETRIC, PLANNER, PROFILE, PULLING, Rival, Stage, play

from lmetric.profiles import load_profile
from rerun import Pool, Rerun, columns

Row = dict[str, Any]


def rendered(told: Row) -> str:
    """Returns a figure's part of the page."""
    if told["figure"] in OVER_RIVALS:
        return goal_best_tables.over_rivals(told)
    tables = goal_best_tables if "families" in told else goal_tables
    return tables.rendered(told)


# Figures over many scenarios: the page shows the planner against its rivals, the CSV all values.
OVER_RIVALS = ("goal_lengths", "goal_delayed", "goal_engines")
RERUN = Rerun(Path(__file__).parent, "planner_study.md", rendered)
figure = RERUN.figure

SHORT_OR_LONG = ("completion", "extraction", "reasoning", "long-form")
LENGTHS = ("azure-chat", "mix-1", "chat-and-documents", "agents", "summaries")
LOADS = (0.5, 0.8, 0.95)


def rows(world: Pool, stages: Sequence[Stage], rivals: Sequence[Rival], base: Rival = LMETRIC) -> Row:
    """Runs all rivals on all scenarios, each figure one number per seed."""
    made = []
    for stage, rival, found in world.all(play, stages[:1] if world.quick else stages, rivals):
        made.append({"stage": stage.label, "policy": rival.label, **columns(found, digits=5)})
        print(f"{stage.label}: {rival.label}: E2E {made[-1]['e2e']}", file=sys.stderr, flush=True)
    return {"base": base.label, "rows": made}


@figure("goal_knobs", "The weight of the batch and how long a prefill counts: what they were chosen by")
def knobs(world: Pool) -> Row:
    weights = [Rival(f"weight {w:g}", "planner", {"weight": w}) for w in (0.05, 0.2, 0.5, 1.0)]
    recent = [
        Rival(f"{s} s", "planner", settings={"split": {"kind": "apart", "recent_seconds": s}})
        for s in (10, 60, 180)
    ]
    gains = [
        Rival(f"gains {s:g} s", "planner", settings={"split": {"kind": "apart", "min_gain_seconds": s}})
        for s in (0.0, 1.0, 3.0)
    ]
    stalls = [
        Rival(f"first token {name}", "planner", settings={"split": {"kind": "apart", "max_stall_seconds": s}})
        for name, s in (("late", 0.0), ("early to 0.03 s", 0.03), ("always early", 1e6))
    ]
    engine = load_profile(PROFILE)
    chunked = [(n, engine.model_copy(update={"max_batch_tokens": n})) for n in (1024, 2048)]
    steps = [Rival(f"steps of {n} tokens", "planner", settings={"profile": each}) for n, each in chunked]
    uniboost = {"local_order": "priority", "priority": "uniboost"}
    cost, new = "p_token - fetch_tokens + fetch_cost_tokens", "(new_tokens - fetch_tokens)"
    both = {"split": "apart", "prefix_fetch": "on"}
    summed = [
        Rival(f"all that wait, {w:g}", f"{cost} + {w:g} * {new} * bs", settings=both) for w in (0.1, 0.3, 1.0)
    ]
    order = Rival("local order uniboost", "planner", settings=uniboost)
    whole = Rival("nothing apart", "planner", settings={"split": "none"})
    unpulled = Rival("nothing pulled", "planner", settings={"prefix_fetch": "none"})
    rivals = [PLANNER, *weights, *recent, *gains, *stalls, *summed, *steps, order, whole, unpulled]
    return rows(world, [Stage(load=2.2), Stage(load=3.0)], rivals, PLANNER)


@figure("goal_replicas", "Routers side by side that tell each other their load, or nothing")
def replicas(world: Pool) -> Row:
    told = [("do not tell", 4, None), *((f"tell every {s:g} s", 4, s) for s in (1.0, 0.3, 0.1, 0.02))]
    rivals = [
        replace(each, label=f"{each.label}, {n} that {what}", settings={"routers": n, "sharing_seconds": s})
        for each in (LMETRIC, PLANNER)
        for what, n, s in [*told, ("tell every 0.1 s", 16, 0.1)]
    ]
    stages = [Stage(load=speed, signals="delayed") for speed in (1.5, 2.2, 3.0)]
    return rows(world, stages, [LMETRIC, PLANNER, *rivals])


@figure("goal_hour", "A recorded hour")
def hour(world: Pool) -> Row:
    rivals = [LMETRIC, PULLING, *FIXED, PLANNER]
    return rows(world, [Stage(load=speed) for speed in (1.5, 2.2, 3.0)], rivals)


@figure("goal_lengths", "Made requests, of lengths that nothing was chosen by")
def lengths(world: Pool) -> Row:
    stages = [Stage(name, load) for name in LENGTHS for load in LOADS]
    return rows(world, stages, [LMETRIC, *FIXED, PLANNER])


@figure("goal_extremes", "Answers of a few tokens, and of thousands")
def extremes(world: Pool) -> Row:
    stages = [Stage(name, load) for name in SHORT_OR_LONG for load in (0.5, 0.95)]
    always = Rival(
        "planner, any gain", "planner", settings={"split": {"kind": "apart", "min_gain_seconds": 0.0}}
    )
    return rows(world, stages, [LMETRIC, *FIXED, PLANNER, always])


@figure("goal_delayed", "Late signals")
def delayed(world: Pool) -> Row:
    made = [Stage(name, 0.8, signals="delayed") for name in LENGTHS]
    hours = [Stage(load=speed, signals="delayed") for speed in (2.2, 3.0)]
    return rows(world, hours + made, [LMETRIC, *FIXED, PLANNER])


@figure("goal_engines", "Other engines")
def engines(world: Pool) -> Row:
    profiles = ("llama-3.1-8b-a100", "qwen3-32b-h20")
    stages = [Stage(name, 0.8, profile=profile) for profile in profiles for name in LENGTHS]
    return rows(world, stages, [LMETRIC, *FIXED, PLANNER])


figure("goal_best", "The best of all others, at each load")(goal_best.best)
figure("goal_robust", "Worlds that it was not made for")(goal_best.robust)
figure("goal_ablation", "What each part buys, and what is left without")(goal_best.ablation)


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=2, traces="mooncake_conversation.jsonl.gz")
