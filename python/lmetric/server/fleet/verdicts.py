"""One verdict per request: which engines its failures are blamed on, if any.

An engine that fails a request is blamed when another engine answers the request. A request that
fails in the same way on two engines is the suspect: no engine is blamed. Other failures have no
proof: `Outliers` counts few of them per client. Failures that need no second opinion (no
connection) are not held here; `Engine.failed` takes them.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model

# A second engine that produced this many tokens has answered where the first one failed.
PROGRESS_TOKENS = 16

log = structlog.get_logger("lmetric.relay")


class Failure(NamedTuple):
    """A failure of an engine that had accepted the request."""

    engine: Engine
    kind: str  # reset, timeout or status
    reason: str
    tokens: int  # of the answer, known by then


class Verdicts:
    """The failures of one request that are not judged yet."""

    __slots__ = ("_client", "_model", "failures")

    def __init__(self, model: Model, client: str) -> None:
        self._model = model
        self._client = client
        self.failures: list[Failure] = []

    def add(self, failure: Failure) -> None:
        """Adds a failure. Earlier ones are proven if the request has made progress since."""
        if self.failures and failure.tokens - self.failures[-1].tokens >= PROGRESS_TOKENS:
            self.blame(proven=True)
        self.failures.append(failure)

    @property
    def suspect(self) -> bool:
        """Whether two engines failed the request in the same way."""
        failures = self.failures
        return len({each.engine for each in failures}) > 1 and len({each.kind for each in failures}) == 1

    @property
    def final(self) -> bool:
        """Whether no third engine may be tried: two engines failed before any token.

        A stream that has tokens continues on further engines, since it was no poison so far.
        """
        return len(self.failures) > 1 and not self.failures[0].tokens

    def ended(self) -> None:
        """Judges the failures of a request that ended without an answer."""
        if self.suspect:
            reasons = "; ".join(f"{each.engine.name}: {each.reason}" for each in self.failures)
            log.debug("a request failed on two engines alike", model=self._model.name, reasons=reasons)
            self._model.suspect(reasons)
            self.failures = []
        else:
            self.blame(proven=False)

    def blame(self, *, proven: bool) -> None:
        """Blames the engines. `proven`: another one answered the request."""
        failures, self.failures = self.failures, []
        for each in failures:
            self._model.blame(each.engine, self._client, each.reason, proven=proven)
