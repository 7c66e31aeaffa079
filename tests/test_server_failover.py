"""Streams whose engine fails in the middle: another engine continues them, without a rebalancer.

`pd` checks at its end that no request is in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from lmetric.options import SplitAt
from lmetric.server.fleet.model import Model
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.emulated.text import TOKENIZER_PATH
from pd_world import Pd, nixl, pd, sglang
from server_world import (
    STREAM_HEAD,
    Behaviour,
    FakeEngine,
    Request,
    World,
    answer,
    chunk,
    event,
    plain,
    world,
)
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, both, equal, heard
from test_server_split_faults import FRAME, NIXL_PAGE, START, STORY, STORY_TEXT, text_of
from waiting import PATIENCE_SECONDS

PATHS = [CHAT, COMPLETIONS]
USAGE = {"include_usage": True}
TOKENS = 60


def engine(**changes: Any) -> EngineOptions:
    """An engine without KV transfer."""
    return EngineOptions.model_validate({"port": 0, "clock_speed": 50.0} | changes)


def failing(how: str, after: int = 20) -> EngineOptions:
    """An engine whose answers break off after this many tokens."""
    return engine(fail_after_tokens=after, fail_with=how)


@contextlib.asynccontextmanager
async def failover(*options: EngineOptions, **config: Any) -> AsyncIterator[Pd]:
    """Starts a router before such engines. Requests go to the first engine, then to the second."""
    given = {"tokenizer": None, "policy": "round_robin"}
    async with pd(*options, **(given | config)) as w:
        engines = model(w).engines
        await w.until(lambda: all(each.identified for each in engines.values()))
        yield w


def model(w: Pd | World) -> Model:
    return w.server.fleet.models[0]


def stream_of(path: str, **changes: Any) -> dict[str, Any]:
    return body_of(path, **({"stream": True, "max_tokens": TOKENS, "stream_options": USAGE} | changes))


# -- every way in which an engine fails
# ----------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("how", ["reset", "event", "stall"])
async def test_a_stream_continues_on_another_engine(path: str, ids: bool, how: str) -> None:
    """Reset: the connection breaks. Event: vLLM reports that its core died. Stall: it hangs."""
    async with failover(failing(how), engine(), timeouts={"between_chunks": 0.4}) as w:
        body = stream_of(path, return_token_ids=ids)
        expected = await alone(w, path, body)
        for number in range(2):  # the second request begins on the healthy engine
            said = await asked(w, path, body)
            equal(said, expected)
            assert said["roles"] == (path == CHAT)
            assert [to for _, to in said["record"]["migrations"]] == ["b1"] * (number == 0)
        assert model(w).failovers == {"continued": 1}
        assert not model(w).not_resumable
        page = (await (await w.client.get(f"{w.url}/metrics")).text()).splitlines()
        assert 'lmetric_stream_failovers_total{model="emulated",outcome="continued"} 1.0' in page


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_continues_more_than_once(path: str) -> None:
    # The second engine hangs: after an error, its tokens might arrive together with the error.
    second = failing("stall", 10)
    async with failover(failing("reset", 20), second, engine(), timeouts={"between_chunks": 0.4}) as w:
        body = stream_of(path)
        said = await asked(w, path, body)
        equal(said, await alone(w, path, body))
        assert [to for _, to in said["record"]["migrations"]] == ["b1", "b2"]
        assert model(w).failovers == {"continued": 2}


async def test_retries_bound_the_engines_of_a_stream() -> None:
    kinds = [failing("reset", 10) for _ in range(4)]
    async with failover(*kinds, retries={"attempts": 3}) as w:
        said = await raw(w, COMPLETIONS, stream_of(COMPLETIONS))
        assert said["error"]["code"] == "reset"
        assert model(w).failovers == {"continued": 2, "not_retried": 1}


@pytest.mark.parametrize(
    ("others", "attempts", "outcome"), [(2, 3, "continued"), (1, 3, "no_engine"), (2, 2, "not_retried")]
)
async def test_a_failover_counts_once_if_the_next_engine_dies_before_a_token(
    others: int, attempts: int, outcome: str
) -> None:
    later = [failing("reset", 0), engine()][:others]
    async with failover(failing("reset"), *later, retries={"attempts": attempts}) as w:
        said = await raw(w, COMPLETIONS, stream_of(COMPLETIONS))
        assert ("error" in said) == (outcome != "continued")
        assert model(w).failovers == {outcome: 1}


async def test_the_record_names_the_engine_that_continued() -> None:
    """The one before it got the stream, too, and failed before its first token."""
    async with failover(failing("reset"), failing("reset", 0), engine()) as w:
        record = (await asked(w, COMPLETIONS, stream_of(COMPLETIONS)))["record"]
        ((_, target),) = record["migrations"]
        assert (target, record["decode_instance"]) == ("b2", None)


async def test_the_last_engine_fails() -> None:
    async with failover(failing("event")) as w:
        said = await raw(w, CHAT, stream_of(CHAT))
        # The engine's own error, as if the router had recorded nothing.
        assert said["error"]["code"] == 500
        assert "EngineCore" in said["error"]["message"]
        assert model(w).failovers == {"no_engine": 1}


async def test_failover_can_be_off() -> None:
    async with failover(failing("reset"), engine(), stream_failover=False) as w:
        said = await raw(w, CHAT, stream_of(CHAT))
        assert said["error"]["message"].startswith("the engine failed in the middle of its answer (b0: ")
        assert model(w).failovers == {"not_resumable": 1}
        assert not model(w).not_resumable


async def raw(w: Pd, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with w.client.post(w.url + path, json=body) as response:
        assert response.status == 200
        return heard(await response.read())


async def test_a_chat_without_max_tokens_continues() -> None:
    """The continuation may be as long as the model's context allows."""
    long = engine(default_max_tokens=2000)
    async with failover(failing("reset"), long) as w:
        ids = (await asked(w, CHAT, stream_of(CHAT, max_tokens=400, return_token_ids=True), urls(w)[1]))[
            "ids"
        ]
        stop = next(token for n, token in enumerate(ids) if n >= 60 and token not in ids[:n])
        body = stream_of(CHAT, max_tokens=None, stop_token_ids=[stop])
        expected = await asked(w, CHAT, body, urls(w)[1])
        said = await asked(w, CHAT, body)
        equal(said, expected)
        assert said["finish"] == "stop"
        assert said["usage"]["completion_tokens"] > 60
        assert model(w).failovers == {"continued": 1}


def urls(w: Pd) -> list[str]:
    return [each.url for each in w.engines.values()]


# -- plans of several segments
# -------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_a_decode_engine_fails(path: str) -> None:
    kinds = [nixl("prefill"), nixl("decode", fail_after_tokens=20), nixl("decode")]
    async with failover(*kinds, decode_policy="round_robin") as w:
        body = stream_of(path)
        said = [await asked(w, path, body) for _ in range(2)]
        for each in said:
            equal(each, await alone(w, path, body))
        assert set(model(w).failovers) == {"continued"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("at", [0.5, 0.9])
async def test_the_last_engine_of_a_split_fails(path: str, at: float) -> None:
    """Split inside its prompt, the engine's answer passes; inside its answer, it is merged."""
    kinds = [both(clock_speed=1.0) for _ in range(3)]
    async with failover(*kinds, split=SplitAt(fraction=at)) as w:
        body = stream_of(path, max_tokens=100)
        task = asyncio.create_task(asked(w, path, body))

        def last() -> list[str]:
            loads = {name: w.load(name) for name in w.engines if name not in w.stopped}
            return [n for n, x in loads.items() if x["fetched_prompt_tokens"] and x["generation_tokens"] > 5]

        await w.until(last)
        await w.kill(last()[0])
        equal(await task, await alone(w, path, body))
        assert model(w).failovers == {"continued": 1}


# -- features of requests
# -------------------------------------------------------------------------

# Fields of a request with which a stream continues. The emulated engine ignores most of them: real
# engines are tested in `tests/real/test_real_failover.py`.
CONTINUES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 7},
    {"min_tokens": 50},
    {"min_tokens": 10, "ignore_eos": True, "stop_token_ids": [5]},
    {"logit_bias": {"7": -100}, "allowed_token_ids": None},
    {"skip_special_tokens": True, "include_stop_str_in_output": True},
    {"stream_options": None},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0, "stop": [], "tools": []},
    {"priority": 3, "user": "a", "metadata": {"a": "b"}, "cache_salt": "salt"},
    {"response_format": {"type": "text"}, "logprobs": None},
    {"max_tokens": 40},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", CONTINUES, ids=lambda fields: ",".join(fields))
async def test_streams_with_these_fields_continue(path: str, fields: dict[str, Any]) -> None:
    async with failover(failing("reset"), engine()) as w:
        body = stream_of(path) | fields
        said = await asked(w, path, body)
        equal(said, await alone(w, path, body))
        assert model(w).failovers == {"continued": 1}


# Fields with which a stream does not continue, and the reason in metrics.
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STAYS: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"tools": [TOOL]}, "tools"),
    ({"functions": [TOOL["function"]]}, "functions"),
    ({"bad_words": ["river"]}, "bad_words"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"guided_choice": ["a", "b"]}, "guided_choice"),
    ({"guided_grammar": "root ::= 'a'"}, "guided_grammar"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"prompt": ["one", "two"]}, "several_prompts"),
    ({"invented_field": 1}, "unknown_field"),
]


async def breaks(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Sends two events of a stream for any request, and breaks the connection."""
    if request.path == "/tokenize":
        writer.write(plain(404, {}))
        return True
    choice: dict[str, Any] = {"index": 0, "text": "a", "finish_reason": None}
    if "messages" in request.json:
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    writer.write(STREAM_HEAD + chunk(event(FRAME | {"choices": [choice]})) * 2)
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()
    return False


@contextlib.asynccontextmanager
async def fakes(behave: Behaviour, *others: Behaviour, **config: Any) -> AsyncIterator[World]:
    """Starts engines that look like vLLM, and a router that knows the tokenizer."""
    engines = [FakeEngine(behave=each, metrics=NIXL_PAGE) for each in (behave, *others)]
    given = {"tokenizer": str(TOKENIZER_PATH.parent), "model": "tiny"}
    async with world(engines, **(given | config)) as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        yield w


@pytest.mark.parametrize(("fields", "reason"), STAYS, ids=[reason for _, reason in STAYS])
async def test_streams_with_these_fields_end_with_the_reason(fields: dict[str, Any], reason: str) -> None:
    async with fakes(breaks, breaks) as w:
        body = {"model": "tiny", "prompt": "a river", "max_tokens": 40, "stream": True} | fields
        _, _, got = await w.post(body)
        error = heard(got)["error"]
        assert error["code"] == "reset"
        assert "; no other engine can continue it: " in error["message"]
        assert model(w).not_resumable == {reason: 1}
        assert model(w).failovers == {"not_resumable": 1}
        sent = [each for engine in w.engines for each in engine.requests if each.path == COMPLETIONS]
        # The engine got the client's bytes: nothing is recorded for nothing.
        assert [each.body for each in sent] == [orjson.dumps(body)]
        _, page = await w.get("/metrics")
        assert f'lmetric_not_resumable_total{{model="tiny",reason="{reason}"}} 1.0'.encode() in page


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (CHAT, {"logprobs": True}, "logprobs"),
        ("/v1/responses", {"input": "a"}, "path"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "path"),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            },
            "text_prompt",
        ),
    ],
)
async def test_requests_of_these_kinds_end_with_the_reason(
    path: str, fields: dict[str, Any], reason: str
) -> None:
    async with fakes(breaks, breaks) as w:
        body = {"model": "tiny", "max_tokens": 40, "stream": True}
        body |= {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {}
        await w.post(body | fields, path)
        assert model(w).not_resumable == {reason: 1}
        await w.settled()


async def test_without_a_tokenizer_streams_stay() -> None:
    async with fakes(breaks, breaks, tokenizer="off") as w:
        await w.post({"model": "tiny", "prompt": "a river", "max_tokens": 40, "stream": True})
        assert model(w).not_resumable == {"tokenizer": 1}


@pytest.mark.parametrize("kind", ["sglang", "unknown"])
async def test_engines_without_token_ids_get_the_request_unchanged(kind: str) -> None:
    """They may refuse `return_token_ids`, or ignore it."""
    async with fakes(breaks, breaks) as w:
        for engine in model(w).engines.values():
            engine.capabilities = type(engine.capabilities)(kind)
        body = {"model": "tiny", "prompt": "a river", "max_tokens": 40, "stream": True}
        _, _, got = await w.post(body)
        assert heard(got)["error"]["code"] == "reset"
        assert model(w).not_resumable == {"engine": 1}
        assert model(w).failovers == {"not_resumable": 1}
        assert [each.body for each in w.engines[0].requests if each.path == COMPLETIONS] in (
            [],
            [orjson.dumps(body)],
        )


@pytest.mark.parametrize("config", [{}, {"rebalance": "star", "experimental": True}], ids=["plain", "star"])
async def test_tensorrt_llm_gets_no_field_that_it_refuses(config: dict[str, Any]) -> None:
    async def strict(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if unknown := request.json.keys() - {"model", "prompt", "max_tokens", "stream"}:
            writer.write(plain(400, {"object": "error", "message": f"Extra inputs: {unknown}", "code": 400}))
            return True
        return await answer(engine, request, writer)

    engine = FakeEngine(
        behave=strict,
        cards=[{"id": "tiny", "object": "model", "owned_by": "tensorrt_llm"}],
        extra_pages={"/version": (200, b'{"version": "1.2.0"}')},
    )
    async with world([engine], tokenizer=str(TOKENIZER_PATH.parent), model="tiny", **config) as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        body = {"model": "tiny", "prompt": "a river", "max_tokens": 3}
        for stream in ({}, {"stream": True}):
            status, _, got = await w.post(body | stream)
            assert status == 200, got


async def test_sglang_is_not_asked_for_token_ids() -> None:
    async with failover(sglang("both"), sglang("both"), engine()) as w:
        kinds = {name: each.capabilities.token_ids for name, each in model(w).engines.items()}
        assert kinds == {"b0": None, "b1": None, "b2": True}


async def test_engines_that_parse_reasoning_are_named() -> None:
    """Recording ends at the first part that is not text, and later requests are not recorded."""

    async def thinks(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize":
            writer.write(plain(404, {}))
            return True
        delta = {"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None, "token_ids": [5]}
        writer.write(STREAM_HEAD + chunk(event(FRAME | {"choices": [delta]})) * 2)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()
        return False

    async with fakes(thinks, thinks) as w:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True}
        for _ in range(2):
            _, _, got = await w.post(body, CHAT)
            assert heard(got)["error"]["code"] == "reset"
            assert "tool calls or reasoning" in heard(got)["error"]["message"]
            assert "--enable-scale-out" in heard(got)["error"]["message"]
        assert model(w).failovers == {"not_resumable": 2}
        assert model(w).not_resumable == {"parser": 2}


# -- edges of a stream
# -------------------------------------------------------------------------


def parts(request: Request, last: str = "length", ahead: int = 0) -> list[bytes]:
    """Returns the story as events of one token each, then usage and end.

    `ahead`: the number of tokens before the start of the story.
    """
    body = request.json
    prompt = body["prompt"][ahead:]
    done = len(prompt) - len(START)
    ids = STORY[done : done + body["max_tokens"]]
    texts = [text_of(prompt, ids[: n + 1]) for n in range(len(ids))]
    events = []
    for n, token in enumerate(ids):
        text = texts[n][len(texts[n - 1]) :] if n else texts[0]
        choice = {"index": 0, "text": text, "logprobs": None, "token_ids": [token]}
        choice |= {"finish_reason": last if n + 1 == len(ids) else None}
        if n == 0:
            choice["prompt_token_ids"] = body["prompt"]
        events.append(event(FRAME | {"choices": [choice]}))
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
    return [*events, event(FRAME | {"choices": [], "usage": usage}), event(b"[DONE]")]


def cut(
    at: int,
    then: bytes = b"",
    *,
    last: str = "length",
    wait: float = 0.02,
    together: int = 0,
    ahead: int = 0,
) -> Behaviour:
    """Sends the whole stream, or its first `at` events if it is the first request, and resets.

    `then`: bytes before the reset; a router that was busy reads them with the last `together`
    events.
    """

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize":
            writer.write(plain(404, {}))
            return True
        events = parts(request, last, ahead)
        first = len(request.json["prompt"]) == ahead + len(START)
        writer.write(STREAM_HEAD)
        for each in events[: at - together if first else None]:
            writer.write(chunk(each))
            await writer.drain()
            for _ in range(2):  # the router reads each event by itself, under each event loop
                await asyncio.sleep(0)
        if not first:
            writer.write(b"0\r\n\r\n")
            return True
        writer.write(b"".join([*map(chunk, events[at - together : at]), then]))
        await writer.drain()
        await asyncio.sleep(wait)
        writer.transport.abort()
        return False

    return behave


STORY_BODY = {"model": "tiny", "prompt": START, "max_tokens": 40, "stream": True, "stream_options": USAGE}


async def story(w: World, **changes: Any) -> dict[str, Any]:
    status, _, got = await w.post(STORY_BODY | changes)
    assert status == 200
    # Without events that carry nothing.
    events = [each for each in got.split(b"\n\n") if b'"id"' in each or b'"error"' in each]
    assert got.endswith(b"data: [DONE]\n\n")
    assert got.count(b"data: [DONE]\n\n") == 1
    return heard(b"\n\n".join([*events, b"data: [DONE]\n\n"]))


def is_whole(said: dict[str, Any]) -> None:
    """The client has the story, as from one engine."""
    assert "error" not in said
    assert (said["text"], said["finish"]) == (STORY_TEXT, "length")
    assert said["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("at", [1, 7, 39])
@pytest.mark.parametrize(
    "then",
    [
        b"",
        chunk(b'data: {"id":"cmpl-1","cho'),  # a part of an event
        b'ff\r\ndata: {"id":"cmpl-1"',  # a part of a chunk
        b"f",  # a part of a chunk's size
        chunk(b": ping\n\n"),
        chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",  # an end without a finish_reason
        chunk(event({"error": {"message": "EngineDeadError", "code": 500}})),
        chunk(event({"error": {"message": "died"}})) + chunk(event(b"[DONE]")),
        chunk(event(FRAME | {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})),
    ],
    ids=[
        *("nothing", "event", "chunk", "size", "comment", "done", "error", "error_done", "abort"),
    ],
)
async def test_no_token_is_lost_or_doubled_wherever_the_answer_breaks(at: int, then: bytes) -> None:
    behave = cut(at, then)
    async with fakes(behave, behave) as w:
        is_whole(await story(w))
        assert model(w).failovers == {"continued": 1}


async def test_a_stream_with_a_long_prompt_continues_more_than_once() -> None:
    """The first event of each engine repeats 100,000 token ids. A part of it failed the engine."""
    ahead = [START[0]] * 100_000
    whole = cut(7, ahead=len(ahead))

    async def dies(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize":
            return await whole(engine, request, writer)
        events = parts(request, ahead=len(ahead))[:5]
        assert len(events[0]) > 400_000
        writer.write(STREAM_HEAD + b"".join(map(chunk, events)))
        return False  # the connection closes after these bytes

    async with fakes(dies, dies, whole) as w:
        is_whole(await story(w, prompt=[*ahead, *START]))
        assert model(w).failovers == {"continued": 2}


@pytest.mark.parametrize("how", ["no_ids", "error", "other_ids", "abort"])
async def test_a_third_engine_continues_if_the_second_cannot_be_merged(how: str) -> None:
    """The ticket counted a first token of the second engine, so the third was never asked."""
    continuations = 0

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal continuations
        if request.path == COMPLETIONS and len(request.json["prompt"]) > len(START):
            continuations += 1
            if continuations == 1:
                choice = {"index": 0, "text": " a"}
                choice |= {"token_ids": {"no_ids": None, "other_ids": "5"}.get(how, [5])}
                choice |= {"finish_reason": how if how in ("error", "abort") else None}
                writer.write(STREAM_HEAD + chunk(event(FRAME | {"choices": [choice]})))
                await writer.drain()
                await engine.until_left(writer)
                return False
        return await cut(7)(engine, request, writer)

    async with fakes(behave, behave, behave) as w:
        is_whole(await story(w))
        assert continuations == 2
        assert model(w).failovers == {"continued": 1}


GARBAGE = b"\xa7\x00garbage\r\n"


@pytest.mark.parametrize("together", [0, 1, 4])
@pytest.mark.parametrize("at", [5, 20, 39])
async def test_events_before_garbage_reach_the_client(at: int, together: int) -> None:
    """Such events were recorded, so the next engine does not send them again."""
    behave = cut(at, GARBAGE, together=together)
    async with fakes(behave, behave) as w:
        is_whole(await story(w))
        assert model(w).failovers == {"continued": 1}


@pytest.mark.parametrize("then", [b"", GARBAGE], ids=["cut", "garbage"])
@pytest.mark.parametrize("together", [0, 3])
@pytest.mark.parametrize("at", [40, 41, 42])
async def test_an_answer_that_lacks_only_its_end_is_whole(at: int, together: int, then: bytes) -> None:
    """The engine dies between the last token, the usage, the end mark and the last chunk."""
    behave = cut(at, then, together=together)
    async with fakes(behave, behave) as w:
        is_whole(await story(w))
        assert model(w).failovers == {"complete": 1}


async def test_errors_of_the_request_itself_pass() -> None:
    fault = {"error": {"message": "too long", "code": 400}}
    behave = cut(7, chunk(event(fault)) + chunk(event(b"[DONE]")) + b"0\r\n\r\n")
    async with fakes(behave, behave) as w:
        assert (await story(w))["error"] == fault["error"]
        assert not model(w).failovers


@pytest.mark.parametrize(
    "filler",
    [
        b": ping\n\n",
        event({"choices": []}),
        event({"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
        event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": None}]}),
        b'event: ping\ndata: {"type":"ping"}\n\n',
    ],
    ids=["comment", "no_choice", "no_text", "role", "no_ids", "ping"],
)
@pytest.mark.parametrize("recorded", [True, False])
async def test_empty_events_are_no_tokens(filler: bytes, recorded: bool) -> None:
    """Between two tokens, an engine may send these events for ever.

    A `ping` belongs to another API: its stream is not recorded further.
    """
    left = 0

    async def dozes(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        nonlocal left
        first = request.path != "/tokenize" and len(request.json["prompt"]) == len(START)
        if not first:
            return await cut(0)(engine, request, writer)
        writer.write(STREAM_HEAD + b"".join(chunk(each) for each in parts(request)[:7]))
        try:
            while True:
                writer.write(chunk(filler))
                await writer.drain()
                await asyncio.sleep(0.05)
        finally:
            left += 1

    limits = {"between_chunks": 0.5}
    async with fakes(dozes, dozes, timeouts=limits, stream_failover=recorded) as w:
        said = await asyncio.wait_for(story(w), PATIENCE_SECONDS)
        if recorded and b'"ping"' not in filler:
            assert (said["text"], said["finish"]) == (STORY_TEXT, "length")
        else:
            assert said["error"]["code"] == "timeout"
            assert "no token for 0.5 s" in said["error"]["message"]
        await w.until(lambda: left == 1)


@pytest.mark.parametrize("filler", [b": ping\n\n", event({"choices": [{"delta": {"role": "assistant"}}]})])
async def test_neither_comments_nor_the_role_are_a_first_token(filler: bytes) -> None:
    async def opens(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if engine.name == "e1":
            return await cut(0)(engine, request, writer)
        writer.write(STREAM_HEAD)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(chunk(filler))
                await writer.drain()
                await asyncio.sleep(0.05)
        return False

    async def tells(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/tokenize":
            writer.write(plain(404, {}))
        else:
            writer.write(STREAM_HEAD + b"".join(map(chunk, parts(request))) + b"0\r\n\r\n")
        return True

    async with fakes(opens, tells, timeouts={"first_byte": 0.5}) as w:
        said = await asyncio.wait_for(story(w), PATIENCE_SECONDS)
        assert (said["text"], said["finish"]) == (STORY_TEXT, "length")


# -- stop strings
# -------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shown", [False, True])
async def test_stop_strings_end_a_continued_stream_at_the_same_place(path: str, shown: bool) -> None:
    """Also strings across the failure, and strings that only begin there."""
    more = {"include_stop_str_in_output": shown}
    for after in range(18, 23):
        async with failover(failing("reset", after), engine()) as w:
            healthy = urls(w)[1]
            text = (await asked(w, path, stream_of(path), healthy))["text"]
            half = len((await asked(w, path, stream_of(path, max_tokens=20), healthy))["text"])
            stops: list[Any] = [
                text[half - 4 : half + 4],
                [text[half - 9 : half] + "nowhere", text[half + 20 : half + 23]],
                ["nowhere at all", "zz"],
                [text[half - 2 : half + 9], text[half : half + 2]],
            ]
            for number, stop in enumerate(stops):
                body = stream_of(path, stop=stop, return_token_ids=True, **more)
                expected = await asked(w, path, body, healthy)
                said = [await asked(w, path, body) for _ in range(2)]
                for each in said:
                    equal(each, expected)
                    if number == 2:
                        assert (each["finish"], each["stop"]) == ("length", None)
            assert not model(w).not_resumable
            assert set(model(w).failovers) <= {"continued", "complete"}


async def test_stop_strings_count_after_min_tokens() -> None:
    async with failover(failing("reset"), engine()) as w:
        text = (await asked(w, COMPLETIONS, stream_of(COMPLETIONS), urls(w)[1]))["text"]
        body = stream_of(COMPLETIONS, stop=[text[:2], "e"], min_tokens=40)
        expected = await asked(w, COMPLETIONS, body, urls(w)[1])
        equal(await asked(w, COMPLETIONS, body), expected)
        assert expected["usage"]["completion_tokens"] > 40
        assert model(w).failovers == {"continued": 1}
