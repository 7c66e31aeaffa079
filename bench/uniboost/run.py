"""Reruns the UniBoost paper's experiments on the engine model, and measures how much of it stock
engines keep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from convergence import ends_until_learned
from tables import rendered
from world import (
    BASE,
    BASE_WAITS,
    DIST,
    GITTINS,
    GUARDED,
    GUARDED_STEPS,
    LAS,
    SARATHI,
    SJF,
    SRPT,
    SUBMITTED,
    TRAIL,
    UNIBOOST,
    UNIBOOST_STEPS,
    UNIBOOST_WAITS,
    VTC,
    Order,
    Stage,
    attained,
    outcome,
)

from rerun import Pool, Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "uniboost.md", rendered)
figure = RERUN.figure

LLAMA = "Llama-8B, A100"
MAIN = [TRAIL, SJF, SARATHI, LAS, DIST, UNIBOOST, SUBMITTED, GITTINS]
LATENCIES = [f"{what} {at}" for what in ("e2e", "ttft", "tpot") for at in ("mean", "p95", "p99")]


def rows(
    world: Pool,
    kind: str,
    stages: Sequence[Stage],
    orders: Sequence[Order],
    base: Order,
    most_seeds: int | None = None,
    **told: Any,
) -> Row:
    """Runs all orders on all scenarios, each figure one number per seed."""
    kept = {"e2e p99", *told["columns"], *told.get("over", []), *told.get("of", [])}

    def seeds_of(stage: Stage) -> int | None:
        # The largest clusters take as long as all others together.
        return 1 if stage.instances > 256 else most_seeds

    made = []
    for stage, order, found in world.all(outcome, stages[:1] if world.quick else stages, orders, seeds_of):
        figures = [{name: one[name] for name in one if name in kept} for one in found]
        made.append({"stage": stage.label, "order": order.label, **columns(figures, digits=5)})
        print(f"{stage.label}: {order.label}: p99 {made[-1]['e2e p99']}", file=sys.stderr, flush=True)
    return {"kind": kind, "base": base.label, "seeds": len(world.seeds[:most_seeds]), "rows": made, **told}


@figure("t2", "Table 2: against TRAIL+ with perfect lengths")
def table_2(world: Pool) -> Row:
    stages = [Stage(LLAMA, "mix-2", 0.99), Stage(LLAMA, "mix-2", 0.99, most_sequences=64)]
    return rows(world, "improvement", stages, MAIN, TRAIL, columns=[*LATENCIES, "tokens a second"])


@figure("6", "Figure 6: percentiles over UniBoost's, reasoning")
def figure_6(world: Pool) -> Row:
    stages = [Stage("Qwen-72B, 4 A100", "reasoning", 0.99)]
    at = ("p50", "p90", "p95", "p99", "p99.9")
    shown = [f"{what} {q}" for what in ("e2e", "ttft", "tpot") for q in at]
    return rows(world, "relative", stages, MAIN, UNIBOOST, columns=shown)


@figure("7", "Figure 7: the ladder, memory short")
def figure_7(world: Pool) -> Row:
    stages = [Stage("CodeLlama-34B, A100", "mix-2", rho, requests=4000) for rho in (0.8, 0.9, 0.95, 1.0)]
    shown = ["e2e mean", "e2e p90", "e2e p99", "ttft p99", "tpot p99", "preempted"]
    orders = [SARATHI, LAS, DIST, BASE, GUARDED, UNIBOOST]
    return rows(world, "absolute", stages, orders, LAS, columns=shown, over=["e2e mean", "e2e p99"])


@figure("8", "Figure 8: the strictest SLO that is kept")
def figure_8(world: Pool) -> Row:
    head = [
        "stage",
        "order",
        *(f"{what}, {share:.0%} of requests" for what in ("TTFT", "end to end") for share in (0.95, 0.99)),
    ]
    lines = []
    for mixture in ("mix-1", "mix-2", "azure"):
        stage = Stage(LLAMA, mixture, 0.99)
        base = next(world.all(outcome, [replace(stage, rho=0.9)], [SARATHI]))[2]
        orders = [SARATHI, SJF, TRAIL, LAS, DIST, UNIBOOST, SUBMITTED]
        for _, order, found in world.all(outcome, [stage], orders):
            cells = [stage.label, order.label]
            for what in ("ttft", "e2e"):
                for q in ("p95", "p99"):
                    each = [
                        then[f"{what} p95"] / now[f"{what} {q}"]
                        for then, now in zip(base, found, strict=True)
                    ]
                    cells.append(attained(each))
            lines.append(cells)
    return {"kind": "plain", "table": [dict(zip(head, line, strict=True)) for line in lines]}


@figure("t3", "Tables 3 to 5: do long requests starve?")
def table_3(world: Pool) -> Row:
    # 5,000 long requests on eight engines.
    stages = [
        Stage("Llama-8B, H100", "short and long", 0.99, instances=8, requests=6000, most_sequences=places)
        for places in (256, 64)
    ]
    shown = [
        "short e2e mean",
        "short e2e p99",
        "long e2e mean",
        "long e2e p99",
        "long e2e max",
        "long pause p99",
    ]
    orders = [UNIBOOST, SARATHI, SJF, SRPT, LAS, SUBMITTED]
    return rows(
        world,
        "absolute",
        stages,
        orders,
        SARATHI,
        columns=[*shown, "slope, s a request"],
        over=["short e2e p99", "long e2e p99"],
    )


SENSITIVE = ["e2e mean", "e2e p99", "ttft p99", "gap p99", "tpot mean", "preempted", "tokens a second"]


def of_uniboost(world: Pool, settings: Sequence[str], stage: Stage) -> Row:
    """Returns UniBoost with other settings."""
    orders = [SARATHI, UNIBOOST, *(Order(f"UniBoost, {told}", f"uniboost({told})") for told in settings)]
    return rows(world, "absolute", [stage], orders, UNIBOOST, columns=SENSITIVE, over=["e2e mean", "e2e p99"])


TIGHT = Stage(LLAMA, "mix-2", 0.99)


@figure("t6", "Table 6: bins")
def table_6(world: Pool) -> Row:
    return of_uniboost(world, [f"bin_tokens={k}" for k in (1, 64, 512, 1024)], TIGHT)


@figure("t7", "Table 7: hysteresis")
def table_7(world: Pool) -> Row:
    return of_uniboost(world, [f"hysteresis_seconds={seconds}" for seconds in (0, 0.3, 0.5, 10)], TIGHT)


@figure("gammas", "Gamma: fixed, learned, and where it starts")
def gammas(world: Pool) -> Row:
    fixed = [
        Order(f"fixed at {gamma:g}, {kind}", f"{name}(gamma={gamma})")
        for gamma in (0.001, 0.01, 0.1, 1)
        for kind, name in (("full", "uniboost_memguard"), ("prompts only", "distboost"))
    ]
    started = [Order(f"learned from {gamma:g} on", f"uniboost(gamma={gamma})") for gamma in (0.01, 1)]
    stages = [TIGHT, Stage(LLAMA, "azure", 0.99)]
    orders = [SARATHI, UNIBOOST, *started, *fixed]
    return rows(
        world, "relative", stages, orders, SARATHI, columns=["e2e mean", "e2e p95", "e2e p99", "ttft p99"]
    )


@figure("t8", "Table 8: tokens of a step")
def table_8(world: Pool) -> Row:
    # Every decode gets its token in every step: no more slots than tokens.
    stages = [
        Stage(LLAMA, "mix-2", 0.99, chunk_tokens=tokens, most_sequences=min(tokens, 256))
        for tokens in (128, 512, 1024, 2048)
    ]
    return rows(world, "improvement", stages, [SARATHI, UNIBOOST, SUBMITTED], SARATHI, columns=LATENCIES)


ROUTERS = ("random", "round_robin", "least_requests", "lmetric")
BEHIND = ["e2e mean", "e2e p90", "e2e p99", "ttft mean", "ttft p99", "tpot mean", "tpot p99"]


BEHIND = ["e2e mean", "e2e p90", "e2e p99", "ttft mean", "ttft p99", "tpot mean", "tpot p99"]
# Shows whether good routing leaves anything to order.
ABSOLUTE = ["e2e mean", "e2e p99", "ttft mean", "ttft p99"]
CLUSTER_SEEDS = 2


@figure("t9", "Table 9: behind global routers, 64 engines")
def table_9(world: Pool) -> Row:
    # The paper prints no load. So short a run has no queues below the load that the engines carry.
    stages = [
        Stage("Llama-8B, H100", mixture, 1.1, instances=64, policy=policy, requests=800)
        for mixture in ("mix-1", "azure")
        for policy in ("random", "round_robin", "least_requests", "lmetric")
    ]
    orders = [SARATHI, UNIBOOST, SUBMITTED]
    return rows(world, "relative", stages, orders, SARATHI, CLUSTER_SEEDS, columns=BEHIND, of=ABSOLUTE)


@figure("t10", "Table 10: cluster sizes")
def table_10(world: Pool) -> Row:
    stages = [
        Stage("Llama-8B, A100", "mix-1", 1.1, instances=instances, requests=600)
        for instances in (32, 64, 128, 512)
    ]
    orders = [SARATHI, UNIBOOST, SUBMITTED]
    return rows(world, "relative", stages, orders, SARATHI, CLUSTER_SEEDS, columns=BEHIND[:5])


@figure("kept", "What an order given at submission keeps, by places and lengths")
def kept(world: Pool) -> Row:
    stages = [
        Stage(LLAMA, mixture, rho, requests=5000, cv=cv, most_sequences=places)
        for mixture in ("azure", "mix-1", "mix-2", "short and long")
        for places in (1, 8, 64, 256)
        for rho, cv in ((0.9, 3.0), (0.99, 1.0))
    ]
    orders = [SARATHI, UNIBOOST, SUBMITTED, DIST, SRPT]
    return rows(
        world, "relative", stages, orders, SARATHI, columns=["e2e mean", "e2e p95", "e2e p99", "ttft p99"]
    )


# Of Table 2 (two), Figure 6, Figure 7, Tables 9 and 3 to 5; the last two on one engine.
READINGS = [
    Stage(LLAMA, "mix-2", 0.99),
    Stage(LLAMA, "mix-2", 0.99, most_sequences=64),
    Stage("Qwen-72B, 4 A100", "reasoning", 0.99),
    Stage("CodeLlama-34B, A100", "mix-2", 0.95, requests=4000),
    Stage(LLAMA, "azure", 0.99),
    Stage(LLAMA, "short and long", 0.99, requests=5000, most_sequences=64),
]


def readings(world: Pool, orders: Sequence[Order]) -> Row:
    """Orders that read the paper in different ways, over FCFS."""
    shown = ["e2e mean", "e2e p99", "ttft mean", "ttft p99", "tpot p99", "preempted", "tokens a second"]
    over = ["e2e mean", "e2e p99", "ttft p99"]
    return rows(world, "absolute", READINGS, orders, SARATHI, columns=shown, over=over)


@figure("decodes", "The paper's rule for decodes")
def decodes(world: Pool) -> Row:
    return readings(world, [SARATHI, TRAIL, BASE, BASE_WAITS, UNIBOOST, UNIBOOST_WAITS])


@figure("seconds", "The seconds of a token of work")
def seconds(world: Pool) -> Row:
    return readings(world, [SARATHI, TRAIL, GUARDED, GUARDED_STEPS, UNIBOOST, UNIBOOST_STEPS])


@figure("tenants", "A bulk tenant beside an interactive one")
def tenants(world: Pool) -> Row:
    stages = [Stage(LLAMA, "chat and bulk", rho, requests=5000, most_sequences=64) for rho in (0.9, 1.1)]
    shown = ["short e2e mean", "short e2e p99", "short ttft p99", "long e2e mean", "long e2e p99"]
    return rows(
        world,
        "absolute",
        stages,
        [SARATHI, SUBMITTED, UNIBOOST, VTC],
        SARATHI,
        columns=shown,
        over=shown[1:2],
    )


@figure("gamma", "How soon gamma follows a shift")
def gamma(world: Pool) -> Row:
    lines = []
    for before, after in ((0.05, 0.5), (0.5, 0.05), (0.1, 0.2), (0.2, 0.1)):
        each = [ends_until_learned(before, after, seed) for seed in world.seeds]
        lines.append(
            [f"{before:g}", f"{after:g}", f"{np.mean(each):,.0f}", f"{min(each):,}", f"{max(each):,}"]
        )
    head = ["tail's rate before, 1/s", "after", "ends until gamma is within a third of it", "least", "most"]
    return {"kind": "plain", "table": [dict(zip(head, line, strict=True)) for line in lines]}


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, Pool, seeds=5, traces="azure_conv_2023.csv.gz")
