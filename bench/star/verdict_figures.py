"""Figures that the verdicts of the STAR study quote, from its results."""

from __future__ import annotations

from typing import Any

from rerun import bounds
from verdicts import Raw, Span

# Settings, and figures of the paper.
WRITTEN = (
    "P50",
    "0.17/s",
    "rounds of 1,000 steps",
    "rounds of 20",
    "Table 4",
    "P99",
    "ms²",
    "32 times slower",
    "Table 2",
    "8",
    "64",
    "256",
    "from 1 to 1,000 steps",
    "threshold 0.4",
)
AHEAD = "STAR, computed ahead"
TRAINED = (
    ("sharegpt", "small"),
    ("sharegpt", "0.5 GB/s"),
    ("all alike", "0.5 GB/s"),
    ("few long, 1P3D", "0.5 GB/s"),
    ("told by prompts", "0.5 GB/s"),
)
STILL, BLIND, PAPER, ORACLE = "no moves", "STAR w/o prediction", "STAR, the paper's predictor", "STAR Oracle"


def figures(raw: Raw) -> dict[str, Any]:
    """Returns every field of verdicts.md."""
    rates = raw.scenarios("10")
    small = rates.of("sharegpt, small", "0.17")
    large = rates.of("sharegpt, large", "0.2 ")
    bins, steps, placed = raw.scenarios("t3"), raw.scenarios("t4"), raw.scenarios("3")
    sizes, worth = raw.scenarios("13"), raw.scenarios("worth")
    ratio, low, high = bounds(small.row(BLIND)["p99"], small.row(STILL)["p99"])
    dear = worth.of("all alike", "0.5 GB/s")
    pools = {name: sizes.of(f"{name} 25 Gbit/s") for name in ("2P8D,", "16P64D,", "32P128D,", "64P256D,")}
    (eight, *_, most) = pools.values()
    short = list(pools.values())[1:]
    trained = raw.scenarios("trained")
    learned = ("STAR, trained predictor", "STAR, learned curve")
    each_length = [trained.of(*parts) for parts in TRAINED]
    small_moves = [
        raw.scenarios(figure).of(lengths)
        for figure in ("default", "default_tokens")
        for lengths in ("sharegpt", "alpaca")
    ]
    lifted = f"{AHEAD}, threshold 0.4"
    plans = {each["what"]: each for each in raw.bench("plans")["rounds"] if each["instances"] == 256}
    return {
        "small_still": small.mean(STILL, "p99"),
        "small_moved": small.mean(BLIND, "p99"),
        "small_ratio": f"{ratio:.2f} times [{low:.2f}, {high:.2f}]",
        "small_p50_still": small.mean(STILL, "p50"),
        "small_p50_more": small.ratio(BLIND, STILL, "p50") - 1,
        "small_p50_moved": small.mean(BLIND, "p50"),
        "slow_link_goodput": dear.ratio(ORACLE, BLIND, "goodput") - 1,
        "variance": small.mean(PAPER, "variance"),
        "variance_oracle": small.mean(ORACLE, "variance"),
        "variance_blind": small.mean(BLIND, "variance"),
        "variance_still": small.mean(STILL, "variance"),
        "oom": ", ".join(f"{small.mean(rival, 'oom'):.0f}" for rival in (STILL, BLIND, PAPER)),
        "large": ", ".join(f"{large.mean(rival, 'p99'):.1f}" for rival in (STILL, BLIND, PAPER)),
        "large_goodput": Span(large.mean(rival, "goodput") for rival in (STILL, BLIND, PAPER)),
        "bins_blind": bins.mean(BLIND, "variance"),
        "bins_two": bins.mean("2 bins", "variance"),
        "bins_full": bins.mean(PAPER, "variance"),
        "bins_pia": bins.mean("pia", "variance"),
        "bins_mu_serve": bins.mean("mu_serve", "variance"),
        "steps_p99": Span(
            steps.mean(f"{rival}, each {number} steps", "p99")
            for rival in (BLIND, PAPER)
            for number in ("1", "20", "100", "1,000")
        ),
        "steps_variance": steps.mean(f"{PAPER}, each 1 steps", "variance"),
        "steps_variance_far": steps.mean(f"{PAPER}, each 1,000 steps", "variance"),
        "pool_8": eight.mean(PAPER, "variance"),
        "pool_256": most.mean(BLIND, "variance"),
        "pool_256_paper": most.mean(PAPER, "variance"),
        "pool_8_still": eight.mean(STILL, "variance"),
        "pool_256_still": most.mean(STILL, "variance"),
        "pool_8_p99": f"{eight.mean(STILL, 'p99'):.1f} to {eight.mean(PAPER, 'p99'):.1f}",
        "pools_p99_still": Span(pool.mean(STILL, "p99") for pool in short),
        "pools_p99": Span(pool.mean(PAPER, "p99") for pool in short),
        "drift_round_robin": placed.mean("round_robin: no moves", "variance"),
        "drift_load": placed.mean("no moves", "variance"),
        "drift_moved": placed.mean(PAPER, "variance"),
        "trained_p99": Span(stage.ratio(*learned, "p99") for stage in each_length),
        "trained_moves": Span(stage.ratio(*learned, "moves") for stage in each_length),
        "ahead_default": Span(stage.ratio(AHEAD, STILL, "p99") for stage in small_moves),
        "ahead_kv": Span(stage.ratio("STAR, learned curve", STILL, "p99") for stage in small_moves),
        "ahead_threshold": Span(stage.ratio(lifted, STILL, "p99") for stage in small_moves),
        "ahead_worst": max(
            ours / theirs
            for stage in small_moves
            for ours, theirs in zip(stage.row(lifted)["p99"], stage.row(STILL)["p99"], strict=True)
        ),
        "round": {key: plans["star, router's round"][key] / 1e3 for key in ("p50_us", "p99_us")},
        "rule": {key: plans["star"][key] / 1e3 for key in ("p50_us", "p99_us")},
    }
