"""Eligibility of requests for splits, migration, failover and prefix fetches, and reasons against.

A later segment gets all tokens so far as its prompt. It loses the engine's other state of the
answer: a grammar or a parser, a random number generator, the boundary between prompt and output. So
a request stays whole unless all its fields are known to be harmless; an unknown field counts as
harmful. Comments with "V:" report a test with vLLM 0.32.0.

A stream whose engine fails may continue on another engine (failover). The rules are those of a
split, with three exceptions. The answer needs no length limit. A seed is dropped, because other
random numbers are better than a broken answer. The router looks for stop strings itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from lmetric.engines.handover import CHAT, COMPLETIONS, prompt_logprobs_reason, whole_reason
from lmetric.server.api.request import ParsedRequest

JSON = Mapping[str, Any]

# Paths whose answers several engines can produce.
MERGEABLE_PATHS = (CHAT, COMPLETIONS)

# vLLM's default length of a completion. The length of a chat has no default limit.
COMPLETION_MAX_TOKENS = 16

# An answer with reasoning or tool calls, and the engines that continue it.
PARSED = "the engine parses its answers into more than text (tool calls or reasoning)"
PARSER_FIX = "vLLM with --enable-scale-out continues such chats"

# By path, vLLM's class of a stream's events, which have no token ids (read in 0.32.0).
_EVENTS_WITHOUT_IDS = {
    "/v1/messages": "AnthropicStreamEvent",
    "/v1/responses": "StreamingResponsesResponse",
}

# Later segments get these fields unchanged, or the fields only shape the prompt or the answer,
# which the router then does itself.
_HARMLESS = frozenset(
    {
        *("model", "messages", "prompt"),
        # They depend on the next token alone, or on all tokens before it (V: equal when continued).
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "ignore_eos", "stop_token_ids"),
        "min_tokens",  # counts from the answer's start; the router lowers it for later segments
        *("skip_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
        *("priority", "cache_salt", "user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "request_id", "session_id"),
        # Fields of the prompt.
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template_kwargs", "documents", "reasoning_effort"),
        # Fields of tools. `tools` itself is checked below.
        *("parallel_tool_calls", "include_stop_str_in_output"),
    }
)

Check = Callable[[JSON, Any], str | None]


def _only(*allowed: Any, why: str) -> Check:
    """Returns a check that passes only these values (engines' defaults) and empty values."""
    same = {(type(each) is bool, each) for each in allowed}

    def check(_: JSON, value: Any) -> str | None:
        if isinstance(value, str | list | dict):
            return why if value else None
        return None if (type(value) is bool, value) in same else why

    return check


def _seed(request: JSON, _: Any) -> str | None:
    # Without a temperature an engine samples, at 1 or at the temperature of the model's defaults.
    greedy = request.get("temperature") == 0
    return None if greedy else "a later segment would restart the random numbers of the seed (seed)"


def _stream(_: JSON, value: Any) -> str | None:
    return None if isinstance(value, bool) else "it is not true or false (stream)"


def _stream_options(_: JSON, value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "it is not an object (stream_options)"


def _limit(name: str) -> Check:
    """Returns a check that passes limits that every engine reads in the same way."""

    def check(_: JSON, value: Any) -> str | None:
        return None if type(value) is int and value >= 0 else f"it is not a whole number from 0 ({name})"

    return check


def _format(_: JSON, value: Any) -> str | None:
    text = isinstance(value, Mapping) and value.get("type") == "text"
    return None if text else "the state of a grammar cannot be transferred (response_format)"


def _logprobs(request: JSON, value: Any) -> str | None:
    if "messages" not in request:
        return None
    return None if value is False or value == 0 else "log probabilities of a chat cannot be merged (logprobs)"


def _tool_choice(request: JSON, value: Any) -> str | None:
    free = not request.get("tools") or value in ("auto", "none")
    return None if free else f"{_GRAMMAR} (tool_choice)"


_NOT_MERGED = "answers of %s cannot be merged"
_PENALTY = "a later segment would count output tokens as prompt tokens"
_GRAMMAR = "the state of a grammar cannot be transferred"
_PARSER = f"the state of a parser cannot be transferred; {PARSER_FIX}"
_SEVERAL = "one prompt would continue as several answers"
_CHECKED: Mapping[str, Check] = {
    "stream": _stream,
    "stream_options": _stream_options,
    "max_tokens": _limit("max_tokens"),
    "max_completion_tokens": _limit("max_completion_tokens"),
    "n": _only(1, why=f"{_SEVERAL} (n)"),
    "best_of": _only(1, why=f"{_SEVERAL} (best_of)"),
    "use_beam_search": _only(False, why=f"{_SEVERAL} (use_beam_search)"),
    "seed": _seed,
    "presence_penalty": _only(0, why=f"{_PENALTY} (presence_penalty)"),  # V: differs
    "frequency_penalty": _only(0, why=f"{_PENALTY} (frequency_penalty)"),  # V: differs
    "response_format": _format,
    "structured_outputs": _only(why=f"{_GRAMMAR} (structured_outputs)"),
    "guided_json": _only(why=f"{_GRAMMAR} (guided_json)"),
    "guided_regex": _only(why=f"{_GRAMMAR} (guided_regex)"),
    "guided_choice": _only(why=f"{_GRAMMAR} (guided_choice)"),
    "guided_grammar": _only(why=f"{_GRAMMAR} (guided_grammar)"),
    "tools": _only(why=f"{_PARSER} (tools)"),
    "functions": _only(why="the state of a parser cannot be transferred (functions)"),
    "tool_choice": _tool_choice,
    "stop": _only(why="a stop string may cross the segment boundary (stop)"),
    "bad_words": _only(why="a bad word may cross the segment boundary (bad_words)"),
    "echo": _only(False, why="a later segment would echo another prompt (echo)"),
    "suffix": _only(why="a later segment would add the suffix again (suffix)"),
    "prompt_logprobs": _only(why="a transferred prompt has no log probabilities (prompt_logprobs)"),
    "prompt_embeds": _only(why="its prompt is not known as token ids (prompt_embeds)"),
    "logprobs": _logprobs,
    "top_logprobs": _only(False, 0, why="log probabilities of a chat cannot be merged (top_logprobs)"),
    "length_penalty": _only(1, why=f"{_SEVERAL} (length_penalty)"),
    "early_stopping": _only(False, why=f"{_SEVERAL} (early_stopping)"),
    "spaces_between_special_tokens": _only(
        True, why="special tokens would get other spaces (spaces_between_special_tokens)"
    ),
}


# Fields that do not prevent failover: `StopStrings`, and the rest of the answer has other random
# numbers.
_RESUMABLE = frozenset({"seed", "stop"})


class Ineligible(NamedTuple):
    """A reason why another engine cannot continue a stream. `name`: the reason in metrics."""

    name: str
    why: str


# Its engine parses, and no engine continues that.
NOT_PARSED = Ineligible("parser", f"{PARSED}; {PARSER_FIX}")


def split_ineligibility(path: str, request: JSON, *, tokens: bool) -> str | None:
    """Returns the reason why a request must not be split; None: it may be.

    `request`: its parsed body. `tokens`: whether its prompt is known as token ids.
    """
    if found := _obstacle(path, request, tokens, ignored=frozenset()):
        return found.why
    most = max_tokens(path, request)
    if most is None:
        return "it sets no limit on the answer's length (max_tokens)"
    if most < 2:
        return "its answer has fewer than two tokens (max_tokens)"
    return None


def failover_ineligibility(path: str, call: ParsedRequest, *, parses: bool) -> Ineligible | None:
    """Returns the reason why another engine cannot continue the request's stream; None: it can.

    `parses`: engines parse the token ids of other engines.
    """
    if (events := _EVENTS_WITHOUT_IDS.get(path)) is not None:
        return Ineligible("path", f"vLLM reports no token ids in streams of {path} ({events} has none)")
    if path not in MERGEABLE_PATHS:
        return Ineligible("path", _NOT_MERGED % path)
    ignored = _RESUMABLE | {"tools"} if parses else _RESUMABLE
    try:
        why = _obstacle(path, call.request, call.tokens is not None, ignored=ignored)
        return why or (parsed_ineligibility(call.request) if call.request.get("tools") else None)
    except orjson.JSONDecodeError as error:  # the reader in Rust allows more
        return Ineligible("invalid_json", f"its body cannot be parsed: {error}")


def parsed_ineligibility(request: JSON) -> Ineligible | None:
    """Returns the reason why no engine continues an answer with reasoning or tool calls, or None.

    A stop string ends the text before the parser, and the router finds only those of plain text.
    """
    if request.get("stop"):
        return Ineligible("stop", "a stop string may cross the segment boundary, before a parser (stop)")
    return None


def _obstacle(path: str, request: JSON, tokens: bool, ignored: frozenset[str]) -> Ineligible | None:
    """Returns the reason why a second engine cannot continue an answer, whatever its length."""
    if path not in MERGEABLE_PATHS:
        return Ineligible("path", _NOT_MERGED % path)
    for name, value in request.items():
        if value is None or name in _HARMLESS or name in ignored:
            continue
        check = _CHECKED.get(name)
        if check is None:
            why = f"the router does not know whether this field allows a split ({name:.40})"
            return Ineligible("unknown_field", why)
        if why_not := check(request, value):
            return Ineligible(name, why_not)
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return Ineligible("several_prompts", "it has several prompts")
    if not tokens:
        return Ineligible("text_prompt", "its prompt is not known as token ids")
    return None


def fetch_ineligibility(path: str, request: JSON, *, tokens: bool) -> str | None:
    """Returns the reason why a request's prefix must not be fetched from another engine, or None.

    A single engine answers the request unchanged, so few fields matter. `request`: its parsed body.
    `tokens`: whether its prompt is known as token ids.
    """
    if why := whole_reason(path, request) or prompt_logprobs_reason(path, request):
        return why
    if request.get("echo"):
        return "it asks for its prompt, and an engine does not compute a fetched prompt (echo)"
    return None if tokens else "its prompt is not known as token ids"


def max_tokens(path: str, request: JSON) -> int | None:
    """Returns the most tokens of the answer; None if the request sets no limit."""
    names = ("max_completion_tokens", "max_tokens") if path == CHAT else ("max_tokens",)
    for name in names:
        value = request.get(name)
        if type(value) is int:
            return value
    return COMPLETION_MAX_TOKENS if path == COMPLETIONS else None
