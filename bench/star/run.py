"""Reruns the STAR paper's experiments on simulated clusters like its own, with rivals that it does
not have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tables import rendered
from world import (
    BINS,
    CURRENT,
    CURVE,
    FAR,
    LARGE,
    LLUMNIX,
    LLUMNIX_TUNED,
    MAIN,
    NATIVE,
    NONE,
    ORACLE,
    SLOW_LINK,
    SMALL,
    TRAINED,
    TRAINED_STAGES,
    Rival,
    Stage,
    play,
)

from rerun import Pool, Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "star.md", rendered)
figure = RERUN.figure


def rows(
    world: Pool,
    stages: Sequence[Stage],
    rivals: Sequence[Rival],
    base: Rival = NONE,
    most_seeds: int | None = None,
    **told: Any,
) -> Row:
    """Runs all rivals in all scenarios, each figure one number per seed."""
    made = []
    for stage, rival, found in world.all(
        play, stages[:1] if world.quick else stages, rivals, lambda _: most_seeds
    ):
        made.append({"stage": stage.label, "policy": rival.label, **columns(found, digits=5)})
        print(f"{stage.label}: {rival.label}: p99 {made[-1]['p99']}", file=sys.stderr, flush=True)
    return {"base": base.label, "seeds": len(world.seeds[:most_seeds]), "rows": made, **told}


# Studies of one rate use the rate of the paper's claims on its small cluster.
TUNED_ON = Stage("sharegpt", SMALL, 0.17)
ALPACA = Stage("alpaca", SMALL, 0.13)
AZURE = Stage("azure-conversation", SMALL, 15, seconds=400, warm_up=100)


@figure("3", "Figure 3: placement alone, 0.1 requests/s")
def figure_3(world: Pool) -> Row:
    rivals = [NONE.placed("round_robin"), NONE, NATIVE]
    return rows(world, [Stage("sharegpt", SMALL, 0.1)], rivals)


@figure("10", "Figures 10 to 12: rates")
def figure_10(world: Pool) -> Row:
    stages = [Stage("sharegpt", SMALL, rate) for rate in (0.17, 0.2)]
    stages += [Stage("sharegpt", LARGE, 0.2)]
    stages += [ALPACA]
    return rows(world, stages, MAIN)


@figure("placement", "Moving behind good placement, and Llumnix")
def placement(world: Pool) -> Row:
    rivals = [
        rival.placed(placement)
        for placement in ("least_tokens", "least_requests", "sibyl_plus")
        for rival in (NONE, LLUMNIX_TUNED, NATIVE)
    ]
    return rows(world, [TUNED_ON, ALPACA, AZURE], rivals, NONE.placed("sibyl_plus"))


@figure("llumnix", "Llumnix' thresholds")
def llumnix(world: Pool) -> Row:
    tried = [
        (500, 1000),
        (1000, 1000),
        (2000, 2000),
        (4000, 4000),
        (8000, 8000),
        (16000, 16000),
        (4000, 8000),
    ]
    rivals = [
        LLUMNIX.set(f"source below {source:,}, target above {target:,}", source_below_steps=source,
                    target_above_steps=target)
        for source, target in tried
    ]  # fmt: skip
    return rows(world, [TUNED_ON], [NONE, *rivals, NATIVE])


FIGURE_13_SEEDS = 3  # a run at 256 instances takes as long as all of Figure 10's first scenario


@figure("13", "Figure 13: variance of step times by cluster size")
def figure_13(world: Pool) -> Row:
    # Half as long from 64 on: a run of 256 instances has as many requests a second as 32 of 8.
    stages = [
        Stage("sharegpt", LARGE.sized(decodes), 0.3 * decodes / 8, seconds=seconds, warm_up=seconds / 4)
        for decodes, seconds in ((8, 2000), (32, 2000), (64, 1000), (128, 1000), (256, 1000))
    ]
    four = NATIVE.set(f"{NATIVE.label}, four moves a round", max_moves=4)
    rivals = [NONE, NONE.placed("sibyl_plus"), CURRENT, NATIVE, four]
    columns = ["variance", "p99", "oom", "moves"]
    return rows(world, stages, rivals, most_seeds=FIGURE_13_SEEDS, columns=columns)


# By lengths: prefill instances, and requests/s that fill 0.6 ("few long") or 0.7 of three decode
# instances' memory in the mean.
WORTH = {"sharegpt": (1, 0.2), "all alike": (1, 0.83), "few long": (1, 0.43), "long prompts": (6, 0.75)}


@figure("worth", "What knowing lengths is worth")
def worth(world: Pool) -> Row:
    stages = [
        Stage(lengths, SMALL.on(f"{prefills}P3D", link), rate, seconds=2000, warm_up=500)
        for link in (SMALL.link_gb_per_second, SLOW_LINK)
        for lengths, (prefills, rate) in WORTH.items()
    ]
    rivals = [
        NONE,
        CURRENT,
        CURRENT.set("w/o prediction, theta 0.2", threshold=0.2),
        # Only whether requests outlast their move, and whether they will fit to their end.
        ORACLE.set("oracle, loads of now alone", horizon_steps=1, points=1),
        ORACLE,
    ]
    columns = ["p99", "goodput", "gap", "variance", "oom", "moves"]
    return rows(world, stages, rivals, CURRENT, columns=columns, compare=ORACLE.label)


@figure("trained", "What a trained predictor is worth")
def trained(world: Pool) -> Row:
    columns = ["p99", "goodput", "gap", "variance", "oom", "moves"]
    rivals = [NONE, CURRENT, CURVE, TRAINED, ORACLE]
    return rows(world, TRAINED_STAGES, rivals, CURVE, columns=columns, compare=TRAINED.label)


def moves_behind(world: Pool, placement: str) -> Row:
    """Runs both ways to move behind a placement."""
    ahead = replace(CURVE, label="STAR, computed ahead", by="recompute")
    tried = [CURVE, ahead, ahead.set(f"{ahead.label}, threshold 0.4", threshold=0.4)]
    rivals = [replace(rival, placement=placement) for rival in (NONE, *tried)]
    return rows(world, [TUNED_ON, ALPACA], rivals, NONE)


@figure("default", "Moves by recomputation, behind the server's default decode policy")
def default_move(world: Pool) -> Row:
    return moves_behind(world, "least_requests")


@figure("default_tokens", "Moves by recomputation, behind the paper's placement")
def default_move_tokens(world: Pool) -> Row:
    return moves_behind(world, "least_tokens")


@figure("t3", "Table 3: how finely lengths are known")
def table_3(world: Pool) -> Row:
    rivals = [NONE, CURRENT, *BINS, CURVE, NATIVE, ORACLE]
    rivals += [NATIVE.set(name, forecast=name) for name in ("pia", "mu_serve")]
    return rows(world, [Stage("sharegpt", LARGE, 0.2)], rivals, CURRENT)


STEP_SECONDS = 0.027  # on the large cluster


@figure("t4", "Table 4: how often lengths are predicted and a round is held")
def table_4(world: Pool) -> Row:
    rivals = [
        replace(
            rival.set(
                f"{rival.label}, each {steps:,} steps",
                repredict_tokens=steps,
                period_seconds=steps * STEP_SECONDS,
            ),
            stride=min(steps, 20),
        )
        for rival in (CURRENT, NATIVE)
        for steps in (1, 20, 100, 1000)
    ]
    return rows(world, [Stage("sharegpt", LARGE, 0.2)], [NONE, *rivals])


@figure("sweep", "What the paper gives no values for, on ShareGPT lengths")
def sweep(world: Pool) -> Row:
    tried: dict[str, tuple[float, ...]] = {
        "threshold": (0.02, 0.05, 0.2, 0.4),
        "horizon_steps": (256, 8192, 32768),
        "half_life_steps": (64, 4096, 0),
        "max_moves": (2, 4),
    }
    rivals = [
        NATIVE.set(f"{name} {value:g}", **{name: value}) for name, values in tried.items() for value in values
    ]
    return rows(world, [TUNED_ON], [NONE, CURRENT, NATIVE, *rivals, FAR], NATIVE)


@figure("judged", "The same on lengths that nothing was tuned on")
def judged(world: Pool) -> Row:
    tried = [NATIVE.set("threshold 0.02", threshold=0.02), NATIVE.set("threshold 0.4", threshold=0.4), FAR]
    return rows(world, [ALPACA, AZURE], [NONE, CURRENT, NATIVE, *tried], NATIVE)


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=5, traces="azure_conv_2023.csv.gz")
