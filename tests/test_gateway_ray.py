"""Requests that the router of Ray Serve cannot read. Ray itself runs in `tests/real`."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

import gateway_stubs

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "max_tokens": -1},
        {"messages": MESSAGES, "max_tokens": "7"},
        {"messages": MESSAGES, "cache_salt": 5},
        {"messages": [{"role": "user", "content": "cut \ud83d"}]},
        {"prompt": [1, -5]},
    ],
)
async def test_engines_judge_malformed_requests(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = gateway_stubs.load("ray_serve", monkeypatch).LmetricRequestRouter()
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=each)) for each in ("a", "b")]
    router._deployment_id = SimpleNamespace(app_name="app", name="llm")
    router.curr_replicas = {each.replica_id.unique_id: each for each in replicas}
    router.initialize_state()

    def pending(body: dict[str, Any]) -> Any:
        return SimpleNamespace(
            args=[body],
            metadata=SimpleNamespace(request_id="r", internal_request_id="i", multiplexed_model_id=""),
            routing_context=SimpleNamespace(should_backoff=False),
            future=asyncio.get_running_loop().create_future(),
        )

    with caplog.at_level(logging.WARNING, "lmetric"):
        for _ in range(2):
            assert await router.choose_replicas(replicas, pending(body)) == [replicas]
    assert len(caplog.messages) == 1
    assert router.core.in_flight() == 0
    ranked = await router.choose_replicas(replicas, pending({"messages": MESSAGES}))
    assert sorted(each.replica_id.unique_id for [each] in ranked) == ["a", "b"]
