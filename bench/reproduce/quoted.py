"""Figures that the verdicts of the LMETRIC study quote, from its raw files."""

from __future__ import annotations

from typing import Any

from verdicts import Raw, Span, mean

# Settings, and figures of the paper.
WRITTEN = (
    "-92%", "-52%", "-20%", "3%", "95%", "0.9", "8,000", "16,000", "BS + 1", "the + 1", "P99",
    "Equation 2",
)  # fmt: skip
SAME = 0.05  # maximum loads closer than this are alike: the search for them stops at 1 to 3%


def figures(raw: Raw) -> dict[str, Any]:
    """Every field of verdicts.md."""

    def seeds(figure: str, text: str) -> dict[str, list[float]]:
        """A claim's values for each seed, by stage."""
        (claim,) = [each for each in raw(figure)["claims"] if each["text"].startswith(text)]
        return {one["stage"]: one["values"] for one in claim["ours"]}

    def claim(figure: str, text: str) -> dict[str, float]:
        return {stage: mean(values) for stage, values in seeds(figure, text).items()}

    def apart(figure: str, text: str) -> dict[str, float]:
        """A claim's means on the stages where all seeds have the same sign and the mean is 1% or more."""
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
    guard = claim("guard", "the guard mends it: their TPOT, on against off")
    return {
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
        "guard_ttft": Span(claim("guard", "their TTFT, on against off").values()),
        "guard_8k": Span(value for stage, value in guard.items() if "8,000" in stage),
        "guard_16k": Span(value for stage, value in guard.items() if "16,000" in stage),
        "offset_hits": min(claim("offset", "BS alone against BS + 1, hits at 10%").values()),
        "live": Span(claim("signals", "LMETRIC as live").values()),
    }
