"""One request on its way: sent to an engine, its answer's bytes to the client as they come.

Until the answer is worth committing to (see `rust/wire`), a failure sends the request to the next engine of
the ranking. After that the client learns of a failure by an event in its stream, or by the closed connection.
"""

import asyncio
import time

from lmetric._core import (
    END,
    ENGINE_ERROR,
    INCOMPLETE,
    OUT,
    PASS,
    READY,
    TOKEN_SHIFT,
    Decision,
    ResponseScanner,
    Ticket,
    WireError,
)
from lmetric.config import ServerConfig
from lmetric.server.fleet import Engine, Pool
from lmetric.server.openai import ApiError
from lmetric.server.upstream import Connection, UpstreamError

ONE_TOKEN = 1 << TOKEN_SHIFT
# Bodies up to this size go out in one write with the head.
JOIN_BYTES = 64 * 1024

# What ends an attempt besides a ticket's failures.
ANSWERED = ""
CANCELLED = "cancelled"
STOPPED = "stopped"

_STATUS = {"refused": 502, "reset": 502, "timeout": 504, "status": 503}


class Relay:
    """One routed request."""

    # Most requests change few of these; what they do not change is not set for each of them.
    committed = False
    close_client = False
    broken: str | None = None  # why the run ends although an answer may have begun
    error = False  # the engine reported an error inside its answer
    reason = ""
    status = 0
    output_tokens = 0
    first_token_at = 0.0
    got_bytes = False
    deadline_from = 0.0
    usage: tuple[int | None, int | None, int | None] = (None, None, None)
    _connection: Connection | None = None
    _stalled_at = 0.0

    def __init__(
        self,
        config: ServerConfig,
        pool: Pool,
        ticket: Ticket,
        transport: asyncio.Transport,
        path: bytes,
        head: bytes,
        body: bytes,
        *,
        stream: bool,
        require_finish: bool,
        http11: bool,
        keep_alive: bool,
    ) -> None:
        self._config = config
        self._pool = pool
        self.ticket = ticket
        self._transport = transport
        self._path = path
        self._head = head
        self._body = body
        self._stream = stream
        self._require_finish = require_finish
        self._http11 = http11
        self._keep_alive = keep_alive

    async def run(self, decision: Decision, request_id: bytes) -> None:
        """Relays the request; returns when the client has its answer, or left.

        Raises ApiError where the client has nothing yet.
        """
        retries = self._config.retries
        name = decision.instance
        label = self._pool.decision_label(decision.id)
        tried = []
        while True:
            engine = self._engine = self._pool.engines[name]
            self._extra = b"x-lmetric-instance: %s\r\nx-lmetric-decision: %s\r\nx-request-id: %s\r\n" % (
                name.encode(),
                label.encode(),
                request_id,
            )
            kind = await self._attempt(engine)
            if kind == ANSWERED:
                return
            if kind in (CANCELLED, STOPPED):
                self._fail_ticket("cancelled")
                if kind == STOPPED and not self.committed:
                    raise ApiError(503, "the router is shutting down", headers={"retry-after": "5"})
                return
            if kind != "status":
                engine.failed(kind, self.reason)
            tried.append(f"{name}: {self.reason}")
            if kind not in retries.failures or len(tried) >= retries.attempts:
                self._fail_ticket(kind)
                break
            following = self.ticket.failed(kind)
            while following is not None and following not in self._pool.engines:
                following = self.ticket.failed("refused")  # removed since the decision
            if following is None:
                break
            name = following
        headers = {"x-lmetric-decision": label}
        if kind == "status":
            headers["retry-after"] = "1"
        raise ApiError(
            _STATUS[kind], f"no engine could answer ({'; '.join(tried)})", code=kind, headers=headers
        )

    async def _attempt(self, engine: Engine) -> str:
        connection = engine.upstream.take()
        while True:
            fresh = connection is None
            if connection is None:
                try:
                    connection = await engine.upstream.connect()
                except UpstreamError as error:
                    if self.broken is not None:
                        return self.broken
                    self.reason = str(error)
                    return error.kind
                if self.broken is not None:
                    engine.upstream.give(connection)
                    return self.broken
            kind = await self._ask(engine, connection)
            # An engine may close a kept connection just when the next request is on its way: no failure.
            if kind != "reset" or fresh or self.got_bytes:
                return kind
            connection = None

    async def _ask(self, engine: Engine, connection: Connection) -> str:
        if connection.transport.is_closing():
            self.reason = "connection closed as soon as it was made"
            return "reset"
        self._connection = connection
        scanner = self._scanner = connection.scanner
        scanner.begin(self._http11, self._require_finish)
        self.got_bytes = False
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        connection.sink = self
        now = self.deadline_from = time.monotonic()
        self.ticket.sent(now)
        head = engine.upstream.head(self._path) + self._head
        if len(self._body) <= JOIN_BYTES:
            connection.transport.write(head + self._body)
        else:
            connection.transport.write(head)
            connection.transport.write(self._body)
        if self._stalled_at:
            connection.transport.pause_reading()
        try:
            return await self._done
        finally:
            self._drop()

    # What the engine's connection calls.

    def received(self, data: bytes) -> None:
        """Bytes from the engine."""
        now = time.monotonic()
        if self.committed:
            self.deadline_from = now
        self.got_bytes = True
        try:
            flags = self._scanner.feed(data)
        except WireError as error:
            self._fault("reset", str(error))
            return
        self._step(flags, data, now)

    def lost(self) -> None:
        """The engine's connection closed."""
        self._connection = None
        try:
            flags = self._scanner.eof()
        except WireError as error:
            self._fault("reset", str(error))
            return
        self._step(flags, b"", time.monotonic())

    def _step(self, flags: int, data: bytes, now: float) -> None:
        scanner = self._scanner
        if flags & PASS:
            self._transport.write(data)
        elif flags & OUT:
            self._transport.write(scanner.take())
        elif flags & READY and not self._commit(flags, scanner):
            return
        if flags >= ONE_TOKEN:
            self._count(flags >> TOKEN_SHIFT, now)
        if flags & (END | INCOMPLETE | ENGINE_ERROR):
            self._ending(flags, scanner, now)

    def _commit(self, flags: int, scanner: ResponseScanner) -> bool:
        status = scanner.status
        retries = self._config.retries
        if status in retries.statuses:
            self._settle("status", f"status {status}")
            return False
        if scanner.event_stream and status == 200:
            code = scanner.error_code
            if flags & ENGINE_ERROR and code in retries.statuses:
                self._settle("status", f"error {code} as the first event")
                return False
            if flags & INCOMPLETE and not scanner.tokens:
                self._settle("reset", "the stream ended without a token")
                return False
        self.committed = True
        self.deadline_from = time.monotonic()
        self.status = status
        self._body = b""
        self._transport.write(scanner.commit(self._extra, not self._keep_alive))
        return True

    def _count(self, tokens: int, now: float) -> None:
        if not self.output_tokens:
            self.first_token_at = now
            self.ticket.first_token(now)
            if tokens > 1:
                self.ticket.tokens(tokens - 1, now)
        else:
            self.ticket.tokens(tokens, now)
        self.output_tokens += tokens

    def _ending(self, flags: int, scanner: ResponseScanner, now: float) -> None:
        if flags & ENGINE_ERROR:
            self.error = True
        if flags & INCOMPLETE:
            self._fault("engine_error", "the engine's stream ended without a finish_reason")
        elif flags & END:
            self._finish(scanner, now)

    def _finish(self, scanner: ResponseScanner, now: float) -> None:
        prompt, cached, output = self.usage = scanner.usage
        self.close_client |= scanner.closes_client
        if self.error or scanner.aborted or self.status >= 400:
            self._fail_ticket("engine_error")
        else:
            self.ticket.finished(
                prompt_tokens=prompt,
                cached_tokens=cached,
                output_tokens=self.output_tokens or None if output is None else output,
                now=now,
            )
        self._engine.failures = 0
        load = scanner.load
        if load is not None:
            report(self._pool, self._engine.name, load)
        if self._connection is not None:
            if self._stalled_at:
                self._connection.transport.resume_reading()
            self._connection.release()
            self._connection = None
        self._done.set_result(ANSWERED)

    def _fault(self, kind: str, reason: str) -> None:
        """The answer cannot go on: to the next engine if nothing was sent, else an error in the stream."""
        if not self.committed:
            self._settle("reset" if kind == "engine_error" else kind, reason)
            return
        error = ApiError(502, f"the answer of engine {self._engine.name} broke off: {reason}", code=kind)
        self._cut(error)
        self._engine.failed(kind, reason)
        self._fail_ticket(kind)
        self.reason = reason
        self.error = True
        self._done.set_result(ANSWERED)

    def _cut(self, error: ApiError) -> None:
        tail = self._scanner.end_with(error.body())
        if tail:
            self._transport.write(tail)
            self.close_client |= self._scanner.closes_client
        else:
            self.close_client = True
        self._drop()

    def _settle(self, kind: str, reason: str) -> None:
        self.reason = reason
        self._drop()
        if not self._done.done():
            self._done.set_result(kind)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def _fail_ticket(self, kind: str) -> None:
        """Closes the ticket as failed, even where it could move on."""
        if self.ticket.open and self.ticket.failed(kind) is not None:
            self.ticket.failed("engine_error")

    # What the client's connection and the server call.

    def client_gone(self) -> None:
        """The client left: the engine's connection closes, which stops its work."""
        self.broken = CANCELLED
        if self._connection is not None:
            self._settle(CANCELLED, "the client left")

    def client_slow(self) -> None:
        """The client does not keep up: stop reading from the engine."""
        self._stalled_at = time.monotonic()
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def client_ready(self) -> None:
        """The client caught up."""
        self._stalled_at = 0.0
        self.deadline_from = time.monotonic()
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def stop(self) -> None:
        """The server stops: ends the answer with an error."""
        self.broken = STOPPED
        if self._connection is None:
            return
        if self.committed:
            self._cut(ApiError(503, "the router is shutting down", code="shutting_down"))
            self.error = True
        self._settle(STOPPED, "the router is shutting down")

    def check(self, now: float) -> None:
        """Called now and then: ends what takes too long."""
        if self._connection is None:
            return
        limits = self._config.timeouts
        if self._stalled_at:
            if now - self._stalled_at > limits.slow_client:
                self.broken = CANCELLED
                self._settle(CANCELLED, "the client does not read")
                self._transport.abort()
        elif self.committed:
            if now - self.deadline_from > limits.between_chunks:
                self._fault("timeout", f"nothing for {limits.between_chunks:g} s")
        else:
            limit = limits.first_byte if self._stream else limits.answer
            if now - self.deadline_from > limit:
                self._settle("timeout", f"no answer within {limit:g} s")


def report(pool: Pool, engine: str, header: str) -> None:
    """Takes in an `endpoint-load-metrics` header of the TEXT form; what is no number is passed over."""
    values: dict[str, float] = {}
    for item in header.removeprefix("TEXT ").split(","):
        name, _, value = item.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            continue
    waiting = values.get("named_metrics.num_requests_waiting")
    usage = values.get("named_metrics.kv_cache_usage_perc")
    if waiting is not None or usage is not None:
        pool.router.engine_report(engine, waiting=waiting, kv_usage=usage)
