"""Figures that the verdicts of the STAR study quote, from its results."""

from __future__ import annotations

from typing import Any

from rerun import bounds
from verdicts import Raw, Span, mean

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
COUNTING, PROMPT, ANSWER = "survival median", "network, prompts' states", "network, states"
PREDICTORS = {
    COUNTING: "counting (survival median)",
    "network, lengths": "network, lengths alone",
    PROMPT: "network, state of the prompt's last token",
    ANSWER: "network, state of the answer's last token",
}
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
    states, cost = raw.bench("hidden_states"), raw.bench("hidden_states_cost")["cost"]
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
        "prompt_end": _over_counting(states["end"], PROMPT),
        "prompt_anywhere": _over_counting(states["anywhere"], PROMPT),
        "answer_end": _over_counting(states["end"], ANSWER),
        "answer_anywhere": _over_counting(states["anywhere"], ANSWER),
        "states_table": _states_table(states),
        "states_cost": mean([each["cpu_us"] for each in cost["without"]]),
        "states_kept": _cost_over_none(cost, "share 0"),
        "states_written": _cost_over_none(cost, "share 1"),
        "round": {key: plans["star, router's round"][key] / 1e3 for key in ("p50_us", "p99_us")},
        "rule": {key: plans["star"][key] / 1e3 for key in ("p50_us", "p99_us")},
    }


def _over_counting(runs: list[dict[str, Any]], predictor: str) -> Span:
    """Errors of a predictor over those of counting, by seed."""
    found = [run["predictors"] for run in runs]
    return Span(each[predictor]["all"] / each[COUNTING]["all"] for each in found)


def _cost_over_none(cost: dict[str, Any], name: str) -> Span:
    """Processor time of a configuration over that without states, less 1, by round."""
    pairs = zip(cost[name], cost["without"], strict=True)
    return Span(some["cpu_us"] / none["cpu_us"] - 1 for some, none in pairs)


def _states_table(states: dict[str, Any]) -> str:
    """Errors of each predictor, tokens: the mean over seeds, the lowest and the highest."""
    lines = [
        "| predictor | word at the end: all | 0 generated | word anywhere: all | 0 generated |",
        "| --- | --- | --- | --- | --- |",
    ]
    runs = [states[at] for at in ("end", "anywhere")]
    for predictor, name in PREDICTORS.items():
        cells = []
        for by_seed in runs:
            for kind in ("all", "0"):
                values = [run["predictors"][predictor][kind] for run in by_seed]
                cells.append(f"{mean(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    floors = [f"{mean([run['floor'] for run in by_seed]):.1f}" for by_seed in runs]
    return "\n".join([*lines, f"| counting that knows the word | {floors[0]} | | {floors[1]} | |"])
