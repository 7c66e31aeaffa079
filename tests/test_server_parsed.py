"""A chat with tools whose engine fails continues over real sockets (`ways/parsed`)."""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import Any

import orjson
import pytest

import test_ways_parsed
from execution_world import prompt_of
from lmetric._core import TokenEncoder
from lmetric.engines.xargs import HANDICAP
from lmetric.server.api.parts import Parts
from lmetric.server.execution.runner import Runner
from lmetric.server.fleet.parsing import DERENDER, GENERATE, RENDER
from lmetric.server.observe.tracing.requests import SampledRequest
from lmetric_lab.emulated.text import TOKENIZER_PATH
from otlp_world import receiver
from server_world import Behaviour, FakeEngine, Request, World, plain, world
from split_world import CHAT
from test_server_schedulers import BOOST
from test_server_split_faults import NIXL_PAGE
from test_ways_parsed import ALL, END, Parsing, ParsingEngines, expected, same, tools

ENCODER = TokenEncoder(TOKENIZER_PATH.read_bytes())


def engine(answers: ParsingEngines, fails_after: int | None = None, dies_at: str = "") -> Behaviour:
    """Returns an engine that breaks off a chat after this many events; None: never.

    `dies_at`: a path that it never answers.
    """

    async def behave(of: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize":
            writer.write(plain(404, b"{}"))
            return True
        if request.path == dies_at:
            writer.transport.abort()
            return False
        raw = f"POST {request.path} HTTP/1.1\r\n\r\n".encode() + request.body
        pieces = answers.answer(of.name, raw, True, time.monotonic()).pieces
        fails = fails_after is not None and request.path == CHAT
        for piece in pieces[: fails_after + 1] if fails and fails_after is not None else pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if fails:
            await asyncio.sleep(0.02)
            writer.transport.abort()
        return not fails

    return behave


def body() -> dict[str, Any]:
    given: dict[str, Any] = orjson.loads(tools().body())
    return given


async def parts(w: World) -> tuple[Parts, list[dict[str, Any]]]:
    status, _, got = await w.post(body(), CHAT)
    assert status == 200
    events = [orjson.loads(line[6:]) for line in got.splitlines() if line.startswith(b"data: {")]
    found = Parts()
    for event in events:
        for choice in event.get("choices", ()):
            found.add(choice["delta"])
    return found, events


@pytest.mark.parametrize("fails_after", [4, 20, len(ALL) - 4])
async def test_a_chat_with_tools_continues(fails_after: int) -> None:
    answers = ParsingEngines(tools(), Parsing())
    engines = [
        FakeEngine(behave=engine(answers, fails_after), metrics=NIXL_PAGE, parses=True),
        FakeEngine(behave=engine(answers), metrics=NIXL_PAGE, parses=True),
    ]
    async with world(engines, tokenizer=str(TOKENIZER_PATH.parent), model="tiny") as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(each.identified for each in model.engines.values()))
        found, events = await parts(w)
        same(found, expected())
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt_of(CHAT, False)), len(ALL))
        assert model.failovers == {"continued": 1}


async def test_the_rest_of_an_answer_gets_the_routers_values_for_the_scheduler() -> None:
    """Token IDs go to another path than the chat, with the values in other fields."""
    answers = ParsingEngines(tools(), Parsing())
    page = NIXL_PAGE + BOOST
    engines = [
        FakeEngine(behave=engine(answers, 4), metrics=page, parses=True),
        FakeEngine(behave=engine(answers), metrics=page, parses=True),
    ]
    settings: dict[str, Any] = {"tokenizer": str(TOKENIZER_PATH.parent), "model": "tiny"}
    async with world(engines, priority={"kind": "uniboost"}, **settings) as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(each.identified for each in model.engines.values()))
        same((await parts(w))[0], expected())
        bodies = {request.path: orjson.loads(request.body) for each in engines for request in each.requests}
    assert bodies[CHAT]["vllm_xargs"] == {HANDICAP: 0.0}
    assert bodies[GENERATE]["sampling_params"]["extra_args"] == {HANDICAP: 0.0}
    assert [path for path, each in bodies.items() if "vllm_xargs" in each] == [CHAT]


async def test_the_calls_of_a_parser_do_not_stay_in_memory() -> None:
    """Each call carries the whole prompt and the whole answer so far."""
    answers = ParsingEngines(tools(), Parsing())
    parses = engine(answers)
    kept: list[tuple[int, int]] = []

    async def counted(of: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == DERENDER:
            (running,) = w.server.front.relays
            assert isinstance(running, Runner)
            assert isinstance(running.trace, SampledRequest)
            kept.append((len(running._attempts), len(running.trace._attempts)))
        return await parses(of, request, writer)

    behaviours = [engine(answers, 4), counted]
    engines = [FakeEngine(behave=each, metrics=NIXL_PAGE, parses=True) for each in behaviours]
    settings: dict[str, Any] = {"tokenizer": str(TOKENIZER_PATH.parent), "model": "tiny"}
    async with receiver() as spans, world(engines, tracing={"endpoint": spans.url}, **settings) as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(each.identified for each in model.engines.values()))
        same((await parts(w))[0], expected())
        assert len(kept) > 5
        attempts, traces = zip(*kept, strict=True)
        assert max(attempts) == 2, "the generation and one call"
        assert max(traces) <= 3, "and the call before"


@pytest.mark.parametrize("fails_after", [3, 12, 26])
async def test_the_usage_counts_the_tokens_of_the_reasoning(
    monkeypatch: pytest.MonkeyPatch, fails_after: int
) -> None:
    reasoning = "I have to think of a quiet river, and of all of it."
    ids = [
        [int(each) for each in ENCODER.encode(text)]  # type: ignore[union-attr]
        for text in ("<think>", reasoning, "</think>", "Here is the river and the end of it.")
    ]
    monkeypatch.setattr(test_ways_parsed, "ALL", [*chain.from_iterable(ids), END])
    monkeypatch.setattr(test_ways_parsed, "text_of", lambda ids: "".join(ENCODER.decode([id]) for id in ids))
    answers = ParsingEngines(tools(), Parsing())
    behaviours = [engine(answers, fails_after), engine(answers)]
    engines = [FakeEngine(behave=each, metrics=NIXL_PAGE, parses=True) for each in behaviours]
    async with world(engines, tokenizer=str(TOKENIZER_PATH.parent), model="tiny") as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(each.identified for each in model.engines.values()))
        found, events = await parts(w)
        assert (found.reasoning, model.failovers) == (reasoning, {"continued": 1})
        details = events[-1]["usage"].get("completion_tokens_details")
        assert details == {"reasoning_tokens": len(ids[1])}


@pytest.mark.parametrize("path", [RENDER, GENERATE, DERENDER])
@pytest.mark.parametrize(
    ("others", "attempts", "outcome"), [(2, 3, "continued"), (1, 3, "no_engine"), (2, 2, "not_retried")]
)
async def test_a_failover_counts_once_if_the_next_engine_dies_before_its_first_part(
    path: str, others: int, attempts: int, outcome: str
) -> None:
    answers = ParsingEngines(tools(), Parsing())
    behaviours = [engine(answers, 20), engine(answers, dies_at=path), engine(answers)][: 1 + others]
    engines = [FakeEngine(behave=each, metrics=NIXL_PAGE, parses=True) for each in behaviours]
    retries = {"attempts": attempts}
    async with world(engines, tokenizer=str(TOKENIZER_PATH.parent), model="tiny", retries=retries) as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(each.identified for each in model.engines.values()))
        _, events = await parts(w)
        assert ("error" in events[-1]) == (outcome != "continued")
        assert model.failovers == {outcome: 1}


@pytest.mark.parametrize("parses", [(False, False), (True, False)])
async def test_without_an_engine_that_parses_the_reason_is_named(parses: tuple[bool, bool]) -> None:
    answers = ParsingEngines(tools(), Parsing())
    engines = [
        FakeEngine(behave=engine(answers, 20), metrics=NIXL_PAGE, parses=parses[0]),
        FakeEngine(behave=engine(answers), metrics=NIXL_PAGE, parses=parses[1]),
    ]
    async with world(engines, tokenizer=str(TOKENIZER_PATH.parent), model="tiny") as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(each.identified for each in model.engines.values()))
        answers.ids_optional = not any(parses)
        _, events = await parts(w)
        message = events[-1]["error"]["message"]
        assert "the engine failed in the middle of its answer (e0: " in message
        assert "; vLLM with --enable-scale-out continues such chats" in message
        assert model.failovers == {"no_engine" if any(parses) else "not_resumable": 1}
