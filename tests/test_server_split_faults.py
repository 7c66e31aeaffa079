"""Split requests with failures: no token is lost or sent twice, and all counts end at zero.

`pd` checks at its end that no request is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from lmetric.options import SplitAt
from lmetric_lab.emulated.text import TOKENIZER_PATH
from log_watch import MARKED_PROMPT
from pd_world import Pd
from server_world import STREAM_HEAD, FakeEngine, Request, World, chunk, decision_id, event, plain, world
from split_world import (
    CHAT,
    COMPLETIONS,
    alone,
    asked,
    body_of,
    both,
    equal,
    heard,
    renders_otherwise,
    split,
    told,
)

PATHS = [CHAT, COMPLETIONS]
SLOW: dict[str, Any] = {"clock_speed": 0.5}


def held(w: Pd) -> int:
    """The number of ended segments that wait for a fetch, on live engines."""
    live = [engine for name, engine in w.engines.items() if name not in w.stopped]
    return sum(engine._api._nixl.holding for engine in live)  # type: ignore[union-attr]


async def cut_after(w: Pd, path: str, body: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Splits requests like this one after this many answer tokens.

    Returns the answer of one engine.
    """
    expected = await alone(w, path, body | {"stream": False})
    prompt = expected["usage"]["prompt_tokens"]
    at = (prompt + tokens) / (prompt + body["max_tokens"])
    w.server.fleet.models[0].router.configure(split=SplitAt(fraction=at))
    return expected


async def raw_stream(w: Pd, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the client's answer as raw bytes."""
    async with w.client.post(w.url + path, json=body | {"stream": True}) as response:
        assert response.status == 200
        return heard(await response.read())


@pytest.mark.parametrize("path", PATHS)
async def test_the_second_engine_dies_before_its_turn(path: str) -> None:
    # The first segment takes a while; by then the engine of the next segment is gone.
    async with split(both(**SLOW), both(**SLOW), both(**SLOW), at=0.95) as w:
        body = body_of(path, stream=True, max_tokens=60, stream_options={"include_usage": True})
        expected = await alone(w, path, body)
        for victim in range(2):
            task = asyncio.create_task(asked(w, path, body))
            await w.until(lambda: sum(w.busy(name) for name in w.engines if name not in w.stopped) == 1)
            first = next(n for n in w.engines if n not in w.stopped and w.busy(n))
            others = [name for name in w.engines if name not in w.stopped | {first}]
            await w.kill(others[0])
            equal(await task, expected)
            assert victim < 2
            if len(others) == 1:
                break


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_engine_dies_in_its_leg(path: str, stream: bool) -> None:
    async with split(both(**SLOW), both(**SLOW), both(**SLOW), at=0.95) as w:
        body = body_of(path, stream=stream, max_tokens=60)
        expected = await alone(w, path, body)
        task = asyncio.create_task(asked(w, path, body))
        await w.until(lambda: any(w.busy(name) for name in w.engines))
        await w.kill(next(name for name in w.engines if w.busy(name)))
        equal(await task, expected)


@pytest.mark.parametrize("path", PATHS)
async def test_the_last_engine_dies_in_mid_stream(path: str) -> None:
    async with split(both(**SLOW), both(**SLOW), at=0.9) as w:
        body = body_of(path, max_tokens=200)
        expected = await cut_after(w, path, body, 20)
        task = asyncio.create_task(raw_stream(w, path, body))

        def lasts() -> list[str]:
            loads = {name: w.load(name) for name in w.engines}
            return [n for n, x in loads.items() if x["fetched_prompt_tokens"] and x["generation_tokens"] > 3]

        await w.until(lasts)
        await w.kill(lasts()[0])
        said = await task
        # Another engine continues.
        assert (said["text"], said["finish"]) == (expected["text"], expected["finish"])


@pytest.mark.parametrize("when", ["first leg", "last leg"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves(when: str, stream: bool) -> None:
    async with split(both(**SLOW), both(**SLOW)) as w:
        body = body_of(CHAT, stream=stream, max_tokens=400)
        await cut_after(w, CHAT, body, 20)
        task = asyncio.create_task(asked(w, CHAT, body))
        if when == "first leg":
            await w.until(lambda: any(w.busy(name) for name in w.engines))
        else:
            await w.until(lambda: w.outcomes == {"transferred": 1} and held(w) == 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await w.until(lambda: not any(w.busy(name) for name in w.engines))
        await w.until(lambda: w.in_flight() == 0)
        assert w.server.fleet.models[0].router.stats()["failed"]["cancelled"] == 1


async def test_a_target_that_is_full() -> None:
    # One request runs and none may wait: the engine refuses others meanwhile.
    tight = both(max_sequences=1, max_queued_requests=0, **SLOW)
    async with split(both(**SLOW), tight, both(**SLOW), at=0.93) as w, Busy(w):
        for path in PATHS:
            for stream in (True, False):
                body = body_of(path, stream=stream, max_tokens=30)
                equal(await asked(w, path, body), await alone(w, path, body))
        assert w.server.fleet.models[0].router.stats()["retries"] > 0


@pytest.mark.parametrize("at", [0.4, 0.93])
async def test_blocks_of_other_sizes_are_not_fetched(at: float) -> None:
    """Connectors move whole blocks, so the second engine computes the tokens again."""
    async with split(both(block_tokens=16), both(block_tokens=32), at=at) as w:
        for path in PATHS:
            for stream in (True, False):
                body = body_of(path, stream=stream, max_tokens=30)
                equal(await asked(w, path, body), await alone(w, path, body))
        assert w.outcomes == {"other_blocks": 4}
        assert all(w.busy(name) == 0 for name in w.engines)


async def test_engines_of_another_model_take_nothing_over() -> None:
    async with split(both(), both(model="other"), at=0.5, model=None) as w:
        for model in ("emulated", "other"):
            status, headers, _ = await w.post(body_of(COMPLETIONS, model=model))
            assert status == 200
            async with w.client.get(
                f"{w.url}/debug/decisions/{headers['x-lmetric-decision']}?full=1"
            ) as response:
                record = await response.json()
            assert (record["cuts"], record["split_reason"]) == ([], "no second instance is available")
        assert w.outcomes == {}


class Busy:
    """Keeps b1 busy."""

    def __init__(self, w: Pd) -> None:
        self._w = w
        self._task: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> None:
        body = body_of(COMPLETIONS, "busy", max_tokens=5000)

        async def ask() -> None:
            async with self._w.client.post(self._w.engines["b1"].url + COMPLETIONS, json=body) as response:
                await response.read()

        self._task = asyncio.create_task(ask())
        await self._w.until(lambda: self._w.busy("b1") == 1)

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_the_server_stops_in_the_middle() -> None:
    async with split(both(**SLOW), both(**SLOW), at=0.9) as w:
        body = body_of(COMPLETIONS, max_tokens=400)
        await cut_after(w, COMPLETIONS, body, 20)
        task = asyncio.create_task(raw_stream(w, COMPLETIONS, body))
        await w.until(lambda: w.outcomes == {"transferred": 1})
        await w.until(lambda: any(relay.committed for relay in w.server.front.relays))
        for relay in list(w.server.front.relays):
            relay.stop()
        said = await task
        assert said["error"]["code"] == "shutting_down"
        assert said["text"]


# Engines with chosen faults: they all send the same story.

NIXL_PAGE = b'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'
TOKENIZER = Tokenizer.from_file(str(TOKENIZER_PATH))
STORY = TOKENIZER.encode(" the quiet river and 🦀 all of the Жук by it" * 3, add_special_tokens=False).ids[
    :40
]
STORY_TEXT = TOKENIZER.decode(STORY)
START = list(range(300, 330))
FRAME = {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "tiny"}


def params(tokens: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_num_tokens": tokens,
    }


def text_of(prompt: list[int], ids: list[int]) -> str:
    """Returns the text of a streamed answer."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(TOKENIZER, token) or "" for token in ids)


def told_by(request: Request, **changes: Any) -> dict[str, Any]:
    """Returns the answer of an engine without streaming."""
    body = request.json
    done = len(body["prompt"]) - len(START)
    ids = STORY[done : done + body["max_tokens"]]
    handed = params(len(body["prompt"]) + len(ids) - 1) if "kv_transfer_params" in body else None
    choice = {"index": 0, "text": text_of(body["prompt"], ids), "logprobs": None, "finish_reason": "length"}
    choice |= {"stop_reason": None, "token_ids": ids, "prompt_token_ids": body["prompt"]} | changes
    count = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
    return {**FRAME, "choices": [choice], "usage": count, "kv_transfer_params": handed}


def streamed_by(request: Request, upto: int | None = None) -> list[bytes]:
    """Returns a stream in chunks of two tokens."""
    body = request.json
    done = len(body["prompt"]) - len(START)
    ids = STORY[done : done + body["max_tokens"]]
    chunks = []
    for n in range(0, len(ids), 2):
        last = n + 2 >= len(ids)
        choice = {"index": 0, "text": "of no use", "finish_reason": "length" if last else None}
        choice |= {"logprobs": None, "token_ids": ids[n : n + 2]}
        chunks.append(chunk(event({**FRAME, "choices": [choice]})))
    if upto is not None:
        return chunks[:upto]
    return [
        *chunks,
        chunk(event({**FRAME, "choices": [], "usage": {}})),
        chunk(event(b"[DONE]")),
        b"0\r\n\r\n",
    ]


Behaviour = Callable[[FakeEngine, Request, asyncio.StreamWriter], Awaitable[bool]]


async def tells(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Answers like a healthy engine."""
    if request.path == "/tokenize":
        writer.write(plain(404, {}))
    elif not request.json.get("stream"):
        writer.write(plain(200, told_by(request)))
    else:
        writer.write(STREAM_HEAD)
        for piece in streamed_by(request):
            writer.write(piece)
            await writer.drain()
    return True


def but(fault: Behaviour, *, first: bool = False, times: int = 1) -> Behaviour:
    """Changes the answers of the first `times` segments of a kind.

    A first segment is one with a transfer request.
    """
    left = times

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal left
        if request.path == "/tokenize":
            return await tells(engine, request, writer)
        asks = (request.json.get("kv_transfer_params") or {}).get("do_remote_decode", False)
        if asks == first and left:
            left -= 1
            return await fault(engine, request, writer)
        return await tells(engine, request, writer)

    return behave


def writes(*pieces: bytes, reset: bool = False) -> Behaviour:
    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        if reset:
            await asyncio.sleep(0.02)
            writer.transport.abort()
        return not reset

    return behave


async def breaks(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Breaks the connection in the middle of the answer."""
    writer.write(STREAM_HEAD + b"".join(streamed_by(request, upto=2)))
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()
    return False


def changed(**changes: Any) -> Behaviour:
    async def behave(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(200, told_by(request, **changes)))
        return True

    return behave


async def miscounts(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    told = told_by(request)
    told["kv_transfer_params"]["remote_num_tokens"] += 1
    writer.write(plain(200, told))
    return True


# With a text that no log may have (`watched_log`).
ERROR = {"error": {"message": f"EngineCore encountered an issue: {MARKED_PROMPT}", "code": 500}}
BUSY = {"error": {"message": "busy", "code": 503}}


@contextlib.asynccontextmanager
async def faulty(
    behave: Behaviour,
    number: int = 3,
    *,
    make: Callable[[Behaviour], FakeEngine] | None = None,
    **config: Any,
) -> AsyncIterator[World]:
    """Starts engines with one common behavior.

    Requests are split after the tenth token of their answers. `make`: makes an engine.
    """
    fakes = [
        FakeEngine(behave=behave, metrics=NIXL_PAGE) if make is None else make(behave) for _ in range(number)
    ]
    given = {
        "tokenizer": str(TOKENIZER_PATH.parent),
        "split": SplitAt(fraction=40 / 70),
        "model": "tiny",
    }
    async with world(fakes, **(given | config)) as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: all(engine.connector is not None for engine in model.engines.values()))
        yield w


def legs_at(fake: FakeEngine) -> list[Request]:
    """Returns the requests at an engine that came from clients."""
    return [request for request in fake.requests if request.path != "/tokenize"]


def said_in(got: Any) -> str:
    if isinstance(got, bytes):
        return str(heard(got)["text"])
    return str(got["choices"][0]["text"])


ASKED = {"model": "tiny", "prompt": START, "max_tokens": 40}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_seam_inside_a_character(stream: bool) -> None:
    """The last segment's own text would repeat all earlier text (`test_detokenise`)."""
    async with faulty(tells) as w:
        model = w.server.fleet.models[0]
        for cut in range(1, 39):
            model.router.configure(split=SplitAt(fraction=(29.5 + cut) / 70))
            status, headers, got = await w.post({**ASKED, "stream": stream})
            assert (status, said_in(got)) == (200, STORY_TEXT)
            record = model.router.explain(decision_id(headers))
            assert record is not None
            assert record["cuts"] == [30 + cut]
        assert dict(model.kv_transfers) == {"transferred": 38}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "outcomes"),
    [
        (lambda: but(writes(plain(503, BUSY))), {"transferred": 1, "spent": 1}),
        (lambda: but(writes(plain(500, ERROR))), {"transferred": 1, "broken": 1}),
        (lambda: but(writes(STREAM_HEAD, chunk(event(ERROR)), chunk(event(b"[DONE]")), b"0\r\n\r\n")), None),
        (lambda: but(writes(STREAM_HEAD, chunk(event(b"[DONE]")), b"0\r\n\r\n")), None),
        (lambda: but(writes(STREAM_HEAD, reset=True)), {"transferred": 1, "spent": 1}),
        (lambda: but(writes(reset=True)), {"transferred": 1, "spent": 1}),
        (lambda: but(writes(b"nonsense\r\n\r\n")), {"transferred": 1, "spent": 1}),
        (lambda: but(changed(finish_reason="abort"), first=True), {"transferred": 1}),
        (lambda: but(writes(reset=True), first=True), {"transferred": 1}),
        (lambda: but(writes(plain(503, BUSY)), first=True), {"transferred": 1}),
        (lambda: but(miscounts, first=True), {"missing": 1}),
    ],
)
async def test_a_leg_that_fails_is_done_again(
    fault: Callable[[], Behaviour], outcomes: dict[str, int] | None, stream: bool
) -> None:
    async with faulty(fault()) as w:
        status, _, got = await w.post({**ASKED, "stream": stream})
        assert (status, said_in(got)) == (200, STORY_TEXT)
        if outcomes is not None:
            assert dict(w.server.fleet.models[0].kv_transfers) == outcomes
        for fake in w.engines:
            for request in legs_at(fake):
                fields = request.json.get("kv_transfer_params") or {}
                assert fields.get("remote_num_tokens") in (None, len(request.json["prompt"]))


@pytest.mark.parametrize("failover", [False, True])
async def test_a_last_leg_that_breaks_in_the_middle(failover: bool) -> None:
    async with faulty(but(breaks), stream_failover=failover) as w:
        status, _, got = await w.post({**ASKED, "stream": True})
        said = heard(got)
        if failover:
            assert (status, said["text"], said["finish"]) == (200, STORY_TEXT, "length")
            return
        assert (status, said["error"]["code"], said["finish"]) == (200, "reset", None)
        assert STORY_TEXT.startswith(said["text"])
        assert len(said["text"]) > len(TOKENIZER.decode(STORY[:10]))


async def reports(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Reports an error in the middle of the answer."""
    writer.write(STREAM_HEAD + b"".join(streamed_by(request, upto=2)))
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.write(chunk(event(ERROR)) + b"0\r\n\r\n")
    return True


@pytest.mark.parametrize("failover", [False, True])
async def test_an_error_in_the_middle_of_all_answers_reaches_the_client_and_no_log(failover: bool) -> None:
    async with faulty(but(reports, times=99), stream_failover=failover) as w:
        _, _, got = await w.post({**ASKED, "stream": True})
        assert MARKED_PROMPT in str(got)


async def test_nobody_is_left_for_the_rest() -> None:
    async with faulty(but(writes(plain(503, BUSY)), times=99)) as w:
        status, _, got = await w.post({**ASKED, "stream": True})
        said = heard(got)
        assert (status, said["error"]["code"], said["finish"]) == (200, "status", None)
        assert said["text"] == text_of(START, STORY[:10])
        status, _, got = await w.post(ASKED)
        assert (status, got) == (503, BUSY)


async def test_an_engine_that_refuses_the_first_leg() -> None:
    refusal = {"error": {"message": "no such adapter", "type": "NotFoundError"}}
    async with faulty(but(writes(plain(404, refusal)), first=True)) as w:
        status, _, got = await w.post({**ASKED, "stream": True})
        assert (status, got) == (404, refusal)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"text": "something else"}, "the engine's text differs from the text of its tokens"),
        ({"token_ids": None}, "does not tell token ids"),
        ({"token_ids": [4_000_000] * 11}, "the engine's text differs from the text of its tokens"),
    ],
)
async def test_what_cannot_be_joined_is_asked_for_whole(change: Any, why: str, stream: bool) -> None:
    async with faulty(but(changed(**change), first=True)) as w:
        status, headers, got = await w.post({**ASKED, "stream": stream})
        assert status == 200
        sent = [request.json for fake in w.engines for request in legs_at(fake)]
        (whole,) = [body for body in sent if "kv_transfer_params" not in body]
        assert whole == {**ASKED, "stream": stream}
        if not stream:
            assert said_in(got) == STORY_TEXT
        # From now on, no request is split, and the decision record has the reason.
        _, headers, _ = await w.post(ASKED)
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert why in record["split_reason"]


async def test_a_last_leg_that_says_nothing() -> None:
    async def hang(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        await engine.until_left(writer)
        return False

    for first in (False, True):
        limits = {"first_byte": 0.2, "answer": 0.2}
        async with faulty(but(hang, first=first), timeouts=limits) as w:
            status, _, got = await w.post({**ASKED, "stream": True})
            assert (status, said_in(got)) == (200, STORY_TEXT)
            await w.until(lambda w=w: sum(fake.left for fake in w.engines) == 1)


async def test_a_last_leg_that_sends_only_comments() -> None:
    """Reliability M7: comments do not extend the limit on the first token."""

    async def pings(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        leaves = asyncio.create_task(engine.until_left(writer))
        while not leaves.done():
            writer.write(chunk(b": ping\n\n"))
            await asyncio.wait([leaves], timeout=0.02)
        return False

    async with faulty(but(pings), timeouts={"first_byte": 0.2}) as w:
        status, _, got = await w.post({**ASKED, "stream": True})
        assert (status, said_in(got)) == (200, STORY_TEXT)
        await w.until(lambda: sum(fake.left for fake in w.engines) == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_an_engine_renders_otherwise(stream: bool) -> None:
    """The engine tokenizes the chat differently from the fetched cache, which only it can see."""
    async with split(both(tokenize=False), both(tokenize=False), at=0.3) as w:
        for name in w.engines:
            renders_otherwise(w, name)
        body = body_of(CHAT, stream=stream)
        said = await asked(w, CHAT, body)
        assert said["record"]["cuts"]
        assert w.outcomes == {"transferred": 1, "other_tokens": 1}
        # As without a split.
        again = await asked(w, CHAT, body)
        equal(said, again)
        assert "it tokenizes a chat differently from the router" in again["record"]["split_reason"]
        async with w.client.post(w.engines["b0"].url + CHAT, json=body) as response:
            raw = await response.read()
        assert said["text"] == (heard(raw) if stream else told(orjson.loads(raw)))["text"]


@pytest.mark.parametrize("status", [499, 520, 529])
async def test_an_engine_that_refuses_with_a_status_of_its_own(status: int) -> None:
    """Server 7.2: the client gets a status without a standard phrase. It once waited forever."""
    refusal = {"error": {"message": "overloaded", "type": "overloaded_error"}}
    async with faulty(but(writes(plain(status, refusal)), first=True)) as w:
        assert (await w.post(ASKED))[::2] == (status, refusal)
        status, _, got = await w.post(ASKED)
        assert (status, said_in(got)) == (200, STORY_TEXT)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kv_transfer_is_not_sent_twice_on_a_stale_connection(stream: bool) -> None:
    """Server 7.7: an engine that closes a reused connection may have fetched already.

    The segment is sent again, without the transfer.
    """
    used: dict[int, set[int]] = {}

    async def closes_kept(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        connections = used.setdefault(id(engine), set())
        kept = request.connection in connections
        connections.add(request.connection)
        if kept and (request.json.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            writer.transport.abort()
            return False
        return await tells(engine, request, writer)

    async with faulty(closes_kept, number=2) as w:
        outcomes = w.server.fleet.models[0].kv_transfers
        for _ in range(4):
            status, _, got = await w.post({**ASKED, "stream": stream})
            assert (status, said_in(got)) == (200, STORY_TEXT)
            await w.settled()
        assert outcomes["spent"] > 0
        fetches = [
            request
            for fake in w.engines
            for request in legs_at(fake)
            if (request.json.get("kv_transfer_params") or {}).get("do_remote_prefill")
        ]
        assert len(fetches) == outcomes["transferred"]
        assert w.server.fleet.models[0].router.stats()["retries"] == 0


async def test_requests_are_cut_again_after_an_odd_answer() -> None:
    """Server 7.5: one unmergeable answer once stopped splits of its path until a restart."""
    async with faulty(but(changed(text="something else"), first=True)) as w:
        router = w.server.fleet.models[0].router
        cuts = []
        for _ in range(2):
            _, headers, _ = await w.post(ASKED)
            record = router.explain(decision_id(headers)) or {}
            cuts.append((record["cuts"], record["split_reason"]))
        assert cuts[0] == ([40], None)
        assert "the engine's text differs from the text of its tokens" in cuts[1][1]
        model = w.server.fleet.models[0]
        (why, until) = model._not_joinable[COMPLETIONS, False]
        assert 200 < until - time.monotonic() <= 300
        model._not_joinable[COMPLETIONS, False] = (why, time.monotonic())
        status, headers, got = await w.post(ASKED)
        assert (status, said_in(got)) == (200, STORY_TEXT)
        record = router.explain(decision_id(headers)) or {}
        assert (record["cuts"], record["split_reason"]) == ([40], None)
        # A changed engine allows a new try at once.
        model.not_joinable(COMPLETIONS, "as a test wants")
        engine = model.engines["e0"]
        w.engines[0].metrics += b'vllm:cache_config_info{block_size="32"} 1.0\n'
        engine.ask_anew()
        await w.server._monitor.check([engine])
        _, headers, _ = await w.post(ASKED)
        record = router.explain(decision_id(headers)) or {}
        assert record["split_reason"] is None
