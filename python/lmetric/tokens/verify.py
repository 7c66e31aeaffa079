"""Compares our tokens with the tokens of a running engine (`/tokenize`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from lmetric._core import LmetricError
from lmetric.tokens.errors import NotPredictable
from lmetric.tokens.prompt import PromptTokenizer

Post = Callable[[str, dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Sends a JSON body to a path of the engine; returns status and body."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place, today.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["place"],
        },
    },
}
_CALL = {
    "id": "call_00001",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": 2}'},
}
_SYSTEM = {"role": "system", "content": "You answer briefly."}
_TALK = [
    {"role": "user", "content": "What is a router?\n\n  It is  not\ta switch."},
    {"role": "assistant", "content": "It forwards: packets, requests, 語 and 🙂."},
    {"role": "user", "content": "Why?"},
]
_TOOL_TALK = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_00001", "content": '{"sky": "clear", "celsius": 21.5}'},
    {"role": "user", "content": "And tomorrow?"},
]
_PARTS = [{"type": "text", "text": "First."}, {"type": "text", "text": " Second."}]
_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("one message", {"messages": _TALK[:1]}),
    ("a conversation", {"messages": _TALK}),
    ("a system prompt", {"messages": [_SYSTEM, *_TALK]}),
    ("content in parts", {"messages": [{"role": "user", "content": _PARTS}]}),
    ("no generation prompt", {"messages": _TALK[:2], "add_generation_prompt": False}),
    (
        "a message to continue",
        {"messages": _TALK[:2], "add_generation_prompt": False, "continue_final_message": True},
    ),
    ("tools", {"messages": [_SYSTEM, *_TALK], "tools": [_TOOL]}),
    ("tool calls and their results", {"messages": _TOOL_TALK, "tools": [_TOOL]}),
]
_TEXTS = (
    "The quick brown fox",
    "  two spaces, a\ttab\n\nand 日本語",
    "def f(x):\n    return x ** 2  # ½ ﬁ",
)


class NotVerifiable(LmetricError):
    """The engine has no `/tokenize`, or does not answer it; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt with different tokens here and in the engine."""

    kind: Literal["chat", "text"]
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


async def verify(tokenizer: PromptTokenizer, post: Post, model: str | None = None) -> list[Difference]:
    """Compares some chats (with and without tools) and texts; empty: all are equal.

    Prompts that both refuse count as equal, for example if a template has no system prompt. Raises
    NotVerifiable, and the errors of ``post``.
    """
    differences = []
    for kind, what, body, ours in _cases(tokenizer):
        if model is not None:
            body = {"model": model, **body}
        theirs = await _tokens(post, body)
        why = _compare(ours, theirs)
        if why is not None:
            differences.append(Difference(kind, what, why))
    return differences


def _cases(
    tokenizer: PromptTokenizer,
) -> Iterator[tuple[Literal["chat", "text"], str, dict[str, Any], list[int] | str]]:
    """Kind, name, body for the engine, and our tokens or the reason why there are none."""
    for text in _TEXTS:
        yield "text", f"the text {text[:20]!r}", {"prompt": text}, tokenizer.completion(text).tolist()
    if tokenizer.no_chat is not None:
        return
    for what, body in _CHATS:
        ours: list[int] | str
        try:
            ours = tokenizer.chat(body).tolist()
        except NotPredictable as error:
            ours = str(error)
        yield "chat", f"a chat with {what}", body, ours


async def _tokens(post: Post, body: dict[str, Any]) -> list[int] | str:
    """The engine's tokens, or the reason why it refuses the prompt."""
    status, answer = await post("/tokenize", body)
    try:
        value = orjson.loads(answer)
    except orjson.JSONDecodeError:
        value = None
    if status == 200 and isinstance(value, dict) and isinstance(value.get("tokens"), list):
        return list(value["tokens"])
    said = answer[:200].decode(errors="replace")
    if status in (400, 422):
        return said
    raise NotVerifiable(f"POST /tokenize: status {status}: {said}")


def _compare(ours: list[int] | str, theirs: list[int] | str) -> str | None:
    """The difference, or None."""
    if isinstance(ours, str):
        return None if isinstance(theirs, str) else f"the engine takes it; here it failed: {ours}"
    if isinstance(theirs, str):
        return f"the engine refuses it: {theirs}"
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return (
        f"{len(ours)} tokens here, {len(theirs)} in the engine; "
        f"from token {at} on {ours[at : at + 5]} here, {theirs[at : at + 5]} there"
    )
