"""The present problems of the router itself: what fails beside the engines, and moves of engines.

They stand in `/ready`, on the page at `/`, on the live page and in `top`. Each ends by itself when
its cause has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmetric.server.api.identity import Identity
from lmetric.server.discovery.follow import Discovery
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.problem import Problem, unix_of
from lmetric.server.observe.lateness import LATE_SECONDS, WINDOW_SECONDS, Lateness
from lmetric.server.observe.live import REFUSED, REFUSED_SECONDS, Live
from lmetric.server.observe.problems import FIXES, first_of, meaning_of

if TYPE_CHECKING:
    from lmetric.server.background.replicas import Replicas
    from lmetric.server.observe.recorder import Recorder
    from lmetric.server.tls.contexts import TlsContext

# A share of refusals is a problem above the bound of the alert LmetricRequestsRefused. With fewer
# requests, one client at its limit would be one.
REFUSED_SHARE = 0.05
REFUSED_LEAST = 20  # requests in `REFUSED_SECONDS`
# Of the last seconds: shorter than that, and a burst or a reload is enough.
LATE_SHARE = 0.5
# Of the time in which the event loop was late. With less, it waited for a CPU.
BUSY_SHARE = 0.5


@dataclass(slots=True)
class OwnProblems:
    """Finds the problems. Each part keeps its own state; this reads it.

    ``live``: the counts of refused requests, of all workers. None: `ui.enabled: false`, so nothing
    counts them.
    """

    fleet: Fleet
    replicas: Replicas | None
    discovery: Discovery
    certificates: Callable[[], Iterable[TlsContext]]
    identity: Callable[[], Identity]
    recorder: Recorder | None
    state_problem: Callable[[], Problem | None]
    live: Live | None
    lateness: Lateness
    clock: Callable[[], float] = time.monotonic

    def __call__(self) -> Iterator[Problem]:
        """Yields the present problems."""
        for certificate in self.certificates():
            yield from _of_certificate(certificate)
        if self.replicas is not None:
            yield from self.replicas.problems()
        for row in self.discovery.state():
            if row["problem"] is not None:
                cause = "a source of engines cannot be read; its last engines stay"
                reason = f"{row['source']}: {row['problem']}"
                fix = "correct what the reason names; the router reads the source again by itself"
                yield Problem("discovery", cause, reason, fix, since=row["problem_since"])
        for place, why, since in self.identity().problems():
            cause = "an issuer's keys cannot be read; its last keys stay in use"
            fix = "correct what the reason names; the router reads the keys again by itself"
            yield Problem("jwks", cause, f"{place}: {why}", fix, since=unix_of(since))
        failure = self.recorder.writer.failure if self.recorder is not None else None
        if failure is not None:
            reason = f"{failure.folder}: {failure.reason}"
            fix = f"{failure.fix}; traffic continues"
            yield Problem("records", "records cannot be written", reason, fix, since=failure.since)
        if (unsaved := self.state_problem()) is not None:
            yield unsaved
        for name, moved in self.fleet.moved.items():
            if moved.is_recent:
                cause = "the engine serves another model than before"
                reason = f"it serves {moved.serves}, no longer {moved.before!r}"
                fix = f"if that is not intended, start it with --served-model-name {moved.before}"
                yield Problem("other model", cause, reason, fix, [name], moved.at)
        yield from self.fleet.catalog.problems()
        for model in self.fleet.models:
            usual, others = model.weights.look()
            if others:
                cause = "engines of one model may have different weights: their names differ"
                different = first_of([*dict.fromkeys(others.values())])
                reason = f"{model.name}: {different} at them, {usual} at most engines"
                fix = (
                    "if these are different models, start them with different --served-model-name; if "
                    "not, give their folders one name"
                )
                yield Problem("maybe other weights", cause, reason, fix, [*others])
        if self.live is not None:
            yield from _of_refusals(self.live)
        now = self.clock()
        queues = [*self._of_queues(now)]
        yield from queues
        yield from self._of_lateness(now, queued=bool(queues))

    def _of_queues(self, now: float) -> Iterator[Problem]:
        """Yields the problem that all engines of a role have waiting requests for a while."""
        cause = "all engines of a model have waiting requests: more arrive than they serve"
        for model in self.fleet.models:
            for role, engines, waiting, since in model.queues.long(now):
                kind = "" if role == "both" else f"{role} "
                reason = f"{model.name}: {waiting} requests wait at all {engines} {kind}engines"
                if engines == 1:
                    reason = f"{model.name}: {waiting} requests wait at its only {kind}engine"
                ttft = None if self.live is None else self.live.ttft_p50(model.name, now)
                if ttft is not None:
                    reason += f"; TTFT p50 {ttft:.1f} s in the last minute"
                fix = "add engines"
                if model.settings.admission is None:
                    fix += ", or set admission.ttft_seconds: requests that would wait longer get a 429"
                yield Problem("queue", cause, reason, fix, since=unix_of(since))

    def _of_lateness(self, now: float, *, queued: bool) -> Iterator[Problem]:
        """``queued``: requests wait at engines, which costs more time than a late event loop."""
        late = self.lateness.recent(now) if self.live is None else self.live.late(now)
        if late.seconds <= LATE_SHARE * WINDOW_SECONDS:
            return
        cause = "the router's event loop is late: the router adds time to each request"
        window = f"{late.seconds:.0f} of the last {WINDOW_SECONDS:.0f} s"
        reason = f"late by over {LATE_SECONDS * 1000:g} ms for {window}"
        if late.busy < BUSY_SHARE:
            reason += "; other processes of this machine had the CPU"
            fix = "move the other processes to other machines, or reserve a CPU core for the router"
        else:
            reason += "; its CPU core was busy"
            workers = self.fleet.config.worker_count
            fix = f"raise workers (now {workers}), or start another router"
        if queued:
            fix = f"first add engines, because their queues cost more time; then {fix}"
        yield Problem("cpu", cause, reason, fix)


def _of_refusals(live: Live) -> Iterator[Problem]:
    """Yields the problem that the router refuses many requests.

    Engines refuse requests, too. The router's own refusals have a code with a fix.
    """
    requests, failed = live.counts(REFUSED_SECONDS)
    refused = Counter[str]()
    for (status, code), count in failed.items():
        if status in REFUSED and code in FIXES:
            refused[code] += count
    total = refused.total()
    if requests < REFUSED_LEAST or total <= REFUSED_SHARE * requests:
        return
    ((code, count),) = refused.most_common(1)
    cause = f"over {REFUSED_SHARE:.0%} of the requests in the last minute were refused"
    most = "all" if count == total else str(count)
    reason = f"{total} of {requests}, {most} of them with {code}: {meaning_of(code)}"
    yield Problem("refusals", cause, reason, FIXES[code], since=unix_of(live.refusing_since))


def _of_certificate(context: TlsContext) -> Iterator[Problem]:
    fix = "renew the files; the router reads them again by itself"
    if context.refused is not None:
        cause = "changed TLS files cannot be used; the old ones stay in use"
        yield Problem("certificate", cause, context.refused, fix)
    days = context.days_left()
    if context.expires_soon:
        cause = "a TLS certificate has expired" if days <= 0 else "a TLS certificate expires soon"
        verb = "expired" if days <= 0 else "expires"
        reason = f"{context.name}: {context.certificate} {verb} on {context.expiry_text()}"
        since = context.expires_at if days <= 0 else None
        yield Problem("certificate", cause, reason, fix, since=since, is_bad=days <= 0)
