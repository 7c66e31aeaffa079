"""Events of an engine's old weights that arrive after the announcement of new ones."""

from __future__ import annotations

import time

import pytest

from test_event_feed import BLOCK, CLEARED, Bed, Publisher, bed, publisher, removed, stored, until

__all__ = ["bed"]  # a fixture

OLD, NEW = [1] * BLOCK, [2] * BLOCK
SKEWS = [0.0, 3600.0, -3600.0]  # of the engine's clock, seconds


def skew(engine: Publisher, seconds: float) -> None:
    """Sets the engine's clock this much ahead."""
    engine.clock = lambda: time.time() + seconds


def seen(bed: Bed, engine: Publisher) -> None:
    """The engine has published a block, and the feed knows it."""
    bed.subscribe(engine)
    bed.settle(engine, "live")
    engine.publish(stored([1], OLD))
    bed.settle(engine, "live")
    assert bed.held(OLD) == 1


def announced(bed: Bed, engine: Publisher, seconds: float) -> None:
    """New weights are announced; the engine's next batches were made just before that."""
    made = time.time() + seconds
    time.sleep(0.05)  # longer than any batch is in transit
    bed.feed.begin_new_weights(["e0"])
    engine.clock = lambda: made


@pytest.mark.parametrize("seconds", SKEWS)
def test_late_events_of_old_weights_do_not_count_whatever_the_engines_clock(bed: Bed, seconds: float) -> None:
    with publisher() as engine:
        skew(engine, seconds)
        seen(bed, engine)
        announced(bed, engine, seconds)
        assert bed.held(OLD) == 0  # at once, and no replay brings it back
        engine.publish(stored([1], OLD), stored([3], [3] * BLOCK, parent=1))
        bed.settle(engine, "live")
        assert (bed.held(OLD), bed.status()["skipped"]) == (0, {"old_weights": 2})
        skew(engine, seconds)
        # A child of a block that does not count does not count either, a new prompt does.
        engine.publish(stored([4], [4] * BLOCK, parent=3), stored([2], NEW), removed(1))
        bed.settle(engine, "live")
        assert (bed.held(OLD), bed.held(NEW), bed.status()["unknown_parent"]) == (0, 1, 1)
        # The same prompt counts as soon as the engine has computed it with the new weights.
        engine.publish(stored([1], OLD))
        bed.settle(engine, "live")
        assert bed.held(OLD) == 1
        assert len(engine.asked) <= 2  # of the start: the past is of no use


@pytest.mark.parametrize("seconds", SKEWS)
def test_a_replay_of_the_past_brings_no_old_block_back(bed: Bed, seconds: float) -> None:
    with publisher() as engine:
        skew(engine, seconds)
        seen(bed, engine)
        announced(bed, engine, seconds)
        engine.publish(stored([5], [5] * BLOCK), lose=True)  # in the replay only
        skew(engine, seconds)
        engine.publish(stored([2], NEW))
        bed.settle(engine, "live")
        assert (bed.held([5] * BLOCK), bed.held(NEW)) == (0, 1)
        # The router forgets all, and asks for all.
        bed.router.blocks_cleared("e0")
        until(lambda: bed.held(NEW) == 1 and bed.status()["skipped"]["old_weights"] == 3, engine)
        assert bed.held(OLD) == bed.held([5] * BLOCK) == 0


def test_a_cleared_cache_counts_in_the_order_of_its_events(bed: Bed) -> None:
    """vLLM publishes that its cache was cleared with its next step, together with new blocks."""
    with publisher() as engine:
        seen(bed, engine)
        announced(bed, engine, 0.0)
        skew(engine, 0.0)
        engine.publish(stored([1], OLD), CLEARED, stored([2], NEW))
        bed.settle(engine, "live")
        assert (bed.held(OLD), bed.held(NEW), bed.status()["cleared"]) == (0, 1, 1)


def test_a_new_process_has_no_old_blocks(bed: Bed) -> None:
    """Its clock may be behind that of the machine where the engine ran before."""
    with publisher() as engine:
        skew(engine, 3600.0)
        seen(bed, engine)
        announced(bed, engine, 3600.0)
        engine.past, engine.next = [], 0
        skew(engine, -3600.0)
        engine.publish(stored([2], NEW))
        until(lambda: bed.held(NEW) == 1 and bed.status()["restarts"] == 1, engine)


def test_an_incomplete_index_is_complete_with_new_weights(bed: Bed) -> None:
    with publisher(replay=False) as engine:
        bed.subscribe(engine)
        until(engine.heard)
        engine.next = 7  # the router has missed what came before
        engine.publish(stored([1], OLD))
        bed.settle(engine, "incomplete")
        bed.feed.begin_new_weights(["e0"])
        assert (bed.status()["state"], bed.held(OLD)) == ("live", 0)
        engine.publish(stored([2], NEW))
        bed.settle(engine, "live")
        assert bed.held(NEW) == 1


def test_only_the_named_engines_forget(bed: Bed) -> None:
    with publisher() as engine, publisher() as other:
        seen(bed, engine)
        bed.subscribe(other, "e1")
        bed.settle(other, "live", "e1")
        other.publish(stored([1], OLD))
        bed.settle(other, "live", "e1")
        bed.feed.begin_new_weights(["e1", "gone"])
        assert (bed.held(OLD), bed.held(OLD, "e1")) == (1, 0)
