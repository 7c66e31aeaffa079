"""Prefix fetch: the front of a prompt is fetched, before its request begins, from the engine that holds it.

The holder is asked for one token behind whole blocks of the prompt. It finds them in its own prefix cache, so
that costs a step, and hands them over as the first engine of a cut inside the prompt would; the request then
goes on as behind such a cut. Whatever goes wrong costs the time until then: the request is sent as it came,
and its engine computes.
"""

from __future__ import annotations

from math import inf

from lmetric.engines.handover import COMPLETIONS
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import ahead, dumps
from lmetric.server.execution.transfer import KvTransfer, blocks_differ
from lmetric.server.fleet.engine import Engine

LEAST_SECONDS = 0.02  # that a holder is waited for, however fast computing is


class PrefixFetch:
    """One fetch for one request, until the holder has answered, or is waited for no more."""

    __slots__ = ("began", "from_token", "holder", "kv", "target", "tokens")

    def __init__(self, p: Progress, target: Engine, now: float) -> None:
        pull = p.ticket.fetch
        assert pull is not None  # else nothing is to be fetched
        name, self.from_token, to_token = pull
        self.target = target
        self.holder = p.pool.engines.get(name)
        self.tokens = to_token - to_token % p.pool.block_size  # what a holder has, it has in whole blocks
        self.kv = KvTransfer(p.pool)
        self.began = now

    def why_not(self) -> str | None:
        """Why the holder cannot be asked."""
        holder, connector = self.holder, self.target.connector
        if holder is None or not holder.healthy:
            return "holder_gone"
        if connector is None or connector.at_once or holder.connector is not connector:
            return "no_connector"
        if blocks_differ(holder, self.target):
            return "other_blocks"
        return "no_block" if self.tokens <= self.from_token else None

    def step(self, p: Progress) -> Step:
        """What the holder is asked."""
        holder = self.holder
        assert holder is not None
        assert holder.connector is not None
        self.kv.begin(holder)
        fields = holder.connector.asks(None, goes_on=True, whole=True)
        body = dumps({**ahead(p.request, p.prompt[: self.tokens]), **fields})
        return Step(
            holder,
            body,
            "whole",
            inf,  # `patience_seconds` ends it
            target=COMPLETIONS.encode(),
            beside=True,
            for_client=False,
            advances_ticket=False,
            refills=False,
        )

    def patience_seconds(self, p: Progress) -> float:
        """That the holder is waited for."""
        given = p.pool.settings.prefix_fetch_timeout_seconds
        if given is not None:
            return given
        return max(p.pool.prefill_seconds(self.target, self.tokens - self.from_token), LEAST_SECONDS)
