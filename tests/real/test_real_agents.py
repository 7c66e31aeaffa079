"""Agent programs on two real vLLM engines whose caches hold half of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import agents_proof
from vllm_process import VllmEngine, environment, model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

SEED, AGENTS = 1, 12


async def test_admission_keeps_the_contexts_in_the_caches(
    vllm_engines: Callable[..., list[VllmEngine]],
) -> None:
    """The same agents, without headers: lmetric computes contexts again, admission does not, and
    both give the answers of one engine alone."""
    size = {"model": str(model(environment(), *agents_proof.SIZE))}
    engines = vllm_engines(2, **size, **agents_proof.ENGINE)
    right = await agents_proof.alone(engines[0], SEED, AGENTS)
    rows = {arm: await agents_proof.run(engines, arm, SEED, AGENTS, right) for arm in ("lmetric", "admit")}
    lmetric, admit = rows["lmetric"], rows["admit"]
    assert lmetric.different == admit.different == 0, rows
    for row in (lmetric, admit):
        # The engines count what the answers report.
        assert row.computed_tokens >= row.prompt_tokens - row.cached_tokens, rows
    assert admit.held > 0, rows
    assert lmetric.recomputed > 0.2, rows
    assert admit.recomputed < lmetric.recomputed / 3, rows
    assert admit.cold < lmetric.cold / 2, rows
