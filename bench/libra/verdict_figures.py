"""Figures that the verdicts of the Libra study quote, from its results."""

from __future__ import annotations

from typing import Any

from verdicts import Raw, Span

# Settings, systems, and figures of the paper.
WRITTEN = (
    "2.3 requests/s", "Figure 5",
    "1P1D", "2P1D", "1P2D", "8192/32", "1,358", "2,048", "1,024", "Table 1", "Algorithm 1",
    "Algorithm 2", "256", "512", "1.3", "90% load", "Three at 50% load",
    "32B", "72B", "50 GB/s", "3 GB/s", "P99", "with sigma 1", "0.058 ms",
)  # fmt: skip
LIBRA, BY_LOAD, OURS = "Libra as printed", "Libra, pair by load", "ours: cut where it gains"
TUNED, COMPOSED, WHOLE = "colocated, chunk tuned", "colocated, Algorithm 2", "colocated, chunk 2048"
CUTS = ("cut at 1,280", "cut at 1,358", "cut at 1,440", "cut at 1,520")
PLAIN = "Libra as printed, without Algorithm 2, chunk"


def listed(values: list[float], spec: str) -> str:
    """Returns values side by side: `0.83, 2.32, 1.56`."""
    return ", ".join(format(value, spec) for value in values)


def figures(raw: Raw) -> dict[str, Any]:
    """Returns every field of verdicts.md."""
    cuts = raw.scenarios("5").of("4.0/s")
    shapes, capacity, goodput = raw.scenarios("table_1"), raw.scenarios("9"), raw.scenarios("8")
    within, spread, ttft = raw.scenarios("10"), raw.scenarios("table_5"), raw.scenarios("table_2")
    paper = capacity.without("8192/32")  # the paper's workloads
    long, hybrid = capacity.of("8192/32"), capacity.of("hybrid")
    code, mini = goodput.of("azure-code"), goodput.of("mini-reasoning")
    large, h100 = raw.scenarios("larger"), raw.scenarios("table_8").of("azure-code", "50 ms")
    thinking, mixed = (
        raw.scenarios("table_7").of("200 ms for reasoning tokens"),
        raw.scenarios("parallel").of("3 GPUs"),
    )
    chats = ttft.of("burstgpt") | ttft.of("arxiv")
    exact, off = spread.of("deviation 0 tokens"), spread.of("deviation 100 tokens")
    wide, estimated = spread.of("deviation 1 of the logarithm"), f"{BY_LOAD}, lengths estimated"
    decisions = raw.bench("plans")["cuts"]

    def wait(speed: str, how: str) -> float:
        """Returns the mean wait at the segment boundary, ms."""
        return 1e3 * raw.scenarios("transfer").of(f"{speed} GB/s").mean(how, "wait")

    def lost(rival: str) -> float:
        """Returns the share of the highest goodput that is lost at the highest rate."""
        return 1 - code.each(rival, "goodput")[-1] / max(code.each(rival, "goodput"))

    def waits(rival: str) -> str:
        """Returns the change of the mean TTFT against 1P1D: `-2% and +13%`."""
        return " and ".join(f"{ratio - 1:+.0%}" for ratio in chats.ratios(rival, "1P1D", "ttft"))

    backlog = raw.scenarios("predictor").of("32B", "4.0/s")
    others = raw.scenarios("predictor").without("32B")  # of each workload, 0.8 and 1.3 times the load

    def bounded(system: str, load: int) -> Span:
        """Returns the change of goodput with N_max on all other workloads."""
        return Span(ratio - 1 for ratio in others.ratios(f"{system}, N_max", system, "goodput")[load::2])

    link = wait("50", "chunk by chunk")
    beyond, chunks = wait("3", "at the end") - link, wait("3", "chunk by chunk") - link
    ours = {stage: capacity.of(stage).ratio(OURS, COMPOSED, "rate") - 1 for stage in capacity}
    live = raw.played("orders", "cold_starts")
    pairs = raw.played("pairs")
    best = min(("budget_128", "budget", "budget_512"), key=lambda name: live.mean(name, "gap_p99"))
    return {
        "live_slo": live.changes("slo", "fcfs", "gap_p99"),
        "live_slo_tokens": live.changes("slo", "fcfs", "output_tokens_per_second"),
        "live_slo_tokens_median": live.change("slo", "fcfs", "output_tokens_per_second"),
        "live_slo_half": pairs.changes("whole_slo", "whole", "gap_p99"),
        "live_over_budget": live.changes("slo", best, "gap_p99"),
        "live_over_budget_tokens": live.changes("slo", best, "output_tokens_per_second"),
        "live_cut": pairs.changes("libra", "whole", "e2e_mean"),
        "live_cut_slo": pairs.changes("libra_slo", "whole_slo", "e2e_mean"),
        "cut_1024": cuts.mean("cut at 1,024", "requests"),
        "cut_1358": cuts.mean("cut at 1,358", "requests"),
        "cut_best": max(cuts.mean(each, "requests") for each in CUTS),
        "long_cut_at": long.mean(LIBRA, "cut_at"),
        "below_cut_at": raw.scenarios("5").of("2.3/s").mean(LIBRA, "cut_at"),
        "longest_gap": within.mean(LIBRA, "worst"),
        "bounded_at": backlog.mean(f"{LIBRA}, N_max", "cut_at"),
        "bounded_served": backlog.mean(f"{LIBRA}, N_max", "requests"),
        "bounded_over": bounded(LIBRA, 1),
        "bounded_over_load": bounded(BY_LOAD, 1),
        "bounded_over_ours": bounded(OURS, 1),
        "cut_none": cuts.mean("colocated", "requests"),
        "cut_libra_at": cuts.mean(LIBRA, "cut_at"),
        "cut_libra": cuts.mean(LIBRA, "requests"),
        "rates_1p1d": listed(shapes.each("1P1D", "saturated"), ".2f"),
        "rates_colocated": listed(shapes.each(WHOLE, "saturated"), ".2f"),
        "tails_colocated": listed([1e3 * each for each in shapes.each(WHOLE, "p99")], ".0f"),
        "slo_256": 1 - min(shapes.ratios("colocated, chunk tuned, 256", WHOLE, "saturated")),
        "slo_composed": 1 - shapes.of("8192/32").ratio(COMPOSED, WHOLE, "saturated"),
        "within_without": within.mean(f"{PLAIN} 2048", "within"),
        "within": within.mean(LIBRA, "within"),
        "within_512": within.mean(f"{PLAIN} 512", "within"),
        "within_256": within.mean(f"{PLAIN} 256", "within"),
        "capacity_1p1d": Span(paper.ratios(LIBRA, "1P1D", "rate")),
        "capacity_tuned": Span(paper.ratios(LIBRA, TUNED, "rate")),
        "capacity_tuned_long": long.ratio(LIBRA, TUNED, "rate"),
        "capacity_composed": Span(paper.ratios(LIBRA, COMPOSED, "rate")),
        "capacity_composed_long": long.ratio(LIBRA, COMPOSED, "rate"),
        "hybrid": listed([hybrid.mean(rival, "rate") for rival in (TUNED, "1P1D", LIBRA)], ".1f"),
        "hybrid_composed": hybrid.mean(COMPOSED, "rate"),
        "goodput_code": max(code.ratios(LIBRA, "1P1D", "goodput")),
        "goodput_mini": max(mini.ratios(LIBRA, "1P1D", "goodput")),
        "goodput_tuned": max(goodput.ratios(LIBRA, TUNED, "goodput")) - 1,
        "plateau": lost(LIBRA),
        "plateau_by_load": lost(BY_LOAD),
        "large_1p1d": Span(large.ratios(LIBRA, "1P1D", "goodput")),
        "large_composed": Span(large.ratios(LIBRA, COMPOSED, "goodput")),
        "wait_end": wait("50", "at the end"),
        "wait_chunks": link,
        "slow_end": beyond,
        "slow_chunks": chunks,
        "slow_less": 1 - chunks / beyond,
        "off_100": off.mean(estimated, "goodput") / exact.mean(estimated, "goodput") - 1,
        "off_log": 1 - wide.ratio(estimated, BY_LOAD, "goodput"),
        "off_printed": 1 - exact.ratio(f"{LIBRA}, lengths estimated", LIBRA, "goodput"),
        "ttft_printed": waits(LIBRA),
        "ttft_ours": waits(OURS),
        "ttft_none": waits(COMPOSED),
        "gpu_2p1d": mixed.ratio(BY_LOAD, "2P1D", "goodput"),
        "gpu_1p2d_goodput": mixed.ratio("1P2D", BY_LOAD, "goodput") - 1,
        "gpu_1p2d_rate": 1 - mixed.ratio("1P2D", BY_LOAD, "rate"),
        "gpu_composed": mixed.ratio(BY_LOAD, COMPOSED, "goodput"),
        "h100_1p1d": h100.ratio(LIBRA, "1P1D", "goodput"),
        "h100_tuned": h100.ratio(LIBRA, TUNED, "goodput"),
        "h100_composed": h100.ratio(LIBRA, COMPOSED, "goodput"),
        "decision_2": decisions["route, split libra, 2 instances"],
        "decision_256": decisions["route, split libra, 256 instances"],
        "three_fixed": 1 - thinking.ratio("Libra, three parts", LIBRA, "rate"),
        "three_by_load": thinking.ratio("Libra, three parts, pair by load", LIBRA, "goodput") - 1,
        "ours_composed": max(abs(change) for stage, change in ours.items() if stage != "arxiv"),
        "ours_arxiv": ours["arxiv"],
        "ours_printed": Span(ratio - 1 for ratio in paper.ratios(OURS, LIBRA, "rate")),
    }
