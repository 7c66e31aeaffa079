"""One request on its way: sent to an engine, its answer's bytes to the client as they come.

Until the answer is worth committing to (see `rust/wire`), a failure sends the request to the next engine of
the ranking. After that the client learns of a failure by an event in its stream, or by the closed connection.
A relay walks the segments of its request's plan: all but the last are silent (`legs`).
"""

import re
import time
from collections.abc import Callable

import structlog

from lmetric._core import (
    END,
    ENGINE_ERROR,
    INCOMPLETE,
    OUT,
    PASS,
    READY,
    Decision,
    NoInstanceError,
    ResponseReader,
    Ticket,
    WireError,
)
from lmetric.server.api.errors import ApiError
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.bounded import Bounded
from lmetric.server.execution.chain import Chain
from lmetric.server.execution.exchange import FAILED, STOPPING, ClientRequest, InFlightRequest, Rules
from lmetric.server.execution.leg import Leg
from lmetric.server.execution.legs import Legs
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool
from lmetric.server.upstream.connection import Connection

_STATUS = {
    **dict.fromkeys(("refused", "dns", "tls", "unreachable", "reset"), 502),
    "timeout": 504,
    "status": 503,
    "resources": 503,
}

_CORS_FIELDS = re.compile(rb"\r\naccess-control-[^\r\n]*", re.IGNORECASE)

log = structlog.get_logger("lmetric.relay")


class Relay(InFlightRequest, Leg):
    """One routed request: `start()`, then callbacks move it on until it tells ``on_end``, once.

    ``on_end`` gets the request, the relay, and an ApiError where the client has nothing yet. By then the
    ticket is closed.
    """

    __slots__ = (
        "_asked",
        "_call",
        "_chain",
        "_chunked",
        "_connecting",
        "_connection",
        "_deadline_from",
        "_decision",
        "_encoder",
        "_engine",
        "_fresh",
        "_legs",
        "_may_pull",
        "_moves",
        "_on_end",
        "_pieces",
        "_pool",
        "_reader",
        "_require_finish",
        "_rules",
        "_stalled_at",
        "_stream",
        "_target",
        "_ticket",
        "_transport",
        "_tried",
        "body",
        "cached_tokens",
        "close_client",
        "committed",
        "ended",
        "error",
        "first_token_at",
        "output_tokens",
        "prompt_tokens",
        "reason",
        "status",
    )

    _engine: Engine  # the last that was asked
    _reader: Connection

    def __init__(
        self,
        rules: Rules,
        asked: ClientRequest,
        pool: Pool,
        decision: Decision,
        ticket: Ticket,
        body: bytes,
        stream: bool,
        require_finish: bool,
        on_end: Callable[[ClientRequest, InFlightRequest, ApiError | None], None],
        call: ParsedRequest | None = None,
        moves: bool = False,
    ) -> None:
        self._rules = rules
        self._asked = asked
        self._transport = asked.transport
        self._pool = pool
        self._decision = decision
        self._ticket = ticket
        self.body = body  # as the client sent it, until the answer is committed to
        self._stream = stream
        self._require_finish = require_finish
        self._on_end = on_end
        # Where it may be cut between equals, move, or fetch its prompt's front; then its tokenizer is known.
        self._call = call  # until a chain has it
        self._may_pull = pool.pulls and call is not None
        self._moves = moves  # it may be cut, or move
        self._encoder = pool.tokenizer.encoder if call is not None and pool.tokenizer is not None else None
        # Of InFlightRequest and Leg, in slots: a class's attributes take longer to find.
        self.committed = self.close_client = self.ended = self._fresh = False
        self.status = self.output_tokens = 0
        self.prompt_tokens = self.cached_tokens = self.first_token_at = None
        self.reason = ""
        self._connection = self._connecting = self._target = None
        self.error = False  # the engine reported an error inside its answer
        self._pieces = 0  # of the answer, at the last check
        self._deadline_from = 0.0
        self._chunked = False  # what is joined of it goes out in chunks
        self._tried: tuple[str, ...] = ()
        self._legs: Legs | None = None  # where its plan has two segments, of prefill and decode
        self._chain: Chain | None = None  # where it was cut between equals
        self._stalled_at = 0.0

    def start(self, now: float) -> None:
        """Sends the request to the engine of the decision, which was made at ``now``."""
        if self._pool.cuts:
            self.segment(self._decision.instance, now)
        else:
            self.go(self._pool.engines[self._decision.instance], now)

    def segment(self, name: str, now: float) -> None:
        """Sends the segment that is open to its engine; the ticket says which of the plan's it is."""
        engine, ticket, legs = self._pool.engines[name], self._ticket, self._legs
        if self._chain is not None or self._joins(engine):
            self._cut_segment(engine, now)
        elif ticket.follows:
            if legs is None:
                legs = self._legs = Legs(self, self._rules, self._asked, self._pool, ticket)
            legs.begin(engine, self.body, now)
        elif legs is not None and ticket.from_token:
            legs.second(engine, now)
        elif engine.connector is not None and engine.connector.at_once:
            why = "only engines for halves of requests (prefill or decode) of one kind are usable"
            message = f"{self._pool.name}: {why}"
            self.end_with(ApiError(503, message, engines=engine.name, code="no_engine"))
        else:
            self._legs = None
            self.go(engine, now)

    def _joins(self, engine: Engine) -> bool:
        """Whether the answer is, or may have to be, joined from what several engines say."""
        if self._ticket.follows and engine.role != "prefill":
            return True
        at_once = engine.connector is not None and engine.connector.at_once
        mover = self._pool.mover
        moves = mover is not None and self._moves and (self._stream or mover.by == "legs")
        return (moves and self._legs is None and not at_once) or self._pulls

    @property
    def _pulls(self) -> bool:
        """Whether the open segment is to fetch something first."""
        return self._may_pull and self._ticket.pull is not None

    def _cut_segment(self, engine: Engine, now: float) -> None:
        chain, self._legs = self._chain, None
        if chain is None:
            assert self._call is not None  # else nothing is cut between equals
            assert self._encoder is not None
            mover = self._pool.mover if self._moves else None
            kind = Bounded if mover is not None and mover.by == "legs" else Chain
            chain = self._chain = kind(
                self,
                self._rules,
                self._asked,
                self._pool,
                self._ticket,
                self._call,
                self._encoder,
                mover,
            )
            self._call = None
        if self._pulls and chain.fetches(engine, now):
            pass  # it goes on when that is over
        elif self._ticket.follows:
            chain.begin(engine, now)
        elif not chain.last(engine, now):
            self.go(engine, now)

    def refilled(self, engine: Engine, body: bytes) -> bytes:
        """The body as the index wants it to be sent to an engine."""
        refill = engine.refill
        if refill is None:
            return body
        decision = self._decision
        unknown = decision.prompt_tokens - decision.predicted_hit_tokens
        return refill.body(self._asked.path, body, unknown)

    def _ask(self, connection: Connection, now: float) -> None:
        self._connection = self._reader = connection
        connection.begin(self, self._ticket, self._asked.http11, self._require_finish)
        if connection.transport.is_closing():
            self.settle("reset", "connection closed as soon as it was made")
            return
        self._deadline_from = now
        engine = self._engine
        body = self.body
        if self._legs is not None:
            body = self._legs.body(engine, body, now)
        elif self._chain is not None:
            body = self._chain.body(engine, now)
        if engine.refill is not None:
            body = self.refilled(engine, body)
        self._write(connection, body, self._stream)
        # After the write: the index learns of the request now, which takes a while where much of it is new.
        self._ticket.sent(now)
        if self._stalled_at:
            connection.transport.pause_reading()

    # What the engine's connection calls.

    def received(self, flags: int, data: bytes) -> None:
        """A piece of the answer that was not passed on yet."""
        try:
            self._step(flags, data)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """The answer is malformed, or could not be passed on."""
        try:
            if not isinstance(error, WireError):
                raise error
            self._fault("reset", str(error))
        except Exception:
            self.fail()

    def lost(self) -> None:
        """The engine's connection closed."""
        self._connection = None
        try:
            self._step(self._reader.eof(), b"")
        except Exception as error:
            self.failed(error)

    def _step(self, flags: int, data: bytes) -> None:
        reader = self._reader
        if flags & PASS:
            self._transport.write(data)
        elif flags & OUT:
            self._transport.write(reader.take())
        elif flags & READY and not self._commit(flags, reader):
            return
        if flags & (END | INCOMPLETE | ENGINE_ERROR):
            self._ending(flags, reader)

    def _commit(self, flags: int, reader: ResponseReader) -> bool:
        status, statuses = reader.status, self._rules.statuses
        if status in statuses:
            self.settle("status", f"status {status}{self._words(reader)}")
            return False
        if reader.event_stream and status == 200:
            code = reader.error_code
            if flags & ENGINE_ERROR and code in statuses:
                self.settle("status", f"error {code} as the first event")
                return False
            if flags & INCOMPLETE and not reader.tokens:
                self.settle("reset", "the stream ended without a token")
                return False
        legs = self._legs or self._chain
        if legs is not None and legs.broke(status, reader.error_code):
            self._drop()
            self.go(self._engine, time.monotonic())
            return False
        self.committed = True
        self.status = status
        self.body = b""
        client = self._asked.client
        if client.body_size and self._chain is None:  # which keeps the body to the end
            client.release_body()
        write = self._transport.write
        head = reader.commit(self._extra(self._engine.name), not self._asked.keep_alive, write)
        cors = self._asked.cors
        write(_with_cors(head, cors) if cors else head)
        return True

    def _extra(self, instance: str) -> bytes:
        """Lines of the answer's head that are the router's."""
        request_id = self._asked.head.request_id
        lines = f"x-lmetric-decision: {self._label}\r\nx-request-id: {request_id}\r\n".encode("latin-1")
        if not self._rules.show_engines:
            return lines
        lines = b"x-lmetric-instance: %b\r\n%b" % (instance.encode(), lines)
        legs = self._legs or self._chain
        return lines if legs is None else lines + legs.header

    def _words(self, reader: ResponseReader) -> str:
        """What the engine says of its refusal, behind a colon."""
        _, _, body = reader.commit(b"", True).partition(b"\r\n\r\n")
        said = self._engine.adapter.error(body)
        return f": {said}" if said else ""

    @property
    def _label(self) -> str:
        return self._pool.decision_label(self._decision.id, self._asked.tenant)

    @property
    def decision(self) -> str:
        """Label of its routing decision."""
        return self._label

    @property
    def instance(self) -> str:
        """The engine that answered, or was tried last."""
        return self._ticket.instance

    def _ending(self, flags: int, reader: ResponseReader) -> None:
        if flags & ENGINE_ERROR:
            self.error = True
        if flags & INCOMPLETE:
            self._fault("engine_error", "the engine's stream ended without a finish_reason")
        elif flags & END:
            self._finish(reader)

    def _finish(self, reader: ResponseReader) -> None:
        if self.error or self.status >= 400 or reader.aborted:
            self._fail_ticket("engine_error")
        elif self._legs is None or self._legs.second_ended():
            reader.finished()
        if self.status >= 500:
            self._engine.failed("status", f"status {self.status}")
        else:
            self._engine.failures = 0
        load = reader.load
        if load is not None:
            self._engine.report(self._engine.adapter.load_of_header(load), "header")
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._stalled_at:
                connection.transport.resume_reading()
            connection.release()
        self._end()

    def _fault(self, kind: str, reason: str) -> None:
        """The answer cannot go on: to the next engine if nothing was sent, else an error in the stream."""
        if not self.committed:
            self.settle("reset" if kind == "engine_error" else kind, reason)
            return
        self._cut(_broke_off(self._engine, kind, reason))
        self._engine.failed(kind, reason)
        self._fail_ticket(kind)
        self.reason = reason
        self._end()

    def _cut(self, error: ApiError) -> None:
        self.error = True
        body = error.body(self._rules.show_engines)
        if self._speaker is not None:
            self.say(b"data: %b\n\ndata: [DONE]\n\n" % body, last=True)
            self.drop()
            return
        tail = self._reader.end_with(body)
        if tail:
            self._transport.write(tail)
        else:
            self.close_client = True
        self._drop()

    def settle(self, kind: str, reason: str) -> None:
        """An attempt failed: to the next engine, where one is left."""
        self._drop()
        # An engine may close a kept connection just when the next request is on its way: no failure.
        if kind == "reset" and not self._fresh and not self._reader.pieces:
            self._connect()
            return
        self.move(self._engine, kind, reason)

    def move(self, engine: Engine, kind: str, reason: str) -> None:
        """What was sent to `engine` failed for good: to the next one, where one is left."""
        self.drop()
        if self.tries(engine, kind, reason):
            following = self._following(engine, kind)
            if following is not None:
                now = time.monotonic()
                if self._pool.cuts:
                    self.segment(following, now)
                else:
                    self.go(self._pool.engines[following], now)
                return
        self.gives_up(engine, kind, reason)

    def tries(self, engine: Engine, kind: str, reason: str) -> bool:
        """Notes that an attempt failed; whether there may be another."""
        self.reason = reason
        if kind != "status":
            engine.failed(kind, reason)
        self._tried += (f"{engine.name}: {reason}",)
        return kind in self._rules.failures and len(self._tried) < self._rules.attempts

    def gives_up(self, engine: Engine, kind: str, reason: str) -> None:
        """Nobody answers, or goes on."""
        self.drop()
        if self.committed:
            self.broke_off(engine, kind, reason)
            return
        self._fail_ticket(kind)
        headers = {"x-lmetric-decision": self._label}
        if _STATUS[kind] == 503:
            headers["retry-after"] = "1"
        tried = "; ".join(self._tried)
        message = "no engine could answer"
        if kind == "resources":
            message = "the router cannot open a connection to an engine"
        self._end(ApiError(_STATUS[kind], message, engines=tried, code=kind, headers=headers))

    def _following(self, engine: Engine, kind: str) -> str | None:
        """Where the segment that failed at `engine` goes."""
        try:
            following = self._legs.settle(engine) if self._legs is not None else None
            if following is None:
                following = self._ticket.failed(kind)
            while following is not None and following not in self._pool.engines:
                following = self._ticket.failed("refused")  # removed since the decision
        except NoInstanceError:
            return None
        return following

    def end_with(self, error: ApiError) -> None:
        """Ends with an error."""
        self.drop()
        if self.committed:
            self._cut(error)
            error_for_client = None
        else:
            error_for_client = error
        self._fail_ticket("engine_error")
        self._end(error_for_client)

    def _expire(self, reason: str) -> None:
        """Ends the request at its longest duration; no engine is to blame."""
        self.reason = reason
        error = ApiError(504, reason, code="timeout")
        if self.committed:
            self._cut(error)
        self.drop()
        self._fail_ticket("timeout")
        self._end(None if self.committed else error)

    def drop(self) -> None:
        """Gives up what is on its way to engines."""
        legs = self._legs or self._chain
        if legs is not None:
            legs.drop()
        self._drop()

    @property
    def _speaker(self) -> Legs | Chain | None:
        """Who writes the client's answer, where the relay does not just pass it on."""
        legs = self._legs or self._chain
        return legs if legs is not None and legs.speaks else None

    # What legs and chains call that write the client's answer.

    def commit_joined(self, kind: bytes, length: int | None) -> None:
        """Begins the answer of a chain; `length`: of its body, None: it is streamed."""
        legs = self._legs or self._chain
        assert legs is not None
        self.committed = True
        self.status = 200
        self.body = b""
        lines = [
            b"HTTP/1.1 200 OK\r\ncontent-type: ",
            kind,
            b"\r\n",
            self._extra(legs.instance),
            self._asked.cors,
        ]
        self._chunked = length is None and self._asked.http11
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        else:
            self.close_client = True
        if self.close_client or not self._asked.keep_alive:
            lines.append(b"connection: close\r\n")
        self._transport.write(b"".join(lines) + b"\r\n")

    def say(self, data: bytes, *, last: bool = False) -> None:
        """More of that answer."""
        if self._chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if last else b"")
        if data:
            self._transport.write(data)

    def broke_off(self, engine: Engine, kind: str, reason: str) -> None:
        """That answer cannot go on."""
        self._cut(_broke_off(engine, kind, reason))
        self._fail_ticket(kind)
        self.reason = reason
        self._end()

    def joined_end(self) -> None:
        """That answer is whole, and the ticket closed."""
        self._end()

    @property
    def streams(self) -> bool:
        """Whether the client is to get a stream."""
        return self._stream

    @property
    def stalled(self) -> bool:
        """Whether the client does not keep up."""
        return self._stalled_at > 0.0

    def at_work(self, engine: Engine) -> bool:
        """Whether the request is on its way to this engine."""
        return self._engine is engine and (self._connection or self._connecting) is not None

    def _end(self, error: ApiError | None = None) -> None:
        self.ended = True
        legs, speaker = self._legs or self._chain, self._speaker
        if legs is not None:
            legs.drop()
        if self.committed and speaker is not None:
            self.output_tokens = speaker.output_tokens
            self.cached_tokens = speaker.cached_tokens
            self.first_token_at = speaker.first_token_at
            self.prompt_tokens = speaker.prompt_tokens
        elif self.committed:
            self.close_client |= self._reader.closes_client
            self.output_tokens = self._reader.output_tokens
            self.cached_tokens = self._reader.cached_tokens
            self.first_token_at = self._reader.first_token_at
            self.prompt_tokens = self._reader.prompt_tokens
            if self._reader.implausible_usage:
                self._pool.ratio.implausible += 1
        self._on_end(self._asked, self, error)

    def _fail_ticket(self, kind: str) -> None:
        """Closes the ticket as failed, even where it could move on."""
        if self._ticket.open:
            self._ticket.failed(kind, retry=False)

    # What the client's connection and the server call.

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request in the middle; the engine's connection closes, which stops its work."""
        if self.ended:
            return
        self.drop()
        self.reason = reason
        self.close_client = True
        self._fail_ticket("cancelled")
        self._end(error)

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        log.exception("a request could not be relayed", decision=self._label)
        super().fail()

    def client_slow(self) -> None:
        """The client does not keep up: stop reading from the engine."""
        self._stalled_at = time.monotonic()
        if (legs := self._legs or self._chain) is not None:
            legs.pause(True)
        if self._connection is not None:
            self._connection.transport.pause_reading()

    def client_ready(self) -> None:
        """The client caught up."""
        self._stalled_at = 0.0
        self._deadline_from = time.monotonic()
        if (legs := self._legs or self._chain) is not None:
            legs.pause(False)
        if self._connection is not None:
            self._connection.transport.resume_reading()

    def stop(self) -> None:
        """The server stops: ends the answer with an error."""
        joined = self._speaker is not None
        if self.committed and (self._connection is not None or joined):
            self._cut(ApiError(503, STOPPING, code="shutting_down"))
        super().stop()

    def check(self, now: float) -> None:
        """Called now and then: ends what takes too long."""
        legs = self._legs or self._chain
        if legs is not None:
            legs.check(now)
        if self.ended:
            return
        limits = self._rules.timeouts
        if limits.request is not None and now - self._asked.started > limits.request:
            self._expire(f"the request took longer than {limits.request:g} s (timeouts.request)")
            return
        legs, waits = self._legs or self._chain, (self._connection or self._connecting) is not None
        if not waits and (legs is None or not legs.attempt_open):
            log.error("a request was left without an engine", decision=self._label)
            self.reason = "no engine was at work on it"
            self.end_with(ApiError(500, FAILED))
            return
        joined = self._speaker is not None
        if self._connection is None and not joined:
            return
        if self._stalled_at:
            if now - self._stalled_at > limits.slow_client:
                self._leave("the client does not read")
                self._transport.abort()
        elif joined:
            return  # the chain looks after its legs
        elif self.committed:
            pieces = self._reader.pieces
            if pieces != self._pieces:
                self._pieces = pieces
                self._deadline_from = now
            elif now - self._deadline_from > limits.between_chunks:
                self._fault("timeout", f"nothing for {limits.between_chunks:g} s")
        else:
            limit = limits.first_byte if self._stream else limits.answer
            if now - self._deadline_from > limit:
                self.settle("timeout", f"no answer within {limit:g} s")


def _broke_off(engine: Engine, kind: str, reason: str) -> ApiError:
    return ApiError(502, "the engine's answer broke off", engines=f"{engine.name}: {reason}", code=kind)


def _with_cors(answer: bytes, lines: bytes) -> bytes:
    """The beginning of an engine's answer with these lines instead of the engine's own CORS fields."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (_CORS_FIELDS.sub(b"", head), lines, rest)
