"""The last minutes of a router, for its live page and `lmetric-router top`.

Requests add one tuple each when they end. Once a second, a task turns the new tuples into one
point of rates and times. All memory is bounded: points, requests, and new tuples.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.activity import ActivityEvent
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.periodic import periodic
from lmetric.server.observe.lateness import Late, Lateness

POINT_SECONDS = 1.0
POINTS_KEPT = 900  # 15 minutes
REQUESTS_KEPT = 4096
RUNNING_SENT = 20  # running requests that other workers show
ENDED_SENT = 2000  # ended requests that they show; more are counted
UPDATES_KEPT = 100  # messages of other workers between two points
SILENT_SECONDS = 5.0  # a worker without a message for this time has ended
NEW_KEPT = 20_000  # requests between two points; more are counted, without their times
FAILURES_SECONDS = 300  # refused and failed requests are counted by their cause for this time
TTFT_SECONDS = 60.0  # window of `Live.ttft_p50`
REFUSED_SECONDS = 60.0  # without a refused request, a series of them has ended
REFUSED = frozenset({429, 503})  # statuses of requests that no engine was to serve


class EndedRequest(NamedTuple):
    """A request for an engine that ended. Times: seconds on the monotonic clock.

    Attributes:
        cached_tokens: as the engine reported it, else as predicted at the decision.
    """

    ended: float
    started: float
    tenant: str
    model: str
    model_index: int  # index of the model
    number: int  # of the decision; 0: it was not routed
    instance: str | None
    status: int
    first_token_at: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    predicted: bool  # prompt_tokens and cached_tokens are the router's
    output_tokens: int
    request_id: str
    alias: str | None  # the name in the request, if it is an alias
    fallback_from: str | None  # the model before the first fallback
    fallback_reason: str | None
    code: str | None  # of the error that the router answered

    @property
    def ttft_seconds(self) -> float | None:
        """Seconds to the first token of a stream; None: it has none."""
        return self.first_token_at - self.started if self.first_token_at else None

    @property
    def tpot_seconds(self) -> float | None:
        """Seconds per output token after the first of a stream."""
        further = self.output_tokens - 1
        return (self.ended - self.first_token_at) / further if self.first_token_at and further > 0 else None


class RunningRequest(NamedTuple):
    """A routed request that has not ended. ``started``: seconds on the monotonic clock."""

    started: float
    tenant: str
    model: str
    model_index: int
    number: int
    instance: str | None
    prompt_tokens: int
    request_id: str
    alias: str | None
    fallback_from: str | None
    fallback_reason: str | None


class LiveUpdate(NamedTuple):
    """Requests and events of one worker since its last message to the other workers.

    Attributes:
        more: requests that ended besides.
        running: the newest ones.
        events: by model.
        late: how long the worker's event loop was late recently.
    """

    ended: list[EndedRequest]
    more: int
    in_flight: int
    running: list[RunningRequest]
    events: dict[str, list[ActivityEvent]]
    late: Late

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle calls Python for each named tuple. Columns take a fourth of the time.
        return _update, (tuple(zip(*self.ended, strict=True)), *self[1:])


def _update(columns: Sequence[Sequence[Any]], *others: Any) -> LiveUpdate:
    return LiveUpdate([EndedRequest._make(row) for row in zip(*columns, strict=True)], *others)


class Second(NamedTuple):
    """The requests that ended between two points.

    Attributes:
        at: its end, seconds on the monotonic clock.
        failed: refused and failed requests by status and error code.
    """

    at: float
    requests: int
    failed: Counter[tuple[int, str | None]]


# `EndedRequest` without the call of its own `__new__`: requests run this.
_make = tuple.__new__


class Point(NamedTuple):
    """Rates and times of one second, or of a longer window.

    Attributes:
        t: the end of the window, Unix time in seconds.
        hit_rate: cached prompt tokens divided by prompt tokens, of requests with both; None: none.
        ttft_p50, ttft_p95, tpot_p50, tpot_p95: seconds; None: no stream ended.
        e2e_p50, e2e_p95: seconds to the end of an answer, streamed or not; None: none ended. Errors
            do not count: a refusal is quick.
    """

    t: float
    requests_per_second: float
    errors_per_second: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    hit_rate: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    e2e_p50: float | None
    e2e_p95: float | None
    in_flight: int


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Returns the nearest-rank quantile of ascending values; None: there are none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


def point(
    requests: Sequence[EndedRequest], seconds: float, in_flight: int, unix: float, more: int = 0
) -> Point:
    """Returns the point of a window.

    Args:
        requests: the requests that ended in the window.
        seconds: length of the window.
        more: requests that ended besides.
    """
    ttft: list[float] = []
    tpot: list[float] = []
    e2e: list[float] = []
    errors = prompt = known = cached = output = 0
    for each in requests:
        ended, started, _, _, _, _, _, status, first, prompt_tokens, cached_tokens, _, tokens, *_ = each
        errors += status in REFUSED or status >= 500
        if status < 400:
            e2e.append(ended - started)
        output += tokens
        if first:
            ttft.append(first - started)
            if tokens > 1:
                tpot.append((ended - first) / (tokens - 1))
        if prompt_tokens:
            prompt += prompt_tokens
            if cached_tokens is not None:
                known += prompt_tokens
                cached += cached_tokens
    ttft.sort()
    tpot.sort()
    e2e.sort()
    return Point(
        unix,
        (len(requests) + more) / seconds,
        errors / seconds,
        prompt / seconds,
        output / seconds,
        cached / known if known else None,
        quantile(ttft, 0.5),
        quantile(ttft, 0.95),
        quantile(tpot, 0.5),
        quantile(tpot, 0.95),
        quantile(e2e, 0.5),
        quantile(e2e, 0.95),
        in_flight,
    )


class Live(Observer):
    """The rates, times and requests of the last minutes."""

    def __init__(self, fleet: Fleet, relays: Set[InFlightRequest], lateness: Lateness) -> None:
        self.fleet = fleet
        self.lateness = lateness
        self.points: deque[Point] = deque(maxlen=POINTS_KEPT)
        self.requests: deque[EndedRequest] = deque(maxlen=REQUESTS_KEPT)
        self.seconds: deque[Second] = deque(maxlen=FAILURES_SECONDS)
        # When the last series of requests began that a router refused, and its last one.
        self.refusing_since: float | None = None
        self._refused_at = -math.inf
        self.ticks = 0
        self.closed = False
        self.viewers: Counter[str | None] = Counter()  # connected streams by tenant; None: administrators
        self.dropped = 0  # updates that slow viewers did not get
        self.view: Any = None  # the `LiveView`, once someone looks
        self._relays = relays
        self._new: list[EndedRequest] = []
        self._more = 0
        # The requests of the last point, of all workers, and its length.
        self.fresh: list[EndedRequest] = []
        self.fresh_seconds = POINT_SECONDS
        self.began = self._last = time.monotonic()
        # With several workers: sends this worker's update to the others, and the updates received.
        self.send: Callable[[LiveUpdate], None] | None = None
        self._received: list[LiveUpdate] = []
        self._others: dict[int, tuple[float, LiveUpdate]] = {}  # the last one of each, and its time
        self._events: dict[str, int] = {}  # by model: events that the others know
        fleet.on_model_removed.append(lambda model: self._events.pop(model, None))
        self._tick = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task that adds a point each second."""
        self._task = periodic("live page", POINT_SECONDS, self._update)

    async def stop(self) -> None:
        """Stops the task, and ends the waits of viewers."""
        self.closed = True
        self._tick.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def next_tick(self) -> None:
        """Waits until the next point, or until the end."""
        if not self.closed:
            await self._tick.wait()

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Records a request for an engine that ended."""
        if len(self._new) >= NEW_KEPT:
            self._more += 1
            return
        model, error, number, output, predicted = request.model, request.error, 0, 0, False
        usage = prompt = cached = first = None
        if relay is not None and (usage := relay.usage) is not None:
            prompt, cached, first = usage.prompt_tokens, usage.cached_tokens, usage.first_token_at
            output = usage.output_tokens
        if relay is not None and (decision := relay.decision) is not None:
            number = decision.id
            if cached is None and usage is not None:  # most streams report no usage
                predicted = True
                prompt, cached = decision.prompt_tokens, decision.predicted_cached_tokens
        fell_back = None if request.fallback is None else request.fell_back
        values = (
            request.ended_at,
            request.started,
            request.tenant,
            "" if model is None else model.name,
            -1 if model is None else model.index,
            number,
            None if relay is None else relay.instance,
            request.status,
            first,
            prompt,
            cached,
            predicted,
            output,
            request.head.request_id,
            request.alias,
            None if fell_back is None else fell_back.model,
            None if fell_back is None else fell_back.reason,
            None if error is None else error.code,
        )
        self._new.append(_make(EndedRequest, values))

    def tick(self, now: float) -> None:
        """Adds the point of the time since the last one. ``now``: on the monotonic clock."""
        fresh, self._new = self._new, []
        more, self._more = self._more, 0
        seconds, self._last = max(now - self._last, 1e-3), now
        in_flight = sum(model.router.in_flight() for model in self.fleet.models)
        if self.send is not None:
            running = self._own_running(RUNNING_SENT)
            further = max(len(fresh) - ENDED_SENT, 0)
            self.send(
                LiveUpdate(
                    ended=fresh[:ENDED_SENT],
                    more=more + further,
                    in_flight=in_flight,
                    running=running,
                    events=self._fresh_events(),
                    late=self.lateness.recent(now),
                )
            )
            received, self._received = self._received, []
            fresh = list(heapq.merge(fresh, *(each.ended for each in received), key=_ended_at))
            more += sum(each.more for each in received)
            in_flight += sum(each.in_flight for _, each in self._latest(now))
        self.fresh, self.fresh_seconds = fresh, seconds
        self.points.append(point(fresh, seconds, in_flight, unix=time.time(), more=more))
        self.requests.extend(fresh)
        failed = Counter(
            (each.status, each.code) for each in fresh if each.status in REFUSED or each.status >= 500
        )
        self.seconds.append(Second(now, len(fresh) + more, failed))
        if any(status in REFUSED and code is not None for status, code in failed):
            if now - self._refused_at >= REFUSED_SECONDS:
                self.refusing_since = now
            self._refused_at = now
        self.ticks += 1
        waited, self._tick = self._tick, asyncio.Event()
        waited.set()

    def within(self, seconds: float, now: float, tenant: str | None = None) -> list[EndedRequest]:
        """Returns the requests that ended in the last seconds, newest first.

        ``tenant``: None: of all tenants.
        """
        found = []
        for each in reversed(self.requests):
            if now - each.ended > seconds:
                break
            if tenant is None or each.tenant == tenant:
                found.append(each)
        return found

    def counts(self, seconds: float) -> tuple[int, Counter[tuple[int, str | None]]]:
        """Returns the requests of the last seconds before the last point, and the failed ones."""
        requests, failed = 0, Counter[tuple[int, str | None]]()
        for each in reversed(self.seconds):
            if self._last - each.at >= seconds:
                break
            requests += each.requests
            failed.update(each.failed)
        return requests, failed

    def late(self, now: float) -> Late:
        """Returns how long the event loop was late recently, in the worst worker."""
        return max([self.lateness.recent(now), *(update.late for _, update in self._latest(now))])

    def ttft_p50(self, model: str, now: float) -> float | None:
        """Returns the median TTFT of a model's streams that ended in the last minute, seconds."""
        recent = self.within(TTFT_SECONDS, now)
        return quantile(
            sorted(each.ttft_seconds for each in recent if each.model == model and each.ttft_seconds), 0.5
        )

    def running(self, most: int, tenant: str | None = None) -> list[RunningRequest]:
        """Returns the newest routed requests that have not ended, newest first.

        ``tenant``: None: of all tenants.
        """
        found = self._own_running(most, tenant)
        for _, update in self._latest(time.monotonic()):
            found += (each for each in update.running if tenant is None or each.tenant == tenant)
        return heapq.nlargest(most, found)

    def _own_running(self, most: int, tenant: str | None = None) -> list[RunningRequest]:
        routed = (each for each in self._relays if isinstance(each, Progress) and each.decision is not None)
        wanted = (each for each in routed if tenant is None or each.client_request.tenant == tenant)
        latest = heapq.nlargest(most, wanted, key=lambda each: each.client_request.started)
        return [_running(each) for each in latest]

    def receive(self, worker: int, update: LiveUpdate) -> None:
        """Adds what another worker's clients did."""
        if len(self._received) < UPDATES_KEPT:
            self._received.append(update)
        self._others[worker] = time.monotonic(), update
        for name, events in update.events.items():
            model = next((model for model in self.fleet.models if model.name == name), None)
            if model is not None:
                for event in events:
                    model.activity.note(*event[1:], own=False)

    def _latest(self, now: float) -> list[tuple[float, LiveUpdate]]:
        """Returns the last message of each other worker that still sends them."""
        for worker, (at, _) in list(self._others.items()):
            if now - at > SILENT_SECONDS:
                del self._others[worker]
        return list(self._others.values())

    def _fresh_events(self) -> dict[str, list[ActivityEvent]]:
        """Returns this worker's events since the last call, by model."""
        fresh: dict[str, list[ActivityEvent]] = {}
        for model in self.fleet.models:
            known, self._events[model.name] = self._events.get(model.name, 0), model.activity.noted
            if known < model.activity.noted:
                fresh[model.name] = model.activity.since(known)
        return fresh

    async def _update(self) -> None:
        self.tick(time.monotonic())


def _running(relay: Progress) -> RunningRequest:
    request = relay.client_request
    fell_back = request.fell_back
    return RunningRequest(
        started=request.started,
        tenant=request.tenant,
        model=relay.model.name,
        model_index=relay.model.index,
        number=relay.decision.id,
        instance=relay.ticket.instance,
        prompt_tokens=relay.decision.prompt_tokens,
        request_id=request.head.request_id,
        alias=request.alias,
        fallback_from=None if fell_back is None else fell_back.model,
        fallback_reason=None if fell_back is None else fell_back.reason,
    )


def _ended_at(request: EndedRequest) -> float:
    return request.ended
