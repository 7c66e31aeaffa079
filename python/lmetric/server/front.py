"""The client's side: aiohttp reads requests; relayed answers go past its response machinery as bytes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from secrets import token_hex
from typing import Any
from urllib.parse import unquote

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_protocol import RequestHandler

from lmetric._core import NoInstanceError
from lmetric.config import ServerConfig
from lmetric.server.auth import Keys
from lmetric.server.fleet import Fleet, Pool
from lmetric.server.metrics import Metrics
from lmetric.server.openai import CHAT, COMPLETIONS, PASSED_PATHS, ApiError, Call, parse
from lmetric.server.relay import Relay

log = structlog.get_logger("lmetric.access")

# Request headers that belong to one connection, that the router sets itself, or that only a router may send.
_DROPPED = frozenset(
    {
        b"accept-encoding",
        b"connection",
        b"content-encoding",
        b"content-length",
        b"endpoint-load-metrics-format",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-data-parallel-rank",
        b"x-prefiller-host-port",
        b"x-request-id",
    }
)
_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close"})
REQUEST_ID_LIMIT = 256


class Relayed(web.StreamResponse):
    """An answer that is already on the wire; tells aiohttp only whether the connection goes on."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._goes_on = keep_alive

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self._goes_on

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to do: the head was relayed."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing to do: the body was relayed."""


class ClientConnection(RequestHandler):
    """A client's connection; tells the relay in progress of back pressure and of the client's leaving."""

    __slots__ = ("relay",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.relay: Relay | None = None

    def pause_writing(self) -> None:
        """Called by the loop."""
        super().pause_writing()
        if self.relay is not None:
            self.relay.client_slow()

    def resume_writing(self) -> None:
        """Called by the loop."""
        super().resume_writing()
        if self.relay is not None:
            self.relay.client_ready()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Called by the loop."""
        super().connection_lost(exc)
        if self.relay is not None:
            self.relay.client_gone()


class Front(web.Server):
    """Dispatches requests: to the engines, or to the router's own pages."""

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        keys: Keys,
        metrics: Metrics,
        pages: Callable[["Front", web.BaseRequest, str, str], Awaitable[web.StreamResponse]],
    ) -> None:
        self._options: dict[str, Any] = {
            "keepalive_timeout": config.timeouts.keep_alive,
            "access_log": None,
            "lingering_time": 1.0,
        }
        super().__init__(self.handle)
        self.config = config
        self.fleet = fleet
        self.keys = keys
        self.metrics = metrics
        self.pages = pages
        self.relays: set[Relay] = set()
        self._idle = asyncio.Event()
        self.draining = False
        self.refusing = False
        self._goes_on = Relayed(True)
        self._ends = Relayed(False)
        self._paths = {path: path.encode() for path in (CHAT, COMPLETIONS, *PASSED_PATHS, *config.paths)}
        self._ids = count(1)
        self._id_prefix = token_hex(6)
        self._access = config.log.access
        self._body_limit = config.limits.max_body_bytes
        self._request_limit = config.limits.max_concurrent_requests
        self._ask_load = b"endpoint-load-metrics-format: TEXT\r\n" if config.load.from_answers else b""

    def __call__(self) -> RequestHandler:
        """A new client's protocol."""
        return ClientConnection(self, loop=self._loop, **self._options)

    async def idle_or(self, hurry: asyncio.Event) -> None:
        """Waits until no request is on its way, or for ``hurry``."""
        self._idle.clear()
        if self.relays:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, hurry)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    @property
    def paths(self) -> list[str]:
        """Paths passed to the engines."""
        return list(self._paths)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers one request."""
        path, _, query = request.raw_path.partition("?")
        engine_path = self._paths.get(path)
        try:
            if engine_path is None:
                return await self.pages(self, request, unquote(path), query)
            if request.method != "POST":
                raise ApiError(
                    405, f"{request.method} is not allowed on {path}; use POST", headers={"allow": "POST"}
                )
            return await self._route(request, path, f"{path}?{query}".encode() if query else engine_path)
        except ApiError as error:
            return self._refuse(request, error)
        except Exception:
            log.exception("a request could not be handled", path=path)
            return self._refuse(request, ApiError(500, "the router failed; its log says why"))

    def _refuse(self, request: web.BaseRequest, error: ApiError) -> web.Response:
        request_id = request.headers.get("x-request-id")
        if request_id:
            error.headers.setdefault("x-request-id", request_id[:REQUEST_ID_LIMIT])
        response = web.Response(
            status=error.status, body=error.body(), content_type="application/json", headers=error.headers
        )
        if error.status == 413 or self.draining:
            response.force_close()
        return response

    async def _route(self, request: web.BaseRequest, path: str, engine_path: bytes) -> web.StreamResponse:
        started = time.monotonic()
        tenant = ""
        if self.keys.on:
            headers = request.headers
            tenant = self.keys.tenant(headers.get("authorization"), headers.get("x-api-key"))
        if self.refusing:
            raise ApiError(503, "the router is shutting down", headers={"retry-after": "5"})
        if len(self.relays) >= self._request_limit:
            raise ApiError(503, "too many requests at once", code="too_many", headers={"retry-after": "1"})
        model = ""
        relay: Relay | None = None
        status = 500
        try:
            body = await self._body(request)
            call = parse(path, body)
            pool, adapter = self.fleet.find(call.model)
            model = pool.name
            connection = request.protocol
            transport = request.transport
            if transport is None or not isinstance(connection, ClientConnection):
                return self._ends
            lines, request_id, session = self._lines(request, len(body), call.stream)
            salt = call.salt if adapter is None else f"{adapter}\0{call.salt or ''}"
            prompt_bytes, prompt_tokens = _size(pool, call)
            try:
                decision, ticket = pool.router.route(
                    tokens=call.tokens,
                    text=call.text,
                    prompt_tokens=prompt_tokens,
                    expected_output_tokens=call.max_tokens,
                    session=session or call.session,
                    salt=salt,
                    request_id=request_id.decode("latin-1"),
                    now=started,
                )
            except NoInstanceError as error:
                raise ApiError(
                    503, f"{model}: {error}", code="no_engine", headers={"retry-after": "2"}
                ) from None
            relay = Relay(
                self.config,
                pool,
                ticket,
                transport,
                engine_path,
                lines,
                body,
                stream=call.stream,
                require_finish=path in (CHAT, COMPLETIONS),
                http11=request.version >= (1, 1),
                keep_alive=request.keep_alive and not self.draining,
            )
            del body
            connection.relay = relay
            self.relays.add(relay)
            if connection.writing_paused:
                relay.client_slow()
            with ticket:
                try:
                    await relay.run(decision, request_id)
                finally:
                    self.relays.discard(relay)
                    if self.refusing and not self.relays:
                        self._idle.set()
                    connection.relay = None
            status = relay.status if relay.committed else 499
            if prompt_bytes and relay.usage[0]:
                pool.ratio.learn(prompt_bytes, relay.usage[0])
            goes_on = request.keep_alive and not relay.close_client and not self.draining
            return self._goes_on if goes_on and relay.broken is None else self._ends
        except ApiError as error:
            status = error.status
            raise
        finally:
            ended = time.monotonic()
            self.metrics.request(model, tenant, status, started, ended, relay)
            if self._access:
                log.info(
                    "request",
                    path=path,
                    model=model,
                    tenant=tenant or None,
                    status=status,
                    seconds=round(ended - started, 6),
                    output_tokens=relay.output_tokens if relay else 0,
                    note=relay.reason or None if relay else None,
                )

    async def _body(self, request: web.BaseRequest) -> bytes:
        limit = self._body_limit
        content = request.content
        if content.is_eof() and content.exception() is None:
            body = content.read_nowait()
            if len(body) > limit:
                raise _too_long(limit)
            return body
        headers = request.headers
        try:
            length = int(headers.get("content-length", 0))
        except ValueError:
            length = 0
        if length > limit:
            raise _too_long(limit)
        if headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts = []
        size = 0
        try:
            async with asyncio.timeout(self.config.timeouts.body):
                while not content.at_eof():
                    part = await content.readany()
                    size += len(part)
                    if size > limit:
                        raise _too_long(limit)
                    parts.append(part)
        except TimeoutError:
            seconds = self.config.timeouts.body
            raise ApiError(408, f"the body was not whole within {seconds:g} s") from None
        except ApiError:
            raise
        except Exception as error:
            # aiohttp tells of a broken body (bad chunk, bad compression, client gone) in many ways.
            raise ApiError(400, f"the body could not be read: {error}") from None
        return b"".join(parts)

    def _lines(self, request: web.BaseRequest, length: int, stream: bool) -> tuple[bytes, bytes, str | None]:
        """Header lines for the engine with the end of the head, the request id, and the session."""
        lines = []
        request_id = b""
        session = None
        named: list[bytes] = []
        own_key = self.keys.on
        for name, value in request.raw_headers:
            lower = name.lower()
            if lower in _DROPPED:
                if lower == b"x-request-id":
                    request_id = value[:REQUEST_ID_LIMIT]
                elif lower == b"connection" and value.lower() not in _PLAIN_CONNECTION:
                    named += [token.strip().lower() for token in value.split(b",")]
            elif lower == b"authorization" and own_key:
                continue
            else:
                if lower == b"x-session-id":
                    session = value.decode("latin-1")
                lines.append(b"%s: %s\r\n" % (name, value))
        if named:
            lines = [line for line in lines if line.partition(b":")[0].lower() not in named]
        if not request_id:
            request_id = b"%s-%x" % (self._id_prefix.encode(), next(self._ids))
        load = b"" if stream else self._ask_load
        lines.append(b"%sx-request-id: %s\r\ncontent-length: %d\r\n\r\n" % (load, request_id, length))
        return b"".join(lines), request_id, session


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")


def _size(pool: Pool, call: Call) -> tuple[int, int]:
    """The prompt's length in bytes (0 where given as tokens) and in tokens, estimated where given as text."""
    if call.tokens is not None:
        return 0, len(call.tokens) + call.more_tokens
    text = call.text
    if text is None:
        return 0, 1
    if isinstance(text, str) and not text.isascii():
        text = call.text = text.encode()
    return len(text), pool.ratio.tokens_of(len(text) + call.more_bytes)
