"""Figures that the verdicts of the SIBYL study quote, from its results."""

from __future__ import annotations

from typing import Any

from verdicts import Raw, Scenarios, Span, mean

# Settings, and figures of the paper.
WRITTEN = (
    "on 64 instances",
    "than 105 requests",
    "a load of 0.8",
    "Eq. (15)",
    "P99.9",
    "P99",
    "type 1",
    "64",
    "128",
    "256",
    "Eq. (4)",
    "4,096",
)
REQLEVEL = "least requests, bound ones too (REQLEVEL)"
LIGHT = "load 0.005", "load 0.02"  # most instances are idle


def figures(raw: Raw) -> dict[str, Any]:
    """Returns every field of verdicts.md."""
    paper, ablations, light = raw.scenarios("9"), raw.scenarios("8"), raw.scenarios("light")
    seen, unseen = raw.scenarios("seen", "traces"), raw.scenarios("fresh", "fresh_128", "fresh_256")
    pools = raw.scenarios("9", "15").of("sharegpt-like, Eq. 15, held", "load 0.4")
    sharegpt = {
        size: pools.of(f" {size} decode").ratio("SIBYL", "round robin", "p99")
        for size in ("64", "128", "256")
    }

    def over(scenarios: Scenarios, rival: str, base: str, name: str = "p99") -> Span:
        return Span(scenarios.ratios(rival, base, name))

    def change(scenarios: Scenarios, name: str) -> Span:
        """Returns the change of SIBYL's figure against round robin's."""
        return Span(ratio - 1 for ratio in scenarios.ratios("SIBYL", "round robin", name))

    rivals = [rival for rival in next(iter(unseen.rows.values())) if not rival.startswith("sibyl_plus")]
    long_prompts = (
        unseen.of("completion")
        | seen.of("summaries")
        | seen.of("agents")
        | raw.scenarios("traces").of("mooncake")
    )
    idle = [scenarios for load in LIGHT for scenarios in by_stage(light.of(load))]
    h20, a100 = raw.scenarios("6"), raw.scenarios("12")
    independent, printed = raw.scenarios("independent"), raw.scenarios("printed").of("load 0.8")
    unequal = long_prompts | seen.of("heavy-tails")
    live = raw.played("sibyl")
    return {
        "live_rr": live.changes("sibyl", "round_robin", "tpot_p99"),
        "live_least": live.changes("sibyl", "least_requests", "tpot_p99"),
        "live_early": live.changes("sibyl_early", "sibyl", "tpot_p99"),
        "simulated_all": Span(
            live.mean("sibyl", "tpot_p99", "simulated") / live.mean(other, "tpot_p99", "simulated") - 1
            for other in ("round_robin", "least_requests", "sibyl_early")
        ),
        "live_slower": Span(
            live.mean(name, "tpot_mean") / live.mean(name, "tpot_mean", "simulated")
            for name in ("round_robin", "least_requests", "sibyl", "sibyl_early")
        ),
        "mean_zeta": change(paper.of("step time", "zeta"), "mean"),
        "mean_eq15": change(paper.of("Eq. 15, held"), "mean"),
        "long_over_reqlevel": Span(ratio - 1 for ratio in unequal.ratios("SIBYL", REQLEVEL, "p99")),
        "late_ils": independent.mean("ILS, tokens, late", "least_loaded"),
        "late_ils_p99": independent.mean("ILS, tokens, late", "p99"),
        "early_ils_p99": independent.mean("ILS, tokens", "p99"),
        "late_requests": independent.mean(f"{REQLEVEL}, late", "least_loaded"),
        "late_requests_p99": independent.mean(f"{REQLEVEL}, late", "p99"),
        "stuck": Span(printed.mean(rival, "without_end") for rival in ("SIBYL", "ILS, tokens")),
        "h20_rr": over(h20, "SIBYL", "round robin"),
        "h20_ils": over(h20, "SIBYL", "ILS, tokens"),
        "a100_rr": over(a100, "SIBYL", "round robin"),
        "a100_ils": over(a100, "SIBYL", "ILS, tokens"),
        "a100_reqlevel": over(a100, "SIBYL", REQLEVEL),
        "behind_step": change(paper.of("step time"), "p99"),
        "times_eq15": over(paper.of("Eq. 15, held"), "SIBYL", "round robin"),
        "over_ils": over(paper, "SIBYL", "ILS, tokens"),
        "long_over_rr": Span(r - 1 for r in long_prompts.ratios("SIBYL", "round robin", "p99")),
        "reqlevel_paper": over(ablations, REQLEVEL, "SIBYL", "p999"),
        "reqlevel_long": over(long_prompts, REQLEVEL, "SIBYL"),
        "prob_at_1": over(ablations, "prob @ 1", "SIBYL"),
        "no_type_1": over(ablations, "no type 1", "SIBYL"),
        "pool_64": sharegpt["64"],
        "pool_128": sharegpt["128"],
        "pool_256": sharegpt["256"],
        "optimal": Span(paper.each("round robin", "least_loaded")),
        "optimal_light": Span(scenarios.mean("round robin", "least_loaded") for scenarios in idle),
        "optimal_sibyl": Span(paper.each("SIBYL", "least_loaded")),
        "survival": Span(errors(raw, 4096, "eq4")),
        "survival_few": Span(errors(raw, 256, "eq4")),
        "plus_paper": over(paper, "sibyl_plus", REQLEVEL),
        "plus_unseen": Span(ratio for rival in rivals for ratio in unseen.ratios("sibyl_plus", rival, "p99")),
    }


def by_stage(scenarios: Scenarios) -> list[Scenarios]:
    """Returns each scenario by itself."""
    return [scenarios.of(stage) for stage in scenarios]


def errors(raw: Raw, answers: int, curve: str) -> list[float]:
    """Returns the largest error of the learned survival after `seen` answers, by lengths, mean over
    seeds."""
    wanted = (str(answers), curve)
    return [mean(row["largest"]) for row in raw("7")["rows"] if (row["seen"], row["curve"]) == wanted]
