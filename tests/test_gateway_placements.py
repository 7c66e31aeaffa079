"""The ledger of a gateway that sends requests by itself: every count returns to zero."""

from __future__ import annotations

import pytest

import lmetric as lm
from lmetric.gateways.placements import Placements


@pytest.fixture
def placements() -> Placements:
    router = lm.Router("lmetric")
    for name in ("a", "b"):
        router.add_instance(name)
    return Placements(router)


def batch(placements: Placements) -> dict[str, float]:
    router = placements.router
    sizes = router.indicators()["bs"]
    return dict(zip(router.instances(), map(float, sizes), strict=True))


def request(text: str = "hello " * 100) -> lm.Request:
    return lm.Request(text=text, max_tokens=8)


def test_a_request_counts_until_its_end(placements: Placements) -> None:
    first, second = placements.place("k", request())
    assert batch(placements) == {first: 1, second: 0}
    placements.sent("k", first)
    placements.first_token("k")
    placements.first_token("k")
    placements.done("k")
    placements.done("k")
    assert batch(placements) == {"a": 0, "b": 0}
    assert placements.router.in_flight() == len(placements) == 0
    # The prompt counts as cached where it ran.
    assert (
        dict(zip(placements.router.instances(), placements.router.cached_tokens(request()), strict=True))[
            first
        ]
        > 0
    )


def test_the_gateway_may_choose_another_instance(placements: Placements) -> None:
    first, second = placements.place("k", request())
    assert placements.sent("k", second) == (0, 150)
    assert batch(placements) == {first: 0, second: 1}
    assert placements.instance("k") == second
    placements.done("k")
    assert placements.router.in_flight() == 0


def test_a_second_try_replaces_the_first(placements: Placements) -> None:
    placements.place("k", request())
    placements.place("k", request())
    assert sum(batch(placements).values()) == len(placements) == 1
    placements.drop("k")
    placements.drop("k")
    assert placements.router.in_flight() == 0


def test_requests_end_with_their_instance(placements: Placements) -> None:
    first, _ = placements.place("k", request())
    placements.sent("k", first)
    placements.place("other", lm.Request(text="x", instances=["b" if first == "a" else "a"]))
    placements.lose(first)
    placements.router.remove_instance(first)
    assert len(placements) == placements.router.in_flight() == 1
    placements.done("k")
    placements.first_token("k")
    placements.sent("k", first)
    assert len(placements) == 1


def test_an_end_before_the_request_was_sent(placements: Placements) -> None:
    placements.place("k", request())
    placements.done("k")
    assert placements.router.in_flight() == len(placements) == 0


def test_the_chosen_instance_left_in_the_meantime(placements: Placements) -> None:
    _, second = placements.place("k", request())
    placements.router.update_instance(second, draining=True)
    placements.sent("k", second)
    assert placements.router.in_flight() == len(placements) == 0


def test_no_instance() -> None:
    with pytest.raises(lm.NoInstanceError):
        Placements(lm.Router("lmetric")).place("k", request())
