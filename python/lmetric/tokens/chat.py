"""A chat request as vLLM hands it to the template: messages, tools and variables.

What the engine drops or reshapes is dropped or reshaped here, since a template may write whatever it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmetric.tokens.template import ContentFormat

# Content parts that are text, and where it stands.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Arguments of Hugging Face's apply_chat_template which, as chat_template_kwargs, would do more than set a
# variable of the template.
_NOT_VARIABLES = frozenset(
    {
        *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


class NotPredictable(Exception):
    """The tokens that an engine will make of a request cannot be known here. ``reason`` is a word for counters:
    ``media``, ``template`` (it failed, or came with the request), ``shape``, ``truncation``, ``tokenizer``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def messages_of(request: Mapping[str, Any], content_format: ContentFormat) -> list[dict[str, Any]]:
    """The messages of a request as the template gets them. Raises NotPredictable."""
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotPredictable("shape", "messages must be a list of at least one message")
    wrap = content_format == "openai"
    return [_message(message, wrap) for message in messages]


def _message(message: Any, wrap: bool) -> dict[str, Any]:
    try:
        role = message["role"]
        content = message.get("content")
    except (TypeError, KeyError, AttributeError):
        raise NotPredictable("shape", "a message must be an object with a role") from None
    if type(role) is not str:
        raise NotPredictable("shape", "a role must be a string")
    if type(content) is str:
        content = [{"type": "text", "text": content}] if wrap else content
    elif content is None:
        content = [] if wrap else ""
    else:
        content = _parts(content, wrap)
    shaped = {"role": role, "content": content}
    if len(message) > 2:
        _further(message, role, shaped)
    return shaped


def _further(message: Mapping[str, Any], role: Any, shaped: dict[str, Any]) -> None:
    """What a message may have beside role and content."""
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            shaped["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            shaped["tool_call_id"] = message["tool_call_id"]
        content = shaped["content"]
        if type(content) is list:
            shaped["content"] = "\n".join(part["text"] for part in content)
    elif role == "developer":
        shaped["tools"] = message.get("tools")
    name = message.get("name")
    if type(name) is str:
        shaped["name"] = name


def _parts(parts: Any, wrap: bool) -> Any:
    """A content given in parts: as parts, or as one text."""
    if type(parts) is not list:
        raise NotPredictable("shape", "content must be a text or a list of parts")
    texts = []
    for part in parts:
        if type(part) is str:
            texts.append(part)
            continue
        kind = part.get("type") if type(part) is dict else None
        where = _TEXT_PARTS.get(kind) if type(kind) is str else None
        if where is None:
            raise NotPredictable("media", f"a content part of type {kind!r:.40} is not text")
        text = part.get(where)
        if type(text) is str:
            texts.append(text)
        elif text is not None or kind == "thinking":
            raise NotPredictable("shape", f"a content part of type {kind!r} has no text")
    if wrap:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(text for text in texts if text)


def _call(call: Any) -> dict[str, Any]:
    """A tool call: its arguments become an object, as templates want them."""
    try:
        function = call["function"]
        arguments = function["arguments"]
        # Fields in the order of the OpenAI client's types, by which the engine checks and rebuilds them.
        return {
            "id": call["id"],
            "function": {
                "arguments": json.loads(arguments) if arguments else {},
                "name": function["name"],
            },
            "type": call["type"],
        }
    except (TypeError, KeyError, ValueError):
        raise NotPredictable("shape", "a tool call is malformed") from None


def tools_of(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools as the template gets them: fields in the engine's order, absent ones as null."""
    tools = request.get("tools")
    if not tools:
        return None
    try:
        return [_tool(tool) for tool in tools]
    except (TypeError, KeyError, AttributeError):
        raise NotPredictable("shape", "a tool is malformed") from None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(tool["function"])
    ordered = {
        "name": function.pop("name"),
        "description": function.pop("description", None),
        "parameters": function.pop("parameters", None),
    }
    further = {name: value for name, value in tool.items() if name not in ("type", "function")}
    return {"type": tool.get("type", "function"), "function": ordered | function, **further}


def variables_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the template that the request sets. Raises NotPredictable."""
    if request.get("chat_template") is not None:
        raise NotPredictable("template", "the request brings a chat template of its own")
    if request.get("truncate_prompt_tokens") is not None:
        raise NotPredictable("truncation", "truncate_prompt_tokens")
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or not _NOT_VARIABLES.isdisjoint(given):
        raise NotPredictable("template", "chat_template_kwargs do more than set variables")
    variables = dict(given)
    effort = request.get("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    return variables
