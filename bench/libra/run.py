"""Reruns the evaluation of the Libra paper on engines with the step times that its own tables
give."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from tables import rendered
from world import (
    ALL,
    BOUNDED,
    BY_LOAD,
    BY_LOAD_ESTIMATED,
    CHUNKS,
    COMPOSED,
    DEFAULT,
    DISAGGREGATED,
    ESTIMATED,
    GAINFUL,
    LIBRA,
    LIBRA_ESTIMATED,
    LIBRA_STAGED,
    LIBRA_THREE,
    NAMED,
    STAGED,
    THREE_BY_LOAD,
    TUNED,
    TUNING_SEED,
    WARM_UP,
    Fleet,
    Outcome,
    System,
    World,
    capacity,
    most,
    outcome,
    run,
)

from rerun import Rerun, columns

Row = dict[str, Any]
RERUN = Rerun(Path(__file__).parent, "libra.md", rendered)
figure = RERUN.figure
A100 = Fleet()
SHAPES = ("8192/32", "2048/512", "219/1467")  # Table 1


def row(group: str, system: System, figures: dict[str, list[float]]) -> Row:
    """Returns a row of a group's table, and prints it."""
    chunk = f", {system.chunk}" if system.label == TUNED.label else ""
    made = {"group": group, "system": f"{system.label}{chunk}", **figures}
    shown = {name: made[name] for name in ("rate", "requests", "goodput") if name in made}
    print(f"{group}: {made['system']}: {shown}", file=sys.stderr, flush=True)
    return made


def rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


BELOW_BALANCE = 2.3  # requests/s: less than Figure 5's 2.5


@figure("5", "Figure 5: throughput by the token at which all requests are cut, 1,024 + 1,024 tokens")
def figure_5(world: World) -> Row:
    fleet = Fleet(profile="qwen2.5-32b-figure-5")
    beyond = 1.5 * most("1024/1024", fleet)  # the served rate then is the sustainable rate
    cuts = (1024, 1358) if world.quick else (1024, 1100, 1200, 1280, 1358, 1440, 1520, 1600)
    # Without Algorithm 2, as the figure is about throughput alone.
    pair = System("", fixed_pair=True)
    systems = [replace(pair, label=f"cut at {cut:,}", forced=(cut - 0.5) / 2048) for cut in cuts]
    others = [replace(LIBRA, slo=False), replace(BY_LOAD, slo=False), DEFAULT]
    found = [
        *world.plays("1024/1024", [beyond], [*systems, *others], fleet),
        *world.plays("1024/1024", [BELOW_BALANCE], [*systems, *others], fleet),
    ]
    return {"rows": [row(f"{rate:.1f}/s", system, columns(each)) for rate, system, each in found]}


@figure("predictor", "The execution predictor with and without N_max")
def predictor(world: World) -> Row:
    rows = []
    fitted = Fleet(profile="qwen2.5-32b-figure-5")
    systems = [LIBRA, BY_LOAD, GAINFUL, *BOUNDED]
    best = System("cut at 1,358", fixed_pair=True, forced=(1358 - 0.5) / 2048)
    without_slo = [best, *(replace(system, slo=False) for system in systems)]
    # Figure 5 below its balance and in a backlog; then the workloads of Figure 8 and Table 1 in the
    # same way.
    for rate in (BELOW_BALANCE, 1.5 * most("1024/1024", fitted)):
        for _, system, found in world.plays("1024/1024", [rate], without_slo, fitted):
            rows.append(row(f"1024/1024 on the 32B model, {rate:.1f}/s", system, columns(found)))
    for workload in world.some(("azure-code", "burstgpt", "mini-reasoning", "2048/512", "219/1467")):
        for share in (0.8, 1.3):
            rate = share * most(workload, A100)
            for _, system, found in world.plays(workload, [rate], [COMPOSED, *systems], A100):
                rows.append(row(f"{workload}, {rate:.2f}/s", system, columns(found)))
    return {"rows": rows}


@figure("table_1", "Table 1: three shapes on two GPUs")
def table_1(world: World) -> Row:
    rows = []
    for shape in world.some(SHAPES):
        beyond = 1.5 * most(shape, A100)
        systems = [DISAGGREGATED, DEFAULT, TUNED, COMPOSED, LIBRA, BY_LOAD, GAINFUL]
        for _, system, most_of in world.plays(shape, [beyond], systems, A100):
            rate = 0.95 * float(np.mean([each.requests for each in most_of]))
            ((_, _, near),) = world.plays(shape, [rate], [system], A100)
            told = columns(near) | {"saturated": rounded([each.requests for each in most_of])}
            rows.append(row(shape, system, told))
    return {"rows": rows}


def capacities(world: World, workloads: Sequence[str], systems: Sequence[System], fleet: Fleet) -> Row:
    found = world.capacities(workloads, systems, fleet)
    return {"rows": [row(workload, system, columns(each)) for workload, system, each in found]}


@figure("9", "Figure 9 and Table 3: serving capacity")
def figure_9(world: World) -> Row:
    return capacities(world, world.some((*NAMED, "hybrid", "8192/32")), ALL, A100)


@figure("8", "Figure 8: goodput over the rate")
def figure_8(world: World) -> Row:
    rows = []
    for workload in world.some(("azure-code", "burstgpt", "arxiv", "mini-reasoning")):
        whole = most(workload, A100)
        rates = [share * whole for share in ((0.7,) if world.quick else (0.4, 0.6, 0.8, 1.0, 1.3))]
        for rate, system, found in world.plays(workload, rates, ALL, A100):
            rows.append(row(f"{workload}, {rate:.2f}/s", system, columns(found)))
    return {"rows": rows}


LARGER = {"32B": "qwen2.5-32b-2xa100", "72B": "qwen2.5-72b-4xa100"}


@figure("larger", "Figure 8, larger models: goodput at a load near the limit, rooflines")
def larger(world: World) -> Row:
    rows = []
    for model, profile in LARGER.items():
        fleet = Fleet(profile=profile)
        for workload in world.some(("azure-code", "mini-reasoning")):
            rate = 0.8 * most(workload, fleet)
            for _, system, found in world.plays(workload, [rate], ALL, fleet):
                rows.append(row(f"{model}, {workload}, {rate:.2f}/s", system, columns(found)))
    return {"rows": rows}


def quantiles(workload: str, rate: float, system: System, seed: int) -> dict[str, float]:
    """Returns the TBT of a run."""
    played = run(workload, rate, system, A100, seed)
    told = {f"p{100 * q:g}": played.gap_seconds(q) or 0.0 for q in (0.5, 0.9, 0.99)}
    gaps = (played.output_tokens - 1).sum()
    return told | {
        "within": float(1 - played.slow_tokens.sum() / gaps),
        "worst": float(played.worst_gap_seconds.max()),
        "ttft": float(played.ttft_seconds.mean()),
    }


def near_capacity(world: World, workload: str, system: System, share: float) -> float:
    """Returns requests/s, by a seed that no result uses."""
    found: Outcome = world.submit(capacity, workload, system, A100, TUNING_SEED).result()
    return share * found.rate


@figure("10", "Figure 10: time between tokens with and without Algorithm 2, Azure Code")
def figure_10(world: World) -> Row:
    rate = near_capacity(world, "azure-code", LIBRA, 0.95)
    plain = replace(LIBRA, label="Libra as printed, without Algorithm 2", slo=False)
    rows = []
    without = [replace(plain, chunk=chunk, label=f"{plain.label}, chunk {chunk}") for chunk in CHUNKS]
    cases = [("azure-code", rate, system) for system in (LIBRA, *without)]
    for (_, _, system), found in world.each(quantiles, cases):
        rows.append(row(f"azure-code, {rate:.2f}/s", system, columns(found)))
    return {"rows": rows}


def seam(rate: float, system: System, seed: int) -> dict[str, float]:
    """Returns the seconds that split requests wait between their parts, under Mini Reasoning."""
    played = run("mini-reasoning", rate, system, A100, seed)
    cut = (played.cut_tokens >= 0) & (played.arrival_seconds >= WARM_UP)
    waits = (played.decode_start_seconds - played.handoff_seconds)[cut]
    return {
        "wait": float(np.nanmean(waits)),
        "wait_p99": float(np.nanpercentile(waits, 99)),
        "slow": float(played.slow_tokens[cut].sum() / (played.output_tokens[cut] - 1).sum()),
    }


@figure("transfer", "Section 6.5: KV moved chunk by chunk, or at the end, Mini Reasoning")
def transfer(world: World) -> Row:
    rate = near_capacity(world, "mini-reasoning", LIBRA, 0.7)
    rows = []
    for speed in (50, 25, 3):
        ways = {"at the end": f"{speed}", "chunk by chunk": f"{speed},chunks"}
        cases = [(rate, replace(LIBRA, label=how, transfer=told)) for how, told in ways.items()]
        for (_, system), found in world.each(seam, cases):
            rows.append(row(f"{speed} GB/s, {rate:.2f}/s", system, columns(found)))
    return {"rows": rows}


def spread_out(rate: float, system: System, spread: tuple[str, float], seed: int) -> Outcome:
    return outcome(run("219/1467", rate, system, A100, seed, spread))


@figure("table_5", "Table 5: answers that are not as long as the scheduler takes them for, 219/1467")
def table_5(world: World) -> Row:
    rate = near_capacity(world, "219/1467", LIBRA, 0.95)
    spreads = [("normal", width) for width in (0.0, 10.0, 50.0, 100.0)] + [
        ("log-normal", 0.5),
        ("log-normal", 1.0),
    ]
    rows = []
    for kind, width in spreads[:1] if world.quick else spreads:
        unit = "tokens" if kind == "normal" else "of the logarithm"
        group = f"{kind}, deviation {width:g} {unit}, {rate:.2f}/s"
        systems = (LIBRA_ESTIMATED, BY_LOAD_ESTIMATED, LIBRA, BY_LOAD, ESTIMATED, GAINFUL, COMPOSED)
        cases = [(rate, system, (kind, width)) for system in systems]
        for (_, system, _), found in world.each(spread_out, cases):
            rows.append(row(group, system, columns(found)))
    return {"rows": rows}


@figure("table_2", "Table 2: time to first token at 0.9 of what 1P1D sustains")
def table_2(world: World) -> Row:
    rows = []
    for workload in world.some(("burstgpt", "arxiv", "mini-reasoning")):
        rate = near_capacity(world, workload, DISAGGREGATED, 0.9)
        for _, system, found in world.plays(
            workload, [rate], [DISAGGREGATED, LIBRA, GAINFUL, COMPOSED], A100
        ):
            rows.append(row(f"{workload}, {rate:.2f}/s", system, columns(found)))
    return {"rows": rows}


def by_gpu(told: Row, fleet: Fleet) -> Row:
    """Returns rates of the fleet per GPU."""
    shares = {name: rounded([value / fleet.gpus for value in told[name]]) for name in ("rate", "goodput")}
    return told | shares


@figure("parallel", "Section 6.6 with data parallelism: half Azure Code, half Mini Reasoning, by GPU")
def parallel(world: World) -> Row:
    rows = []
    for instances, roles in ((2, ("1P1D",)), (3, ("2P1D", "1P2D")), (5, ("4P1D", "1P4D"))):
        fleet = replace(A100, instances=instances)
        pools = [System(told, roles=told) for told in roles]
        others = [BY_LOAD, GAINFUL, COMPOSED] + ([LIBRA] if instances == 2 else [])
        for _, system, found in world.capacities(["half-and-half"], [*pools, *others], fleet):
            rows.append(row(f"{instances} GPUs", system, by_gpu(columns(found), fleet)))
    return {"rows": rows}


@figure("table_6", "Table 6: tensor parallelism of either pool, by GPU")
def table_6(world: World) -> Row:
    pair = replace(DISAGGREGATED, label="")
    cases = [
        (f"{p}P{d}D by tensor parallelism", replace(A100, parallel=(p, d)), pair)
        for p, d in ((4, 1), (1, 4), (2, 1), (1, 2), (1, 1))
    ]
    whole = [(system.label, A100, system) for system in (LIBRA, GAINFUL, COMPOSED)]
    rows = []
    for label, fleet, system in cases[-1:] + whole[:1] if world.quick else cases + whole:
        for _, _, found in world.capacities(["half-and-half"], [system], fleet):
            told = by_gpu(columns(found), fleet)
            rows.append(row("half Azure Code, half Mini Reasoning", replace(system, label=label), told))
    return {"rows": rows}


THINK_SLO = 0.2  # assumed: the paper says "relaxed"


@figure("table_7", "Table 7: requests that think, in two parts and in three")
def table_7(world: World) -> Row:
    """Measures capacity and goodput, with one SLO for all tokens and with another for reasoning
    tokens."""
    one = [DISAGGREGATED, LIBRA, COMPOSED]
    each = [*one, LIBRA_STAGED, LIBRA_THREE, THREE_BY_LOAD, STAGED]
    rows = []
    for slo, systems in ((None, one), (THINK_SLO, each)):
        found = world.capacities(["thinking"], systems, replace(A100, think_slo=slo))
        name = (
            "100 ms for every token"
            if slo is None
            else f"100 ms for answers, {slo * 1e3:.0f} ms for reasoning tokens"
        )
        rows += [row(name, system, columns(outcomes)) for _, system, outcomes in found]
    return {"rows": rows}


@figure("table_8", "Table 8: H100, data parallelism on three GPUs, and 50 ms on two")
def table_8(world: World) -> Row:
    three = Fleet(profile="qwen2.5-14b-h100", instances=3)
    strict = Fleet(profile="qwen2.5-14b-h100", slo=0.05)
    rows = []
    for workload, roles in (("azure-code", "2P1D"), ("mini-reasoning", "1P2D")):
        pools = System(roles, roles=roles)
        cases = (
            ("3 GPUs, 100 ms", three, [pools, TUNED, COMPOSED, BY_LOAD, GAINFUL]),
            ("2 GPUs, 50 ms", strict, ALL),
        )
        for case, fleet, systems in cases:
            for _, system, found in world.capacities([workload], systems, fleet):
                rows.append(row(f"{workload}, {case}", system, columns(found)))
        if world.quick:
            break
    return {"rows": rows}


if __name__ == "__main__":
    RERUN.main_of_pool(__doc__, World, seeds=5, traces="azure_conv_2023.csv.gz")
