"""Laws of the execution of every request (`execution_world`).

Hypothesis draws the fleet, the engines' answers and their times, and failures.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import orjson
import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import execution_world
from execution_world import (
    REQUEST_SECONDS,
    ROUNDS,
    STREAM_END,
    STREAM_HEAD,
    Answer,
    Ask,
    Clock,
    Driver,
    Engines,
    QuietAttempt,
    Setup,
    Slot,
    chunk,
    connection_of,
    driver,
    finish,
    http,
    limits,
    lose,
)
from lmetric._core import NoInstanceError
from lmetric.engines.adapter import Handover
from lmetric.server.api.errors import ApiError
from lmetric.server.execution import attempt as attempt_module
from lmetric.server.execution.exchange import STOPPING, ClientRequest
from lmetric.server.execution.plan import (
    AttemptEvent,
)
from lmetric.server.upstream.connection import UpstreamError
from split_world import CHAT, COMPLETIONS


@pytest.fixture(scope="module", autouse=True)
def _constants() -> Iterator[None]:
    with limits():
        yield


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with mock.patch.object(attempt_module, "time", clock):
        yield clock


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
    pauses=st.booleans(),
    long_gaps=seldom(8),
    request_seconds=st.sampled_from([None, None, REQUEST_SECONDS]),
    attempts=st.sampled_from([3, 3, 1, 2, 5]),
)


# Whole requests on engines of role both: the others are not hedged.
HEDGED_SETUPS = st.builds(
    Setup,
    fails_over=st.booleans(),
    hedges=st.just(True),
    pauses=st.booleans(),
    request_seconds=st.sampled_from([None, None, REQUEST_SECONDS]),
    attempts=st.sampled_from([3, 3, 1, 2, 5]),
)
SETUPS = st.one_of(SPLIT_SETUPS, SPLIT_SETUPS, SPLIT_SETUPS, HEDGED_SETUPS)


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
        self.model = setup.model()
        if kept:
            for engine in self.model.engines.values():
                engine.upstream.give(connection_of(engine), unused=True)
        if setup.pulls:
            setup.computed(self.model, ask.path)
        self.begin(ask, holds, ahead)

    def begin(self, ask: Ask, holds: bool, ahead: int) -> None:
        """Starts a request. Its first `ahead` rounds succeed."""
        engines = Engines(ask, self.setup)
        self.driver = driver = Driver(self.model, self.setup, ask, self.clock, engines, holds)
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
            ids = [] if answer.body.get("return_token_ids") else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": "abort", "token_ids": ids}
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
        # The client gets each answer that the router need not read.
        unread = found.step.for_client and not found.step.merges and not found.step.checks_prompt
        needs(body == b"{}" or not unread)
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

    @precondition(lambda self: self.runs and self.it.execution.has_tokens and self.model.mover is not None)
    @rule(number=st.integers(0, 2))
    def moves(self, number: int) -> None:
        mover, here = self.model.mover, self.it.ticket.instance
        others = [name for name in self.model.engines if name != here]
        if mover is not None and others:
            mover.begin(self.it.ticket.id, others[number % len(others)], self.clock.now)

    @precondition(lambda self: self.runs and self.it.execution.has_tokens and self.model.mover is not None)
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
        engines = list(self.model.engines.values())
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
            self.model.remove(engine.name)
        elif how == "new":
            self.model.add(self.setup.engine(f"{engine.name[0]}{next(self.names)}"))
        elif how == "role":
            roles: dict[str, Any] = {"both": "decode", "decode": "prefill", "prefill": "both"}
            engine.role_set = roles[engine.role]
            self.model.set_role(engine)
        else:
            engine.capabilities = replace(engine.capabilities, handover=None)
            self.model.set_role(engine)

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
            self.it.on(self.it.execution.leave, STOPPING, ApiError(503, STOPPING))
        elif slow is (how == "reads again"):
            (self.it.ready if slow else self.it.slow)()

    @precondition(lambda self: self.driver is not None and bool(self.driver.gone))
    @rule(number=st.integers(0, 3))
    def late(self, number: int) -> None:
        """Reports all events of an ended attempt, which must have no effect."""
        told: dict[AttemptEvent, Any] = {"ready": 0, "events": [b"{}"], "failed": ("reset", "it broke", "")}
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
        for engine in self.model.engines.values():
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


def test_a_stream_whose_text_is_not_that_of_its_tokens_never_moves(clock: Clock) -> None:
    """It also does not move if this was found before and no token has come since."""
    it = driver(clock, Setup(moves="recompute"), Ask(other_text=True))
    it.say(it.open[Slot.MAIN], 5)
    mover = it.model.mover
    assert mover is not None
    for _ in range(2):
        mover.begin(it.ticket.id, "e1", clock.now)
        assert it.execution.migration is None
    lose(it, Slot.MAIN)
    it.check()
    assert it.done
    assert it.counts["break"] == 1
    assert mover.outcomes["not_joinable"] == 3
    it.check_answer()


def test_a_stream_does_not_move_to_an_engine_of_second_halves(clock: Clock) -> None:
    it = driver(clock, Setup(moves="recompute"), Ask())
    it.say(it.open[Slot.MAIN], 5)
    engine = it.model.engines["e1"]
    engine.capabilities = replace(engine.capabilities, handover=Handover("bootstrap", bootstrap_port=9001))
    engine.role_set = "decode"
    it.model.set_role(engine)
    mover = it.model.mover
    assert mover is not None
    mover.begin(it.ticket.id, "e1", clock.now)
    assert (it.execution.migration, mover.outcomes) == (None, {"not_movable": 1})
    finish(it)


def test_the_second_of_two_at_once_goes_elsewhere(clock: Clock) -> None:
    """Its engine is of another kind by then, and the first attempt ends."""
    it = driver(clock, Setup("sglang"), Ask())
    prefill, decode = it.open[Slot.SIDE], it.open[Slot.MAIN]
    engine = it.model.engines["d1"]
    engine.capabilities = replace(engine.capabilities, handover=None)
    it.model.set_role(engine)
    it.model.remove(decode.step.engine.name)
    it.say(prefill, 1000)
    it.check()
    assert decode.over
    finish(it)


def test_the_second_of_two_at_once_answers_and_nobody_may_take_it(clock: Clock) -> None:
    """All decode engines were removed meanwhile.

    The client gets an error, whichever engine answers first.
    """
    it = driver(clock, Setup("sglang"), Ask())
    for name in [name for name, engine in it.model.engines.items() if engine.role == "decode"]:
        it.model.remove(name)
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
    assert it.model.router.in_flight() == 2
    return it


@pytest.mark.parametrize("slot", [Slot.MAIN, Slot.HEDGE])
def test_the_first_engine_with_a_token_answers(clock: Clock, slot: Slot) -> None:
    it = hedged(clock)
    answers = it.open[slot]
    it.say(answers, 2)
    it.check()
    assert list(it.open.values()) == [answers]
    assert it.model.router.in_flight() == 1
    finish(it)
    assert it.model.hedging.outcomes == {"lost" if slot is Slot.MAIN else "won": 1}
    assert all(engine.service.state == "HEALTHY" for engine in it.model.engines.values())


@pytest.mark.parametrize("slot", [Slot.MAIN, Slot.HEDGE])
def test_the_other_attempt_goes_on_after_a_failure(clock: Clock, slot: Slot) -> None:
    it = hedged(clock)
    lose(it, slot)
    it.check()
    assert list(it.open) == [Slot.MAIN]
    finish(it)
    assert it.model.hedging.outcomes == {"won" if slot is Slot.MAIN else "failed": 1}


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
    assert it.model.hedging.outcomes == {"ended": 1}


def test_a_hedge_without_another_engine_is_not_sent(clock: Clock) -> None:
    it = driver(clock, Setup(hedges=True), Ask())
    for name in ("e1", "e2"):
        it.model.remove(name)
    it.wake()
    it.check()
    assert it.model.hedging.unsent == {"no_engine": 1}
    finish(it)


def test_a_gateways_request_has_no_hedge(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 3 of the server review: the gateway sends one copy."""
    setup, ask = Setup(hedges=True), Ask()
    assert driver(clock, setup, ask).execution.hedge is not None
    monkeypatch.setattr(execution_world, "ClientRequest", functools.partial(ClientRequest, gateway=object()))
    monkeypatch.setattr(Driver, "on", lambda *_: None)  # it sends nothing
    assert driver(clock, setup, ask).execution.hedge is None


def test_a_bug_before_it_is_placed_ends_it(clock: Clock) -> None:
    with mock.patch.object(Driver, "on"):
        it = driver(clock, Setup(), Ask())
    it.on(it.execution.leave, "internal error")
    it.check()
    assert it.done
