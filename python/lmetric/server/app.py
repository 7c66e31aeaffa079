"""The life cycle of the server: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from lmetric._core import LmetricError
from lmetric.config import (
    POLICY_KNOBS,
    ConfigError,
    EngineConfig,
    EngineTls,
    ServerConfig,
    effective,
    needs_restart,
)
from lmetric.extras import install
from lmetric.server.api.identity import Identity
from lmetric.server.api.issued import IssuedKeys
from lmetric.server.api.replica_pages import PATH
from lmetric.server.background.monitor import Monitor
from lmetric.server.background.problems import OwnProblems
from lmetric.server.background.replica_state import metrics as replica_metrics
from lmetric.server.discovery.follow import Discovery
from lmetric.server.execution import ways
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import load_trials
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.problem import Problem
from lmetric.server.fleet.turns import in_turns
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.listeners import Listeners
from lmetric.server.http.pages import load_administration, load_pages, pages
from lmetric.server.http.port import Bound, bind, port_error
from lmetric.server.http.running import DRAINING, REFUSING, REPLACED
from lmetric.server.observe.logs import LogWriter, configure_logging
from lmetric.server.observe.metrics import Metrics
from lmetric.server.observe.startup import LISTENING, startup_report
from lmetric.server.tls.used import metrics as tls_metrics

if TYPE_CHECKING:
    from lmetric.server.background.key_exchange import KeyExchange
    from lmetric.server.background.replicas import Replicas
    from lmetric.server.epp.picker import Picker
    from lmetric.server.observe.key_store import KeyStore
    from lmetric.server.observe.recorder import Recorder
    from lmetric.server.observe.state import StateFolder
    from lmetric.server.observe.tracing.export import Tracing
    from lmetric.server.tls.contexts import TlsContext
    from lmetric.server.worker.worker import Worker

log = structlog.get_logger("lmetric.server")

EXIT_DONE = 0
EXIT_INTERRUPTED = 130
STOP_SECONDS = 2.0
IDLE_CLIENT_SECONDS = 1.0  # for clients of idle connections to use them once more
DRAIN_LOOK_SECONDS = 0.05  # time between two looks whether all clients have left


class Change(NamedTuple):
    """A new configuration that `Server.prepare` has read and checked.

    ``config``: as in its sources; ``new``: what the running router takes of it. ``changed_keys``:
    numbers of API keys that it adds and removes. ``changed``: names of changed settings.
    ``engine_tls``: settings that https engines use.
    """

    config: ServerConfig
    new: ServerConfig
    identity: Identity
    tls: TlsContext | None
    policies: Mapping[str | None, Policies]
    apply: Callable[[], None]  # applies keys and settings of requests
    changed_keys: tuple[int, int]
    changed: list[str]
    engine_tls: list[EngineTls | None]


class Server:
    """One router process. Call `await start()`, and `await stop()` at the end.

    ``bound``: sockets for the configuration's host and port. None: `start` binds them. ``further``:
    engines of ``config`` that no configuration file names. ``picks``: a gateway sends the requests.
    ``worker``: this process as one of several.
    """

    def __init__(
        self,
        config: ServerConfig,
        bound: Bound | None = None,
        further: Sequence[EngineConfig] = (),
        *,
        picks: bool = False,
        worker: Worker | None = None,
    ) -> None:
        self._started_with = config  # `apply` compares a new configuration with it
        self._further = further
        self.port = 0  # 0 after the start: it listens on a unix socket
        self._bound = bound
        self.fleet = Fleet(config)
        self.fleet.on_model_made.append(ways.follow)
        self.worker = worker
        if worker is not None:
            self.fleet.number_model = worker.number_model
            self.fleet.on_model_made.append(worker.join)
            self.fleet.on_model_removed.append(worker.forget)
        stored = config.state_folder is not None
        self.issued = IssuedKeys(stored=stored) if worker is None else worker.issued
        self._key_exchange: KeyExchange | None = None  # with workers, their supervisor's
        self.report: dict[str, Any] = {}  # of the start
        self.is_replaced = False  # another process accepts on the same sockets from the drain on
        self.metrics = Metrics(self.fleet)
        self.front: Frontend
        self._monitor: Monitor
        self._discovery: Discovery
        self._replicas: Replicas | None = None
        self.listeners: Listeners
        self.recorder: Recorder | None = None
        self._state: StateFolder | None = None
        self._picks = picks
        self.picker: Picker | None = None  # set by `start` if a gateway sends the requests
        self.reloads: Reloads | None = None

    @property
    def config(self) -> ServerConfig:
        """The configuration, which a reload replaces."""
        return self.fleet.config

    @functools.cached_property
    def _keys(self) -> KeyStore:
        """The store of issued keys; with workers, their supervisor has it."""
        from lmetric.server.observe.key_store import KeyStore

        return KeyStore(self._started_with.state_folder, self.issued)

    def build(self) -> tuple[Identity, TlsContext | None]:
        """Builds keys, TLS and fleet from the configuration, without any connection.

        Raises LmetricError.
        """
        identity = Identity.load(self.config.auth, self.issued)
        tls = _listener_context(self.config)
        if self.config.tracing is not None:
            _load_tracing()
        if self.config.admin.enabled:
            load_administration()
            load_trials()  # a command may start a canary
        self.fleet.build()
        for engine in self.fleet.engines():
            engine.quiet = logging.DEBUG
        return identity, tls

    async def start(self, before_report: Callable[[], None] | None = None) -> None:
        """Binds the port, checks the engines once, then listens, and logs a report.

        ``before_report`` is called once the server listens. Raises LmetricError if the
        configuration is invalid, PortError if the address is not usable.
        """
        config = self.config
        identity, tls = self.build()
        if (
            not self.fleet.models
            and not self.fleet.unplaced
            and not config.admin.enabled
            and not config.discovery
        ):
            raise ConfigError(
                "no engines: set --engine URL, --embedded N, or engines or discovery in the configuration"
            )
        bound = self._bound = self._bound or await bind(config)
        epp = _load_epp() if self._picks else None
        kind: type[Frontend] = Frontend if epp is None else epp.PickerFrontend
        self.front = front = kind(
            config,
            self.fleet,
            identity,
            metrics=self.metrics,
            pages=pages,
            worker=self.worker,
        )
        if config.replicas.is_set:
            self._exchange(front)
        if self.worker is None:
            if config.state_folder is not None:
                from lmetric.server.observe.state import StateFolder

                self._state = StateFolder(config.state_folder, front.budgets.core, front.usage.table)
                self._keys.read()
        else:
            self.worker.take_usage = front.usage.table.take
            self.worker.tidy_budgets = front.budgets.tidy
        if config.tracing is not None:
            front.running.tracing = _load_tracing()(config.tracing, self.metrics.spans)
            front.running.observers.add(front.running.tracing)
        if epp is not None:
            self.picker = epp.Picker(config, front, self.worker.gateway_port if self.worker else None)
            self.metrics.further.append(self.picker.shared.metrics)
        front.tls = tls
        if self.worker is not None:
            front.keys_page, front.change_keys = self.worker.keys_page, self.worker.change_keys
        elif self._key_exchange is not None:
            front.keys_page, front.change_keys = self._key_exchange.answer, self._key_exchange.publish
        else:
            front.change_keys = lambda keys: self._keys.change(keys)
        self._monitor = Monitor(self.fleet, front.check, self.metrics, certificates=self._certificates)
        self._discovery = self.front.discovery = Discovery(config, self.fleet, self._monitor.check)
        self.metrics.further += [front.clients.metrics, self._discovery.metrics]
        self.metrics.further.append(lambda: replica_metrics(self._replicas))
        self.metrics.further += [front.handshakes.metrics, lambda: tls_metrics(self._certificates())]
        self.metrics.further += [LogWriter.metrics, lambda: front.admission.identity.metrics()]
        if config.records.path is not None:
            from lmetric.server.observe.recorder import Recorder

            secret = self.worker.secret if self.worker is not None else None
            self.recorder = Recorder(config.records, self.fleet, secret)
            front.running.observers.add(self.recorder)
            self.metrics.further.append(self.recorder.metrics)
        self.fleet.own_problems = OwnProblems(
            fleet=self.fleet,
            replicas=self._replicas,
            discovery=self._discovery,
            certificates=self._certificates,
            identity=lambda: front.admission.identity,
            recorder=self.recorder,
            state_problem=self._state_problem,
            live=front.live,
            lateness=self.metrics.lateness,
        )
        identity.start()
        await self._monitor.check_all()
        await self._discovery.start()
        self.port = bound.port
        if self.worker is not None:
            front.reread = self.worker.reload
            await self.worker.start(front)
        if identity.on and self._key_exchange is not None:
            await self._key_exchange.begin()
        self.listeners = Listeners(bound, front)
        try:
            await self.listeners.start()
        except OSError as error:  # another process has begun to listen there
            await self._discovery.stop()
            await identity.stop()
            raise port_error(config.host, config.port, error) from None
        if self.picker is not None:
            await self.picker.start()
        self._monitor.start()
        if self.recorder is not None:
            self.recorder.start()
        if self._state is not None:
            self._state.start()
        if front.live is not None:
            if self.worker is not None:
                self.worker.show, front.live.send = front.live.receive, self.worker.send
            front.live.start()
        if self._replicas is not None:
            await self._replicas.start()
        self._monitor.start_reminders(time.monotonic())
        for engine in self.fleet.engines():
            engine.quiet = None
        if before_report is not None:
            before_report()
        self._warn_of_tls()
        report = self.report = startup_report(config, self.fleet, self.port, keys_needed=identity.on)
        if self.picker is not None:
            report["curl"] = None  # its gateway takes requests, not the router
        if self.worker is not None:
            return  # the supervisor logs the report once
        (log.warning if report["warnings"] else log.info)(LISTENING, **report)

    def _exchange(self, front: Frontend) -> None:
        """Builds the exchange with other routers. Raises ConfigError."""
        from lmetric.server.background.key_exchange import KeyExchange
        from lmetric.server.background.replicas import Replicas
        from lmetric.server.background.stored_search import StoredSearch

        load_pages(PATH)
        replicas = self._replicas = front.replicas = Replicas(
            front.config.replicas,
            lambda: self.fleet.models,
            front.budgets.core,
            router=front.router,
            process=front.process,
            pass_on=None if self.worker is None else self.worker.pass_on,
        )
        front.stored.others = StoredSearch(replicas)
        if self.worker is None:
            self._key_exchange = KeyExchange(replicas, self._keys.keys, self._keys.change)
        else:
            self.worker.apply_load, self.worker.add_counts = replicas.apply, replicas.add_counts

    def _certificates(self) -> Iterator[TlsContext]:
        """Yields the TLS contexts for clients, other routers and engines."""
        if self.front.tls is not None:
            yield self.front.tls
        if self._replicas is not None and self._replicas.tls is not None:
            yield self._replicas.tls
        yield from self.fleet.contexts

    def _state_problem(self) -> Problem | None:
        if self.worker is not None:
            return self.worker.state_problem
        return None if self._state is None else self._state.problem

    def _warn_of_tls(self) -> None:
        """Logs the engines whose certificates are not checked."""
        unverified = [engine.name for engine in self.fleet.engines() if engine.upstream.is_unverified]
        if unverified:
            log.warning("certificates of engines are not checked (verify: false)", engines=unverified)

    def prepare(self, config: ServerConfig) -> Change:
        """Reads and builds what a new configuration needs. It changes nothing, in any thread.

        Raises LmetricError.
        """
        config = config.model_copy(update={"engines": [*config.engines, *self._further]})
        if self._bound is not None and self._bound.shared:
            config = _at(config, self._bound)
        try:
            new = effective(self.config, config)
        except ValueError as error:
            raise ConfigError(f"not possible without a restart: {error}") from None
        # Comparing equal engines takes long, unless they are one object.
        known = {engine.label: engine for engine in self.config.engines}
        engines = [known[each.label] if known.get(each.label) == each else each for each in new.engines]
        new = new.model_copy(update={"engines": engines})
        changed = sorted(
            name for name in ServerConfig.model_fields if getattr(new, name) != getattr(self.config, name)
        )
        identity = Identity.load(new.auth, self.issued)
        tls = _listener_context(new)
        # Models without a section stay as they are; those of a further section must be valid.
        named = {model.name: model for model in (*config.models, *new.models)}
        policies = self.fleet.policies_of(new.model_copy(update={"models": list(named.values())}))
        if new.admin.enabled:
            load_administration()
        on_trial = (each.canary is not None or each.shadow is not None for each in policies.values())
        if new.admin.enabled or any(on_trial):
            load_trials()  # in this thread
        changed_keys = self.front.admission.identity.keys.changes(identity.keys)
        apply = self.front.prepare(identity, new)
        return Change(
            config=config,
            new=new,
            identity=identity,
            tls=tls,
            policies=policies,
            apply=apply,
            changed_keys=changed_keys,
            changed=changed,
            engine_tls=_engine_tls(new),
        )

    async def apply(self, change: Change) -> dict[str, Any]:
        """Applies the settings of a new configuration that need no restart (`RELOADED`).

        Running requests continue under the old settings. All that can be refused is checked first.
        The settings of requests and policies then change at once, and the engines one by one, in
        several turns of the event loop. Returns the changes. Raises LmetricError; then nothing has
        changed.
        """
        front, config, new, tls = self.front, change.config, change.new, change.tls
        before = front.admission.identity
        await change.identity.take_over(before)
        for settings in change.engine_tls:
            self.fleet.contexts.get(settings).refresh()
            await asyncio.sleep(0)  # reading certificates takes up to 20 ms
        added, removed = change.changed_keys
        old = front.config.tenants
        tenants = sorted(
            name for name in old.keys() | new.tenants.keys() if old.get(name) != new.tenants.get(name)
        )
        changed = set(change.changed)
        sections = {each.name: each.model_fields_set for each in new.models}
        for model in self.fleet.models:
            # A promoted canary, or a command for one model, has changed no configuration.
            policies = change.policies.get(model.name, change.policies[None])
            own = sections.get(model.name, set())
            own = own | {knobs for policy, knobs in POLICY_KNOBS.items() if policy in own}
            changed |= {"models" if name in own else name for name in policies.changed_since(model.policies)}
        engine_steps = self.fleet.reload(new, change.policies)
        change.apply()
        change.identity.start()
        await before.stop(change.identity)
        if tls is not None and front.tls is not None:
            tls.failures = front.tls.failures
            front.tls = tls
        await in_turns(engine_steps)
        engines = await self._discovery.reload(new, config)
        if "log" in change.changed:
            configure_logging(new.log)
        restart = needs_restart(self._started_with, config)
        report = {
            "changed": sorted(changed),
            "keys_added": added,
            "keys_removed": removed,
            "keys_needed": change.identity.on,
            "tenants_changed": tenants,
            "engine_keys_changed": engines,
        }
        log.info("configuration reloaded", **report)
        if restart:
            log.warning("these settings change only with a restart", settings=restart)
        self._warn_of_tls()
        return {**report, "restart_needed": restart}

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Stops accepting requests and waits for the running ones.

        Returns when they have ended, at the deadline, or when ``hurry`` is set.
        """
        front, timeouts = self.front, self.config.timeouts
        log.info("draining", running=len(front.relays))
        hurry = hurry or asyncio.Event()
        if self.is_replaced or (self._bound is not None and self._bound.shared):
            # New connections wait in the sockets for the next process.
            front.running.phase = REPLACED
            self.listeners.close()
            # The next process starts when this one has ended, so idle connections delay it.
            await self._until_clients_left(min(timeouts.drain, IDLE_CLIENT_SECONDS), hurry)
            waits = [self._until_idle(timeouts.drain, hurry)]
            if self.picker is not None:
                waits.append(self.picker.leave(timeouts.drain, hurry))
            await asyncio.gather(*waits)
        else:
            front.running.phase = DRAINING
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeouts.drain_grace):
                    await hurry.wait()
            # Pages still answer: /ready reports the drain, /metrics stays readable. Requests get
            # 503.
            front.running.phase = REFUSING
            await self._until_idle(timeouts.drain, hurry)
            self.listeners.close()
        if front.relays:
            log.warning("aborting requests that did not end in time", running=len(front.relays))

    async def _until_idle(self, seconds: float, hurry: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.front.running.idle_or(hurry)

    async def _until_clients_left(self, seconds: float, hurry: asyncio.Event) -> None:
        """Waits until all connections are closed: each answer closes one.

        A client may use an idle connection at any moment, so these are not closed earlier.
        """
        end = time.monotonic() + seconds
        clients = self.front.clients
        while clients.connections and time.monotonic() < end and not hurry.is_set():  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_SECONDS)

    async def stop(self) -> None:
        """Ends running requests with an error to their clients, and closes all connections."""
        self.front.running.phase = REFUSING
        self.listeners.close()
        if self.reloads is not None:
            await self.reloads.stop()
        if self._bound is not None:
            self._bound.remove_file()
        await self.front.admission.identity.stop()
        await self.front.handshakes.stop()
        for relay in list(self.front.relays):
            relay.stop()
        if self.picker is not None:
            await self.picker.stop()
        self.front.close_idle()
        if self.front.live is not None:
            await self.front.live.stop()
        await self.front.shutdown(STOP_SECONDS)
        if self.worker is not None:  # the usage of the requests that have ended now counts, too
            await self.worker.stop()
        if self._key_exchange is not None:
            await self._key_exchange.stop()
        if self._state is not None:
            await self._state.stop()
        if self._replicas is not None:
            await self._replicas.stop()
        await self._monitor.stop()
        await self._discovery.stop()
        for model in self.fleet.models:
            if model.changes is not None:
                await model.changes.stop()
        if self.front.running.tracing is not None:
            await asyncio.to_thread(self.front.running.tracing.stop)
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)
        for engine in self.fleet.engines():
            engine.upstream.close()
        for model in self.fleet.models:
            model.close()
        log.info("stopped")


def _listener_context(config: ServerConfig) -> TlsContext | None:
    """Returns the context for clients' connections; None: they have no TLS. Raises ConfigError."""
    if config.tls is None:
        return None
    from lmetric.server.tls.contexts import listener_context

    return listener_context(config.tls)


def _load_tracing() -> type[Tracing]:
    """Imports OpenTelemetry, which only routers with traces need. Raises ConfigError without it."""
    from lmetric.server.observe.tracing.export import Tracing

    return Tracing


def _load_epp() -> ModuleType:
    """Imports gRPC, which only endpoint pickers need. Raises ConfigError without it."""
    try:
        from lmetric.server.epp import picker
    except ImportError as missing:
        raise ConfigError(f"`epp` needs another package ({missing}): {install('epp')}") from None
    return picker


async def serve(
    config: ServerConfig,
    started: Callable[[Server], None] | None = None,
    reread: Callable[[], ServerConfig] | None = None,
    *,
    picks: bool = False,
) -> int:
    """Serves until SIGTERM (returns 0) or Ctrl-C (returns 130), then drains.

    A second signal ends the drain. SIGTERM during the start ends the start.

    SIGHUP reloads settings (`Reloads`) from the configuration that ``reread`` returns.
    SIGUSR1 and SIGUSR2 are ignored; with several workers, SIGUSR2 replaces them one by one.
    ``started`` is called once the only process listens. ``picks``: a gateway sends the requests.
    Raises LmetricError, PortError or EngineStartError.
    """
    signals = _StartSignals(reloads=reread is not None)
    bound = None
    try:
        # The port is bound first: starting and checking engines takes seconds.
        bound = await bind(config)
        return await _serve(config, bound, started, reread=reread, picks=picks, signals=signals)
    except asyncio.CancelledError:
        if not signals.terminated:
            raise
        log.info("stopped during the start", signal=signal.SIGTERM.name)
        return EXIT_DONE
    finally:
        if bound is not None:
            bound.remove_file()


async def _serve(
    config: ServerConfig,
    bound: Bound,
    started: Callable[[Server], None] | None,
    *,
    reread: Callable[[], ServerConfig] | None,
    picks: bool,
    signals: _StartSignals,
) -> int:
    """Serves on bound sockets. Arguments, result and errors: as of `serve`."""
    loop = asyncio.get_running_loop()
    if bound.shared:
        config = _at(config, bound)
    gateways = None
    if picks and config.worker_count > 1:
        from lmetric.server.supervisor.ports import hold

        gateways = await hold(config.host, config.epp.port, "epp.port")
    files = config
    async with _engines_of(config) as config:
        further = config.engines[len(files.engines) :]
        if config.worker_count > 1:
            from lmetric.server.supervisor.supervisor import supervise

            supervised = supervise(
                config, further, bound, reread=reread, gateways=gateways, started=signals.end_of_start
            )
            return _exit_code(await supervised)
        server = Server(config, bound, further, picks=picks)
        caught: list[int] = []
        first, second = asyncio.Event(), asyncio.Event()

        def on_signal(number: int) -> None:
            (second if caught else first).set()
            caught.append(number)

        def handle_signals() -> None:
            if reread is not None:
                reloads = Reloads(server, reread)
                loop.add_signal_handler(signal.SIGHUP, reloads.on_signal)
                server.front.reread = reloads.reload
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, on_signal, number)
            signals.end_of_start()

        # The report tells supervisors that the router runs: a signal after it must drain.
        await server.start(handle_signals)
        try:
            if started is not None:
                started(server)
            await first.wait()
            await server.drain(second)
        finally:
            await server.stop()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                loop.remove_signal_handler(number)
        return _exit_code(caught[0])


class _StartSignals:
    """Signals during the start, which takes seconds: engines are checked, tokenizers are loaded.

    SIGTERM cancels the task that starts the server. SIGHUP waits for the end of the start: the
    files may have changed since they were read. ``reloads``: whether SIGHUP reloads anything.
    """

    def __init__(self, *, reloads: bool) -> None:
        self.terminated = False
        self._reload_due = False
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            loop.add_signal_handler(number, _ignored, number)
        if reloads:
            loop.add_signal_handler(signal.SIGHUP, self._remember)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)

    def _terminate(self) -> None:
        self.terminated = True
        if self._task is not None:
            self._task.cancel()

    def _remember(self) -> None:
        self._reload_due = True

    def end_of_start(self) -> None:
        """Passes a SIGHUP on. Called when the handlers of the running server are in place."""
        if self._reload_due:
            signal.raise_signal(signal.SIGHUP)


def _engines_of(config: ServerConfig) -> contextlib.AbstractAsyncContextManager[ServerConfig]:
    """Returns a context with the embedded engines; its value is the configuration with them."""
    if config.embedded is None:
        return contextlib.nullcontext(config)
    from lmetric.server.embedded import with_embedded

    return with_embedded(config)


def _exit_code(number: int) -> int:
    """Returns the exit code of a process that a signal ended."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_DONE


def _at(config: ServerConfig, bound: Bound) -> ServerConfig:
    """Returns a configuration with the address of given sockets. Raises ConfigError.

    Access to /debug and /admin depends on the address.
    """
    at = config.model_copy(update={"host": bound.host, "port": bound.port})
    try:
        at.check()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return at


def check_config(config: ServerConfig) -> None:
    """Runs the checks that `serve` makes before it contacts engines. Raises LmetricError.

    Logs only warnings and errors.
    """
    level = config.log.level if config.log.level == "error" else "warning"
    configure_logging(config.log.model_copy(update={"level": level}))
    _warn_ignored(config)
    _check_moves(config)
    server = Server(config)
    server.build()
    for model in server.fleet.models:
        model.close()


def _warn_ignored(config: ServerConfig) -> None:
    if config.ignored_variables:
        log.warning(
            "environment variables ignored: settings begin with LMETRIC__", names=config.ignored_variables
        )


def _check_moves(config: ServerConfig) -> None:
    """Raises `ConfigError` for moves that slow the streams that they should help."""
    if config.recomputes_moves:
        raise ConfigError(
            "migration_by = 'recompute': it is not valid with rebalance; expected fetch, and engines "
            "with KV transfer (vLLM: NixlConnector). A target that computes the context again stalls "
            "its other streams (docs/reference/engines.md#streams-that-move)"
        )


def _ignored(number: signal.Signals) -> None:
    log.info("signal ignored", signal=number.name)


class Reloads:
    """Reloads of the configuration, one at a time.

    A thread reads and checks it, because a file with thousands of keys takes long. Reloads that are
    requested while one waits for its turn are the same reload. `Server.stop` ends a reload.
    """

    def __init__(self, server: Server, reread: Callable[[], ServerConfig]) -> None:
        self._server = server
        self._reread = reread
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[dict[str, Any]] | None = None
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()
        server.reloads = self

    def on_signal(self) -> None:
        """Requests a reload. An error is only logged."""
        self._request()

    async def reload(self) -> dict[str, Any]:
        """Reloads. Returns the changes. Raises LmetricError; then nothing has changed."""
        return await asyncio.shield(self._request())  # a client that leaves ends no reload

    def _request(self) -> asyncio.Task[dict[str, Any]]:
        if self._next is None:
            self._next = asyncio.create_task(self._run(), name="reload")
            self._next.add_done_callback(_log_failure)
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        return self._next

    async def stop(self) -> None:
        """Ends the reloads."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self) -> dict[str, Any]:
        async with self._turn:
            self._next = None  # later requests may follow a change of the files
            return await self._server.apply(await asyncio.to_thread(self._prepare))

    def _prepare(self) -> Change:
        config = self._reread()
        _check_moves(config)
        return self._server.prepare(config)


def _log_failure(reload: asyncio.Task[dict[str, Any]]) -> None:
    if not reload.cancelled() and (error := reload.exception()) is not None:
        defect = None if isinstance(error, LmetricError) else error
        log.error(
            "cannot reload the configuration; the old one stays in use", reason=str(error), exc_info=defect
        )


def runner() -> asyncio.Runner:
    """Returns a runner of an event loop: uvloop if it is installed."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    return asyncio.Runner(loop_factory=factory)


def run_server(
    config: ServerConfig, reread: Callable[[], ServerConfig] | None = None, *, picks: bool = False
) -> int:
    """Sets up logs and runs `serve`, on uvloop if it is installed. Returns the process's exit code.

    ``reread`` reads the configuration again, for SIGHUP. ``picks``: a gateway sends the requests.
    """
    configure_logging(config.log)
    _warn_ignored(config)
    _check_moves(config)
    gc.collect()
    with runner() as loop:
        # The objects so far live as long as the process. Without them, a full garbage collection
        # with thousands of connections takes a fraction of the time.
        return loop.run(serve(config, lambda _: gc.freeze(), reread, picks=picks))


def _engine_tls(config: ServerConfig) -> list[EngineTls | None]:
    """Returns the TLS settings of https engines. Checks all others. Raises ConfigError."""
    listed: list[tuple[EngineConfig, str | None]] = [(engine, None) for engine in config.engines]
    listed += [(engine, model.name) for model in config.models for engine in model.engines]
    used: dict[int, EngineTls | None] = {}
    unused: dict[int, EngineTls] = {}
    for engine, model in listed:
        settings = config.tls_of(engine, model)
        if engine.url.startswith("https:"):
            used[id(settings)] = settings
        elif settings is not None:
            unused[id(settings)] = settings
    for name, settings in unused.items():
        if name not in used:
            from lmetric.server.tls.contexts import engine_context

            engine_context(settings)
    return list(used.values())
