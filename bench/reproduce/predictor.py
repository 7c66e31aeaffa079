"""Figures 15 and 16: least predicted TTFT, with the profile of the engines and with another one."""

from __future__ import annotations

import numpy as np
from book import Claim, Made, Ours, Row, figure
from comparisons import against, linear, table
from world import HALF, SIMULATION, Choice, Stage, World, change

from lmetric.policies import Columns, policy_function
from lmetric.profiles import Profile
from lmetric_lab.sim.summary import measured

OTHER = {"qwen2-7b-h20": "qwen3-30b-a3b-h20"}  # every other profile is taken for Qwen2-7B's


def wrong(world: World, stage: Stage) -> Profile:
    """Returns the profile of another model on the same GPU, as in the paper's untuned simulator."""
    right = stage.profile
    for own, other in OTHER.items():
        if (
            right.prefill_seconds_per_token
            == world.profile(own, right.block_tokens).prefill_seconds_per_token
        ):
            return world.profile(other, right.block_tokens)
    return world.profile("qwen2-7b-h20", right.block_tokens)


def misjudged(stage: Stage) -> Profile:
    """Returns a profile of no real model: only the fixed cost of prefill counts, so only queue
    lengths matter."""
    return stage.profile.model_copy(
        update={
            "prefill_seconds_per_token": stage.profile.prefill_seconds_per_token / 100,
            "prefill_seconds_per_attention_pair": 0.0,
        }
    )


def believing(label: str, profile: Profile) -> Choice:
    return Choice("simulation", {}, label, {"predictor": profile})


def errors(world: World, stage: Stage, seed: int, predictor: Profile) -> np.ndarray:
    """Returns predicted over real TTFT, minus 1, of each measured request."""
    predicted: list[float] = []

    def least(columns: Columns) -> np.ndarray:
        scores = np.array(columns["predicted_ttft_seconds"])
        predicted.append(float(scores.min()))
        return scores

    policy = policy_function(least, ["predicted_ttft_seconds"], name="least predicted TTFT")
    run = world.play(stage, stage.part(seed), Choice(policy), seed, HALF, predictor=predictor)
    order = np.argsort(run.arrival_seconds, kind="stable")
    by_request = np.empty(len(run))
    by_request[order] = predicted
    kept = measured(run.arrival_seconds, (0.1, 0.9))
    return by_request[kept] / run.ttft_seconds[kept] - 1


@figure("15", "Figures 15 and 16: the simulation-based policy and its simulator")
def figure_15(world: World) -> Made:
    far, far_wrong, ttft, tpot, beside_linear = [], [], [], [], []
    rows: list[Row] = []
    for stage in world.stages:
        bad = wrong(world, stage)
        for found, predictor in ((far, stage.profile), (far_wrong, bad)):
            each = [errors(world, stage, seed, predictor) for seed in world.seeds]
            found.append(Ours(stage.label, [float(np.mean(np.abs(e) > 0.2)) for e in each]))
        choices = [
            SIMULATION,
            believing("simulation, another model's", bad),
            believing("simulation, prefill taken for nothing", misjudged(stage)),
            linear(world, stage),
        ]
        right, other, _, bailian = world.many(stage, choices)
        ttft.append(Ours(stage.label, change(right, other, "ttft_p99")))
        tpot.append(Ours(stage.label, change(right, other, "tpot_p99")))
        beside_linear.append(Ours(stage.label, change(right, bailian, "tpot_p99")))
        rows += table(world, stage, choices)
    return Made(
        [
            Claim("requests whose TTFT the right simulator misses by over 20% (Figure 16)", "about 10%", "",
                  far, "share"),
            Claim("the same, another model's simulator", "more, no figure", "", far_wrong, "share"),
            Claim("P99 TTFT, right against another model's (4.6: tail TTFT)", "-75.6%", "less", ttft),
            Claim("P99 TPOT, right against another model's (4.6: tail TPOT)", "-79.7%", "less", tpot),
            Claim("P99 TPOT, right simulator against tuned linear (4.6)", "+71.1% (ToolAgent), else less", "",
                  beside_linear),
            Claim("mean TTFT, right simulator against tuned linear (4.6)", "less on some traces", "",
                  against(world, world.stages, SIMULATION, "linear", "ttft_mean")),
        ],
        {"runs": rows},
    )  # fmt: skip
