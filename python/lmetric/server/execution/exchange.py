"""A request for an engine: as its client sent it, as it was read, and its interface in flight."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from msgspec import Struct

from lmetric._core import Arrival, BudgetReservation, Decision, Peer, Request, RequestHead, ResponseReader
from lmetric.config import ServerConfig, Timeouts
from lmetric.server.api.caller import NOBODY, Caller, UnknownKeyError
from lmetric.server.api.eligibility import Ineligible
from lmetric.server.api.errors import ApiError, last_events
from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.model import Model
from lmetric.server.upstream.connection import Connection

if TYPE_CHECKING:
    from lmetric.server.execution.fallback import Fallback, FallbackStep
    from lmetric.server.execution.plan import Hedge, Step
    from lmetric.server.execution.trace import RequestTrace, TraceContext
    from lmetric.server.fleet.canary_run import CanaryRequest
    from lmetric.server.fleet.subset import Subset

FAILED = "internal error of the router; see its log for the reason"
STOPPING = "the router is shutting down"
SATURATED = frozenset({429, 503})  # statuses of engines that are full, not broken

_CORS_FIELDS = re.compile(rb"\r\naccess-control-[^\r\n]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that each request reads.

    Reading a pydantic model takes several times as long.
    """

    attempts: int
    failures: frozenset[str]
    statuses: frozenset[int]
    show_engines: bool
    answers_asked_name: bool
    timeouts: Timeouts

    @classmethod
    def of(cls, config: ServerConfig) -> Rules:
        """Returns the rules of a configuration."""
        retries = config.retries
        return cls(
            attempts=retries.attempts,
            failures=retries.failures,
            statuses=retries.statuses,
            show_engines=config.errors.show_engines,
            answers_asked_name=config.model_in_answers == "asked",
            timeouts=config.timeouts,
        )


class TokenUsage(Struct, frozen=True, eq=False, gc=False):
    """The tokens of an engine's answer or of a merged one, read once at its end."""

    prompt_tokens: int | None  # None: not reported
    cached_tokens: int | None  # those of the prompt that were cached; None: not reported
    output_tokens: int
    first_token_at: float | None  # of a stream, seconds on the monotonic clock
    implausible: bool = False  # a reported count was impossible, and was dropped

    def counted(self, expected: int) -> tuple[int, int, int]:
        """Returns its input tokens, those of them that were cached, and its output tokens.

        `expected`: the prompt's tokens, which count if the engine reported none.
        """
        reported = self.prompt_tokens
        return expected if reported is None else reported, self.cached_tokens or 0, self.output_tokens


class Payer(Protocol):
    """The counts of a client address."""

    is_gateway: bool
    running: int


class ClientPort(Protocol):
    """The connection of the request's client."""

    relay: Any  # its `InFlightRequest`, or None
    transport: asyncio.Transport | None
    peer: Peer
    body_size: int  # counted bytes of the request's body

    @property
    def payer(self) -> Payer | None:
        """The client whose limits the request counts against; None: it has disconnected."""

    @property
    def sender(self) -> str:
        """The IP address of the request's client; empty: of a unix socket."""

    @property
    def writing_paused(self) -> bool:
        """Whether the client reads too slowly."""

    def release_body(self) -> None:
        """Releases these bytes."""

    def answered(self, goes_on: bool) -> None:
        """Ends the request in flight. ``goes_on``: the connection may carry another request."""


# The writer of the answer: none yet, an engine (its bytes pass), the router; or it has ended.
AnswerState = Literal["nothing", "passed", "written", "ended"]


# Marks the fields of a request that serving it with a model sets: a fallback to another model gives
# them their defaults again.
PER_MODEL = {"per_model": True}


@dataclass(slots=True, eq=False, repr=False)  # reading a default of a class costs as much as ten slots
class ClientRequest:
    """A request for an engine as its client sent it, and the answer that the client gets.

    The answer is forwarded from an engine or written by the router, and ends once.
    """

    client: ClientPort
    transport: asyncio.Transport
    head: RequestHead
    # Called at the end in place of the client's `answered`, with its argument; None: not replaced.
    done: Callable[[bool], None] | None = None
    started: float = field(default_factory=time.monotonic)  # seconds on the monotonic clock
    trace: TraceContext | None = None  # None: the router records no traces
    tenant: str = ""
    cors: bytes = b""  # lines of the answer's head; empty: CORS is off
    method: str = "POST"
    http11: bool = True
    keep_alive: bool = False  # the connection stays open after the answer
    address: str | None = None  # of the client, for the access log
    model: Model | None = None
    model_name: str | None = None  # the name in the request, or what its alias stands for
    alias: str | None = None  # the name in the request, if it is an alias
    fallback: Fallback | None = None  # None: no other model may serve it
    slo_class: str = field(default="", metadata=PER_MODEL)  # name of its class; empty: none
    # Set by the router, lower first; None: requests are not ordered.
    priority: int | None = field(default=None, metadata=PER_MODEL)
    drops_priority: bool = field(default=False, metadata=PER_MODEL)  # the client's own priority is removed
    handicap_seconds: float = 0.0  # of its tenant, in the order of `uniboost`
    session_line: bytes = b""  # head line for engines: the session that only the body names
    # 0 if the prompt was given as tokens.
    prompt_bytes: int = field(default=0, metadata=PER_MODEL)
    # Of all its prompts, estimated for text.
    prompt_tokens: int = field(default=0, metadata=PER_MODEL)
    # The name of the only engine that may answer: it holds a response that the request continues.
    pinned_to: str | None = None
    # The recorder's, of its record on disk; None: it gets none.
    draft: Any = field(default=None, metadata=PER_MODEL)
    # Its arm; None: no canary runs.
    trial: CanaryRequest | None = field(default=None, metadata=PER_MODEL)
    payer: Payer | None = None  # the client that it counts for; None: it does not run
    # Returns the connection to a step's engine that a gateway has, which sends the request there.
    # None: the router sends it.
    gateway: Callable[[Step], Connection] | None = None
    gateway_model: str | None = None  # its gateway sets it in place of the body's; None: it sets none
    subset: Subset | None = None  # the only engines that its gateway allows; None: all
    sheddable: bool = False  # it is refused if it would have to wait
    refused_because: str | None = None  # the reason why its model refused it with 429
    # The reason why another engine cannot continue its stream; None: it can, or it is no stream.
    not_resumable: Ineligible | None = field(default=None, metadata=PER_MODEL)
    was_held: bool = False  # it waited on purpose
    caller: Caller = NOBODY  # by its credential
    unknown_key: UnknownKeyError | None = None  # of its token, until the issuer's keys are read
    # Of its tenant's budgets, which get it back when it is dropped; None: it has none.
    reservation: BudgetReservation | None = field(default=None, metadata=PER_MODEL)
    # Lines of the answer's head: what is left of the budgets.
    limit_lines: bytes = field(default=b"", metadata=PER_MODEL)
    # The times of its decision: seconds on the monotonic clock.
    decision_began: float = 0.0
    decision_ended: float = 0.0
    # Called with the name of the engine whose answer (status 200) the client is about to get, and
    # with the beginning of the answer's body.
    on_answer: Callable[[str, bytes], None] | None = field(default=None, metadata=PER_MODEL)
    # The answer.
    state: AnswerState = "nothing"
    opened: bool = False  # the router sent the head of a stream before any engine's answer (`comment`)
    only_closing_ends_it: bool = False  # it has neither a length nor chunks
    _reader: ResponseReader | None = None  # the engine's answer whose bytes pass
    _chunked: bool = False  # the router writes chunks
    # Its end, for observers.
    status: int = 499  # of the answer; 499: the client has left
    error: ApiError | None = None  # the router's answer; None: an engine's, or the client left
    ended_at: float = 0.0  # seconds on the monotonic clock

    @property
    def fell_back(self) -> FallbackStep | None:
        """The change from its first model to another one; None: it kept its model."""
        fallback = self.fallback
        return fallback.steps[0] if fallback is not None and fallback.steps else None

    @property
    def earlier_names(self) -> dict[str, str]:
        """Its names before that of its model, with the keys of its records."""
        found = {} if self.alias is None else {"alias": self.alias}
        if (step := self.fell_back) is not None:
            found |= {"fallback_from": step.model, "fallback_reason": step.reason}
        return found

    @property
    def renamed(self) -> tuple[str, str] | None:
        """The names of its model for engines and for its client; None: they are the same."""
        asked = self.alias
        if asked is None and (step := self.fell_back) is not None:
            asked = step.model
        return None if asked is None or self.model_name is None else (self.model_name, asked)

    @property
    def notes(self) -> dict[str, str]:
        """Its earlier names and its credential, for its decision record."""
        credential = self.caller.credential
        return self.earlier_names | ({} if credential is None else {"credential": credential})

    @property
    def client_key(self) -> str:
        """Its tenant, or the address of its client."""
        return self.tenant or self.client.sender

    def overdue(self, limit_seconds: float | None, now: float) -> str | None:
        """Returns the reason if the request has exceeded a limit, else None.

        `limit_seconds`: None: no limit. `now`: seconds on the monotonic clock.
        """
        if limit_seconds is None or now - self.started <= limit_seconds:
            return None
        return f"the request took longer than {limit_seconds:g} s (timeouts.request)"

    # The answer. `lines`: the router's own lines in its head.

    def pass_on(self, reader: ResponseReader, lines: bytes, engine: str) -> None:
        """Starts the answer with an engine's bytes so far, and forwards its further bytes."""
        if self.on_answer is not None and reader.status == 200:
            self.on_answer(engine, reader.held)
        write = self.transport.write
        if self.opened:
            self.comment(lines)
        self.state = "passed"
        self._reader = reader
        if self.opened:
            if withheld := reader.continue_stream(write):
                write(withheld)
            return
        head = reader.commit(lines, not self.keep_alive, write)
        write(_with_cors(head, self.cors) if self.cors else head)

    def begin(self, length: int | None, lines: bytes) -> None:
        """Starts an answer of the router. `length`: bytes of its body; None: it is a stream."""
        if self.opened:
            self.comment(lines)
            return
        self.state = "written"
        kind = b"application/json" if length is not None else b"text/event-stream; charset=utf-8"
        parts = [b"HTTP/1.1 200 OK\r\ncontent-type: ", kind, b"\r\n", lines, self.cors]
        self._chunked = length is None and self.http11
        if length is not None:
            parts.append(b"content-length: %d\r\n" % length)
        elif self._chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self.only_closing_ends_it = True
        if self.only_closing_ends_it or not self.keep_alive:
            parts.append(b"connection: close\r\n")
        self.transport.write(b"".join(parts) + b"\r\n")

    def comment(self, lines: bytes) -> None:
        """Writes each of ``lines`` as an SSE comment, which clients ignore.

        Before an engine's answer, this opens the stream.
        """
        if not self.opened:
            request_id = self.head.request_id.encode("latin-1")
            self.begin(None, b"x-request-id: %b\r\n" % request_id)
            self.opened = True
        self.write(sse_comments(lines))

    def write(self, data: Any, *, last: bool = False) -> None:
        """Writes a part of the answer.

        After a forwarded stream, the part follows its last event.
        """
        if self.state == "passed":
            assert self._reader is not None
            self.state = "written"
            self.only_closing_ends_it = self._reader.closes_client
            self._chunked = not self.only_closing_ends_it
        if self._chunked:
            data = (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + (b"0\r\n\r\n" if last else b"")
        if data:
            self.transport.write(data)
        if last:
            self.state = "ended"

    def break_off(self, body: bytes) -> None:
        """Ends a started answer with an error as its last event, or by closing the connection.

        The connection closes if the answer cannot carry an event.
        """
        if self.state == "written":
            self.write(last_events(self.head.path, body), last=True)
        elif self.state == "passed":
            assert self._reader is not None
            tail = self._reader.end_with(last_events(self.head.path, body))
            if tail:
                self.transport.write(tail)
            self.only_closing_ends_it = not tail or self._reader.closes_client
        self.state = "ended"

    def end(self) -> bool:
        """Ends the answer. Returns whether the connection must close to end it."""
        if self.state == "passed":
            assert self._reader is not None
            self.state = "ended"
            self.only_closing_ends_it = self._reader.closes_client
        return self.only_closing_ends_it


def sse_comments(lines: bytes) -> bytes:
    """Returns each line as an SSE comment."""
    return b"".join(b": %b\n" % line for line in lines.splitlines()) + b"\n"


def why_no_stream(reader: ResponseReader) -> str:
    """Returns why an engine's answer is not an event stream that the router can read."""
    if reader.coding is not None:
        return f"the engine's answer has the content-encoding {reader.coding[:64]!r}"
    return "the engine did not answer with an event stream"


def without_cors(head: bytes) -> bytes:
    """Returns the head of an engine's answer without its CORS fields."""
    return _CORS_FIELDS.sub(b"", head)


def _with_cors(answer: bytes, lines: bytes) -> bytes:
    """Returns the start of an engine's answer, with these lines in place of its CORS fields."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (without_cors(head), lines, rest)


class Intent(Struct, eq=False, gc=False):
    """A request whose body was read and whose model is known. Placement adds how it may run."""

    client_request: ClientRequest
    call: ParsedRequest
    model: Model
    adapter: str | None = None
    asked: Request = cast(Request, None)  # for the core router; set by placement
    moves: bool = False  # it may be split or moved
    fetches: bool = False  # it may get a prefix fetch
    resumes: bool = False  # after a failure, another engine may continue its stream
    hedge: Hedge | None = None  # another engine may get it, too, if its first token is late
    arrival: Arrival | None = None  # its place in the core router's queue; None: there is no queue


class InFlightRequest:
    """A request in flight. Its connection and the server call its methods until it ends."""

    __slots__ = ()
    committed = False  # the client has a part of an engine's answer
    decision: Decision | None = None  # None: it was not routed
    close_client = False
    reason = ""  # the reason of an end with an error
    status = 0
    usage: TokenUsage | None = None  # None before the end, or without an engine's answer
    trace: RequestTrace | None = None  # None: its engines get no trace context of the router
    # The engine that answered, or was tried last. None before the end, or if it was not routed.
    instance: str | None = None
    # Predicted by its decision, and set with `usage`. None: after a retry, with a prefix fetch, or
    # without a decision.
    predicted_cached_tokens: int | None = None

    @property
    def label(self) -> str | None:
        """The label of its routing decision; None: it was not routed."""
        return None

    def _leave(self, reason: str, error: ApiError | None = None) -> None:
        """Ends the request early, unless it has ended. ``error``: for its client."""
        raise NotImplementedError

    def client_gone(self) -> None:
        """Called when the client has disconnected."""
        self._leave("the client left")

    def client_slow(self, slow: bool) -> None:
        """Called when the client reads too slowly, and when it has caught up (False)."""

    def check(self, now: float) -> None:
        """Called periodically: ends the request at its time limits."""

    def stop(self) -> None:
        """Called when the server stops."""
        headers = {"retry-after": "5"}
        self._leave(STOPPING, ApiError(503, STOPPING, code="shutting_down", headers=headers))

    def fail(self) -> None:
        """Ends the request after an unexpected exception."""
        self._leave("internal error", ApiError(500, FAILED))
