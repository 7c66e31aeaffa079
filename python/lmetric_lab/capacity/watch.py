"""``lmetric-router advise --watch``: follows records, and serves advice at its own port.

A thread reads the new records and plays fleets at an interval. The event loop answers `/metrics`,
`/advice` and `/health` meanwhile. The process has a low priority, so that routers and engines on
this machine come first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import structlog
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from lmetric._core import LmetricError
from lmetric.config import Log
from lmetric.record_files import not_found
from lmetric.record_schema import Records
from lmetric.server.http.port import port_error
from lmetric.server.observe.exposition import OPENMETRICS, TEXT, render, wants_openmetrics
from lmetric.server.observe.logs import LogWriter, configure_logging, flush_logs
from lmetric.server.observe.startup import url_at
from lmetric_lab.capacity.advice import Advice
from lmetric_lab.capacity.tail import Tail
from lmetric_lab.capacity.twin import Twin

log = structlog.get_logger("lmetric_lab.capacity")

EXIT_DONE, EXIT_INTERRUPTED = 0, 130
NICE = 10
MAX_MODELS = 16  # with advice; others are refused
STALE_SECONDS = 300.0  # age of withdrawn advice; at least two intervals
MAX_ROUND_SECONDS = 600.0  # of a round, before /health fails
STOP_SECONDS = 2.0  # for the last answers
OUTCOMES = ("advice", "refused", "failed")
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@dataclass(frozen=True, slots=True)
class ModelAdvice:
    """The last answer for a model. Times are in seconds on the monotonic clock."""

    advice: Advice | None = None
    advised_at: float = 0.0
    refused: str | None = None  # why there is no advice


class Watch:
    """The twins of all models in the records, and their last answers.

    Args:
        paths: record files of running routers, or folders of them.
        window_seconds: how far back records count.
        interval_seconds: time between two rounds.
        twin: makes the twin of a model.
        slo: the goal as text, for `/advice`.
        model: the only model to advise on; None: all in the records.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        window_seconds: float,
        interval_seconds: float,
        twin: Callable[[], Twin],
        *,
        slo: str,
        model: str | None = None,
    ) -> None:
        self.paths, self.interval_seconds = paths, interval_seconds
        self.stale_seconds = max(STALE_SECONDS, 2 * interval_seconds)
        self._window_seconds = window_seconds
        self._tail = Tail(paths, window_seconds)
        self._make_twin, self._slo, self._only = twin, slo, model
        self._twins: dict[str, Twin] = {}
        # The thread of the rounds replaces the mapping, so readers never see it change.
        self._models: dict[str, ModelAdvice] = {}
        self._rounds: Counter[tuple[str, str]] = Counter()
        self._waiting: str | None = "the first round has not ended"
        self._round_seconds = 0.0
        self.round_began: float | None = None  # monotonic; None: no round runs

    # -- rounds

    def round(self, now: float) -> None:
        """Reads new records, and advises on each model that has some. ``now``: Unix time."""
        self.round_began = begun = time.monotonic()
        try:
            self._round(now)
        finally:
            self.round_began = None
            self._round_seconds = time.monotonic() - begun

    def _round(self, now: float) -> None:
        try:
            records = self._tail.read(now)
        except (LmetricError, OSError) as error:
            # The twins stay: the next round may read the records again.
            reason = str(error)
            if isinstance(error, OSError) and error.filename is not None:
                reason = f"{error.filename}: {error.strerror}"
            self._wait(reason)
            for name in self._models:
                self._refuse(name, reason)
            return
        names = [name for name in records.models if self._only in (None, name)]
        self._forget(set(names))
        self._wait(None if names else self._nothing(records))
        for name in names:
            self._advise(name, records, now)

    def _nothing(self, records: Records) -> str:
        if not records.headers:
            return "; ".join(records.notes)
        of = "" if self._only is None else f" for the model {self._only!r}"
        return f"no request{of} in the last {self._window_seconds:.0f} s of the records; send requests"

    def _wait(self, reason: str | None) -> None:
        if reason != self._waiting and reason is not None:
            log.warning("no records to read yet; waiting", reason=reason)
        self._waiting = reason

    def _forget(self, names: set[str]) -> None:
        """Forgets the models that are not among ``names``: their records are gone."""
        for name in self._models.keys() - names:
            log.info("a model has no records any more; its advice is withdrawn", model=name)
            self._twins.pop(name, None)
        self._models = {name: each for name, each in self._models.items() if name in names}
        for key in [key for key in self._rounds if key[0] not in names]:
            del self._rounds[key]

    def _advise(self, name: str, records: Records, now: float) -> None:
        if name not in self._twins:
            if len(self._twins) >= MAX_MODELS:
                self._refuse(name, f"only {MAX_MODELS} models get advice; set --model")
                return
            self._twins[name] = self._make_twin()
        try:
            advice = self._twins[name].advise(records.of(name), now)
        except LmetricError as error:
            self._refuse(name, "; ".join([str(error), *records.notes]))
        except Exception as error:
            log.exception("a round of advice failed", model=name)
            self._refuse(name, f"{type(error).__name__}: {error}", outcome="failed")
        else:
            self._take(name, replace(advice, notes=(*records.notes, *advice.notes)))

    def _take(self, name: str, advice: Advice) -> None:
        before = self._models.get(name)
        number = before.advice.wanted[0].replicas if before is not None and before.advice else None
        wanted = advice.wanted[0]
        if wanted.replicas != number:
            log.info(
                "engines wanted",
                model=name,
                engines=advice.engines,
                wanted=wanted.replicas,
                low=wanted.low,
                high=wanted.high,
            )
        self._models = {**self._models, name: ModelAdvice(advice, time.monotonic())}
        self._rounds[name, "advice"] += 1

    def _refuse(self, name: str, reason: str, outcome: str = "refused") -> None:
        """Withdraws the last advice, too: it was made of other records."""
        before = self._models.get(name)
        if before is None or before.refused is None:
            log.warning("no capacity advice", model=name, reason=reason)
        self._models = {**self._models, name: ModelAdvice(refused=reason)}
        self._rounds[name, outcome] += 1

    # -- answers

    def _fresh(self, model: ModelAdvice) -> bool:
        return model.advice is not None and time.monotonic() - model.advised_at <= self.stale_seconds

    def state(self) -> dict[str, Any]:
        """The content of /advice."""
        now = time.monotonic()
        models = {}
        for name, model in self._models.items():
            fresh = self._fresh(model)
            models[name] = {
                "advice": model.advice if fresh else None,
                "age_seconds": now - model.advised_at if fresh else None,
                "refused": None if fresh else model.refused or "the last advice is too old",
            }
        return {
            "slo": self._slo,
            "interval_seconds": self.interval_seconds,
            "stale_after_seconds": self.stale_seconds,
            "waiting": self._waiting,
            "last_round_seconds": self._round_seconds,
            "models": models,
        }

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the advice. Stale advice has no sample."""
        labels = ("model", "role", "type")
        wanted = GaugeMetricFamily(
            "lmetric_wanted_replicas",
            "Engines that meet the SLO under the forecast demand; 0 for types and roles that do not run; "
            "absent without fresh advice",
            labels=labels,
        )
        low = GaugeMetricFamily(
            "lmetric_wanted_replicas_low", "Lower end of the interval of wanted engines", labels=labels
        )
        high = GaugeMetricFamily(
            "lmetric_wanted_replicas_high", "Upper end of the interval of wanted engines", labels=labels
        )
        age = GaugeMetricFamily(
            "lmetric_capacity_advice_age_seconds", "Age of the capacity advice", labels=("model",)
        )
        rounds = CounterMetricFamily(
            "lmetric_capacity_rounds",
            "Rounds of advice, by outcome: advice, refused (the records cannot answer), failed (a defect)",
            labels=("model", "outcome"),
        )
        now = time.monotonic()
        for name, model in self._models.items():
            for outcome in OUTCOMES:
                rounds.add_metric((name, outcome), self._rounds[name, outcome])
            if model.advice is None or not self._fresh(model):
                continue
            for each in model.advice.wanted:
                key = (name, each.role, each.type)
                wanted.add_metric(key, each.replicas)
                low.add_metric(key, each.low)
                high.add_metric(key, each.high)
            age.add_metric((name,), now - model.advised_at)
        yield from (wanted, low, high, age, rounds)


class _Rounds(threading.Thread):
    """Runs rounds until it is stopped. A daemon: a round in progress must not delay the end."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(name="rounds", daemon=True)
        self._watch, self._over = watch, threading.Event()

    def run(self) -> None:
        """Runs rounds with a pause of the interval after each."""
        while not self._over.is_set():
            try:
                self._watch.round(time.time())
            except Exception:
                log.exception("a round failed")
            self._over.wait(self._watch.interval_seconds)

    def stop(self) -> None:
        """Ends the thread after the round in progress."""
        self._over.set()

    @property
    def healthy(self) -> bool:
        """Whether the thread runs, and no round takes too long."""
        begun = self._watch.round_began
        return self.is_alive() and (begun is None or time.monotonic() - begun < MAX_ROUND_SECONDS)


class _Pages:
    """The HTTP pages."""

    def __init__(self, watch: Watch, rounds: _Rounds) -> None:
        self._watch, self._rounds = watch, rounds
        self._process = ProcessCollector(registry=None)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/advice", self._advice)
        app.router.add_get("/health", self._health)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        openmetrics = wants_openmetrics(request.headers.get("accept"))
        families = [*self._watch.metrics(), *LogWriter.metrics(), *self._process.collect()]
        kind = OPENMETRICS if openmetrics else TEXT
        return web.Response(
            body=await render(families, openmetrics), headers=_HEADERS | {"content-type": kind}
        )

    async def _advice(self, _: web.Request) -> web.Response:
        options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
        text = orjson.dumps(self._watch.state(), option=options)
        return web.Response(body=text, content_type="application/json", headers=_HEADERS)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._rounds.healthy else 503, headers=_HEADERS)


async def _serve(watch: Watch, rounds: _Rounds, host: str, port: int) -> int:
    """Serves until SIGTERM (returns 0) or Ctrl-C (returns 130). Raises PortError."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not ended.done():
            ended.set_result(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_DONE)

    runner = web.AppRunner(
        _Pages(watch, rounds).application(), access_log=None, shutdown_timeout=STOP_SECONDS
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host or None, port).start()
        except (OSError, OverflowError) as error:
            raise port_error(host, port, error) from None
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        log.info(
            "capacity advice is served",
            url=url_at("http", host, runner.addresses[0][1]),
            records=[str(path) for path in watch.paths],
            interval_seconds=watch.interval_seconds,
        )
        rounds.start()
        code = await ended
        log.info("stopped")
        return code
    finally:
        rounds.stop()
        await runner.cleanup()


def run_watch(watch: Watch, *, host: str, port: int, json_lines: bool) -> int:
    """Sets up logs, and serves advice until a signal. Returns the process's exit code.

    Raises:
        FileNotFoundError: a path of the records does not exist.
        PortError: the address is not usable.
    """
    for path in watch.paths:
        if not path.exists():
            raise not_found(path)
    configure_logging(Log.model_validate({"json": json_lines}))
    with contextlib.suppress(OSError):
        os.nice(NICE)
    rounds = _Rounds(watch)
    code = asyncio.run(_serve(watch, rounds, host, port))
    if rounds.is_alive():
        # A thread in native code aborts the process if it returns to an interpreter that has ended.
        flush_logs()
        os._exit(code)
    return code
