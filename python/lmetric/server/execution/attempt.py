"""One attempt to have one engine do one step: a connection, the request's bytes, and what comes of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from lmetric._core import END, ENGINE_ERROR, INCOMPLETE, OUT, PASS, READY, UNSEEN, Ticket, WireError
from lmetric.server.execution.exchange import ClientRequest, Rules
from lmetric.server.execution.plan import AttemptEvent, Step
from lmetric.server.fleet import priority
from lmetric.server.upstream.connection import Connection, UpstreamError

# Bodies up to this size go out in one write with the head.
JOIN_BYTES = 64 * 1024
# Longest answer that is kept until it is whole.
ANSWER_BYTES = 16 << 20


class AttemptListener(Protocol):
    """Who is told what comes of an attempt."""

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Something happened to the attempt. To "ready", `begin` or `cancel` is the answer."""

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""


class EngineAttempt:
    """A step at its engine: `go`, then calls to its listener. None of these comes from within `go`, apart
    from "sent"."""

    reader: Connection
    started: float  # seconds on the monotonic clock
    answer: bytes | bytearray = b""  # of reader "whole", or of an engine that refuses
    _connecting: asyncio.Task[Connection] | None = None
    _fresh = False  # its connection was made for this step
    _pieces = 0  # of the answer, at the last check
    _since = inf  # when the limit that runs began, seconds on the monotonic clock

    def __init__(
        self,
        listener: AttemptListener,
        rules: Rules,
        asked: ClientRequest,
        ticket: Ticket,
        step: Step,
        require_finish: bool,
    ) -> None:
        self._listener = listener
        self._rules = rules
        self._asked = asked
        self._ticket = ticket
        self.step = step
        self._require_finish = require_finish  # a stream without a finish_reason is not whole
        self.error = False  # the engine reported an error inside its answer
        self.begun = False  # the answer is committed to
        self.over = False  # it ended, failed or was cancelled
        self._paused = False
        self._connection: Connection | None = None

    def go(self, now: float) -> None:
        """Sends the step, on a connection that waits where there is one."""
        self.started = now
        connection = self.step.engine.upstream.take()
        if connection is None:
            self._connect()
        elif now > self.step.kv_until:
            connection.upstream.give(connection)
            self._soon(self._too_late)
        else:
            self._send(connection, now)

    def _soon(self, then: Callable[[], None]) -> None:
        """Not from within `go`."""
        asyncio.get_running_loop().call_soon(then)

    def _too_late(self) -> None:
        """The KV transfer of the step has expired."""
        if not self.over:
            self.cancel()
            self._listener.on_attempt_event("stale", self, True)

    def _connect(self) -> None:
        self._fresh = True
        self._connecting = asyncio.create_task(self.step.engine.upstream.connect())
        self._connecting.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[Connection]) -> None:
        wanted = self._connecting is task
        if wanted:
            self._connecting = None
        if self.over or task.cancelled() or not wanted:
            if not task.cancelled() and task.exception() is None:
                connection = task.result()
                connection.upstream.give(connection)
            return
        try:
            error, now = task.exception(), time.monotonic()
            if isinstance(error, UpstreamError):
                self.fail(error.kind, str(error))
                return
            connection = task.result()
            if connection.transport.is_closing():
                self.fail("reset", "connection closed as soon as it was made")
            elif now > self.step.kv_until:
                connection.upstream.give(connection)
                self._too_late()
            else:
                self._send(connection, now)
        except Exception:
            self._listener.fail()

    def _send(self, connection: Connection, now: float) -> None:
        step, asked = self.step, self._asked
        self._connection = self.reader = connection
        if step.reader == "pass":
            finish = self._require_finish
            connection.begin(self, self._ticket, asked.http11, finish, step.observed, step.hides_ids)
        else:
            connection.begin(self, self._ticket if step.for_client else None, False, step.for_client)
        self._since = now
        engine, given = step.engine, asked.priority
        body = step.body
        if given is not None:
            body, given = priority.body(engine, given, body), priority.header(engine, given)
        upstream = engine.upstream
        first = upstream.head(step.target or asked.head.target, step.stream)
        head = asked.head.for_engine(first, len(body), given, upstream.has_key, asked.drops_priority)
        if len(body) <= JOIN_BYTES:
            connection.transport.write(head + body)
        else:
            connection.transport.write(head)
            connection.transport.write(body)
        # After the write: the index learns of the request now, which takes a while where much of it is new.
        if step.advances_ticket:
            self._ticket.sent(now)
        if step.carries_kv:
            self._listener.on_attempt_event("sent", self)
        if self._paused:
            connection.transport.pause_reading()

    # What the engine's connection calls.

    def received(self, flags: int, data: bytes) -> None:
        """A piece of the answer that was not passed on yet."""
        try:
            if not flags & READY or self.begun or self.step.reader != "pass":
                self._step(flags, data)
                return
            # A stream's tokens are told to the ticket first, so that it ends by an event of its own.
            detail = flags & ~END if self.reader.event_stream else flags
            self._listener.on_attempt_event("ready", self, detail)
            if self.begun and detail & END and not flags & ENGINE_ERROR:
                self._close()  # the listener took that for the end, too
            elif not self.over:
                self._step(flags & ~READY, data)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """The answer is malformed, or could not be passed on."""
        try:
            if not isinstance(error, WireError):
                raise error
            self._broke(str(error))
        except Exception:
            self._listener.fail()

    def lost(self) -> None:
        """The engine's connection closed."""
        self._connection = None
        try:
            self._step(self.reader.eof(), b"")
        except Exception as error:
            self.failed(error)

    def _step(self, flags: int, data: bytes) -> None:
        reader = self.step.reader
        if reader == "whole":
            self._collect(flags, data)
        elif reader == "events":
            self._read_events(flags, data)
        elif flags & PASS:
            self._asked.transport.write(data)
        elif flags & OUT:
            self._asked.transport.write(self.reader.take())
        elif flags & READY:
            self._listener.on_attempt_event("ready", self, flags & ~END)
        if self.over:
            return
        if flags & UNSEEN:
            self._listener.on_attempt_event("unseen", self)
        if flags & (END | INCOMPLETE | ENGINE_ERROR):
            if flags & ENGINE_ERROR:
                self.error = True
            if flags & INCOMPLETE:
                self.fail("engine_error", "the engine's stream ended without a finish_reason")
            elif flags & END:
                self.over = True
                self._listener.on_attempt_event("ended", self)
                self._close()

    def _collect(self, flags: int, data: bytes) -> None:
        reader = self.reader
        if not self.begun:
            if not reader.status:
                return
            if reader.event_stream and self.step.for_client and reader.status == 200:
                raise WireError("the engine was asked for no event stream, and its answer is one")
            self.begun = True
            self.answer = bytearray(reader.commit(b"", True).partition(b"\r\n\r\n")[2])
        else:
            self.answer += data if flags & PASS else reader.take()
        if len(self.answer) > ANSWER_BYTES:
            raise WireError(f"answer longer than {ANSWER_BYTES} bytes")

    def _read_events(self, flags: int, data: bytes) -> None:
        reader = self.reader
        if reader.status != 200:
            self._collect(flags, data)
        elif self.begun:
            self._emit_events(reader.events())
        elif flags & READY:
            if not reader.event_stream:
                raise WireError("the engine was asked for an event stream, and its answer is none")
            self._listener.on_attempt_event("ready", self, flags)

    def _emit_events(self, events: list[bytes]) -> None:
        if events:
            self._listener.on_attempt_event("events", self, events)

    def begin(self) -> None:
        """The answer is committed to (reader "events"): reports its first events."""
        self.begun = True
        if self.step.reader == "events":
            self._emit_events(self.reader.commit_events())

    def _close(self) -> None:
        """The answer is whole: so much for its engine."""
        self.over = True
        reader, engine = self.reader, self.step.engine
        status, load = reader.status, reader.load
        if status < 500:
            engine.failures = 0
        elif status not in self._rules.statuses:
            engine.failed("status", f"status {status}")
        if load is not None:
            engine.report_header(load)
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._paused:
                connection.transport.resume_reading()
            connection.release()

    # How it fails.

    def _broke(self, reason: str) -> None:
        """The connection broke, or what came on it is malformed. An engine may close a kept connection just
        when the next request is on its way: that is no failure, and the step is sent again on a new one."""
        if self._fresh or self.reader.pieces:
            self.fail("reset", reason)
        elif self.step.carries_kv:
            self.cancel()
            self._listener.on_attempt_event("stale", self, False)
        else:
            self._drop()
            self._connect()

    def fail(self, kind: str, reason: str) -> None:
        """It cannot go on."""
        if self.over:
            return
        self.cancel()
        self._listener.on_attempt_event("failed", self, (kind, reason))

    def cancel(self) -> None:
        """Gives up, without a word; an engine that is at work stops."""
        self.over = True
        self._drop()

    def _drop(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def error_words(self) -> str:
        """What the engine says of a refusal, behind a colon."""
        body = bytes(self.answer) or self.reader.commit(b"", True).partition(b"\r\n\r\n")[2]
        said = self.step.engine.adapter.error(body)
        return f": {said}" if said else ""

    # What happens meanwhile.

    def pause(self, paused: bool) -> None:
        """Stops reading from the engine, or goes on."""
        self._paused = paused
        self._since = time.monotonic()
        if self._connection is not None:
            transport = self._connection.transport
            (transport.pause_reading if paused else transport.resume_reading)()

    def check(self, now: float) -> None:
        """Called now and then: fails it at its deadline."""
        if self.over or self._paused or self._connecting is not None:
            return
        if self.begun and self.step.reader != "whole" and self.reader.status == 200:
            pieces = self.reader.pieces
            limit = self._rules.timeouts.between_chunks
            if pieces != self._pieces:
                self._pieces = pieces
                self._since = now
            elif now - self._since > limit:
                self.fail("timeout", f"nothing for {limit:g} s")
        elif now - self._since > self.step.limit_seconds:
            self.fail("timeout", f"no answer within {self.step.limit_seconds:g} s")
