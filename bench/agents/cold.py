"""Many equal long prompts that no cache holds: do followers gain by waiting for the first?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from world import INSTANCES, LMETRIC, PROFILE, Rival

from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare

PROMPTS = 50
SHARED_BLOCKS, CACHE_BLOCKS = 195, 1000  # of 512 tokens: 100k tokens are shared
OUTPUT_TOKENS = 300
# A follower waits at the first prompt's instance (by prefix, with overflow), computes the prefix
# itself (by load), or fetches it.
ARMS = [
    LMETRIC,
    Rival("least_requests", "least_requests"),
    Rival("cache_aware", "cache_aware"),
    Rival("lmetric, prefix fetch", "lmetric", {"prefix_fetch": True}),
]


@dataclass(frozen=True)
class Burst:
    """Prompts that arrive one after another."""

    gap_seconds: float

    @property
    def label(self) -> str:
        """The heading of the scenario."""
        return f"one prompt each {self.gap_seconds:g} s" if self.gap_seconds else "all at once"


BURSTS = [Burst(0.0), Burst(0.1), Burst(0.5), Burst(2.0)]


def trace(burst: Burst, block: int) -> Trace:
    """The prompts: a shared prefix and one block of their own."""
    each = np.arange(PROMPTS)
    ids = np.concatenate([np.append(np.arange(SHARED_BLOCKS), SHARED_BLOCKS + i) for i in each])
    return Trace(
        name="cold",
        arrival_seconds=each * burst.gap_seconds,
        input_tokens=np.full(PROMPTS, (SHARED_BLOCKS + 1) * block),
        output_tokens=np.full(PROMPTS, OUTPUT_TOKENS),
        hash_offsets=np.arange(PROMPTS + 1) * (SHARED_BLOCKS + 1),
        hash_ids=ids.astype(np.uint64),
        block_tokens=block,
    )


def play(burst: Burst, arm: Rival, seed: int) -> dict[str, float]:
    """The figures of a run."""
    profile = PROFILE.model_copy(update={"cache_blocks": CACHE_BLOCKS})
    made = trace(burst, profile.block_tokens)
    run = simulate(
        prepare(made, profile),
        programs="none",
        policy=arm.policy,
        instances=INSTANCES,
        profile=profile,
        admission="vllm",
        seed=seed,
        **arm.settings,
    )
    ttft = run.first_token_seconds - run.arrival_seconds
    return {
        "ttft": float(ttft.mean()),
        "ttft_p95": float(np.percentile(ttft, 95)),
        "end": float(run.finished_seconds.max()),
        "copies": float(run.computed_tokens.sum() / made.input_tokens[0]),
    }
