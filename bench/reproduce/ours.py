"""Rows of our own: questions that the paper leaves open, and effects of a deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from book import Claim, Made, Ours, Row, figure
from comparisons import MEANS, against, columns, linear, table
from world import HALF, LMETRIC, SIMULATION, VLLM, Choice, Figures, Stage, World, change

from lmetric.policies import Columns, policy_function
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare

BS_ALONE = Choice("lmetric", {"bs_offset": 0}, "p_token * bs")
BOTH = [BS_ALONE, LMETRIC]
LIGHT = [0.02, 0.1, 0.25, 0.5, 0.85]


@figure("offset", "BS as printed against BS + 1, as in the authors' code")
def offset(world: World) -> Made:
    rows = [
        {"stage": stage.label, "load": f"{fraction:.0%}", "policy": choice.name, **columns(runs, MEANS)}
        for stage in world.sharing
        for fraction in LIGHT
        for choice, runs in zip(BOTH, world.many(stage, BOTH, fraction=fraction), strict=True)
    ]

    def changes(quantity: str, fraction: float) -> list[Ours]:
        return against(world, world.sharing, BS_ALONE, LMETRIC, quantity, fraction=fraction)

    return Made(
        [
            Claim("BS alone against BS + 1, hits at 10% of the maximum", "BS is printed", "less",
                  changes("hit_ratio", 0.1)),
            Claim("mean TTFT at 10%", "", "more", changes("ttft_mean", 0.1)),
            Claim("hits at half of the maximum", "", "less", changes("hit_ratio", HALF)),
            Claim("mean TTFT at half", "", "more", changes("ttft_mean", HALF)),
        ],
        {"runs": rows},
    )  # fmt: skip


def settings_table(world: World, stage: Stage, choice: Choice, ways: dict[str, dict[str, Any]]) -> list[Row]:
    """Returns a policy under every setting of the simulator."""
    return [
        {"stage": stage.label, "signals": name, **columns(world.runs(stage, choice, **way))}
        for name, way in ways.items()
    ]


def under(world: World, choice: Choice, quantity: str, way: dict[str, Any]) -> list[Ours]:
    """Returns the relative change of `quantity` if the simulator is set another way."""
    return [
        Ours(stage.label, change(world.runs(stage, choice, **way), world.runs(stage, choice), quantity))
        for stage in world.sharing
    ]


DELAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "end of step": {"signals": "step_end"},
    **{
        f"events {events:g} s, reports {reports:g} s": {
            "signals": "delayed", "event_delay_seconds": events, "report_period_seconds": reports
        }
        for events, reports in ((0.02, 1.0), (0.02, 10.0), (0.5, 1.0), (5.0, 1.0), (30.0, 10.0))
    },
}  # fmt: skip


@figure("signals", "Late signals")
def signals(world: World) -> Made:
    usual, late = DELAYS["events 0.02 s, reports 1 s"], DELAYS["events 5 s, reports 1 s"]
    return Made(
        [
            Claim("LMETRIC as live (events 20 ms late, reports every 1 s) against exact signals, mean TTFT",
                  "not in the paper", "", under(world, LMETRIC, "ttft_mean", usual)),
            Claim("the same on engines whose attention is free", "", "", [_without_attention(world, usual)]),
            Claim("as live, mean TPOT", "", "", under(world, LMETRIC, "tpot_mean", usual)),
            Claim("cache events 5 s late, mean TTFT", "", "", under(world, LMETRIC, "ttft_mean", late)),
            Claim("the simulation-based policy as live, mean TTFT", "", "",
                  under(world, SIMULATION, "ttft_mean", usual)),
        ],
        {"runs": [row for stage in world.outer for row in settings_table(world, stage, LMETRIC, DELAYS)]},
    )  # fmt: skip


def _without_attention(world: World, way: dict[str, Any]) -> Ours:
    """Returns the first scenario on engines whose prefill takes equally long for each token at any
    position."""
    usual = world.stages[0]
    profile = usual.profile.model_copy(update={"prefill_seconds_per_attention_pair": 0.0})
    tune, judge = (world.part(part.workload.trace, profile) for part in (usual.tune, usual.judge[0]))
    stage = Stage(f"{usual.label}, no attention", profile, tune, (judge,))
    late, exact = (world.runs(stage, LMETRIC, **settings) for settings in (way, {}))
    return Ours(stage.label, change(late, exact, "ttft_mean"))


FIGURES_SHOWN = (("hits", "hit_ratio"), ("mean TTFT", "ttft_mean"), ("mean TPOT", "tpot_mean"))


@figure("index", "An approximate index (what was placed) against an exact one (the engines' events)")
def index(world: World) -> Made:
    ways = {"exact": {}, "approximate": {"index": "approximate"}}
    return Made(
        [
            Claim(f"LMETRIC, approximate against exact, {name}", "not in the paper", "",
                  under(world, LMETRIC, quantity, ways["approximate"]))
            for name, quantity in FIGURES_SHOWN
        ],
    )  # fmt: skip


def first_of_equals(columns: Columns) -> np.ndarray:
    """Returns LMETRIC's score with ties broken by position: a billionth more per place further
    back."""
    scores = np.asarray(columns["p_token"]) * (np.asarray(columns["bs"]) + 1)
    return scores * (1 + 1e-9 * np.arange(len(scores)))


FIRST = Choice(policy_function(first_of_equals, ["p_token", "bs"]), label="ties to the first")
RANDOM = Choice("p_token * (bs + 1)", label="ties at random")
FIRST_LEAST = Choice(
    policy_function(lambda c: np.asarray(c["bs"]) + 1e-9 * np.arange(len(np.asarray(c["bs"]))), ["bs"]),
    label="least bs, ties to the first",
)
RANDOM_LEAST = Choice("bs", label="least bs, ties at random")


@figure("ties", "Ties at random against ties to the first instance")
def ties(world: World) -> Made:
    def changes(new: Choice, old: Choice, quantity: str, fraction: float) -> list[Ours]:
        return against(world, world.sharing, new, old, quantity, fraction=fraction)

    return Made(
        [
            Claim(f"{what}, first against random, {name} at {fraction:.0%} of the maximum", "", "",
                  changes(*two, quantity, fraction))
            for what, two in (("LMETRIC", (FIRST, RANDOM)), ("least requests", (FIRST_LEAST, RANDOM_LEAST)))
            for fraction in (0.1, HALF)
            for name, quantity in (("hits", "hit_ratio"), ("mean TTFT", "ttft_mean"))
        ],
        {"runs": table(world, world.stages[0], [FIRST, RANDOM, FIRST_LEAST, RANDOM_LEAST], fraction=0.1)},
    )  # fmt: skip


SIZES = {"conversation": (64, 128, 512, 2048), "chat": (16, 64, 256, 512)}


@figure("blocks", "Block size")
def blocks(world: World) -> Made:
    """Returns the same cache in tokens, cut into blocks of other sizes, at the load for the
    scenario's own size. The conversation gives no evidence below 512 tokens; `chat` is made again
    with 16."""
    rows: list[Row] = []
    ours = []
    for label, sizes in SIZES.items():
        stage = world.stage(label)
        found: dict[int, list[Figures]] = {}
        for size in sizes:
            profile = world.profile("qwen3-30b-a3b-h20", size)
            judge = tuple(
                replace(part, workload=prepare(_in_small_blocks(world, stage, seed), profile))
                for seed, part in enumerate(stage.judge)
            )
            cut = replace(stage, label=f"{label}, blocks of {size}", profile=profile, judge=judge)
            found[size] = world.runs(cut, LMETRIC)
        rows += [{"stage": label, "block_tokens": f"{size}", **columns(runs)} for size, runs in found.items()]
        coarse, fine = sizes[-1], sizes[0]
        ours.append(
            Ours(f"{label}, {coarse} against {fine}", change(found[coarse], found[fine], "ttft_mean"))
        )
    claim = Claim("mean TTFT under LMETRIC, coarsest against finest blocks", "16 (vLLM)", "", ours)
    return Made([claim], {"runs": rows})


def _in_small_blocks(world: World, stage: Stage, seed: int) -> Trace:
    if stage.label == "chat":
        return world.synthetic("chat", seed + 1, block_tokens=16)
    trace = stage.part(seed).workload.trace
    return trace.between(0, trace.duration_seconds / 2)


WAYS: dict[str, dict[str, Any]] = {
    "as elsewhere": {},
    "vLLM's admission": {"admission": "vllm"},
    "vLLM's admission, as live": {"admission": "vllm", "signals": "delayed"},
    "8 instances": {"instances": 8},
    "64 instances": {"instances": 64},
}


@figure("robust", "Does the ranking depend on how we simulate?")
def robust(world: World) -> Made:
    """Returns the main comparison under other settings; fleets of another size get a load that
    fits."""

    def each(quantity: str, old: Callable[[Stage], Choice]) -> list[Ours]:
        found = []
        for stage in world.outer:
            for name, way in WAYS.items():
                load = HALF * way.get("instances", 16) / 16
                a, b = world.many(stage, [LMETRIC, old(stage)], fraction=load, **way)
                found.append(Ours(f"{stage.label}, {name}", change(a, b, quantity)))
        return found

    return Made(
        [
            Claim("LMETRIC against vLLM, mean TTFT", "-92%", "less", each("ttft_mean", lambda _: VLLM)),
            Claim("LMETRIC against vLLM, mean TPOT", "-21%, -24%", "less", each("tpot_mean", lambda _: VLLM)),
            Claim("LMETRIC against tuned linear, mean TTFT", "-52%", "less",
                  each("ttft_mean", lambda stage: linear(world, stage))),
            Claim("LMETRIC against llm-d, mean TTFT", "similar", "",
                  each("ttft_mean", lambda _: SIMULATION)),
        ]
    )  # fmt: skip
