"""Figures 18 and 19: the two indicators that LMETRIC multiplies, and others in their place."""

from __future__ import annotations

import numpy as np
from book import Claim, Made, Ours, figure
from comparisons import against
from world import HALF, Choice, Stage, World

from lmetric.policies import Columns, policy_function

HIT_RATIO = Choice("(1 - kv_hit) * (bs + 1)", label="(1 - hit) * (bs + 1)")
TOKENS = Choice("p_token * tokens")
TOKENS_JOINED = Choice("p_token * (tokens + prompt_tokens)")
DECODES = Choice("p_token * (decode_bs + 1)")
P_TOKEN = Choice("p_token * (bs + 1)")  # LMETRIC's score without its guard


def queued(world: World, stage: Stage, score: Choice, seed: int) -> float:
    """Returns mean queued prefill tokens of the instances on which requests are placed (Figure
    18c)."""
    seen: list[float] = []

    def scored(columns: Columns) -> np.ndarray:
        missing = np.asarray(columns["new_tokens"])
        queue = np.asarray(columns["queued_prefill_tokens"])
        part = queue + missing if score is P_TOKEN else missing / float(columns["prompt_tokens"])
        scores = np.maximum(part, 1) if score is P_TOKEN else part
        scores = scores * (np.asarray(columns["bs"]) + 1)
        seen.append(float(queue[int(np.argmin(scores))]))
        return scores

    reads = ["new_tokens", "queued_prefill_tokens", "bs", "prompt_tokens"]
    world.play(stage, stage.part(seed), Choice(policy_function(scored, reads)), seed, HALF)
    return float(np.mean(seen))


@figure("18", "Figure 18: P-token against 1 - hit ratio, times BS")
def figure_18(world: World) -> Made:
    def changes(quantity: str) -> list[Ours]:
        return against(world, world.sharing, P_TOKEN, HIT_RATIO, quantity)

    queues = []
    for stage in world.sharing:
        pairs = [
            [queued(world, stage, score, seed) for score in (P_TOKEN, HIT_RATIO)] for seed in world.seeds
        ]
        queues.append(Ours(stage.label, [a / b - 1 if b else 0.0 for a, b in pairs]))
    return Made(
        [
            Claim("P50 TTFT (5.1)", "-14.4%", "less", changes("ttft_p50")),
            Claim("P95 TTFT (5.1)", "-42.8%", "less", changes("ttft_p95")),
            Claim("hits, both alike (Figure 18b)", "similar", "about 0", changes("hit_ratio")),
            Claim(
                "prefill tokens queued where a request goes (Figure 18c)", "less, no figure", "less", queues
            ),
            Claim("mean TPOT", "no figure", "", changes("tpot_mean")),
        ],
    )


def loads(world: World, stage: Stage, seed: int) -> tuple[float, float]:
    """Returns, for all instances at all decisions under LMETRIC's score, the correlation of batch
    size and context tokens. Also returns the share of a decode step's variable time that the batch
    size alone explains."""
    batches: list[np.ndarray] = []
    tokens: list[np.ndarray] = []

    def scored(columns: Columns) -> np.ndarray:
        batches.append(np.array(columns["decode_bs"]))
        tokens.append(np.array(columns["decode_tokens"]))
        return np.asarray(columns["p_token"]) * (np.asarray(columns["bs"]) + 1)

    reads = ["p_token", "bs", "decode_bs", "decode_tokens"]
    world.play(stage, stage.part(seed), Choice(policy_function(scored, reads)), seed, HALF)
    batch, context = np.concatenate(batches), np.concatenate(tokens)
    profile = stage.profile
    by_batch = profile.decode_seconds_per_sequence * batch
    step = by_batch + profile.decode_seconds_per_context_token * context
    return float(np.corrcoef(batch, context)[0, 1]), float(by_batch.sum() / max(step.sum(), 1e-12))


@figure("19", "Figure 19: BS against the tokens in the batch, times P-token")
def figure_19(world: World) -> Made:
    together, share = [], []
    for stage in world.stages:
        found = [loads(world, stage, seed) for seed in world.seeds]
        together.append(Ours(stage.label, [each[0] for each in found]))
        share.append(Ours(stage.label, [each[1] for each in found]))

    def changes(old: Choice, quantity: str) -> list[Ours]:
        return against(world, world.stages, P_TOKEN, old, quantity)

    return Made(
        [
            Claim("BS + 1 against #Tokens, mean TTFT (Figure 19a)", "better, no figure", "less",
                  changes(TOKENS, "ttft_mean")),
            Claim("BS + 1 against #Tokens, mean TPOT (Figure 19a)", "better, no figure", "less",
                  changes(TOKENS, "tpot_mean")),
            Claim("against #Tokens once this request has joined, mean TTFT", "not in the paper", "",
                  changes(TOKENS_JOINED, "ttft_mean")),
            Claim("against #Tokens once this request has joined, mean TPOT", "not in the paper", "",
                  changes(TOKENS_JOINED, "tpot_mean")),
            Claim("the decode batch size in place of BS, mean TTFT (5.1)", "similar", "about 0",
                  against(world, world.stages, DECODES, P_TOKEN, "ttft_mean")),
            Claim("the decode batch size in place of BS, mean TPOT (5.1)", "similar", "about 0",
                  against(world, world.stages, DECODES, P_TOKEN, "tpot_mean")),
            Claim("batch size and tokens go together only loosely: correlation (Figure 19b)",
                  "a cloud, no figure", "", together, "ratio"),
            Claim("of a decode step's time above its fixed cost, what the batch size makes (rest: context)",
                  "most, no figure", "", share, "share"),
        ],
    )  # fmt: skip
