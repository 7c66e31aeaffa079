"""Hot spots of the fleet, and the parts of a request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lmetric.server.observe.hot import HOT_SHOWN, hot_spots
from lmetric.timeline import timeline


def spots(batch: list[float], **columns: list[Any]) -> dict[str, Any]:
    engines = {
        "name": [f"e{number}" for number in range(len(batch))],
        "model": ["tiny"] * len(batch),
        "role": ["both"] * len(batch),
        "state": ["usable"] * len(batch),
        **columns,
    }
    return hot_spots(engines, np.array(batch, dtype=float))


def names(batch: list[float], **columns: list[Any]) -> list[str]:
    return [each["name"] for each in spots(batch, **columns)["hot"]]


def test_an_engine_is_hot_far_above_the_mean_of_its_role() -> None:
    found = spots([1, 13, 2, 0])
    assert found["hot"] == [
        {"name": "e1", "model": "tiny", "role": "both", "batch": 13.0, "mean": 4.0, "times": 3.25}
    ]
    assert found["busiest"] == found["hot"][0]
    assert names([4, 8, 4, 4, 4]) == []  # four more than some, but less than twice the mean
    assert names([0, 5, 0, 0, 0]) == ["e1"]  # exactly four more than the mean, and five times the mean
    assert names([0, 4, 0, 0, 0]) == []
    assert names([10, 0]) == []  # exactly twice the mean
    assert names([11, 0, 0]) == ["e0"]


def test_without_a_hot_engine_the_busiest_is_named() -> None:
    found = spots([3, 5, 4, 4])
    assert (found["hot"], found["busiest"]["name"], found["busiest"]["times"]) == ([], "e1", 1.25)
    assert spots([2, 2, 2]) == {"hot": [], "busiest": None}
    assert spots([0, 0]) == {"hot": [], "busiest": None}
    assert spots([]) == {"hot": [], "busiest": None}


def test_only_usable_engines_of_one_model_and_role_are_compared() -> None:
    batch = [20.0, 20.0, 1.0, 1.0, 1.0]
    role = ["prefill", "prefill", "decode", "decode", "decode"]
    assert names(batch, role=role) == []
    assert names([1, 20, 1, 30, 1], state=["usable", "usable", "usable", "down", "usable"]) == ["e1"]
    assert names([30, 1, 1], model=["other", "tiny", "tiny"]) == []  # the only one of its model
    assert names([math.nan, 20, 1, 1, 1]) == ["e1"]
    assert spots([math.nan, math.nan]) == {"hot": [], "busiest": None}


def test_the_hottest_engines_come_first_and_are_few() -> None:
    batch = [0.0] * 100
    for number in range(8):
        batch[number * 7] = 20.0 + number
    found = names(batch)
    assert found == ["e49", "e42", "e35", "e28", "e21"]
    assert len(found) == HOT_SHOWN


def parts(**record: Any) -> list[tuple[str | None, str, float, float]]:
    found = timeline({"instance": "e0", **record})
    return [(each["engine"], each["kind"], each["from_seconds"], each["to_seconds"]) for each in found]


def moved(kind: str, target: str, after: float) -> dict[str, Any]:
    return {"kind": kind, "source": "e0", "target": target, "after_seconds": after}


def test_a_request_on_one_engine() -> None:
    assert parts(ttft_seconds=0.5, e2e_seconds=2.0) == [("e0", "prefill", 0, 0.5), ("e0", "decode", 0.5, 2.0)]
    assert parts(e2e_seconds=2.0) == [("e0", "answer", 0, 2.0)]
    assert parts(ttft_seconds=0.5) == [("e0", "prefill", 0, 0.5)]  # it runs
    assert parts() == []
    held = parts(held_seconds=1.0, ttft_seconds=0.5, e2e_seconds=0.5)
    assert held == [(None, "wait", -1.0, 0.0), ("e0", "prefill", 0, 0.5)]


def test_a_request_on_several_engines() -> None:
    handoff = {"tried": ["e0"], "events": [moved("handoff", "e1", 0.4)], "e2e_seconds": 2.0}
    expected = [("e0", "prefill", 0, 0.4), ("e1", "prefill", 0.4, 0.5), ("e1", "decode", 0.5, 2.0)]
    assert parts(ttft_seconds=0.5, **handoff) == expected
    assert parts(**handoff) == [("e0", "prefill", 0, 0.4), ("e1", "decode", 0.4, 2.0)]
    del handoff["events"]  # it is too old for the list of events
    assert parts(ttft_seconds=0.5, decode_instance="e1", handoff_seconds=0.4, **handoff) == expected
    fetched = parts(
        fetch_instance="e2",
        fetch_seconds=0.25,
        ttft_seconds=0.5,
        e2e_seconds=2.0,
        events=[moved("fetch", "e0", 0.25), moved("migration", "e1", 1.0), moved("guard", "e9", 1.5)],
    )
    assert fetched == [
        ("e2", "fetch", 0, 0.25),
        ("e0", "prefill", 0.25, 0.5),
        ("e0", "decode", 0.5, 1.0),
        ("e1", "decode", 1.0, 2.0),
    ]
    retried = parts(tried=["e0", "e1"], instance="e1", events=[moved("retry", "e1", 0.5)], e2e_seconds=2.0)
    assert [each[0] for each in retried] == ["e0", "e1"]


@pytest.mark.parametrize("seconds", [0.0, 1e-9])
def test_a_part_without_a_duration_is_left_out(seconds: float) -> None:
    assert len(parts(ttft_seconds=seconds, e2e_seconds=1.0)) == (1 if not seconds else 2)
