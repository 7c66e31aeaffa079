"""Prepares a chat request for the template like vLLM: messages, tools and variables.

It drops and converts the same fields as the engine, because a template can use every value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmetric.tokens.errors import NotPredictable
from lmetric.tokens.images import Image, image_of

if TYPE_CHECKING:
    from lmetric.tokens.template import ContentFormat

# Text content parts, and the key of their text.
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Content parts of images. Templates get `{"type": "image"}` in their place.
_IMAGE_PARTS = ("image_url", "input_image")
# A line that changes with each request of Claude Code; engines drop it.
BILLING_HEADER = "x-anthropic-billing-header"
# Arguments of Hugging Face's apply_chat_template that do more than set a template variable.
_NOT_VARIABLES = frozenset(
    {
        *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)

# Variables with separate request fields, which override chat_template_kwargs.
_BY_REQUEST = ("add_generation_prompt", "continue_final_message")


def messages_of(
    request: Mapping[str, Any], content_format: ContentFormat, *, name_first: bool = False
) -> tuple[list[dict[str, Any]], list[Image]]:
    """The messages of a request for the template, and their images. Raises NotPredictable.

    ``name_first``: in a call of a tool, the name precedes the arguments, as for /v1/responses.
    """
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotPredictable("shape", "messages must be a list of at least one message")
    wrap = content_format == "openai"
    media: list[dict[str, Any]] = []
    shaped_messages = []
    for message in messages:
        try:
            role = message["role"]
            content = message.get("content")
        except (TypeError, KeyError, AttributeError):
            raise NotPredictable("shape", "a message must be an object with a role") from None
        if type(role) is not str:
            raise NotPredictable("shape", "a role must be a string")
        if role == "system" and content:
            content = _without_billing_header(content)
        if type(content) is str:
            content = [{"type": "text", "text": content}] if wrap else content
        elif content is None:
            content = [] if wrap else ""
        else:
            known = len(media)
            content = _parts(content, wrap, media)
            if len(media) > known and role in ("system", "developer"):
                raise NotPredictable("media", f"an image in a message of role {role}")
        shaped = {"role": role, "content": content}
        if len(message) > 2 or "content" not in message:
            _further(message, role, shaped, name_first)
        shaped_messages.append(shaped)
    return shaped_messages, [image_of(part, request) for part in media]


def without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template without the role `developer`.

    It becomes `system`, and later messages of this role are merged into the first message.
    """
    system, others, merge = [], [], False
    for index, message in enumerate(messages):
        if message["role"] not in ("developer", "system"):
            others.append(message)
            continue
        merge = merge or index > 0
        system.append({k: v for k, v in message.items() if k != "tools"} | {"role": "system"})
    if not merge:
        return [*system, *others]
    texts = []
    for message in system:
        content = message["content"]
        text = content if type(content) is str else "\n".join(part["text"] for part in content)
        if text:
            texts.append(text)
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _without_billing_header(content: Any) -> Any:
    """A system message without Claude Code's header line, which changes with each request."""
    if type(content) is str:
        if not content.startswith(BILLING_HEADER):
            return content
        rest = content.partition("\n")[2]
        return rest or None
    if type(content) is not list:
        return content
    kept = []
    for part in content:
        text = part.get("text") if type(part) is dict and part.get("type") == "text" else part
        if type(text) is not str or not text.startswith(BILLING_HEADER):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append({"type": "text", "text": rest})
    return kept


def _further(message: Mapping[str, Any], role: Any, shaped: dict[str, Any], name_first: bool) -> None:
    """Adds the optional fields of a message, other than role and content."""
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            shaped["tool_calls"] = [_call(call, name_first) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            shaped["reasoning"] = shaped["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            shaped["tool_call_id"] = message["tool_call_id"]
        content = shaped["content"]
        # References to tools stay parts, which the template expands.
        if type(content) is list and all(part["type"] == "text" for part in content):
            shaped["content"] = "\n".join(part["text"] for part in content)
    elif role == "developer":
        shaped["tools"] = message.get("tools")
    for field in ("name", "task"):
        value = message.get(field)
        if type(value) is str:
            shaped[field] = value


def _parts(parts: Any, wrap: bool, media: list[dict[str, Any]]) -> Any:
    """Content in parts, returned as parts or as one text. Adds its images to ``media``."""
    if type(parts) is not list:
        raise NotPredictable("shape", "content must be a text or a list of parts")
    shaped = []
    for part in parts:
        if type(part) is str:
            shaped.append({"type": "text", "text": part})
            continue
        kind = part.get("type") if type(part) is dict else None
        if kind == "tool_reference" and type(part.get("name")) is str:
            shaped.append({"type": kind, "name": part["name"]})
            continue
        if wrap and kind in _IMAGE_PARTS:
            media.append(part)
            shaped.append({"type": "image"})
            continue
        where = _TEXT_PARTS.get(kind) if type(kind) is str else None
        if where is None:
            raise NotPredictable("media", f"a content part of type {kind!r:.40} is not text")
        text = part.get(where)
        if type(text) is str:
            shaped.append({"type": "text", "text": text})
        elif text is not None or kind == "thinking":
            raise NotPredictable("shape", f"a content part of type {kind!r} has no text")
    if wrap:
        return shaped
    texts = (part.get("text") or part.get("name") for part in shaped)
    return "\n".join(text for text in texts if text)


def _call(call: Any, name_first: bool) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect."""
    try:
        given = call["function"]
        # Fields in the order of the OpenAI client's types, by which the engine checks and rebuilds
        # them.
        function = {"arguments": _arguments(given["arguments"]), "name": given["name"]}
        if name_first:
            function = {"name": function["name"], "arguments": function["arguments"]}
        return {"id": call["id"], "function": function, "type": call["type"]}
    except (TypeError, KeyError):
        raise NotPredictable("shape", "a tool call is malformed") from None


def _arguments(text: str) -> dict[str, Any]:
    """The arguments as an object; an empty object for other JSON."""
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def tools_of(tools: Any) -> list[dict[str, Any]]:
    """The tools of a request for the template: fields in the engine's order, absent ones as null.

    Raises NotPredictable.
    """
    try:
        return [_tool(tool) for tool in tools]
    except (TypeError, KeyError, AttributeError):
        raise NotPredictable("shape", "a tool is malformed") from None


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = tool["function"]
    function = {name: given.get(name) for name in ("name", "description", "parameters")}
    shaped = {"type": tool.get("type", "function"), "function": function}
    strict, deferred = given.get("strict"), tool.get("defer_loading")
    own_deferred = given.get("defer_loading")
    if strict is not None:
        function["strict"] = strict
    if own_deferred is not None or deferred is not None:
        function["defer_loading"] = deferred if own_deferred is None else own_deferred
    if deferred is not None:
        shaped["defer_loading"] = deferred
    return shaped


def flags_of(request: Mapping[str, Any], defaults: Mapping[str, bool]) -> list[bool]:
    """Fields that are true or false. Raises NotPredictable: engines take some texts as false."""
    flags = []
    for name, default in defaults.items():
        flag = request.get(name, default)
        if not isinstance(flag, bool):
            raise NotPredictable("shape", f"{name} is neither true nor false")
        flags.append(flag)
    return flags


def variables_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the template that the request sets. Raises NotPredictable."""
    if request.get("chat_template") is not None:
        raise NotPredictable("template", "the request brings a chat template of its own")
    if request.get("truncate_prompt_tokens") is not None:
        raise NotPredictable("truncation", "truncate_prompt_tokens")
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or not _NOT_VARIABLES.isdisjoint(given):
        raise NotPredictable("template", "chat_template_kwargs do more than set variables")
    variables = {name: value for name, value in given.items() if name not in _BY_REQUEST}
    effort = request.get("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    return variables
