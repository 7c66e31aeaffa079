"""Figures that the verdicts of the UniBoost study quote, from its results."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from rerun import bounds, spread
from verdicts import Raw, Row, Scenarios, Span

# Settings, and figures of the paper.
WRITTEN = (
    "99th", "gamma of 0.1", "a fixed 0.1", "Algorithm 1", "Eq. 9", "72B",
    "10% more",
    "P99", "P95", "MLFQ+", "0.01, 0.1 and 1", "against 0.1", "with 128", "512 to 2,048",
    "256 to 1,024", "1,024", "64th", "0 to 0.5", "95%",
)  # fmt: skip
FCFS, UNIBOOST, SUBMITTED, SRPT = "Sarathi", "UniBoost", "submit-time UniBoost", "TRAIL+"
OTHERS = ("random", "round_robin", "least_requests")


def less(row: Row, base: Row, name: str) -> str:
    """Returns percent under the base, seed by seed: `5% ±4`."""
    each = [1 - a / b for a, b in zip(row[name], base[name], strict=True)]
    return spread(each, 100, 0).replace(" ±", "% ±")


def figures(raw: Raw) -> dict[str, Any]:
    """Returns every field of verdicts.md."""
    mix, reasoning, ladder = raw.scenarios("t2").without("places"), raw.scenarios("6"), raw.scenarios("7")
    fair, bins, stubborn = raw.scenarios("t3").without("places"), raw.scenarios("t6"), raw.scenarios("t7")
    chunks, fleet, sizes = raw.scenarios("t8"), raw.scenarios("t9"), raw.scenarios("t10")
    gammas, plans = raw.scenarios("gammas"), raw.bench("plans")["priorities"]
    small = chunks.of("128 tokens a step")
    large = chunks.without("128 places")
    middle, low, high = bounds(reasoning.row(FCFS)["e2e p99"], reasoning.row(UNIBOOST)["e2e p99"])
    slo = {
        (stage.split(", ")[2], order): row
        for stage, order, *row in (line.values() for line in raw("8")["table"])
    }

    def kept(order: str, *columns: int, of: tuple[str, ...] = ("mix-1", "mix-2", "azure")) -> Span:
        """Returns how strict an SLO an order keeps, by workload."""
        return Span(float(slo[each, order][column].split()[0]) for each in of for column in columns)

    def change(scenarios: Scenarios, ours: str, base: str, name: str) -> Span:
        return Span(ratio - 1 for ratio in scenarios.ratios(ours, base, name))

    def behind(*routers: str) -> Scenarios:
        """Returns Azure's lengths behind some routers."""
        found = [fleet.of("azure", f"under {router}") for router in routers]
        return reduce(or_, found)

    readings = raw.scenarios("seconds")
    most, large_model = readings.without("72B"), readings.of("72B")
    whole = f"{UNIBOOST}, whole steps"
    ends = [
        int(line["ends until gamma is within a third of it"].replace(",", ""))
        for line in raw("gamma")["table"]
    ]
    routed = behind("lmetric").mean(FCFS, "ttft mean")
    azure_gammas, mix_gammas = gammas.of("azure"), gammas.of("mix-2")
    prompts = "fixed at 0.1, prompts only"
    rule = raw.scenarios("decodes")
    slots = rule.of("places")
    memory = rule.without("places", "azure")
    waits = "UniBoost, decodes wait"
    flood = raw.scenarios("tenants").of("rho 1.1")
    live = raw.played("orders", "cold_starts")
    return {
        "live_mean": live.changes("uniboost", "fcfs", "e2e_mean"),
        "live_p99": live.changes("uniboost", "fcfs", "e2e_p99"),
        "live_p99_median": live.change("uniboost", "fcfs", "e2e_p99"),
        "live_mean_priority": live.changes("uniboost", "priority", "e2e_mean"),
        "azure_p99": azure_gammas.ratio(UNIBOOST, FCFS, "e2e p99") - 1,
        "azure_mean": azure_gammas.ratio(UNIBOOST, FCFS, "e2e mean") - 1,
        "azure_fixed": azure_gammas.ratio(prompts, FCFS, "e2e p99") - 1,
        "azure_fixed_mean": azure_gammas.ratio(prompts, FCFS, "e2e mean") - 1,
        "reasoning_times": reasoning.ratio(UNIBOOST, FCFS, "e2e p99"),
        "fixed_mix": abs(mix_gammas.ratio("fixed at 0.1, full", FCFS, "e2e p99") - 1),
        "submitted_worst": max(
            ratio - 1
            for scenarios in (raw.scenarios("t2"), chunks)
            for ratio in scenarios.ratios(SUBMITTED, FCFS, "e2e p99")
        ),
        "fleet_tail": change(behind(*OTHERS), UNIBOOST, FCFS, "ttft p99"),
        "fleet_tail_lmetric": behind("lmetric").ratio(UNIBOOST, FCFS, "ttft p99") - 1,
        "rule_memory": change(memory, waits, UNIBOOST, "e2e p99"),
        "rule_slots": change(slots, waits, UNIBOOST, "e2e p99"),
        "rule_slots_fcfs": change(slots, waits, FCFS, "e2e p99"),
        "rule_slots_before": change(slots, UNIBOOST, FCFS, "e2e p99"),
        "rule_72b": rule.of("72B").ratio(waits, FCFS, "e2e p99"),
        "rule_72b_before": rule.of("72B").ratio(UNIBOOST, FCFS, "e2e p99"),
        "vtc": flood.mean("VTC", "short e2e p99"),
        "vtc_fcfs": flood.mean(FCFS, "short e2e p99"),
        "vtc_submitted": flood.mean(SUBMITTED, "short e2e p99"),
        "mix_p99": less(mix.row(UNIBOOST), mix.row(SRPT), "e2e p99"),
        "mix_p99_fcfs": less(mix.row(FCFS), mix.row(SRPT), "e2e p99"),
        "mix_mean": mix.ratio(UNIBOOST, SRPT, "e2e mean"),
        "mix_ttft": mix.mean(UNIBOOST, "ttft p95"),
        "mix_ttft_trail": mix.mean(SRPT, "ttft p95"),
        "mix_tokens": mix.ratio(UNIBOOST, SRPT, "tokens a second") - 1,
        "reasoning": f"**{middle:.2f}** [{low:.2f}, {high:.2f}]",
        "ladder": max(ladder.ratios("LAS (MLFQ+)", UNIBOOST, "e2e p99")),
        "ladder_fcfs": max(ladder.ratios("LAS (MLFQ+)", FCFS, "e2e p99")),
        "ladder_back": Span(ladder.each("+ unified", "preempted")),
        "ladder_unified": change(ladder, "+ unified", "DistBoost", "e2e p99"),
        "ladder_memguard": change(ladder, "+ MEMGUARD", "DistBoost", "e2e p99"),
        "ladder_end": change(ladder, UNIBOOST, FCFS, "e2e p99"),
        "slo_ttft": kept(UNIBOOST, 0, 1),
        "slo_ttft_fcfs": kept(FCFS, 0, 1),
        "slo_e2e": kept(UNIBOOST, 2, 3),
        "slo_e2e_fcfs": kept(FCFS, 2, 3),
        "slo_others": Span(
            value for order in (SRPT, "LAS (MLFQ+)") for value in kept(order, 0, of=("mix-1", "mix-2")).values
        ),
        "short": 1 - fair.ratio(UNIBOOST, FCFS, "short e2e p99"),
        "short_submitted": 1 - fair.ratio(SUBMITTED, FCFS, "short e2e p99"),
        "short_seconds": fair.mean(UNIBOOST, "short e2e p99"),
        "short_submitted_seconds": fair.mean(SUBMITTED, "short e2e p99"),
        "short_sjf": fair.mean("SJF (LTR+)", "short e2e p99"),
        "short_srpt": fair.mean("SRPT", "short e2e p99"),
        "short_times": fair.ratio(UNIBOOST, "SRPT", "short e2e p99"),
        "short_submitted_times": fair.ratio(SUBMITTED, "SRPT", "short e2e p99"),
        "long": fair.ratio(UNIBOOST, FCFS, "long e2e p99") - 1,
        "slope": Span(fair.mean(order, "slope, s a request") for order in (UNIBOOST, FCFS)),
        "bins": 1 - bins.mean("UniBoost, bin_tokens=1024", "e2e p99") / bins.mean(UNIBOOST, "e2e p99"),
        "bins_back": bins.mean(UNIBOOST, "preempted"),
        "bins_back_wide": bins.mean("UniBoost, bin_tokens=1024", "preempted"),
        "hysteresis": Span(
            stubborn.mean(order, "e2e p99") / stubborn.mean(UNIBOOST, "e2e p99") - 1
            for order in ("UniBoost, hysteresis_seconds=0", "UniBoost, hysteresis_seconds=0.5")
        ),
        "chunks": change(large, UNIBOOST, FCFS, "e2e p99"),
        "chunk_128": small.ratio(UNIBOOST, FCFS, "e2e p99") - 1,
        "fleet_mix": change(fleet.of("mix-1"), UNIBOOST, FCFS, "e2e p99"),
        "fleet_azure": change(fleet.of("azure"), UNIBOOST, FCFS, "e2e p99"),
        "fleet_ttft": change(behind(*OTHERS), UNIBOOST, FCFS, "ttft mean"),
        "fleet_ttft_lmetric": Span(
            behind("lmetric").ratio(order, FCFS, "ttft mean") - 1 for order in (UNIBOOST, SUBMITTED)
        ),
        "routed_ttft": Span(routed / each - 1 for each in behind(*OTHERS).each(FCFS, "ttft mean")),
        "sizes": max(abs(ratio - 1) for ratio in sizes.ratios(UNIBOOST, FCFS, "e2e p99")),
        "gamma_starts": Span(
            gammas.of("mix-2").ratio(f"learned from {start} on", UNIBOOST, "e2e p99") - 1
            for start in ("0.01", "1")
        ),
        "gamma_ends": Span(ends),
        "seconds_share": change(most, UNIBOOST, FCFS, "e2e p99"),
        "seconds_step": change(most, whole, FCFS, "e2e p99"),
        "seconds_72b": large_model.ratio(UNIBOOST, FCFS, "e2e p99"),
        "seconds_72b_step": large_model.ratio(whole, FCFS, "e2e p99"),
        "seconds_fixed": change(readings, "+ MEMGUARD, whole steps", FCFS, "e2e p99"),
        "update": 1e3 * plans["a request's priority, each token"]["p50_us"],
        "gamma_update": plans["gamma, with each end"]["p99_us"],
    }
