"""Decisions from Python under pytest-benchmark: `pytest bench`. Medians are the figures to look at.

Criterion's versions of the stages: `cargo bench -p lmetric-core --bench kv` (hash, chain, match, feeds) and
`--bench score`; percentiles: `cargo run --release -p lmetric-core --example index_latency`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from fleet import BLOCK, INSTANCES, SHARED_BLOCKS, Fleet
from lmetric._core import Request, Router

Benchmark = Callable[..., Any]


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    """256 instances, a million pairs."""
    return Fleet()


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Router:
    """Ours over it, exact index."""
    return fleet.router()


@pytest.mark.parametrize("thousands", [1, 8, 100])
def test_hash(benchmark: Benchmark, thousands: int) -> None:
    """Token ids to chained block hashes: nothing is stored, one instance scored, so hashing is nearly all."""
    alone = Router("round_robin", block_size=BLOCK)
    alone.add_instance("engine")
    tokens = np.arange(thousands * 1000, dtype=np.uint32)
    scores = benchmark(alone.score, tokens=tokens)
    assert len(scores) == 1


@pytest.mark.parametrize("blocks", [64, 512, 2048])
def test_route(benchmark: Benchmark, fleet: Fleet, router: Router, blocks: int) -> None:
    """Token ids in, instance booked, booking closed."""
    prompts = cycle(fleet.prompts[blocks][:16])

    def call() -> int:
        decision, ticket = router.route(Request(token_ids=next(prompts).tokens))
        ticket.segment_done()
        return int(decision.predicted_cached_tokens)

    # Whatever is chosen, it holds what all hold; who holds more may be busier.
    assert benchmark(call) >= SHARED_BLOCKS * BLOCK
    assert router.in_flight() == 0


@pytest.mark.parametrize("blocks", [64, 512, 2048])
def test_score(benchmark: Benchmark, fleet: Fleet, router: Router, blocks: int) -> None:
    """Scores of all instances as an array, nothing booked."""
    prompt = fleet.prompts[blocks][0]
    scores = benchmark(router.score, tokens=prompt.tokens)
    assert scores.shape == (INSTANCES,)
    assert np.isfinite(scores).all()
