"""Observers of requests: an exception of one reaches neither the client nor another observer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from lmetric.server.execution.observers import FAILED_OBSERVER, Observer, Observers
from lmetric.server.http.frontend import Frontend
from lmetric.server.observe.access_log import AccessLog
from lmetric.server.observe.live import Live
from lmetric.server.observe.recorder import Recorder
from lmetric.server.observe.requests import RequestMetrics
from lmetric.server.observe.tracing.export import Tracing
from lmetric.server.observe.tracing.requests import AttemptSpan, SampledRequest, UnsampledRequest
from lmetric.server.observe.trial_results import TrialResults
from otlp_world import receiver
from server_world import FakeEngine, reset, world
from test_server_client import client, post
from test_server_passthrough import RESPONSES, Responses, ask, created

BODY = b'{"model": "tiny", "prompt": "abc", "max_tokens": 2}'
STREAM = {"model": "tiny", "prompt": "abc", "stream": True, "max_tokens": 3}
OWN_HOOKS = [
    (kind, hook)
    for kind in (RequestMetrics, TrialResults, Live, Recorder, AccessLog, Tracing)
    for hook in ("arrived", "placed", "sent", "ended")
    if getattr(kind, hook) is not getattr(Observer, hook)
]


def fails(*_: Any) -> NoReturn:
    raise RuntimeError("broken")


@contextmanager
def logged_failures() -> Iterator[list[str]]:
    """The hooks that failed, in order."""
    hooks: list[str] = []
    with capture_logs() as logs:
        yield hooks
    hooks += [each["hook"] for each in logs if each["event"] == FAILED_OBSERVER]


@pytest.mark.parametrize(("kind", "hook"), OWN_HOOKS)
async def test_a_failing_observer_costs_the_client_nothing(
    kind: type[Observer], hook: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The client's connection goes on, and the router forgets the request."""
    monkeypatch.setattr(kind, hook, fails)
    async with receiver() as spans:
        settings: dict[str, Any] = {
            "tracing": {"endpoint": spans.url},
            "records": {"path": str(tmp_path)},
            "log": {"access": True},
            "shadow": {"policy": "round_robin"},
        }
        with logged_failures() as hooks:
            async with world(1, **settings) as w, client(w) as c:
                for _ in range(3):
                    await c.send(post(BODY))
                    assert (await c.answer())[0] == 200
                await w.until(lambda: not w.server.front.relays)
                assert w.server.front.clients.body_bytes == 0
                assert w.in_flight() == 0
    assert len(hooks) == 3


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("hook", ["sent", "head", "answered", "failed"])
async def test_a_failing_trace_of_an_attempt_costs_the_client_nothing(
    sampled: bool, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: type[Any] = UnsampledRequest
    if sampled:
        kind = SampledRequest if hook == "sent" else AttemptSpan
    monkeypatch.setattr(kind, hook, fails)
    broken = [FakeEngine(behave=reset)] if hook == "failed" else []
    async with receiver() as spans:
        tracing = {"endpoint": spans.url, "sample_ratio": float(sampled)}
        with logged_failures() as hooks:
            async with world([*broken, FakeEngine()], tracing=tracing) as w, client(w) as c:
                for _ in range(3):
                    await c.send(post(BODY))
                    assert (await c.answer())[0] == 200
                await w.until(lambda: not w.server.front.relays)
    assert hooks


async def test_a_failing_trace_of_a_stored_response_costs_the_client_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with receiver() as spans, world([Responses()], tracing={"endpoint": spans.url}) as w:
        one = await created(w)
        monkeypatch.setattr(SampledRequest, "sent", fails)
        with logged_failures() as hooks:
            assert (await ask(w, "GET", f"{RESPONSES}/{one['id']}"))[0] == 200
    assert len(hooks) == 1


async def test_a_trace_that_cannot_begin_costs_the_client_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracing, "context", fails)
    async with receiver() as spans:
        with logged_failures() as hooks:
            async with world(1, tracing={"endpoint": spans.url}) as w:
                assert (await w.post(STREAM))[0] == 200
                assert (await w.post({"model": "unknown", "prompt": "x"}))[0] == 404
    assert hooks


async def test_the_observers_behind_a_failing_one_get_their_events() -> None:
    seen: list[str] = []

    class Broken(Observer):
        arrived = placed = sent = ended = fails  # type: ignore[assignment]

    class Whole(Observer):
        def arrived(self, *_: object) -> None:
            seen.append("arrived")

        def placed(self, *_: object) -> None:
            seen.append("placed")

        def sent(self, *_: object) -> None:
            seen.append("sent")

        def ended(self, *_: object) -> None:
            seen.append("ended")

    with logged_failures() as hooks:
        async with world(1) as w:
            w.server.front.running.observers.add(Broken())
            w.server.front.running.observers.add(Whole())
            assert (await w.post(STREAM))[0] == 200
            await w.settled()
    assert seen == ["arrived", "placed", "sent", "ended"]
    assert len(hooks) == 4


def test_an_observer_gets_only_the_events_that_it_has_hooks_for() -> None:
    observers: Any = Observers()
    metrics = object.__new__(RequestMetrics)
    observers.add(metrics)
    observers.add(metrics)
    assert (observers.placed, observers.sent) == ((), (metrics.sent,))
    observers.remove(metrics)
    observers.remove(metrics)
    assert observers.sent == ()


async def test_the_access_log_follows_a_reload() -> None:
    async with world(1) as w:
        front: Frontend = w.server.front
        before = len(front.running.observers.ended)
        for access in (True, True, False):
            log = front.config.log.model_copy(update={"access": access})
            front.prepare(front.admission.identity, front.config.model_copy(update={"log": log}))()
            assert len(front.running.observers.ended) == before + access
