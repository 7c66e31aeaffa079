"""Bounds of the core where a program that embeds the router meets them.

Findings of the core review: 1 (deadlines), 4 (arrivals), 5 (the guard in records), 15 (records), 17
(commit) and 21 (statistics).
"""

import time
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from lmetric import _core


def fleet(n: int = 3, **settings: Any) -> _core.Router:
    router = _core.Router("lmetric", **settings)
    for i in range(n):
        router.add_instance(f"e{i}")
    return router


@pytest.mark.parametrize("seconds", [0.0, -1.0, -1e-300, float("-inf"), float("nan")])
def test_a_deadline_that_has_passed_is_refused_and_the_router_stays_usable(seconds: float) -> None:
    """Defect 1: it panicked, and the router was broken for good."""
    router = fleet()
    late = lm.Request(prompt_tokens=10, ttft_slo_seconds=seconds)
    with pytest.raises(lm.BadValueError, match="ttft_slo_seconds"):
        router.route(late)
    router.set_admission({"ttft_seconds": 1.0})
    with pytest.raises(lm.BadValueError, match="ttft_slo_seconds"):
        router.arrive(late)
    arrival = router.arrive(lm.Request(prompt_tokens=10, ttft_slo_seconds=1.0))
    assert arrival is not None
    assert router.route(lm.Request(prompt_tokens=10), arrival=arrival)


def test_an_error_before_the_decision_leaves_the_arrival_to_its_handle() -> None:
    """Defect 4: the arrival was taken first, so that its tenant's place stayed taken."""
    router = fleet()
    router.set_admission({"tenants": {"t": {"max_concurrent": 1}}})
    request = lm.Request(prompt_tokens=10, tenant="t")
    arrival = router.arrive(request)
    assert arrival is not None
    assert arrival.verdict == "free"
    with pytest.raises(lm.BadValueError, match=r"^now: "):
        router.route(request, arrival=arrival, now=time.time())
    waiting = router.arrive(request)
    assert waiting is not None
    assert waiting.verdict == "held"
    # The same arrival may be routed, or its end makes room.
    arrival.drop()
    assert [number for number, _ in router.release_held()[0]] == [waiting.id]
    with pytest.raises(lm.BadValueError, match=r"^arrival: "):
        router.route(request, arrival=arrival)


def test_a_decision_uses_the_prompt_hashed_on_arrival_only_for_the_same_request() -> None:
    router = fleet()
    router.set_admission({"ttft_seconds": 1e6})
    first = lm.Request(token_ids=range(1000, 1640))
    for _ in range(2):
        arrival = router.arrive(first)
        decision, ticket = router.route(first, arrival=arrival)
        ticket.segment_done()
    assert decision.predicted_cached_tokens >= 624  # by the chain of its arrival
    other = lm.Request(token_ids=range(640))
    decision, ticket = router.route(other, arrival=router.arrive(other))
    ticket.segment_done()
    # An equal request is another one, too: its own prompt is hashed.
    for arrived, routed, least, most in [(other, first, 624, 640), (first, lm.Request(text="x"), 0, 0)]:
        decision, ticket = router.route(routed, arrival=router.arrive(arrived))
        ticket.segment_done()
        assert least <= decision.predicted_cached_tokens <= most


def test_records_of_a_large_fleet_keep_the_best_scores() -> None:
    """Defect 15: the records that fit into the ring do not depend on the number of instances."""
    kept = {}
    for n in (100, 1000, 3000):
        router = fleet(n, record_bytes=200_000)
        for _ in range(400):
            decision, ticket = router.route(lm.Request(prompt_tokens=100))
            ticket.segment_done()
        record = router.explain(decision.id)
        assert record is not None
        assert record["scored"] == n
        assert len(record["best"]) == 8
        best = [each["instance"] for each in record["best"]]
        scores = decision.scores()
        assert len(scores) == n
        assert np.isfinite(scores).sum() == 8
        assert set(decision.ranking()) == set(best)
        assert decision.instance in best
        kept[n] = sum(router.explain(number) is not None for number in range(1, 401))
    assert kept[100] > 100
    assert kept[3000] > 0.3 * kept[100]  # names count once


def test_a_running_request_keeps_its_record_when_the_ring_wraps() -> None:
    """Defect 15: the outcome of a long request was lost."""
    router = fleet(record_bytes=100_000)
    decision, ticket = router.route(lm.Request(prompt_tokens=100))
    for _ in range(1000):
        router.route(lm.Request(prompt_tokens=100))[1].segment_done()
    assert router.explain(decision.id + 1) is None
    ticket.first_token()
    ticket.segment_done(output_tokens=7)
    record = router.explain(decision.id)
    assert record is not None
    assert (record["outcome"], record["output_tokens"]) == ("finished", 7)
    assert {each["instance"] for each in record["best"]} == {"e0", "e1", "e2"}


def test_statistics_have_only_what_is_asked_for() -> None:
    """Defect 21: a large fleet is copied in pieces, with the same values."""
    router = fleet(1500)
    tickets = [router.route(lm.Request(prompt_tokens=100))[1] for _ in range(50)]
    columns = router.indicators()
    assert len(columns) * 1500 > 2 * 16_384  # several pieces
    assert list(router.indicators(names=["q_bs", "bs"])) == ["q_bs", "bs"]
    assert router.indicators(names=[]) == {}
    rows = router.stats()["instances"]
    assert list(rows) == router.instances()
    for name in ("bs", "decode_tokens", "queued_prefill_tokens"):
        assert name in columns
    assert [row["bs"] for row in rows.values()] == columns["bs"].tolist()
    assert "instances" not in router.stats(instances=False)
    assert columns["bs"].sum() == router.stats(instances=False)["in_flight"] == len(tickets)
    with pytest.raises(lm.UnknownNameError, match="nothing"):
        router.indicators(names=["nothing"])
