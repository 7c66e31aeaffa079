"""Our tokens against vLLM's: its own code on many requests, an engine's cache over many turns."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lmetric.tokens.errors import NotPredictable
from lmetric.tokens.prompt import PromptTokenizer
from lmetric.tokens.verify import verify
from router_world import served
from token_folders import KINDS, make_folder
from vllm_process import BLOCK, VllmEngine, environment

pytestmark = pytest.mark.nightly

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
WORDS = (
    *(
        "the router",
        " sends",
        "  two",
        "\n",
        "\n\n",
        "\t",
        "don't",
        "12345",
        "日本語",
        "é",
        "🙂",
        "½ﬁ",
        '{"a": 1}',
    ),
    *("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<think>", "</think>", "", " "),
    *(3 * ("a stretch of words long enough to be remembered by itself, wherever it may come to stand ",)),
)


class Requests:
    """Requests as clients send them, odd ones among them; from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, most: int = 12) -> str:
        return "".join(self._random.choices(WORDS, k=self._random.randint(0, most)))

    def _some(self, share: float) -> bool:
        return self._random.random() < share

    def _content(self) -> Any:
        if self._some(0.75):
            return self.text()
        if self._some(0.2):
            return None
        kinds = ("text", "text", "text", "refusal")
        parts: list[Any] = [{"type": kind, kind: self.text()} for kind in self._random.choices(kinds, k=3)]
        if self._some(0.3):
            parts.append(self.text())
        if self._some(0.3):
            parts[0]["cache_control"] = {"type": "ephemeral"}
        return parts

    def _value(self, depth: int = 0) -> Any:
        if depth < 3 and self._some(0.4):
            return {self.text(2): self._value(depth + 1) for _ in range(self._random.randint(0, 3))}
        if depth < 3 and self._some(0.3):
            return [self._value(depth + 1) for _ in range(self._random.randint(0, 3))]
        return self._random.choice([None, True, 0, -1.5, 1e30, 2**40, self.text()])

    def _call(self) -> dict[str, Any]:
        arguments = json.dumps(self._value(), ensure_ascii=self._some(0.5))
        if self._some(0.2):
            arguments = self._random.choice(["", "{", "[]", '{"b": 1, "a": NaN}', '{"x": 1,   "x": 2}'])
        function = {"name": self._random.choice(["weather", "f_1"]), "arguments": arguments}
        call = {"type": "function", "function": function, "id": f"c{self._random.randrange(99)}"}
        return call | ({"index": 0} if self._some(0.2) else {})

    def _message(self, role: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": role, "content": self._content()}
        if role == "assistant":
            if self._some(0.4):
                message["tool_calls"] = [self._call() for _ in range(self._random.randint(0, 2))]
            if self._some(0.3):
                message[self._random.choice(["reasoning", "reasoning_content"])] = self.text()
        elif role == "tool":
            message["tool_call_id"] = f"c{self._random.randrange(99)}"
        if self._some(0.1):
            message["name"] = "ann"
        if self._some(0.1):
            message["unknown"] = self.text()
        if role == "system" and self._some(0.2):
            message["content"] = "x-anthropic-billing-header: cch=1;" + self._random.choice(
                ["", "\nBe brief."]
            )
        return message

    def _tool(self) -> dict[str, Any]:
        function: dict[str, Any] = {"parameters": {"type": "object", "properties": self._value(1)}}
        function["name"] = "weather"
        if self._some(0.5):
            function["description"] = self.text()
        if self._some(0.3):
            function["strict"] = self._some(0.5)
        if self._some(0.2):
            function["extra"] = 1
        tool: dict[str, Any] = {"function": function, "type": "function"}
        if self._some(0.2):
            tool["defer_loading"] = True
        if self._some(0.2):
            tool["cache_control"] = {"type": "ephemeral"}
        return tool

    def chat(self) -> dict[str, Any]:
        roles = ["user", "assistant", "user", "assistant", "tool", "user"][: self._random.randint(1, 6)]
        messages = [self._message(role) for role in roles]
        if self._some(0.5):
            messages.insert(0, self._message(self._random.choice(["system", "system", "developer"])))
        if self._some(0.1):
            messages.append(self._message(self._random.choice(["system", "developer", "stranger"])))
        body: dict[str, Any] = {"messages": messages}
        if self._some(0.4):
            body["tools"] = [self._tool() for _ in range(self._random.randint(1, 3))]
            if self._some(0.5):
                body["tool_choice"] = self._random.choice(["auto", "none"])
        if self._some(0.2):
            body["chat_template_kwargs"] = {"enable_thinking": self._some(0.5), "other": 1}
        if self._some(0.2):
            body["reasoning_effort"] = self._random.choice(["none", "low", "high"])
        if self._some(0.2):
            body["add_generation_prompt"] = False
            body["continue_final_message"] = self._some(0.5)
        if self._some(0.1):
            body["add_special_tokens"] = True
        if self._some(0.1):
            body["documents"] = [{"title": "t", "text": self.text()}]
        return body

    # Anthropic's Messages.

    def _blocks(self, role: str) -> Any:
        if self._some(0.3):
            return self.text()
        return [self._block(role) for _ in range(self._random.randint(0 if role == "system" else 1, 4))]

    def _block(self, role: str) -> dict[str, Any]:
        kinds = {
            "user": ("text", "text", "tool_result", "tool_result", "tool_reference"),
            "assistant": ("text", "thinking", "tool_use", "tool_use", "redacted_thinking", "tool_result"),
            "system": ("text", "text", "text", "tool_addition", "tool_removal"),
        }[role]
        kind = self._random.choice(kinds)
        block: dict[str, Any] = {"type": kind}
        if kind == "text":
            block["text"] = self.text()
            if role == "system" and self._some(0.2):
                block["text"] = "x-anthropic-billing-header: cch=1;" + self._random.choice(
                    ["", "\nBe brief."]
                )
        elif kind == "thinking":
            block |= {"thinking": self.text(), "signature": "AAAA"}
        elif kind == "redacted_thinking":
            block["data"] = "AAAA"
        elif kind == "tool_use":
            block |= {"id": f"toolu_{self._random.randrange(99)}", "name": "weather"}
            if self._some(0.9):
                block["input"] = {self.text(2): self._value(1) for _ in range(self._random.randint(0, 3))}
        elif kind == "tool_result":
            block["tool_use_id"] = f"toolu_{self._random.randrange(99)}"
            if self._some(0.5):
                block["content"] = self.text()
            elif self._some(0.8):
                part = {"type": "text", "text": self.text()}
                reference = {"type": "tool_reference", "tool_name": "weather"}
                block["content"] = self._random.choices((part, part, part, reference), k=3)
            if self._some(0.2):
                block["is_error"] = True
        elif kind == "tool_reference":
            block["tool_name"] = "weather"
        else:
            block["tool"] = {"type": "tool_reference", "name": "weather"}
            if kind == "tool_addition" and self._some(0.5):
                name = self._random.choice(["weather", "other"])
                block["tool"] = {"type": "tool_definition", "definition": self._anthropic_tool(name)}
        if self._some(0.1):
            block["cache_control"] = {"type": "ephemeral"}
        return block

    def _anthropic_tool(self, name: str = "weather") -> dict[str, Any]:
        tool: dict[str, Any] = {"name": name, "input_schema": {"properties": self._value(1)}}
        if self._some(0.7):
            tool["input_schema"]["type"] = "object"
        for field, value in (("description", self.text()), ("strict", True), ("defer_loading", True)):
            if self._some(0.4):
                tool[field] = value
        return tool

    def messages(self) -> dict[str, Any]:
        roles = ["user", "assistant", "user", "assistant", "user"][: self._random.randint(1, 5)]
        if self._some(0.2):
            roles.insert(self._random.randint(0, len(roles)), "system")
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 2000}
        body["messages"] = [{"role": role, "content": self._blocks(role)} for role in roles]
        if self._some(0.6):
            text = self.text() if self._some(0.4) else [self._block("system") for _ in range(3)]
            body["system"] = (
                text if isinstance(text, str) else [each for each in text if each["type"] == "text"]
            )
        if self._some(0.6):
            body["tools"] = [self._anthropic_tool() for _ in range(self._random.randint(0, 2))]
            if self._some(0.3):
                body["tool_choice"] = {"type": self._random.choice(["auto", "any", "none"])}
        if self._some(0.3):
            thinking = (
                {"type": "disabled"},
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "adaptive"},
            )
            body["thinking"] = self._random.choice(thinking)
        if self._some(0.2):
            body["output_config"] = {"effort": self._random.choice(["low", "high", None])}
        if self._some(0.2):
            body["chat_template_kwargs"] = {"enable_thinking": self._some(0.5)}
        return body

    # OpenAI's Responses.

    def _item(self) -> Any:
        kind = self._random.choice(
            [
                *("user", "user", "assistant", "output", "output", "reasoning", "call", "call", "custom"),
                *("result", "result", "custom_result", "developer"),
            ]
        )
        call_id = f"call_{self._random.randrange(99)}"
        if kind in ("user", "developer"):
            content: Any = self.text()
            if self._some(0.5):
                parts = self._random.randint(1, 3)
                content = [{"type": "input_text", "text": self.text()} for _ in range(parts)]
            item: dict[str, Any] = {"role": kind, "content": content}
            return item | ({"type": "message"} if self._some(0.5) else {})
        if kind == "assistant":
            item = {"role": "assistant", "content": self.text()}
            return item | ({"type": "message"} if self._some(0.5) else {})
        if kind == "output":
            content = [
                {"type": "output_text", "text": self.text()} for _ in range(self._random.randint(1, 2))
            ]
            item = {"type": "message", "role": "assistant", "content": content}
            if self._some(0.5):
                item |= {"id": "msg_1", "status": self._random.choice(["completed", "incomplete"])}
            return item
        if kind == "reasoning":
            item = {"type": "reasoning", "summary": []}
            if self._some(0.5):
                item["summary"] = [{"type": "summary_text", "text": self.text()}]
            if self._some(0.5):
                item["content"] = [{"type": "reasoning_text", "text": self.text()} for _ in range(2)]
            return item
        if kind == "call":
            item = {"type": "function_call", "call_id": call_id, "name": "weather"}
            item["arguments"] = json.dumps(self._value()) if self._some(0.8) else ""
            return item | ({"namespace": "ns"} if self._some(0.2) else {})
        if kind == "custom":
            return {"type": "custom_tool_call", "call_id": call_id, "name": "patch", "input": self.text()}
        output: Any = self.text()
        if self._some(0.3):
            output = [{"type": "input_text", "text": self.text()} for _ in range(2)]
        kind = "function_call_output" if kind == "result" else "custom_tool_call_output"
        return {"type": kind, "call_id": call_id, "output": output}

    def _flat_tool(self) -> dict[str, Any]:
        kind = self._random.choice(("function", "function", "custom", "namespace", "web_search"))
        if kind == "custom":
            return {"type": "custom", "name": "patch", "description": self.text()}
        if kind == "web_search":
            return {"type": "web_search"}
        function = {"type": "function", "name": "weather", "parameters": self._value(1), "strict": False}
        if not isinstance(function["parameters"], dict):
            function["parameters"] = None
        if self._some(0.5):
            function["description"] = self.text()
        if kind == "function":
            return function
        return {"type": "namespace", "name": "ns", "description": "all", "tools": [function]}

    def responses(self) -> dict[str, Any]:
        body: dict[str, Any] = {"model": "tiny"}
        body["input"] = (
            self.text() if self._some(0.2) else [self._item() for _ in range(self._random.randint(1, 7))]
        )
        if self._some(0.6):
            body["instructions"] = self.text()
        if self._some(0.6):
            body["tools"] = [self._flat_tool() for _ in range(self._random.randint(0, 3))]
        if self._some(0.3):
            body["reasoning"] = {"effort": self._random.choice(["low", "high", "none", None])}
        if self._some(0.2):
            body["chat_template_kwargs"] = {"enable_thinking": self._some(0.5)}
        return body


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_makes_the_same_tokens_of_every_request(tmp_path: Path, kind: str) -> None:
    """Requests that vLLM refuses are not compared: the engine gets and refuses them."""
    folder = make_folder(tmp_path / "model", kind)
    made = Requests(7)
    requests: list[tuple[str, dict[str, Any]]] = [(CHAT, made.chat()) for _ in range(600)]
    requests += [(MESSAGES, made.messages()) for _ in range(600)]
    requests += [(RESPONSES, made.responses()) for _ in range(600)]
    requests += [(COMPLETIONS, {"prompt": made.text(30)}) for _ in range(100)]
    requests += [(COMPLETIONS, {"prompt": made.text(30), "add_special_tokens": False}) for _ in range(20)]
    told = subprocess.run(
        [environment() / "bin" / "python", Path(__file__).with_name("vllm_tokens.py"), folder],
        input=json.dumps(requests),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    theirs = json.loads(told.stdout.splitlines()[-1])
    tokenizer = PromptTokenizer.load(folder)
    predict = {
        CHAT: tokenizer.chat,
        MESSAGES: tokenizer.messages,
        RESPONSES: tokenizer.responses,
        COMPLETIONS: lambda body: tokenizer.completion(
            body["prompt"], add_special_tokens=body.get("add_special_tokens", True)
        ),
    }
    compared: Counter[str] = Counter()
    for (path, body), expected in zip(requests, theirs, strict=True):
        if isinstance(expected, str):
            continue
        try:
            got = predict[path](body)
        except NotPredictable as error:
            raise AssertionError(f"{body}: {error}; vLLM makes {len(expected)} tokens of it") from None
        assert got.tolist() == expected, body
        compared[path] += 1
    refused = [(path, why) for (path, _), why in zip(requests, theirs, strict=True) if isinstance(why, str)]
    assert compared[CHAT] > 300, refused[:5]
    assert compared[MESSAGES] > 300, [each for each in refused if each[0] == MESSAGES][:5]
    assert compared[RESPONSES] > 300, [each for each in refused if each[0] == RESPONSES][:5]


async def test_a_running_engine_agrees_and_its_cache_is_predicted(
    vllm_engines: Callable[..., list[VllmEngine]], tmp_path: Path
) -> None:
    """Predicted equals cached over many turns of chats and completions, with and without tools."""
    folder = make_folder(tmp_path / "model", "byte-level")
    (engine,) = vllm_engines(1, tokenizer=str(folder))
    tokenizer = PromptTokenizer.load(folder)
    async with aiohttp.ClientSession() as session:

        async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
            async with session.post(engine.url + path, json=body) as response:
                return response.status, await response.read()

        assert await verify(tokenizer, post) == []
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    flags = ("--set", f"tokenizer={folder}", "--set", f"block_size={BLOCK}")
    async with served([engine], *flags) as w:

        async def check(path: str, body: dict[str, Any]) -> None:
            body = body | {"model": "tiny", "max_tokens": 4}
            async with w.session.post(w.url + path, json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                record = await w.record(response.headers)
            usage = answer["usage"]
            assert record["prompt_tokens"] == usage["prompt_tokens"]
            # The engine computes at least one token of every prompt.
            predicted = min(record["predicted_cached_tokens"], (usage["prompt_tokens"] - 1) // BLOCK * BLOCK)
            real = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            assert predicted == real, (path, body, record, usage)
            seen.append(real)
            await asyncio.sleep(0.05)  # events of its last blocks are on their way

        for more in ({}, {"tools": [tool]}, {"tools": [tool], "tool_choice": "none"}):
            seen: list[int] = []
            messages: list[dict[str, Any]] = [{"role": "system", "content": f"Rules of {more}. " * 8}]
            for turn in range(8):
                messages.append(
                    {"role": "user", "content": f"Question {turn}: " + "what is a router? " * turn}
                )
                await check(CHAT, {"messages": messages} | more)
                messages.append({"role": "assistant", "content": f"Answer {turn}: it sends requests on."})
            assert sorted(seen[1:]) == seen[1:]
            assert seen[-1] > 10 * BLOCK
        seen = []
        prompt = ""
        for turn in range(8):
            prompt += f"Turn {turn}: " + "one router and many engines, " * 6
            await check(COMPLETIONS, {"prompt": prompt})
        assert seen[-1] > 5 * BLOCK


def test_the_recorded_fields_are_those_of_this_vllm() -> None:
    """If this fails, run `tests/real/record_prompts.py`, then `tests/test_prompt_fields.py`."""
    command = [environment() / "bin" / "python", Path(__file__).with_name("vllm_fields.py")]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    recorded = Path(__file__).parents[1] / "data" / "vllm_fields.json"
    assert json.loads(told.stdout.splitlines()[-1]) == json.loads(recorded.read_text())


async def test_an_agents_session_is_predicted_exactly(
    vllm_engines: Callable[..., list[VllmEngine]], tmp_path: Path
) -> None:
    """Bugs 37: 30 turns with tools, by the official clients of /v1/messages and /v1/responses."""
    folder = make_folder(tmp_path / "model", "byte-level")
    (engine,) = vllm_engines(1, tokenizer=str(folder), max_model_len=8192)
    flags = ("--set", f"tokenizer={folder}", "--set", f"block_size={BLOCK}")
    async with served([engine], *flags) as w:
        for api in ("anthropic", "openai"):
            process = await asyncio.create_subprocess_exec(
                *(environment() / "bin" / "python", Path(__file__).with_name("agent_session.py"), w.url, api),
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await asyncio.wait_for(process.communicate(), 600)
            assert process.returncode == 0
            turns = [json.loads(line) for line in out.splitlines()]
            assert len(turns) == 30
            for turn in turns:
                record = await w.record({"x-lmetric-decision": turn["decision"]})
                assert record["prompt_tokens"] == turn["prompt_tokens"], (api, turn)
                # The engine computes at least one token of every prompt.
                most = (turn["prompt_tokens"] - 1) // BLOCK * BLOCK
                predicted = min(record["predicted_cached_tokens"], most)
                assert predicted == turn["cached"], (api, record, turn)
            cached = [turn["cached"] for turn in turns]
            assert cached[1:] == sorted(cached[1:])
            assert cached[-1] > 50 * BLOCK
