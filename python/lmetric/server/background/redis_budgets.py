"""Budgets of several routers through Redis or Valkey: each publishes its counts, and reads others.

A hash has the counts of each router, as in its state file. A second hash has their marks: a
checksum and the minute of the Redis server's clock. A router reads the counts whose mark has
changed, and compares its own clocks with the Redis server's. No request waits for Redis: without
it, a router goes on with the counts that it knows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from lmetric._core import Budgets, LmetricError
from lmetric.config import ConfigError
from lmetric.extras import install
from lmetric.host_names import look_up
from lmetric.server.fleet.problem import Problem

log = structlog.get_logger("lmetric.replicas")

# In braces: a Redis server in cluster mode refuses a transaction about keys of several slots.
COUNTS, MARKS = "{lmetric:budgets}", "{lmetric:budgets}:marks"
ANSWER_SECONDS = 1.0
RETRY_SECONDS = 1.0  # pause after a failure
KEPT_SECONDS = 32 * 86_400  # longer than each period
# A router without a mark for this long has ended. The others publish its counts with their own.
ENDED_MINUTES = 10
MOST_ROUTERS = 256
MOST_COUNTS_BYTES = 16 << 20  # of one router


@dataclass
class RedisState:
    """The state of the exchange.

    Attributes:
        address: of the Redis server, without the password.
        reached: whether the last round succeeded; None: there was none.
        error: why not.
        lost_at: Unix time of the first failure since it was reached.
        routers: the other routers whose counts are known.
        bad_values: by router: why its counts cannot be read.
    """

    address: str
    reached: bool | None = None
    error: str | None = None
    lost_at: float | None = None
    routers: int = 0
    bad_values: Mapping[str, str] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        """Yields why budgets are not exchanged."""
        if self.reached is False:
            cause = "Redis cannot be used: the routers do not share budgets"
            fix = "correct what the reason names; the router tries again by itself"
            yield Problem("redis", cause, f"{self.address}: {self.error}", fix, since=self.lost_at)
        for name, reason in self.bad_values.items():
            fix = "remove the field, or give the routers a database of their own in replicas.redis_url"
            yield Problem("redis", "Redis has counts that no router wrote", f"{name}: {reason}", fix)


class RedisBudgets:
    """The exchange of budgets through a Redis server.

    ``url``: such as redis://:password@host:6379/0. ``router``: ID of this start of the router.
    ``tell``: called after each round that changed something, with the state and the counts of other
    routers, for `Budgets.restore`. Raises ConfigError.
    """

    def __init__(
        self,
        url: str,
        router: str,
        budgets: Budgets,
        interval: float,
        *,
        tell: Callable[[RedisState, list[bytes]], Awaitable[None]],
    ) -> None:
        try:
            from redis.asyncio import ConnectionPool, Redis
            from redis.exceptions import RedisError
        except ImportError:
            raise ConfigError(f"replicas.redis_url needs another package: {install('redis')}") from None
        try:
            # Failures pause all commands, so the client repeats none.
            pool = ConnectionPool.from_url(
                url,
                socket_timeout=ANSWER_SECONDS,
                socket_connect_timeout=ANSWER_SECONDS,
                retry=None,
                max_connections=1,
            )
            pool.connection_kwargs["decode_responses"] = False  # the URL may say else; counts are bytes
            pool.make_connection()  # without a connection yet; raises for an unknown option of the URL
        except (ValueError, TypeError, AttributeError, RedisError) as error:
            raise ConfigError(f"replicas.redis_url is not valid: {error}") from None
        self._redis: Any = Redis(connection_pool=pool)
        given = pool.connection_kwargs
        self._host = None if "path" in given else given.get("host", "localhost")
        where = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
        self.state = RedisState(f"{where}, database {given.get('db', 0)}")
        self._tell = tell
        self._told: RedisState | None = None
        self._merged: list[bytes] = []  # counts of this round
        self._failures = RedisError, OSError, TimeoutError
        self._router = router
        self._budgets = budgets
        # Its messages have the clock of the Redis server, and no counts.
        self._clock = Budgets(0.0)
        self._clock.share(router)
        self._interval = interval
        self._read: dict[bytes, bytes] = {}  # by router: the last mark
        self._written: tuple[bytes, int] | None = None  # counts and minute
        self._bad_values: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    def start(self) -> None:
        """Starts the exchange."""
        self._task = asyncio.create_task(self._run(), name="budgets in Redis")

    async def _run(self) -> None:
        """Exchanges counts until `stop`, and then once more."""
        while not self._ending.is_set():
            pause = RETRY_SECONDS if self.state.reached is False else self._interval
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            await self._round()

    async def stop(self) -> None:
        """Publishes the last counts, and closes the connection.

        The client may swallow a cancellation, so the task is asked to end.
        """
        self._ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=4 * ANSWER_SECONDS)
            self._task.cancel()
        with contextlib.suppress(*self._failures):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._redis.aclose()

    async def _round(self) -> None:
        try:
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                if self._host is not None and self.state.reached is not True:
                    # The client's own look-up takes one of the event loop's few threads.
                    await look_up(self._host)
                await self._exchange()
        except self._failures as error:
            self._failed(_reason(error))
        except Exception as error:
            if self.state.reached is not False:  # else each second
                log.exception("the exchange of budgets through Redis failed")
            self._failed(_reason(error))
        else:
            if self.state.reached is False:
                log.info("Redis is reachable again; budgets are shared", address=self.state.address)
            self.state.reached, self.state.error, self.state.lost_at = True, None, None
        self.state.routers, self.state.bad_values = len(self._read), dict(self._bad_values)
        merged, self._merged = self._merged, []
        if merged or self.state != self._told:
            self._told = replace(self.state)
            await self._tell(self._told, merged)

    def _failed(self, reason: str) -> None:
        if self.state.reached is not False:
            log.warning(
                "cannot share budgets through Redis; this router goes on with the counts that it knows",
                address=self.state.address,
                reason=reason,
            )
            self.state.lost_at = time.time()
        self.state.reached, self.state.error, self._written = False, reason, None

    async def _exchange(self) -> None:
        """Reads what others have changed, and then publishes what has changed here."""
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.time()
            pipeline.hgetall(MARKS)
            (seconds, micros), marks = await pipeline.execute()
        clock = seconds + micros / 1e6
        ahead = self._ahead(clock)
        if abs(ahead) > Budgets.MOST_SKEW_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            raise TimeoutError(f"this router's clock is {abs(ahead):.0f} s {way} the Redis server's")
        minute = int(clock // 60)
        await self._read_changed(marks, minute)
        await self._publish(minute)

    def _ahead(self, clock: float) -> float:
        """Returns how many seconds this router's clocks are ahead: the larger difference.

        Rolling windows count by the monotonic clock, which does not follow the system clock.
        """
        message = self._clock.encode(None, (clock, clock))
        return -self._budgets.merge(message, (time.monotonic(), time.time()))[1]

    async def _read_changed(self, marks: dict[bytes, bytes], minute: int) -> None:
        others = {name: mark for name, mark in marks.items() if name != self._router.encode()}
        sums = {name: mark.partition(b" ")[0] for name, mark in others.items()}
        changed = [name for name, found in sums.items() if self._read.get(name) != found][:MOST_ROUTERS]
        if changed:
            for name, counts in zip(changed, await self._redis.hmget(COUNTS, changed), strict=True):
                self._merge(name, counts)
                self._read[name] = sums[name]
        self._read = {name: found for name, found in self._read.items() if name in others}
        shown = {_shown(name) for name in others}
        self._bad_values = {name: why for name, why in self._bad_values.items() if name in shown}
        ended = [name for name, mark in others.items() if minute - _minute(mark) > ENDED_MINUTES]
        if ended and self._written is not None:  # after the first publication, which has their counts
            async with self._redis.pipeline() as pipeline:
                pipeline.hdel(COUNTS, *ended)
                pipeline.hdel(MARKS, *ended)
                await pipeline.execute()

    def _merge(self, name: bytes, counts: bytes | None) -> None:
        shown = _shown(name)
        try:
            if counts is None or len(counts) > MOST_COUNTS_BYTES:
                raise LmetricError("no counts" if counts is None else f"{len(counts)} bytes")
            self._budgets.restore(counts, (time.monotonic(), time.time()))
        except LmetricError as error:
            if shown not in self._bad_values:
                log.warning(
                    "Redis has counts that no router wrote", key=COUNTS, field=shown, reason=str(error)
                )
            self._bad_values[shown] = str(error)
        else:
            self._bad_values.pop(shown, None)
            self._merged.append(counts)

    async def _publish(self, minute: int) -> None:
        counts = await asyncio.to_thread(self._budgets.save, (time.monotonic(), time.time()))
        if self._written == (counts, minute):
            return
        async with self._redis.pipeline() as pipeline:
            pipeline.hset(COUNTS, self._router, counts)
            pipeline.hset(MARKS, self._router, f"{counts[-8:].hex()} {minute}")
            for key in (COUNTS, MARKS):
                pipeline.expire(key, KEPT_SECONDS)
            await pipeline.execute()
        self._written = counts, minute


def _minute(mark: bytes) -> int:
    """Returns the minute of a mark; 0: it has none."""
    digits = mark.partition(b" ")[2]
    return int(digits) if digits.isdigit() and len(digits) < 20 else 0


def _shown(name: bytes) -> str:
    return name[:64].decode(errors="replace")


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return text or f"no answer within {ANSWER_SECONDS:.0f} s"
