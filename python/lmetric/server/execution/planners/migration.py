"""Migration of a running request (STAR, section 5.4): it is closed at the token it is at, and goes on at
another engine.

vLLM hands nothing over of a stream, so the target computes prompt and answer again (`recompute`). It does so
ahead: it is asked for one token behind what there is, while the source runs on. When it has said it, its
prefix cache holds all but the last tokens, and only then the stream changes over. What fails before that
costs nothing: the source still runs. An engine without a prefix cache computes all of it in the gap.

Nor need the stream be what hands over (`pull`): the source is asked for one token behind what there is, too,
as a segment that is to be fetched from. It finds all of it in its own prefix cache, so that costs a step, and
the target fetches instead of computing.

A request that runs in slices (`sliced`) moves between two of them: nothing runs then, so what the source
hands over is all there is, and the target's first slice fetches it.
"""

from __future__ import annotations

from typing import Any, Literal

from lmetric.engines.handover import COMPLETIONS
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import ahead, dumps
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.rebalancer import Rebalancer

# What a migration waits for; when there is nothing left to wait for, it changes over: the end of a slice, the
# source, which is to hold what there is, or the target, which is to fetch or compute it.
Phase = Literal["slice_end", "holding", "warming"]


class Migration:
    """One migration of one request, until another engine goes on with it, or it stays."""

    __slots__ = ("_p", "kv", "mover", "phase", "sent_tokens", "source", "target")

    def __init__(self, p: Progress, mover: Rebalancer, target: Engine) -> None:
        self._p = p
        self.mover = mover
        self.source = p.pool.engines.get(p.ticket.instance)
        self.target = target
        self.kv = KvTransfer(p.pool)
        self.phase: Phase = "slice_end"
        self.sent_tokens = 0  # what was asked for is of so many

    @property
    def ahead(self) -> bool:
        """Whether the target computes, or fetches, while the source still runs."""
        return self.target.capabilities.prefix_caching is not False and not self._p.in_slices

    @property
    def fetches(self) -> bool:
        """Whether the target can fetch from the source."""
        source, connector = self.source, self.target.connector
        if self.mover.by == "recompute" or source is None or connector is None or connector.at_once:
            return False
        return source.connector is connector and source.capabilities.prefix_caching is not False

    @property
    def recomputes(self) -> bool:
        """Whether the target computes all of it when its segment begins. What is computed ahead, or fetched,
        is there then, as if it had been sent."""
        return not (self.ahead or (self._p.in_slices and self.fetches))

    def gap_too_long(self) -> bool:
        """Whether the client is expected to wait too long, where nothing is done ahead."""
        if self.ahead:
            return False
        fetches = self._p.in_slices and self.fetches
        seconds = self.mover.fetch_seconds if fetches else self._p.pool.prefill_seconds
        return seconds(self.target, self._p.total) > self.mover.max_gap_seconds

    def hold(self) -> Step:
        """Has the source hold for the target what there is so far."""
        source = self.source
        assert source is not None
        assert source.connector is not None
        self.phase = "holding"
        self.kv.begin(source)
        self.sent_tokens = self._p.total
        return self._ask(source, source.connector.asks(None, goes_on=True, whole=True))

    def warm(self, now: float) -> Step:
        """Has the target fetch that, or compute it."""
        self.phase = "warming"
        fields = {}
        if self.target.connector is not None and self.kv.source is not None:
            fields = self.kv.take(self.target, now, goes_on=False, total=0)
        # What the source holds is all that may be fetched: one token more, and the target dies.
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
        """That the target will take for what was said since, going by what it took for the rest. More than it
        computed then is not as slow as that, for its queue was in those seconds, too."""
        p, block = self._p, self._p.pool.block_size
        left = p.total - self.sent_tokens // block * block
        if self.kv.used:
            self.mover.fetched(self.sent_tokens, seconds)
            return p.pool.prefill_seconds(self.target, left)
        computed = max(self.sent_tokens - cached, block)
        more = p.pool.prefill_seconds(self.target, max(left - computed, 0))
        return min(left / computed, 1.0) * seconds + more

    def held_in_time(self) -> bool:
        """Whether, between two slices, the target can go on soon enough with what the source holds."""
        seconds = self._p.pool.prefill_seconds(self.target, self.sent_tokens)
        return self.kv.available or seconds <= self.mover.max_gap_seconds
