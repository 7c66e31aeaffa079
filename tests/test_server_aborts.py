"""Answers that engines abort: by order they are the client's, else another engine continues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from lmetric.options import SplitAt
from lmetric_lab.emulated.text import TOKENIZER_PATH
from server_world import Behaviour, FakeEngine, Request, World, chunk, decision_id, event, plain, world
from split_world import COMPLETIONS, heard
from test_server_failover import STORY_BODY, cut, is_whole, model, story
from test_server_split_faults import (
    ASKED,
    FRAME,
    NIXL_PAGE,
    START,
    STORY,
    but,
    changed,
    faulty,
    said_in,
    tells,
    text_of,
    told_by,
)

# Answers of an engine's `/is_paused` after an abort.
ORDERED = ["paused", "works", "busy"]
NOT_ORDERED = ["stops", "dies", "hangs"]


@dataclass
class Development(FakeEngine):
    """A vLLM in development mode."""

    state: str = "works"

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path != "/is_paused":
            return await super()._answer(request, writer)
        self.page_reads.append(request.path)
        if self.state == "busy":
            await asyncio.sleep(0.5)
        if self.state == "hangs":
            await self.until_left(writer)
        elif self.state == "dies":
            writer.transport.abort()
        elif self.state == "stops":
            writer.write(plain(500, {"error": "Failed to fetch pause status"}))
        else:
            writer.write(plain(200, {"is_paused": self.state == "paused"}))
            return True
        return False


def development(behave: Behaviour) -> Development:
    transfer = {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
    pages = {
        "/server_info?config_format=json": (
            200,
            orjson.dumps({"vllm_config": {"kv_transfer_config": transfer}}),
        ),
        "/is_sleeping": (200, b'{"is_sleeping":false}'),
    }
    return Development(behave=behave, metrics=NIXL_PAGE, extra_pages=pages)


@contextlib.asynccontextmanager
async def engines(*behaviours: Behaviour, **config: Any) -> AsyncIterator[World]:
    """Starts engines that are not checked again after the start."""
    given: dict[str, Any] = {"tokenizer": str(TOKENIZER_PATH.parent), "model": "tiny"}
    given["health"] = {"interval": 600}
    async with world([development(each) for each in behaviours], **(given | config)) as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        yield w


def last(token: int, text: str, finish: str) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "token_ids": [token], "finish_reason": finish}
    return chunk(event(FRAME | {"choices": [choice | {"stop_reason": None}]}))


def aborting(at: int, state: str, *, finish: str = "abort") -> Behaviour:
    """Aborts after this many tokens: the last one comes with the end. Later requests get all."""
    then = last(STORY[at - 1], text_of(START, STORY[:at])[len(text_of(START, STORY[: at - 1])) :], finish)
    aborts = cut(at - 1, then)

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        assert isinstance(engine, Development)
        if request.path != "/tokenize" and len(request.json["prompt"]) == len(START):
            engine.state = state
        return await aborts(engine, request, writer)

    return behave


def is_aborted(said: dict[str, Any], tokens: int) -> None:
    """The client has this many tokens, and the engine's reason."""
    assert "error" not in said
    assert (said["text"], said["finish"]) == (text_of(START, STORY[:tokens]), "abort")
    usage = {name: said["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    count = len(START)
    assert usage == {"prompt_tokens": count, "completion_tokens": tokens, "total_tokens": count + tokens}


def sent(w: World) -> list[int]:
    """The number of requests that each engine got."""
    return [sum(each.path == COMPLETIONS for each in engine.requests) for engine in w.engines]


@pytest.mark.parametrize("at", [2, 7, 39])
@pytest.mark.parametrize("state", ORDERED)
async def test_an_ordered_abort_is_the_answer(at: int, state: str) -> None:
    async with engines(aborting(at, state), aborting(at, state)) as w:
        for more in ({}, {"return_token_ids": True}):
            said = await story(w, **more)
            is_aborted(said, at)
            assert said["ids"] == (STORY[:at] if more else [])
        assert not model(w).failovers
        assert sent(w) == [1, 1]


@pytest.mark.parametrize("state", NOT_ORDERED)
async def test_another_engine_continues_the_abort_of_an_engine_that_stops(state: str) -> None:
    async with engines(aborting(7, state), aborting(7, state), timeouts={"between_chunks": 0.5}) as w:
        is_whole(await story(w))
        assert model(w).failovers == {"continued": 1}


async def test_an_error_is_no_abort() -> None:
    async with engines(*[aborting(7, "paused", finish="error")] * 2) as w:
        is_whole(await story(w))
        assert model(w).failovers == {"continued": 1}
        assert w.engines[0].page_reads.count("/is_paused") == 1, "only the check reads it"


@pytest.mark.parametrize(
    "malformed",
    [
        b'{"choices":[{"finish_reason":"abort"}],}',
        b'{"choices":[5,{"finish_reason":"abort"}]}',
        b'{"choices":[{"token_ids":5,"finish_reason":"abort"}]}',
    ],
    ids=["json", "choice", "token_ids"],
)
async def test_another_engine_continues_a_stream_with_a_malformed_abort(malformed: bytes) -> None:
    behave = cut(7, chunk(event(malformed)))
    async with engines(behave, behave) as w:
        is_whole(await story(w))
        assert model(w).failovers == {"continued": 1}


def dies_and_pauses(second: int) -> Behaviour:
    """The first engine dies. The second one is paused, with this token of the answer."""

    async def pauses(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize" or len(request.json["prompt"]) == len(START):
            return await cut(second - 8)(engine, request, writer)
        assert isinstance(engine, Development)
        engine.state = "paused"
        done = len(request.json["prompt"]) - len(START)
        events = [last(each, "of no use", None) for each in STORY[done : second - 1]]  # type: ignore[arg-type]
        head = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"".join([*events, last(STORY[second - 1], "", "abort")]) + b"0\r\n\r\n")
        return True

    return pauses


async def test_a_continued_stream_can_be_aborted() -> None:
    behave = dies_and_pauses(20)
    async with engines(behave, behave) as w:
        is_aborted(await story(w), 20)
        assert model(w).failovers == {"continued": 1}


async def test_a_continued_stream_ends_at_the_stop_string_in_its_abort() -> None:
    """The token that comes with the abort has the stop string: the answer is whole."""
    second, stop = 20, "b"
    before, text = (text_of(START, STORY[:count]) for count in (second - 1, second))
    assert (stop in before, stop in text) == (False, True)
    behave = dies_and_pauses(second)
    async with engines(behave, behave) as w:
        _, headers, got = await w.post(STORY_BODY | {"stop": stop})
        assert not w.server.front.relays, "the request goes on behind its answer"
        said = heard(got)
        assert "error" not in said
        assert (said["text"], said["finish"]) == (text.partition(stop)[0], "stop")
        record = model(w).router.explain(decision_id(headers))
        assert record is not None
        assert record["outcome"] == "finished"


async def test_records_and_labels_of_an_aborted_stream() -> None:
    """The question to the engine is no part of the request: new weights give it no label."""

    async def announces(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path != "/tokenize":
            await asyncio.sleep(0.05)
            body = {"version": 2}
            assert (await w.post(body, "/admin/weights"))[0] == 200
        return await aborting(7, "works")(engine, request, writer)

    async with engines(announces, admin={"enabled": True}) as w:
        assert (await w.post({"version": 1}, "/admin/weights"))[0] == 200
        _, headers, got = await w.post(STORY_BODY)
        assert heard(got)["finish"] == "abort"
        assert headers["x-lmetric-weights"] == "1"
        _, page = await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
        record = orjson.loads(page)
        assert (record["weights"], record["outcome"]) == (["1"], "cancelled")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_ordered_abort_is_no_failure_of_the_engine(stream: bool) -> None:
    behave = aborting(7, "paused") if stream else whole("paused", times=12)
    async with engines(behave, behave) as w:
        for _ in range(12):
            _, headers, _ = await w.post(ASKED | {"stream": stream})
            _, page = await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
            assert orjson.loads(page)["outcome"] == "cancelled"
        failed = model(w).router.stats()["failed"]
        assert {kind: count for kind, count in failed.items() if count} == {"cancelled": 12}
        assert [each.service.streak for each in model(w).engines.values()] == [0, 0]
        assert not model(w).retried


async def test_an_aborted_answer_has_the_asked_name() -> None:
    names: dict[str, Any] = {"aliases": {"large": "tiny"}, "model_in_answers": "asked"}
    async with engines(aborting(7, "paused"), **names) as w:
        _, _, got = await w.post(STORY_BODY | {"model": "large"})
        assert heard(got)["finish"] == "abort"
        assert {name for _, _, name in heard(got)["same"]} == {"large"}


async def test_a_client_leaves_while_the_engine_does_not_say() -> None:
    async with engines(aborting(7, "hangs")) as w:
        task = asyncio.create_task(w.post(STORY_BODY))
        await w.until(lambda: w.engines[0].page_reads.count("/is_paused") == 2)
        task.cancel()
        await w.settled()
        await w.until(lambda: w.engines[0].left == 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["paused", "stops"])
async def test_an_aborted_segment_is_the_answer(state: str, stream: bool) -> None:
    """The first of two engines aborts after its part of the answer."""

    async def aborts(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        assert isinstance(engine, Development)
        engine.state = state
        ids = STORY[:6]
        change = {"token_ids": ids, "text": text_of(START, ids), "finish_reason": "abort"}
        return await changed(**change)(engine, request, writer)

    health = {"interval": 600}
    async with faulty(but(aborts, first=True), make=development, health=health) as w:
        _, _, got = await w.post({**ASKED, "stream": stream})
        ids = STORY[:6] if state == "paused" else STORY
        assert said_in(got) == text_of(START, ids)
        finish = heard(got)["finish"] if stream else got["choices"][0]["finish_reason"]
        assert finish == ("abort" if state == "paused" else "length")


@pytest.mark.parametrize("tokens", [10, 0])
@pytest.mark.parametrize("state", ["paused", "busy", "stops"])
async def test_an_aborted_rest_is_the_answer(state: str, tokens: int) -> None:
    """The second of two engines aborts a whole answer, after this many tokens of the first one."""

    done = False

    async def aborts(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal done
        fields = request.json.get("kv_transfer_params") or {}
        if done or not fields.get("remote_request_id"):
            return await tells(engine, request, writer)
        assert isinstance(engine, Development)
        engine.state, done = state, True
        ids = STORY[tokens : tokens + 5]
        change = {"token_ids": ids, "text": text_of(START, ids), "finish_reason": "abort"}
        return await changed(**change)(engine, request, writer)

    config: dict[str, Any] = {"health": {"interval": 600}}
    config["split"] = SplitAt(fraction=40 / 70 if tokens else 20 / 70)
    async with faulty(aborts, make=development, **config) as w:
        asking = asyncio.create_task(w.post(ASKED))
        if state == "busy":  # its connection serves others meanwhile
            await w.until(lambda: sum(each.page_reads.count("/is_paused") for each in w.engines) == 4)
            for _ in range(6):
                assert said_in((await w.post(ASKED))[2]) == text_of(START, STORY)
        _, headers, got = await asking
        record = model(w).router.explain(decision_id(headers))
        assert record is not None
        if state != "stops":
            (choice,) = got["choices"]
            whole = text_of(START, STORY[: tokens + 5])
            assert (choice["finish_reason"], choice["text"]) == ("abort", whole)
            assert record["outcome"] == "cancelled"
        else:
            assert (said_in(got), record["outcome"]) == (text_of(START, STORY), "finished")


def whole(state: str, *, finish: str = "abort", times: int = 1) -> Behaviour:
    """Aborts the first whole answers after seven tokens. Later requests get all."""
    left = times

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal left
        if request.path == "/tokenize" or not left:
            return await tells(engine, request, writer)
        assert isinstance(engine, Development)
        engine.state, left = state, left - 1
        ids = STORY[:7]
        change = {"token_ids": ids, "text": text_of(START, ids), "finish_reason": finish}
        return await changed(**change)(engine, request, writer)

    return behave


@pytest.mark.parametrize("state", ORDERED)
async def test_an_ordered_abort_of_a_whole_answer_passes(state: str) -> None:
    async with engines(
        *[whole(state, times=2)] * 2, aliases={"large": "tiny"}, model_in_answers="asked"
    ) as w:
        status, headers, got = await w.post(ASKED | {"model": "large"})
        (choice,) = got["choices"]
        assert (status, choice["finish_reason"], choice["text"]) == (200, "abort", text_of(START, STORY[:7]))
        assert got["model"] == "large"
        assert sorted(sent(w)) == [0, 1]
        _, page = await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
        assert orjson.loads(page)["tried"] == [headers["x-lmetric-instance"]]
        _, page = await w.get("/metrics")
        assert b'lmetric_usage_requests_total{model="tiny",tenant=""} 1.0' in page, "its usage counts"


@pytest.mark.parametrize("state", NOT_ORDERED)
async def test_another_engine_answers_for_an_engine_that_stops(state: str) -> None:
    behave = whole(state)
    async with engines(behave, behave, timeouts={"between_chunks": 0.5}) as w:
        status, headers, got = await w.post(ASKED)
        assert (status, said_in(got)) == (200, text_of(START, STORY))
        assert sent(w) == [1, 1]
        _, page = await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
        record = orjson.loads(page)
        assert (len(record["tried"]), record["outcome"]) == (2, "finished")


async def test_a_whole_answer_with_an_error_is_no_ordered_abort() -> None:
    behave = whole("paused", finish="error")
    async with engines(behave, behave) as w:
        assert said_in((await w.post(ASKED))[2]) == text_of(START, STORY)
        assert w.engines[0].page_reads.count("/is_paused") == 1, "only the check reads it"


async def test_another_engine_answers_for_a_malformed_abort() -> None:
    left = 1

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal left
        if request.path == "/tokenize" or not left:
            return await tells(engine, request, writer)
        left -= 1
        writer.write(plain(200, FRAME | {"choices": [5, {"finish_reason": "abort"}]}))
        return True

    async with engines(behave, behave) as w:
        status, _, got = await w.post(ASKED)
        assert (status, said_in(got)) == (200, text_of(START, STORY))
        assert sent(w) == [1, 1]


async def test_no_engine_is_left_after_an_abort() -> None:
    behave = whole("stops", times=2)
    async with engines(behave, behave) as w:
        status, _, got = await w.post(ASKED)
        assert (status, got["error"]["code"]) == (502, "failed_twice")


async def test_a_long_answer_passes_before_its_end_is_known() -> None:
    """The router withholds up to 256 KiB."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        got = plain(200, told_by(request, padding="x" * 300_000, finish_reason="abort"))
        writer.write(got[:-20])
        await asyncio.sleep(0.2)
        writer.write(got[-20:])
        return True

    async with engines(behave, behave) as w:
        assert (await w.post(ASKED))[2]["choices"][0]["finish_reason"] == "abort"
        assert sorted(sent(w)) == [0, 1]


async def test_aborts_of_other_engines_pass() -> None:
    """The router cannot ask them whether somebody ordered the abort."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        return await changed(finish_reason="abort")(engine, request, writer)

    async with world([FakeEngine(behave=behave), FakeEngine(behave=behave)]) as w:
        assert (await w.post(ASKED))[2]["choices"][0]["finish_reason"] == "abort"
        assert sorted(sent(w)) == [0, 1]


async def test_a_client_leaves_while_the_engine_of_a_whole_answer_does_not_say() -> None:
    async with engines(whole("hangs")) as w:
        task = asyncio.create_task(w.post(ASKED))
        await w.until(lambda: w.engines[0].page_reads.count("/is_paused") == 2)
        task.cancel()
        await w.settled()
        await w.until(lambda: w.engines[0].left == 1)
