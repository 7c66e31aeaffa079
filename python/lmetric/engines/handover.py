"""Carrying a request's KV cache from one engine to the next: what the two legs of a request are sent.

The first leg computes the prompt and answers nobody but the router; the second decodes, and its answer is the
client's. A connector knows one protocol between engines. A further one is a class here and a line in
`CONNECTORS`.
"""

from __future__ import annotations

import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson

from lmetric.engines.adapter import Handover

JSON = Mapping[str, Any]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Of the lease of an engine that does not tell it (vLLM's default is 30 s), so long is what it holds trusted.
DEFAULT_DEADLINE_SECONDS = 20.0
# Of a lease that is told, this share.
DEADLINE_SHARE = 2 / 3


class HandoverError(Exception):
    """Nothing can be handed over; says why. The next engine has to compute the prompt itself."""


class Connector(ABC):
    """One protocol for handing over a KV cache."""

    name: str  # in `Handover.connector` and in the configuration
    # Both legs are sent together, with the same body, so the second's engine must be known by then. Else the
    # second leg goes out when the first has answered.
    at_once: bool

    @abstractmethod
    def first(self, path: str, body: bytes, request: JSON, host: str, told: Handover) -> bytes:
        """The body of the first leg, of a client's ``body``, parsed as ``request``, for an engine at ``host``
        that told this of its hand-over. Raises HandoverError."""

    def fields(self, answer: bytes) -> JSON:
        """What the first leg's answer adds to the second's body. Raises HandoverError."""
        return {}

    def check_count(self, fields: JSON, tokens: int) -> None:
        """Raises HandoverError where what is handed over is not the cache of so many tokens."""
        raise HandoverError(f"{self.name} does not tell of how many tokens it hands the cache over")

    def asks(self, fields: JSON | None, *, goes_on: bool, whole: bool) -> JSON:
        """What a leg's body says: where it finds what was computed before (`fields`), whether that is its
        whole prompt, and whether another leg follows. Raises HandoverError where this protocol cannot."""
        raise HandoverError(f"{self.name} hands over at the prompt's end only")

    def deadline_seconds(self, told: Handover) -> float:
        """How long after the first leg's answer the second may be sent with these fields."""
        return math.inf


class Nixl(Connector):
    """vLLM's NIXL connector, in pull mode (tried on 0.32.0).

    The prefill engine pins the request's blocks for a lease and tells where they are; the decode engine pulls
    them. Three things must never happen, for vLLM does not defend itself: fields made by a client
    (`server/api/request.py` refuses them), fields used twice or after the lease (wrong text with status 200),
    and a second prompt longer than what was pinned (the decode engine dies).
    """

    name = "nixl"
    at_once = False

    def first(self, path: str, body: bytes, request: JSON, host: str, told: Handover) -> bytes:
        """The client's request cut to one token that nobody streams."""
        if why := whole_reason(path, request):
            raise HandoverError(why)
        leg = {name: value for name, value in request.items() if name not in _OF_THE_ANSWER}
        leg |= {"stream": False, "max_tokens": 1, "kv_transfer_params": _ASK}
        if path == CHAT:
            leg["max_completion_tokens"] = 1
        return orjson.dumps(leg)

    def fields(self, answer: bytes) -> JSON:
        """`kv_transfer_params` as the first leg's answer has it."""
        try:
            params = orjson.loads(answer)["kv_transfer_params"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            params = None
        if not isinstance(params, dict):
            raise HandoverError("the prefill answer has no kv_transfer_params")
        # Without one of these the decode engine dies, or waits for ever.
        missing = [name for name in _NEEDED if not params.get(name)]
        if missing:
            raise HandoverError(f"the prefill answer's kv_transfer_params have no {', '.join(missing)}")
        if params.get("transfer_mode", "pull") != "pull":
            raise HandoverError(
                f"transfer mode {params['transfer_mode']!r} is not supported; use NixlConnector"
            )
        return {"kv_transfer_params": params}

    def check_count(self, fields: JSON, tokens: int) -> None:
        """By `remote_num_tokens`: with one token too many the decode engine dies."""
        count = fields["kv_transfer_params"]["remote_num_tokens"]
        if count != tokens:
            raise HandoverError(f"the engine computed {count} tokens, not {tokens}")

    def asks(self, fields: JSON | None, *, goes_on: bool, whole: bool) -> JSON:
        """`kv_transfer_params`. A leg that fetches less than its prompt, or is fetched from in turn, needs
        the bidirectional mode: without it, it waits for ever."""
        if fields is None:
            return {"kv_transfer_params": _ASK} if goes_on else {}
        front = goes_on or not whole
        params = fields["kv_transfer_params"]
        return {"kv_transfer_params": params | {"do_remote_prefill": not front, "do_remote_decode": front}}

    def deadline_seconds(self, told: Handover) -> float:
        """Well under the lease, which began when the prefill engine wrote its answer."""
        lease = told.lease_seconds
        return DEFAULT_DEADLINE_SECONDS if lease is None else lease * DEADLINE_SHARE


class Bootstrap(Connector):
    """SGLang's bootstrap (read in 0.5.23, not tried): the same body to both engines at once.

    The room is where the two find each other. The prefill engine makes one token whatever it is asked for.
    With data-parallel ranks, the prefill engine by default (`--load-balance-method follow_bootstrap_room`)
    gives a request to the rank that is the room modulo the number of ranks, and fails one that a header sends
    to another rank. The decode engine looks for the prompt by the same rule. So the room follows the rank.
    """

    name = "bootstrap"
    at_once = True

    def first(self, path: str, body: bytes, request: JSON, host: str, told: Handover) -> bytes:
        """The client's body and a new room at the prefill engine."""
        if why := whole_reason(path, request):
            raise HandoverError(why)
        if told.bootstrap_port is None:
            raise HandoverError("the prefill engine does not tell its bootstrap port")
        number = secrets.randbits(62)
        if told.bootstrap_rank is not None:
            rank, ranks = told.bootstrap_rank
            number += rank - number % ranks
        room = {
            "bootstrap_host": host,
            "bootstrap_port": told.bootstrap_port,
            "bootstrap_room": number,
        }
        return with_fields(body, room)


CONNECTORS: Mapping[str, Connector] = {connector.name: connector for connector in (Nixl(), Bootstrap())}


_EMPTY = re.compile(rb"\s*\}")


def with_fields(body: bytes, fields: JSON) -> bytes:
    """A JSON object's bytes with more fields ahead of its own. It must have none of these."""
    start = body.index(b"{") + 1
    comma = b"" if _EMPTY.match(body, start) else b","
    return b"".join((body[:start], orjson.dumps(fields)[1:-1], comma, body[start:]))


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
# What only shapes the answer, which nobody reads, or cannot go with one token that is not streamed.
_OF_THE_ANSWER = frozenset(
    {
        "stream_options",
        "min_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
    }
)


def whole_reason(path: str, request: JSON) -> str | None:
    """Why a request cannot be cut at its prompt's end; None: it can."""
    if path not in (CHAT, COMPLETIONS):
        return f"{path} has no prompt to hand over"
    for name in ("n", "best_of"):
        if request.get(name) not in (None, 1):
            return f"{name} is {request[name]!r}: one prompt would be handed over to several answers"
    for name in ("use_beam_search", "prompt_logprobs", "prompt_embeds"):
        if request.get(name) not in (None, False):
            return f"{name} is set"
    prompt = request.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return "it has several prompts"
    return None
