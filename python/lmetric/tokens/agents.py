"""Converts requests of Anthropic's Messages and OpenAI's Responses APIs to chats, like vLLM.

An engine renders such a request as the chat that it converts the request to. So the tokens are
exact only if each message, part and tool becomes what it becomes there. Checked with vLLM 0.32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmetric.tokens.chat import BILLING_HEADER
from lmetric.tokens.errors import NotPredictable

JSON = Mapping[str, Any]

# Status of a last message that the model continues.
_UNFINISHED = ("in_progress", "incomplete")
# A tool of free text, as the model sees it.
_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def chat_of_messages(
    request: JSON, merges_system: Callable[[], bool], disabled_effort: Callable[[], str]
) -> dict[str, Any]:
    """The chat of a body of /v1/messages. Raises NotPredictable.

    ``merges_system``: whether all system messages become one, in front. ``disabled_effort``: the
    reasoning effort that stands for disabled thinking.
    """
    given = _list(request.get("messages"), "messages")
    roles = [_object(message, "a message").get("role") for message in given]
    merges = "system" in roles and merges_system()
    parts = []
    system = request.get("system")
    if isinstance(system, str) and system:
        parts.append(system)
    elif system:
        parts += _system_texts(system)
    messages: list[dict[str, Any]] = []
    changes: list[JSON] = []
    for message, role in zip(given, roles, strict=True):
        content = message.get("content")
        if role == "system":
            if not isinstance(content, str):
                changes += [block for block in _blocks(content) if block["type"] in _CHANGES]
            text = _inline_system(content)
            if text and merges:
                parts.append(text)
            elif text:
                messages.append({"role": "system", "content": text})
        elif role in ("user", "assistant"):
            _add_message(role, content, messages)
        else:
            raise NotPredictable("shape", "a role must be user, assistant or system")
    if parts:
        messages.insert(0, {"role": "system", "content": "".join(parts)})
    chat: dict[str, Any] = {
        "messages": messages,
        "chat_template_kwargs": request.get("chat_template_kwargs"),
    }
    tools = _changed_tools(request.get("tools"), changes)
    if tools is not None:
        chat["tools"] = [_anthropic_tool(tool) for tool in tools]
    output = request.get("output_config")
    if output is not None:
        chat["reasoning_effort"] = _object(output, "output_config").get("effort")
    thinking = request.get("thinking")
    if thinking is not None and _object(thinking, "thinking").get("type") == "disabled":
        chat["reasoning_effort"] = disabled_effort()
    return chat


_CHANGES = ("tool_addition", "tool_removal")


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise NotPredictable("shape", f"{what} must be a list")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise NotPredictable("shape", f"{what} must be an object")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise NotPredictable("shape", f"{what} must be a string")
    return value


def _optional_text(value: Any, what: str) -> str:
    return "" if value is None else _text(value, what)


def _blocks(content: Any) -> list[dict[str, Any]]:
    blocks = [_object(block, "a content block") for block in _list(content, "content")]
    for block in blocks:
        _text(block.get("type"), "the type of a content block")
    return blocks


def _system_texts(content: Any) -> Iterator[str]:
    """The texts of a system prompt in blocks, without the block that changes with each request."""
    for block in _blocks(content):
        if block["type"] == "text":
            text = _optional_text(block.get("text"), "a text")
            if text and not text.startswith(BILLING_HEADER):
                yield text


def _inline_system(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    return "".join(_system_texts(content))


def _add_message(role: str, content: Any, messages: list[dict[str, Any]]) -> None:
    """Appends a message, after the messages of the tool results in it."""
    message: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        message["content"] = content
    else:
        parts: list[dict[str, Any]] = []
        calls, reasoning = [], []
        for block in _blocks(content):
            kind = block["type"]
            if kind == "text":
                if text := _optional_text(block.get("text"), "a text"):
                    parts.append({"type": "text", "text": text})
            elif kind == "thinking":
                if block.get("thinking") is not None:
                    reasoning.append(_text(block["thinking"], "thinking"))
            elif kind == "tool_use":
                calls.append(_anthropic_call(block))
            elif kind == "tool_result" and role == "user":
                _add_result(block, messages)
            elif kind == "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
            elif kind == "image":
                if block.get("source"):
                    parts.append(_anthropic_image(block["source"]))
            elif kind not in ("redacted_thinking", "tool_reference"):
                raise NotPredictable("shape", f"a content block of type {kind!r:.40}")
        if reasoning:
            message["reasoning"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        if len(parts) == 1 and parts[0]["type"] == "text":
            message["content"] = parts[0]["text"]
        elif parts:
            message["content"] = parts
    if role != "user" or "content" in message:
        messages.append(message)


def _anthropic_image(source: Any) -> dict[str, Any]:
    given = _object(source, "the source of an image")
    if given.get("type") == "url":
        url = _text(given.get("url", ""), "the URL of an image")
    else:
        kind, data = given.get("media_type", "image/jpeg"), given.get("data", "")
        url = f"data:{_text(kind, 'a media type')};base64,{_text(data, 'the data of an image')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _anthropic_call(block: JSON) -> dict[str, Any]:
    call_id, given = block.get("id"), block.get("input")
    if not call_id:
        raise NotPredictable("shape", "a call of a tool has no ID; the engine makes one")
    if given is not None:
        _object(given, "the input of a tool")
    # As the engine does it: some values change on their way through a text.
    arguments = json.dumps(given or {})
    function = {"name": _optional_text(block.get("name"), "a name"), "arguments": arguments}
    return {"id": _text(call_id, "an ID"), "type": "function", "function": function}


def _add_result(block: JSON, messages: list[dict[str, Any]]) -> None:
    content, texts, names = block.get("content"), [], []
    images: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts.append(content)
    else:
        for part in content or []:
            kind = _object(part, "a part of a tool result").get("type")
            if kind == "text":
                texts.append(_text(part.get("text", ""), "a text"))
            elif kind == "image":
                images.append(_anthropic_image(part.get("source", {})))
            elif kind == "tool_reference" and (name := part.get("tool_name") or part.get("name")):
                names.append(_text(name, "the name of a tool"))
    call_id = _optional_text(block.get("tool_use_id"), "an ID")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
    if images := [image for image in images if image["image_url"]["url"]]:
        messages.append({"role": "user", "content": images})
    if names:
        references = [{"type": "tool_reference", "name": name} for name in names]
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})


def _changed_tools(given: Any, changes: list[JSON]) -> list[Any] | None:
    """The tools after the changes in system messages."""
    if not changes:
        return None if given is None else _list(given, "tools")
    tools = {_object(tool, "a tool").get("name"): tool for tool in _list(given or [], "tools")}
    removed: set[Any] = set()
    for block in changes:
        change = _object(block.get("tool"), "a changed tool")
        if "definition" in change:
            definition = _object(change["definition"], "a tool")
            name = definition.get("name")
            tools[name] = definition
        else:
            name = change.get("name")
            if name not in tools:
                raise NotPredictable("shape", "a changed tool is not declared")
            if block["type"] == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _anthropic_tool(tool: Any) -> dict[str, Any]:
    schema = _object(_object(tool, "a tool").get("input_schema"), "input_schema")
    return {
        "type": "function",
        "function": {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
            "strict": tool.get("strict"),
            "defer_loading": tool.get("defer_loading"),
        },
    }


def chat_of_responses(request: JSON) -> dict[str, Any]:
    """The chat of a body of /v1/responses. Raises NotPredictable."""
    if request.get("previous_response_id") is not None:
        raise NotPredictable("history", "only the engine knows the response that this one continues")
    if request.get("truncation", "disabled") != "disabled":
        raise NotPredictable("truncation", "the engine may truncate the prompt")
    messages: list[dict[str, Any]] = []
    if instructions := _optional_text(request.get("instructions"), "instructions"):
        messages.append({"role": "system", "content": instructions})
    given = request.get("input")
    continues = False
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        conversation: list[dict[str, Any]] = []
        items = _list(given, "input")
        for item in items:
            _add_item(_object(item, "an item"), conversation)
        messages += conversation
        continues = bool(items) and _continues(items[-1])
    chat: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        "add_special_tokens": True,
        "chat_template_kwargs": request.get("chat_template_kwargs"),
    }
    if tools := _list(request.get("tools") or [], "tools"):
        chat["tools"] = [shown for tool in tools for shown in _functions(_object(tool, "a tool"))]
    reasoning = request.get("reasoning")
    if reasoning is not None:
        chat["reasoning_effort"] = _object(reasoning, "reasoning").get("effort")
    return chat


def _add_item(item: JSON, messages: list[dict[str, Any]]) -> None:
    """Appends an item, or adds it to the assistant's last message if that has no such part."""
    kind, role, content = item.get("type"), item.get("role"), item.get("content")
    if kind in ("function_call", "custom_tool_call"):
        _assistant(messages, "tool_calls", _call(item))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append(output)
    elif kind == "reasoning":
        if item.get("encrypted_content"):
            raise NotPredictable("shape", "encrypted reasoning")
        parts = content or item.get("summary") or []
        said = _first_text(_list(parts, "the content of reasoning")) if parts else ""
        _assistant(messages, "reasoning", said)
    elif kind not in (None, "message") or type(role) is not str:
        raise NotPredictable("shape", f"an item of type {kind!r:.40}")
    elif role == "assistant":
        said = content if isinstance(content, str) else _first_text(_list(content, "content"))
        _assistant(messages, "content", said)
    else:
        messages.append({"role": role, "content": content})


def _assistant(messages: list[dict[str, Any]], field: str, value: Any) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if field == "tool_calls":
        if last is not None:
            last.setdefault("tool_calls", []).append(value)
            return
        value = [value]
    elif last is not None and field not in last:
        last[field] = value
        return
    messages.append({"role": "assistant", field: value})


def _first_text(parts: list[Any]) -> str:
    """The text of the first part: engines ignore the others."""
    if not parts:
        raise NotPredictable("shape", "content without parts")
    return _text(_object(parts[0], "a part").get("text"), "a text")


def _call(item: JSON) -> dict[str, Any]:
    name = _text(item.get("name"), "the name of a tool")
    if item["type"] == "custom_tool_call":
        text = _optional_text(item.get("input"), "the input of a tool")
        arguments = json.dumps({"input": text}, ensure_ascii=False)
    else:
        arguments = _text(item.get("arguments"), "arguments")
        if namespace := item.get("namespace"):
            name = f"{_text(namespace, 'a namespace')}__{name}"
    function = {"name": name, "arguments": arguments}
    return {"id": _text(item.get("call_id"), "call_id"), "function": function, "type": "function"}


def _continues(item: JSON) -> bool:
    """Whether the model continues the last message."""
    if item.get("status") not in _UNFINISHED or item.get("type", "message") not in ("message", "reasoning"):
        return False
    if item.get("type") != "reasoning" and not (
        item.get("role") == "assistant" and isinstance(item.get("content"), list) and "type" in item
    ):
        raise NotPredictable("shape", "an unfinished message of this kind")
    return True


def _functions(tool: JSON) -> Iterator[dict[str, Any]]:
    """A tool as the functions that the model sees; none for the provider's own tools."""
    kind = tool.get("type")
    if kind == "function":
        yield {"type": "function", "function": tool}
    elif kind == "custom":
        shown = {"name": tool.get("name"), "description": tool.get("description"), "parameters": _FREE_TEXT}
        yield {"type": "function", "function": shown}
    elif kind == "namespace":
        for inner in _list(tool.get("tools"), "the tools of a namespace"):
            if _object(inner, "a tool").get("type") == "function":
                yield {"type": "function", "function": {**inner, "name": f"{tool['name']}__{inner['name']}"}}
