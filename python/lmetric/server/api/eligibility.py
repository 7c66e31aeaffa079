"""Which requests cannot be cut and go on elsewhere as if nothing had happened; each with its reason.

A second leg is sent the tokens so far as its prompt. What an engine knows of an answer beyond its tokens (the
state of a grammar or a parser, a generator of random numbers, which tokens are output) is lost there. So a
field is either known to do no harm, or the request stays whole: a field that nobody has looked at does.
Tried on vLLM 0.32.0 where the comments say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmetric.engines.handover import CHAT, COMPLETIONS, whole_reason

JSON = Mapping[str, Any]

# What vLLM makes of a completion that asks for no length; a chat may get as long as the engine likes.
COMPLETION_MAX_TOKENS = 16

# The second leg gets them as they are, or they only shape prompt or answer, which is the router's work then.
_HARMLESS = frozenset(
    {
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        # Of the next token alone, or of all tokens before it (V: equal when continued).
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "ignore_eos", "stop_token_ids"),
        "min_tokens",  # counted from the answer's start: the second leg's is less
        *("skip_special_tokens", "return_token_ids", "return_tokens_as_token_ids"),
        *("priority", "cache_salt", "user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key", "request_id", "session_id"),
        # Of the prompt.
        *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template_kwargs", "documents", "reasoning_effort"),
        # Of tools, which are looked at themselves.
        *("parallel_tool_calls", "tool_choice", "include_stop_str_in_output"),
    }
)

Check = Callable[[JSON, Any], str | None]


def _only(*allowed: Any, why: str) -> Check:
    """Nothing but these values, which are what an engine does without the field; or nothing at all."""
    same = {(type(each) is bool, each) for each in allowed}

    def check(_: JSON, value: Any) -> str | None:
        if isinstance(value, str | list | dict):
            return why if value else None
        return None if (type(value) is bool, value) in same else why

    return check


def _seed(request: JSON, _: Any) -> str | None:
    # Without a temperature an engine samples: 1, or what the model's authors recommend.
    greedy = request.get("temperature") == 0
    return None if greedy else "a seed draws the same numbers again from its start (seed)"


def _format(_: JSON, value: Any) -> str | None:
    text = isinstance(value, Mapping) and value.get("type") == "text"
    return None if text else "the state of a grammar cannot be handed over (response_format)"


def _logprobs(request: JSON, value: Any) -> str | None:
    if "messages" not in request:
        return None
    return None if value is False or value == 0 else "log probabilities of a chat cannot be joined (logprobs)"


_PENALTY = "a penalty counts what was generated, and the second leg takes it for the prompt"
_GRAMMAR = "the state of a grammar cannot be handed over"
_PARSER = "the state of a parser cannot be handed over"
_SEVERAL = "one prompt would go on as several answers"
_CHECKED: Mapping[str, Check] = {
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
    "functions": _only(why=f"{_PARSER} (functions)"),
    "stop": _only(why="a stop string may lie across the seam (stop)"),
    "bad_words": _only(why="a bad word may lie across the seam (bad_words)"),
    "echo": _only(False, why="the second leg would echo another prompt (echo)"),
    "suffix": _only(why="the second leg would get it, too (suffix)"),
    "prompt_logprobs": _only(why="of a prompt that comes from elsewhere there are none (prompt_logprobs)"),
    "prompt_embeds": _only(why="its prompt is not known as token ids (prompt_embeds)"),
    "logprobs": _logprobs,
    "top_logprobs": _only(False, 0, why="log probabilities of a chat cannot be joined (top_logprobs)"),
    "length_penalty": _only(1, why=f"{_SEVERAL} (length_penalty)"),
    "early_stopping": _only(False, why=f"{_SEVERAL} (early_stopping)"),
    "spaces_between_special_tokens": _only(
        True, why="special tokens would be spaced otherwise (spaces_between_special_tokens)"
    ),
}


def split_ineligibility(path: str, request: JSON, *, tokens: bool) -> str | None:
    """Why a request (its body, parsed) must not be cut; None: it may be.

    `tokens`: its prompt is known as token ids.
    """
    if path not in (CHAT, COMPLETIONS):
        return f"{path} has no answer that could be joined"
    for name, value in request.items():
        if value is None or name in _HARMLESS:
            continue
        check = _CHECKED.get(name)
        if check is None:
            return f"nobody knows whether it can be continued ({name:.40})"
        if why := check(request, value):
            return why
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return "it has several prompts"
    if not tokens:
        return "its prompt is not known as token ids"
    most = max_tokens(path, request)
    if most is None:
        return "it does not say how long the answer may get (max_tokens)"
    if most < 2:
        return "its answer has no two tokens (max_tokens)"
    return None


def unpulled_reason(path: str, request: JSON, *, tokens: bool) -> str | None:
    """Why the front of a request's prompt must not be fetched from another engine; None: it may be. One
    engine answers it as it is, so that few fields matter.

    `tokens`: its prompt is known as token ids.
    """
    if why := whole_reason(path, request):
        return why
    if request.get("echo"):
        return "it wants its prompt back, which is not computed where it is fetched (echo)"
    return None if tokens else "its prompt is not known as token ids"


def max_tokens(path: str, request: JSON) -> int | None:
    """Most tokens of the answer, where the request says so."""
    names = ("max_completion_tokens", "max_tokens") if path == CHAT else ("max_tokens",)
    for name in names:
        value = request.get(name)
        if type(value) is int:
            return value
    return COMPLETION_MAX_TOKENS if path == COMPLETIONS else None
