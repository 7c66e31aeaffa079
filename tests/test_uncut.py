"""Which requests may be cut."""

from __future__ import annotations

from typing import Any

import pytest

from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.server.api.eligibility import max_tokens, split_ineligibility

CHATTED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
ASKED: dict[str, Any] = {"prompt": "a", "max_tokens": 9}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1},
        {"temperature": 0, "seed": 7},
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "stop": [], "tools": []},
        {"stop": None, "tools": None, "seed": None, "nobody_knows_me": None},
        {"response_format": {"type": "text"}, "stop_token_ids": [7], "min_tokens": 3, "ignore_eos": True},
        {"stream": True, "stream_options": {"include_usage": True}, "user": "a", "priority": 3},
        {"logit_bias": {"7": -100}, "cache_salt": "x", "return_token_ids": True, "echo": False},
        {"use_beam_search": False, "prompt_logprobs": None, "top_logprobs": 0, "stop": ""},
        {"spaces_between_special_tokens": True, "logprobs": False},
    ],
)
def test_what_may_be_cut(fields: dict[str, Any]) -> None:
    for path, body in ((CHAT, CHATTED), (COMPLETIONS, ASKED)):
        assert split_ineligibility(path, body | fields, tokens=True) is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "several answers (n)"),
        ({"n": True}, "several answers (n)"),
        ({"best_of": 3}, "(best_of)"),
        ({"use_beam_search": True}, "(use_beam_search)"),
        ({"seed": 7}, "(seed)"),
        ({"seed": 0}, "(seed)"),
        ({"seed": 7, "temperature": 0.1}, "(seed)"),
        ({"presence_penalty": 0.5}, "(presence_penalty)"),
        ({"frequency_penalty": -1}, "(frequency_penalty)"),
        ({"response_format": {"type": "json_object"}}, "(response_format)"),
        ({"response_format": "text"}, "(response_format)"),
        ({"structured_outputs": {"regex": "a"}}, "(structured_outputs)"),
        ({"guided_json": {"type": "object"}}, "(guided_json)"),
        ({"guided_regex": "a"}, "(guided_regex)"),
        ({"guided_choice": ["a"]}, "(guided_choice)"),
        ({"guided_grammar": "a"}, "(guided_grammar)"),
        ({"tools": [{"type": "function"}]}, "(tools)"),
        ({"functions": [{"name": "f"}]}, "(functions)"),
        ({"stop": "x"}, "(stop)"),
        ({"stop": ["x"]}, "(stop)"),
        ({"bad_words": ["x"]}, "(bad_words)"),
        ({"echo": True}, "(echo)"),
        ({"suffix": "x"}, "(suffix)"),
        ({"prompt_logprobs": 0}, "(prompt_logprobs)"),
        ({"prompt_embeds": "x"}, "(prompt_embeds)"),
        ({"top_logprobs": 2}, "(top_logprobs)"),
        ({"length_penalty": 0.5}, "(length_penalty)"),
        ({"early_stopping": True}, "(early_stopping)"),
        ({"spaces_between_special_tokens": False}, "(spaces_between_special_tokens)"),
        (
            {"thinking_token_budget": 5},
            "does not know whether this field allows a split (thinking_token_budget)",
        ),
        ({"vllm_xargs": {"a": 1}}, "(vllm_xargs)"),
        ({"max_tokens": 1}, "fewer than two tokens"),
    ],
)
def test_what_may_not(fields: dict[str, Any], why: str) -> None:
    for path, body in ((CHAT, CHATTED), (COMPLETIONS, ASKED)):
        reason = split_ineligibility(path, body | fields, tokens=True)
        assert reason is not None
        assert why in reason


def test_what_depends_on_the_kind_of_request() -> None:
    assert split_ineligibility("/v1/responses", {"input": "a"}, tokens=True) == (
        "answers of /v1/responses cannot be merged"
    )
    assert split_ineligibility(COMPLETIONS, {"prompt": "a"}, tokens=True) is None
    assert "no limit" in str(split_ineligibility(CHAT, {"messages": CHATTED["messages"]}, tokens=True))
    assert split_ineligibility(COMPLETIONS, ASKED | {"logprobs": 3}, tokens=True) is None
    assert "(logprobs)" in str(split_ineligibility(CHAT, CHATTED | {"logprobs": True}, tokens=True))
    assert "several prompts" in str(
        split_ineligibility(COMPLETIONS, ASKED | {"prompt": ["a", "b"]}, tokens=True)
    )
    assert split_ineligibility(COMPLETIONS, ASKED | {"prompt": [["a"]]}, tokens=True) is None
    assert "token ids" in str(split_ineligibility(COMPLETIONS, ASKED, tokens=False))


def test_the_longest_answer() -> None:
    assert max_tokens(COMPLETIONS, {}) == 16
    assert max_tokens(COMPLETIONS, {"max_tokens": 3}) == 3
    assert max_tokens(CHAT, {}) is None
    assert max_tokens(CHAT, {"max_tokens": 3}) == 3
    assert max_tokens(CHAT, {"max_tokens": 3, "max_completion_tokens": 4}) == 4
