"""The ledger of a gateway that sends requests by itself: every count returns to zero."""

from __future__ import annotations

from typing import Any

import pytest

import lmetric as lm
from lmetric.gateways.placements import ENDED_SECONDS, UNSENT_SECONDS, Placement, Placements

K = ("k", 1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def placements(clock: Clock) -> Placements:
    router = lm.Router("lmetric")
    for name in ("a", "b"):
        router.add_instance(name)
    return Placements(router, clock)


def batch(placements: Placements) -> dict[str, float]:
    router = placements.router
    sizes = router.indicators()["bs"]
    return dict(zip(router.instances(), map(float, sizes), strict=True))


def fields(**more: Any) -> dict[str, Any]:
    return {"text": "hello " * 100, "max_tokens": 8, **more}


def test_a_request_counts_until_its_end(placements: Placements) -> None:
    first, second = placements.place(K, fields())
    assert batch(placements) == {first: 1, second: 0}
    placements.send(K, first)
    placements.first_token(K)
    placements.first_token(K)
    placements.done("k", first)
    placements.done("k", first)
    assert batch(placements) == {"a": 0, "b": 0}
    assert placements.router.in_flight() == len(placements) == 0
    # The prompt counts as cached where it ran.
    cached = placements.router.cached_tokens(lm.Request(**fields()))
    assert dict(zip(placements.router.instances(), cached, strict=True))[first] > 0


def test_the_gateway_may_choose_another_instance(placements: Placements) -> None:
    first, second = placements.place(K, fields())
    assert placements.send(K, second) == (0, 150)
    assert batch(placements) == {first: 0, second: 1}
    placements.done("k", first)
    assert batch(placements) == {first: 0, second: 1}
    placements.done("k", second)
    assert placements.router.in_flight() == 0


def test_another_instance_gets_the_whole_request(placements: Placements) -> None:
    first, second = placements.place(K, fields(prompt_tokens=90, extra_tokens=7, request_id="r"))
    assert placements.send(K, second) == (0, 97)
    placements.done("k", second)
    records: Any = [placements.router.explain(number) for number in (1, 2)]
    assert [(each["instance"], each["outcome"]) for each in records] == [
        (first, "cancelled"), (second, "finished"),
    ]  # fmt: skip
    assert [each["request_id"] for each in records] == ["r", "r"]


def test_output_tokens_count_once() -> None:
    router = lm.Router("lmetric")
    router.add_instance("a")
    placement = Placement(router, fields())
    placement.add_token()  # before it was sent
    placement.send()
    for _ in range(3):
        placement.add_token()
    placement.first_token()
    assert placement.open
    placement.done(prompt_tokens=150, cached_tokens=0, output_tokens=3)
    placement.add_token()
    placement.fail("reset")
    record: Any = router.explain(placement.decision.id)
    assert (record["outcome"], record["output_tokens"]) == ("finished", 3)
    assert not placement.open


def test_a_second_try_replaces_the_first(placements: Placements) -> None:
    placements.place(K, fields())
    placements.place(K, fields())
    assert sum(batch(placements).values()) == len(placements) == 1
    placements.drop(K)
    placements.drop(K)
    assert placements.router.in_flight() == 0


def test_requests_end_with_their_instance(placements: Placements) -> None:
    first, _ = placements.place(K, fields())
    placements.send(K, first)
    placements.place(("other", 1), fields(instances=["b" if first == "a" else "a"]))
    placements.drop_instance(first)
    placements.router.remove_instance(first)
    assert len(placements) == placements.router.in_flight() == len(placements._keys) == 1
    placements.done("k", first)
    placements.first_token(K)
    placements.send(K, first)
    assert len(placements) == 1


def test_each_call_of_a_request_ends_on_its_own_instance(placements: Placements) -> None:
    for call, name in enumerate(("a", "b", "a")):
        placements.place(("k", call), fields(instances=[name]))
        placements.send(("k", call), name)
    placements.done("k", "b")
    assert batch(placements) == {"a": 2, "b": 0}
    placements.done("k", "b")
    placements.done("k", "a")
    assert batch(placements) == {"a": 1, "b": 0}
    placements.done("k", "a")
    assert placements.router.in_flight() == len(placements) == len(placements._keys) == 0


@pytest.mark.parametrize("at", [0, 1], ids=["first", "another"])
def test_an_end_before_the_request_was_sent(placements: Placements, clock: Clock, at: int) -> None:
    """Ray reports a sent request once its replica accepts it. A client may leave before that."""
    for call in range(3):
        instance = placements.place(("k", call), fields())[at]
        placements.done("k", instance)
    assert len(placements) == 3
    assert placements.sweep() == ENDED_SECONDS
    clock.now += ENDED_SECONDS + 1
    assert placements.sweep() is None
    assert placements.router.in_flight() == len(placements) == len(placements._keys) == 0


def test_a_sweep_returns_the_time_of_the_next_one(placements: Placements, clock: Clock) -> None:
    """Without further requests, only the gateway's timer ends placements."""
    for call in range(3):
        placements.place(("k", call), fields())
    assert placements.sweep() == UNSENT_SECONDS
    for _ in range(2):
        placements.done("k", "a")
        clock.now += 3
    assert placements.sweep() == 2
    assert len(placements) == 2, "one has ended, and the other was reported later"
    clock.now += 2.1
    assert placements.sweep() == pytest.approx(UNSENT_SECONDS - 8.1)
    clock.now += UNSENT_SECONDS
    assert placements.sweep() is None
    assert placements.router.in_flight() == len(placements) == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_rejected_try_does_not_end_the_next_one(placements: Placements, clock: Clock, again: bool) -> None:
    """Ray reports the end of the rejected try after it has chosen another replica."""
    first, second = placements.place(K, fields())
    placements.done("k", first)
    if again:  # all replicas are full: Ray asks again and again
        clock.now += ENDED_SECONDS - 1
        placements.place(K, fields())
        clock.now += ENDED_SECONDS - 1
        placements.sweep()
    assert placements.send(K, second) == (0, 150)
    clock.now += 2 * UNSENT_SECONDS
    placements.sweep()
    assert batch(placements) == {first: 0, second: 1}
    placements.done("k", second)
    assert placements.router.in_flight() == len(placements) == 0


def test_requests_that_the_gateway_sends_unreported_end_in_time(placements: Placements, clock: Clock) -> None:
    """Ray's direct streaming asks for replicas, and reports nothing."""
    for call in range(3):
        placements.place(("k", call), fields())
        clock.now += UNSENT_SECONDS / 2
    assert len(placements) == 3
    clock.now += 1
    placements.place(K, fields())
    assert placements.sweep() == UNSENT_SECONDS / 2 - 1
    assert len(placements) == placements.router.in_flight() == 2


def test_the_chosen_instance_left_in_the_meantime(placements: Placements) -> None:
    _, second = placements.place(K, fields())
    placements.router.update_instance(second, draining=True)
    placements.send(K, second)
    assert placements.router.in_flight() == len(placements) == len(placements._keys) == 0


def test_no_instance() -> None:
    with pytest.raises(lm.NoInstanceError):
        Placements(lm.Router("lmetric")).place(K, fields())


def test_a_second_try_without_an_instance_ends_the_first(placements: Placements) -> None:
    placements.place(K, fields())
    for name in ("a", "b"):
        placements.router.update_instance(name, healthy=False)
    with pytest.raises(lm.NoInstanceError):
        placements.place(K, fields())
    assert placements.router.in_flight() == len(placements) == len(placements._keys) == 0
