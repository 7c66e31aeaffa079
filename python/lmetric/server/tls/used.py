"""The TLS contexts in use: those of engines, and the metrics of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.config import EngineTls

if TYPE_CHECKING:
    from lmetric.server.tls.contexts import TlsContext


class EngineContexts:
    """The contexts of connections to engines. Engines with equal settings share one."""

    def __init__(self) -> None:
        self._contexts: dict[str, TlsContext] = {}

    def get(self, settings: EngineTls | None) -> TlsContext:
        """Returns the context of these settings. Raises ConfigError."""
        settings = settings or EngineTls()
        key = settings.model_dump_json(exclude={"server_name"})
        known = self._contexts.get(key)
        if known is None:
            from lmetric.server.tls.contexts import outgoing_context

            known = self._contexts[key] = outgoing_context("tls of engines", settings)
        return known

    def keep(self, used: Iterable[TlsContext | None]) -> None:
        """Forgets all contexts but these."""
        kept = {id(each) for each in used}
        self._contexts = {key: each for key, each in self._contexts.items() if id(each) in kept}

    def __iter__(self) -> Iterator[TlsContext]:
        return iter(self._contexts.values())


def metrics(contexts: Iterable[TlsContext]) -> Iterator[Metric]:
    """Yields the metrics of contexts."""
    expires = GaugeMetricFamily(
        "lmetric_tls_certificate_expiry_timestamp_seconds",
        "When a certificate of the router expires, in seconds since 1970",
        labels=("file",),
    )
    failures = CounterMetricFamily(
        "lmetric_tls_reload_failures",
        "Changes of TLS files that could not be used; the old ones stayed in use",
    )
    count = 0
    seen: set[Path] = set()
    for each in contexts:
        count += each.failures
        if each.certificate is not None and each.certificate not in seen:
            seen.add(each.certificate)
            expires.add_metric((str(each.certificate),), each.expires_at)
    failures.add_metric((), count)
    yield from (expires, failures)
