"""The study of prefix fetch: on a recorded hour and on a synthetic hot spot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tables import rendered
from world import BESIDE, GUARDED, HOT_SPEED, LMETRIC, VLLM, WEIGHING, Rival, Stage, link, play

from rerun import Pool, Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "prefix_fetch.md", rendered)
figure = RERUN.figure

HOUR = [Stage(speed) for speed in (1.5, 2.2, 3.0)]
COSTS = (0.05, 0.30)  # share of a token's prefill
FREE = "waits=false"  # the holder's memory is read without work of the holder


def rows(
    world: Pool, stages: Sequence[Stage], rivals: Sequence[Rival], base: Rival = LMETRIC, **told: Any
) -> Row:
    """Runs all rivals on all scenarios, each figure one number per seed."""
    made = []
    if world.quick:
        stages = [replace(stages[0], slice=True)]
    for stage, rival, found in world.all(play, stages, rivals):
        made.append({"stage": stage.label, "policy": rival.label, **columns(found, digits=5)})
        print(f"{stage.label}: {rival.label}: TTFT {made[-1]['ttft']}", file=sys.stderr, flush=True)
    return {"base": base.label, "seeds": len(world.seeds), "rows": made, **told}


# Results of an independent simulation over the three speeds; it models no contention on links.
CLAIMED = {
    0.05: {"ttft": "-8 to -14%", "ttft_p50": "-20 to -29%", "tpot": "-3 to -16%"},
    0.30: {"ttft": "-4 to -9%", "ttft_p50": "-8 to -17%", "tpot": "-2 to -9%"},
}


@figure("claim", "The claim: a pull that waits for nobody, over links that are not shared")
def claim(world: Pool) -> Row:
    rivals = {
        cost: WEIGHING.pulling(FREE, link(cost, shared=False), f"at {cost:.0%} of the prefill")
        for cost in COSTS
    }
    said = [{"policy": rival.label, **CLAIMED[cost]} for cost, rival in rivals.items()]
    return rows(world, HOUR, [LMETRIC, *rivals.values()], changes=said)


@figure("hour", "What a pull waits for, on a recorded hour")
def hour(world: Pool) -> Row:
    rivals = [LMETRIC]
    for cost in COSTS:
        at = f"at {cost:.0%}"
        rivals += [
            LMETRIC.pulling(FREE, link(cost), f"{at}: lmetric pulls, at once"),
            LMETRIC.pulling("on", link(cost), f"{at}: lmetric pulls, behind the holder's step"),
            WEIGHING.pulling(
                FREE, link(cost, shared=False), f"{at}: lmetric_pull, at once, links not shared"
            ),
            WEIGHING.pulling(FREE, link(cost), f"{at}: lmetric_pull, at once"),
            WEIGHING.pulling("on", link(cost), f"{at}: lmetric_pull, behind the holder's step"),
            BESIDE.pulling(FREE, link(cost), f"{at}: by_batch=0, at once"),
            BESIDE.pulling("on", link(cost), f"{at}: by_batch=0, behind the holder's step"),
        ]
    shown = ["ttft", "ttft_p50", "ttft_p99", "tpot", "tpot_p99", "found", "pulled", "pulls", "wait"]
    return rows(world, HOUR, rivals, columns=shown)


@figure("holder", "What it costs the holder, and how many it serves")
def holder(world: Pool) -> Row:
    at = WEIGHING.pulling("on", link(0.05), "each pull free, four at once")
    rivals = [
        LMETRIC,
        at,
        *(
            replace(
                at,
                pull=f"holder_seconds={seconds:g}",
                label=f"each takes {seconds * 1e3:g} ms of its next step",
            )
            for seconds in (0.005, 0.02, 0.1)
        ),
        *(replace(at, pull=f"max_fetches={most}", label=f"{most} at once") for most in (1, 64)),
        *(
            replace(at, pull=f"min_tokens={least}", label=f"of {least:,} tokens or more")
            for least in (2048, 8192)
        ),
        replace(at, pull="pinned=false", label="unpinned"),
    ]
    shown = ["ttft", "ttft_p50", "tpot", "pulled", "pulls", "wait"]
    return rows(world, HOUR[1:2], rivals, columns=shown)


H20 = "qwen3-30b-a3b-h20"
FAST, SLOW = "25", "3.125"  # GB/s: 200 and 25 Gbit/s


@figure("live", "Seen as a live router sees them, and with a GPU's memory")
def live(world: Pool) -> Row:
    stages = [Stage(2.2, live=index) for index in ("exact", "approximate")]
    stages += [Stage(speed, live="exact", engine=H20) for speed in (0.5, 1.0)]
    rivals = [
        LMETRIC,
        WEIGHING.pulling("on", FAST, "lmetric_pull, 25 GB/s"),
        WEIGHING.pulling("on", SLOW, "lmetric_pull, 3.125 GB/s"),
        WEIGHING.pulling(f"{FREE}, pinned=false", FAST, "lmetric_pull, 25 GB/s, at once, unpinned"),
    ]
    shown = ["ttft", "ttft_p50", "ttft_p99", "tpot", "found", "pulled", "pulls", "wait"]
    return rows(world, stages, rivals, columns=shown)


@figure("others", "Whichever policy chooses")
def others(world: Pool) -> Row:
    policies = ("vllm", "least_requests", "linear", "filter", "dynamo", "simulation")
    plain = [Rival(name, name) for name in policies]
    pulling = [rival.pulling("on", link(0.05), f"{rival.label}, pulls") for rival in plain]
    rivals = [LMETRIC, *(each for pair in zip(plain, pulling, strict=True) for each in pair)]
    rivals += [
        LMETRIC.pulling("on", link(0.05), "lmetric, pulls"),
        WEIGHING.pulling("on", link(0.05), "lmetric_pull"),
    ]
    shown = ["ttft", "ttft_p50", "ttft_p99", "tpot", "found", "pulled"]
    return rows(world, HOUR[1:2], rivals, columns=shown)


@figure("hot", "The made hot spot: a known prefix whose traffic surges")
def hot(world: Pool) -> Row:
    stages = [Stage(HOT_SPEED, share, tokens, engine=H20) for share in (0.1, 0.4) for tokens in (8000, 16000)]
    rivals = [LMETRIC, GUARDED, VLLM, VLLM.pulling("on", FAST, "vllm, pulls at 25 GB/s")]
    rivals += [GUARDED.pulling("on", FAST, "lmetric, guard, pulls at 25 GB/s")]
    for speed in (FAST, SLOW):
        for rival in (WEIGHING, BESIDE):
            named = f"{rival.label} at {speed} GB/s"
            rivals.append(rival.pulling("on", speed, named))
            rivals.append(replace(rivals[-1], label=f"{named}, guard", guard=True))
    shown = ["ttft", "ttft_p99", "tpot", "others", "instances", "pulls", "filters"]
    return rows(world, stages, rivals, columns=shown)


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=8, traces="mooncake_conversation.jsonl.gz")
