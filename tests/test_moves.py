"""Running requests that move: what the router names, and what a ticket's books do of it."""

from typing import Any

import pytest
from numpy.typing import NDArray

import lmetric as lm
from lmetric import BadValueError, NoInstanceError, Request, Router, TicketError, UnknownNameError
from lmetric.option_values import parse
from lmetric.options import Llumnix, Star

Array = NDArray[Any]


def fleet(rule: str = "star_oracle", **settings: float | str) -> Router:
    """Three engines with room for 100,000 tokens, and step times for the loads to be weighed by."""
    router = Router(
        "session_affinity",
        step_time={
            "fixed_seconds": 0.01,
            "decode_seconds_per_sequence": 1e-5,
            "decode_seconds_per_context_token": 1e-7,
            "prefill_seconds_per_token": 1e-4,
            "prefill_seconds_per_attention_pair": 0.0,
            "max_batch_tokens": 2048,
        },
    )
    for name in ("a", "b", "c"):
        router.add_instance(name, cache_blocks=6250)
    router.configure(rebalance=parse("rebalance", {"kind": rule, **settings}))
    return router


def test_a_round_names_the_move_that_makes_loads_even_and_the_ticket_makes_it() -> None:
    router = fleet()
    tickets = []
    for _ in range(4):
        _, ticket = router.route(Request(prompt_tokens=1000, max_tokens=4000, session="s"), now=0.0)
        ticket.sent(0.0)
        ticket.first_token(0.5)
        tickets.append(ticket)
    (home,) = {ticket.instance for ticket in tickets}
    (move,), why = router.rebalance(1.0)
    assert why == "the round reached its maximum number of moves"
    assert move["source"] == home != move["target"]
    assert move["variance_after"] < move["variance_before"]
    (ticket,) = (ticket for ticket in tickets if ticket.id == move["ticket"])
    with pytest.raises(TicketError, match="no move has begun"):
        ticket.migrated(1.0)
    with pytest.raises(UnknownNameError):
        ticket.begin_migration("d", now=1.0)
    with pytest.raises(TicketError, match="it already runs on the target"):
        ticket.begin_migration(home, now=1.0)
    ticket.begin_migration(move["target"], now=1.0)
    with pytest.raises(TicketError, match="a segment is already bound after its open segment"):
        ticket.begin_migration(move["target"], now=1.0)
    ticket.tokens(9, 1.5)
    slots = router.instances()
    bs = router.indicators(1.5)["bs"]
    assert (bs[slots.index(home)], bs[slots.index(move["target"])]) == (4, 1)
    assert ticket.migrated(2.0) == move["target"] == ticket.instance
    assert (ticket.from_token, ticket.to_token) == (1010, None)
    ticket.sent(2.0)
    # The target computes the prompt and the answer so far: 1,010 tokens.
    assert router.indicators(2.0)["queued_prefill_tokens"][slots.index(move["target"])] == 1010
    ticket.first_token(2.2)
    ticket.segment_done(now=3.0)
    assert router.stats()["migrated"] == 1
    records = [router.explain(number) for number in range(1, 5)]
    migrations = [each["migrations"] for each in records if each and each["migrations"]]
    assert migrations == [[(1010, move["target"])]]
    for each in tickets:
        if each.open:
            each.segment_done(now=4.0)
    assert router.in_flight() == 0
    assert list(router.indicators(4.0)["tokens"]) == [0, 0, 0]
    assert router.rebalance(4.0) == ([], "no instance is overloaded")


def test_a_move_that_is_given_up_leaves_nothing() -> None:
    router = fleet()
    _, ticket = router.route(Request(prompt_tokens=100, session="s"), now=0.0)
    with pytest.raises(TicketError, match="it has no token yet"):
        ticket.begin_migration("a" if ticket.instance != "a" else "b", now=0.05)
    ticket.first_token(0.1)
    target = next(name for name in ("a", "b", "c") if name != ticket.instance)
    ticket.begin_migration(target, recompute=False, now=0.2)
    ticket.cancel_migration(0.3)
    assert router.indicators(0.3)["bs"][router.instances().index(target)] == 0
    ticket.begin_migration(target, recompute=False, now=0.4)
    router.update_instance(target, healthy=False)
    router.update_instance(ticket.instance, healthy=False)
    (left,) = {"a", "b", "c"} - {target, ticket.instance}
    assert ticket.migrated(0.5) == left
    ticket.failed("cancelled")
    assert router.in_flight() == 0


def test_what_cannot_be_is_named() -> None:
    router = Router()
    with pytest.raises(BadValueError, match="'sta' is not valid; expected one of none, star"):
        parse("rebalance", "sta")
    with pytest.raises(BadValueError, match=r"rebalance.speed: 3 is not valid; unknown setting"):
        parse("rebalance", {"kind": "star", "speed": 3})
    with pytest.raises(BadValueError, match="threshold"):
        router.configure(rebalance=Star(threshold=2.0))
    with pytest.raises(BadValueError, match="curve, given, bins_2"):
        router.configure(rebalance=Star(forecast="tarot"))
    with pytest.raises(BadValueError, match="period_seconds"):
        router.configure(rebalance=Llumnix(period_seconds=0))
    assert router.rebalance() == ([], "rebalancing is off")
    with pytest.raises(NoInstanceError):
        router.route(Request(prompt_tokens=1))


def test_what_must_not_be_cut_does_not_move_either_and_its_record_says_why() -> None:
    for rule, why in (("star", "it has a seed"), ("none", None)):
        router = fleet(rule)
        decision, ticket = router.route(
            Request(prompt_tokens=10, allow_split=False, split_reason="it has a seed"), now=0.0
        )
        record = router.explain(decision.id)
        assert record is not None
        assert record["split_reason"] == why
        decision, other = router.route(Request(prompt_tokens=10), now=0.0)
        record = router.explain(decision.id)
        assert record is not None
        assert record["split_reason"] is None
        ticket.segment_done()
        other.segment_done()


def test_a_function_predicts_while_the_router_is_free() -> None:
    """A predictor in Python may take its time, or use the router: no lock is held while it runs."""
    router = Router("least_requests")
    asked: list[list[float]] = []

    def forecast(generated_tokens: Array, prompt_tokens: Array, turns: Array, ticket: Array) -> Array:
        assert router.in_flight() == 4
        asked.append([*generated_tokens, *prompt_tokens, *turns])
        assert set(ticket) <= {float(each.id) for each in tickets}
        return 2000 - generated_tokens

    router.configure(rebalance=Star(forecast=forecast, threshold=0.0))
    for name in "ab":
        router.add_instance(name, cache_blocks=10_000)
    tickets = []
    for number in range(4):
        _, ticket = router.route(Request(prompt_tokens=100 + number, session=f"s{number % 2}"), now=0.0)
        tickets.append(ticket)
    for ticket in tickets[:3]:
        ticket.first_token(0.1)
    router.rebalance(0.2)
    # Turns of a session are counted from the first that came.
    assert asked == [[0, 0, 0, 100, 101, 102, 0, 0, 1]]
    router.rebalance(0.3)
    assert len(asked) == 1  # nobody has 20 tokens more
    tickets[1].tokens(25, now=0.4)
    router.rebalance(0.5)
    assert asked[1:] == [[20, 101, 0]]
    for ticket in tickets:
        ticket.done(now=0.55)
    router.rebalance(0.6)
    assert len(asked) == 2


def test_a_forecast_that_fails_moves_nothing_and_says_why() -> None:
    router = fleet()
    for fails, said in (
        (lambda generated_tokens: 1 / 0, "ZeroDivisionError"),
        (lambda generated_tokens: generated_tokens - 5, "remaining: -5 is not valid"),
        (lambda generated_tokens: generated_tokens[:0], "remaining: 0 numbers is not valid"),
        (lambda generated_tokens: (generated_tokens, [float("nan")]), "sigma: NaN is not valid"),
    ):
        router.configure(rebalance=Star(forecast=fails))
        _, ticket = router.route(Request(prompt_tokens=100), now=0.0)
        ticket.first_token(0.1)
        with pytest.raises(lm.PolicyError, match=f"forecast <lambda>: .*{said}"):
            router.rebalance(0.2)
        ticket.done(now=0.3)
    for wrong, said in (
        (lambda words: words, 'unknown feature of a forecast "words"'),
        (lambda prompt_token: 1, 'did you mean "prompt_tokens"'),
        (lambda: 1, "no features"),
        (3, "expected a name, a predictor's file, or an object with feature_names and predict"),
        ("no_file.npz", "no_file.npz cannot be read: No such file"),
        ("no_file.py:forecast", "no_file.py:forecast: it cannot be loaded"),
    ):
        with pytest.raises(lm.LmetricError, match=said):
            router.configure(rebalance=Star(forecast=wrong))  # type: ignore[arg-type]
