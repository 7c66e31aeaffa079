"""A vLLM engine is killed in the reasoning, the content and the tool call of a streamed chat.

Another engine with `--enable-scale-out` continues: the client gets the parts of the uninterrupted
answer. The model says a scripted answer (`scripted_answers.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.server.api.parts import Parts
from split_world import CHAT
from test_real_failover import USAGE, World, kill_core, world
from vllm_process import HERE, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Start = Callable[..., list[VllmEngine]]
REASONING = " ".join(f"I think of step {n}." for n in range(60))
CONTENT = " ".join(f"Here is part {n}." for n in range(60))
ARGUMENTS = {"file_path": "note.txt", "lines": list(range(150)), "text": 'a "quoted" <text> – é'}
CALL = "<tool_call>\n%s\n</tool_call>"
NAMES = ("Read", "Write")
ANSWER = f"<think>{REASONING}</think>{CONTENT}\n" + "\n".join(
    CALL % json.dumps({"name": name, "arguments": ARGUMENTS}, ensure_ascii=False) for name in NAMES
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Read the note."}],
    "tools": TOOLS,
    "temperature": 0,
    "stream": True,
    "stream_options": USAGE,
    "model": "tiny",
}
FLAGS: dict[str, Any] = {
    "environ": {"PYTHONPATH": str(HERE), "ANSWERS": json.dumps([["", [ANSWER]]])},
    "logits_processors": ["scripted_answers:Scripted"],
    "reasoning_parser": "qwen3",
    "enable_scale_out": True,
}
SEEN = 200  # characters of the part in which the engine is killed


class Said:
    """A client's answer while it comes."""

    def __init__(self) -> None:
        self.parts = Parts()
        self.finish: str | None = None
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.frames: set[tuple[Any, ...]] = set()
        self.done = False
        self.engine: str | None = None

    def add(self, line: bytes) -> None:
        if line == b"data: [DONE]":
            self.done = True
        if not line.startswith(b"data: {"):
            return
        told = orjson.loads(line[6:])
        if "error" in told:
            self.error = told["error"]
            return
        self.frames.add((told["id"], told["model"], told["created"], told["object"]))
        self.usage = told.get("usage") or self.usage
        for choice in told["choices"]:
            self.parts.add(choice["delta"])
            assert self.finish is None
            self.finish = choice["finish_reason"]

    def size(self, part: str) -> int:
        if part == "arguments":
            return len(self.parts.calls[0].arguments) if self.parts.calls else 0
        return len(getattr(self.parts, part))


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], at: Callable[[Said], Any] | None = None
) -> Said:
    """Returns a streamed answer. `at`: called after each line; awaited if it returns something."""
    said = Said()
    async with session.post(url + CHAT, json=body) as response:
        assert response.status == 200, await response.read()
        said.engine = response.headers.get("x-lmetric-instance")
        async for line in response.content:
            said.add(line.strip())
            if at is not None and (wait := at(said)) is not None:
                await wait
    return said


def killing(w: World, part: str, fault: Callable[[VllmEngine], None]) -> Callable[[Said], Any]:
    """Returns a function that kills the answering engine, when a part has `SEEN` characters."""
    killed = False

    def at(said: Said) -> Any:
        nonlocal killed
        if killed or said.size(part) < SEEN:
            return None
        killed = True
        (engine,) = [each for each in w.engines if each.name == said.engine]
        return asyncio.to_thread(fault, engine)

    return at


def equal(said: Said, expected: Said) -> None:
    assert said.error is None, said.error
    assert (said.parts.reasoning, said.parts.content) == (expected.parts.reasoning, expected.parts.content)
    calls, wanted = ([(c.name, c.arguments) for c in each.parts.calls] for each in (said, expected))
    assert calls == wanted
    assert all(call.id for call in said.parts.calls)
    assert said.finish == expected.finish == "tool_calls"
    assert said.usage is not None
    assert expected.usage is not None
    assert expected.usage["completion_tokens_details"]["reasoning_tokens"] > SEEN // 8
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
        assert said.usage[name] == expected.usage[name]
    assert len(said.frames) == 1
    assert said.done


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("reasoning", VllmEngine.kill),
        ("content", kill_core),
        ("arguments", VllmEngine.kill),
    ],
)
async def test_a_chat_with_tools_and_reasoning_survives(
    vllm_engines: Start, part: str, fault: Callable[[VllmEngine], None]
) -> None:
    engines = vllm_engines(2, **FLAGS)
    async with world(engines) as w:
        expected = await ask(w.session, engines[1].url, BODY)
        assert expected.parts.reasoning == REASONING
        assert [json.loads(call.arguments) for call in expected.parts.calls] == [ARGUMENTS] * 2
        assert all(engine.parses for engine in w.model.engines.values())
        url = f"http://127.0.0.1:{w.server.port}"
        said = await ask(w.session, url, BODY, killing(w, part, fault))
        equal(said, expected)
        assert w.model.failovers == {"continued": 1}
        assert not w.model.not_resumable
