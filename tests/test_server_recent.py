"""Summaries of large fleets: computed at most once a second, however often clients ask."""

from __future__ import annotations

import time

import pytest

from lmetric.config import ServerConfig
from lmetric.server.fleet import recent
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.summary import summary


def fleet_of(engines: int) -> Fleet:
    made = Fleet(
        ServerConfig(model="m", engines=[{"url": f"http://10.0.0.{i}:8000"} for i in range(engines)])
    )
    made.build()
    return made


def test_engines_with_one_cause_are_one_warning_without_their_addresses() -> None:
    fleet = fleet_of(3)
    for engine in fleet.engines():
        engine.failed("refused", f"no connection: Connect call failed ({engine.host!r}, 8000)")
    (public,) = summary(fleet, names=False)["warnings"]
    assert abs(public.pop("since") - time.time()) < 60
    assert public == {
        "what": "not usable",
        "cause": "connection refused",
        "fix": "start the engine, or correct its URL",
        "engines": 3,
    }
    assert [each["names"] for each in summary(fleet, names=True)["warnings"]] == [
        [f"10.0.0.{i}:8000"] for i in range(3)
    ]


def test_a_large_fleet_is_summarized_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(recent, "SMALL", 2)
    monkeypatch.setattr(recent.time, "monotonic", lambda: clock[0])
    fleet = fleet_of(3)
    (model,) = fleet.models
    before = summary(fleet, names=False), fleet.unusable, model.unusable
    assert before[0]["usable"] == 0
    assert before[1] == before[2]
    assert before[1] is not None
    for engine in fleet.engines():
        engine.succeeded()
    clock[0] += 0.99
    assert (summary(fleet, names=False), fleet.unusable, model.unusable) == before
    assert fleet.ready(), "never late"
    clock[0] += 0.01
    assert summary(fleet, names=False)["usable"] == 3
    assert fleet.unusable is None
    assert model.unusable is None
    monkeypatch.setattr(recent, "SMALL", 3)  # a small fleet is never late
    next(fleet.engines()).failed("refused", "no connection")
    assert summary(fleet, names=False)["usable"] == 2
