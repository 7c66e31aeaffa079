"""The study of capacity advice: what it counts, and how it replays days."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from studies import Study


@pytest.fixture
def world() -> Iterator[ModuleType]:
    for _ in Study("capacity").importable():
        import world

        yield world


def test_the_study_counts_each_objective_as_the_twin_does(world: ModuleType) -> None:
    """4 of 100 requests miss one bound, 4 others the other one, and one request never ends."""
    count = 100
    ttft, tpot = np.full(count, 1.0), np.full(count, 0.1)
    ttft[:4], tpot[4:8] = 13.0, 0.4
    finished = np.full(count, 2_000.0)
    run: Any = SimpleNamespace(
        arrival_seconds=np.full(count, world.START_SECONDS + 10), ttft_seconds=ttft, tpot_seconds=tpot,
        e2e_seconds=np.full(count, 20.0), finished_seconds=finished,
    )  # fmt: skip
    assert world.shares(run, world.day_of(run)) == pytest.approx((0.96, 0.96))
    assert world.attainment(run) == pytest.approx(0.96)
    assert world.joint(run) == pytest.approx(0.92)
    margin = world.GOAL.margin(world.times_of(run, world.day_of(run)))
    assert margin == pytest.approx(world.attainment(run) - world.TARGET)
    finished[:2] = np.nan
    finished[50] = np.nan  # it keeps no bound of a time that it does not have
    assert world.attainment(run) == pytest.approx(0.95)


@pytest.mark.parametrize("seconds", [300.0, pytest.param(900.0, marks=pytest.mark.nightly)])
def test_a_lazy_replay_shows_what_a_full_replay_shows(
    world: ModuleType, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    day = world.Day(0, seconds)
    resize = world.Fleet.resize

    class Script:
        """Orders, cancels and ends engines; keeps what it saw."""

        every_seconds = 30.0

        def __init__(self) -> None:
            self.sizes = iter([7, 9, 9, 10, 12, 11, 9, 9, 9, 9, 8, 8, 6, 6, 7, 5])
            self.seen: list[tuple[float, ...]] = []

        def wanted(self, sight: Any) -> tuple[int, Sequence[int]]:
            recording, _ = sight.recording(300.0)
            self.seen.append(
                (sight.running(), sight.in_engines(running=True), len(recording), recording.e2e_seconds.sum())
            )
            return next(self.sizes, 6), ()

    def always(self: Any, wanted: int, now: float, removed: Sequence[int] = ()) -> float:
        resize(self, wanted, now, removed)
        return now

    lazy, full = Script(), Script()
    fleet, run = world.closed_loop(lazy, 120.0, day)
    monkeypatch.setattr(world.Fleet, "resize", always)
    again, _ = world.closed_loop(full, 120.0, day)
    assert lazy.seen == full.seen
    assert fleet.leases == again.leases
    assert len({each.instance for each in fleet.leases}) > world.FIRST_ENGINES
    assert fleet.cost(run) > 0


def test_the_best_parameters_are_the_cheapest_that_meet_the_slo(world: ModuleType) -> None:
    import tables

    def row(policy: str, attainment: float, cost: float) -> dict[str, Any]:
        return {"policy": policy, "attainment": [attainment], "cost": [cost]}

    rows = [row("a (x 1)", 0.96, 5), row("a (x 2)", 0.95, 4), row("a (x 3)", 0.94, 3), row("b (x 1)", 0.9, 1)]
    rows += [row("b (x 2)", 0.94, 9)]
    assert tables.chosen(rows, "a") == "a (x 2)"
    assert tables.chosen(rows, "b") == "b (x 2)"
