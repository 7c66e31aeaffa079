"""One engine: its connections, health and capabilities."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

import orjson
import structlog
from pydantic import SecretStr

from lmetric._core import Router
from lmetric.config import (
    ADMIN,
    CONFIGURED,
    EngineConfig,
    EngineTls,
    KvEventsSetting,
    PoolSettings,
    Role,
    ServerConfig,
    unix_path,
)
from lmetric.engines.adapter import Adapter, Capabilities, Handover, Load, read_page
from lmetric.engines.identify import UNKNOWN
from lmetric.engines.replaced import BALANCED, Starts, start_of
from lmetric.server.api.errors import Unusable
from lmetric.server.fleet.indicators import METRICS_PAGE, Indicators, Values
from lmetric.server.fleet.kv_mode import UNASKED
from lmetric.server.fleet.names import ModelNames
from lmetric.server.fleet.retry_budget import Breaks
from lmetric.server.fleet.service import ServiceRecord
from lmetric.server.fleet.watchdog import Watchdog
from lmetric.server.tls.used import EngineContexts
from lmetric.server.upstream.pool import Upstream

if TYPE_CHECKING:
    from lmetric.engines.connectors import Connector
    from lmetric.server.fleet.kv_backfill import KvBackfill
    from lmetric.server.upstream.allowed import AllowedEngines
    from lmetric.tokens.prompt import PromptTokenizer

NAMED_ENGINES = 5  # most engines named in one message

_FIX_FAILED = "restart the engine; its log has the cause"
_FIX_NOT_READY = "mend what its source reports; in Kubernetes, kubectl describe pod has the reason"
# By kind of failure: the cause, for any client, and the fix.
_CAUSES = {
    "refused": ("connection refused", "start the engine, or correct its URL"),
    "dns": ("host name not found", "correct the host name in its URL, or repair the name server"),
    "tls": ("no secure connection", "correct the scheme of its URL, or its certificate"),
    "unreachable": ("no connection", "allow the router's connections to it in the network"),
    "timeout": (
        "no answer in time",
        "restart the engine if its process hangs, or allow the router's connections to it in the network; "
        "other engines get its requests",
    ),
    "reset": ("connection broken", "restart the engine, or correct the port or scheme of its URL"),
    "status": ("health check failed", _FIX_FAILED),
    "unidentified": ("model not known", "check that its URL has the OpenAI API: GET /v1/models"),
    "unfit": (
        "not suited to its role",
        "start the engine with the settings of its role, or correct its entry in the configuration",
    ),
    "other_model": (
        "serves another model",
        "start the engine with --served-model-name of this model, or correct the model (serve: --model) in "
        "the configuration",
    ),
    "no_model": ("lists no model", "start the workers behind its address; it gets requests again by itself"),
    "stalled": ("stopped generating", "restart the engine; other engines get its requests"),
    "paused": ("paused or asleep", "POST /resume or /wake_up to the engine"),
    "ejected": (
        "ejected after failed requests",
        "wait until it works again and returns, or drain and repair it: POST /admin/engines/NAME/drain",
    ),
    "saturated": ("full", "add engines, or send fewer requests"),
}

# Failures of checks that got no answer.
UNANSWERED = frozenset({"refused", "unreachable", "timeout", "reset", "stalled"})
# Failures that mark an engine as down at once.
AT_ONCE = ("refused", "stalled", "paused", "other_model", "no_model")


class NotUsable(NamedTuple):
    """Why an engine gets no new requests: the cause, for any client; the whole reason; the fix."""

    cause: str
    reason: str
    fix: str | None = None


log = structlog.get_logger("lmetric.fleet")
LOAD_LOG_SECONDS = 60.0  # least time between two warnings that an engine's load is not known


class ServedModel(Protocol):
    """The properties of a model that its engines need."""

    name: str
    settings: PoolSettings
    router: Router
    block_size: int
    engines: dict[str, Engine]
    gamma: float | None
    indicators: Indicators
    names: ModelNames

    def review(self, changed: Engine | None = None) -> None:
        """Decides anew which engines are in service, after a change of all or of one."""

    def hold(self, engine: Engine, *, one_of_many: bool) -> None:
        """Handles a change of an engine's `held`."""

    def engines_at(self, address: str) -> Collection[Engine]:
        """Its engines at IP:PORT, or at all ports of an IP, if gateways name engines by address."""

    def usable_text(self) -> str:
        """How many of its engines get requests, as "2 of 3 usable"."""

    def begin_empty(self, engines: Sequence[Engine]) -> None:
        """Forgets what engines have cached: their caches or their weights are new."""

    def sends_prefixes(self, name: str) -> bool:
        """Whether other engines still fetch the prefixes of an engine that leaves."""

    def blame(self, engine: Engine, client: str, reason: str, *, proven: bool) -> None:
        """Counts a request that failed at an engine."""


class Engine:
    """One engine of a pool: its connections, health and capabilities.

    ``source``: the source that listed it. ``model``: its configured model; None: the router asks
    the engine. ``contexts``: TLS contexts that engines share. It gets no requests while it is
    ``draining`` (set by an administrator), ``leaving`` (its source no longer lists it), or not
    ``ready`` (reported by its source).
    """

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        source: str = CONFIGURED,
        model: str | None = None,
        contexts: EngineContexts | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.configured_model = model
        self.name = config.label
        local = unix_path(config.url) is not None
        self.host = "127.0.0.1" if local else urlsplit(config.url).hostname or ""
        allowed = _allowed(server) if source == ADMIN else None
        self.upstream = Upstream(config, server, allowed, contexts=contexts, tls=server.tls_of(config, model))
        self.health = server.health
        self.model: ServedModel | None = None
        # The results of the last identification, which is repeated when the engine comes back.
        self.identified = False
        self.ask_again_at = math.inf
        self.adapter: Adapter = UNKNOWN
        self.capabilities = Capabilities("unknown")
        self.mode = UNASKED
        self.added_at = self.mode_since = time.monotonic()
        self.was_exact = False  # its KV events were in use before
        self.refill: KvBackfill | None = None
        # Returns body and priority header of a request (`prioritized`). None: it gets no priority,
        # and may get any of the client's own.
        self.prioritized: Callable[..., tuple[bytes, int | None]] | None = None
        self.role_set: Role | None = None  # by an administrator
        self.pushed: dict[str, float | None] = {}  # pushed values, by indicator
        self.connector: Connector | None = None  # set if it serves segments of requests
        self.unfit: str | None = None  # reason why it cannot serve its role
        self.refused_tokens = 0  # uncached prompt tokens of requests that it refused
        self.misfit: str | None = None  # reason: it serves other models than the configured one
        self.weights: str | None = None  # version of its weights, as announced by a trainer
        self.asleep = False  # it reports that its memory is released
        # The last read of its list of models: time on the monotonic clock, hash of the page, error.
        self.models_at = -math.inf
        self.models_hash: int | None = None
        self.models_error: str | None = None
        self.models_due = False  # whether the next check must read it
        # A prompt that it tokenizes differently from the tokenizer it was last compared with.
        self.tokens_differ: str | None = None
        self.compared: PromptTokenizer | None = None
        self.parses = False  # it parses the token ids of other engines (`parsing`)
        self.cold = True  # its cache is empty: it is new, or its process was restarted
        self.lost_blocks = False  # its process seemed gone, so its blocks left the index
        self._starts = Starts()
        self.load_reports: Counter[str] = Counter()  # by source
        self.load_error: str | None = None
        self.load_logged_at = -math.inf  # time of the last warning about it
        self.missing_metrics: list[str] = []  # metrics of indicators missing on its last page
        self.service = ServiceRecord()
        self.breaks = Breaks()
        self.watchdog = Watchdog()
        self.draining = False
        self.switches = 0  # role switches in progress; it gets no requests meanwhile
        self.leaving = False
        self.ready = True
        self.failures = 0
        self.successes = 0
        self.last_error: str | None = None
        self.last_failure = ""  # the kind of the last error
        self._must_generate = False  # it stopped generating, and has not generated since
        self.quiet: int | None = None  # level for events that the log of the start summarizes

    @property
    def shows_orders(self) -> bool:
        """Whether it is vLLM, which shows aborts by order. Aborts by other engines pass."""
        return self.capabilities.token_ids is True

    @property
    def role(self) -> Role:
        """Its role: set by an administrator or the configuration, else reported by the engine."""
        return self.role_set or self.config.role or self.capabilities.role or "both"

    @property
    def revision(self) -> str | None:
        """The revision of its weights: as announced, else from the configuration or as reported."""
        return self.weights or self.config.revision or self.capabilities.revision

    @property
    def handover(self) -> Handover | None:
        """Its KV transfer: reported by the engine, unless the configuration sets a connector."""
        reported = self.capabilities.handover
        configured = self.model.settings.handover if self.model else "auto"
        if configured == "auto" or (reported is not None and reported.connector == configured):
            return reported
        return Handover(configured)

    @property
    def kv_events(self) -> KvEventsSetting:
        """The setting of its KV events."""
        if self.config.kv_events is not None:
            return self.config.kv_events
        return self.model.settings.kv_events if self.model is not None else "auto"

    @property
    def runs_halves_at_once(self) -> bool:
        """Whether it serves one of two segments, and both must be sent at once."""
        return self.connector is not None and self.connector.at_once

    @property
    def held(self) -> bool:
        """Whether it gets no new requests, for a reason other than its health."""
        return self.draining or self.switches > 0 or self.leaving or not self.ready

    @property
    def encodes(self) -> bool:
        """Whether it only encodes images, sound and video: it gets no request of a client."""
        return self.role == "encode"

    @property
    def boosts(self) -> bool:
        """Whether its own scheduler computes boosts (`uniboost`)."""
        scheduler = self.capabilities.scheduler
        return scheduler is not None and scheduler.boosts

    @property
    def inexact(self) -> bool:
        """Whether its mode is below `exact`. An engine that only encodes caches no prompt."""
        return self.mode.name != "exact" and not self.encodes

    @property
    def down_level(self) -> int:
        """The log level of its failures: without a warning if it gets no requests on purpose."""
        return logging.INFO if self.held else logging.WARNING

    @property
    def healthy(self) -> bool:
        """Whether it passes its health checks."""
        return self.service.state != "DOWN"

    @property
    def in_service(self) -> bool:
        """Whether it gets new requests, unless it is `held`."""
        return self.service.in_service

    @property
    def stalled(self) -> bool:
        """Whether it stopped generating; its requests move elsewhere."""
        return self._must_generate and not self.healthy

    @property
    def frozen(self) -> bool:
        """Whether it was marked as down because it did not answer: it may answer no request.

        An engine that is paused, asleep or unfit by its own report still answers.
        """
        return self.last_failure in UNANSWERED and not self.healthy

    @property
    def lost(self) -> bool:
        """Whether it is known that it answers no request."""
        return self.service.state == "DOWN" and self.last_error is not None

    @property
    def unusable(self) -> NotUsable | None:
        """Why it gets no new requests; None: it gets them."""
        if self.draining:
            return NotUsable("draining", "draining", "POST /admin/engines/NAME/undrain")
        if self.switches:
            return NotUsable("changing its role", "changing its role")
        if self.leaving:
            return NotUsable(
                "no longer listed", f"no longer listed by {self.source}", "list it again to keep it"
            )
        if not self.ready:
            return NotUsable("not ready", f"not ready, according to {self.source}", _FIX_NOT_READY)
        if self.in_service:
            return None
        if self.healthy:
            ejected = self.service.state == "EJECTED"
            cause, fix = _CAUSES["ejected" if ejected else "saturated"]
            return NotUsable(cause, f"{cause}: {self.service.reason}" if ejected else cause, fix)
        if self.last_error is None:
            return NotUsable("not checked yet", "not checked yet")
        cause, fix = _CAUSES.get(self.last_failure, ("requests failed", _FIX_FAILED))
        return NotUsable(cause, self.last_error, fix)

    @property
    def problem_since(self) -> float | None:
        """When it was lost or ejected, or got its mode below `exact`; monotonic seconds.

        None: it has no such problem, or gets no requests because it is held or saturated.
        """
        if self.in_service:
            return self.mode_since if self.inexact else None
        if self.held or (self.healthy and self.service.state != "EJECTED"):
            return None
        return max(self.service.since, self.added_at)

    @property
    def sends_prefixes(self) -> bool:
        """Whether other engines still fetch its prefixes because it leaves."""
        return self.model is not None and self.model.sends_prefixes(self.name)

    @property
    def running(self) -> int:
        """The number of this router's requests in flight at the engine."""
        return self.upstream.in_use

    def set_key(self, key: SecretStr | None) -> None:
        """Sets its API key for new requests."""
        self.config = self.config.model_copy(update={"api_key": key})
        self.upstream.set_key(key)

    def configure(self, server: ServerConfig) -> None:
        """Applies what a reload can change. Raises ConfigError."""
        self.health = server.health
        self.upstream.configure(server, None if self.upstream.allowed is None else _allowed(server))
        self.upstream.set_tls(self.tls_settings(server))

    def tls_settings(self, server: ServerConfig) -> EngineTls | None:
        """Returns its TLS settings in a configuration; None: the defaults."""
        return server.tls_of(self.config, self.model.name if self.model else self.configured_model)

    def set_tls(self, tls: EngineTls | None, server: ServerConfig) -> None:
        """Sets its TLS settings for new connections. Raises ConfigError."""
        self.config = self.config.model_copy(update={"tls": tls})
        self.configure(server)

    def hold(self, *, one_of_many: bool = False) -> None:
        """Applies a change of `held`.

        ``one_of_many``: the review waits for further changes in this turn of the event loop.
        """
        if self.model is not None:
            self.model.hold(self, one_of_many=one_of_many)

    def succeeded(self) -> None:
        """Records a successful health check."""
        self.failures = 0
        if not self.healthy:
            self.successes += 1
            if self.successes >= self.health.up_after:
                self._turn(True, None)

    def failed(self, kind: str, reason: str) -> None:
        """Records a failed health check, or a connection that could not be made.

        A refused connection marks the engine as down at once, and so does an engine that stopped
        generating or reports that it is paused. Other failures do when they repeat. A lack of the
        router's own resources is ignored.
        """
        if kind == "resources":
            return
        self.successes = 0
        self.failures += 1
        self.last_error, self.last_failure = reason, kind
        if kind == "stalled":
            self._must_generate = True
        elif kind == "refused":  # the process is gone
            self._must_generate = False
        if self.healthy and (kind in AT_ONCE or self.failures >= self.health.down_after):
            self._turn(False, reason)
        if kind == "refused" and not self.lost_blocks:
            self._starts.forget()
            self.restarted()

    async def generate(self, seconds: float) -> int:
        """Sends a request for one token. Returns the status of the answer. Raises UpstreamError.

        Engines that generate only together with another one are not asked.
        """
        if self.model is None or self.runs_halves_at_once:
            return 200
        model = self.model.names.name_for(self.name)
        body = orjson.dumps({"model": model, "prompt": "1", "max_tokens": 1})
        status, _ = await self.upstream.post("/v1/completions", body, seconds)
        return status

    @property
    def load_pages(self) -> list[str]:
        """The paths of its pages with load and indicators."""
        path = self.capabilities.load_path
        pages = [] if path is None else [path]
        if self.model is not None and self.model.indicators.read_metrics and path != METRICS_PAGE:
            pages.append(METRICS_PAGE)
        return pages

    def load_unread(self, reason: str) -> None:
        """Records why the load is not known, and logs it at most once a minute."""
        self.load_error = reason
        if (now := time.monotonic()) >= self.load_logged_at + LOAD_LOG_SECONDS:
            self.load_logged_at = now
            log.warning("the load of an engine is not known", engine=self.name, reason=reason)

    async def report_page(self, path: str, page: bytes) -> None:
        """Reports the load and the indicators on one of its `load_pages`."""
        model = self.model
        if model is None:
            return  # removed meanwhile
        indicators, has_load = model.indicators, path == self.capabilities.load_path
        adapter = self.adapter

        def read(page: bytes) -> tuple[Load, Values | None, float | None]:
            load = adapter.load(page) if has_load else Load()
            values = indicators.of_page(adapter.own(page)) if path == METRICS_PAGE else None
            return load, values, start_of(page)

        load, values, start = await read_page(page, read)
        if self.model is not model or model.indicators is not indicators:
            return  # removed, or changed, while a thread read the page
        if self._starts.replaced(start):
            self.restarted()
        if self._starts.show_balanced():
            log.warning(BALANCED, model=model.name, engine=self.name)
        if has_load:
            self.load_error = None if load else f"GET {path}: no load metric with a known name"
        elif self.capabilities.load_path is None:
            self.load_error = None
        if values is not None:
            missing = indicators.missing(values)
            if missing != self.missing_metrics:
                self.missing_metrics = missing
                self._log_missing()
        if load:
            self.load_reports[path.partition("?")[0]] += 1
        elif not values:
            return
        model.router.report_load(
            self.name,
            waiting=load.waiting,
            running=load.running,
            kv_usage=load.kv_usage,
            extra=values or None,
        )

    def _log_missing(self) -> None:
        if self.model is not None and self.missing_metrics:
            metrics = ", ".join(self.missing_metrics)
            log.warning(
                "the engine lacks metrics of indicators",
                model=self.model.name,
                engine=self.name,
                metrics=metrics,
            )

    def report_header(self, header: str) -> None:
        """Reports the load and the indicators in a load header of an answer."""
        model = self.model
        if model is None:
            return
        indicators, load = model.indicators, self.adapter.load_of_header(header)
        values = indicators.of_header(header) if indicators.fields else None
        if load:
            self.load_reports["header"] += 1
        elif not values:
            return
        model.router.report_load(self.name, **load, extra=values)

    def sleeps(self, asleep: bool) -> None:
        """Records whether it sleeps. Engines discard their caches when they fall asleep."""
        if asleep and not self.asleep and self.model is not None:
            self.model.begin_empty([self])
        self.asleep = asleep

    def ask_anew(self) -> None:
        """Requests a new identification: the process may be another one, with other settings."""
        self.identified = False
        self.compared = None

    def restarted(self) -> None:
        """Handles the end of its process: cache and load are gone, and a new one may differ."""
        self.ask_anew()
        self.weights, self.asleep = None, False
        if self.model is not None:
            self.model.router.blocks_cleared(self.name)
            gone = self.model.indicators.of_nobody()
            self.model.router.report_load(self.name, waiting=0, running=0, extra=gone or None)
            self.lost_blocks = self.cold = True

    def _turn(self, healthy: bool, reason: str | None) -> None:
        now = time.monotonic()
        self.successes = 0
        if healthy:
            self._must_generate = False
            self.service.up(now)
        else:
            self.service.enter("LOST", "DOWN", now)
            self.ask_anew()
        if self.model is not None:
            self.model.review(self)
            if healthy:
                log.log(self.quiet or logging.INFO, "engine up", model=self.model.name, engine=self.name)
            else:
                log.log(
                    self.down_level,
                    "engine down",
                    engine=self.name,
                    reason=reason,
                    model=self.model.name,
                    left=self.model.usable_text(),
                )


def _allowed(server: ServerConfig) -> AllowedEngines:
    """Returns the addresses that engines of administrators may have."""
    from lmetric.server.upstream.allowed import AllowedEngines  # their pages have loaded it

    return AllowedEngines(server.admin.allowed_engines)


def blocks_differ(source: Engine, engine: Engine) -> str | None:
    """Returns the reason why an engine cannot use the KV blocks of another one, else None.

    They serve different revisions of the model, or report different block sizes.
    """
    if source.revision != engine.revision:
        return (
            f"{source.name} serves revision {source.revision} of the model, {engine.name} serves "
            f"{engine.revision}"
        )
    theirs, own = source.capabilities.block_size, engine.capabilities.block_size
    if theirs is None or own is None or theirs == own:
        return None
    return f"blocks of {source.name} have {theirs} tokens, blocks of {engine.name} {own}"


def unusable(engines: Iterable[Engine]) -> Unusable | None:
    """Returns the reasons why none of these engines gets new requests; None: one of them does."""
    causes: Counter[str] = Counter()
    reasons = []
    for engine in engines:
        if engine.encodes:
            continue
        why = engine.unusable
        if why is None:
            return None
        causes[why.cause] += 1
        reasons.append(f"{engine.name}: {why.reason}")
    if not reasons:
        return Unusable("there are no engines", "there are no engines")
    summary = "; ".join(
        f"{cause} ({count} of {len(reasons)} engines)" for cause, count in causes.most_common()
    )
    more = [f"and {len(reasons) - NAMED_ENGINES} more"] if len(reasons) > NAMED_ENGINES else []
    return Unusable(summary, "; ".join(reasons[:NAMED_ENGINES] + more))
