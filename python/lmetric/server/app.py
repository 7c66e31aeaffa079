"""The life cycle of the server: start, serve, drain, stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import structlog

from lmetric._core import LmetricError
from lmetric.config import ConfigError, EngineConfig, ServerConfig
from lmetric.server.api.auth import Keys
from lmetric.server.background.monitor import Monitor
from lmetric.server.background.replicas import Replicas
from lmetric.server.discovery import Discovery
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.policies import RELOADED
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages import pages
from lmetric.server.http.port import bind, port_error
from lmetric.server.observe.logs import configure_logging
from lmetric.server.observe.metrics import Metrics
from lmetric.server.observe.startup import LISTENING, startup_report

if TYPE_CHECKING:
    from lmetric.engines.emulated import EngineOptions

log = structlog.get_logger("lmetric.server")

EXIT_DONE = 0
EXIT_INTERRUPTED = 130
STOP_SECONDS = 2.0


class Server:
    """One router process. Call `await start()`, and `await stop()` at the end.

    ``sockets``: sockets bound to the configuration's host and port. None: `start` binds them.
    """

    def __init__(self, config: ServerConfig, sockets: list[socket.socket] | None = None) -> None:
        self.config = config
        self._read = config  # `reload` compares a new configuration with it
        self.port = 0
        self._sockets = sockets
        self.fleet = Fleet(config)
        self.metrics = Metrics(self.fleet)
        self.front: Frontend
        self._monitor: Monitor
        self._discovery: Discovery
        self._replicas: Replicas
        self._listeners: list[asyncio.Server] = []

    def build(self) -> Keys:
        """Builds keys and fleet from the configuration, without any connection.

        Raises LmetricError.
        """
        keys = Keys.load(self.config.auth.keys_file)
        self.fleet.build()
        for engine in self.fleet.engines():
            engine.quiet = logging.DEBUG
        return keys

    async def start(self, before_report: Callable[[], None] | None = None) -> None:
        """Binds the port, checks the engines once, then listens, and logs a report.

        ``before_report`` is called once the server listens. Raises LmetricError if the
        configuration is invalid, PortError if the address is not usable.
        """
        config = self.config
        keys = self.build()
        if (
            not self.fleet.pools
            and not self.fleet.unplaced
            and not config.admin.enabled
            and not config.discovery
        ):
            raise ConfigError(
                "no engines: set --engine URL, --embedded N, or engines or discovery in the configuration"
            )
        sockets = self._sockets or await bind(config.host, config.port)
        self.front = Frontend(config, self.fleet, keys, self.metrics, pages)
        self._replicas = self.front.replicas = Replicas(config.replicas, self.fleet)
        self._monitor = Monitor(self.fleet, self.front.check, self.metrics)
        self._discovery = self.front.discovery = Discovery(config, self.fleet, self._monitor.check)
        self.metrics.further += [self.front.clients.metrics, self._discovery.metrics, self._replicas.metrics]
        await self._monitor.check_all()
        await self._discovery.start()
        self.port = sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        try:
            for each in sockets:
                self._listeners.append(await loop.create_server(self.front, sock=each, backlog=2048))
        except OSError as error:  # another process has begun to listen there
            self._close_listeners()
            await self._discovery.stop()
            raise port_error(config.host, config.port, error) from None
        self._monitor.start()
        await self._replicas.start()
        self._monitor.start_reminders(time.monotonic())
        for engine in self.fleet.engines():
            engine.quiet = None
        if before_report is not None:
            before_report()
        report = startup_report(config, self.fleet, self.port, keys_needed=keys.on)
        (log.warning if report["warnings"] else log.info)(LISTENING, **report)

    def reload(self, config: ServerConfig) -> None:
        """Applies API keys, tenants, the engines' API keys and policies of a new configuration.

        Other settings stay. Raises ConfigError; then nothing has changed.
        """
        front = self.front
        keys = Keys.load(config.auth.keys_file)
        added, removed = front.keys.changes(keys)
        policies = self.fleet.policies_of(config)
        old, new = front.config.tenants, config.tenants
        tenants = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        front.reload(keys, config)
        engines = self._discovery.set_keys(config)
        self.fleet.reload_policies(config, policies)
        log.info(
            "configuration reloaded",
            keys_added=added,
            keys_removed=removed,
            keys_needed=keys.on,
            tenants_changed=tenants,
            engine_keys_changed=engines,
        )
        reloaded = {"auth", "tenants", "engines", "models", "discovery", *RELOADED}
        others = [
            name
            for name in ServerConfig.model_fields
            if name not in reloaded and getattr(config, name) != getattr(self._read, name)
        ]
        if others:
            log.warning("these settings change only with a restart", settings=others)

    async def drain(self, hurry: asyncio.Event | None = None) -> None:
        """Stops accepting requests and waits for the running ones.

        Returns when they have ended, at the deadline, or when ``hurry`` is set.
        """
        front, timeouts = self.front, self.config.timeouts
        front.draining = True
        log.info("draining", running=len(front.relays))
        hurry = hurry or asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeouts.drain_grace):
                await hurry.wait()
        # Pages still answer: /ready reports the drain, /metrics stays readable. Requests get 503.
        front.refusing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeouts.drain):
                await front.idle_or(hurry)
        self._close_listeners()
        if front.relays:
            log.warning("aborting requests that did not end in time", running=len(front.relays))

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    async def stop(self) -> None:
        """Ends running requests with an error to their clients, and closes all connections."""
        self.front.draining = self.front.refusing = True
        self._close_listeners()
        for relay in list(self.front.relays):
            relay.stop()
        self.front.close_idle()
        await self.front.shutdown(STOP_SECONDS)
        await self._replicas.stop()
        await self._monitor.stop()
        await self._discovery.stop()
        for engine in self.fleet.engines():
            engine.upstream.close()
        for pool in self.fleet.pools:
            pool.kv.close()
        log.info("stopped")


async def serve(
    config: ServerConfig,
    started: Callable[[Server], None] | None = None,
    reread: Callable[[], ServerConfig] | None = None,
) -> int:
    """Serves until SIGTERM (returns 0) or Ctrl-C (returns 130), then drains.

    A second signal ends the drain.

    SIGHUP reloads keys, tenants and policies (`Server.reload`) from the configuration that
    ``reread`` returns. SIGUSR1 and SIGUSR2 are ignored. ``started`` is called once the server
    listens. Raises LmetricError, PortError or EngineStartError.
    """
    loop = asyncio.get_running_loop()
    ignored = [signal.SIGUSR1, signal.SIGUSR2, *([signal.SIGHUP] if reread is None else [])]
    for number in ignored:
        loop.add_signal_handler(number, _ignored, number)
    if reread is not None:
        loop.add_signal_handler(signal.SIGHUP, _ignored, signal.SIGHUP)  # until the server listens
    # The port is bound first: starting and checking engines takes seconds.
    sockets = await bind(config.host, config.port)
    async with _with_embedded(config) as config:
        server = Server(config, sockets)
        caught: list[int] = []
        first, second = asyncio.Event(), asyncio.Event()

        def on_signal(number: int) -> None:
            (second if caught else first).set()
            caught.append(number)

        def handle_signals() -> None:
            if reread is not None:
                loop.add_signal_handler(signal.SIGHUP, _reload, server, reread)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, on_signal, number)

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
        return EXIT_INTERRUPTED if caught[0] == signal.SIGINT else EXIT_DONE


def check_config(config: ServerConfig) -> None:
    """Runs the checks that `serve` makes before it contacts engines. Raises LmetricError.

    Logs only warnings and errors.
    """
    level = config.log.level if config.log.level == "error" else "warning"
    configure_logging(config.log.model_copy(update={"level": level}))
    _warn_deprecated(config)
    server = Server(config)
    server.build()
    for pool in server.fleet.pools:
        pool.kv.close()


def _warn_deprecated(config: ServerConfig) -> None:
    for message in config.deprecated:
        log.warning("deprecated configuration", reason=message)


def _ignored(number: signal.Signals) -> None:
    log.info("signal ignored", signal=number.name)


def _reload(server: Server, reread: Callable[[], ServerConfig]) -> None:
    try:
        server.reload(reread())
    except LmetricError as error:
        log.error("cannot reload the configuration; the old one stays in use", reason=str(error))


def run_server(config: ServerConfig, reread: Callable[[], ServerConfig] | None = None) -> int:
    """Sets up logs and runs `serve`, on uvloop if it is installed. Returns the process's exit code.

    ``reread`` reads the configuration again, for SIGHUP.
    """
    configure_logging(config.log)
    _warn_deprecated(config)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config, reread=reread))


def _embedded_options(config: ServerConfig) -> "list[EngineOptions]":
    """Returns the options of each embedded engine: N equal ones, or both roles ("2P4D").

    The options enable the engine features that the configuration needs.
    """
    from lmetric.engines.emulated import EngineOptions
    from lmetric.engines.emulated.options import BOTH_WAYS

    embedded, order = config.embedded, "priority" if config.orders else "fcfs"
    if isinstance(embedded, int):
        both = BOTH_WAYS if config.splits or config.fetches_prefixes else {}
        return [EngineOptions.model_validate({"order": order, **both})] * embedded
    assert embedded is not None
    kv: dict[str, Any] = {"kv_connector": "nixl", "kv_load_failure_policy": "recompute"}
    prefill, decode = embedded.removesuffix("D").split("P")
    roles = ["prefill"] * int(prefill) + ["decode"] * int(decode)
    return [EngineOptions.model_validate({"order": order, "role": role, **kv}) for role in roles]


@contextlib.asynccontextmanager
async def _with_embedded(config: ServerConfig) -> AsyncIterator[ServerConfig]:
    """Yields the configuration with the embedded engines, which run as long as the context."""
    if config.embedded is None:
        yield config
        return
    from lmetric.engines.embedded import EmbeddedEngines

    options = _embedded_options(config)
    async with EmbeddedEngines(options=options, kv_events=True) as embedded:
        engines = [
            EngineConfig(url=url, name=f"embedded-{number}", role=None if one.role == "both" else one.role)
            for number, (url, one) in enumerate(zip(embedded.urls, options, strict=True))
        ]
        yield config.model_copy(update={"engines": [*config.engines, *engines]})
