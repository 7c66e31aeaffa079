"""Outlier ejection and the retry budget, without sockets and without a clock."""

import math
import random
from dataclasses import dataclass, field
from typing import get_args

import pytest

from constants import with_constants
from lmetric.config import Ejection, Retries
from lmetric.server.fleet.outliers import MAX_SATURATED_SECONDS, Outliers
from lmetric.server.fleet.retry_budget import LOST_REQUESTS, WINDOW_SECONDS, Breaks, RetryBudget
from lmetric.server.fleet.service import CLIENT_SECONDS, MEANINGS, TRANSITIONS, Event, ServiceRecord
from lmetric.server.fleet.watchdog import Watchdog


@dataclass(eq=False)
class Fake:
    name: str
    role: str = "both"
    held: bool = False
    service: ServiceRecord = field(default_factory=ServiceRecord)


class Group:
    """Engines that are up at time 0."""

    def __init__(self, count: int, role: str = "both", **settings: float) -> None:
        self.engines = [Fake(f"e{i}", role) for i in range(count)]
        self.outliers = Outliers(with_constants(Ejection, **settings))
        for engine in self.engines:
            engine.service.up(0.0)
        self.review(0.0)

    def review(self, now: float) -> None:
        self.outliers.review(self.engines, now)

    def fail(self, engine: Fake, times: int, now: float, client: str = "", proven: bool = True) -> None:
        for _ in range(times):
            self.outliers.failed(engine, self.engines, client, proven, "status 500", now)
        self.review(now)

    @property
    def serving(self) -> list[str]:
        return [engine.name for engine in self.engines if engine.service.in_service]


def test_every_state_and_event_is_described_and_used() -> None:
    assert {state for state, _ in TRANSITIONS} == set(MEANINGS)
    assert {event for _, event in TRANSITIONS} == set(get_args(Event))
    assert {state for then in TRANSITIONS.values() for state in then} == set(MEANINGS)


@pytest.mark.parametrize("seed", range(20))
def test_the_review_after_a_change_of_one_engine_equals_the_review_of_all(seed: int) -> None:
    """In a large fleet, most changes of one engine need no review of the others."""
    dice = random.Random(seed)
    all_of, one_of = Group(5, max_share=0.5, base_seconds=3.0), Group(5, max_share=0.5, base_seconds=3.0)
    now, quick = 1.0, 0
    for _ in range(400):
        now += dice.choice([0.0, 0.0, 0.0, 0.5, 2.0])
        number, what = dice.randrange(5), dice.choice(["up", "lost", "hold", "full", "fail", "probe", "role"])
        for it in (all_of, one_of):
            it.review(now)  # as twice a second
            engine, outliers = it.engines[number], it.outliers
            if what == "up" and engine.service.state == "DOWN":
                engine.service.up(now)
            elif what == "lost" and engine.service.state != "DOWN":
                engine.service.enter("LOST", "DOWN", now)
            elif what == "hold":
                engine.held = not engine.held
            elif what == "role":
                engine.role = "decode" if engine.role == "both" else "both"
            elif what == "full" and number == 1:
                outliers.saturated(engine, 1.0, now)
            elif what == "fail" and number == 0:
                for _ in range(5):
                    outliers.failed(engine, it.engines, "", True, "status 500", now)
            elif what == "probe":
                outliers.probed(engine, None, now)
            if it is all_of:
                it.review(now)
            else:
                quick += outliers.calm
                outliers.review_one(engine, it.engines, now)
        assert one_of.serving == all_of.serving
        assert [each.service.state for each in one_of.engines] == [
            each.service.state for each in all_of.engines
        ]
    assert quick > 20, "some reviews looked at one engine"


def test_consecutive_failures_eject_and_a_success_begins_anew() -> None:
    it = Group(2)
    broken = it.engines[0]
    it.fail(broken, 4, 1.0)
    broken.service.served()
    it.fail(broken, 4, 2.0)
    assert it.serving == ["e0", "e1"]
    it.fail(broken, 1, 3.0)
    assert (it.serving, broken.service.state, broken.service.until) == (["e1"], "EJECTED", 33.0)
    assert +it.outliers.ejected == {"consecutive": 1}


def test_ejections_grow_and_shrink_with_time_in_service() -> None:
    it = Group(2)
    broken = it.engines[0]
    it.fail(broken, 5, 0.0)
    now, lengths = 0.0, []
    for _ in range(12):
        lengths.append(broken.service.until - now)
        now = broken.service.until
        it.outliers.probed(broken, "probe: status 500", now)
    assert lengths[:4] == [30.0, 60.0, 90.0, 120.0]
    assert lengths[-1] == 300.0
    now = broken.service.until
    before = broken.service.ejections
    it.outliers.probed(broken, None, now)
    it.review(now)
    assert (broken.service.state, it.serving) == ("PROBING", ["e0", "e1"])
    broken.service.served()
    it.review(now + 1)
    assert broken.service.state == "HEALTHY"
    it.review(now + 32)
    it.review(now + 63)
    assert broken.service.ejections == before - 2


def test_an_engine_on_trial_is_ejected_by_its_first_proven_failure() -> None:
    it = Group(2)
    broken = it.engines[0]
    it.fail(broken, 5, 0.0)
    it.outliers.probed(broken, None, 30.0)
    it.fail(broken, 1, 31.0, "hostile", proven=False)
    assert broken.service.state == "PROBING", "without proof, a client could keep it out"
    it.fail(broken, 1, 32.0)
    assert (broken.service.state, broken.service.until) == ("EJECTED", 32.0 + 60.0)


def test_an_engine_on_trial_without_requests_is_healthy_after_a_while() -> None:
    it = Group(2)
    it.fail(it.engines[0], 5, 0.0)
    it.outliers.probed(it.engines[0], None, 30.0)
    it.review(59.0)
    assert it.engines[0].service.state == "PROBING"
    it.review(60.0)
    assert it.engines[0].service.state == "HEALTHY"


def test_one_client_ejects_no_engine_without_proof() -> None:
    it = Group(2)
    victim = it.engines[0]
    for second in range(int(CLIENT_SECONDS)):
        it.fail(victim, 50, float(second), "hostile", proven=False)
    assert it.serving == ["e0", "e1"]
    assert victim.service.tally.failures == 1
    for number in range(4):
        it.fail(victim, 1, 5.0, f"client {number}", proven=False)
    assert it.serving == ["e1"], "failures of five clients count"


@pytest.mark.parametrize(("engines", "most"), [(2, 1), (3, 1), (10, 1), (20, 2), (40, 4)])
def test_at_most_a_tenth_is_ejected_but_at_least_one(engines: int, most: int) -> None:
    it = Group(engines)
    for engine in it.engines:
        it.fail(engine, 5, 1.0)
    assert len(it.serving) == engines - most
    assert it.outliers.prevented["max_share"] + it.outliers.prevented["panic_threshold"] == engines - most


def test_the_only_engine_of_a_role_is_never_ejected() -> None:
    it = Group(1)
    it.fail(it.engines[0], 50, 1.0)
    assert it.serving == ["e0"]
    it = Group(2)
    it.engines[0].role, it.engines[1].role = "prefill", "decode"
    it.fail(it.engines[1], 50, 1.0)
    assert it.serving == ["e0", "e1"]


def test_an_engine_that_is_held_is_no_replacement() -> None:
    it = Group(2)
    it.engines[1].held = True
    it.fail(it.engines[0], 50, 1.0)
    assert it.engines[0].service.state == "HEALTHY"


def test_below_the_panic_threshold_ejected_engines_get_requests() -> None:
    it = Group(4)
    it.fail(it.engines[0], 5, 1.0)
    for engine in it.engines[1:3]:
        engine.service.enter("LOST", "DOWN", 2.0)
    it.review(2.0)
    assert it.serving == ["e0", "e3"], "one of four is in service, so the ejected one is, too"
    assert it.outliers.panic == {"both"}
    it.engines[1].service.up(3.0)
    it.review(3.0)
    assert it.serving == ["e1", "e3"]
    assert (it.outliers.panic, it.outliers.panics) == (set(), 1)


def test_success_rates_are_compared_with_all_others() -> None:
    it = Group(2)
    bad, good = it.engines
    for now in range(30):
        for _ in range(3):
            good.service.served()
            bad.service.served()
        it.fail(bad, 1, float(now))
    assert (bad.service.state, +it.outliers.ejected) == ("EJECTED", {"success_rate": 1})
    assert "success rate" in str(bad.service.reason)


@pytest.mark.parametrize(("bad_of", "good_of"), [((1, 9), (0, 10)), ((30, 70), (29, 71)), ((2, 2), (0, 500))])
def test_rates_that_differ_by_chance_eject_nobody(bad_of: tuple[int, int], good_of: tuple[int, int]) -> None:
    """Failures and successes: few requests, equal rates, or a difference of few requests."""
    it = Group(2, consecutive_failures=1000)
    for engine, (failures, successes) in zip(it.engines, (bad_of, good_of), strict=True):
        engine.service.successes, engine.service.failures = successes, failures
    it.review(10.0)
    assert it.serving == ["e0", "e1"]


def test_an_engine_that_returns_is_judged_anew() -> None:
    it = Group(2)
    bad, good = it.engines
    for _ in range(100):
        good.service.served()
    it.fail(bad, 5, 1.0)
    it.outliers.probed(bad, None, 31.0)
    for now in (40.0, 50.0, 60.0):
        good.service.successes += 100
        it.review(now)
    assert bad.service.state in ("PROBING", "HEALTHY")


def test_an_engine_that_went_down_during_its_ejection_stays_ejected() -> None:
    it = Group(2)
    it.fail(it.engines[0], 5, 0.0)
    it.engines[0].service.enter("LOST", "DOWN", 5.0)
    it.engines[0].service.up(10.0)
    assert it.engines[0].service.state == "EJECTED"
    it.engines[0].service.enter("LOST", "DOWN", 15.0)
    it.engines[0].service.up(30.0)
    assert it.engines[0].service.state == "HEALTHY"


def test_a_saturated_engine_rests_unless_all_are() -> None:
    it = Group(2)
    it.outliers.saturated(it.engines[0], 5.0, 0.0)
    it.review(0.0)
    assert it.serving == ["e1"]
    it.outliers.saturated(it.engines[1], 3.0, 1.0)
    it.review(1.0)
    assert it.serving == ["e0", "e1"]
    it.review(4.5)
    assert it.serving == ["e1"]
    it.review(5.0)
    assert it.serving == ["e0", "e1"]
    it.outliers.saturated(it.engines[0], 3600.0, 6.0)
    it.review(6.0 + MAX_SATURATED_SECONDS)
    assert it.serving == ["e0", "e1"]


def test_ejection_can_be_turned_off() -> None:
    it = Group(2, enabled=False)
    it.fail(it.engines[0], 50, 1.0)
    assert it.serving == ["e0", "e1"]


# -- the retry budget ------------------------------------------------------------------------------


def test_retries_are_a_share_of_the_requests_and_a_minimum() -> None:
    budget = RetryBudget(with_constants(Retries, min_per_second=0.5))
    budget.follow(0, 100.0)
    allowed = sum(budget.allows(1000, False, 101.0) for _ in range(1000))
    assert allowed == 200 + 5
    assert +budget.outcomes == {"charged": 205, "refused": 795}
    assert budget.allows(1000, True, 101.0), "an engine known to be lost is not charged"
    assert not budget.allows(1000, False, 101.0 + WINDOW_SECONDS - 2)
    assert sum(budget.allows(1000, False, 120.0) for _ in range(10)) == 5


def test_many_broken_requests_at_once_mean_a_lost_engine() -> None:
    breaks = Breaks()
    assert [breaks.add(now) for now in (0.0, 5.0, 5.1, 5.2, 9.0)] == [False, False, False, True, False]
    assert LOST_REQUESTS == 3


# -- the watchdog ----------------------------------------------------------------------------------


def test_silence_counts_only_while_a_stream_waits_for_a_token() -> None:
    dog = Watchdog()
    assert dog.sweep(0.0) is None
    dog.wait()  # a prefill of any length is no silence
    assert (dog.sweep(500.0), dog.prefilling) == (None, True)
    dog.stream(progressed=True)
    assert dog.sweep(501.0) == 0.0
    dog.stream(progressed=False)
    dog.stream(progressed=False)
    assert dog.sweep(531.0) == 30.0
    dog.stream(progressed=False)
    dog.stream(progressed=True)  # one of them has got a token
    assert dog.sweep(532.0) == 0.0


def test_the_limit_grows_with_usual_pauses_and_prefills() -> None:
    dog = Watchdog()
    assert dog.limit(30.0, 0.0) == 30.0
    assert dog.limit(30.0, 20.0) == 80.0
    assert dog.limit(30.0, math.inf) == math.inf
    for now in range(0, 600, 6):  # a slow engine: a token each 6 s
        dog.stream(progressed=True)
        dog.sweep(float(now))
    assert dog.limit(30.0, 0.0) == pytest.approx(60.0, rel=0.05)
