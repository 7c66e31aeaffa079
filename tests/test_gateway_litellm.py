"""Requests that LiteLLM's strategy cannot read. LiteLLM itself runs in `tests/real`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gateway_stubs

MESSAGES = [{"role": "user", "content": "hi"}]


class Healthy:
    """The part of a `litellm.Router` that the strategy uses."""

    def register_plugin(self, plugin: Any) -> None: ...

    async def async_get_healthy_deployments(self, **_: Any) -> list[dict[str, Any]]:
        return [{"model_name": "m", "model_info": {"id": "one"}, "litellm_params": {"model": "openai/m"}}]


class Answer:
    """An answer whose usage has values that no engine should report."""

    def __init__(self, tokens: Any) -> None:
        self.choices: list[Any] = []
        self.usage = type("Usage", (), {"prompt_tokens": tokens, "completion_tokens": tokens})()


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([{"role": "user", "content": "cut \ud83d"}], {}),
        (MESSAGES, {"max_tokens": 2**70}),
        (MESSAGES, {"tools": [{1: 2}]}),
        (MESSAGES, {"extra_body": "x"}),
        (MESSAGES, {"metadata": {"session_id": "cut \ud83d"}}),
    ],
)
async def test_engines_judge_malformed_requests(
    messages: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside that, the disk of the records is full."""
    file = tmp_path / "records.jsonl"
    strategy = gateway_stubs.load("litellm", monkeypatch).LmetricStrategy(records_file=file)
    file.unlink()
    file.symlink_to("/dev/full")
    strategy.install(Healthy())
    for tokens in (None, -1, "many"):
        kwargs = {"litellm_call_id": "call", **more}
        chosen = await strategy.async_get_available_deployment("m", messages, request_kwargs=kwargs)
        assert chosen["model_info"]["id"] == "one"
        assert strategy.in_flight() == 1
        await strategy.async_post_call_success_deployment_hook(kwargs, Answer(tokens), "acompletion")
        assert strategy.in_flight() == 0
    await strategy.close()


async def test_a_call_with_half_of_an_emoji_in_its_id_keeps_its_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = gateway_stubs.load("litellm", monkeypatch).LmetricStrategy()
    strategy.install(Healthy())
    kwargs = {"litellm_call_id": "ä \ud83d" + "x" * 300}
    await strategy.async_get_available_deployment("m", MESSAGES * 20, request_kwargs=kwargs)
    record = strategy.explain(kwargs["litellm_call_id"])
    assert record["request_id"] == "ä ?" + "x" * 253
    assert record["prompt_tokens"] > 20
    await strategy.close()
