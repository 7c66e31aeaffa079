"""KV transfers between engines: the request bodies of the two segments of a request.

The first segment computes the prompt, and only the router gets its answer. The second segment
decodes, and the client gets its answer. A connector implements one protocol between engines. To add
one, write a class and add it to `CONNECTORS`.
"""

from __future__ import annotations

import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from lmetric._core import edit_object, outline
from lmetric.engines.adapter import Handover

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

JSON = Mapping[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Time limit of a transfer, seconds, for engines that report no lease (vLLM's default lease is 30
# s).
DEFAULT_DEADLINE_SECONDS = 20.0
# Time limit as a share of a reported lease.
DEADLINE_SHARE = 2 / 3


class HandoverError(Exception):
    """The KV transfer is not possible; the message has the reason. The next engine computes the
    prompt."""


class FirstSegment:
    """A client's request, for the first of two segments.

    Its work on a large body takes up to 4 ns for each byte, so a thread does it. ``why_whole``: the
    reason why the request cannot be split after its prompt; None if it can.
    """

    __slots__ = ("_for_one_token", "_path", "body", "why_whole")

    def __init__(self, path: str, body: bytes) -> None:
        self.body = body
        self._path = path
        self._for_one_token: bytes | None = None
        try:
            self.why_whole = whole_reason(path, orjson.loads(outline(body, _SHORT_VALUE)))
        except orjson.JSONDecodeError as error:  # the reader in Rust allows more
            self.why_whole = f"its body cannot be parsed: {error}"

    def add(self, fields: JSON) -> None:
        """Adds fields, which the body must not have."""
        self.body = with_fields(self.body, fields)
        if self._for_one_token is not None:
            self._for_one_token = with_fields(self._for_one_token, fields)

    def for_one_token(self) -> bytes:
        """Returns the request with one output token and without streaming."""
        if self._for_one_token is None:
            fields = {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK}
            if self._path == CHAT:
                fields["max_completion_tokens"] = 1
            self._for_one_token = edit_object(self.body, _REPLACED, orjson.dumps(fields)[1:-1])
        return self._for_one_token


class Connector(ABC):
    """A protocol for KV transfers."""

    name: str  # in `Handover.connector` and in the configuration
    # True: both segments are sent together with the same body, so the second engine must be known.
    # False: the second segment is sent after the answer of the first.
    at_once: bool
    # True: an engine serves a role only if it was started for it.
    needs_started_role = True

    @abstractmethod
    def first(self, request: FirstSegment, host: str, told: Handover) -> bytes:
        """The body of the first segment.

        The engine at ``host`` reported ``told`` about its KV transfers. Raises HandoverError.
        """

    def fields(self, answer: bytes) -> JSON:
        """The fields from the first segment's answer for the second body. Raises HandoverError."""
        return {}

    def check_count(self, fields: JSON, tokens: int) -> None:
        """Raises HandoverError if the transferred KV cache does not have this number of tokens."""
        raise HandoverError(f"{self.name} does not report how many tokens it transfers")

    def asks(self, fields: JSON | None, *, goes_on: bool, whole: bool) -> JSON:
        """The transfer fields of a segment's body.

        Args:
            fields: the location of the KV computed before; None: none.
            goes_on: another segment follows.
            whole: `fields` covers the whole prompt.

        Raises:
            HandoverError: the protocol does not support it.
        """
        raise HandoverError(f"{self.name} transfers the KV cache only at the end of the prompt")

    def deadline_seconds(self, told: Handover) -> float:
        """Maximum time from the first segment's answer to the second request with these fields."""
        return math.inf


class Nixl(Connector):
    """vLLM's NIXL connector, in pull mode (tested with 0.32.0).

    The prefill engine pins the request's blocks for a lease and reports their location. The decode
    engine fetches them. vLLM does not check three errors, which the router must prevent:

    - fields from a client (`server/api/request.py` refuses them),
    - fields used twice or after the lease (wrong text with status 200),
    - a second prompt longer than the pinned blocks (the decode engine crashes).
    """

    name = "nixl"
    at_once = False

    def first(self, request: FirstSegment, host: str, told: Handover) -> bytes:
        """The client's request with one output token and without streaming."""
        if request.why_whole:
            raise HandoverError(request.why_whole)
        return request.for_one_token()

    def fields(self, answer: bytes) -> JSON:
        """`kv_transfer_params` from the first segment's answer."""
        try:
            params = orjson.loads(answer)["kv_transfer_params"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            params = None
        if not isinstance(params, dict):
            raise HandoverError("the prefill answer has no kv_transfer_params")
        # Without one of these fields the decode engine crashes or waits forever.
        missing = [name for name in _NEEDED if not params.get(name)]
        if missing:
            raise HandoverError(f"the prefill answer's kv_transfer_params have no {', '.join(missing)}")
        if params.get("transfer_mode", "pull") != "pull":
            raise HandoverError(
                f"transfer mode {params['transfer_mode']!r} is not supported; use NixlConnector"
            )
        return {"kv_transfer_params": params}

    def check_count(self, fields: JSON, tokens: int) -> None:
        """Checks `remote_num_tokens`: with one token too many the decode engine crashes."""
        count = fields["kv_transfer_params"]["remote_num_tokens"]
        if count != tokens:
            raise HandoverError(f"the engine computed {count} tokens, not {tokens}")

    def asks(self, fields: JSON | None, *, goes_on: bool, whole: bool) -> JSON:
        """`kv_transfer_params` of a segment.

        A segment needs the bidirectional mode if it fetches only a part of its prompt, or if
        another segment fetches from it. Without this mode it waits forever.
        """
        if fields is None:
            return {"kv_transfer_params": _ASK} if goes_on else {}
        front = goes_on or not whole
        params = fields["kv_transfer_params"]
        return {"kv_transfer_params": params | {"do_remote_prefill": not front, "do_remote_decode": front}}

    def deadline_seconds(self, told: Handover) -> float:
        """A time well below the lease, which starts with the prefill engine's answer."""
        lease = told.lease_seconds
        return DEFAULT_DEADLINE_SECONDS if lease is None else lease * DEADLINE_SHARE


class Bootstrap(Connector):
    """SGLang's bootstrap (from the sources of 0.5.23, not tested): both engines get the same body.

    The engines meet by the room number. The prefill engine always produces one token. With
    data-parallel ranks, the prefill engine by default assigns a request to the rank that is the
    room modulo the number of ranks (`--load-balance-method follow_bootstrap_room`). It fails a
    request that a header sends to another rank. The decode engine looks for the prompt by the same
    rule. So the room follows the rank.
    """

    name = "bootstrap"
    at_once = True

    def first(self, request: FirstSegment, host: str, told: Handover) -> bytes:
        """The client's body with a new room at the prefill engine."""
        if request.why_whole:
            raise HandoverError(request.why_whole)
        if told.bootstrap_port is None:
            raise HandoverError("the prefill engine does not report its bootstrap port")
        number = secrets.randbits(62)
        if told.bootstrap_rank is not None:
            rank, ranks = told.bootstrap_rank
            number += rank - number % ranks
        room = {
            "bootstrap_host": host,
            "bootstrap_port": told.bootstrap_port,
            "bootstrap_room": number,
        }
        return with_fields(request.body, room)


class Sidecar(Connector):
    """llm-d's sidecar beside the decode engine: it sends the prefill and the KV transfer's fields.

    The endpoint picker names both engines. The router itself sends no request.
    """

    name = "sidecar"
    at_once = True
    needs_started_role = False

    def first(self, request: FirstSegment, host: str, told: Handover) -> bytes:
        """The client's body."""
        return request.body


CONNECTORS: Mapping[str, Connector] = {
    connector.name: connector for connector in (Nixl(), Bootstrap(), Sidecar())
}


_EMPTY = re.compile(rb"\s*\}")


def with_fields(body: bytes, fields: JSON) -> bytes:
    """A JSON object's bytes with additional fields in front. The object must have none of them."""
    start = body.index(b"{") + 1
    comma = b"" if _EMPTY.match(body, start) else b","
    # A view: a large body is copied once.
    return b"".join((body[:start], orjson.dumps(fields)[1:-1], comma, memoryview(body)[start:]))


_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NEEDED = (
    "do_remote_prefill",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
)
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


def _prompt_logprobs(path: str, request: JSON) -> str | None:
    """The field that requests log probabilities of the prompt; None: no field does."""
    if request.get("prompt_logprobs") is not None:  # 0 requests those of the prompt's own tokens
        return "prompt_logprobs"
    # vLLM adds them to a chat with `echo` in any case.
    return "echo" if request.get("echo") and (path == CHAT or request.get("logprobs") is not None) else None


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
    if (field := _prompt_logprobs(path, request)) is not None:
        return f"{field} is set: an engine computes the whole prompt for its log probabilities"
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return "it has several prompts"
    return None
