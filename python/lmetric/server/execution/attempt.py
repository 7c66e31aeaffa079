"""One attempt to run a step on its engine: a connection, the request, and the engine's answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from lmetric._core import (
    END,
    ENGINE_ERROR,
    INCOMPLETE,
    OUT,
    PASS,
    READY,
    UNSEEN,
    Ticket,
    WireError,
)
from lmetric.defaults import CLIENT_ANSWER_BYTES
from lmetric.server.api.paths import GENERATING, MESSAGES
from lmetric.server.execution.exchange import SATURATED, ClientRequest, Rules, why_no_stream
from lmetric.server.execution.observers import guarded
from lmetric.server.execution.plan import REPORTED_ERROR, Attempt, AttemptEvent, OtherEngine
from lmetric.server.upstream.connection import Connection, UpstreamError

if TYPE_CHECKING:
    from lmetric.server.execution.trace import AttemptTrace

# Bodies up to this size are written together with the head.
JOIN_BYTES = 64 * 1024
# Engines read shorter bodies together with the head, before they answer.
UNREAD_BYTES = 16 * 1024
# Limit of a collected answer that the router parses; `CLIENT_ANSWER_BYTES` if it is for the client.
ANSWER_BYTES = 16 << 20
# Time from a stream's first comment until its client gets it, if no token has come. Most streams
# with comments have a token by then, and keep the engine's own head.
COMMENT_SECONDS = 0.5
# An engine may close an idle connection just when a request is on its way. The close then comes
# about a round trip after the sending; the rest is for slow networks and a busy event loop. If it
# comes later, the engine has worked on the request, and may have died of it.
RESEND_SECONDS = 1.0
# Longest wait for the body of an error answer. An engine that has refused gets no more time.
REFUSAL_SECONDS = 5.0


class AttemptListener(Protocol):
    """Receiver of the events of an attempt."""

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        """Receives an event of the attempt.

        On "ready", set its `committed` (reader "pass"), or call its `begin` or `cancel`.
        """

    def fail(self) -> None:
        """Called after an unexpected exception."""


@dataclass(slots=True, eq=False, repr=False)
class EngineAttempt(Attempt):
    """A step at its engine: call `go`, which reports events to the listener later."""

    listener: AttemptListener
    rules: Rules
    client_request: ClientRequest
    ticket: Ticket | None  # None: the router's ledger does not count the request
    trace: AttemptTrace | None = None  # None: its engine gets no trace context of the router
    over: bool = False  # it ended, failed or was canceled
    _paused: bool = False
    _connection: Connection | None = None
    _connecting: asyncio.Task[Connection] | None = None
    _fresh: bool = False  # its connection was opened for this step
    _closed: str = ""  # why the step is sent again, if it is
    _progress: int = 0  # of the answer at the last check
    _since: float = inf  # start of the present time limit, seconds on the monotonic clock
    _refused_at: float = 0.0  # first check that saw the head of an error answer
    _commented_at: float = inf  # first check that saw a comment before the first token
    _comments: bytes = b""  # comments before the first token, for the client

    def go(self, now: float) -> None:
        """Sends the step, on an idle connection if there is one."""
        self.started = now
        gateway = self.client_request.gateway
        if gateway is not None:
            self._fresh = True
            self._send(gateway(self.step), now)
            return
        step = self.step
        late = step.kv is not None and now > step.kv.until
        connection = None if late else step.engine.upstream.take()
        if connection is None:
            self._connect()  # later, this reports that the transfer is late
        else:
            self._send(connection, now)

    def _stale(self, *, late: bool) -> None:
        """Ends the attempt: its KV transfer has expired (`late`), or may have been fetched."""
        self.cancel()
        self.listener.on_attempt_event("stale", self, late)

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
                self.step.engine.upstream.give(connection, unused=True)
            return
        try:
            error, now = task.exception(), time.monotonic()
            if isinstance(error, UpstreamError):
                self._not_connected(error)
                return
            connection = task.result()
            if connection.transport.is_closing():
                self.fail("reset", "connection closed as soon as it was made")
            elif self.step.kv is not None and now > self.step.kv.until:
                self.step.engine.upstream.give(connection, unused=True)
                self._stale(late=True)
            else:
                self._send(connection, now)
        except Exception:
            self.listener.fail()

    def _send(self, connection: Connection, now: float) -> None:
        step, client_request = self.step, self.client_request
        self._connection = self.reader = connection
        if step.reader == "pass":
            finish = client_request.head.path in GENERATING
            connection.begin(self, self.ticket, client_request.http11, finish, step.observed, step.hides_ids)
            # A gateway has the end already. Other engines than vLLM may send such events earlier.
            if (
                client_request.head.path == MESSAGES
                and step.engine.shows_orders
                and client_request.gateway is None
            ):
                connection.withhold_abort()
        else:
            connection.begin(self, self.ticket if step.for_client else None, False, step.for_client)
            if step.reader == "events":
                connection.commit_events()  # before its head: long events are not cut
        if self.rules.answers_asked_name and (names := client_request.renamed) is not None:
            connection.rename(*names)
        self._since = now
        engine, body, given = step.engine, step.body, None
        if client_request.drops_priority and (prioritized := engine.prioritized) is not None:
            path = client_request.head.path if step.target is None else step.target.decode()
            handicap = client_request.handicap_seconds
            body, given = prioritized(body, client_request.priority, path=path, handicap_seconds=handicap)
        upstream = engine.upstream
        first = upstream.head(step.target or client_request.head.target, step.stream, step.method)
        first += client_request.session_line
        trace = self.trace
        if trace is not None:
            first += trace.line
        # Positional, as a keyword takes about 500 instructions in calls of Rust.
        head = client_request.head.for_engine(
            first,
            len(body),
            given,
            upstream.has_key,
            client_request.drops_priority,
            client_request.client.peer,
        )
        if trace is not None:
            head = guarded(trace.head, head, first) or head
        if len(body) <= JOIN_BYTES:
            connection.transport.write(head + body)
        else:
            connection.transport.write(head)
            connection.transport.write(body)
        # After the write, because this updates the index, which takes time for new blocks.
        if step.advances_ticket and self.ticket is not None:
            self.ticket.sent(now)
        if step.kv is not None:
            step.kv.sent()
        if self._paused:
            connection.pause(True)

    # Called by the engine's connection.

    def received(self, flags: int, data: bytes) -> None:
        """Processes a piece of the answer that was not forwarded."""
        try:
            if not flags & READY or self.committed or self.step.reader != "pass":
                self._step(flags, data)
                return
            # The ticket gets a stream's tokens first, so the stream ends by a separate event.
            detail = flags & ~END if self.reader.event_stream else flags
            self.listener.on_attempt_event("ready", self, detail)
            if self.committed and detail & END and not flags & ENGINE_ERROR:
                self._close()  # for the listener, this event was also the end
            elif not self.over:
                self._step(flags & ~READY, data)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Fails the attempt: a broken connection, a malformed answer, or a failure to forward it.

        An engine may close an idle connection just when it is used again. That is no failure: the
        step is sent again on a new connection.

        Called while the error is handled. Raised here, it would be in a cycle with this frame.
        """
        if not isinstance(error, WireError):
            self.listener.fail()
            return
        try:
            late = time.monotonic() - self._since > RESEND_SECONDS
            if self._fresh or late or self.reader.pieces:
                self.fail("reset", str(error))
            elif self.step.kv is not None:
                self._stale(late=False)
            else:
                self._closed = str(error)
                self._drop()
                self._connect()
        except Exception:
            self.listener.fail()

    def lost(self) -> None:
        """Processes the close of the engine's connection."""
        self._connection = None
        try:
            self.received(self.reader.eof(), b"")
        except Exception as error:
            self.failed(error)

    def _step(self, flags: int, data: bytes) -> None:
        reader = self.step.reader
        if reader == "whole":
            self._collect(flags, data)
        elif reader == "events":
            self._read_events(flags, data)
        elif flags & PASS:
            self.client_request.transport.write(data)
        elif flags & OUT:
            self.client_request.transport.write(self.reader.take())
        if self.over:
            return
        if flags & UNSEEN:
            self.listener.on_attempt_event("unseen", self)
        if flags & (END | INCOMPLETE | ENGINE_ERROR):
            if flags & ENGINE_ERROR:
                self.error = True
            if flags & INCOMPLETE:
                self.fail("engine_error", *self._why_incomplete())
            elif flags & END:
                self.over = True
                self.listener.on_attempt_event("ended", self)
                self._close()

    def _why_incomplete(self) -> tuple[str, str]:
        withheld = self.reader.withheld
        if not withheld:
            return "the engine's stream ended without a finish_reason", ""
        if self.reader.aborted:
            return "the engine aborted the answer", ""
        return REPORTED_ERROR, f": {self.step.engine.adapter.error(withheld)}"

    def _collect(self, flags: int, data: bytes) -> None:
        reader = self.reader
        if not self.committed:
            if not reader.status:
                return
            if reader.event_stream and self.step.for_client and reader.status == 200:
                raise WireError("the engine answered with an event stream; expected none")
            self.committed = True
            self.answer = bytearray(reader.commit(b"", True).partition(b"\r\n\r\n")[2])
        else:
            self.answer += data if flags & PASS else reader.take()
        step = self.step
        parses = not step.for_client or step.merges or step.checks_prompt
        limit = ANSWER_BYTES if parses else CLIENT_ANSWER_BYTES
        if len(self.answer) > limit:
            kind = "answer_too_large" if reader.status == 200 else "reset"
            self.fail(kind, f"the answer has more than {limit >> 20} MiB")

    def _read_events(self, flags: int, data: bytes) -> None:
        reader = self.reader
        if reader.status != 200:
            self._collect(flags, data)
        elif self.committed:
            if events := reader.events():
                self.listener.on_attempt_event("events", self, events)
        elif flags & READY:
            if not reader.event_stream:
                raise WireError(why_no_stream(reader))
            self.listener.on_attempt_event("ready", self, flags)

    def begin(self) -> None:
        """Commits to the answer; with reader "events", reports its first events."""
        self.committed = True
        if self.step.reader == "events" and (events := self.reader.commit_events()):
            self.listener.on_attempt_event("events", self, events)

    def _close(self) -> None:
        """Ends the attempt after a whole answer: updates the engine, releases the connection."""
        if self.trace is not None:
            guarded(self.trace.answered, self)
        self.over = True
        reader, engine = self.reader, self.step.engine
        status, load = reader.status, reader.load
        if self.error or status >= 500:
            self._blame(status)
        elif status != 429:
            engine.service.served()
        if load is not None:
            engine.report_header(load)
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._paused:
                connection.pause(False)
            if self.client_request.gateway is not None:
                connection.detach()
            elif status >= 400 and len(self.step.body) > UNREAD_BYTES:
                # An engine may refuse a body before it has read all. Then the next request would
                # wait behind the rest.
                connection.drop()
            else:
                engine.upstream.give(connection)

    def _blame(self, status: int) -> None:
        """Counts an answer that reports a failure of the engine.

        The ways judge answers with a status in `retries.statuses`. The code of an error counts only
        if the status is no error: many errors have none, or a word.
        """
        inside = self.error and status < 400
        code = (self.error_code or self.reader.error_code or 500) if inside else status
        model, client_request = self.step.engine.model, self.client_request
        judged = status in self.rules.statuses
        if model is not None and code >= 500 and code not in SATURATED and not judged:
            reason = f"error {code} in its answer" if inside else f"status {status}"
            model.blame(self.step.engine, client_request.client_key, reason, proven=False)

    # Failures.

    def _not_connected(self, error: UpstreamError) -> None:
        """Fails the attempt without a connection.

        If the step was sent before, its engine may have died of it, and counts as an engine that
        had accepted it.
        """
        kind, reason = error.kind, str(error)
        if self._closed and error.before_sending and kind != "resources":
            self.step.engine.failed(kind, reason)
            kind, reason = "reset", f"{self._closed}; {reason}"
        self.fail(kind, reason)

    def fail(self, kind: str, reason: str, words: str = "") -> None:
        """Ends the attempt with a failure. `words`: see `EngineLost`."""
        if self.over:
            return
        if self.trace is not None:
            guarded(self.trace.failed, self, kind)  # before `cancel`, which knows no reason
        self.cancel()
        self.listener.on_attempt_event("failed", self, (kind, reason, words))

    def end_elsewhere(self, other: OtherEngine) -> None:
        """Ends the attempt: its gateway has the answer from another engine."""
        if self.over:
            return
        if self.trace is not None and self.step.engine in other.refused:
            guarded(self.trace.failed, self, "refused")
        self.cancel()
        self.listener.on_attempt_event("elsewhere", self, other)

    def cancel(self) -> None:
        """Ends the attempt without an event. The engine aborts the request."""
        if self.trace is not None:
            guarded(self.trace.failed, self, "cancelled")
        self.over = True
        self._drop()

    def _drop(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    # While it runs.

    def pause(self, paused: bool) -> None:
        """Stops or continues reading from the engine."""
        self._paused = paused
        self._since = time.monotonic()
        if self._connection is not None:
            self._connection.pause(paused)

    def _pass_comments(self, now: float) -> None:
        """Reports the engine's comments before its first token.

        A client or a proxy may close a connection on which nothing comes.
        """
        self._comments += self.reader.take_comments()
        if self._comments:
            self._commented_at = min(self._commented_at, now)
            if now - self._commented_at >= COMMENT_SECONDS:
                comments, self._comments = self._comments, b""
                self.listener.on_attempt_event("comments", self, comments)

    def _others_could(self) -> bool:
        """Returns whether another engine may take the request: a frozen one may also come back."""
        client_request, engine = self.client_request, self.step.engine
        model = client_request.model
        if self.ticket is None or model is None:
            return False
        if client_request.gateway is not None or client_request.pinned_to is not None:
            return False
        listing = model.names.engines_of(client_request.model_name)
        return any(
            other is not engine and other.in_service and not other.held and other.role == engine.role
            for other in model.engines.values()
            if listing is None or other.name in listing
        )

    def check(self, now: float) -> None:
        """Called periodically: fails the attempt at its deadline."""
        if self.over or self._paused or self._connecting is not None:
            return
        engine = self.step.engine
        if not self.committed and self._connection is not None:
            if self.reader.status >= 400 and self.step.reader == "pass":
                self._refused_at = self._refused_at or now
                if now - self._refused_at > REFUSAL_SECONDS:
                    self.received(READY, b"")
                    return
            elif self.reader.event_stream and self.step.for_client:
                self._pass_comments(now)
        if engine.stalled or (engine.frozen and not self.committed and self._others_could()):
            self.fail("timeout", engine.last_error or "the engine has stopped generating")
        elif self.committed and self.step.reader != "whole" and self.reader.status == 200:
            progress = self.reader.progress
            limits = self.rules.timeouts
            limit, kind = limits.between_chunks, "timeout"
            if self.client_request.gateway is not None:  # its client may not read
                limit, kind = max(limit, limits.slow_client), "cancelled"
            if self.reader.tokens:
                engine.watchdog.stream(progress != self._progress)
            if progress != self._progress:
                self._progress = progress
                self._since = now
            elif now - self._since > limit:
                what = "token" if self.reader.event_stream else "data"
                self.fail(kind, f"no {what} for {limit:g} s")
        elif now - self._since <= self.step.limit_seconds:
            engine.watchdog.wait()
        else:
            self.fail("timeout", f"no answer within {self.step.limit_seconds:g} s")
