"""The part of the picker that all streams of gateways use: fleet, counts and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lmetric._core import Peer
from lmetric.server.api.errors import ApiError
from lmetric.server.api.paths import stored_response
from lmetric.server.epp.ext_proc_pb2 import HeaderMap
from lmetric.server.epp.request_fields import AnsweringEngine, RequestFields
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.plan import OtherEngine
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.engine_addresses import address_of, shortest
from lmetric.server.http.frontend import Frontend
from lmetric.server.observe.histograms import SHORT_SECONDS, Histogram

_MODELS = "/v1/models"

log = structlog.get_logger("lmetric.epp")


class Shared:
    """The fleet, counts and metrics of all streams of gateways.

    ``counts``: requests by outcome: picked or refused. Picked requests that the first pick did not
    answer count again, by the engine that did. ``fallbacks``: a replacement in the list.
    ``not_followed``: another engine of the model. ``unknown``: no engine of the router.
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
        request.gateway_model = fields.model
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

    def endpoints(self, engine: Engine, relay: InFlightRequest | None) -> dict[str, Engine]:
        """Returns the chosen engine and the next ones that may replace it, by IP:PORT."""
        found = {address_of(engine): engine}
        more = self.front.config.epp.fallbacks
        if not more or not isinstance(relay, Progress) or relay.decision is None:
            return found
        if relay.model.disaggregates:
            return found
        engines = relay.model.engines
        for name in relay.decision.ranking():
            other = engines.get(name)
            if len(found) > more:
                break
            if other is not None and other is not engine and other.unusable is None:
                found.setdefault(address_of(other), other)
        return found

    def count_answer(self, answering: AnsweringEngine, picks: Mapping[str, Engine]) -> OtherEngine | None:
        """Counts a gateway's answer by its engine.

        Returns that engine; None: it is the first pick, or the router does not know it.

        A gateway tries the picks in order: those before that engine did not answer. If it tried
        fewer engines, it skipped picks that it does not know yet, or chose an engine itself.

        Args:
            picks: the engines in the gateway's list, by IP:PORT, best first.
        """
        address = shortest(answering.address)
        first, *_ = places = list(picks)
        if address == first:
            return None
        before = places[: places.index(address)] if address in picks else []
        if before and (answering.tries is None or answering.tries > len(before)):
            self.counts["fallbacks"] += 1
            return OtherEngine(picks[address], tuple(picks[each] for each in before))
        model = picks[first].model
        for engine in () if model is None else model.engines_at(address):
            if address_of(engine) == address:  # else the gateway named no port
                self.counts["not_followed"] += 1
                return OtherEngine(engine, ())
        self.counts["unknown"] += 1
        if self.counts["unknown"] == 1:
            log.warning(
                "a gateway reports an answer of an engine that the router does not know; requests count at "
                "the picked engines. Report the engine's own IP:PORT in response_attributes or metadata",
                reported=address[:64],
                picked=first,
            )
        return None

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the picker."""
        yield GaugeMetricFamily("lmetric_epp_streams", "Requests of gateways in flight", self.streams)
        counter = CounterMetricFamily(
            "lmetric_epp_requests",
            "Requests of gateways by outcome: picked or refused (answered by the router). Picked requests "
            "that another engine answered count again: fallbacks (a replacement in the list), not_followed "
            "(another engine of the model), unknown (the router does not know its address)",
            labels=("outcome",),
        )
        for outcome in ("picked", "refused", "fallbacks", "not_followed", "unknown"):
            counter.add_metric((outcome,), self.counts[outcome])
        yield counter
        seconds = self.decision_seconds
        histogram = HistogramMetricFamily(
            "lmetric_epp_decision_seconds", "Time from the end of a gateway's request to its pick or refusal"
        )
        histogram.add_metric((), seconds.buckets(), seconds.sum)
        yield histogram
