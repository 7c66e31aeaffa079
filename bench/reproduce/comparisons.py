"""Figures 7-9, 11, 12 and 21-26: policies against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from book import Claim, Made, Ours, Row, figure, rounded
from world import (
    DEFAULT,
    HALF,
    LMETRIC,
    SIMULATION,
    VLLM,
    Choice,
    Figures,
    Stage,
    World,
    change,
    mean,
    values,
)

from lmetric_lab.sim.traces import summarize_trace

LAMBDAS = [round(0.1 * step, 1) for step in range(1, 10)]
WEIGHTS = LAMBDAS
RANGES = [1, 2, 4, 8, 16, 32]

# Columns of the tables of runs: figure of a run and factor to the column's unit.
COLUMNS = {
    **{f"ttft_{part}_s": (f"ttft_{part}", 1.0) for part in ("mean", "p50", "p99")},
    **{f"tpot_{part}_ms": (f"tpot_{part}", 1e3) for part in ("mean", "p50", "p99")},
    "hit_ratio": ("hit_ratio", 1.0),
    "imbalance": ("imbalance", 1.0),
}
MEANS = ("ttft_mean_s", "tpot_mean_ms", "hit_ratio")


def columns(runs: Sequence[Figures], names: Iterable[str] = COLUMNS) -> Row:
    """Returns the figures of each seed's run, for a row of a table."""
    return {
        name: rounded(value * factor for value in values(runs, quantity))
        for name in names
        for quantity, factor in [COLUMNS[name]]
    }


def table(world: World, stage: Stage, choices: Sequence[Choice], **more: float) -> list[Row]:
    """Returns all figures of some policies in a scenario, a row per policy."""
    found = world.many(stage, choices, **more)
    return [
        {"stage": stage.label, "policy": choice.name, **columns(runs)}
        for choice, runs in zip(choices, found, strict=True)
    ]


def side_by_side(world: World, rows: dict[str, Callable[[Stage], Choice]]) -> list[Row]:
    """Returns the means of some policies, chosen per scenario, in all scenarios."""
    return [
        {"stage": stage.label, "policy": name, **columns(runs, MEANS)}
        for stage in world.sharing
        for name, runs in zip(rows, world.many(stage, [each(stage) for each in rows.values()]), strict=True)
    ]


def linear(world: World, stage: Stage) -> Choice:
    """Returns BAILIAN's linear combination with a tuned weight."""
    return world.tuned(stage, "linear", "lam", LAMBDAS)


def paper_dynamo(world: World, stage: Stage) -> Choice:
    return world.tuned(stage, "dynamo_linear", "w", WEIGHTS)


def paper_filter(world: World, stage: Stage) -> Choice:
    return world.tuned(stage, "filter", "range", RANGES)


def against(
    world: World, stages: Sequence[Stage], new: Choice, old: Choice | str, quantity: str, **more: float
) -> list[Ours]:
    """Returns the relative change of `quantity` from `old` (or the tuned policy of that kind) to
    `new`."""
    tuned = {"linear": linear, "dynamo": paper_dynamo, "filter": paper_filter}
    found = []
    for stage in stages:
        before = tuned[old](world, stage) if isinstance(old, str) else old
        a, b = world.many(stage, [new, before], **more)
        found.append(Ours(stage.label, change(a, b, quantity)))
    return found


@figure("stages", "What it is played on")
def stages(world: World) -> Made:
    rows = []
    for stage in world.stages:
        told = summarize_trace(stage.judge[0].workload.trace)
        batch = values(world.runs(stage, LMETRIC), "batch")
        block = stage.profile.block_tokens
        rows.append({
            "stage": f"`{stage.label}`",
            "requests": f"{told.requests:,}",
            "prompt, mean": f"{told.input_tokens.mean:,.0f}",
            "p99": f"{told.input_tokens.p99:,.0f}",
            "answer, mean": f"{told.output_tokens.mean:,.0f}",
            "hits in an endless cache": f"{told.ideal_hit_ratio:.0%}",
            "maximum, requests/s": f"{stage.judge[0].requests_per_second / HALF:.1f}",
            "batch at half": f"{np.mean(batch):.1f}",
            "cache, thousand tokens": f"{stage.profile.cache_blocks * block / 1000:,.0f}",
            "block": f"{block}",
        })  # fmt: skip
    return Made(tables={"traces": rows})


@figure("7", "Figures 7 and 8: vLLM's balancer, and with KV-awareness (tuned linear combination)")
def figure_7(world: World) -> Made:
    def changes(quantity: str) -> list[Ours]:
        found = []
        for stage in world.sharing:
            new, old = world.many(stage, [linear(world, stage), VLLM])
            found.append(Ours(stage.label, change(new, old, quantity)))
        return found

    return Made(
        [
            Claim("KV-awareness lowers the mean TTFT (4.2)", "-84% (ChatBot)", "less", changes("ttft_mean")),
            Claim("and the mean TPOT (4.2)", "-17% (ChatBot)", "less", changes("tpot_mean")),
            Claim("since it hits more (Figure 8)", "more, no figure", "more", changes("hit_ratio")),
        ],
    )


@figure("11", "Figures 9 and 11: the weight of the linear combination, swept")
def figure_11(world: World) -> Made:
    hits, late, best, borrowed = [], [], [], []
    sweep = [Choice("linear", {"lam": lam}) for lam in LAMBDAS]
    chosen = {stage.label: linear(world, stage) for stage in world.sharing}
    for stage in world.sharing:
        found = dict(zip(LAMBDAS, world.many(stage, sweep), strict=True))
        hits.append(
            Ours(stage.label, [b["hit_ratio"] - a["hit_ratio"]
                               for a, b in zip(found[0.4], found[0.9], strict=True)])
        )  # fmt: skip
        best_lam = min(LAMBDAS, key=lambda lam: mean(found[lam], "ttft_mean"))
        late.append(Ours(stage.label, change(found[0.9], found[best_lam], "ttft_mean")))
        best.append(Ours(stage.label, [best_lam]))
        own = world.runs(stage, chosen[stage.label])
        others = [
            change(world.runs(stage, other), own, "ttft_mean")
            for label, other in chosen.items()
            if label != stage.label
        ]
        if others:  # a single scenario has no other weight to borrow
            borrowed.append(Ours(stage.label, max(others, key=lambda each: sum(each))))
    return Made(
        [
            Claim("hits rise with the weight, 0.4 to 0.9 (Figure 9)", "rise", "more", hits, "points"),
            Claim("beyond a knee the TTFT rises: 0.9 against the best weight (Figure 11)",
                  "rises (ChatBot: beyond 0.7)", "more", late),
            Claim("the best weight for the mean TTFT depends on the workload",
                  "0.7 ChatBot, 0.55 API", "", best, "ratio"),
            Claim("so it must be tuned: TTFT with the worst of the others' tuned weights, against its own",
                  "no figure", "more", borrowed),
        ],
        {"runs": side_by_side(world, {each.name: lambda _, each=each: each for each in [*sweep, LMETRIC]})},
    )  # fmt: skip


@figure("12", "Figure 12: the paper's filter, its range swept, beside AIBrix's own")
def figure_12(world: World) -> Made:
    sweep = [Choice("filter", {"range": width}) for width in RANGES]
    aibrix = Choice("aibrix_prefix")
    slower, ttft, tpot, own = [], [], [], []
    best = []
    for stage in world.sharing:
        found = dict(zip(RANGES, world.many(stage, sweep), strict=True))
        tuned, bailian = paper_filter(world, stage), linear(world, stage)
        slower.append(
            Ours(stage.label, change(world.runs(stage, tuned), world.runs(stage, bailian), "ttft_mean"))
        )
        own.append(
            Ours(stage.label, change(world.runs(stage, aibrix), world.runs(stage, tuned), "ttft_mean"))
        )
        ttft.append(Ours(stage.label, change(found[16], found[4], "ttft_p50")))
        tpot.append(Ours(stage.label, change(found[16], found[4], "tpot_p50")))
        best.append(Ours(stage.label, [min(RANGES, key=lambda width: mean(found[width], "ttft_mean"))]))
    return Made(
        [
            Claim("range 16 against 4: P50 TTFT (4.5)", "-44% (Coder)", "less", ttft),
            Claim("range 16 against 4: P50 TPOT (4.5)", "-15% (Coder)", "less", tpot),
            Claim("the best range depends on the workload", "2 to 16", "", best, "ratio"),
            Claim("tuned filter against tuned linear, mean TTFT (4.5)", "slower, no figure", "more", slower),
            Claim("AIBrix's own (least loaded, else the longest match within mean + 1 sigma) against the "
                  "tuned filter, mean TTFT", "not in the paper", "", own),
        ],
        {"runs": side_by_side(world, {
            **{choice.name: lambda _, choice=choice: choice for choice in [*sweep, aibrix]},
            "linear, tuned": lambda stage: linear(world, stage),
            "lmetric": lambda _: LMETRIC,
        })},
    )  # fmt: skip


def rivals(world: World, stage: Stage) -> list[Choice]:
    """Returns all policies of the end-to-end comparison; weights are tuned."""
    return [
        LMETRIC, DEFAULT, VLLM, linear(world, stage), paper_filter(world, stage), Choice("aibrix_prefix"),
        paper_dynamo(world, stage), Choice("dynamo"), SIMULATION, Choice("llmd_scorers"),
        Choice("llmd_affinity"), Choice("least_prefill"), Choice("round_robin"), Choice("always_worst"),
    ]  # fmt: skip


def in_hindsight(world: World, stage: Stage, policy: str, knob: str, knobs: Sequence[float]) -> list[float]:
    """Returns, for the parameter value that comes nearest to LMETRIC on the evaluation split
    itself, the larger of its excesses in mean TTFT and mean TPOT. Above 0: no value is as good in
    both."""
    own = world.runs(stage, LMETRIC)
    sweep = world.many(stage, [Choice(policy, {knob: value}) for value in knobs])
    worse = [
        [
            max(both)
            for both in zip(change(runs, own, "ttft_mean"), change(runs, own, "tpot_mean"), strict=True)
        ]
        for runs in sweep
    ]
    return min(worse, key=sum)


@figure("21", "Figures 21 to 24 and 26: end to end")
def figure_21(world: World) -> Made:
    stages, sharing = world.stages, world.sharing

    def hindsight(policy: str, knob: str, knobs: Sequence[float]) -> list[Ours]:
        return [Ours(stage.label, in_hindsight(world, stage, policy, knob, knobs)) for stage in stages]

    return Made(
        [
            Claim("LMETRIC against vLLM, mean TTFT (abstract, 6)", "-92% (ChatBot)", "less",
                  against(world, stages, LMETRIC, VLLM, "ttft_mean")),
            Claim("LMETRIC against vLLM, mean TPOT (abstract -21%, section 6 -24%)", "-21% or -24%", "less",
                  against(world, stages, LMETRIC, VLLM, "tpot_mean")),
            Claim("LMETRIC against BAILIAN (tuned linear), TTFT (abstract)", "-52%", "less",
                  against(world, stages, LMETRIC, "linear", "ttft_mean")),
            Claim("LMETRIC against BAILIAN (tuned linear), TPOT (abstract)", "-20%", "less",
                  against(world, stages, LMETRIC, "linear", "tpot_mean")),
            Claim("LMETRIC against the paper's Dynamo (tuned), mean TTFT", "less, no figure", "less",
                  against(world, stages, LMETRIC, "dynamo", "ttft_mean")),
            Claim("LMETRIC against the paper's Dynamo (tuned), mean TPOT", "less, no figure", "less",
                  against(world, stages, LMETRIC, "dynamo", "tpot_mean")),
            Claim("LMETRIC against Dynamo 1.6's own cost, mean TTFT", "not in the paper", "",
                  against(world, stages, LMETRIC, Choice("dynamo"), "ttft_mean")),
            Claim("LMETRIC against Dynamo 1.6's own cost, mean TPOT", "not in the paper", "",
                  against(world, stages, LMETRIC, Choice("dynamo"), "tpot_mean")),
            Claim("LMETRIC against llm-d (least predicted TTFT), P99 TPOT (6)", "-13% (ChatBot)", "less",
                  against(world, stages, LMETRIC, SIMULATION, "tpot_p99")),
            Claim("with a similar mean TTFT (6)", "about 0", "about 0",
                  against(world, stages, LMETRIC, SIMULATION, "ttft_mean")),
            Claim("linear, best weight in hindsight: larger of its excesses in TTFT and TPOT over LMETRIC",
                  "sub-optimal (4.4)", "more", hindsight("linear", "lam", LAMBDAS)),
            Claim("the paper's filter, likewise", "sub-optimal (4.5)", "more",
                  hindsight("filter", "range", RANGES)),
            Claim("the paper's Dynamo, likewise", "no figure", "more",
                  hindsight("dynamo_linear", "w", WEIGHTS)),
            Claim("LMETRIC's hits against vLLM's (Figure 26)", "much more", "more",
                  against(world, sharing, LMETRIC, VLLM, "hit_ratio")),
            Claim("and against the tuned linear combination's (Figure 26)", "comparable", "about 0",
                  against(world, sharing, LMETRIC, "linear", "hit_ratio")),
        ],
        {"runs": [row for stage in stages for row in table(world, stage, rivals(world, stage))]},
    )  # fmt: skip


LOADS = [0.25, 0.5, 0.7, 0.85, 0.95]


def maximum_loads(world: World) -> tuple[list[Ours], list[Ours], list[Ours], list[Row]]:
    """Measures every policy's own maximum against LMETRIC's, and LMETRIC against vLLM at half of
    vLLM's."""
    most, bailian, own_half = [], [], []
    rows: list[Row] = []
    names = ("lmetric", "vllm", "linear, tuned", "dynamo_linear, tuned", "simulation")
    for stage in world.stages:
        choices = [VLLM, linear(world, stage), paper_dynamo(world, stage), SIMULATION]

        def speeds(seed: int, stage: Stage = stage, choices: list[Choice] = choices) -> list[float]:
            part = stage.part(seed)
            found = (world.max_speed(part.workload, stage.profile, choice) for choice in choices)
            return [part.max_speed, *found]

        each = list(map(speeds, world.seeds[: min(2, len(stage.judge))]))  # bisections are slow
        most.append(Ours(stage.label, [own[1] / own[0] - 1 for own in each]))
        bailian.append(Ours(stage.label, [own[2] / own[0] - 1 for own in each]))
        rates = [
            [len(stage.part(seed).workload) / stage.part(seed).workload.trace.duration_seconds * speed
             for speed in own]
            for seed, own in enumerate(each)
        ]  # fmt: skip
        rows += [
            {"stage": stage.label, "policy": name, "requests_per_second": rounded(column)}
            for name, column in zip(names, zip(*rates, strict=True), strict=True)
        ]
        fraction = HALF * sum(own[1] / own[0] for own in each) / len(each)
        new, old = world.many(stage, [LMETRIC, VLLM], fraction=fraction)
        own_half.append(Ours(stage.label, change(new, old, "ttft_mean")))
    return most, bailian, own_half, rows


@figure("25", "Figure 25: rates")
def figure_25(world: World) -> Made:
    loads = [0.5, 0.85] if world.quick else LOADS
    ttft, gap = [], []
    runs: list[Row] = []
    computed: dict[float, list[Ours]] = {HALF: [], loads[-1]: []}
    late: dict[str, list[Ours]] = {"ttft_mean": [], "tpot_mean": []}
    llmd = {"ttft_mean": [], "tpot_mean": []}  # type: dict[str, list[Ours]]
    for stage in world.stages:
        choices = [LMETRIC, VLLM, linear(world, stage), paper_dynamo(world, stage), SIMULATION]
        by_load = {load: world.many(stage, choices, fraction=load) for load in loads}
        runs += [
            {"stage": stage.label, "policy": choice.name, "load": f"{load:.0%}", **columns(found, MEANS[:2])}
            for load, each in by_load.items()
            for choice, found in zip(choices, each, strict=True)
        ]
        high = by_load[loads[-1]]
        ttft.append(Ours(stage.label, change(high[0], high[1], "ttft_mean")))
        low = by_load[loads[0]]
        gap.append(
            Ours(stage.label, [
                b - a for a, b in zip(change(low[1], low[0], "ttft_mean"),
                                      change(high[1], high[0], "ttft_mean"), strict=True)
            ])
        )  # fmt: skip
        for quantity, found in llmd.items():
            found.append(Ours(stage.label, change(high[0], high[4], quantity)))
            late[quantity].append(Ours(stage.label, change(high[0], high[2], quantity)))
        for load, found in computed.items():
            found.append(Ours(stage.label, change(by_load[load][2], by_load[load][0], "computed")))
    top = f"{loads[-1]:.0%}"
    most, bailian, own_half, maximum = maximum_loads(world)
    return Made(
        [
            Claim("vLLM's maximum load against LMETRIC's", "no figure", "less", most),
            Claim("the tuned linear combination's", "no figure", "less", bailian),
            *(Claim(f"prompt tokens that it computes, against LMETRIC, at {load:.0%}", "no figure", "", found)
              for load, found in computed.items()),
            Claim(f"LMETRIC against tuned linear at {top}, mean TTFT", "less at all rates", "less",
                  late["ttft_mean"]),
            Claim(f"LMETRIC against tuned linear at {top}, mean TPOT", "less at all rates", "less",
                  late["tpot_mean"]),
            Claim("LMETRIC against vLLM at half of vLLM's own maximum, mean TTFT", "-92% (ChatBot)", "less",
                  own_half),
            Claim(f"LMETRIC against vLLM at {top}, mean TTFT", "less at all rates", "less", ttft),
            Claim(f"the gap widens with the rate: vLLM's excess TTFT at {top} less that at {loads[0]:.0%}",
                  "widens", "more", gap, "points"),
            Claim(f"LMETRIC against llm-d at {top}, mean TTFT (6)", "+10% (ToolAgent), else less", "",
                  llmd["ttft_mean"]),
            Claim(f"LMETRIC against llm-d at {top}, mean TPOT (6)", "-30% (ToolAgent), else less", "less",
                  llmd["tpot_mean"]),
        ],
        {"runs": runs, "maximum": maximum},
    )  # fmt: skip
