"""Exchange between routers: each publishes its in-flight load and the use of its budgets.

Without the exchange, routers see each other's requests only in engine reports, once a second, and
send the next requests to the same idle engine. Routers send messages directly over HTTP: no shared
store between them can fail.

Most messages hold only what changed since the last message that the other router has received. Each
message has a version, and names the version that it builds on. The core notes what changed, and
reads and writes the messages (`rust/core/src/router/listeners/message.rs`, `rust/core/src/budget`).
The load of a silent router no longer counts; its budgets count until their periods have passed.

Each worker publishes its own load, and the supervisor the budgets of all workers
(`lmetric.server.supervisor.sharing`). Each process counts as a sender.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import structlog

from lmetric._core import BadValueError, Budgets, LoadFormatError, LoadMessage, encode_load
from lmetric.config import ReplicasConfig, read_secret
from lmetric.server.api.auth import BearerToken, is_local
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.replica_pages import CONTENT_TYPE, ID_DIGITS, PATH
from lmetric.server.background.addresses import MOST_ADDRESSES, Address, look_up, read_answer
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.periodic import periodic
from lmetric.server.fleet.problem import Problem
from lmetric.server.tls.contexts import outgoing_context
from lmetric.server.upstream.request_errors import request_error

if TYPE_CHECKING:
    from lmetric.server.background.redis_budgets import RedisBudgets, RedisState

log = structlog.get_logger("lmetric.replicas")

RESOLVE_SECONDS = 5.0
MOST_ANSWER_BYTES = 4096  # an answer is an id and a version, or an error of one sentence
FULL_SECONDS = 60.0  # time between two full messages to a router


class Replicas:
    """The exchange of load and budgets with the other routers of the fleet.

    ``models``: returns those whose load is published. ``router``: ID of this start of the router.
    ``process``: ID of this process, which begins with that of its router. ``pass_on``: in a worker:
    gives a message, and the version of its load that counts here, to the other processes of the
    router. Returns the answer to it. Raises ConfigError.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        models: Callable[[], Sequence[Model]],
        budgets: Budgets,
        *,
        router: str,
        process: str,
        pass_on: Callable[[bytes, int | None], Awaitable[dict[str, Any]]] | None = None,
    ) -> None:
        self.config = config
        self._models = models
        self.budgets = budgets
        self.router = router
        self._pass_on = pass_on
        self.id = process
        self.addresses: dict[tuple[str, str], Address] = {}
        self.received: dict[str, float] = {}  # by router: time of its last message, monotonic clock
        # By router whose budgets do not count here: how far its clock is ahead, seconds.
        self.other_clocks: dict[str, float] = {}
        self._version = 0  # of the load and the budgets of this router
        self.counts: Counter[tuple[str, str]] = Counter()
        self.tls = None if config.tls is None else outgoing_context("replicas.tls", config.tls)
        self._token = read_secret(config.token, config.token_file)
        self._expected = BearerToken(self._token) if self._token is not None else None
        self.not_found: dict[str, str] = {}  # by URL: why its last look-up failed
        # The exchange of API keys: the version of this router's keys, and what to do with that of
        # another router.
        self.keys_version: Callable[[], int] = lambda: 0
        self.on_keys_version: Callable[[Address, str, int], None] = lambda *_: None
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self.redis: RedisState | None = None
        # Called with the counts of other routers that were read from Redis.
        self.on_counts: Callable[[RedisState, Sequence[bytes]], Awaitable[None]] | None = None
        if self.shares:
            budgets.share(self.router)
        url = config.redis_url
        self._redis: RedisBudgets | None = None
        if url is not None and pass_on is None:
            from lmetric.server.background.redis_budgets import RedisBudgets

            self._redis = RedisBudgets(
                url.get_secret_value(),
                self.router,
                budgets,
                interval=config.interval,
                tell=self._redis_round,
            )
            self.redis = self._redis.state

    @property
    def on(self) -> bool:
        """Whether other routers are configured."""
        return bool(self.config.urls)

    @property
    def shares(self) -> bool:
        """Whether other routers share the budgets."""
        return self.on or self.config.redis_url is not None

    @property
    def routers(self) -> set[str]:
        """The other routers that send their load."""
        return {sender[:ID_DIGITS] for sender in self.received}

    async def connect(self) -> None:
        """Looks up the other routers, so that `call` reaches them."""
        if not self.on or self._session is not None:
            return
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.config.silent_after),
            headers={"authorization": f"Bearer {self._token}"} if self._token else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            auto_decompress=False,
            read_bufsize=MOST_ANSWER_BYTES,
        )
        await self._resolve()

    async def start(self) -> None:
        """Starts to send messages. Called once the router listens."""
        if self._redis is not None:
            self._redis.start()
        if not self.on:
            return
        await self.connect()
        self._tasks = [
            periodic("replicas' addresses", RESOLVE_SECONDS, self._resolve),
            periodic("replicas", self.config.interval, self._round),
        ]

    async def stop(self) -> None:
        """Stops the exchange and closes its connections."""
        if self._redis is not None:
            await self._redis.stop()
        sending = [address.sending for address in self.addresses.values() if address.sending is not None]
        for task in [*self._tasks, *sending]:
            task.cancel()
        await asyncio.gather(*self._tasks, *sending, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def authorize(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError (401) unless the header carries the token of the replicas.

        Without a configured token, programs on this machine need none; web pages and proxies get a
        403.
        """
        if self._expected is None:
            if not is_local(headers):
                raise ApiError(403, f"{PATH} refuses requests from web pages and proxies; set replicas.token")
        elif not self._expected.matches(headers.get("authorization")):
            raise ApiError(
                401,
                "wrong replica token; set the same replicas.token on all routers",
                headers={"www-authenticate": "Bearer"},
            )

    async def receive(self, body: bytes) -> dict[str, Any]:
        """Applies a load message from another router. Returns the answer to it. Raises ApiError.

        The answer has the version of the load that counts here, or null if the next message must
        be full.
        """
        message = self._read(body)
        is_own = message.sender.startswith(self.router)
        version = None if is_own else self._apply(message)
        if self._pass_on is not None:
            return await self._pass_on(b"" if is_own else body, version)
        return self.answer(version)

    def answer(self, version: int | None) -> dict[str, Any]:
        """Returns the answer to a message. ``version``: of the load that counts here."""
        return {"router": self.router, "version": version, "keys": self.keys_version()}

    def apply(self, body: bytes) -> int | None:
        """Applies a load message that another process of this router has received.

        Returns the version of its load that counts here; None: the next message must be full.
        """
        try:
            return self._apply(self._read(body))
        except ApiError:  # the process that received it has the same limits, and refuses it
            return None

    def _read(self, body: bytes) -> LoadMessage:
        try:
            return LoadMessage(body)
        except LoadFormatError as error:
            self.counts["received", "other_version"] += 1
            raise ApiError(409, str(error), code="other_version") from None
        except BadValueError as error:
            self.counts["received", "refused"] += 1
            raise bad(str(error)) from None

    def _apply(self, message: LoadMessage) -> int | None:
        sender = message.sender
        if sender not in self.received and len(self.received) >= MOST_ADDRESSES:
            self.counts["received", "refused"] += 1
            raise ApiError(
                409,
                f"this router already receives load from {MOST_ADDRESSES} routers, the limit",
                code="too_many",
            )
        try:
            counted, ahead = self.budgets.merge(message.budgets, _times())
            applied = [model.router.import_load(message, model.name) for model in self._models()]
        except BadValueError as error:
            self.counts["received", "refused"] += 1
            raise bad(str(error)) from None
        self._compare_clocks(sender, ahead)
        if not (counted and all(applied)):  # another model may be new here; a full message has all again
            self.counts["received", "incomplete"] += 1
            return None
        if sender not in self.received:
            log.info("another router sends its load", router=sender)
        self.received[sender] = time.monotonic()
        self.counts["received", "accepted"] += 1
        return message.version

    def _compare_clocks(self, sender: str, ahead: float) -> None:
        if abs(ahead) <= Budgets.MOST_SKEW_SECONDS:
            self.other_clocks.pop(sender, None)
            return
        if sender not in self.other_clocks:
            log.warning(
                "the clock of another router differs; its budgets do not count here",
                router=sender,
                seconds_ahead=round(ahead),
            )
        self.other_clocks[sender] = ahead

    async def _round(self) -> None:
        """Sends one message to each router, and drops the load of silent routers."""
        for model in self._models():
            model.router.expire_peers(self.config.silent_after)
        now = time.monotonic()
        for router, at in list(self.received.items()):
            if now - at > self.config.silent_after:
                del self.received[router]
                self.other_clocks.pop(router, None)
                log.warning("another router is silent; its load no longer counts", router=router)
        others = [address for address in self.addresses.values() if not address.own]
        messages: dict[int | None, bytes] = {}
        for address in others:
            if now - address.full_at >= FULL_SECONDS:
                address.version = None
        if others:
            known = [address.version for address in others if address.version is not None]
            oldest, self._version = min(known, default=self._version), self._next_version()
            for model in self._models():
                model.router.enter_load(self._version, oldest)
        for address in others:
            if address.sending is not None and not address.sending.done():
                self.counts["sent", "busy"] += 1  # the last message has no answer yet
                continue
            if (base := address.version) is None:
                address.full_at = now
            if base not in messages:
                routers = [(model.name, model.router) for model in self._models()]
                budgets = b"" if self._pass_on is not None else self.budgets.encode(base, _times())
                messages[base] = encode_load(self.id, self._version, base, routers, budgets=budgets)
            address.version = self._version  # unless the message fails
            sending = self._send(address, messages[base], self._version)
            address.sending = asyncio.create_task(sending)

    def _next_version(self) -> int:
        return self._version + 1 if self._pass_on is not None else self.budgets.enter()

    async def call(
        self, address: Address, data: bytes | None, *, page: str = "", most: int = MOST_ANSWER_BYTES
    ) -> bytes:
        """Posts a message to another router, or gets one of its pages. Returns the answer.

        ``page``: path and query below `PATH`. ``most``: bytes of the answer. Raises ClientError of
        aiohttp, TimeoutError, OSError, and ValueError if the answer is not usable.
        """
        assert self._session is not None
        headers = {"host": address.host, "content-type": CONTENT_TYPE}
        tls, name = self.config.tls, address.server_hostname
        if name is not None and tls is not None:
            name = tls.server_name or name
        async with self._session.request(
            "GET" if data is None else "POST",
            f"{address.url}{page}",
            data=data,
            headers=headers,
            server_hostname=name,
            ssl=True if self.tls is None else self.tls.context,
            allow_redirects=False,  # another address must not get the load
        ) as answer:
            body = await read_answer(answer, most)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {body[:200].decode(errors='replace')}")
        return body

    async def _send(self, address: Address, message: bytes, version: int) -> None:
        try:
            router, counted, keys = _sender(await self.call(address, message))
            address.own = router == self.router
            if counted != version:
                address.version = None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            address.version = None
            own_words = isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError)
            reason = str(error) if own_words else request_error(error, self.config.silent_after)
            self.counts["sent", "failed"] += 1
            if address.reached is not False:
                log.warning("cannot reach another router", address=address.place, reason=reason)
                address.lost_at, address.lost_since = time.time(), time.monotonic()
            address.reached, address.error = False, reason
        else:
            if address.own:
                return
            self.counts["sent", "accepted"] += 1
            if address.reached is False:
                log.info("another router is reachable again", address=address.place)
            address.reached, address.error, address.lost_at = True, None, None
            address.lost_since = math.inf
            self.on_keys_version(address, router, keys)

    async def _resolve(self) -> None:
        """Looks up the addresses of all routers. If a look-up fails, the old addresses stay."""
        found = await look_up(self.config.urls, self.addresses, self.not_found)
        for key, gone in self.addresses.items():
            if key not in found and gone.sending is not None:
                gone.sending.cancel()
        self.addresses = found

    async def _redis_round(self, state: RedisState, counts: Sequence[bytes]) -> None:
        self.redis = state
        if self.on_counts is not None:
            await self.on_counts(state, counts)

    def add_counts(self, state: RedisState | None, counts: Sequence[bytes]) -> None:
        """Adds the counts of other routers that another process of this router has read.

        ``state``: of Redis; None: it is not used.
        """
        self.redis = state
        for each in counts:
            self.budgets.restore(each, _times())

    def state(self) -> dict[str, Any]:
        """Returns the content of /debug/replicas."""
        now = time.monotonic()
        return {
            "router": self.id,
            "sent_to": [
                {"address": a.place, "itself": a.own, "reached": a.reached, "error": a.error}
                for a in self.addresses.values()
            ],
            "received_from": [
                {
                    "router": router,
                    "age_seconds": now - at,
                    "clock_ahead_seconds": self.other_clocks.get(router),
                }
                for router, at in self.received.items()
            ],
            "not_looked_up": self.not_found,
            "redis": None if self.redis is None else asdict(self.redis),
        }

    def problems(self) -> Iterator[Problem]:
        """Yields why load or budgets are not exchanged."""
        fix = "start that router, or take it out of replicas.urls; its load does not count meanwhile"
        for url, reason in self.not_found.items():
            yield Problem("replica", "the address of other routers is not found", f"{url}: {reason}", fix)
        for address in self.addresses.values():
            if address.reached is False and not address.own:
                cause, reason = "another router cannot be reached", f"{address.place}: {address.error}"
                yield Problem("replica", cause, reason, fix, since=address.lost_at)
        if self.redis is not None:
            yield from self.redis.problems()
        for router, ahead in self.other_clocks.items():
            cause = "the clock of another router differs: the routers do not share budgets"
            reason = f"router {router}: {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
            fix = "synchronize the clocks, then restart the router whose clock was wrong"
            yield Problem("replica", cause, reason, fix)


def _times() -> tuple[float, float]:
    return time.monotonic(), time.time()


def _sender(body: bytes) -> tuple[str, object, int]:
    """Returns the ID in an answer, and the versions of load and API keys.

    Raises ValueError if it is not a router's.
    """
    try:
        told = orjson.loads(body)
        return str(told["router"]), told["version"], int(told.get("keys", 0))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError("the answer is not a router's") from None
