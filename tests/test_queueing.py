"""Queue settings of an engine, as text."""

from typing import Any

import pytest

import lmetric as lm
from lmetric.profiles import load_profile
from lmetric_lab.queueing import Swap, checked_order


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (None, None),
        ("recompute", None),
        ("swap", Swap()),
        ("swap:12.5", Swap(12.5)),
        (" swap:12 GB/s, host=64 ", Swap(12, 64)),
        ("swap:host=64", Swap(host_gigabytes=64)),
        ({"host_gigabytes": 8}, Swap(host_gigabytes=8)),
        (Swap(3), Swap(3)),
    ],
)
def test_swapping_as_text(told: Any, expected: Swap | None) -> None:
    assert Swap.of(told) == expected


@pytest.mark.parametrize(
    "told",
    ["swop", "swap:fast", "swap:1,2", "swap:-1", "swap:nan", "swap:25,host=-1", "swap:25,", {"speed": 3}],
)
def test_what_is_no_swapping_is_told(told: Any) -> None:
    with pytest.raises(lm.BadValueError, match=r"preempt.* is not valid; expected"):
        Swap.of(told)


def test_a_swap_in_tokens() -> None:
    # 131,072 bytes a token.
    seconds, tokens = Swap(25, 1).constants(load_profile("llama-3.1-8b-a100"))
    assert seconds == pytest.approx(131_072 / 25e9)
    assert tokens == 7629


def test_orders_are_checked_where_they_are_named() -> None:
    assert checked_order("uniboost(gamma=0.2)") == "uniboost(gamma=0.2)"
    assert checked_order("priority") == "priority"
    for wrong, what in (
        ("lifo", "one of fcfs"),
        ("uniboost(k=1)", "bin_tokens"),
    ):
        with pytest.raises(ValueError, match=what):
            checked_order(wrong)
