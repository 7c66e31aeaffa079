"""Connectors: the protocols of KV transfers between engines.

To add one, write a class and add it to `CONNECTORS`. A router loads them when an engine reports its
KV transfers.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import orjson

from lmetric.engines.handover import ASK, JSON, FirstSegment, HandoverError, with_fields

if TYPE_CHECKING:
    from lmetric.engines.adapter import Handover

# Time limit of a transfer, seconds, for engines that report no lease (vLLM's default lease is 30
# s).
DEFAULT_DEADLINE_SECONDS = 20.0
# Time limit as a share of a reported lease.
DEADLINE_SHARE = 2 / 3


_NEEDED = (
    "do_remote_prefill",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
)


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
        if why := request.why_whole or request.why_whole_at_vllm:
            raise HandoverError(why)
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
            return {"kv_transfer_params": ASK} if goes_on else {}
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
