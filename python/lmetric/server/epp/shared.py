"""The part of the picker that all streams of gateways use: fleet, counts and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lmetric._core import Peer
from lmetric.server.api.errors import ApiError
from lmetric.server.api.paths import stored_response
from lmetric.server.epp.ext_proc_pb2 import HeaderMap
from lmetric.server.epp.request_fields import RequestFields
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.runner import RequestRunner
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.subset import address_of
from lmetric.server.http.frontend import Frontend
from lmetric.server.observe.histograms import SHORT_SECONDS, Histogram

_MODELS = "/v1/models"


class Shared:
    """The fleet, counts and metrics of all streams of gateways.

    ``counts``: requests by outcome: picked or refused. ``fallbacks``: requests that another engine
    of the list answered.
    """

    def __init__(self, front: Frontend) -> None:
        self.front = front
        self.streams = 0
        self.counts: Counter[str] = Counter()
        self.decision_seconds = Histogram(SHORT_SECONDS)
        self._peers: dict[str, Peer] = {}

    def peer(self, name: str) -> Peer:
        """Returns a gateway. ``name``: its address, as gRPC writes it."""
        kind, _, rest = name.partition(":")
        host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
        host = host if kind in ("ipv4", "ipv6") else ""
        peer = self._peers.get(host)
        if peer is None:
            peer = Peer(host, False, True)
            if len(self._peers) < 1024:
                self._peers[host] = peer
        return peer

    def read_fields(self, headers: HeaderMap, gateway: str) -> RequestFields:
        """Returns the fields of a request's head. ``gateway``: the address of its gateway."""
        front = self.front
        is_trusted = front.entrance.forwarding.trusts(gateway)
        return RequestFields(headers, front.fleet.objectives, self._is_class, is_trusted=is_trusted)

    def _is_class(self, name: str) -> bool:
        return any(name in model.held.classes for model in self.front.fleet.models)

    def path_error(self, method: str, path: str) -> ApiError | None:
        """Returns the error of a request that is for no engine; None: it is for one."""
        stored = stored_response(path)
        methods = ("POST",) if path in self.front.arrivals.paths else stored.methods if stored else ()
        if path == _MODELS:
            methods = ("GET",)
        if not methods:
            hint = "; add it to paths in the configuration" if method == "POST" else ""
            return ApiError(404, f"unknown path {path}{hint}", code="unknown_path")
        if method not in methods:
            allowed = {"allow": ", ".join(methods)}
            return ApiError(405, f"{method} is not allowed on {path}; use {methods[0]}", headers=allowed)
        return None

    def route(self, request: ClientRequest, body: bytes, fields: RequestFields) -> None:
        """Routes or refuses a whole request."""
        request.sheddable = fields.priority < 0
        stored = stored_response(fields.path)
        if fields.path in self.front.arrivals.paths:
            self.front.entrance.serve(request, body)
        elif stored is not None:
            self.front.stored.serve(request, stored, fields.method)
        else:
            models = self.front.fleet.catalog.page(request.caller)
            request.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + models)

    def address(self, engine: Engine) -> str:
        """Returns IP:PORT of an engine."""
        return address_of(engine)

    def endpoints(self, engine: Engine, relay: InFlightRequest | None) -> list[str]:
        """Returns IP:PORT of the chosen engine, and of the next ones that may replace it."""
        found = [address_of(engine)]
        more = self.front.config.epp.fallbacks
        if not more or not isinstance(relay, RequestRunner):
            return found
        execution = relay.execution
        if execution.model.disaggregates:
            return found
        engines = execution.model.engines
        for name in execution.decision.ranking():
            other = engines.get(name)
            if len(found) > more:
                break
            if other is not None and other is not engine and other.unusable is None:
                found.append(address_of(other))
        return found

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the picker."""
        yield GaugeMetricFamily("lmetric_epp_streams", "Requests of gateways in flight", self.streams)
        counter = CounterMetricFamily(
            "lmetric_epp_requests",
            "Requests of gateways by outcome: picked, refused (answered by the router), or fallbacks "
            "(also picked; the gateway's second engine answered)",
            labels=("outcome",),
        )
        for outcome in ("picked", "refused", "fallbacks"):
            counter.add_metric((outcome,), self.counts[outcome])
        yield counter
        seconds = self.decision_seconds
        histogram = HistogramMetricFamily(
            "lmetric_epp_decision_seconds", "Time from the end of a gateway's request to its pick or refusal"
        )
        histogram.add_metric((), seconds.buckets(), seconds.sum)
        yield histogram
