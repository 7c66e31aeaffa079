"""Bounds on any placement, and the result with twice the engines: the remaining gain."""

from __future__ import annotations

import numpy as np
from goal_world import Outcome, Rival, Stage, figures, made
from numpy.typing import NDArray
from world import INSTANCES

from lmetric.profiles import Profile, load_profile
from lmetric_lab.sim.traces import Trace, ideal_hit_tokens

Seconds = NDArray[np.float64]

# As many instances again that only prefill, and links that take no time: no decode waits for a
# prefill.
TWICE = Rival(
    f"{INSTANCES}P{INSTANCES}D",
    "lmetric_pull",
    settings={
        "roles": f"{INSTANCES}P{INSTANCES}D", "decode_policy": "sibyl_plus", "transfer": "none",
        "prefix_fetch": "on",
    },
)  # fmt: skip


def alone(stage: Stage, seed: int) -> Outcome:
    """Returns figures of each request prefilled on arrival by an idle engine that holds every block
    named before, then decoded as a batch of one. No engine computes a request faster, so this
    bounds means and percentiles."""
    ttft, tpot, e2e = least(made(stage, seed).trace, load_profile(stage.profile))
    return Outcome(**figures(ttft, tpot, e2e), apart=0.0, kept_up=1.0)


def least(trace: Trace, profile: Profile) -> tuple[Seconds, Seconds, Seconds]:
    """Returns the least TTFT, TPOT (NaN: an answer of one token) and end-to-end latency of each
    request."""
    prompt = trace.input_tokens.astype(np.float64)
    answer = np.maximum(trace.output_tokens, 1).astype(np.float64)
    hit = ideal_hit_tokens(trace)
    new = prompt - hit
    ttft = (
        np.ceil(new / profile.max_batch_tokens) * profile.fixed_seconds
        + profile.prefill_seconds_per_token * new
        + profile.prefill_seconds_per_attention_pair * new * (hit + new / 2)
    )
    step = (
        profile.fixed_seconds
        + profile.decode_seconds_per_sequence
        + profile.decode_seconds_per_context_token * (prompt + answer / 2)
    )
    return ttft, np.where(answer > 1, step, np.nan), ttft + (answer - 1) * step
