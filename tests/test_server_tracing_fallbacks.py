"""Spans of requests that fall back to another model: those of the models before stay."""

from __future__ import annotations

import asyncio
from typing import Any

from otlp_world import receiver
from server_world import FakeEngine, hang, plain, says, world
from test_server_tracing import CLIENT, PARENT, SERVER
from waiting import until

BUSY = says(plain(429, {"error": {"message": "too many requests"}}), then="keep")
FALLBACK: dict[str, Any] = {"fallbacks": {"small": ["large", "other"]}, "aliases": {"mini": "small"}}


def models(*names: str) -> list[FakeEngine]:
    """Engines of one model each. The first one is busy."""
    engines = [FakeEngine(cards=[{"id": name}]) for name in names]
    engines[0].behave = BUSY
    return engines


async def test_attempts_before_a_fallback_have_spans() -> None:
    """The model is busy, the next one has no engine, and the last one answers."""
    async with (
        receiver() as spans,
        world(models("small", "large", "other"), tracing={"endpoint": spans.url}, **FALLBACK) as w,
    ):
        await w.engines[1].stop()
        assert (await w.post({"model": "mini", "prompt": "x"}))[0] == 200
        await until(lambda: len(spans.spans) == 10)
        assert len({span.trace for span in spans.spans}) == 1
        (server,) = [span for span in spans.spans if span.kind == SERVER]
        assert {
            "gen_ai.request.model": "other",
            "lmetric.alias": "mini",
            "lmetric.fallback_from": "small",
            "lmetric.fallback_reason": "engine_full",
        }.items() <= server.attributes.items()
        attempts = [span for span in spans.spans if span.kind == CLIENT]
        assert [span.name.split()[1] for span in attempts] == ["small", "large", "other"]
        assert [span.attributes["lmetric.engine"] for span in attempts] == ["e0", "e1", "e2"]
        assert [span.attributes.get("http.response.status_code") for span in attempts] == [429, None, 200]
        assert [span.attributes.get("error.type") for span in attempts] == [None, "refused", None]
        assert attempts[0].start_seconds + attempts[0].seconds <= attempts[1].start_seconds
        segments = [span for span in spans.spans if span.name == "lmetric.segment"]
        assert [span.parent for span in attempts] == [span.id for span in segments]
        decisions = [span for span in spans.spans if span.name == "lmetric.decision"]
        assert {span.parent for span in segments + decisions} == {server.id}
        assert [span.attributes["lmetric.instance"] for span in decisions] == ["e0", "e1", "e2"]
        given = [w.engines[place].requests[-1].headers["traceparent"] for place in (0, 2)]
        assert [line.split("-")[2] for line in given] == [attempts[0].id, attempts[2].id]


async def test_a_fallback_that_the_router_refuses_keeps_the_spans() -> None:
    """The second model takes no further request of the tenant."""
    engines = models("small", "large")
    engines[1].behave = hang
    tenants = {"a": {"max_concurrent": 1, "max_waiting": 0}}
    async with (
        receiver() as spans,
        world(engines, tracing={"endpoint": spans.url}, tenants=tenants, **FALLBACK) as w,
    ):
        headers = {"x-tenant": "a", "traceparent": PARENT}
        first = asyncio.create_task(w.post({"model": "large", "prompt": "x"}, headers=headers))
        await w.engines[1].asked(1)
        status, _, _ = await w.post({"model": "small", "prompt": "x"}, headers=headers)
        assert status == 429
        found = await spans.trace(4)
        assert found["POST"].attributes["http.response.status_code"] == 429
        assert found["text_completion"].attributes["lmetric.engine"] == "e0"
        assert found["text_completion"].parent == found["lmetric.segment"].id
        assert found["lmetric.segment"].parent == found["POST"].id
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await w.settled()


async def test_a_client_that_leaves_before_its_next_model_keeps_the_spans() -> None:
    engines = models("small", "large")
    engines[1].behave = hang
    tenants = {"a": {"max_concurrent": 1, "max_waiting": 1}}
    async with (
        receiver() as spans,
        world(engines, tracing={"endpoint": spans.url}, tenants=tenants, **FALLBACK) as w,
    ):
        headers = {"x-tenant": "a"}
        first = asyncio.create_task(w.post({"model": "large", "prompt": "x"}, headers=headers))
        await w.engines[1].asked(1)
        second = asyncio.create_task(w.post({"model": "small", "prompt": "x"}, headers=headers))
        await w.engines[0].asked(1)
        await w.until(lambda: sum(model.router.waiting for model in w.server.fleet.models) == 1)
        second.cancel()
        found = await spans.trace(4)
        assert found["POST"].attributes["http.response.status_code"] == 499
        assert found["text_completion"].attributes["http.response.status_code"] == 429
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await w.settled()
