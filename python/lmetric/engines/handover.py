"""KV transfers between engines: the request bodies of the two segments of a request.

The first segment computes the prompt, and only the router gets its answer. The second segment
decodes, and the client gets its answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from lmetric._core import edit_object, outline

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

JSON = Mapping[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class HandoverError(Exception):
    """The KV transfer is not possible; the message has the reason. The next engine computes the
    prompt."""


class FirstSegment:
    """A client's request, for the first of two segments.

    Its work on a large body takes up to 4 ns for each byte, so a thread does it. ``why_whole``: the
    reason why the request cannot be split after its prompt; None if it can. ``why_whole_at_vllm``:
    the reason for vLLM's engines only.
    """

    __slots__ = ("_for_one_token", "_path", "body", "why_whole", "why_whole_at_vllm")

    def __init__(self, path: str, body: bytes) -> None:
        self.body = body
        self._path = path
        self._for_one_token: bytes | None = None
        self.why_whole_at_vllm: str | None = None
        try:
            request = orjson.loads(outline(body, _SHORT_VALUE))
        except orjson.JSONDecodeError as error:  # the reader in Rust allows more
            self.why_whole: str | None = f"its body cannot be parsed: {error}"
        else:
            self.why_whole = whole_reason(path, request)
            self.why_whole_at_vllm = prompt_logprobs_reason(path, request)

    def add(self, fields: JSON) -> None:
        """Adds fields, which the body must not have."""
        self.body = with_fields(self.body, fields)
        if self._for_one_token is not None:
            self._for_one_token = with_fields(self._for_one_token, fields)

    def for_one_token(self) -> bytes:
        """Returns the request with one output token and without streaming."""
        if self._for_one_token is None:
            fields = {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK}
            if self._path == CHAT:
                fields["max_completion_tokens"] = 1
            self._for_one_token = edit_object(self.body, _REPLACED, orjson.dumps(fields)[1:-1])
        return self._for_one_token


_EMPTY = re.compile(rb"\s*\}")


def with_fields(body: bytes, fields: JSON) -> bytes:
    """A JSON object's bytes with additional fields in front. The object must have none of them."""
    start = body.index(b"{") + 1
    comma = b"" if _EMPTY.match(body, start) else b","
    # A view: a large body is copied once.
    return b"".join((body[:start], orjson.dumps(fields)[1:-1], comma, memoryview(body)[start:]))


ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields that only affect the unused answer, or are invalid for one token without streaming.
_OF_THE_ANSWER = frozenset(
    {
        "stream_options",
        "min_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",  # vLLM refuses it without `logprobs`
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
    }
)
_REPLACED = (*sorted(_OF_THE_ANSWER), "stream", "max_tokens", "kv_transfer_params")
# Bytes of values that `whole_reason` may look into.
_SHORT_VALUE = 4096


# Fields of the client's request that go with a segment sent as token IDs.
_OF_TOKEN_IDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "return_tokens_as_token_ids"),
    *("priority", "cache_salt", "user", "session_id"),
)


def for_token_ids(request: JSON) -> dict[str, Any]:
    """The fields of a client's request that go with a prompt of token ids."""
    return {name: request[name] for name in _OF_TOKEN_IDS if request.get(name) is not None}


def one_token(request: JSON, prompt: ArrayLike, fields: JSON) -> bytes:
    """The body of a request to /v1/completions for one token after this prompt.

    The engine computes the prompt, or finds it in its cache. ``fields``: of the KV transfer.
    """
    asked = {"prompt": prompt, "max_tokens": 1, "stream": False}
    return dumps({**for_token_ids(request), **asked, **fields})


def dumps(body: JSON) -> bytes:
    """A segment's body as JSON. Its prompt may be an array of token ids."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def whole_reason(path: str, request: JSON) -> str | None:
    """The reason why a request cannot be split after its prompt; None if it can."""
    if path not in (CHAT, COMPLETIONS):
        return f"{path} has no prompt for a KV transfer"
    for name in ("n", "best_of"):
        if request.get(name) not in (None, 1):
            return f"{name} is {request[name]!r}: a KV transfer serves one answer per prompt"
    for name in ("use_beam_search", "prompt_embeds"):
        if request.get(name) not in (None, False):
            return f"{name} is set"
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return "it has several prompts"
    return None


def prompt_logprobs_reason(path: str, request: JSON) -> str | None:
    """The reason why vLLM would not use a transferred cache: log probabilities of the prompt."""
    if request.get("prompt_logprobs") is not None:  # 0 requests those of the prompt's own tokens
        field = "prompt_logprobs"
    # vLLM adds them to a chat with `echo` in any case.
    elif request.get("echo") and (path == CHAT or request.get("logprobs") is not None):
        field = "echo"
    else:
        return None
    return f"{field} is set: an engine computes the whole prompt for its log probabilities"
