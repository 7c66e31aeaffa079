"""Steps and other actions of a request, and the events of its attempts. Plain data.

A request is a chain of segments placed on engines. Generators run it (`ways`), `execution` resumes
them with events, and a runner carries out the actions (`runner`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from msgspec import Struct

from lmetric.server.api.errors import ApiError
from lmetric.server.fleet.engine import Engine

if TYPE_CHECKING:
    from lmetric._core import Decision, Request, ResponseReader, Ticket
    from lmetric.server.fleet.transfer import KvTransfer


# How an attempt reads its engine's answer. "pass": its bytes go to the client. "whole": the attempt
# collects it. "events": the way gets its events one by one. To add a reader (token ids in and
# out, as in vLLM's `/inference/v1/generate`), add a name here and a branch in `EngineAttempt`.
Reader = Literal["pass", "whole", "events"]
# The events of an attempt. Nothing follows the last four, or a cancellation. "comments": lines of
# comments that came before "ready". "ready": the way may commit to the answer. Its detail is the
# reader's flags. For the reader "pass", END without an error means that the answer is also whole,
# and no "ended" follows. "events": a list of event data or comment lines. "unseen": the tokens of a
# forwarded stream are no longer recorded. "ended": the answer is whole. "failed": no answer, or no
# more of it; detail: kind of failure and reason. "stale": the step carries a KV transfer that must
# not be sent on another connection. The engine may have fetched it already, or (detail True) it has
# expired. "elsewhere": a gateway has the answer from another engine; detail: `OtherEngine`.
AttemptEvent = Literal["comments", "ready", "events", "unseen", "ended", "failed", "stale", "elsewhere"]
# Actions without arguments. "pause", "resume": stop and continue reading the client's answer from
# its engine. "abort_client": closes the client's connection at once.
Action = Literal["pause", "resume", "abort_client"]


class Step(Struct, eq=False, gc=False):  # msgspec creates it in C, as each request has one
    """A request to one engine, and the way to read its answer: an action."""

    engine: Engine
    body: bytes
    reader: Reader
    limit_seconds: float  # until its first token, or until it is whole
    stream: bool = False  # it requests a stream
    target: bytes | None = None  # path of the request; None: the client's path
    method: bytes = b"POST"
    side: bool = False  # it runs beside the open segment, as `Progress.side` or for its media
    for_client: bool = True  # its answer is for the client
    advances_ticket: bool = True  # its ticket counts it as sent, and KV backfill may add its field
    kv: KvTransfer | None = None  # it fetches this KV transfer, which must not be sent twice
    observed: bool = False  # its tokens are recorded while they pass (reader "pass")
    hides_ids: bool = False  # the client did not request the token ids in the answer
    checks_prompt: bool = False  # the engine must report the same tokens of a chat

    @property
    def merges(self) -> bool:
        """Whether its answer continues the tokens of earlier segments: it has a path of its own."""
        return self.for_client and self.target is not None

    def lost(self, kind: str, reason: str, words: str = "") -> EngineLost:
        """Returns the failure of its engine. `words`: see `EngineLost`."""
        return EngineLost(self.engine, kind, reason, step=self, words=words)


class Cancel(Struct, frozen=True, eq=False):
    """Cancels the attempt of a step, if it still runs."""

    step: Step


class Wake(Struct, frozen=True, eq=False):
    """Schedules a call of `woken` after this many seconds; None cancels it."""

    seconds: float | None


class Commit(Struct, eq=False, gc=False):  # msgspec creates it in C, as each request has one
    """Commits to the answer of an attempt: forwards its bytes, or reads its events."""

    attempt: Attempt


class Comment(Struct, frozen=True, eq=False):
    """Opens the client's stream, unless that was done, and writes lines of comments."""

    lines: bytes


class Begin(Struct, frozen=True, eq=False):
    """Starts an answer of the router. `length`: bytes of its body; None: it is a stream."""

    length: int | None
    engine: str  # the engine named in its head


class Write(Struct, frozen=True, eq=False):
    """Writes a part of the router's answer."""

    data: bytes | bytearray
    last: bool = False


class BreakOff(Struct, frozen=True, eq=False):
    """Ends a started answer with this error."""

    error: ApiError


class Finish(Struct, frozen=True, eq=False):
    """Ends the request. `error`: for a client without any answer yet."""

    error: ApiError | None = None


Act = Step | Action | Cancel | Wake | Comment | Commit | Begin | Write | BreakOff | Finish


@dataclass(slots=True, eq=False, repr=False)
class Attempt:
    """A step at its engine, as its way sees it. Only the step is an argument."""

    step: Step
    started: float = field(init=False)  # seconds on the monotonic clock
    # Status, usage, tokens and errors received so far; set once the step is sent.
    reader: ResponseReader = field(init=False)
    # The announced version that its engine began with.
    weights: str | None = field(default=None, init=False)
    answer: bytes | bytearray = field(default=b"", init=False)  # for reader "whole", or a refusal
    error: bool = field(default=False, init=False)  # the engine reported an error inside its answer
    # Of an error that only quotes its status.
    error_code: int | None = field(default=None, init=False)
    committed: bool = field(default=False, init=False)  # a way has committed to the answer

    @property
    def message(self) -> str:
        """The engine's message in an error answer; empty without one."""
        if self.reader.coding is not None:
            return ""
        return self.step.engine.adapter.error(bytes(self.answer) or self.reader.held)

    @property
    def error_words(self) -> str:
        """The engine's message after a colon, for the client alone; empty without one."""
        return f": {message}" if (message := self.message) else ""


@dataclass(slots=True, eq=False)
class Hedge:
    """The second attempt of one request: due after a time, then sent (`ways.hedge`)."""

    after_seconds: float
    request: Request  # as routed first
    way: Callable[[Any, Engine], Way[str | None]]  # runs the first attempt, and this one beside it
    canary: bool = False  # whether the canary's policy decides
    step: Step | None = None  # None: it is not sent
    decision: Decision = field(init=False)
    ticket: Ticket = field(init=False)


@dataclass(slots=True, eq=False)
class Migration:
    """A migration (`ways.move`), until the target continues the request, or it stays."""

    target: Engine
    kv: KvTransfer  # from the source to the target
    sent_tokens: int = 0  # tokens in the last request to source or target


REPORTED_ERROR = "the engine reported an error"  # the reason before the engine's own words


# -- exceptions that a way meets -------------------------------------------------------------------


def ticket_kind(kind: str) -> str:
    """Returns the name of a kind of failure for tickets, and in errors for clients."""
    return "status" if kind in ("saturated", "not_served") else kind


class EngineLost(Exception):
    """An engine failed a step, or declined it.

    `step`: None if no step was sent. `words`: the engine's own, after a colon. They may repeat the
    prompt, so they reach its client alone, and no log.
    """

    def __init__(
        self, engine: Engine, kind: str, reason: str, *, step: Step | None = None, words: str = ""
    ) -> None:
        super().__init__(reason)
        self.engine = engine
        self.kind = kind
        self.retried_kind = "reset" if kind == "engine_error" else kind  # as retries and blame count it
        self.reason = reason
        self.step = step
        self.client_reason = reason + words


class NoTransfer(Exception):
    """The step must be sent again, without its KV transfer."""


class MergeError(Exception):
    """A segment's answer cannot be merged with the next one; the message has the reason.

    `failed`: the engine failed, and another engine may succeed.
    """

    def __init__(self, why: str, *, failed: bool = False) -> None:
        super().__init__(why)
        self.failed = failed


class TimeIsUp(Exception):
    """The timer that `Progress.wake` has set is over."""


class SwitchTo(Exception):
    """The target of the request's migration takes over. `kv`: the transfer to it."""

    def __init__(self, kv: KvTransfer) -> None:
        super().__init__()
        self.kv = kv


class OtherEngine(Exception):
    """A gateway has the answer from another engine than the step's.

    ``refused``: the engines that the gateway tried before, without an answer that it could use.
    """

    def __init__(self, engine: Engine, refused: tuple[Engine, ...]) -> None:
        super().__init__(engine.name)
        self.engine = engine
        self.refused = refused


class Ended(Exception):
    """The request ends. `error`: for its client; `failure`: the failure kind for an open ticket."""

    def __init__(self, error: ApiError | None, failure: str = "engine_error") -> None:
        super().__init__(failure)
        self.error = error
        self.failure = failure


def ended_by_order() -> Ended:
    """Returns the end of a request whose answer its engine aborted by order: no failure of it."""
    return Ended(None, "cancelled")


T = TypeVar("T")
# A way of running a request. It yields steps to send, and None to wait for the next event. It gets
# an attempt with the flags of an answer that begins, with a list of events, or with None at the end
# of its answer. A failure is thrown as `EngineLost`.
Way: TypeAlias = Generator[Step | None, tuple[Attempt, Any], T]
