"""Each way of running a request (`server/execution/ways`), step by step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import orjson
import pytest

import execution_world
from execution_world import (
    Ask,
    Clock,
    DrivenExecution,
    Driver,
    Engines,
    Setup,
    Slot,
    driver,
    finish,
    limits,
    read_answer,
    said,
)
from lmetric._core import Decision, Ticket
from lmetric.server.execution import attempt as attempt_module
from lmetric.server.execution.exchange import Intent, Rules
from lmetric.server.execution.execution import Execution, run
from lmetric.server.execution.ways.plain import plain
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.kv_backfill import KvBackfill

MAIN, SIDE, HEDGE = Slot.MAIN, Slot.SIDE, Slot.HEDGE


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    clock = Clock()
    with limits(), mock.patch.object(attempt_module, "time", clock):
        yield clock


def engine(it: Driver, slot: Slot = MAIN) -> str:
    return it.open[slot].step.engine.name


def asked(it: Driver, slot: Slot = MAIN) -> dict[str, object]:
    """Returns the body that the engine got."""
    body: dict[str, object] = orjson.loads(it.open[slot].step.body)
    return body


def test_plain_sends_the_clients_own_body_and_passes_the_answer_on(clock: Clock) -> None:
    it = driver(clock, Setup(), Ask(stream=False))
    assert it.open[MAIN].step.body == Ask(stream=False).body()
    it.say(it.open[MAIN], 2)
    assert (it.done, it.counts["commit"], it.counts["begin"]) == (True, 1, 0)
    it.check_answer()


def test_plain_goes_to_the_next_engine_if_the_first_is_lost(clock: Clock) -> None:
    it = driver(clock, Setup(), Ask())
    first = engine(it)
    it.lose(it.open[MAIN])
    assert engine(it) != first
    finish(it)
    assert it.model.retried == {"reset": 1}


def test_plain_continues_a_stream_on_another_engine(clock: Clock) -> None:
    """The second engine gets the prompt and the answer so far as tokens."""
    it = driver(clock, Setup(fails_over=True), Ask())
    it.say(it.open[MAIN], 5)
    first, known = engine(it), it.execution.known_tokens
    it.lose(it.open[MAIN])
    assert engine(it) != first
    prompt = asked(it)["prompt"]
    assert isinstance(prompt, list)
    assert prompt[-known:] == [said(len(prompt) - known + n) for n in range(known)]
    finish(it)
    assert it.model.failovers == {"continued": 1}


def test_pair_computes_the_prompt_on_one_engine_and_decodes_on_another(clock: Clock) -> None:
    it = driver(clock, Setup("nixl"), Ask())
    assert (engine(it)[0], it.open[MAIN].step.for_client) == ("p", False)
    it.say(it.open[MAIN], 2)  # the prefill has answered
    decode = it.open[MAIN].step
    assert (decode.engine.name[0], decode.for_client) == ("d", True)
    assert decode.kv is not None
    finish(it)
    assert it.model.kv_transfers == {"transferred": 1}


def test_pair_computes_the_prompt_again_if_the_transfer_fails(clock: Clock) -> None:
    """The same engine gets the request again, without the transfer."""
    it = driver(clock, Setup("nixl"), Ask(stream=False))
    it.say(it.open[MAIN], 2)
    decode, answer = engine(it), it.open[MAIN].answered
    assert answer is not None
    answer.pieces = [b"HTTP/1.1 500 x\r\ncontent-length: 2\r\n\r\n{}"]
    it.say(it.open[MAIN], 1)
    assert (engine(it), it.open[MAIN].step.kv) == (decode, None)
    finish(it)
    assert it.model.kv_transfers == {"transferred": 1, "broken": 1}


def test_pair_sends_both_halves_at_once_if_the_engines_meet_by_themselves(clock: Clock) -> None:
    it = driver(clock, Setup("sglang"), Ask())
    assert (engine(it, SIDE)[0], engine(it)[0]) == ("p", "d")
    assert asked(it, SIDE) == asked(it)
    finish(it)


class Wide(Setup):
    """One prefill engine with three decode engines."""

    @property
    def names(self) -> list[str]:
        return ["p0", "d0", "d1", "d2"]


def test_pair_at_once_ends_if_the_only_first_half_is_lost(clock: Clock) -> None:
    """A repeated pair keeps its prefill engine: its loss is no fault of the decode engines."""
    it = driver(clock, Wide("sglang", attempts=9), Ask())
    decode = engine(it)
    it.lose(it.open[MAIN])
    assert (engine(it, SIDE), engine(it)[0]) == ("p0", "d")
    assert engine(it) != decode
    it.lose(it.open[SIDE])
    assert it.done
    assert [tried.partition(":")[0] for tried in it.execution.tried] == [decode, "p0"]


@pytest.mark.parametrize("setup", [Setup(moves="fetch"), Setup(split_at=0.9)])
def test_a_request_that_outlives_its_tokenizer_runs_on_one_engine(clock: Clock, setup: Setup) -> None:
    """It waited in the queue. Without a tokenizer, engines' answers cannot be merged."""

    def late(rules: Rules, intent: Intent, routed: tuple[Decision, Ticket]) -> Execution:
        intent.model.tokenizers.current = None
        return DrivenExecution(rules, intent, routed)

    with mock.patch.object(execution_world, "DrivenExecution", late):
        it = driver(clock, setup, Ask())
    assert it.execution.mover is None
    finish(it)
    assert (it.counts["commit"], it.counts["begin"]) == (1, 0)


def test_chain_runs_an_answer_on_two_engines(clock: Clock) -> None:
    """Both engines are of role both. The client gets one answer, merged from their tokens."""
    it = driver(clock, Setup(split_at=0.93), Ask())
    first = it.open[MAIN].step
    assert (first.for_client, first.reader) == (False, "whole")
    it.say(it.open[MAIN], 2)
    second = it.open[MAIN].step
    assert second.engine is not first.engine
    assert (second.merges, second.reader) == (True, "events")
    finish(it)
    assert it.counts["begin"] == 1


def test_copy_fetches_a_prefix_before_the_request_starts(clock: Clock) -> None:
    setup, ask = Setup(pulls=True), Ask()
    model = setup.model()
    setup.computed(model, ask.path)
    it = Driver(model, setup, ask, clock, Engines(ask, setup))
    holder = engine(it, SIDE)
    assert MAIN not in it.open
    it.say(it.open[SIDE], 2)  # the holder has prepared the prefix
    assert engine(it) != holder
    assert it.open[MAIN].step.kv is not None
    finish(it)
    assert it.model.fetch_outcomes == {"fetched": 1}


def test_copy_waits_only_so_long(clock: Clock) -> None:
    setup, ask = Setup(pulls=True), Ask()
    model = setup.model()
    setup.computed(model, ask.path)
    it = Driver(model, setup, ask, clock, Engines(ask, setup))
    it.wake()
    assert SIDE not in it.open
    assert it.open[MAIN].step.body == ask.body()
    finish(it)
    assert it.model.fetch_outcomes == {"late": 1}


@pytest.mark.parametrize("by", ["recompute", "fetch"])
def test_move_prepares_the_target_while_the_source_still_streams(clock: Clock, by: str) -> None:
    it = driver(clock, Setup(moves=by), Ask())
    it.say(it.open[MAIN], 4)
    source, mover = engine(it), it.model.mover
    assert mover is not None
    target = next(name for name in it.model.engines if name != source)
    mover.begin(it.ticket.id, target, clock.now)
    assert it.execution.migration is not None
    if by == "fetch":
        assert engine(it, SIDE) == source  # it prepares its KV cache
        it.say(it.open[SIDE], 2)
    assert (engine(it), engine(it, SIDE)) == (source, target)
    it.say(it.open[MAIN], 1)  # the source goes on meanwhile
    it.say(it.open[SIDE], 2)
    assert (engine(it), SIDE in it.open) == (target, False)
    finish(it)
    assert mover.outcomes == {"migrated": 1}


def test_hedge_asks_a_second_engine_if_the_first_token_is_late(clock: Clock) -> None:
    it = driver(clock, Setup(hedges=True), Ask())
    first = engine(it)
    it.wake()
    second = engine(it, HEDGE)
    assert second != first
    it.say(it.open[HEDGE], 2)  # its first token
    assert (engine(it), HEDGE in it.open) == (second, False)
    finish(it)
    _, heard = read_answer(it.client.written, it.ask)
    assert heard["whole"]
    assert it.model.hedging.outcomes == {"won": 1}


class Backfilled(Setup):
    """Engines report the cached blocks of each request."""

    def engine(self, name: str) -> Engine:
        engine = super().engine(name)
        engine.refill = KvBackfill({"vllm_xargs": {"kv_cache_report_mode": "full"}}, 0, 0.0)
        return engine


def test_only_the_first_engine_of_a_hedged_request_reports_its_cached_blocks(clock: Clock) -> None:
    """The backfill follows the first decision. The hedge has a decision of its own."""
    it = driver(clock, Backfilled(hedges=True), Ask())
    it.wake()
    assert "vllm_xargs" in asked(it)
    assert "vllm_xargs" not in asked(it, HEDGE)
    finish(it)


@pytest.mark.parametrize("function", [plain, run])
def test_the_architecture_page_shows_the_code_as_it_is(function: object) -> None:
    page = Path(__file__).parent.parent / "docs" / "explanation" / "architecture.md"
    assert f"```python\n{inspect.getsource(function)}```" in page.read_text()  # type: ignore[arg-type]
