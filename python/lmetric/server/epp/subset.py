"""The engines to which a gateway limits a request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lmetric._core import Request
from lmetric.server.api.errors import ApiError
from lmetric.server.epp import messages
from lmetric.server.epp.addresses import address_of
from lmetric.server.epp.ext_proc_pb2 import Metadata
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool

# The arguments of `Request`, in its order.
_REQUEST = (
    "token_ids", "text", "block_hashes", "prompt_tokens", "max_tokens", "session", "request_id", "lora_name",
    "cache_salt", "extra_tokens", "tenant", "tenant_weight", "handicap_seconds", "length_class",
    "reasoning_tokens", "allow_split", "split_reason", "allow_fetch", "fetch_reason", "priority", "instance",
    "session_final", "ttft_slo_seconds", "whole_answer",
)  # fmt: skip


class Subset:
    """The engines of a request's subset, by IP:PORT or IP."""

    def __init__(self, addresses: frozenset[str]) -> None:
        self._addresses = addresses

    @classmethod
    def of(cls, metadata: Metadata) -> Subset | None:
        """Returns the subset in a message; None: it has none. An empty list is a subset."""
        hint = metadata.filter_metadata
        if messages.SUBSET_HINT not in hint:
            return None
        fields = hint[messages.SUBSET_HINT].fields
        if messages.SUBSET not in fields:
            return None
        value = fields[messages.SUBSET]
        if value.HasField("list_value"):
            texts = [entry.string_value for entry in value.list_value.values]
        else:
            texts = value.string_value.split(",")
        return cls(frozenset(text.strip() for text in texts if text.strip()))

    def __contains__(self, engine: Engine) -> bool:
        address = address_of(engine)
        return address in self._addresses or address.rpartition(":")[0] in self._addresses

    def narrow(self, pool: Pool, asked: Request, now: float) -> Request:
        """Returns the request for the best engine of the subset, by the policy's scores.

        Raises ApiError (503) if no engine of the subset can accept it. ``now``: seconds on the
        monotonic clock.
        """
        if asked.instance is not None:
            if asked.instance in pool.engines and pool.engines[asked.instance] in self:
                return asked
            raise self._none(pool, "the engine of previous_response_id is not in it")
        if pool.disaggregates:
            raise self._none(pool, "it cannot limit a request with prefill/decode disaggregation")
        usable = [engine for engine in pool.engines.values() if engine.unusable is None]
        inside = {engine.name for engine in usable if engine in self}
        if len(inside) == len(usable):
            return asked
        if not inside:
            raise self._none(pool, "no engine in it can accept a request")
        scores = pool.router.score(asked, now=now)
        ranked = sorted(zip(scores, pool.router.instances(), strict=True), key=_nan_last)
        best = next(name for _, name in ranked if name in inside)
        values: list[Any] = [getattr(asked, name) for name in _REQUEST]
        values[_REQUEST.index("instance")] = best
        return Request(*values)

    def _none(self, pool: Pool, why: str) -> ApiError:
        return ApiError(
            503,
            f"{pool.name}: the gateway limits the request to a subset, and {why}",
            engines=", ".join(sorted(self._addresses)) or "the subset is empty",
            code="no_engine",
            headers={"retry-after": "2"},
        )


def _nan_last(entry: tuple[np.float64, str]) -> float:
    score = float(entry[0])
    return math.inf if math.isnan(score) else score
