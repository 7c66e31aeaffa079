"""Subscriptions to the KV events and the pushed load of engines, and their supervision."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from lmetric._core import EventFeed, LmetricError, Router
from lmetric.engines.endpoints import EndpointError, host_of, literal, reachable, with_host
from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.kv_backfill import KvBackfill
from lmetric.server.fleet.kv_choice import Subscription, choose, endpoints, mismatch
from lmetric.server.fleet.kv_mode import ENCODES, Mode, ModelFacts
from lmetric.server.upstream.allowed import AllowedEngines

if TYPE_CHECKING:
    from lmetric.records import InstanceStats

# An engine is silent if it computed this many prompt blocks and sent no event for this long.
SILENT_BLOCKS = 16
SILENT_SECONDS = 5.0
# Indicators that the check for silent engines reads.
_SILENCE_READS = ("window_prefill_tokens", "q_bs")
# Most hosts of one engine's endpoints that are looked up; each look-up takes a thread.
MAX_HOSTS = 8

_FIX_SUBSCRIBE = "set another kv_events.endpoint, or stop the process that uses this endpoint"
_FIX_CONNECT = (
    "let the engine listen at this endpoint, and allow the router's connections to it in the network"
)
_FIX_SILENT = "check that the port and the topic belong to this engine, with lmetric-router doctor URL"
_FIX_STOPPED = "restart the engine; its log has the error of its event publisher"
_FIX_OVER_LIMIT = (
    "use an engine whose version has KV events as lmetric-router doctor URL expects; the router subscribes "
    "again by itself after some minutes"
)
_FIX_THREAD = "restart the router, and report the error"
_FIX_ALLOWED = "let the engine use the addresses of admin.allowed_engines, or add this address there"
_WINDOW_SECONDS = 180.0  # time constant of the indicator window_prefill_tokens

log = structlog.get_logger("lmetric.kv")


@dataclass(slots=True)
class _EngineEvents:
    """The subscriptions of one engine, and the state of its events at the last check."""

    subscriptions: tuple[Subscription, ...]
    exact: Mode
    pooled: ModelFacts
    connected_at: float
    batches: int = 0
    restarts: int = 0
    lost: bool = False
    reconnections: int = 0
    refilled: tuple[int, int] | None = None  # the loss that the last backfill was started for
    # At the last check. `unreported_tokens`: uncached prompt tokens placed since the last batch.
    looked_at: float = 0.0
    window: float = 0.0
    decisions: int = 0
    refused: int = 0
    unreported_tokens: float = 0.0
    unreported_since: float = 0.0
    computed: float = 0.0  # requests placed there that had their first token, or ended, at that time

    @property
    def where(self) -> str:
        """The endpoints."""
        return ", ".join(one.endpoint for one in self.subscriptions)

    def is_silent(self, came: bool, row: InstanceStats, refused: int, *, now: float) -> bool:
        """Returns whether the engine must have stored blocks but sent no events.

        Idle engines send no events either, so the router counts the uncached tokens it has placed
        there, less those of requests that the engine ``refused``. An engine that hangs computes
        nothing: its requests get no first token.
        """
        window, decisions, size = row["window_prefill_tokens"], row["decisions"], self.pooled.block_size
        faded = self.window * math.exp((self.looked_at - now) / _WINDOW_SECONDS)
        # Each request leaves up to one partial block, which produces no event.
        placed = max(0.0, window - faded - size * (decisions - self.decisions)) - (refused - self.refused)
        first = self.looked_at == 0.0
        self.looked_at, self.window, self.decisions, self.refused = now, window, decisions, refused
        self.unreported_tokens = 0.0 if came or first else max(0.0, self.unreported_tokens + placed)
        computed = decisions - row["q_bs"]
        if self.unreported_tokens < SILENT_BLOCKS * size:
            self.unreported_since, self.computed = now, computed
        return now - self.unreported_since >= SILENT_SECONDS and computed > self.computed


@dataclass(frozen=True, slots=True)
class _Tally:
    """A feed's status, summarized over an engine's ranks."""

    connected: bool
    lost: bool  # a rank was connected, and is not
    reconnections: int
    over_limit: str | None  # the limit for which the feed ignores a rank
    other_topic: str | None  # another topic under which messages came
    incomplete: bool
    batches: int  # of cache events
    loads: int
    restarts: int
    losses: tuple[int, int]  # changes when the index has dropped blocks that the engine still holds
    block_size: int | None
    hybrid: bool  # the engine reports windows or states beside full attention

    @staticmethod
    def of(status: dict[int, dict[str, Any]]) -> _Tally:
        ranks = list(status.values())
        sizes = {rank["block_size"] for rank in ranks} - {None}
        restarts, resyncs = (sum(rank[name] for rank in ranks) for name in ("restarts", "resyncs"))
        return _Tally(
            connected=all(rank["connected"] for rank in ranks),
            lost=any(rank["connections"] > 0 and not rank["connected"] for rank in ranks),
            reconnections=sum(max(0, rank["connections"] - 1) for rank in ranks),
            over_limit=next((rank["over_limit"] for rank in ranks if rank["over_limit"] is not None), None),
            other_topic=next(
                (rank["other_topic"] for rank in ranks if rank["other_topic"] is not None), None
            ),
            incomplete=any(rank["state"] == "incomplete" for rank in ranks),
            batches=sum(rank["batches"] - rank["loads"] for rank in ranks),
            loads=sum(rank["loads"] for rank in ranks),
            restarts=restarts,
            losses=(restarts, resyncs),
            block_size=min(sizes) if sizes else None,
            hybrid=any(rank["groups"] > 0 for rank in ranks),
        )


class KvEvents:
    """The KV events and the pushed load of one model's engines.

    ``turn``: sets the mode of an engine.
    """

    def __init__(self, router: Router, turn: Callable[[Engine, Mode], None]) -> None:
        self._router = router
        self._turn = turn
        self._feed: EventFeed | None = None  # created, with its thread, at the first subscription
        self._events: dict[str, _EngineEvents] = {}
        self._pushed: dict[str, tuple[str, str] | None] = {}  # endpoint and topic of pushed load
        # By engine with rules: the checked addresses of its endpoints' hosts.
        self._addresses: dict[str, dict[str, str | EndpointError]] = {}

    async def look_up(self, engine: Engine, allowed: AllowedEngines) -> None:
        """Resolves and checks the hosts of an engine's endpoints by the rules of its addresses.

        The feed connects to the checked addresses, also when it connects again.
        """

        async def look_up(host: str) -> str | EndpointError:
            try:
                return await allowed.resolve(host)
            except ApiError as error:
                return EndpointError(str(error), _FIX_ALLOWED)

        found = {engine.host: None}
        for endpoint in endpoints(engine.capabilities, engine.kv_events):
            with contextlib.suppress(EndpointError):
                found[host_of(reachable(endpoint, engine.host)) or engine.host] = None
        hosts = list(found)[:MAX_HOSTS]
        addresses = await asyncio.gather(*map(look_up, hosts))
        if engine.model is not None:  # it may have been removed meanwhile, and another one have its name
            self._addresses[engine.name] = dict(zip(hosts, addresses, strict=True))

    def _admit(self, engine: Engine, endpoint: str) -> str:
        """Returns the endpoint to connect to. Raises EndpointError if the router may not."""
        host, allowed = host_of(endpoint), engine.upstream.allowed
        if allowed is None:
            address = None if host is None or host == engine.host else literal(host)
            configured = engine.kv_events
            given = () if isinstance(configured, str) else (configured.endpoint, configured.replay_endpoint)
            if (
                address is not None
                and not AllowedEngines(None).permits(host or "", str(address))
                and not any(each is not None and host_of(each) == host for each in given)
            ):
                fix = "set kv_events.endpoint in the router's configuration, if this address is right"
                raise EndpointError(f"its KV events are at {endpoint}, a link-local or metadata address", fix)
            return endpoint
        if host is None:
            raise EndpointError(
                f"its KV events are at {endpoint}, and engines of /admin have none at unix sockets",
                "set a tcp endpoint on the engine, such as tcp://*:5557",
            )
        known = self._addresses.get(engine.name, {})
        found = known.get(host)
        if found is None:
            reason = (
                f"the address of {host!r} is not known; at most {MAX_HOSTS} hosts of an engine are looked up"
            )
            raise EndpointError(reason, "wait for the engine's next check")
        if isinstance(found, EndpointError):
            raise EndpointError(str(found), found.fix)  # the same object again would collect tracebacks
        if not allowed.permits(host, found):
            reason = f"admin.allowed_engines does not allow KV events at {host!r} ({found})"
            raise EndpointError(reason, _FIX_ALLOWED)
        return with_host(endpoint, found)

    def _allows(self, engine: Engine) -> bool:
        """Whether the rules still allow the addresses of an engine's endpoints."""
        allowed = engine.upstream.allowed
        return allowed is None or all(
            isinstance(address, EndpointError) or allowed.permits(host, address)
            for host, address in self._addresses.get(engine.name, {}).items()
        )

    def wire(self, engine: Engine, pooled: ModelFacts) -> None:
        """Chooses the engine's mode by its capabilities, and makes the needed subscriptions."""
        assert engine.model is not None
        mode, subscriptions = choose(
            engine.capabilities,
            engine.host,
            engine.kv_events,
            model=pooled,
            tokens_differ=engine.tokens_differ,
            flags=engine.adapter.flags,
            admit=lambda endpoint: self._admit(engine, endpoint),
        )
        if engine.encodes:
            mode, subscriptions = ENCODES, ()
        events, pushed = self._events.get(engine.name), self._pushed_load(engine)
        same = events is not None and (events.subscriptions, events.pooled) == (subscriptions, pooled)
        if not same or self._pushed.get(engine.name) != pushed:
            self._unwire(engine.name)
            self._hear_load(engine.name, pushed)
            try:
                if subscriptions:
                    self._subscribe(engine, subscriptions, mode, pooled=pooled)
            except LmetricError as error:
                self._unwire(engine.name)  # of all ranks, and of the pushed load
                self._hear_load(engine.name, pushed)
                # A subscription sets this before its first event.
                self._router.update_instance(engine.name, kv_source="approximate")
                mode = Mode("approximate", "cannot subscribe to its KV events", str(error), _FIX_SUBSCRIBE)
        else:
            if engine.mode.name != "exact":
                mode = engine.mode  # set by `watch`
            if engine.lost_blocks:
                # It seemed gone, so its blocks left the index. The same process still has them.
                self._refill(engine)
        engine.lost_blocks = False
        self._turn(engine, mode)

    def begin_empty(self, names: list[str]) -> bool:
        """Forgets what engines have cached, and their earlier events. Returns whether it did."""
        try:
            if self._feed is not None:
                self._feed.begin_new_weights(names)
                return True
        except LmetricError as error:  # its thread has stopped, so no event arrives
            log.error("the KV event feed does not empty the index", engines=names, reason=str(error))
        return False

    def unwire(self, name: str) -> None:
        """Ends all subscriptions to an engine, and forgets its addresses."""
        self._addresses.pop(name, None)
        self._unwire(name)

    def _unwire(self, name: str) -> None:
        self._events.pop(name, None)
        self._pushed.pop(name, None)
        if self._feed is not None:
            self._feed.unsubscribe(name)

    def status(self, name: str) -> dict[str, Any] | None:
        """Returns the feed's status of an engine's ranks and pushed load; None without a feed."""
        if self._feed is None:
            return None
        ranks = {str(rank): status for rank, status in self._feed.status(name).items()}
        return {"ranks": ranks, "load": self._feed.load_status(name)}

    def counts(self, name: str) -> Counter[str]:
        """Returns the feed's counts of an engine, summed over its ranks."""
        counts: Counter[str] = Counter()
        if self._feed is not None:
            for rank in self._feed.status(name).values():
                counts.update({what: rank[what] for what in COUNTS})
        return counts

    def close(self) -> None:
        """Ends the feed's thread."""
        if self._feed is not None:
            self._feed.close()

    def watch(self, engines: Iterable[Engine]) -> list[Engine]:
        """Checks that events arrive, and updates the engines' modes.

        Call it about once a second. Returns the engines to check now: their event connections have
        broken, so their processes may be gone.
        """
        broken: list[Engine] = []
        if not self._events:
            return broken
        assert self._feed is not None
        instances = self._router.stats(indicators=_SILENCE_READS)["instances"]
        now = time.monotonic()
        for engine in engines:
            events = self._events.get(engine.name)
            if events is None:
                continue
            if not self._allows(engine):
                self.wire(engine, events.pooled)  # a reload has changed the rules
                continue
            tally = _Tally.of(self._feed.status(engine.name))
            if (tally.lost and not events.lost) or tally.reconnections > events.reconnections:
                engine.ask_anew()
                broken.append(engine)
            events.lost, events.reconnections = tally.lost, tally.reconnections
            if tally.loads:
                engine.load_reports["kv_events"] = tally.loads
            problem = self._problem(engine, events, tally, row=instances[engine.name], now=now)
            self._turn(engine, events.exact if problem is None else problem)
            if tally.incomplete and events.refilled != tally.losses:
                events.refilled = tally.losses
                self._refill(engine, hybrid=tally.hybrid)
            elif engine.refill is not None and (
                engine.refill.over(now) or not tally.incomplete or tally.hybrid
            ):
                engine.refill = None
        return broken

    def _problem(
        self, engine: Engine, events: _EngineEvents, tally: _Tally, row: InstanceStats, now: float
    ) -> Mode | None:
        """Returns the mode of an engine while its events are not reliable; None: they are."""
        if tally.restarts > events.restarts:
            engine.ask_anew()
        came = tally.batches > events.batches
        events.batches, events.restarts = tally.batches, tally.restarts
        answers = engine.healthy and engine.failures == 0
        if tally.connected or not answers:
            events.connected_at = now
        silent = events.is_silent(came, row, engine.refused_tokens, now=now)
        if tally.block_size not in (None, events.pooled.block_size):
            return mismatch(tally.block_size, events.pooled)
        assert self._feed is not None
        if self._feed.problem is not None:
            return Mode("approximate", "the router's event feed has failed", self._feed.problem, _FIX_THREAD)
        if tally.over_limit is not None:
            cause = "its KV events exceed a limit of the router"
            return Mode("approximate", cause, tally.over_limit, _FIX_OVER_LIMIT)
        if now - events.connected_at >= SILENT_SECONDS:
            return Mode("approximate", "no connection to its KV events", events.where, _FIX_CONNECT)
        if silent and answers:
            if tally.batches > 0 and tally.other_topic is None:
                detail = f"batches came from {events.where} before"
                return Mode(
                    "approximate", "it computes prompts, but its KV events have stopped", detail, _FIX_STOPPED
                )
            topic = "" if tally.other_topic is None else f", only messages of topic {tally.other_topic!r}"
            detail = f"no KV event came from {events.where}{topic}"
            return Mode("approximate", "it computed prompts, but sent no KV event", detail, _FIX_SILENT)
        return None

    def _subscribe(
        self, engine: Engine, subscriptions: tuple[Subscription, ...], mode: Mode, pooled: ModelFacts
    ) -> None:
        feed, name = self._opened(), engine.name
        self._events[name] = _EngineEvents(subscriptions, mode, pooled, connected_at=time.monotonic())
        self._router.update_instance(name, kv_source="exact")
        for one in subscriptions:
            one.open(feed, name, pooled.block_size)

    def _opened(self) -> EventFeed:
        """Returns the feed. Its thread starts at the first subscription."""
        if self._feed is None:
            self._feed = EventFeed(self._router)
        return self._feed

    def _pushed_load(self, engine: Engine) -> tuple[str, str] | None:
        """Returns endpoint and topic of an engine's pushed load.

        None with several ranks: the load of one rank would count for the whole engine.
        """
        feeds = engine.capabilities.load_feeds
        if len(feeds) != 1:
            return None
        try:
            endpoint = self._admit(engine, reachable(feeds[0], engine.host))
        except EndpointError:
            return None
        return endpoint, engine.capabilities.load_topic

    def _hear_load(self, name: str, pushed: tuple[str, str] | None) -> None:
        """Subscribes to the load that an engine pushes."""
        self._pushed[name] = pushed
        if pushed is None:
            return
        feed = self._opened()
        try:
            feed.subscribe_load(name, pushed[0], topic=pushed[1])
        except LmetricError as error:
            log.warning("cannot subscribe to pushed load", engine=name, reason=str(error))

    def _refill(self, engine: Engine, *, hybrid: bool = False) -> None:
        field = engine.capabilities.full_report
        # Full reports of hybrid models name blocks of windows that are gone.
        if field is None or hybrid:
            what = "its cached blocks become known when it stores them again"
        else:
            assert engine.model is not None
            what = "the router asks the engine to report its cached blocks"
            engine.refill = KvBackfill(field, engine.model.block_size, time.monotonic())
        log.info("the KV index of an engine is incomplete", engine=engine.name, note=what)


COUNTS = (
    *("batches", "events", "blocks_stored", "blocks_removed", "cleared"),
    *("gaps", "replayed", "resyncs", "restarts", "unanswered", "unknown_parent"),
)
