"""Figures that the verdicts of the LMETRIC study quote, from its results."""

from __future__ import annotations

from typing import Any

from verdicts import Raw, Span, mean

# Settings, and figures of the paper.
WRITTEN = (
    "84%", "-44%", "-42.8%", "3%", "20%", "95%",
    "0.7", "0.9", "BS + 1", "the + 1", "P50", "P95", "P99", "Equation 2",
    "gives an idle instance 0", "15 s", "60 s",
    "85%",
    "50% of its maximum", "50% of the maximum", "8 H20 and 8 H200", "At 90%", "at 50%",
)  # fmt: skip
LONG = ("conversation", "conversation-7b", "conversation-ref")  # prompts of 11,000 tokens in the mean
HITS = ("chat", "agent", "coder")
SECONDS = "lmetric_seconds"
SAME = 0.05  # maximum loads closer than this are alike: the search for them stops at 1 to 3%


def figures(raw: Raw) -> dict[str, Any]:
    """Returns every field of verdicts.md."""

    def seeds(figure: str, text: str) -> dict[str, list[float]]:
        """Returns a claim's values for each seed, by scenario."""
        told = raw(figure)
        (claim,) = [each["text"] for each in told["claims"] if each["text"].startswith(text)]
        return {row["stage"]: row[claim] for row in told["rows"] if claim in row}

    def claim(figure: str, text: str) -> dict[str, float]:
        return {stage: mean(values) for stage, values in seeds(figure, text).items()}

    def apart(figure: str, text: str) -> dict[str, float]:
        """Returns a claim's means in scenarios with the same sign for all seeds and a mean of 1% or
        more."""
        kept = {s: v for s, v in seeds(figure, text).items() if min(v) > 0 or max(v) < 0}
        return {stage: mean(values) for stage, values in kept.items() if abs(mean(values)) >= 0.01}

    vllm = claim("21", "LMETRIC against vLLM, mean TTFT")
    queueing = ("agent", "coder")  # vLLM's balancer queues there, at half of LMETRIC's maximum
    linear_tpot = list(claim("21", "LMETRIC against BAILIAN (tuned linear), TPOT").values())
    near_ttft = claim("25", "LMETRIC against tuned linear at 95%, mean TTFT")
    near_tpot = claim("25", "LMETRIC against tuned linear at 95%, mean TPOT")
    more = [value for value in near_tpot.values() if value > 0]
    sustained = [value for value in claim("25", "the tuned linear combination's").values() if value > SAME]
    llm_d = list(claim("21", "with a similar mean TTFT").values())
    llm_d_tail = apart("21", "LMETRIC against llm-d (least predicted TTFT), P99 TPOT")
    p95 = sorted(claim("18", "P95 TTFT").values())
    strong = [value for value in p95 if value < -0.4]
    heavy = claim("20", "the same, of classes with 16 requests or more")

    def on(figure: str, text: str, *stages: str) -> Span:
        """Returns a claim's means in some scenarios."""
        return Span(claim(figure, text)[stage] for stage in stages)

    def off(figure: str, text: str, *stages: str) -> Span:
        """Returns a claim's means in all other scenarios."""
        return Span(value for stage, value in claim(figure, text).items() if stage not in stages)

    def surges(prefix: str, text: str, tokens: str = "") -> Span:
        """Returns a claim's means on surges of a `known` or a `new` prefix, or on all (``""``)."""
        found = claim("guard", text).items()
        return Span(value for stage, value in found if stage.startswith(prefix) and tokens in stage)

    def unequal(load: str, fleets: tuple[str, ...], trace: str = "") -> list[dict[str, Any]]:
        """Rows by policy at each trace and fleet, on unequal GPUs."""
        rows: dict[str, dict[str, Any]] = {}
        for row in raw("unequal")["runs"]:
            stage = row["stage"]
            if row["load"] == load and stage.endswith(fleets) and stage.startswith(trace):
                rows.setdefault(stage, {})[row["policy"]] = row
        return list(rows.values())

    def against(
        policy: str,
        quantity: str,
        load: str,
        fleets: tuple[str, ...],
        trace: str = "",
        base: str = "lmetric",
    ) -> Span:
        """Returns the change from `base` to a policy at each trace and fleet, mean over seeds."""
        pairs = [(row[policy][quantity], row[base][quantity]) for row in unequal(load, fleets, trace)]
        return Span(mean([a / b for a, b in zip(*pair, strict=True)]) - 1 for pair in pairs)

    def fewer(figure: str, text: str, *stages: str) -> Span:
        """Returns `on` for decreases."""
        return Span(-claim(figure, text)[stage] for stage in stages)

    scaled, h200, equal = ("half the speed", "of a quarter"), ("8 H20 + 8 H200",), ("16 equal",)
    own_tpot = "LMETRIC against BAILIAN (tuned linear), TPOT"
    dynamo_tpot = "LMETRIC against the paper's Dynamo (tuned), mean TPOT"
    dynamo_ttft = claim("21", "LMETRIC against the paper's Dynamo (tuned), mean TTFT")
    endless = {row["stage"].strip("`"): row["hits in an endless cache"] for row in raw("stages")["traces"]}
    return {
        "seconds_half": against(SECONDS, "ttft_mean_s", "50%", scaled),
        "seconds_half_tpot": against(SECONDS, "tpot_mean_ms", "50%", scaled + h200),
        "seconds_h200": against(SECONDS, "ttft_mean_s", "50%", h200),
        "seconds_limit": against(SECONDS, "ttft_mean_s", "90%", scaled),
        "seconds_limit_tpot": against(SECONDS, "tpot_mean_ms", "90%", scaled + h200),
        "seconds_h200_limit": against(SECONDS, "ttft_mean_s", "90%", h200),
        "seconds_equal": against(SECONDS, "ttft_mean_s", "50%", equal),
        "seconds_conversation_tpot": against(
            SECONDS, "tpot_mean_ms", "90%", scaled + h200, trace="conversation"
        ),
        "seconds_worst": max(against(SECONDS, "ttft_mean_s", "90%", scaled + h200).values),
        "exact_half": against("simulation", "ttft_mean_s", "50%", scaled + h200, base=SECONDS),
        "given_tpot": against("speeds given", "tpot_mean_ms", "90%", scaled, trace="conversation"),
        "conversation_hits": endless["conversation"],
        "awareness_chat": claim("7", "KV-awareness lowers the mean TTFT")["chat"],
        "weights_long": on("11", "the best weight for the mean TTFT", *LONG),
        "weights_short": on("11", "the best weight for the mean TTFT", *HITS),
        "wrong_weight": off("11", "so it must be tuned", "coder"),
        "wrong_weight_coder": claim("11", "so it must be tuned")["coder"],
        "range_coder": claim("12", "range 16 against 4: P50 TTFT")["coder"],
        "ranges": Span(claim("12", "the best range depends on the workload").values()),
        "filter_agent": claim("12", "tuned filter against tuned linear")["agent"],
        "filter_coder": claim("12", "tuned filter against tuned linear")["coder"],
        "filter_linear": off("12", "tuned filter against tuned linear", "agent", "coder"),
        "linear_tpot_7b": claim("21", own_tpot)["conversation-7b"],
        "linear_tpot_coder": claim("21", own_tpot)["coder"],
        "linear_tpot_rest": off("21", own_tpot, "conversation-7b", "coder"),
        "dynamo_coder": 1 - 1 / (1 + dynamo_ttft["coder"]),
        "dynamo_pays": Span(1 / (1 + value) - 1 for value in claim("21", dynamo_tpot).values()),
        "vllm_own_half": Span(claim("25", "LMETRIC against vLLM at half of vLLM's own maximum").values()),
        "computes_limit": fewer("25", "prompt tokens that it computes, against LMETRIC, at 95%", *HITS),
        "llm_d_limit": on("25", "LMETRIC against llm-d at 95%, mean TTFT", "chat", "coder"),
        "wrong_misses": Span(claim("15", "the same, another model's simulator").values()),
        "right_misses": Span(claim("15", "requests whose TTFT the right simulator misses").values()),
        "wrong_tpot": Span(claim("15", "P99 TPOT, right against another model's").values()),
        "queued": Span(claim("18", "prefill tokens queued where a request goes").values()),
        "hits_long": fewer("18", "hits, both alike", *LONG),
        "hits_short": fewer("18", "hits, both alike", *HITS),
        "tokens_joined_ttft": max(
            map(abs, claim("19", "against #Tokens once this request has joined, mean TTFT").values())
        ),
        "hot_times": Span(1 + value for value in surges("known", "a hot spot breaks the score").values),
        "guard_vllm_tpot": surges("", "their TPOT, guard on against vLLM's"),
        "guard_vllm_known_ttft": surges("known", "their TTFT, guard on against vLLM's"),
        "guard_vllm_new_ttft": surges("new", "their TTFT, guard on against vLLM's"),
        "guard_vllm_prefix_ttft": surges("known", "TTFT of all requests with the prefix"),
        "guard_vllm_all_ttft": surges("", "TTFT of all requests, guard on"),
        "guard_new_tpot": surges("new", "the guard mends it: their TPOT, on against off"),
        "guard_new_ttft": surges("new", "their TTFT, on against off"),
        "guard_new_e2e": surges("new", "their E2E, on against off"),
        "simulation_half": against("simulation", "ttft_mean_s", "50%", scaled + h200, base=SECONDS),
        "vllm_ttft": Span(value for stage, value in vllm.items() if stage not in queueing),
        "vllm_ttft_queueing": Span(vllm[stage] for stage in queueing),
        "linear_ttft": Span(claim("21", "LMETRIC against BAILIAN (tuned linear), TTFT").values()),
        "linear_tpot": max(map(abs, linear_tpot)),
        "linear_tpot_near": sum(abs(value) <= 0.03 for value in linear_tpot),
        "traces": len(linear_tpot),
        "near_limit_tpot": Span(more),
        "near_limit_count": len(more),
        "near_limit_agent_ttft": near_ttft["agent"],
        "near_limit_other_ttft": Span(v for stage, v in near_ttft.items() if stage != "agent"),
        "sustained": Span(sustained),
        "sustained_count": len(sustained),
        "dynamo_ttft": Span(claim("21", "LMETRIC against the paper's Dynamo (tuned), mean TTFT").values()),
        "dynamo_tpot": Span(claim("21", "LMETRIC against the paper's Dynamo (tuned), mean TPOT").values()),
        "llm_d_ttft": max(abs(value) for value in llm_d if value > -0.1),
        "llm_d_ttft_less": min(llm_d),
        "llm_d_tail_coder": llm_d_tail["coder"],
        "llm_d_tail_azure": llm_d_tail["azure"],
        "llm_d_tail_count": len(llm_d_tail),
        "knee_chat": max(seeds("11", "beyond a knee the TTFT rises")["chat"]),
        "wrong_ttft": Span(claim("15", "P99 TTFT, right against another model's").values()),
        "p95": Span(strong),
        "p95_count": len(strong),
        "p95_of": len(p95),
        "p95_rest": Span(value for value in p95 if value >= -0.4),
        "tokens_tpot": Span(claim("19", "BS + 1 against #Tokens, mean TPOT").values()),
        "tokens_joined_tpot": Span(
            claim("19", "against #Tokens once this request has joined, mean TPOT").values()
        ),
        "decode_ttft": max(claim("19", "the decode batch size in place of BS, mean TTFT").values()),
        "decode_tpot": max(claim("19", "the decode batch size in place of BS, mean TPOT").values()),
        "hot_share": heavy["coder"],
        "guard_ttft": surges("known", "their TTFT, on against off"),
        "guard_tpot": surges("known", "the guard mends it: their TPOT, on against off"),
        "offset_hits": min(claim("offset", "BS alone against BS + 1, hits at 10%").values()),
        "live": Span(claim("signals", "LMETRIC as live").values()),
    }
