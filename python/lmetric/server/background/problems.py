"""The present problems of the router itself: what fails beside the engines, and moves of engines.

They stand in `/ready`, on the page at `/`, on the live page and in `top`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lmetric.server.background.replicas import Replicas
from lmetric.server.discovery import Discovery
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.problem import Problem
from lmetric.server.observe.recorder import Recorder
from lmetric.server.tls.contexts import WARN_DAYS, TlsContext

# A move to another model is shown as long: whoever is called when latencies rise still sees it,
# and an upgrade to another model does not stay a problem.
MOVED_SECONDS = 3600.0


@dataclass(slots=True)
class OwnProblems:
    """Finds the problems. Each part keeps its own state; this reads it."""

    fleet: Fleet
    replicas: Replicas
    discovery: Discovery
    certificates: Callable[[], Iterable[TlsContext]]
    recorder: Recorder | None

    def __call__(self) -> Iterator[Problem]:
        """Yields the present problems."""
        now = time.time()
        for certificate in self.certificates():
            yield from _of_certificate(certificate)
        yield from self._of_replicas()
        for row in self.discovery.state():
            if row["problem"] is not None:
                cause = "a source of engines cannot be read; its last engines stay"
                yield Problem("discovery", cause, f"{row['source']}: {row['problem']}", None)
        failure = self.recorder.writer.failure if self.recorder is not None else None
        if failure is not None:
            reason = f"{failure.folder}: {failure.reason}"
            fix = "free space there, or set records.path or records.total_bytes; traffic continues"
            yield Problem("records", "records cannot be written", reason, fix, since=failure.since)
        for name, moved in self.fleet.moved.items():
            if now - moved.at < MOVED_SECONDS:
                cause = "the engine serves another model than before"
                reason = f"it serves {moved.serves}, no longer {moved.before!r}"
                fix = f"if that is not intended, start it with --served-model-name {moved.before}"
                yield Problem("other model", cause, reason, fix, [name], moved.at)

    def _of_replicas(self) -> Iterator[Problem]:
        fix = "start that router, or take it out of replicas.urls; its load does not count meanwhile"
        for url, reason in self.replicas.not_found.items():
            yield Problem("replica", "the address of other routers is not found", f"{url}: {reason}", fix)
        for address in self.replicas.addresses.values():
            if address.reached is False and not address.own:
                cause, reason = "another router cannot be reached", f"{address.place}: {address.error}"
                yield Problem("replica", cause, reason, fix, since=address.lost_at)


def _of_certificate(context: TlsContext) -> Iterator[Problem]:
    fix = "renew the files; the router reads them again by itself"
    if context.refused is not None:
        cause = "changed TLS files cannot be used; the old ones stay in use"
        yield Problem("certificate", cause, context.refused, fix)
    days = context.days_left()
    if days < WARN_DAYS:
        cause = "a TLS certificate has expired" if days <= 0 else "a TLS certificate expires soon"
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(context.expires_at))
        reason = f"{context.name}: {context.certificate} expires on {when}"
        yield Problem("certificate", cause, reason, fix, is_bad=days <= 0)
