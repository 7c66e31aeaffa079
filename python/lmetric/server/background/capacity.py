"""The capacity twin's process: its rounds, its advice, and what happens when it fails.

The twin runs in a process of its own with a low priority, and traffic never waits for it.
Advice is withdrawn when it is older than `capacity.stale_after`, and as soon as the twin refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson
import structlog
from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric.config import CapacityConfig, RecordsConfig
from lmetric.policies import is_code
from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.fleet import Fleet

log = structlog.get_logger("lmetric_lab.capacity")

COMMAND = (sys.executable, "-m", "lmetric_lab.capacity.worker")
RESTART_SECONDS, RESTART_SECONDS_MAX = 5.0, 300.0  # pauses after failures: doubled to the maximum
STOP_SECONDS = 2.0
LINE_BYTES = 4 << 20  # longest answer
STDERR_BYTES = 2_000
OUTCOMES = ("advice", "refused", "failed")


class ModelAdvice(Struct):
    """The last answer for a model. Times are in seconds on the monotonic clock."""

    at: float  # of the last round
    advice: dict[str, Any] | None = None
    advised_at: float = 0.0
    refused: str | None = None


class CapacityTwin:
    """Runs the twin's process and keeps its last answers."""

    def __init__(self, config: CapacityConfig, records: RecordsConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._settings = config.model_dump() | {"path": str(records.path)}
        self._models: dict[str, ModelAdvice] = {}
        self._rounds: Counter[tuple[str, str]] = Counter()
        self._restarts = 0
        self._error: str | None = None  # why no process runs
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._round_seconds = 0.0

    def start(self) -> None:
        """Starts the process, and the rounds."""
        self._task = asyncio.create_task(self._forever(), name="capacity twin")

    async def stop(self) -> None:
        """Ends the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- rounds

    async def _forever(self) -> None:
        pause = RESTART_SECONDS
        while True:
            started = time.monotonic()
            try:
                await self._run()
            except (OSError, ValueError, TimeoutError) as error:
                self._fail(str(error) or type(error).__name__)
            if time.monotonic() - started > RESTART_SECONDS_MAX:
                pause = RESTART_SECONDS  # it ran well before
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_SECONDS_MAX)
            self._restarts += 1

    def _fail(self, reason: str) -> None:
        for pool in self._fleet.pools:
            self._rounds[pool.name, "failed"] += 1
        if self._error is None:
            log.error("the capacity twin failed; it starts again, and traffic goes on", reason=reason)
        self._error = reason

    async def _run(self) -> None:
        """Runs one process until it fails. Raises what made it fail."""
        process = self._process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        assert process.stderr is not None
        last: list[bytes] = []
        errors = asyncio.create_task(_drained(process.stderr, last))
        try:
            await self._send(process, self._settings)
            number = 0
            while True:
                number += 1
                await self._round(process, number, last)
                await asyncio.sleep(self._config.interval)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            errors.cancel()
            self._process = None

    async def _send(self, process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
        """Raises OSError if the process has ended."""
        assert process.stdin is not None
        try:
            process.stdin.write(orjson.dumps(message) + b"\n")
            await process.stdin.drain()
        except RuntimeError as closed:  # of uvloop
            raise BrokenPipeError(str(closed)) from closed

    async def _round(self, process: asyncio.subprocess.Process, number: int, last: list[bytes]) -> None:
        assert process.stdout is not None
        running = {pool.name: pool.router.in_flight() for pool in self._fleet.pools}
        begun = time.monotonic()
        line = b""
        try:
            await self._send(
                process, {"round": number, "now": time.time(), "running": running, "code": self._code()}
            )
            async with asyncio.timeout(self._config.timeout):
                line = await process.stdout.readline()
        except TimeoutError:
            raise TimeoutError(f"a round took longer than {self._config.timeout:g} s") from None
        except OSError:
            pass  # it has ended
        if not line:
            code = await process.wait()
            said = b"".join(last).decode(errors="replace").strip().splitlines()
            raise ValueError(f"its process ended with {code}: {said[-1] if said else 'no message'}")
        answer = orjson.loads(line)
        if answer.get("round") != number:
            raise ValueError(f"an answer to round {answer.get('round')!r} instead of {number}")
        now = self._round_seconds = time.monotonic()
        self._round_seconds -= begun
        if self._error is not None:
            log.info("the capacity twin works again")
            self._error = None
        for name, told in answer["models"].items():
            self._take(name, told, now)
        served = {pool.name for pool in self._fleet.pools}
        self._models = {name: each for name, each in self._models.items() if name in served}

    def _code(self) -> list[str]:
        """The Python policies in the configuration: records may name them, and no others."""
        settings = [pool.policies.settings for pool in self._fleet.pools]
        policies = [policy for each in settings for policy in (each.policy, *each.policies.values())]
        return sorted({policy for policy in policies if isinstance(policy, str) and is_code(policy)})

    def _take(self, name: str, told: dict[str, Any], now: float) -> None:
        model = self._models.setdefault(name, ModelAdvice(now))
        before, model.at, model.refused = model.refused, now, told.get("refused")
        if (advice := told.get("advice")) is None:
            # A refusal also withdraws the last advice: it was made of other records.
            model.advice = None
            self._rounds[name, "refused"] += 1
            if before is None:
                log.warning("no capacity advice", model=name, reason=model.refused)
            return
        if before is not None:
            log.info("capacity advice again", model=name)
        model.advice, model.advised_at = advice, now
        self._rounds[name, "advice"] += 1

    # -- what others see

    def _fresh(self, model: ModelAdvice) -> bool:
        return model.advice is not None and time.monotonic() - model.advised_at <= self._config.stale_after

    def state(self) -> dict[str, Any]:
        """The content of /advice."""
        now = time.monotonic()
        models = {}
        for name, model in self._models.items():
            fresh = self._fresh(model)
            reason = model.refused or self._error
            if not fresh and reason is None:
                reason = "the last advice is too old"
            models[name] = {
                "advice": model.advice if fresh else None,
                "age_seconds": now - model.advised_at if fresh else None,
                "refused": None if fresh else reason,
            }
        return {
            "slo": self._config.slo,
            "interval_seconds": self._config.interval,
            "stale_after_seconds": self._config.stale_after,
            "running": self._process is not None,
            "error": self._error,
            "last_round_seconds": self._round_seconds,
            "models": models,
        }

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the twin. Stale advice has no sample."""
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
        now = time.monotonic()
        for name, model in self._models.items():
            if not self._fresh(model):
                continue
            assert model.advice is not None
            for each in model.advice["wanted"]:
                key = (name, each["role"], each["type"])
                wanted.add_metric(key, each["replicas"])
                low.add_metric(key, each["low"])
                high.add_metric(key, each["high"])
            age.add_metric((name,), now - model.advised_at)
        yield from (wanted, low, high, age)
        rounds = CounterMetricFamily(
            "lmetric_capacity_rounds",
            "Rounds of the capacity twin, by outcome: advice, refused (the records cannot answer), failed "
            "(its process)",
            labels=("model", "outcome"),
        )
        for pool in self._fleet.pools:
            for outcome in OUTCOMES:
                rounds.add_metric((pool.name, outcome), self._rounds[pool.name, outcome])
        yield rounds
        yield CounterMetricFamily(
            "lmetric_capacity_restarts", "Restarts of the capacity twin's process", self._restarts
        )


async def _drained(stream: asyncio.StreamReader, last: list[bytes]) -> None:
    """Reads a stream to its end, and keeps its last bytes."""
    while part := await stream.read(4096):
        last[:] = [b"".join([*last, part])[-STDERR_BYTES:]]


def advice_page(twin: CapacityTwin | None) -> dict[str, Any]:
    """The content of /advice. Raises ApiError (404) if the router has no capacity twin."""
    if twin is None:
        raise ApiError(
            404, "this router gives no capacity advice; set capacity.slo and records.path", code="no_capacity"
        )
    return twin.state()
