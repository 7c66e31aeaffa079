"""The clients of Anthropic and LangChain understand refusals: they wait, or end at once.

tests/test_server_budgets.py has the client of OpenAI.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from server_world import FakeEngine, Request, plain, world
from vllm_process import CACHE, HERE, NAMED, locked

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"},
    ],
    "usage": USAGE,
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "tiny",
    "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 3, "output_tokens": 1},
}
BUDGETS = [
    {"counts": "requests", "limit": 1, "per": "second"},
    {"counts": "total_tokens", "limit": 1000, "per": "day"},
]


def clients() -> Path:
    """A Python with the clients: in $TEST_CLIENTS_VENV, or in a cached environment."""
    named = NAMED["CLIENTS"]
    target = Path(named or CACHE.parent / "clients")
    if not named:
        with locked("clients"):
            if not (target / "bin" / "python").exists():
                subprocess.run([HERE / "install_clients", target], check=True, timeout=900)
    return target / "bin" / "python"


async def test_clients_wait_as_a_refusal_says_and_repeat_no_request_that_never_fits() -> None:
    asked: Counter[str] = Counter()

    async def answer(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        asked[request.path] += 1
        writer.write(plain(200, MESSAGE if request.path == "/v1/messages" else CHAT))
        return True

    async with world([FakeEngine(behave=answer)], tenants={"t": {"budgets": BUDGETS}}) as w:
        run = await asyncio.create_subprocess_exec(
            clients(), HERE / "client_refusals.py", w.url, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(run.communicate(), 300)
        refused = w.server.front.metrics.requests.requests
        never = sum(count for (_, _, status), count in refused.items() if status == 429)
    lines = [line.split("; ") for line in out.decode().splitlines()]
    assert [name for name, *_ in lines] == [
        "with_anthropic",
        "with_langchain_openai",
        "with_langchain_anthropic",
    ]
    for name, first, second, too_large in lines:
        assert (first, second) == ("answered", "answered"), name
        assert too_large == "rate limit, retry false", name
    assert asked == {"/v1/messages": 4, "/v1/chat/completions": 2}
    # Each client waited at least once, and sent the request that never fits once.
    assert 6 <= never <= 15
