"""The last leg of a request that was cut in its answer: read here, and told on as part of one answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import orjson

from lmetric._core import END, ENGINE_ERROR, INCOMPLETE, PASS, READY, WireError
from lmetric.config.schema import Timeouts
from lmetric.server.execution.leg import Leg
from lmetric.server.execution.transcript import MergeError, other_tokens
from lmetric.server.fleet.engine import Engine
from lmetric.server.upstream.connection import Connection

if TYPE_CHECKING:
    from lmetric.server.execution.chain import Chain
    from lmetric.server.execution.exchange import ClientRequest


class Rest(Leg):
    """The leg at one engine; ``chain`` is told what it says and how it ends."""

    LIMIT = 16 << 20  # of an answer that is not streamed

    def __init__(
        self, chain: Chain, asked: ClientRequest, body: bytes, stream: bool, target: bytes, now: float
    ) -> None:
        self._chain = chain
        self._asked = asked
        self._body = body
        self._stream = stream
        self._target = target
        self._since = now  # of the limit that runs
        self._pieces = 0
        self._begun = False  # the answer's head was taken
        self._told = False  # the client has something of it
        self._held = bytearray()
        self._paused = False

    @property
    def engine(self) -> Engine:
        """Where it is."""
        return self._engine

    def _ask(self, connection: Connection, now: float) -> None:
        self._connection = connection
        connection.begin(self, self._chain.ticket, False, True)
        if connection.transport.is_closing():
            self.settle("reset", "connection closed as soon as it was made")
            return
        self._since = now
        self._write(connection, self._chain.refilled(self._engine, self._body), self._stream)
        self._chain.sent(now)
        if self._paused:
            connection.transport.pause_reading()

    # What the connection calls.

    def received(self, flags: int, data: bytes) -> None:
        """A piece of the answer."""
        connection = self._connection
        if self.ended or connection is None:
            return
        try:
            self._step(connection, flags, data)
        except Exception as error:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """The answer is malformed or cannot be merged; any other exception fails the request."""
        try:
            if not isinstance(error, WireError | MergeError):
                raise error
            self._fault("reset", str(error))
        except Exception:
            self.fail()

    def lost(self) -> None:
        """The connection closed."""
        connection = self._connection
        if self.ended or connection is None:
            return
        try:
            self._step(connection, connection.eof(), b"")
        except Exception as error:
            self.failed(error)

    def _step(self, connection: Connection, flags: int, data: bytes) -> None:
        if not self._begun:
            if not flags & READY:
                return
            if connection.status == 200 and connection.event_stream != self._stream:
                asked, came = ("an event stream", "none") if self._stream else ("no event stream", "one")
                raise WireError(f"the engine was asked for {asked}, and its answer is {came}")
            if connection.event_stream and connection.status == 200 and self._refuses(connection, flags):
                return
            self._begun = True
            _, _, data = connection.commit(b"", True).partition(b"\r\n\r\n")
        elif not flags & PASS:
            data = connection.take()
        if connection.event_stream and connection.status == 200:
            self._events(data)
        else:
            self._held += data
            if len(self._held) > self.LIMIT:
                raise WireError(f"answer longer than {self.LIMIT} bytes")
        if self.ended:
            return
        if flags & INCOMPLETE:
            self._fault("engine_error", "the engine's stream ended without a finish_reason")
        elif flags & END:
            self._finish(connection)

    def _refuses(self, connection: Connection, flags: int) -> bool:
        """Whether a stream is over with its first event."""
        code = connection.error_code
        if flags & ENGINE_ERROR and not connection.tokens:
            if not self._chain.busy(code) and self._chain.broke(200, code):
                self.drop()
                self._chain.again(self)
            else:
                self.settle("status", f"error {code} as the first event")
            return True
        if flags & INCOMPLETE and not connection.tokens:
            self.settle("reset", "the stream ended without a token")
            return True
        return False

    def _events(self, data: bytes) -> None:
        """Whole events, and nothing else."""
        for line in data.splitlines():
            if self.ended:
                return
            if line.startswith(b":"):
                self._chain.pass_on(line + b"\n\n")
            elif line.startswith(b"data:"):
                value = line[5:].strip()
                if value != b"[DONE]":
                    self._event(value)

    def _event(self, value: bytes) -> None:
        try:
            event: dict[str, Any] = orjson.loads(value)
            if "error" in event:
                self._fault("engine_error", str((event["error"] or {}).get("message", "it says no more")))
                return
            choices = event["choices"]
        except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise MergeError(f"an event of the stream is not a completion's: {error}") from None
        for choice in choices:
            if choice.get("finish_reason") in ("abort", "error"):
                self._fault("engine_error", f"it ended with finish_reason {choice['finish_reason']}")
                return
        self._told_of(event, choices)

    def _told_of(self, event: dict[str, Any], choices: list[Any]) -> None:
        for choice in choices:
            made = self._chain.joined.more(choice)
            self._told = True
            self._chain.tell(made)

    def _finish(self, connection: Connection) -> None:
        self.ended = True
        self._connection = None
        status, engine = connection.status, self._engine
        if (load := connection.load) is not None:
            engine.report(engine.adapter.load_of_header(load), "header")
        if self._paused:
            connection.transport.resume_reading()
        connection.release()
        if status != 200:
            if not self._chain.busy(status) and self._chain.broke(status, None):
                self._chain.again(self)
            else:
                self._chain.refused(engine, status, bytes(self._held))
            return
        engine.failures = 0
        self._whole(connection)

    def _whole(self, connection: Connection) -> None:
        """It ended well."""
        if self._stream:
            self._chain.done()
        else:
            self._chain.whole(bytes(self._held))

    # How it fails.

    def _fault(self, kind: str, reason: str) -> None:
        """It cannot go on."""
        if self.ended:
            return
        if self._told:
            self.drop()
            self._chain.broken(self._engine, kind, reason)
        else:
            self.settle("reset" if kind == "engine_error" else kind, reason)

    def settle(self, kind: str, reason: str) -> None:
        """The attempt failed before anything came of it."""
        # An engine may close a kept connection just when the next request is on its way: no failure.
        connection = self._connection
        if kind == "reset" and not self._fresh and connection is not None and not connection.pieces:
            if self._chain.spends():  # the engine may have fetched what the leg carries
                self.drop()
                self._chain.again(self)
            else:
                self._drop()
                self._connect()
            return
        self.drop()
        self._chain.moved(self, kind, reason)

    def drop(self) -> None:
        """Gives up, without a word."""
        self.ended = True
        self._drop()

    def fail(self) -> None:
        """To be called where an exception was caught that nobody foresaw."""
        self._chain.fail()

    # What the relay wants of it.

    def pause(self, paused: bool) -> None:
        """Stops reading from the engine, or goes on."""
        self._paused = paused
        self._since = time.monotonic()
        if self._connection is not None:
            transport = self._connection.transport
            (transport.pause_reading if paused else transport.resume_reading)()

    def check(self, now: float, limits: Timeouts) -> None:
        """Ends what takes too long."""
        connection = self._connection
        if self.ended or self._paused or connection is None:
            return
        # Before the first token, bytes are no sign of life: they may be comments.
        if self._told and connection.pieces != self._pieces:
            self._pieces = connection.pieces
            self._since = now
        limit = limits.between_chunks if self._told else limits.first_byte if self._stream else limits.answer
        if now - self._since > limit:
            self._fault("timeout", f"nothing for {limit:g} s")


class Passed(Rest):
    """A whole request at an engine that fetches the cache of its prompt, or of the front of it: passed on
    without what is the router's. `checks`: only once the engine has told that the prompt has the same
    tokens."""

    checks = False
    hides_ids = False  # that only the router asked for

    def _told_of(self, event: dict[str, Any], choices: list[Any]) -> None:
        if self._differs(event):
            return
        self._told = True
        self._chain.pass_on(b"data: %b\n\n" % self._stripped(event, choices))

    def _whole(self, connection: Connection) -> None:
        if self._stream:
            self._chain.passed(connection, None)
            return
        try:
            answer = orjson.loads(bytes(self._held))
            choices = answer["choices"]
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            self._chain.moved(self, "reset", f"its answer has no choices: {error}")
            return
        if connection.aborted:
            self._chain.moved(self, "reset", "its answer was aborted")
        elif not self._differs(answer):
            self._chain.passed(connection, self._stripped(answer, choices))

    def _differs(self, said: dict[str, Any]) -> bool:
        """Whether it is of no use, which is then told."""
        if not self.checks:
            return False
        why = other_tokens(self._chain.joined.prompt, said)
        self.checks = why is not None
        if why is not None:
            self.drop()
            self._chain.differs(self, why)
        return self.checks

    def _stripped(self, said: dict[str, Any], choices: list[Any]) -> bytes:
        """Without what only the router asked for: null, as vLLM says it to who does not ask."""
        if self.hides_ids:
            for part, name in ((said, "prompt_token_ids"), *((choice, "token_ids") for choice in choices)):
                if name in part:
                    part[name] = None
        if "kv_transfer_params" in said:
            said["kv_transfer_params"] = None
        return orjson.dumps(said)
