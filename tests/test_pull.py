"""Prefix pull from Python: what a decision names, what a ticket tells, and what the router learns of it."""

from __future__ import annotations

import numpy as np
import pytest

import lmetric as lm

PROMPT = np.arange(1601, dtype=np.uint32)  # 100 blocks of 16 tokens, and one more
PULL = {"seconds_per_token": 1e-5, "fixed_seconds": 0.002, "least_tokens": 64, "most_pulls": 2}


def fleet(policy: object = "least_requests", **pull: float) -> lm.Router:
    """`e0` holds the prompt, computed at 10,000 tokens/s, and takes no more requests."""
    router = lm.Router(policy)  # type: ignore[arg-type]
    router.set_pull(**PULL | pull)
    router.add_instance("e0")
    _, ticket = router.route(tokens=PROMPT, now=0.0)
    ticket.first_token(now=0.1601)
    ticket.finished(now=0.2)
    router.add_instance("e1")
    router.drain("e0")
    return router


def test_a_decision_names_what_to_pull_and_the_ticket_tells_of_it() -> None:
    router = fleet()
    decision, ticket = router.route(tokens=PROMPT, now=1.0)
    assert decision.instance == "e1"
    assert decision.pull == ticket.pull == ("e0", 0, 1600)
    assert router.indicators(now=1.0)["pulls"].tolist() == [1, 0]
    ticket.sent(now=1.0)
    ticket.pulled(1600, 0.02, now=1.02)
    assert ticket.pull is None
    assert router.indicators(now=1.02)["pulls"].tolist() == [0, 0]
    receipt = router.receipt(decision.id)
    assert receipt is not None
    told = {name: receipt[name] for name in receipt if "pull" in name}
    assert told.pop("expected_pull_seconds") == pytest.approx(0.018)
    assert told == {
        "pull_instance": "e0", "pull_from_token": 0, "pull_to_token": 1600, "pulled_tokens": 1600,
        "pull_seconds": 0.02,
    }  # fmt: skip
    stats = router.stats()
    assert (stats["pulls"], stats["pulled_tokens"]) == (1, 1600)
    cost = router.pull_cost()
    assert cost is not None
    assert cost[2] == 1
    assert cost[1] + 1600 * cost[0] > 0.018
    with pytest.raises(lm.TicketError, match="pulls nothing"):
        router.route(tokens=np.arange(9000, 9100, dtype=np.uint32))[1].pulled(1, 0.1)


def test_any_score_may_read_it() -> None:
    router = fleet(lm.P_TOKEN - lm.PULL_TOKENS + lm.PULL_COST_TOKENS)
    decision, _ticket = router.route(tokens=PROMPT, now=1.0)
    assert decision.scores()[1] == pytest.approx(1 + 0.018 * 10_000)
    receipt = router.receipt(decision.id)
    assert receipt is not None
    terms = receipt["best"][0]["terms"]
    assert terms["pull_tokens"] == 1600
    assert terms["pull_cost_tokens"] == pytest.approx(180)


def test_switched_off_it_pulls_nothing() -> None:
    router = fleet("lmetric_pull")
    router.set_pull(False)
    decision, _ticket = router.route(tokens=PROMPT, now=1.0)
    assert decision.pull is None
    assert router.pull_cost() is None
    assert decision.scores()[1] == 1601


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"speed": 1.0}, "least_tokens or most_pulls"),
        ({"most_pulls": 0.0}, "at least 1"),
        ({"least_tokens": 1.5}, "whole number"),
        ({"fixed_seconds": -1.0}, "fixed_seconds"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, float], part: str) -> None:
    with pytest.raises(lm.BadValueError, match=part):
        lm.Router().set_pull(**settings)
