"""Requests without sockets, tasks or a clock: models, engines that answer by a rule, and a driver.

Like `Runner` in the server, `Driver` carries out the actions of a request. Its attempts read
answers in Rust, without an event loop.

The engines answer by a fixed rule. So the client must get the answer of one engine, or a part of it
and an error. The engines also record their KV transfers. They assert against fetches that would
give wrong tokens on a real engine: a second fetch, a late fetch, or a fetch of another cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import orjson

from constants import any_split, constant_options, constants
from lmetric._core import Peer, Request, RequestReader, Ticket
from lmetric.config import EngineConfig, HedgingConfig, PoolSettings, ServerConfig, Timeouts
from lmetric.engines.adapter import Capabilities, Handover
from lmetric.options import SplitAt
from lmetric.server.api.paths import RELAYED
from lmetric.server.api.request import parse
from lmetric.server.execution import ways
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.exchange import ClientRequest, Intent, Rules
from lmetric.server.execution.execution import Execution
from lmetric.server.execution.plan import (
    Act,
    AttemptEvent,
    Begin,
    BreakOff,
    Cancel,
    Commit,
    Finish,
    Hedge,
    Step,
    Wake,
    Write,
)
from lmetric.server.execution.ways.hedge import hedged
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.parsing import DERENDER
from lmetric.server.http.tokenizing import prompt_text
from lmetric.server.upstream.connection import Connection, UpstreamError
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated.protocol import Shape, StreamOptions
from lmetric_lab.emulated.text import TOKENIZER_PATH, shared_text
from split_world import CHAT, COMPLETIONS

BLOCK_TOKENS = 16
PROMPT = "the history of the quiet river and of all who lived by it " * 4
LEASE_SECONDS = 30.0  # an engine holds an unfetched transfer this long
LIMITS = {
    "connect": 3.0,
    "first_byte": 40.0,
    "answer": 60.0,
    "between_chunks": 15.0,
}
SLOW_CLIENT_SECONDS = 45.0
REQUEST_SECONDS = 400.0
HEDGE_SECONDS = 5.0
# Rounds in which only time passes: enough to end any request, as some attempt fails in each.
ROUNDS = 60


class Slot(Enum):
    """The slots of a request for attempts."""

    MAIN = "main"  # runs the open segment
    SIDE = "side"
    HEDGE = "hedge"


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Sets the time limits that tests of the execution expect."""
    with (
        constants(Timeouts, slow_client=SLOW_CLIENT_SECONDS),
        constants(HedgingConfig, budget_ratio=1.0),
        constants(PoolSettings, prefix_fetch_timeout_seconds=5.0),
    ):
        yield


# -- models
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A model and its engines."""

    roles: str = "both"  # or nixl, sglang: prefill and decode engines
    moves: str | None = None  # migration_by
    fails_over: bool = False  # streams continue after a failure
    hedges: bool = False  # a second engine gets a stream without a token
    split_at: float | None = None
    pulls: bool = False
    nixl: bool = True
    bidirectional: bool = True
    cached: int = 9  # the number of engines with a prefix cache, from the first on
    other_blocks: bool = False  # the last engine has larger blocks
    pauses: bool = False  # engines report whether they are paused
    long_gaps: bool = False  # the expected gap of every move is too long
    request_seconds: float | None = None
    attempts: int = 3

    @property
    def names(self) -> list[str]:
        return ["e0", "e1", "e2"] if self.roles == "both" else ["p0", "p1", "d0", "d1"]

    def config(self) -> ServerConfig:
        return _config(self)

    def engine(self, name: str) -> Engine:
        """Returns a healthy, identified engine."""
        engine = Engine(EngineConfig(url=f"http://{name}:1", name=name), self.config())
        role: Any = {"e": "both", "p": "prefill", "d": "decode"}[name[0]]
        handover = None
        if self.roles == "sglang":
            handover = Handover("bootstrap", bootstrap_port=9001)
        elif self.nixl:
            handover = Handover("nixl", bidirectional=self.bidirectional)
        last = self.other_blocks and name == self.names[-1]
        engine.capabilities = Capabilities(
            "vllm",
            block_size=2 * BLOCK_TOKENS if last else BLOCK_TOKENS,
            prefix_caching=name not in self.names[self.cached :],
            handover=handover,
            role=role,
            token_ids=self.roles != "sglang",
            pause_pages=("/is_paused",) if self.pauses else (),
        )
        engine.identified = True
        engine.succeeded()
        return engine

    def model(self) -> Model:
        model = Model(0, "tiny", [], self.config().pool_settings())
        ways.follow(model)
        model.tokenizers.current = tokenizer()
        for name in self.names:
            model.add(self.engine(name))
        return model

    def computed(self, model: Model, path: str) -> None:
        """Lets one engine compute the prompt, so that another may fetch it."""
        decision, ticket = model.router.route(Request(token_ids=array("I", prompt_of(path, False))))
        following: str | None = decision.instance
        while following is not None:
            ticket.sent()
            ticket.first_token()
            following = ticket.segment_done()


@functools.cache
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.load(TOKENIZER_PATH.parent)


@functools.cache
def _config(of: Setup) -> ServerConfig:
    values: dict[str, Any] = {
        "policy": "round_robin",
        "decode_policy": "round_robin",
        "programs": "observe",
        "model": "tiny",
        "experimental": True,
        "tokenizer": None,
        "block_size": BLOCK_TOKENS,
        "timeouts": LIMITS | {"request": of.request_seconds},
        "retries": {"attempts": of.attempts},
        "stream_failover": of.fails_over,
        "hedging": {"after_seconds": HEDGE_SECONDS if of.hedges else None},
    }
    if of.moves is not None:
        values |= {
            "rebalance": "star",
            "migration_by": of.moves,
            "migration_max_gap_seconds": 1e-9 if of.long_gaps else 80_000.0,
        }
    if of.split_at is not None:
        values |= {"split": SplitAt(fraction=of.split_at), "split_recompute": not of.nixl}
    if of.pulls:
        cost = {"seconds_per_token": 0.0, "fixed_seconds": 0.0, "min_tokens": BLOCK_TOKENS}
        values |= {"prefix_fetch": cost}
    with constant_options(), any_split():
        return ServerConfig.model_validate(values)


@dataclass(frozen=True)
class Ask:
    """A client's request, and its treatment by engines."""

    path: str = COMPLETIONS
    stream: bool = True
    tokens: int = 9  # max_tokens
    shows_ids: bool = False
    usage: bool = True
    stops_at: int | None = None  # the token that ends the answer
    other_text: bool = False  # engines' texts differ from their tokens
    other_prompt: bool = False  # engines render chats differently from the router
    slow: bool = False  # the client does not read from the start

    def body(self) -> bytes:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": self.tokens, "prompt": PROMPT}
        if self.path == CHAT:
            del asked["prompt"]
            asked["messages"] = [{"role": "user", "content": PROMPT}]
        if self.stream:
            asked["stream"] = True
            if self.usage:
                asked["stream_options"] = {"include_usage": True}
        if self.shows_ids:
            asked["return_token_ids"] = True
        return orjson.dumps(asked)


# -- engines that answer by a fixed rule
# -------------------------------------------------------------


@functools.cache
def prompt_of(path: str, other: bool) -> tuple[int, ...]:
    """Returns the prompt's tokens, as engines tokenize it."""
    text = shared_text()
    asked = text.render_chat([{"role": "user", "content": PROMPT}]) if path == CHAT else PROMPT
    return tuple(text.encode(("As it was said: " if other and path == CHAT else "") + asked))


def said(position: int) -> int:
    """Returns the token that every engine produces at this position of prompt and answer."""
    words = shared_text().words
    return words[37 * position % len(words)]


@dataclass
class Held:
    """A KV cache that an engine holds for another engine."""

    tokens: list[int]
    until: float = -math.inf  # seconds on the clock
    fetched: bool = False


@dataclass
class Answer:
    """An engine's answer in pieces, and the number of received pieces."""

    pieces: list[bytes]
    stream: bool
    held: Held | None = None
    heard: int = 0
    body: dict[str, Any] = field(default_factory=dict)  # of the request


def http(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


@dataclass
class Engines:
    """All engines: their answers to one request, and their held KV caches."""

    ask: Ask
    setup: Setup
    held: dict[str, Held] = field(default_factory=dict)
    ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def prompt(self) -> tuple[int, ...]:
        return prompt_of(self.ask.path, self.ask.other_prompt)

    def length(self) -> int:
        """Returns the number of answer tokens."""
        most, stop = self.ask.tokens, self.ask.stops_at
        return most if stop is None else min(most, stop + 1)

    def text_of(self, tokens: list[int]) -> str:
        text = str(orjson.loads(b'"%b"' % b"".join(shared_text().pieces[token] for token in tokens)))
        return text.upper() if self.ask.other_text else text

    def expected(self) -> tuple[list[int], str, str]:
        """Returns the whole answer: ids, text, and finish reason."""
        ids = [said(len(self.prompt) + n) for n in range(self.length())]
        stops = self.ask.stops_at is not None and self.ask.stops_at < self.ask.tokens
        return ids, self.text_of(ids[:-1] if stops else ids), "stop" if stops else "length"

    def answer(self, engine: str, request: bytes, for_client: bool, now: float) -> Answer:
        """Returns an engine's answer to the bytes of a request."""
        head, _, raw = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET /is_paused "):
            assert self.setup.pauses
            return Answer([http(200, b'{"is_paused":true}')], False)
        body = orjson.loads(raw)
        assert head.startswith(b"POST /v1/")
        assert (b"/v1/chat/" in head) is ("messages" in body)
        chat = "messages" in body
        if chat:
            prompt = list(self.prompt)
        elif isinstance(body["prompt"], str):
            prompt = list(shared_text().encode(body["prompt"]))
        else:
            prompt = body["prompt"]
        self._fetch(engine, body, prompt, now)
        most = body.get("max_completion_tokens") or body["max_tokens"]
        if "bootstrap_room" in body and not for_client:
            most = 1
        stop = self.ask.stops_at
        at = math.inf if stop is None else len(self.prompt) + stop
        ids: list[int] = []
        while len(ids) < most and len(prompt) + len(ids) <= at:
            ids.append(said(len(prompt) + len(ids)))
        stops = bool(ids) and len(prompt) + len(ids) - 1 == at
        if not ids:  # it continues after the end of the answer, so its tokens do not matter
            ids = [said(len(prompt))]
        options = body.get("stream_options")
        shape = Shape(
            chat=chat,
            request_id="cmpl-1",
            model="tiny",
            prompt=array("I", prompt),
            pieces=shared_text().pieces,
            token_ids=bool(body.get("return_token_ids")),
            stream_options=StreamOptions(**options) if options else None,
        )
        finish = "stop" if stops else "length"
        if not body.get("stream"):
            params, held = self._hold(engine, body, prompt + ids[:-1])
            text = self.text_of(ids[:-1] if stops else ids)
            whole = shape.whole(ids, finish, None, 0, params, text)
            cut = len(whole) // 2
            pieces = [http(200, whole)[:-cut], whole[-cut:]]
            return Answer(pieces, False, held, body=body)
        # vLLM 0.33 in bidirectional mode: the last chunk has the address of the cache.
        fetched = (body.get("kv_transfer_params") or {}).get("do_remote_prefill")
        left = (
            b',"kv_transfer_params":{"remote_port":1}}\n\n' if fetched and self.setup.bidirectional else None
        )
        opening = shape.opening()
        pieces = [STREAM_HEAD] + ([chunk(opening)] if opening else [])
        for number, each in enumerate(ids, 1):
            last = number == len(ids)
            text = "" if last and stops else self.text_of([each])
            event = shape.token(each, number, finish if last else None, None, text)
            pieces.append(chunk(event if left is None or not last else event.removesuffix(b"}\n\n") + left))
        return Answer([*pieces, chunk(shape.closing(len(ids), 0)) + STREAM_END], True, body=body)

    def _fetch(self, engine: str, body: dict[str, Any], prompt: list[int], now: float) -> None:
        params = body.get("kv_transfer_params") or {}
        if params.get("remote_request_id") is None:
            assert not params.get("do_remote_prefill")
            return
        held = self.held[params["remote_request_id"]]
        assert not held.fetched, "a KV cache is fetched twice"
        held.fetched = True
        assert now <= held.until, "a KV cache is fetched when its lease is over"
        assert params["remote_engine_id"] != f"engine-{engine}", "an engine fetches from itself"
        if params["do_remote_prefill"]:
            assert len(prompt) <= len(held.tokens), "an engine dies of a longer prompt than was held"
            held.tokens = held.tokens[: len(prompt)]
        else:
            assert self.setup.bidirectional, "this request would never end"
        if "messages" not in body or not self.ask.other_prompt:
            assert prompt[: len(held.tokens)] == held.tokens, "the cache of another prompt is fetched"

    def _hold(
        self, engine: str, body: dict[str, Any], tokens: list[int]
    ) -> tuple[dict[str, Any] | None, Held | None]:
        asked = body.get("kv_transfer_params") or {}
        if not asked.get("do_remote_decode") and not (
            asked.get("do_remote_prefill") and self.setup.bidirectional
        ):
            return None, None
        name, held = f"held-{next(self.ids)}", Held(tokens)
        self.held[name] = held
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1]],
            "remote_engine_id": f"engine-{engine}",
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            "remote_num_tokens": len(tokens),
            "transfer_mode": "pull",
        }, held


# -- connections without sockets
# ---------------------------------------------------------------------


class Clock:
    """A clock that a test advances. It starts at the time of the readers in Rust."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


class Wire:
    """One end of a connection."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.paused = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Connecting:
    """A connection that is being opened, with the interface of a task."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.connection: Connection | None = None
        self.error: UpstreamError | None = None
        self.given_up = False

    def cancel(self) -> None:
        self.given_up = True

    def cancelled(self) -> bool:
        return self.given_up

    def exception(self) -> UpstreamError | None:
        return self.error

    def result(self) -> Connection:
        assert self.connection is not None
        return self.connection


def connection_of(engine: Engine) -> Connection:
    """Returns a new connection to an engine."""
    made = Connection(engine.upstream.gone)
    made.connection_made(cast(Any, Wire()))
    engine.upstream._open.add(made)
    return made


class QuietAttempt(EngineAttempt):
    """An attempt whose connection is opened by a test."""

    answered: Answer | None = None

    def _connect(self) -> None:
        self._fresh = True
        self._connecting = cast(Any, Connecting(cast(Driver, self.listener).clock.now))
        cast(Driver, self.listener).connects(self)

    def _send(self, connection: Connection, now: float) -> None:
        super()._send(connection, now)
        if self._connection is connection:
            cast(Driver, self.listener).wrote(self)

    @property
    def connecting(self) -> Connecting | None:
        return cast(Connecting | None, self._connecting)

    @property
    def connection(self) -> Connection | None:
        return self._connection

    @property
    def wire(self) -> Wire:
        assert self._connection is not None
        return cast(Wire, self._connection.transport)

    def connected(self, error: UpstreamError | None = None) -> None:
        """Completes the connection, or fails it."""
        task = self.connecting
        assert task is not None
        task.error = error
        if error is None:
            task.connection = connection_of(self.step.engine)
        self._connected(cast(Any, task))


# -- one request
# -------------------------------------------------------------------------------------


class DrivenExecution(Execution):
    """An execution without slots, so that its driver can replace `move_to`."""


class Client:
    """The client's connection, with the interface for a request."""

    relay = None
    writing_paused = False
    sender = "127.0.0.1"
    peer = Peer("127.0.0.1", secure=False, trusted=False)
    body_size = 0

    def release_body(self) -> None:
        pass

    def answered(self, goes_on: bool) -> None:
        pass


class Driver:
    """Carries out the actions of one request."""

    def __init__(
        self, model: Model, setup: Setup, ask: Ask, clock: Clock, engines: Engines, holds: bool = False
    ) -> None:
        self.model, self.setup, self.ask, self.clock, self.engines = model, setup, ask, clock, engines
        self.client = Wire()
        self.left = False
        self.open: dict[Slot, QuietAttempt] = {}
        self.gone: list[QuietAttempt] = []
        self.holds_connections = holds
        self.wakes_at: float | None = None
        self.counts = dict.fromkeys(("begin", "commit", "last", "break", "finish", "abort"), 0)
        self.error: Any = None
        self.raised: BaseException | None = None
        self._busy = False
        self._later: list[tuple[Callable[..., list[Act]], tuple[Any, ...]]] = []
        self._start()

    def _start(self) -> None:
        model, ask, setup = self.model, self.ask, self.setup
        body = ask.body()
        line = f"POST {ask.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        head = RequestReader(False, "x", 1 << 16, RELAYED).read(line.encode())
        assert head is not None
        asked = ClientRequest(cast(Any, Client()), cast(Any, self.client), head)
        asked.keep_alive = True
        asked.started = self.clock.now
        asked.model = model
        call = parse(RELAYED[ask.path], body)
        call.tokens = tokenizer().encode(prompt_text(tokenizer(), call))
        assert call.tokens is not None
        split_reason = model.split_reason(ask.path, call) if model.joins else None
        fetch_reason = model.fetch_reason(ask.path, call) if model.fetches_prefixes else None
        moves = model.joins and split_reason is None
        request = Request(
            token_ids=call.tokens,
            prompt_tokens=len(call.tokens),
            max_tokens=call.max_tokens,
            length_class="a" if model.splits else None,
            allow_split=split_reason is None,
            split_reason=split_reason,
            allow_fetch=fetch_reason is None,
            fetch_reason=fetch_reason,
        )
        decision, ticket = model.router.route(request, now=self.clock.now)
        self.rules = Rules.of(setup.config())
        fetches = model.fetches_prefixes and fetch_reason is None
        resumes = model.fails_over and call.stream and model.failover_reason(ask.path, call) is None
        hedge = Hedge(HEDGE_SECONDS, request, hedged) if setup.hedges and call.stream else None
        intent = Intent(
            *(asked, call, model), moves=moves, fetches=fetches, resumes=resumes, hedge=hedge, asked=request
        )
        self.execution = DrivenExecution(self.rules, intent, (decision, ticket))
        if self.execution.mover is not None:
            self.execution.move_to = self.move_to  # type: ignore[method-assign]
        self.asked = asked
        if ask.slow:
            self.slow()
        self.on(self.execution.placed, self.clock.now)

    @property
    def ticket(self) -> Ticket:
        return self.execution.ticket

    # Events in, actions out.

    def on(self, event: Callable[..., list[Act]], *args: Any) -> None:
        """Gives an event to the execution, and carries out all resulting actions."""
        self._later.append((event, args))
        if self._busy:
            return
        self._busy = True
        try:
            while self._later:
                heard, given = self._later.pop(0)
                for act in heard(*given):
                    self._promote_hedge()
                    self._do(act)
                self._promote_hedge()
        finally:
            self._busy = False

    def _do(self, act: Act) -> None:
        assert not self.counts["finish"] or act == "abort_client", f"{act} behind the end"
        counts, execution = self.counts, self.execution
        if isinstance(act, Step):
            self._send(act)
        elif isinstance(act, Wake):
            self.wakes_at = None if act.seconds is None else self.clock.now + act.seconds
        elif isinstance(act, Begin):
            assert not counts["begin"]
            counts["begin"] += 1
            self.asked.begin(act.length, execution.head_lines(act.engine))
        elif isinstance(act, Write):
            assert counts["begin"] or counts["commit"], "an answer goes on that has not begun"
            assert not counts["last"]
            counts["last"] += act.last
            self.asked.write(act.data, last=act.last)
        elif isinstance(act, BreakOff):
            assert counts["begin"] or counts["commit"]
            assert not counts["last"]
            counts["break"] += 1
            self.asked.break_off(act.error.body())
        elif isinstance(act, Finish):
            counts["finish"] += 1
            self.error = act.error
            self.asked.end()
            if execution.answered is self.open.get(Slot.MAIN) is not None:
                self.gone.append(self.open.pop(Slot.MAIN))  # it was whole when it was ready
        elif isinstance(act, Commit):
            assert act.attempt is self.open.get(Slot.MAIN), "two attempts answer"
            self._commit()
        elif isinstance(act, Cancel):
            for slot, attempt in list(self.open.items()):
                if attempt.step is act.step:
                    attempt.cancel()
                    self.gone.append(self.open.pop(slot))
        elif act in ("pause", "resume"):
            for found in (self.open.get(Slot.MAIN), self.open.get(Slot.HEDGE)):
                if found is not None and found.step.for_client:
                    found.pause(act == "pause")
        elif act == "abort_client":
            counts["abort"] += 1
            self.left = True

    def _promote_hedge(self) -> None:
        if self.execution.hedge is None and Slot.HEDGE in self.open and Slot.MAIN not in self.open:
            self.open[Slot.MAIN] = self.open.pop(Slot.HEDGE)

    def _send(self, step: Step) -> None:
        hedge, ticket = self.execution.hedge, self.ticket
        slot = Slot.SIDE if step.side else Slot.MAIN
        if hedge is not None and hedge.step is step:
            slot, ticket = Slot.HEDGE, hedge.ticket
            assert step.engine is not self.open[Slot.MAIN].step.engine, "an engine gets it twice"
        assert slot not in self.open, "an attempt is left without an owner"
        attempt = QuietAttempt(step, self, self.rules, self.asked, ticket)
        self.open[slot] = attempt
        if self.execution.stalled_at and step.for_client:
            attempt.pause(True)
        attempt.go(self.clock.now)

    def _commit(self) -> None:
        attempt = self.open.get(Slot.MAIN)
        assert attempt is not None
        attempt.begin()
        if self.execution.answered is attempt:
            assert not self.counts["begin"]
            assert not self.counts["commit"], "a second answer passes to the client"
            self.counts["commit"] += 1
            name = attempt.step.engine.name
            self.asked.pass_on(attempt.reader, self.execution.head_lines(name), name)

    # Called by attempts.

    def connects(self, attempt: QuietAttempt) -> None:
        if not self.holds_connections:
            attempt.connected()

    def wrote(self, attempt: QuietAttempt) -> None:
        """Records a sent request."""
        step, wire = attempt.step, attempt.wire
        request, wire.written = wire.written, b""
        now = self.clock.now
        attempt.answered = self.engines.answer(step.engine.name, request, step.for_client, now)

    def on_attempt_event(self, event: AttemptEvent, attempt: EngineAttempt, detail: Any = None) -> None:
        assert isinstance(attempt, QuietAttempt)
        if event in ("ended", "failed", "stale"):
            slots = [slot for slot, found in self.open.items() if found is attempt]
            assert slots, "a cancelled attempt reports an event"
            self.gone.append(self.open.pop(slots[0]))
        self.on(self.execution.attempt, event, attempt, self.clock.now, detail)

    def fail(self) -> None:
        self.raised = sys.exc_info()[1]

    # Actions of engines.

    def feed(self, attempt: QuietAttempt, data: bytes) -> None:
        connection = attempt.connection
        assert connection is not None
        connection.data_received(data)

    def say(self, attempt: QuietAttempt, pieces: int) -> None:
        """Delivers further pieces of an engine's answer."""
        answer = attempt.answered
        assert answer is not None
        while pieces and answer.heard < len(answer.pieces) and self.speaks(attempt):
            piece = answer.pieces[answer.heard]
            answer.heard += 1
            pieces -= 1
            if answer.heard == len(answer.pieces) and answer.held is not None:
                answer.held.until = self.clock.now + LEASE_SECONDS
            self.feed(attempt, piece)

    def speaks(self, attempt: QuietAttempt) -> bool:
        """Returns whether the attempt can receive data from its engine."""
        return not attempt.over and attempt.connection is not None and not attempt.wire.paused

    def lose(self, attempt: QuietAttempt) -> None:
        """Closes the connection of an attempt."""
        connection = attempt.connection
        assert connection is not None
        attempt.wire.close()
        connection.connection_lost(None)

    # Called by a rebalancer.

    def move_to(self, target: Engine, now: float) -> None:
        self.on(self.execution.migrate, target, now)

    # The client, and time.

    def slow(self) -> None:
        self.on(self.execution.stall, True, self.clock.now)

    def ready(self) -> None:
        self.on(self.execution.stall, False, self.clock.now)

    def leave(self) -> None:
        self.left = True
        self.on(self.execution.leave, "the client left")

    def pass_time(self, seconds: float) -> None:
        clock = self.clock
        clock.now += seconds
        if self.wakes_at is not None and clock.now >= self.wakes_at:
            self.wake()
        for attempt in list(self.open.values()):
            task = attempt.connecting
            if task is not None and clock.now - task.since > LIMITS["connect"]:
                attempt.connected(UpstreamError("timeout", "no connection in time"))
        self.on(self.execution.tick, clock.now)
        for attempt in list(self.open.values()):
            attempt.check(clock.now)

    def wake(self) -> None:
        assert self.wakes_at is not None
        self.clock.now = max(self.clock.now, self.wakes_at)
        self.wakes_at = None
        self.on(self.execution.woken, self.clock.now)

    @property
    def hedge_due(self) -> bool:
        hedge = self.execution.hedge
        return hedge is not None and hedge.step is None

    @property
    def done(self) -> bool:
        return self.execution.done

    # The laws.

    def check(self) -> None:
        """Checks the laws that always hold."""
        if self.raised is not None:
            raise self.raised
        execution, counts = self.execution, self.counts
        hedge = execution.hedge
        steps = {execution.main, execution.side, hedge.step if hedge is not None else None}
        assert {a.step for a in self.open.values()} == steps - {None}
        assert hedge is None or not execution.has_tokens
        assert all(not attempt.over for attempt in self.open.values())
        assert all(attempt.over for attempt in self.gone)
        mover = self.model.mover
        if mover is not None:
            moves = set() if execution.migration is None else {execution.migration}
            assert mover.moves == moves
        assert counts["last"] + counts["break"] <= 1
        assert execution.committed is bool(counts["begin"] or counts["commit"])
        if self.done:
            self._check_end()
            return
        assert counts["finish"] == counts["last"] == counts["break"] == 0
        assert self.ticket.open, "the ticket is closed, and the request goes on"
        self._check_deadline()

    def _check_deadline(self) -> None:
        """Checks that an event or a deadline follows in any case."""
        main, side = self.open.get(Slot.MAIN), self.open.get(Slot.SIDE)
        hedge = self.execution.hedge
        assert main is not None or side is not None, "nothing runs"
        fetching = side is not None and side.step.limit_seconds == math.inf  # the timer ends it
        parsing = side is not None and side.step.target == DERENDER.encode()  # it has the last tokens
        assert main is not None or fetching or parsing
        assert not fetching or main is None
        assert main is None or main.step.limit_seconds < math.inf
        assert (self.wakes_at is not None) is (fetching or self.hedge_due)
        if hedge is not None and hedge.step is not None:
            assert hedge.ticket.open
            assert hedge.ticket.instance == hedge.step.engine.name

    def _check_end(self) -> None:
        counts, model = self.counts, self.model
        assert counts["finish"] == 1
        assert not self.ticket.open
        assert self.execution.reason != "no engine worked on it"
        assert not self.open
        assert self.wakes_at is None
        assert self.error is None or not self.execution.committed
        assert self.execution.migration is None
        if model.mover is not None:
            assert not model.mover.running
            assert not model.mover.moves
        assert model.router.in_flight() == 0
        indicators = model.router.indicators()
        for name in ("bs", "bound_bs", "bound_tokens", "tokens"):
            assert not indicators[name].any(), name

    def check_answer(self) -> None:
        """Checks the client's answer: the answer of one engine, or after a failure a part of it."""
        execution = self.execution
        if not execution.committed:
            assert self.error is not None or self.left
            assert not self.client.written
            return
        status, heard = read_answer(self.client.written, self.ask)
        if status != 200:
            return
        ids, text, finish = self.engines.expected()
        assert text.startswith(heard["text"])
        assert ids[: len(heard["ids"])] == heard["ids"]
        if self.counts["break"]:
            assert heard["error"] is not None or self.asked.only_closing_ends_it, (
                "the client is not told that this is no end"
            )
        elif heard["finish"] == "abort" and execution.answered is None:
            assert self.setup.pauses, "the engine did not abort by order"
            assert heard["whole"]
        elif heard["error"] is None and heard["finish"] != "abort" and not self.left:
            assert heard["whole"]
            assert (heard["text"], heard["finish"]) == (text, finish)
            assert not self.ask.shows_ids or heard["ids"] == ids
            if heard["usage"] is not None:
                used = heard["usage"]
                assert used["completion_tokens"] == len(ids)
                assert used["prompt_tokens"] == len(self.engines.prompt)


def read_answer(raw: bytes, ask: Ask) -> tuple[int, dict[str, Any]]:
    """Returns status and contents of a client's answer, which may be incomplete."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    found: dict[str, Any] = {"text": "", "ids": [], "finish": None, "error": None, "usage": None}
    found["whole"] = False
    if status != 200:
        return status, found
    low = head.lower()
    if b"transfer-encoding: chunked" not in low:
        (length,) = (
            int(line.split()[1]) for line in low.split(b"\r\n") if line.startswith(b"content-length")
        )
        assert len(rest) == length
        answer = orjson.loads(rest)
        assert not answer.get("kv_transfer_params")
        (choice,) = answer["choices"]
        found["text"] = choice["message"]["content"] if ask.path == CHAT else choice["text"]
        assert ask.shows_ids or not choice.get("token_ids")
        found |= {"finish": choice["finish_reason"], "ids": choice.get("token_ids") or []}
        found |= {"usage": answer["usage"], "whole": True}
        return status, found
    body, over = b"", False
    while rest:
        assert not over, "something behind the end"
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        over = not length
        rest = rest[length + 2 :]
    *events, tail = body.split(b"\n\n")
    assert not tail, "half an event"
    marks = 0
    for event in events:
        if event.startswith(b":"):
            continue
        assert not marks
        if event == b"data: [DONE]":
            marks += 1
            continue
        told = orjson.loads(event.removeprefix(b"data: "))
        assert not told.get("kv_transfer_params")
        if "error" in told:
            found["error"] = told["error"]
            continue
        found["usage"] = told.get("usage") or found["usage"]
        for choice in told["choices"]:
            delta = choice.get("delta", choice)
            found["text"] += delta.get("content", delta.get("text")) or ""
            assert ask.shows_ids or not choice.get("token_ids")
            found["ids"] += choice.get("token_ids") or []
            assert found["finish"] is None
            found["finish"] = choice["finish_reason"]
    found["whole"] = over and marks == 1
    return status, found


# -- steps of a test
# -----------------------------------------------------------------------------------------


def driver(clock: Clock, setup: Setup, ask: Ask) -> Driver:
    return Driver(setup.model(), setup, ask, clock, Engines(ask, setup))


def finish(it: Driver) -> None:
    """Lets everything succeed from now on."""
    for _ in range(ROUNDS):
        for found in list(it.open.values()):
            it.say(found, 1000)
        it.check()
    assert it.done
    it.check_answer()


def lose(it: Driver, slot: Slot) -> None:
    """Fails an engine: its reused connection closes, and the new connection of a resend, too."""
    found = it.open[slot]
    it.lose(found)
    if it.open.get(slot) is found:
        it.lose(found)
