"""How a canary splits requests, and the differences between its arms."""

from __future__ import annotations

import numpy as np
import pytest

from lmetric.canary import BUCKETS, Comparison, Outcome, Splitter
from lmetric.canary.comparison import MIN_GROUPS, student_quantile
from lmetric.cli.canary import value_of


def test_a_key_stays_in_its_arm_and_the_share_is_kept() -> None:
    for share in (0.05, 0.5, 0.9):
        splitter = Splitter("salt", share)
        places = [splitter.place(b"session %d" % i) for i in range(20_000)]
        assert places == [Splitter("salt", share).place(b"session %d" % i) for i in range(20_000)]
        found = np.mean([place.canary for place in places])
        assert abs(found - share) < 4 * np.sqrt(share * (1 - share) / 20_000)
        assert {place.bucket for place in places} == set(range(BUCKETS))


def test_another_salt_draws_all_keys_again() -> None:
    one, other = Splitter("a", 0.5), Splitter("b", 0.5)
    keys = [b"session %d" % i for i in range(4_000)]
    same = np.mean([one.place(key).canary == other.place(key).canary for key in keys])
    assert 0.45 < same < 0.55


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_share_that_is_no_split_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"share: .* is not valid; expected a number above 0 and below 1"):
        Splitter("salt", share)


def test_values_by_hand() -> None:
    comparison = Comparison()
    comparison.add(False, 3, Outcome(False, 2.0, 0.5, 3, 100, 40))
    comparison.add(False, 3, Outcome(False, 4.0, 1.5, 2, 300, 60))
    comparison.add(False, 9, Outcome(True))
    comparison.add(True, 9, Outcome(False, 1.0))
    assert comparison.values() == {
        "ttft_seconds": [1.0, None],
        "tpot_seconds": [(1.5 + 2.5) / 5, None],
        "e2e_seconds": [3.0, 1.0],
        "hit_ratio": [100 / 400, None],
        "error_rate": [1 / 3, 0.0],
    }
    assert comparison.requests == [3, 1]
    assert comparison.errors == [1, 0]
    assert comparison.groups == [2, 1]
    assert comparison.largest_group == 0.5
    assert comparison.differences() == [], "too few groups"


def test_the_interval_is_the_known_one_for_independent_requests() -> None:
    """One request per group: the interval is that of Welch's test, up to the correction n/(n-1)."""
    rng = np.random.default_rng(1)
    stable, canary = rng.exponential(1.0, 400), rng.exponential(1.2, 100)
    comparison = Comparison()
    for arm, values in ((False, stable), (True, canary)):
        for bucket, value in enumerate(values.tolist()):
            comparison.add(arm, bucket, Outcome(False, value))
    (found,) = [each for each in comparison.differences() if each.metric == "e2e_seconds"]
    parts = [stable.var(ddof=1) / 400, canary.var(ddof=1) / 100]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 399 + parts[1] ** 2 / 99)
    half = student_quantile(0.975, freedom) * np.sqrt(sum(parts))
    assert found.value == pytest.approx(canary.mean() - stable.mean())
    assert found.interval == pytest.approx((found.value - half, found.value + half))
    assert found.always[0] < found.interval[0] < found.interval[1] < found.always[1]


def test_quantiles_of_student() -> None:
    for freedom, known in ((5, 2.5706), (10, 2.2281), (30, 2.0423), (1e9, 1.9600)):
        assert student_quantile(0.975, freedom) == pytest.approx(known, rel=2e-3)


def test_an_arm_with_few_sessions_has_no_interval() -> None:
    comparison = Comparison()
    for bucket in range(MIN_GROUPS - 1):
        for _ in range(100):
            comparison.add(True, bucket, Outcome(False, 1.0))
    for bucket in range(100):
        comparison.add(False, bucket, Outcome(False, 1.0))
    assert comparison.differences() == []


def draw(rng: np.random.Generator, sessions: int, slower: float = 0.0, sick: float = 0.0) -> Comparison:
    """Sessions of 1 to 12 requests that share a level, as turns of a conversation do."""
    comparison = Comparison()
    arms = rng.random(sessions) < 0.3
    owner = np.repeat(np.arange(sessions), rng.integers(1, 13, sessions))
    levels = rng.lognormal(-2.0, 0.8, sessions) * (1.0 + slower * arms)
    ttft = levels[owner] * rng.lognormal(0.0, 0.3, len(owner))
    e2e = ttft + 0.5 * rng.lognormal(0.0, 0.2, len(owner))
    failed = rng.random(len(owner)) < 0.01 + sick * arms[owner]
    cached = rng.integers(0, 900, len(owner))
    buckets = rng.integers(BUCKETS, size=sessions)[owner]
    rows = (each.tolist() for each in (arms[owner], buckets, failed, e2e, ttft, cached))
    for arm, bucket, error, end, first, hit in zip(*rows, strict=True):
        comparison.add(arm, bucket, Outcome(error, end, first, 50, 1000, hit))
    return comparison


def test_equal_policies_are_within_the_interval_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(2)
    inside: dict[str, list[bool]] = {}
    for _ in range(200):
        for each in draw(rng, 300).differences():
            inside.setdefault(each.metric, []).append(not each.excludes_zero)
    covered = {name: np.mean(found) for name, found in inside.items()}
    assert set(covered) == {"ttft_seconds", "tpot_seconds", "e2e_seconds", "hit_ratio", "error_rate"}
    assert all(0.90 <= share <= 0.985 for share in covered.values()), covered


def test_requests_of_a_session_are_not_independent() -> None:
    """With each request in a group of its own, the interval is far too narrow."""
    rng = np.random.default_rng(3)
    missed = 0
    for _ in range(100):
        comparison = Comparison()
        bucket = 0
        for session in range(60):
            level = rng.lognormal(-2.0, 0.8)
            for _ in range(10):
                comparison.add(session % 2 == 1, bucket, Outcome(False, level * rng.lognormal(0.0, 0.1)))
                bucket = (bucket + 1) % BUCKETS
        missed += any(each.excludes_zero for each in comparison.differences() if each.metric == "e2e_seconds")
    assert missed > 25, missed


def test_a_worse_policy_is_found() -> None:
    rng = np.random.default_rng(4)
    found = {each.metric: each for each in draw(rng, 2000, slower=0.5, sick=0.05).differences()}
    ttft, errors = found["ttft_seconds"], found["error_rate"]
    assert ttft.interval[0] > 0
    assert ttft.always[0] > 0.1 * ttft.stable
    assert errors.interval[0] > 0
    assert errors.always[0] > 0.01
    assert not found["hit_ratio"].excludes_zero


def test_many_looks_at_equal_policies_raise_few_alarms() -> None:
    """The interval of one look excludes zero at some look in many runs; the other one does not."""
    rng = np.random.default_rng(5)
    once = always = 0
    for _ in range(50):
        comparison, seen_once, seen_always = Comparison(), False, False
        for step in range(1, 1001):
            canary, bucket = bool(rng.random() < 0.5), int(rng.integers(BUCKETS))
            comparison.add(canary, bucket, Outcome(False, float(rng.lognormal(-2.0, 0.5))))
            if step >= 100 and step % 50 == 0:
                (each,) = [d for d in comparison.differences() if d.metric == "e2e_seconds"]
                seen_once |= each.excludes_zero
                seen_always |= each.always[0] > 0.0 or each.always[1] < 0.0
        once, always = once + seen_once, always + seen_always
    assert once > 5, once
    assert always <= 3, always


@pytest.mark.parametrize("text", ["*a", "[1", "{", "a: b: c", "@x", "!!python/object:x y", "best"])
def test_the_value_of_a_knob_may_be_any_text(text: str) -> None:
    assert value_of(text) == text


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("0.5", 0.5), ("true", True), ("null", None)])
def test_the_value_of_a_knob_may_be_a_number(text: str, value: object) -> None:
    assert value_of(text) == value
