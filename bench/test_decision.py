"""Decisions from Python under pytest-benchmark: `pytest bench`. Read the medians.

Criterion has the stages in Rust: `cargo bench -p lmetric-kv --bench kv` (hash, chain, match,
record), `cargo bench -p lmetric-core --bench score` and `--bench feed`. For percentiles: `cargo run
--release -p lmetric-kv --example index_latency`.
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
    """Returns 256 instances with a million pairs."""
    return Fleet()


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Router:
    """Returns our router over the fleet, exact index."""
    return fleet.router()


@pytest.mark.parametrize("thousands", [1, 8, 100])
def test_hash(benchmark: Benchmark, thousands: int) -> None:
    """Measures token ids to chained block hashes. Nothing is stored and one instance is scored, so
    hashing is nearly all."""
    alone = Router("round_robin", block_size=BLOCK)
    alone.add_instance("engine")
    tokens = np.arange(thousands * 1000, dtype=np.uint32)
    scores = benchmark(alone.score, tokens=tokens)
    assert len(scores) == 1


@pytest.mark.parametrize("blocks", [64, 512, 2048])
def test_route(benchmark: Benchmark, fleet: Fleet, router: Router, blocks: int) -> None:
    """Measures a decision from token ids, with the request counted, and its end."""
    prompts = cycle(fleet.prompts[blocks][:16])

    def call() -> int:
        decision, ticket = router.route(Request(token_ids=next(prompts).tokens))
        ticket.segment_done()
        return int(decision.predicted_cached_tokens)

    # Any choice holds the blocks that all hold; an instance that holds more may be busier.
    assert benchmark(call) >= SHARED_BLOCKS * BLOCK
    assert router.in_flight() == 0


@pytest.mark.parametrize("blocks", [64, 512, 2048])
def test_score(benchmark: Benchmark, fleet: Fleet, router: Router, blocks: int) -> None:
    """Measures the scores of all instances as an array, nothing counted."""
    prompt = fleet.prompts[blocks][0]
    scores = benchmark(router.score, tokens=prompt.tokens)
    assert scores.shape == (INSTANCES,)
    assert np.isfinite(scores).all()
