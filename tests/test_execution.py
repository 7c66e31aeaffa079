"""Laws of the execution of every request, without sockets, tasks or a clock.

Like `RequestRunner` in the server, `Driver` carries out the actions of a request. Its attempts read
answers in Rust, without an event loop. Hypothesis draws the pool, the engines' answers and their
times, and failures.

The engines answer by a fixed rule. So the client must get the answer of one engine, or a part of it
and an error. The engines also record their KV transfers. They assert against fetches that would
give wrong tokens on a real engine: a second fetch, a late fetch, or a fetch of another cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast, get_args
from unittest import mock

import orjson
import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from constants import constant_options, constants
from lmetric._core import NoInstanceError, Peer, Request, RequestReader, Ticket
from lmetric.config import EngineConfig, HedgingConfig, PoolSettings, ServerConfig, Timeouts
from lmetric.engines.adapter import Capabilities, Handover
from lmetric.options import SplitAt
from lmetric.server.api.paths import RELAYED
from lmetric.server.api.request import parse
from lmetric.server.execution import attempt as attempt_module
from lmetric.server.execution.attempt import EngineAttempt
from lmetric.server.execution.exchange import ClientRequest, Rules
from lmetric.server.execution.execution import Execution
from lmetric.server.execution.intent import Intent
from lmetric.server.execution.plan import (
    Act,
    AttemptEvent,
    Begin,
    BreakOff,
    Commit,
    Finish,
    Hedge,
    Step,
    Wake,
    Write,
)
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.pool import Pool
from lmetric.server.http.tokenizing import prompt_text
from lmetric.server.upstream.connection import Connection, UpstreamError
from lmetric.tokens import PromptTokenizer
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

    MAIN = "cancel_main"  # runs the open segment
    SIDE = "cancel_side"
    HEDGE = "cancel_hedge"


@pytest.fixture(scope="module", autouse=True)
def _constants() -> Iterator[None]:
    with (
        constants(Timeouts, slow_client=SLOW_CLIENT_SECONDS),
        constants(HedgingConfig, budget_ratio=1.0),
        constants(PoolSettings, prefix_fetch_timeout_seconds=5.0),
    ):
        yield


# -- pools
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A pool and its engines."""

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
        )
        engine.identified = True
        engine.succeeded()
        return engine

    def pool(self) -> Pool:
        pool = Pool(0, "tiny", [], self.config().pool_settings())
        pool.tokenizers.current = tokenizer()
        for name in self.names:
            pool.add(self.engine(name))
        return pool

    def computed(self, pool: Pool, path: str) -> None:
        """Lets one engine compute the prompt, so that another may fetch it."""
        decision, ticket = pool.router.route(Request(token_ids=array("I", prompt_of(path, False))))
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
    with constant_options():
        return ServerConfig.model_validate(values)


def seldom(times: int, usual: bool = False) -> st.SearchStrategy[bool]:
    """Draws the unusual value once in this many times."""
    return st.sampled_from([usual] * (times - 1) + [not usual])


SPLIT_SETUPS = st.builds(
    Setup,
    roles=st.sampled_from(["both", "both", "both", "nixl", "nixl", "sglang"]),
    moves=st.sampled_from(["recompute", "fetch", "fetch", None]),
    fails_over=st.sampled_from([True, True, False]),
    split_at=st.sampled_from([None, None, None, 0.4, 0.93]),
    pulls=st.sampled_from([False, False, True]),
    nixl=seldom(6, True),
    bidirectional=seldom(3, True),
    cached=st.sampled_from([9, 9, 9, 9, 2, 1, 0]),
    other_blocks=seldom(8),
    long_gaps=seldom(8),
    request_seconds=st.sampled_from([None, None, REQUEST_SECONDS]),
    attempts=st.sampled_from([3, 3, 1, 2, 5]),
)


# Whole requests on engines of role both: the others are not hedged.
HEDGED_SETUPS = st.builds(
    Setup,
    fails_over=st.booleans(),
    hedges=st.just(True),
    request_seconds=st.sampled_from([None, None, REQUEST_SECONDS]),
    attempts=st.sampled_from([3, 3, 1, 2, 5]),
)
SETUPS = st.one_of(SPLIT_SETUPS, SPLIT_SETUPS, SPLIT_SETUPS, HEDGED_SETUPS)


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


ASKS = st.builds(
    Ask,
    path=st.sampled_from([COMPLETIONS, CHAT]),
    stream=st.sampled_from([True, True, False]),
    tokens=st.sampled_from([9, 9, 9, 1, 2]),
    shows_ids=st.booleans(),
    usage=st.booleans(),
    stops_at=st.sampled_from([None, None, None, 0, 1, 4]),
    other_text=seldom(10),
    other_prompt=seldom(8),
    slow=seldom(6),
)


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
        opening = shape.opening()
        pieces = [STREAM_HEAD] + ([chunk(opening)] if opening else [])
        for number, each in enumerate(ids, 1):
            last = number == len(ids)
            text = "" if last and stops else self.text_of([each])
            pieces.append(chunk(shape.token(each, number, finish if last else None, None, text)))
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
    made = Connection(engine.upstream)
    made.connection_made(cast(Any, Wire()))
    engine.upstream._open.add(made)
    return made


class QuietAttempt(EngineAttempt):
    """An attempt whose connection is opened by a test."""

    answered: Answer | None = None

    def _connect(self) -> None:
        self._fresh = True
        self._connecting = cast(Any, Connecting(cast(Driver, self._listener).clock.now))
        cast(Driver, self._listener).connects(self)

    def _soon(self, then: Callable[[], None]) -> None:
        then()  # the driver runs it after its present actions

    def _send(self, connection: Connection, now: float) -> None:
        super()._send(connection, now)
        if self._connection is connection:
            cast(Driver, self._listener).wrote(self)

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


class Client:
    """The client's connection, with the interface for a request."""

    relay = None
    body_size = 0
    writing_paused = False
    sender = "127.0.0.1"
    peer = Peer("127.0.0.1", secure=False, trusted=False)

    def release_body(self) -> None:
        pass

    def answered(self, goes_on: bool) -> None:
        pass


class Driver:
    """Carries out the actions of one request."""

    def __init__(
        self, pool: Pool, setup: Setup, ask: Ask, clock: Clock, engines: Engines, holds: bool = False
    ) -> None:
        self.pool, self.setup, self.ask, self.clock, self.engines = pool, setup, ask, clock, engines
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
        pool, ask, setup = self.pool, self.ask, self.setup
        body = ask.body()
        line = f"POST {ask.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        head = RequestReader(False, "x", 1 << 16).read(line.encode())
        assert head is not None
        asked = ClientRequest(cast(Any, Client()), cast(Any, self.client), head)
        asked.keep_alive = True
        asked.started = self.clock.now
        asked.pool = pool
        call = parse(RELAYED[ask.path], body)
        call.tokens = tokenizer().encode(prompt_text(tokenizer(), call))
        assert call.tokens is not None
        split_reason = pool.split_reason(ask.path, call) if pool.joins else None
        fetch_reason = pool.fetch_reason(ask.path, call) if pool.fetches_prefixes else None
        moves = pool.joins and split_reason is None
        request = Request(
            token_ids=call.tokens,
            prompt_tokens=len(call.tokens),
            max_tokens=call.max_tokens,
            length_class="a" if pool.splits else None,
            allow_split=split_reason is None,
            split_reason=split_reason,
            allow_fetch=fetch_reason is None,
            fetch_reason=fetch_reason,
        )
        decision, ticket = pool.router.route(request, now=self.clock.now)
        self.rules = Rules.of(setup.config())
        fetches = pool.fetches_prefixes and fetch_reason is None
        resumes = pool.fails_over and call.stream and pool.failover_reason(ask.path, call) is None
        hedge = Hedge(HEDGE_SECONDS, request) if setup.hedges and call.stream else None
        intent = Intent(
            *(asked, call, pool), moves=moves, fetches=fetches, resumes=resumes, hedge=hedge, asked=request
        )
        self.execution = Execution(self.rules, intent, (decision, ticket))
        if self.execution.mover is not None:
            self.execution.handle = self
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
                    self._do(act)
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
            self.asked.begin(act.kind, act.length, execution.head_lines(act.engine))
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
            self._commit()
        elif act in ("pause", "resume"):
            for found in (self.open.get(Slot.MAIN), self.open.get(Slot.HEDGE)):
                if found is not None and found.step.for_client:
                    found.pause(act == "pause")
        elif act == "promote_hedge":
            assert Slot.MAIN not in self.open, "two attempts answer"
            self.open[Slot.MAIN] = self.open.pop(Slot.HEDGE)
        elif act == "abort_client":
            counts["abort"] += 1
            self.left = True
        else:
            for slot in Slot:
                if act in ("cancel", slot.value) and slot in self.open:
                    attempt = self.open.pop(slot)
                    attempt.cancel()
                    self.gone.append(attempt)

    def _send(self, step: Step) -> None:
        hedge, ticket = self.execution.hedge, self.ticket
        slot = Slot.SIDE if step.beside else Slot.MAIN
        if hedge is not None and hedge.step is step:
            slot, ticket = Slot.HEDGE, hedge.ticket
            assert step.engine is not self.open[Slot.MAIN].step.engine, "an engine gets it twice"
        assert slot not in self.open, "an attempt is left without an owner"
        attempt = QuietAttempt(self, self.rules, self.asked, ticket, step, True)
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

    @property
    def move(self) -> object | None:
        return self.execution.migration

    @property
    def instance(self) -> str:
        return self.ticket.instance

    known_tokens = 0

    def move_to(self, target: Engine, now: float) -> bool:
        began, acts = self.execution.migrate(target, now)
        self.on(lambda: acts)
        return began

    # The client, and time.

    def slow(self) -> None:
        self.on(self.execution.client_slow, self.clock.now)

    def ready(self) -> None:
        self.on(self.execution.client_ready, self.clock.now)

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
        mover = self.pool.mover
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
        assert fetching is (main is None)
        assert main is None or main.step.limit_seconds < math.inf
        assert (self.wakes_at is not None) is (fetching or self.hedge_due)
        if hedge is not None and hedge.step is not None:
            assert hedge.ticket.open
            assert hedge.ticket.instance == hedge.step.engine.name

    def _check_end(self) -> None:
        counts, pool = self.counts, self.pool
        assert counts["finish"] == 1
        assert not self.ticket.open
        assert self.execution.reason != "no engine worked on it"
        assert not self.open
        assert self.wakes_at is None
        assert self.error is None or not self.execution.committed
        assert self.execution.migration is None
        if pool.mover is not None:
            assert not pool.mover.running
            assert not pool.mover.moves
        assert pool.router.in_flight() == 0
        indicators = pool.router.indicators()
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


# -- events
# ------------------------------------------------------------------------------------------

SLOTS = st.sampled_from([Slot.MAIN, Slot.MAIN, Slot.SIDE, Slot.HEDGE])
HOLDS = st.sampled_from([False, False, False, True])  # connections
AHEAD = st.sampled_from([3, 4, 2, 1, 0])
CONNECT_ERRORS = ["refused", "dns", "tls", "unreachable", "timeout", "status", "resources", "reset"]
STATUSES = st.sampled_from([400, 404, 429, 500, 500, 502, 503, 503, 507])
SECONDS = st.sampled_from([0.5, 6.0, 14.0, 16.0, 21.0, 50.0])


class NotNow(Exception):
    """The event cannot happen now."""


def needs(condition: object) -> None:
    if not condition:
        raise NotNow


def may(**drawn: Any) -> Callable[[Callable[..., None]], Any]:
    """Declares a rule for a running request. If the event cannot happen, the rule does nothing."""

    def made(happens: Callable[..., None]) -> Any:
        @functools.wraps(happens)
        def where_it_can(self: Requests, **values: Any) -> None:
            with contextlib.suppress(NotNow):
                happens(self, **values)

        ruled: Any = rule(**drawn)
        return precondition(lambda self: self.runs)(ruled(where_it_can))

    return made


CHAT_END: dict[str, Any] = {"delta": {}}
NO_CHOICE = b'{"choices":[]}'
WRONGS = st.one_of(
    st.tuples(st.just("refuses"), STATUSES),
    st.tuples(st.just("reports_an_error"), STATUSES),
    st.tuples(st.just("holds_otherwise"), st.sampled_from(["nothing", "another count", "half"])),
    st.tuples(st.just("says_nonsense"), st.sampled_from([b"zz\r\n", b"SSH-2.0-x\r\n\r\n", b"5\r\ndata:"])),
    st.tuples(st.just("answers_something_else"), st.sampled_from([b"{}", b"[]", b"nothing", NO_CHOICE])),
    st.tuples(st.sampled_from(["aborts", "ends_too_soon", "tells_no_ids", "comments"]), st.none()),
)


class Requests(RuleBasedStateMachine):
    """Requests one after the other, with all possible events."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self._patch = mock.patch.object(attempt_module, "time", self.clock)
        self._patch.start()
        self.driver: Driver | None = None
        self.names = itertools.count(5)
        self.silent = False

    @initialize(setup=SETUPS, ask=ASKS, kept=st.booleans(), holds=HOLDS, ahead=AHEAD, silent=st.booleans())
    def begins(self, setup: Setup, ask: Ask, kept: bool, holds: bool, ahead: int, silent: bool) -> None:
        self.setup, self.silent = setup, silent
        self.pool = setup.pool()
        if kept:
            for engine in self.pool.engines.values():
                engine.upstream.give(connection_of(engine))
        if setup.pulls:
            setup.computed(self.pool, ask.path)
        self.begin(ask, holds, ahead)

    def begin(self, ask: Ask, holds: bool, ahead: int) -> None:
        """Starts a request. Its first `ahead` rounds succeed."""
        engines = Engines(ask, self.setup)
        self.driver = driver = Driver(self.pool, self.setup, ask, self.clock, engines, holds)
        for _ in range(ahead):
            for found in list(driver.open.values()):
                answer = found.answered
                if answer is not None and driver.speaks(found):
                    left = len(answer.pieces) - answer.heard - answer.stream  # streams go on
                    driver.say(found, min(left, 2))
            driver.check()

    @property
    def it(self) -> Driver:
        assert self.driver is not None
        return self.driver

    @property
    def runs(self) -> bool:
        return self.driver is not None and not self.driver.done

    def attempt(self, slot: Slot) -> QuietAttempt:
        """Returns the attempt in this slot, or the other attempt."""
        found = self.it.open.get(slot) or next(iter(self.it.open.values()), None)
        needs(found is not None)
        assert found is not None
        return found

    def speaker(self, slot: Slot) -> tuple[QuietAttempt, Answer]:
        """Returns an attempt that can receive data, with its engine's answer."""
        found = self.attempt(slot)
        needs(self.it.speaks(found))
        assert found.answered is not None
        return found, found.answered

    # Engines.

    @may(slot=SLOTS, pieces=st.sampled_from([1, 3, 5]))
    def says(self, slot: Slot, pieces: int) -> None:
        found, _ = self.speaker(slot)
        self.it.say(found, pieces)

    @may(slot=SLOTS)
    def says_all(self, slot: Slot) -> None:
        found, _ = self.speaker(slot)
        self.it.say(found, 1000)

    @may()
    def all_say_all(self) -> None:
        for found in list(self.it.open.values()):
            if self.it.speaks(found):
                self.it.say(found, 1000)

    @may(slot=SLOTS, how=WRONGS)
    def goes_wrong(self, slot: Slot, how: tuple[str, Any]) -> None:
        """An engine gives a wrong answer."""
        name, what = how
        happens: Callable[..., None] = getattr(self, f"_{name}")
        happens(slot, *([] if what is None else [what]))

    def _refuses(self, slot: Slot, status: int) -> None:
        found, answer = self.speaker(slot)
        needs(not answer.heard)
        error = {"error": {"message": "not now", "code": status}}
        answer.pieces, answer.held = [http(status, orjson.dumps(error))], None
        self.it.say(found, 1)

    def _reports_an_error(self, slot: Slot, code: int) -> None:
        found, answer = self.speaker(slot)
        needs(answer.stream)
        error = {"error": {"message": "broken", "code": code}}
        self.goes_on(answer, b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(error), over=True)
        self.it.say(found, 1000)

    def _aborts(self, slot: Slot) -> None:
        found, answer = self.speaker(slot)
        if answer.stream:
            choice: dict[str, Any] = {"index": 0, "finish_reason": "abort"}
            choice |= CHAT_END if "messages" in answer.body else {"text": ""}
            self.goes_on(answer, b"data: %b\n\n" % orjson.dumps({"choices": [choice]}), over=True)
        else:
            self.changes(answer, "finish_reason", "abort")
        self.it.say(found, 1000)

    def _ends_too_soon(self, slot: Slot) -> None:
        found, answer = self.speaker(slot)
        needs(answer.stream)
        self.goes_on(answer, b"data: [DONE]\n\n", over=True)
        self.it.say(found, 1000)

    def _tells_no_ids(self, slot: Slot) -> None:
        """The next token, or all, come without ids.

        Excluded: clients that requested ids, as their answer would differ.
        """
        found, answer = self.speaker(slot)
        needs(not (self.it.ask.shows_ids and found.step.for_client))
        if not answer.stream:
            self.changes(answer, "token_ids", None)
            return
        needs(1 < answer.heard < len(answer.pieces) - 1 and answer.body.get("return_token_ids"))
        event = orjson.loads(answer.pieces[answer.heard].split(b"\r\n")[1].removeprefix(b"data: "))
        event["choices"][0]["token_ids"] = None
        answer.pieces[answer.heard] = chunk(b"data: %b\n\n" % orjson.dumps(event))
        self.it.say(found, 1)

    def _holds_otherwise(self, slot: Slot, what: str) -> None:
        found, answer = self.speaker(slot)
        needs(answer.held is not None and not answer.heard)
        assert answer.held is not None
        _, _, raw = b"".join(answer.pieces).partition(b"\r\n\r\n")
        body = orjson.loads(raw)
        params = body["kv_transfer_params"]
        # If the engine tokenized the prompt itself, its count is not checked.
        needs(what != "another count" or (found.step.target and isinstance(answer.body.get("prompt"), list)))
        if what == "nothing":
            body["kv_transfer_params"] = answer.held = None
        elif what == "half":
            params.pop("remote_engine_id", None)
        else:
            params["remote_num_tokens"] -= 1
            answer.held.tokens.pop()
        answer.pieces = [http(200, orjson.dumps(body))]

    def _says_nonsense(self, slot: Slot, data: bytes) -> None:
        found, answer = self.speaker(slot)
        needs(answer.stream or not answer.heard)  # else it is part of a plain answer
        self.it.feed(found, data)

    def _answers_something_else(self, slot: Slot, body: bytes) -> None:
        found, answer = self.speaker(slot)
        needs(not answer.heard and found.step.reader != "pass")
        needs(body != NO_CHOICE or not found.step.for_client or found.step.merges)
        answer.pieces, answer.held = [http(200, body)], None
        self.it.say(found, 1)

    def _comments(self, slot: Slot) -> None:
        found, answer = self.speaker(slot)
        needs(answer.stream and answer.heard < len(answer.pieces) and answer.heard)
        self.it.feed(found, chunk(b": so far so good\n\n"))

    @may(slot=SLOTS)
    def breaks(self, slot: Slot) -> None:
        found = self.attempt(slot)
        needs(found.connection is not None)
        self.it.lose(found)

    @precondition(lambda self: self.runs and any(a.connecting for a in self.it.open.values()))
    @rule(slot=SLOTS, error=st.sampled_from([None, None, *CONNECT_ERRORS]), holds=HOLDS)
    def connects(self, slot: Slot, error: str | None, holds: bool) -> None:
        """Opens or fails a waiting connection. `holds`: later connections wait, too."""
        self.it.holds_connections = holds
        waiting = [a for a in (self.it.open.get(slot), *self.it.open.values()) if a and a.connecting]
        waiting[0].connected(UpstreamError(error, "no connection") if error else None)

    def goes_on(self, answer: Answer, data: bytes, *, over: bool) -> None:
        """Replaces the rest of a stream by this event."""
        needs(answer.heard < len(answer.pieces) - 1)  # its last token has not come
        head = [] if answer.heard else [STREAM_HEAD]
        answer.pieces[answer.heard :] = [*head, chunk(data) + (STREAM_END if over else b"")]

    def changes(self, answer: Answer, name: str, value: Any) -> None:
        """Changes a field in the choice of an answer without streaming."""
        needs(not answer.heard)
        body = orjson.loads(b"".join(answer.pieces).partition(b"\r\n\r\n")[2])
        needs(isinstance(body, dict) and body.get("choices"))
        body["choices"][0][name] = value
        answer.pieces = [http(200, orjson.dumps(body))]

    # The fleet.

    @precondition(lambda self: self.runs and self.it.execution.has_tokens and self.pool.mover is not None)
    @rule(number=st.integers(0, 2))
    def moves(self, number: int) -> None:
        mover, here = self.pool.mover, self.it.ticket.instance
        others = [name for name in self.pool.engines if name != here]
        if mover is not None and others:
            mover.begin(self.it.ticket.id, others[number % len(others)], self.clock.now)

    @precondition(lambda self: self.runs and self.it.execution.has_tokens and self.pool.mover is not None)
    @rule(number=st.integers(0, 2), pieces=st.integers(1, 5))
    def says_and_moves(self, number: int, pieces: int) -> None:
        """The request gets some more tokens, and all steps of its migration succeed."""
        found = self.it.open.get(Slot.MAIN)
        if found is not None and self.it.speaks(found):
            self.it.say(found, pieces)
        if self.runs:
            self.moves(number=number)
            self.it.check()
            self.says_all(slot=Slot.SIDE)

    @may(
        number=st.integers(0, 3),
        how=st.sampled_from(["down", "up", "draining", "gone", "new", "role", "bare"]),
    )
    def an_engine_is(self, number: int, how: str) -> None:
        engines = list(self.pool.engines.values())
        needs(engines)
        engine = engines[number % len(engines)]
        if how == "down":
            engine.failed("refused", "nobody listens")
        elif how == "up":
            engine.draining = False
            engine.hold()
            engine.succeeded()
        elif how == "draining":
            engine.draining = True
            engine.hold()
        elif how == "gone":
            self.pool.remove(engine.name)
        elif how == "new":
            self.pool.add(self.setup.engine(f"{engine.name[0]}{next(self.names)}"))
        elif how == "role":
            roles: dict[str, Any] = {"both": "decode", "decode": "prefill", "prefill": "both"}
            engine.role_set = roles[engine.role]
            self.pool.set_role(engine)
        else:
            engine.capabilities = replace(engine.capabilities, handover=None)
            self.pool.set_role(engine)

    # Time, the client, the server.

    @may(seconds=st.none() | SECONDS)
    def passes(self, seconds: float | None) -> None:
        """Lets time pass; None: until the timer fires, if one is set."""
        if seconds is not None:
            self.it.pass_time(seconds)
        elif self.it.wakes_at is not None:
            self.it.wake()

    @precondition(lambda self: self.runs and self.it.hedge_due)
    @rule()
    def hedges(self) -> None:
        self.it.wake()

    @may(how=st.sampled_from(["is slow", "is slow", "reads again", "reads again", "leaves", "server stops"]))
    def client(self, how: str) -> None:
        slow = bool(self.it.execution.stalled_at)
        if how == "leaves":
            self.it.leave()
        elif how == "server stops":
            self.it.on(self.it.execution.stop)
        elif slow is (how == "reads again"):
            (self.it.ready if slow else self.it.slow)()

    @precondition(lambda self: self.driver is not None and bool(self.driver.gone))
    @rule(number=st.integers(0, 3))
    def late(self, number: int) -> None:
        """Reports all events of an ended attempt, which must have no effect."""
        told: dict[AttemptEvent, Any] = {"ready": 0, "events": [b"{}"], "failed": ("reset", "it broke")}
        told |= {"stale": True}
        gone, execution = self.it.gone, self.it.execution
        before = execution.done, execution.main, execution.side
        attempt = gone[number % len(gone)]
        for event in get_args(AttemptEvent):
            assert execution.attempt(event, attempt, self.clock.now, told.get(event)) == []
        assert (execution.done, execution.main, execution.side) == before

    @precondition(lambda self: self.driver is not None and self.driver.done)
    @rule(ask=ASKS, holds=HOLDS, ahead=AHEAD)
    def another_request(self, ask: Ask, holds: bool, ahead: int) -> None:
        self.it.check_answer()
        for engine in self.pool.engines.values():
            engine.draining = False
            engine.hold()
            engine.succeeded()
        try:
            self.begin(ask, holds, ahead)
        except NoInstanceError:
            return

    @invariant()
    def laws(self) -> None:
        if self.driver is not None:
            self.driver.check()

    def teardown(self) -> None:
        """Ends the last request: either only time passes, or everything succeeds from now on."""
        try:
            if self.driver is not None and self.driver.raised is None:
                self.to_the_end(self.driver)
        finally:
            self._patch.stop()

    def to_the_end(self, driver: Driver) -> None:
        driver.holds_connections = self.silent
        for _ in range(ROUNDS):
            if driver.done:
                break
            if self.silent:
                driver.pass_time(1000.0)
            else:
                if driver.execution.stalled_at:
                    driver.ready()
                for found in list(driver.open.values()):
                    if found.connecting is not None:
                        found.connected()
                    if driver.speaks(found):
                        driver.say(found, 1000)
                        self.stuck(driver, found)
            driver.check()
        assert driver.done, "it does not end"
        driver.check_answer()

    def stuck(self, driver: Driver, found: QuietAttempt) -> None:
        """Closes the connection of an answer to which a rule gave no end."""
        if driver.speaks(found):
            driver.lose(found)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Turns off logs of the thousands of intended failures, until `logs_as_before` ends."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


TestRequests = Requests.TestCase
TestRequests.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# -- cases that random tests seldom reach
# ------------------------------------------------------------


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(attempt_module, "time", clock):
        yield clock


def driver(clock: Clock, setup: Setup, ask: Ask) -> Driver:
    return Driver(setup.pool(), setup, ask, clock, Engines(ask, setup))


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


def test_a_stream_whose_text_is_not_that_of_its_tokens_never_moves(clock: Clock) -> None:
    """It also does not move if this was found before and no token has come since."""
    it = driver(clock, Setup(moves="recompute"), Ask(other_text=True))
    it.say(it.open[Slot.MAIN], 5)
    mover = it.pool.mover
    assert mover is not None
    for _ in range(2):
        assert not mover.begin(it.ticket.id, "e1", clock.now)
    lose(it, Slot.MAIN)
    it.check()
    assert it.done
    assert it.counts["break"] == 1
    assert mover.outcomes["not_joinable"] == 3
    it.check_answer()


def test_a_stream_does_not_move_to_an_engine_of_second_halves(clock: Clock) -> None:
    it = driver(clock, Setup(moves="recompute"), Ask())
    it.say(it.open[Slot.MAIN], 5)
    engine = it.pool.engines["e1"]
    engine.capabilities = replace(engine.capabilities, handover=Handover("bootstrap", bootstrap_port=9001))
    engine.role_set = "decode"
    it.pool.set_role(engine)
    assert it.pool.mover is not None
    assert not it.pool.mover.begin(it.ticket.id, "e1", clock.now)
    finish(it)


def test_the_second_of_two_at_once_goes_elsewhere(clock: Clock) -> None:
    """Its engine is of another kind by then, and the first attempt ends."""
    it = driver(clock, Setup("sglang"), Ask())
    prefill, decode = it.open[Slot.SIDE], it.open[Slot.MAIN]
    engine = it.pool.engines["d1"]
    engine.capabilities = replace(engine.capabilities, handover=None)
    it.pool.set_role(engine)
    it.pool.remove(decode.step.engine.name)
    it.say(prefill, 1000)
    it.check()
    assert decode.over
    finish(it)


def test_the_second_of_two_at_once_answers_and_nobody_may_take_it(clock: Clock) -> None:
    """All decode engines were removed meanwhile.

    The client gets an error, whichever engine answers first.
    """
    it = driver(clock, Setup("sglang"), Ask())
    for name in [name for name, engine in it.pool.engines.items() if engine.role == "decode"]:
        it.pool.remove(name)
    it.say(it.open[Slot.MAIN], 5)
    it.check()
    assert it.done
    assert (it.counts["begin"], it.counts["commit"]) == (0, 0)
    assert (it.error.status, it.error.code) == (503, "no_engine")


# -- hedges
# ------------------------------------------------------------------------------------------


def hedged(clock: Clock) -> Driver:
    """Returns a request that two engines have, without a token."""
    it = driver(clock, Setup(hedges=True, fails_over=True), Ask())
    it.wake()
    it.check()
    first, second = it.open[Slot.MAIN], it.open[Slot.HEDGE]
    assert first.step.engine is not second.step.engine
    assert it.pool.router.in_flight() == 2
    return it


@pytest.mark.parametrize("slot", [Slot.MAIN, Slot.HEDGE])
def test_the_first_engine_with_a_token_answers(clock: Clock, slot: Slot) -> None:
    it = hedged(clock)
    answers = it.open[slot]
    it.say(answers, 2)
    it.check()
    assert list(it.open.values()) == [answers]
    assert it.pool.router.in_flight() == 1
    finish(it)
    assert it.pool.hedging.outcomes == {"lost" if slot is Slot.MAIN else "won": 1}
    assert all(engine.service.state == "HEALTHY" for engine in it.pool.engines.values())


@pytest.mark.parametrize("slot", [Slot.MAIN, Slot.HEDGE])
def test_the_other_attempt_goes_on_after_a_failure(clock: Clock, slot: Slot) -> None:
    it = hedged(clock)
    lose(it, slot)
    it.check()
    assert list(it.open) == [Slot.MAIN]
    finish(it)
    assert it.pool.hedging.outcomes == {"won" if slot is Slot.MAIN else "failed": 1}


@pytest.mark.parametrize("slots", [(Slot.MAIN, Slot.MAIN), (Slot.HEDGE, Slot.MAIN)])
def test_both_attempts_may_fail(clock: Clock, slots: tuple[Slot, Slot]) -> None:
    """Two engines failed alike: no third one gets the request, and none is blamed."""
    it = hedged(clock)
    for slot in slots:
        lose(it, slot)
    it.check()
    assert it.done
    assert it.error.code == "failed_twice"


def test_no_engine_gets_a_hedged_request_twice(clock: Clock) -> None:
    """The hedge gets a 503, then the first engine refuses: a third engine answers."""
    it = hedged(clock)
    names = {attempt.step.engine.name for attempt in it.open.values()}
    for slot in (Slot.HEDGE, Slot.MAIN):
        found = it.open[slot]
        answer = found.answered
        assert answer is not None
        answer.pieces = [http(503, b'{"error": {"message": "full"}}')]
        it.say(found, 1)
    it.check()
    assert it.open[Slot.MAIN].step.engine.name not in names
    finish(it)


def test_a_client_that_leaves_ends_both_attempts(clock: Clock) -> None:
    it = hedged(clock)
    it.leave()
    it.check()
    assert it.done
    assert it.pool.hedging.outcomes == {"ended": 1}


def test_a_hedge_without_another_engine_is_not_sent(clock: Clock) -> None:
    it = driver(clock, Setup(hedges=True), Ask())
    for name in ("e1", "e2"):
        it.pool.remove(name)
    it.wake()
    it.check()
    assert it.pool.hedging.unsent == {"no_engine": 1}
    finish(it)


def test_a_gateways_request_has_no_hedge(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 3 of the server review: the gateway sends one copy."""
    setup, ask = Setup(hedges=True), Ask()
    assert driver(clock, setup, ask).execution.hedge is not None
    monkeypatch.setattr(ClientRequest, "gateway", object())
    monkeypatch.setattr(Driver, "on", lambda *_: None)  # it sends nothing
    assert driver(clock, setup, ask).execution.hedge is None


def test_a_bug_before_it_is_placed_ends_it(clock: Clock) -> None:
    with mock.patch.object(Driver, "on"):
        it = driver(clock, Setup(), Ask())
    it.on(it.execution.leave, "internal error")
    it.check()
    assert it.done
