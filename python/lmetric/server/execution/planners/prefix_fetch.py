"""Prefix fetch: an engine fetches the start of a prompt from an engine that has it cached.

Before the request starts, the holder gets a request for one token after whole blocks of the prompt.
It finds the blocks in its own prefix cache, so this costs one step. It transfers them like the
first engine of a split inside the prompt, and the request continues like after such a split. A
failure only costs time: the request is sent unchanged, and its engine computes the prompt.
"""

from __future__ import annotations

from math import inf

from lmetric.engines.handover import COMPLETIONS
from lmetric.server.execution.plan import Step
from lmetric.server.execution.progress import Progress
from lmetric.server.execution.transcript import ahead, dumps
from lmetric.server.execution.transfer import KvTransfer
from lmetric.server.fleet.engine import Engine, blocks_differ

LEAST_SECONDS = 0.02  # shortest wait for a holder, even if computing is faster


class PrefixFetch:
    """One fetch for one request, until the holder's answer or the end of the wait."""

    __slots__ = ("began", "from_token", "holder", "kv", "target", "tokens")

    def __init__(self, p: Progress, target: Engine, now: float) -> None:
        planned = p.ticket.fetch
        assert planned is not None  # the ticket plans a fetch
        name, self.from_token, to_token = planned
        self.target = target
        self.holder = p.pool.engines.get(name)
        self.tokens = to_token - to_token % p.pool.block_size  # holders have only whole blocks
        self.kv = KvTransfer(p.pool)
        self.began = now

    def why_not(self) -> str | None:
        """Returns the outcome if the holder cannot be asked, else None."""
        holder, connector = self.holder, self.target.connector
        if holder is None or not holder.in_service:
            return "holder_gone"
        if connector is None or connector.at_once or holder.connector is not connector:
            return "no_connector"
        if blocks_differ(holder, self.target):
            return "other_blocks"
        return "no_block" if self.tokens <= self.from_token else None

    def step(self, p: Progress) -> Step:
        """Returns the step for the holder."""
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
        """Returns the longest wait for the holder, in seconds."""
        given = p.pool.settings.prefix_fetch_timeout_seconds
        if given is not None:
            return given
        return max(p.pool.prefill_seconds(self.target, self.tokens - self.from_token), LEAST_SECONDS)
