"""A recorded session of a coding agent, sent by the official client of its API.

    python tests/real/agent_session.py URL anthropic|openai

Run it with vLLM's environment, which has both clients. Prints one JSON object for each turn: the
router's decision, the tokens of the prompt, and the cached tokens that the engine reports.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TURNS = 30
TOOLS = {
    "read_file": "Reads a file of the project.",
    "run": "Runs a command, and returns its output: first lines only.",
}
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
SYSTEM = "You are a coding agent. Read before you write. Keep answers short. " * 6
TASK = "The tests of the parser fail on two files. Find out why, and mend it."


def turn(number: int) -> tuple[str, str, dict[str, Any], str]:
    """Returns what the agent thought, said, called and saw in a turn."""
    thought = f"Step {number}: look at the next file."
    said = "" if number % 3 else f"I look at part {number}."
    given = {"path": f"src/part_{number}.py", "lines": 10 + number}
    seen = f"def part_{number}(a, b):\n\treturn a + {number}  # ünïcode 日本\n\n" * (1 + number % 3)
    return thought, said, given, seen


def anthropic(url: str) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300)
    tools = [
        {"name": name, "description": what, "input_schema": SCHEMA} for name, what in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for number in range(TURNS):
        messages[-1] = marked(messages[-1])
        header = f"x-anthropic-billing-header: cc_version=2; cch={number:05x};"
        raw = client.messages.with_raw_response.create(
            model="tiny",
            max_tokens=4,
            system=[{"type": "text", "text": header}, {"type": "text", "text": SYSTEM}],
            messages=messages,
            tools=tools,
        )
        usage = raw.parse().usage
        cached = usage.cache_read_input_tokens or 0
        told(raw.headers, usage.input_tokens + cached, cached)
        messages[-1] = marked(messages[-1], mark=False)
        thought, said, given, seen = turn(number)
        blocks: list[Any] = [{"type": "thinking", "thinking": thought, "signature": "AAAA"}]
        blocks += [{"type": "text", "text": said}] if said else []
        call = {"type": "tool_use", "id": f"toolu_{number}", "name": "read_file", "input": given}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": seen}
        if number % 4 == 1:
            result |= {"content": [{"type": "text", "text": seen}, {"type": "text", "text": "end"}]}
        messages += [{"role": "assistant", "content": [*blocks, call]}, {"role": "user", "content": [result]}]


def marked(message: dict[str, Any], *, mark: bool = True) -> dict[str, Any]:
    """Returns a message with a mark for the cache at its end, as Claude Code moves it."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    last = {name: value for name, value in blocks[-1].items() if name != "cache_control"}
    return {**message, "content": [*blocks[:-1], last | ({"cache_control": {"type": "ephemeral"}} if mark else {})]}


def openai(url: str) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    tools: list[Any] = [
        {"type": "function", "name": name, "description": what, "parameters": SCHEMA, "strict": False}
        for name, what in TOOLS.items()
    ]
    tools.append({"type": "custom", "name": "apply_patch", "description": "Changes files."})
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": TASK}]}]
    for number in range(TURNS):
        raw = client.responses.with_raw_response.create(
            model="tiny", max_output_tokens=4, instructions=SYSTEM, input=items, tools=tools, store=False
        )
        usage = raw.parse().usage
        assert usage is not None
        told(raw.headers, usage.input_tokens, usage.input_tokens_details.cached_tokens)
        thought, said, given, seen = turn(number)
        parts = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": parts})
        if said:
            text = {"type": "output_text", "text": said, "annotations": []}
            message = {"type": "message", "role": "assistant", "id": f"msg_{number}", "status": "completed"}
            items.append(message | {"content": [text]})
        if number % 5 == 4:
            patch = {"name": "apply_patch", "input": f"*** part_{number}\n+x"}
            items.append({"type": "custom_tool_call", "call_id": f"call_{number}", **patch})
            items.append({"type": "custom_tool_call_output", "call_id": f"call_{number}", "output": "done"})
            continue
        call = {"name": "read_file", "arguments": json.dumps(given)}
        items.append({"type": "function_call", "call_id": f"call_{number}", **call})
        items.append({"type": "function_call_output", "call_id": f"call_{number}", "output": seen})


def told(headers: Any, prompt_tokens: int, cached: int) -> None:
    """Prints a turn, and lets the engine's events arrive."""
    found = {"decision": headers["x-lmetric-decision"], "prompt_tokens": prompt_tokens, "cached": cached}
    print(json.dumps(found), flush=True)
    time.sleep(0.1)


if __name__ == "__main__":
    {"anthropic": anthropic, "openai": openai}[sys.argv[2]](sys.argv[1])
