"""Figures 10 and 27: how evenly two instances work."""

from __future__ import annotations

import numpy as np
from book import Claim, Made, Ours, Row, figure, rounded
from comparisons import against
from numpy.typing import NDArray
from world import LMETRIC, SIMULATION, Choice, Stage, World

from lmetric_lab.sim.result import Run
from lmetric_lab.sim.summary import WINDOW_SECONDS, windows

BURST_SECONDS = 400.0


def prefill_seconds(stage: Stage, run: Run) -> NDArray[np.float64]:
    """Returns the seconds spent on prompt tokens, shape (instances, windows of 10 s), attention
    left out."""
    timeline = run.timeline
    tokens = windows(
        timeline.prefill_tokens, timeline.bucket_seconds, WINDOW_SECONDS, 0, float(run.arrival_seconds[-1])
    )
    return tokens * stage.profile.prefill_seconds_per_token


def burst(work: NDArray[np.float64]) -> slice:
    """Returns the 400 s in which most is computed; all of it if the run is shorter."""
    length = min(work.shape[1], round(BURST_SECONDS / WINDOW_SECONDS))
    sums = np.convolve(work.sum(axis=0), np.ones(length), "valid")
    return slice(int(np.argmax(sums)), int(np.argmax(sums)) + length)


def pair(
    world: World, stage: Stage, choice: Choice, seed: int, when: slice | None
) -> tuple[float, float, slice]:
    """Returns the mean prefill seconds in a window of the two instances whose work varies most (the
    paper's choice), the busier instance first, and the burst."""
    work = prefill_seconds(stage, world.play(stage, stage.part(seed), choice, seed, 0.5))
    when = burst(work) if when is None else when
    inside = work[:, when]
    two = np.argsort(-inside.std(axis=1), kind="stable")[:2]
    most, least = sorted((float(inside[at].mean()) for at in two), reverse=True)
    return most, least, when


@figure("10", "Figure 10: two instances under two weights of the linear combination")
def figure_10(world: World) -> Made:
    rows: list[Row] = []
    ratio, wider = [], []
    for stage in world.sharing:
        found: dict[float, list[tuple[float, float]]] = {0.7: [], 0.9: []}
        for seed in world.seeds:
            when = None
            for lam, pairs in found.items():
                more, less, when = pair(world, stage, Choice("linear", {"lam": lam}), seed, when)
                pairs.append((more, less))
        rows += [
            {
                "stage": stage.label,
                "weight": f"{lam:g}",
                "busier_prefill_s": rounded(more for more, _ in pairs),
                "other_prefill_s": rounded(less for _, less in pairs),
            }
            for lam, pairs in found.items()
        ]
        gaps = {lam: [more / less for more, less in pairs] for lam, pairs in found.items()}
        ratio.append(Ours(stage.label, gaps[0.7]))
        wider.append(Ours(stage.label, [b / a - 1 for a, b in zip(gaps[0.7], gaps[0.9], strict=True)]))
    return Made(
        [
            Claim("with 0.7 the two are even: busier over other (4.3)", "3.43 s over 3.40 s: 1.01", "", ratio,
                  "ratio"),
            Claim("with 0.9 less so: that ratio against the one with 0.7 (4.3)",
                  "3.57 s over 2.17 s: 1.65, +63%", "more", wider),
            Claim("over the whole trace: imbalance of all instances, 0.9 against 0.7", "no figure", "more",
                  against(world, world.sharing, Choice("linear", {"lam": 0.9}),
                          Choice("linear", {"lam": 0.7}), "imbalance")),
        ],
        {"runs": rows},
    )  # fmt: skip


@figure("27", "Figure 27: imbalance under LMETRIC and llm-d")
def figure_27(world: World) -> Made:
    return Made(
        [
            Claim("LMETRIC is better balanced than llm-d: all instances", "better, no figure", "less",
                  against(world, world.stages, LMETRIC, SIMULATION, "imbalance")),
            Claim("the two instances whose work varies most: their gap", "smaller, no figure", "less",
                  against(world, world.stages, LMETRIC, SIMULATION, "pair_gap")),
        ],
    )  # fmt: skip
