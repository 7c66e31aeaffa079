"""Answers with the asked name: vLLM's own answers, but for the name of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from router_world import configured, served
from test_real_passthrough import CHAT, FLAGS, RESPONSES, Sides, Start, steady, user
from vllm_process import MODEL

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ASKED = "a/name of ours"


def named(value: Any) -> Any:
    """The value in which each member `model` has the asked name."""
    if isinstance(value, dict):
        return {
            name: ASKED if (name, each) == ("model", MODEL) else named(each) for name, each in value.items()
        }
    return [named(each) for each in value] if isinstance(value, list) else value


def said(stream: bytes) -> tuple[set[str], str]:
    """Names of the model in a stream's events, and the text of its tokens."""
    names, text = set(), ""
    for line in stream.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        inner = event.get("response") or event.get("message") or event
        names |= {inner["model"]} if "model" in inner else set()
        delta = event.get("delta") or ""
        text += delta if isinstance(delta, str) else delta.get("text", "")
        for choice in event.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return names, text


async def test_all_answers_have_the_asked_name(vllm_engines: Start, tmp_path: Path) -> None:
    [engine] = vllm_engines(1, **FLAGS)
    flags, run = configured(tmp_path, aliases={ASKED: MODEL}, model_in_answers="asked", policy="round_robin")
    chat = {"messages": [user("Tell me of the river.")], "max_tokens": 8, "temperature": 0}
    bodies = {
        CHAT: chat,
        "/v1/completions": {"prompt": "river", "max_tokens": 8, "temperature": 0},
        "/v1/messages": chat,
        RESPONSES: {"input": "river", "max_output_tokens": 8, "temperature": 0},
    }
    async with served([engine], *flags, run=run) as world:
        both = Sides(world, engine)
        for path, body in bodies.items():
            for stream in (False, True):
                ask = body | {"stream": stream}
                await both.direct("POST", path, ask | {"model": MODEL})  # the prefix is in the cache
                direct = await both.direct("POST", path, ask | {"model": MODEL})
                routed = await both.routed("POST", path, ask | {"model": ASKED})
                assert direct.status == 200, direct
                if isinstance(direct.body, bytes):
                    assert said(direct.body) == ({MODEL}, said(routed.body)[1])
                    assert said(routed.body)[0] == {ASKED}
                else:
                    assert steady(routed.body) == named(steady(direct.body))
                    assert routed.body["model"] == ASKED
