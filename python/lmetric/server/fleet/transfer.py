"""KV transfer from one engine to the next: used once and in time, or the tokens are computed again.

vLLM holds a segment's KV cache for a lease. A later or second fetch gets the cache of another
prompt: the answer is wrong, with status 200.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import structlog

from lmetric.engines.handover import JSON, HandoverError, one_token
from lmetric.server.fleet.engine import Engine, blocks_differ

if TYPE_CHECKING:
    from lmetric.tokens.prompt import Tokens

log = structlog.get_logger("lmetric.transfer")

WHOLE_PROMPT = sys.maxsize  # `tokens` of a transfer of the whole prompt


class KvTransfer:
    """The KV transfer fields for the next step of a request.

    ``outcomes``: counts. ``handover_seconds``: its deadline; None: the connector's.
    """

    __slots__ = (
        "_deadline",
        "_fields",
        "_handover_seconds",
        "_model",
        "_outcomes",
        "_sent",
        "reason",
        "source",
        "tokens",
        "used",
    )

    def __init__(self, model: str, outcomes: Counter[str], handover_seconds: float | None = None) -> None:
        self._model = model
        self._outcomes = outcomes
        self._handover_seconds = handover_seconds
        self.reason = ""  # why tokens were computed again, the last time
        self.source: Engine | None = None  # the engine that holds the KV cache
        self.tokens = 0  # the transfer covers tokens up to this one
        self._fields: Any = None  # until they were sent
        self._deadline = math.inf
        self.used = False  # the last planned step carries the fields
        self._sent = False  # the last sent step carried the fields

    @property
    def available(self) -> bool:
        """Whether a KV cache is held and not fetched yet."""
        return self._fields is not None

    @property
    def until(self) -> float:
        """The deadline for sending the fields, seconds on the monotonic clock."""
        return self._deadline if self.used else math.inf

    def begin(self, engine: Engine) -> None:
        """Sets the engine that computes the KV cache, and drops an earlier transfer."""
        self.source, self._fields = engine, None
        self.used = self._sent = False

    def accept(self, engine: Engine, answer: bytes, *, tokens: int | None, now: float) -> None:
        """Stores the transfer fields of an answer.

        `tokens`: the expected token count; None: any.
        """
        connector, handover = engine.connector, engine.handover
        try:
            if connector is None or handover is None:
                raise HandoverError(f"{engine.name} has changed and no longer has a KV transfer")
            fields = connector.fields(answer)
            if tokens is not None:
                connector.check_count(fields, tokens)
        except HandoverError as error:
            self.recompute("missing", str(error))
            return
        self._fields = fields
        self._deadline = now + (self._handover_seconds or connector.deadline_seconds(handover))

    def take(self, engine: Engine, now: float, *, goes_on: bool, total: int) -> Any:
        """Returns the KV transfer fields for a step's body. Call it once for each step.

        `goes_on`: another engine will fetch from this one. `total`: tokens of the step's prompt.
        """
        connector, handover = engine.connector, engine.handover
        # The transfer covers this step's whole prompt, or a part of it.
        whole = self.tokens >= total
        if (goes_on or not whole) and not (handover is not None and handover.bidirectional):
            self.forget("not_cut", f"{engine.name} is not known to be in bidirectional mode")
        fields = self._take(engine, now)
        if connector is None:
            if not goes_on and self.tokens:
                self.recompute("no_connector", f"{engine.name} has no KV transfer")
            return {}
        try:
            return connector.asks(fields, goes_on=goes_on, whole=whole)
        except HandoverError as error:
            self.recompute("not_cut", str(error))
            return {}

    def _take(self, engine: Engine, now: float) -> Any:
        again = self._sent
        self.used = self._sent = False
        fields = self._fields
        if fields is None:
            if again:
                self.recompute("spent", "the transfer was sent to an engine that failed")
            return None
        source = self.source
        if engine is source:
            self.recompute("same_engine", "it has the tokens in its own cache")
        elif source is None or engine.connector is not source.connector:
            why = f"{engine.name} cannot fetch from {source and source.name}"
            self.recompute("other_connector", why)
        elif differ := blocks_differ(source, engine):
            self.recompute("other_blocks", differ)
        elif now > self._deadline:
            self.recompute("late", "the lease of the source engine has expired")
        else:
            self.used = True
            return fields
        self._fields = None
        return None

    def sent(self) -> None:
        """Records that the step with the fields was sent, and drops the fields.

        The source frees a fetched cache, so a second fetch would get other data.
        """
        self._fields, self._sent = None, True
        self._outcomes["transferred"] += 1

    def forget(self, outcome: str, reason: str) -> None:
        """Drops a stored transfer that cannot be used."""
        if self._fields is not None:
            self._fields = None
            self.recompute(outcome, reason)

    def broke(self, status: int, error_code: int | None) -> bool:
        """Returns whether an error answer means that the fetch failed.

        Then the step must be resent.
        """
        broke = self._sent and (status >= 500 or (error_code or 0) >= 500)
        if broke:
            self.useless("broken", f"status {status}, error {error_code}")
        return broke

    def stale(self, *, late: bool) -> None:
        """Records that the step must be resent without the fields.

        Either its connection was ready after their deadline (`late`), or the connection closed
        after the engine may have fetched.
        """
        if late:
            self._fields = None
            self.useless("late", "the lease had expired when the connection was ready")
        else:
            self.useless("spent", "the engine may have fetched before its connection closed")

    def useless(self, outcome: str, reason: str) -> None:
        """Records that the sent transfer cannot be used, so the step must be resent without it."""
        self.used = self._sent = False
        self.recompute(outcome, reason)

    def recompute(self, outcome: str, reason: str) -> None:
        """Counts that tokens are computed again."""
        self.reason = reason
        self._outcomes[outcome] += 1
        log.debug("tokens are computed again", model=self._model, why=outcome, reason=reason)


def serves(source: Engine, target: Engine) -> bool:
    """Whether an engine can fetch the KV cache of any tokens of another one, by their connector."""
    connector = target.connector
    return connector is not None and not connector.at_once and source.connector is connector


def fetches(source: Engine | None, target: Engine) -> bool:
    """Whether an engine can fetch the KV cache of a running request from another engine."""
    return source is not None and serves(source, target) and source.capabilities.prefix_caching is not False


def hold(kv: KvTransfer, holder: Engine, request: JSON, *, tokens: Tokens) -> bytes:
    """Returns the body with which an engine prepares the KV cache of tokens for another engine.

    It asks for one token after these tokens, as a segment that allows fetches. The engine finds
    them in its prefix cache, so this costs one step. `request`: the client's.
    """
    connector = holder.connector
    assert connector is not None
    kv.begin(holder)
    return one_token(request, tokens, connector.asks(None, goes_on=True, whole=True))
