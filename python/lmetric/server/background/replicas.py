"""Exchange between routers: each publishes its in-flight load and the use of its budgets.

Without the exchange, routers see each other's requests only in engine reports, once a second, and
send the next requests to the same idle engine. Routers send messages directly over HTTP: no shared
store between them can fail.

Most messages hold only what changed since the last message that the other router has received. Each
message has a version, and names the version that it builds on. The core notes what changed, and
reads and writes the messages (`rust/core/src/router/listeners/message.rs`, `rust/core/src/budget`).
The load of a silent router no longer counts; its budgets count until their periods have passed.
"""

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmetric._core import BadValueError, Budgets, LoadFormatError, LoadMessage, encode_load
from lmetric.config import ReplicasConfig, read_secret
from lmetric.server.api.auth import BearerToken, is_local
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.background.redis_budgets import RedisBudgets
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.periodic import periodic
from lmetric.server.tls.contexts import outgoing_context
from lmetric.server.upstream.connection import connect_error, request_error

log = structlog.get_logger("lmetric.replicas")

PATH = "/replicas"
CONTENT_TYPE = "application/octet-stream"
RESOLVE_SECONDS = 5.0
# Limit on the routers that this one sends to and receives from; the core has the same limit.
MOST_ADDRESSES = 64
MOST_ANSWER_BYTES = 4096  # an answer is an id and a version, or an error of one sentence
FULL_SECONDS = 60.0  # time between two full messages to a router

# Limit on the body of a message: 16,384 instances with long names and many numbers, and 10,000
# budgets.
MOST_MESSAGE_BYTES = 16 << 20


class Address:
    """An address of another router, or of this one."""

    def __init__(self, url: str, ip: str, port: int) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.server_hostname = parts.hostname if parts.scheme == "https" else None
        self.place = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        self.url = f"{parts.scheme}://{self.place}{parts.path.rstrip('/')}{PATH}"
        self.own = False
        self.reached: bool | None = None  # None: not tried yet
        self.error: str | None = None
        self.lost_at: float | None = None  # Unix time of the first failure since it was reached
        self.sending: asyncio.Task[None] | None = None
        self.version: int | None = None  # last load that it received; None: the next message is full
        self.full_at = -math.inf  # time of the last full message, monotonic clock


class Replicas:
    """The exchange of load and budgets with the other routers of the fleet."""

    def __init__(self, config: ReplicasConfig, fleet: Fleet, budgets: Budgets) -> None:
        self.config = config
        self.fleet = fleet
        self.budgets = budgets
        self.id = token_hex(8)
        self.addresses: dict[tuple[str, str], Address] = {}
        self.received: dict[str, float] = {}  # by router: time of its last message, monotonic clock
        # By router whose budgets do not count here: how far its clock is ahead, seconds.
        self.other_clocks: dict[str, float] = {}
        self._version = 0  # of the load and the budgets of this router
        self._counts: Counter[tuple[str, str]] = Counter()
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
        url = config.redis_url
        self.redis: RedisBudgets | None = None
        if self.on or url is not None:
            budgets.share(self.id)
        if url is not None:
            self.redis = RedisBudgets(url.get_secret_value(), self.id, budgets, interval=config.interval)

    @property
    def on(self) -> bool:
        """Whether other routers are configured."""
        return bool(self.config.urls)

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
        if self.redis is not None:
            self.redis.start()
        if not self.on:
            return
        await self.connect()
        self._tasks = [
            periodic("replicas' addresses", RESOLVE_SECONDS, self._resolve),
            periodic("replicas", self.config.interval, self._round),
        ]

    async def stop(self) -> None:
        """Stops the exchange and closes its connections."""
        if self.redis is not None:
            await self.redis.stop()
        sending = [address.sending for address in self.addresses.values() if address.sending is not None]
        for task in [*self._tasks, *sending]:
            task.cancel()
        await asyncio.gather(*self._tasks, *sending, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def authorize(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError (401) unless the header carries the token of the replicas.

        Without a configured token, programs on this machine need none; web pages get a 403.
        """
        if self._expected is None:
            if not is_local(headers):
                raise ApiError(403, f"{PATH} refuses requests from web pages; set replicas.token")
        elif not self._expected.matches(headers.get("authorization")):
            raise ApiError(
                401,
                "wrong replica token; set the same replicas.token on all routers",
                headers={"www-authenticate": "Bearer"},
            )

    def receive(self, body: bytes) -> dict[str, Any]:
        """Applies a load message from another router. Returns the answer to it. Raises ApiError.

        The answer has the version of the load that counts here, or null if the next message must
        be full.
        """
        try:
            message = LoadMessage(body)
        except LoadFormatError as error:
            self._counts["received", "other_version"] += 1
            raise ApiError(409, str(error), code="other_version") from None
        except BadValueError as error:
            self._counts["received", "refused"] += 1
            raise bad(str(error)) from None
        version = self._apply(message) if message.sender != self.id else None
        return {"router": self.id, "version": version, "keys": self.keys_version()}

    def _apply(self, message: LoadMessage) -> int | None:
        sender = message.sender
        if sender not in self.received and len(self.received) >= MOST_ADDRESSES:
            self._counts["received", "refused"] += 1
            raise ApiError(
                409,
                f"this router already receives load from {MOST_ADDRESSES} routers, the limit",
                code="too_many",
            )
        try:
            counted, ahead = self.budgets.merge(message.budgets, _times())
            applied = [model.router.import_load(message, model.name) for model in self.fleet.models]
        except BadValueError as error:
            self._counts["received", "refused"] += 1
            raise bad(str(error)) from None
        self._compare_clocks(sender, ahead)
        if not (counted and all(applied)):  # another model may be new here; a full message has all again
            self._counts["received", "incomplete"] += 1
            return None
        if sender not in self.received:
            log.info("another router sends its load", router=sender)
        self.received[sender] = time.monotonic()
        self._counts["received", "accepted"] += 1
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
        for model in self.fleet.models:
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
            oldest, self._version = min(known, default=self._version), self.budgets.enter()
            for model in self.fleet.models:
                model.router.enter_load(self._version, oldest)
        for address in others:
            if address.sending is not None and not address.sending.done():
                self._counts["sent", "busy"] += 1  # the last message has no answer yet
                continue
            if (base := address.version) is None:
                address.full_at = now
            if base not in messages:
                routers = [(model.name, model.router) for model in self.fleet.models]
                budgets = self.budgets.encode(base, _times())
                messages[base] = encode_load(self.id, self._version, base, routers, budgets=budgets)
            address.version = self._version  # unless the message fails
            sending = self._send(address, messages[base], self._version)
            address.sending = asyncio.create_task(sending)

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
            body = await _read(answer, most)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {body[:200].decode(errors='replace')}")
        return body

    async def _send(self, address: Address, message: bytes, version: int) -> None:
        try:
            router, counted, keys = _sender(await self.call(address, message))
            address.own = router == self.id
            if counted != version:
                address.version = None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            address.version = None
            own_words = isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError)
            reason = str(error) if own_words else request_error(error, self.config.silent_after)
            self._counts["sent", "failed"] += 1
            if address.reached is not False:
                log.warning("cannot reach another router", address=address.place, reason=reason)
                address.lost_at = time.time()
            address.reached, address.error = False, reason
        else:
            if address.own:
                return
            self._counts["sent", "accepted"] += 1
            if address.reached is False:
                log.info("another router is reachable again", address=address.place)
            address.reached, address.error, address.lost_at = True, None, None
            self.on_keys_version(address, router, keys)

    async def _resolve(self) -> None:
        """Looks up the addresses of all routers. If a look-up fails, the old addresses stay."""
        loop = asyncio.get_running_loop()
        found: dict[tuple[str, str], Address] = {}
        self.not_found = {url: why for url, why in self.not_found.items() if url in self.config.urls}
        for url in self.config.urls:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            try:
                infos = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
            except OSError as error:
                reason = str(connect_error(error))
                if self.not_found.get(url) != reason:
                    self.not_found[url] = reason
                    log.warning("cannot look up the address of replicas", url=url, reason=reason)
                found |= {key: known for key, known in self.addresses.items() if key[0] == url}
                continue
            self.not_found.pop(url, None)
            for *_, sockaddr in infos:
                key = (url, str(sockaddr[0]))
                found[key] = self.addresses.get(key) or Address(url, key[1], port)
        if len(found) > MOST_ADDRESSES:
            log.warning("too many replicas; the rest is ignored", found=len(found), most=MOST_ADDRESSES)
            found = dict(sorted(found.items())[:MOST_ADDRESSES])
        for key, gone in self.addresses.items():
            if key not in found and gone.sending is not None:
                gone.sending.cancel()
        self.addresses = found

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
            "redis": None if self.redis is None else self.redis.state(),
        }

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics of the exchange."""
        replicas = GaugeMetricFamily("lmetric_replicas", "Other routers whose in-flight load counts here")
        replicas.add_metric((), len(self.received))
        yield replicas
        messages = CounterMetricFamily(
            "lmetric_replica_messages",
            "Messages between routers: sent and received, by outcome",
            labels=("direction", "outcome"),
        )
        for (direction, outcome), count in self._counts.items():
            messages.add_metric((direction, outcome), count)
        yield messages
        up = GaugeMetricFamily(
            "lmetric_redis_up", "1: budgets are shared through Redis; 0: it cannot be used"
        )
        if self.redis is not None:
            up.add_metric((), float(self.redis.reached is True))
        yield up


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


async def _read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Reads an answer. Raises ValueError if it is too long; its connection is then closed."""
    body = bytearray()
    while part := await answer.content.read(most + 1 - len(body)):
        body += part
        if len(body) > most:
            raise ValueError(f"an answer of more than {most} bytes")
    return bytes(body)
