"""Migration of a running request to another engine, at its present token (STAR, section 5.4).

vLLM cannot transfer the KV cache of a running stream, so the target computes prompt and answer
again (`recompute`). It computes them ahead, while the source still runs: it gets a request for one
more token after prompt and answer so far. After its answer, its prefix cache holds all but the last
tokens, and the stream switches. Earlier failures cost nothing, because the source still runs. An
engine without a prefix cache computes everything in the gap.

Alternatively the target fetches the KV cache (`fetch`). Then the source also gets a request for one
more token, as a segment that allows fetches. It finds all tokens in its own prefix cache, so this
costs one step.
"""

from __future__ import annotations

from typing import Any, Literal

from lmetric.engines.handover import COMPLETIONS
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import ahead, dumps
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.rebalancer import Rebalancer, fetches

# The present wait of a migration; after the last wait it switches. "holding": for the source to
# prepare its KV cache. "warming": for the target to fetch or compute it.
Phase = Literal["holding", "warming"]


class Migration:
    """One migration of one request, until another engine continues the request, or it stays."""

    __slots__ = ("_p", "kv", "mover", "phase", "sent_tokens", "source", "target")

    def __init__(self, p: Progress, mover: Rebalancer, target: Engine) -> None:
        self._p = p
        self.mover = mover
        self.source = p.pool.engines.get(p.ticket.instance)
        self.target = target
        self.kv = KvTransfer(p.pool)
        self.phase: Phase = "warming"
        self.sent_tokens = 0  # tokens in the last request to source or target

    @property
    def ahead(self) -> bool:
        """Whether the target computes or fetches while the source still runs."""
        return self.target.capabilities.prefix_caching is not False

    @property
    def fetches(self) -> bool:
        """Whether the target can fetch from the source."""
        return self.mover.by != "recompute" and fetches(self.source, self.target)

    @property
    def recomputes(self) -> bool:
        """Whether the target computes everything at the start of its segment.

        Tokens computed ahead or fetched count as transferred.
        """
        return not self.ahead

    def gap_too_long(self) -> bool:
        """Returns whether the expected gap is too long. With work ahead, it never is."""
        if self.ahead:
            return False
        return self._p.pool.prefill_seconds(self.target, self._p.total) > self.mover.max_gap_seconds

    def hold(self) -> Step:
        """Returns the step in which the source prepares its KV cache for the target."""
        source = self.source
        assert source is not None
        assert source.connector is not None
        self.phase = "holding"
        self.kv.begin(source)
        self.sent_tokens = self._p.total
        return self._ask(source, source.connector.asks(None, goes_on=True, whole=True))

    def warm(self, now: float) -> Step:
        """Returns the step in which the target fetches or computes the tokens so far."""
        self.phase = "warming"
        fields = {}
        if self.target.connector is not None and self.kv.source is not None:
            fields = self.kv.take(self.target, now, goes_on=False, total=0)
        # Fetch only the tokens that the source has prepared: with one token more, the target dies.
        if not fields:
            self.sent_tokens = self._p.total
        return self._ask(self.target, fields)

    def _ask(self, engine: Engine, fields: Any) -> Step:
        p = self._p
        request = ahead(p.request, p.merged().tokens(self.sent_tokens))
        return Step(
            engine,
            dumps(request | fields),
            "whole",
            p.rules.timeouts.first_byte,
            target=COMPLETIONS.encode(),
            beside=True,
            for_client=False,
            advances_ticket=False,
            carries_kv=self.phase == "warming" and self.kv.used,
            kv_until=self.kv.until,
            refills=False,
        )

    def left_seconds(self, cached: int, seconds: float) -> float:
        """Returns the expected seconds of the target for the tokens that came since its step.

        The estimate scales the time of that step. Tokens beyond the step's computed tokens count at
        the measured prefill rate instead, because the step's time also contains its wait in the
        queue.

        Args:
            cached: tokens that the target's step found in its cache.
            seconds: duration of that step.
        """
        p, block = self._p, self._p.pool.block_size
        left = p.total - self.sent_tokens // block * block
        if self.kv.used:
            return p.pool.prefill_seconds(self.target, left)
        computed = max(self.sent_tokens - cached, block)
        more = p.pool.prefill_seconds(self.target, max(left - computed, 0))
        return min(left / computed, 1.0) * seconds + more
