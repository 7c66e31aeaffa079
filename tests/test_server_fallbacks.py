"""Fallbacks: another model serves a request that its own cannot serve, before any token."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ServerConfig
from lmetric.server.app import Reloads
from lmetric_lab.emulated.text import TOKENIZER_PATH
from server_world import (
    STREAM_HEAD,
    Behaviour,
    FakeEngine,
    Request,
    World,
    chunk,
    hang,
    plain,
    strict,
    token,
    world,
)
from test_server_programs import SETTINGS

SMALL = {"id": "small", "root": "/small", "max_model_len": 1000}
LARGE = {"id": "large", "root": "/large", "max_model_len": 5000}
OTHER = {"id": "other", "root": "/other", "max_model_len": 9000}
FALLBACKS = {"small": ["large", "other"], "gone": ["large"], "mixed": "other"}
ALIASES = {"mixed": {"small": 1}, "mini": "small"}
VLLM_TOO_LONG = (
    "This model's maximum context length is 1000 tokens. However, your prompt contains 1500 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
)
VLLM_ANSWER_TOO_LONG = "max_tokens=1500 cannot be greater than max_model_len=1000."
VLLM_RESPONSES_TOO_LONG = (
    "The engine prompt length 1500 exceeds the max_model_len 1000. Please reduce prompt."
)
VLLM_NO_ROOM = "max_tokens must be at least 1, got 0."
SGLANG_TOO_LONG = "The input (1500 tokens) is longer than the model's context length (1000 tokens)."


def too_long(message: str) -> Behaviour:
    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        said = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        writer.write(plain(400, {"error": said}))
        return True

    return behave


def says(status: int, value: Any) -> Behaviour:
    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(status, value))
        return True

    return behave


def fakes(*cards: dict[str, Any], first: Behaviour = strict) -> list[FakeEngine]:
    """Engines of these models. ``first``: the behavior of the first one."""
    found = [FakeEngine(cards=[card], behave=strict) for card in cards]
    found[0].behave = first
    return found


async def fallbacks(w: World) -> dict[tuple[str, str, str], int]:
    """The counts of fallbacks by model, next model and reason."""
    page = (await w.get("/metrics"))[1].decode()
    found = {}
    for labels, count in re.findall(r"^lmetric_model_fallbacks_total\{(.*)\} (\d+)", page, re.MULTILINE):
        each = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        found[each["model"], each["to"], each["reason"]] = int(count)
    return found


def read_lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob("*.jsonl"))
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


async def test_an_unknown_model_and_one_without_engines_fall_back() -> None:
    async with world(fakes(SMALL, LARGE), fallbacks=FALLBACKS) as w:
        status, headers, _ = await w.post({"model": "gone", "prompt": "x"})
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        await w.engines[0].stop()
        for number in range(3):  # refused connections first, then the engine is out of service
            body = b'{ "prompt":"%d",\n "model" : "small", "unknown": [1.50] }' % number
            status, headers, _ = await w.post(body)
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
            sent = w.engines[1].requests[-1].body
            assert orjson.loads(sent)["model"] == "large"
            assert b'"unknown": [1.50]' in sent, "nothing else changes"
        assert await fallbacks(w) == {
            ("gone", "large", "no_engine"): 1,
            ("small", "large", "no_engine"): 3,
        }


async def test_a_request_that_kills_engines_does_not_get_those_of_another_model() -> None:
    async def die(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if b"POISON" not in request.body:
            return await strict(engine, request, writer)
        await engine.stop()
        return False

    engines = fakes(SMALL, SMALL, SMALL, LARGE)
    for engine in engines[:3]:
        engine.behave = die
    async with world(engines, fallbacks=FALLBACKS, health={"interval": 60}) as w:
        for _ in range(3):  # now each engine has a kept connection
            assert (await w.post({"model": "small", "prompt": "x"}))[0] == 200
        status, _, got = await w.post({"model": "small", "prompt": "POISON"})
        assert (status, got["error"]["code"]) == (502, "failed_twice")
        assert sorted(len(engine.requests) for engine in engines[:3]) == [1, 2, 2]
        assert not engines[3].requests
        assert await fallbacks(w) == {}


async def test_the_next_model_follows_if_one_cannot_serve_either() -> None:
    async with world(fakes(SMALL, LARGE, OTHER), fallbacks=FALLBACKS) as w:
        await w.engines[0].stop()
        await w.engines[1].stop()
        status, headers, _ = await w.post({"model": "small", "prompt": "x", "stream": True})
        assert (status, headers["x-lmetric-instance"]) == (200, "e2")
        assert await fallbacks(w) == {
            ("small", "large", "no_engine"): 1,
            ("large", "other", "no_engine"): 1,
        }
        # Fallbacks of a fallback are not used, and the last error reaches the client.
        await w.engines[2].stop()
        status, _, body = await w.post({"model": "small", "prompt": "x"})
        assert status in (502, 503)
        assert body["error"]["code"] in ("refused", "no_engine")


@pytest.mark.parametrize(
    "message",
    [VLLM_TOO_LONG, VLLM_ANSWER_TOO_LONG, VLLM_RESPONSES_TOO_LONG, VLLM_NO_ROOM, SGLANG_TOO_LONG],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_error_for_a_context_that_is_too_long_leads_to_the_fallback(
    message: str, stream: bool
) -> None:
    async with world(fakes(SMALL, LARGE, first=too_long(message)), fallbacks={"small": "large"}) as w:
        status, headers, _ = await w.post({"model": "small", "prompt": "x", "stream": stream})
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert await fallbacks(w) == {("small", "large", "context_length_exceeded"): 1}
        w.engines[1].behave = too_long(message)
        status, headers, body = await w.post({"model": "small", "prompt": "x", "stream": stream})
        assert (status, body["error"]["message"]) == (400, message), "the engine's own error"
        assert len(w.engines[1].requests) == 2


async def test_a_prompt_that_is_known_to_be_too_long_goes_to_the_fallback_at_once() -> None:
    tokenizer = str(TOKENIZER_PATH.parent)
    async with world(fakes(SMALL, LARGE), fallbacks=FALLBACKS, tokenizer=tokenizer) as w:
        long = "seven of nine " * 1000
        # 1000 tokens leave no room for an answer.
        fits, full = " river" * 999, " river" * 1000
        for prompt, instance in ((fits, "e0"), (full, "e1"), (long, "e1"), (long * 20, "e1")):
            status, headers, _ = await w.post({"model": "small", "prompt": prompt})
            assert (status, headers["x-lmetric-instance"]) == (200, instance)
        # The last model's engine answers, however long the prompt is.
        assert await fallbacks(w) == {("small", "large", "context_length_exceeded"): 3}
        asked = [request for request in w.engines[0].requests if request.path != "/tokenize"]
        assert [request.json["prompt"] for request in asked] == [fits]


async def test_prompts_of_token_ids_keep_their_model_and_so_do_their_tokens() -> None:
    async with world(fakes(SMALL, LARGE), fallbacks=FALLBACKS) as w:
        await w.engines[0].stop()
        assert (await w.post({"model": "small", "prompt": [5] * 1500}))[0] in (502, 503)
        assert (await w.post({"model": "small", "prompt": "x"}, path="/tokenize"))[0] in (502, 503)
        assert await fallbacks(w) == {}


@pytest.mark.parametrize("status", [400, 422, 500])
async def test_other_errors_of_engines_do_not_fall_back(status: int) -> None:
    wrong = {"error": {"message": "temperature must be positive", "code": status}}
    async with world(
        fakes(SMALL, LARGE, first=says(status, wrong)), fallbacks=FALLBACKS, retries={"statuses": [503]}
    ) as w:
        got, _, body = await w.post({"model": "small", "prompt": "x"})
        assert (got, body) == (status, wrong)
        assert not w.engines[1].requests


async def test_full_engines_lead_to_the_fallback() -> None:
    busy = says(429, {"error": {"message": "too many requests"}})
    async with world(fakes(SMALL, LARGE, first=busy), fallbacks=FALLBACKS) as w:
        assert (await w.post({"model": "small", "prompt": "x"}))[0] == 200
        assert await fallbacks(w) == {("small", "large", "engine_full"): 1}


async def test_a_refusal_by_admission_leads_to_the_fallback() -> None:
    tenants = {"a": {"max_concurrent": 1, "max_waiting": 0}}
    async with world(fakes(SMALL, LARGE, first=hang), fallbacks=FALLBACKS, tenants=tenants) as w:
        headers = {"x-tenant": "a"}
        first = asyncio.create_task(w.post({"model": "small", "prompt": "x"}, headers=headers))
        await w.engines[0].asked(1)
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {"model": "small", "prompt": "x", "messages": [], "stream": True}
            status, got, _ = await w.post(body, path=path, headers=headers)
            assert (status, got["x-lmetric-instance"]) == (200, "e1")
        assert await fallbacks(w) == {("small", "large", "queue_full"): 2}
        # No client got a 429.
        assert b"lmetric_refused_requests_total{" not in (await w.get("/metrics"))[1]
        w.engines[1].behave = hang
        further = [asyncio.create_task(w.post({"model": "large", "prompt": "x"}, headers=headers))]
        await w.engines[1].asked(3)
        status, _, refused = await w.post({"model": "small", "prompt": "x"}, headers=headers)
        assert (status, refused["error"]["code"]) == (429, "queue_full")
        line = b'lmetric_refused_requests_total{model="large",reason="queue",tenant="a"} 1.0'
        assert line in (await w.get("/metrics"))[1]
        for each in further:
            each.cancel()
        await asyncio.gather(*further, return_exceptions=True)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await w.settled()


async def test_a_client_that_leaves_before_the_fallback_ends_its_request() -> None:
    async with world(fakes(SMALL, LARGE, first=too_long(VLLM_TOO_LONG)), fallbacks=FALLBACKS) as w:
        w.engines[1].behave = hang
        asked = asyncio.create_task(w.post({"model": "small", "prompt": "x"}))
        await w.engines[1].asked(1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await w.until(lambda: w.engines[1].left)
        await w.settled()


async def test_a_stream_with_comments_of_the_router_continues_with_the_fallback() -> None:
    settings = {**SETTINGS, "forget_seconds": 1.5, "keep_alive_seconds": 0.1}
    caches = {"cache_blocks": 100, "text_block_bytes": 64}
    async with world(fakes(SMALL, LARGE), programs=settings, fallbacks=FALLBACKS, **caches) as w:
        assert (await w.post({"model": "small", "prompt": "one " * 1200}))[0] == 200
        w.engines[0].behave = too_long(VLLM_TOO_LONG)
        body = {"model": "small", "prompt": "two " * 1200, "stream": True}
        status, _, said = await w.post(body)
        assert status == 200
        assert said.startswith(b": held for 0 s\n\n")
        assert b'"text":"c"' in said
        assert said.endswith(b"data: [DONE]\n\n")
        assert await fallbacks(w) == {("small", "large", "context_length_exceeded"): 1}


async def test_a_tenants_rate_and_stored_responses_have_no_fallback() -> None:
    tenants = {"a": {"budgets": [{"counts": "requests", "limit": 1, "per": "hour"}]}}
    async with world(fakes(SMALL, LARGE), fallbacks=FALLBACKS, tenants=tenants) as w:
        body = {"model": "small", "input": "x"}
        for expected in (200, 429):
            assert (await w.post(body, path="/v1/responses", headers={"x-tenant": "a"}))[0] == expected
        assert (await w.post(body, path="/v1/responses"))[0] == 200
        stored = w.engines[0].requests[-1].json["request_id"]
        await w.engines[0].stop()
        more = {**body, "previous_response_id": stored}
        assert (await w.post(more, path="/v1/responses"))[0] in (502, 503)
        assert await fallbacks(w) == {}
        assert (await w.post(body, path="/v1/responses"))[0] == 200


async def test_a_stream_with_a_token_keeps_its_model() -> None:
    async def breaks(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(token("a")))
        await writer.drain()
        writer.transport.abort()
        return False

    async with world(fakes(SMALL, LARGE, first=breaks), fallbacks=FALLBACKS) as w:
        status, _, body = await w.post({"model": "small", "prompt": "x", "stream": True})
        assert status == 200
        assert b'"error"' in body
        assert not w.engines[1].requests


async def test_large_bodies_and_uploads_fall_back() -> None:
    form = (
        b'--cut\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\x00\xff\r\n'
        b'--cut\r\ncontent-disposition: form-data; name="model"\r\n\r\nmini\r\n--cut--\r\n'
    )
    async with world(fakes(SMALL, LARGE), fallbacks=FALLBACKS, aliases=ALIASES) as w:
        await w.engines[0].stop()
        for size in (10, 600_000):
            assert (await w.post({"prompt": "x" * size, "model": "small"}))[0] == 200
        assert [request.json["model"] for request in w.engines[1].requests] == ["large", "large"]
        w.engines[1].behave = answer_form
        head = {"content-type": "multipart/form-data; boundary=cut"}
        assert (await w.post(form, path="/v1/audio/transcriptions", headers=head))[0] == 200
        assert w.engines[1].requests[-1].body == form.replace(b"\r\nmini\r\n", b"\r\nlarge\r\n")


async def answer_form(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    writer.write(plain(200, {"text": "heard"}))
    return True


async def test_an_aliases_own_fallback_precedes_that_of_its_model_and_all_names_are_shown(
    tmp_path: Path,
) -> None:
    async with world(
        fakes(SMALL, LARGE, OTHER), fallbacks=FALLBACKS, aliases=ALIASES, records={"path": str(tmp_path)}
    ) as w:
        await w.engines[0].stop()
        for alias, instance in (("mixed", "e2"), ("mini", "e1")):
            status, headers, _ = await w.post({"model": alias, "prompt": "x"})
            assert (status, headers["x-lmetric-instance"]) == (200, instance)
            record = orjson.loads((await w.get(f"/debug/decisions/{headers['x-lmetric-decision']}"))[1])
            assert (record["alias"], record["fallback_from"]) == (alias, "small")
            assert record["fallback_reason"] == "no_engine"
            assert record["because"].endswith(
                f"; {alias} is an alias of small; small did not serve it (no_engine), and {record['model']} "
                "is a fallback."
            )
        w.server.front.live.tick(time.monotonic())
        live = orjson.loads((await w.get("/debug/live"))[1])["requests"]
        assert {(each["alias"], each["fallback_from"], each["model"]) for each in live} == {
            ("mixed", "small", "other"),
            ("mini", "small", "large"),
        }
        page = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_alias_requests_total{alias="mini",model="small"} 1' in page
    lines = [line for line in read_lines(tmp_path) if line["type"] == "request"]
    assert [(line["alias"], line["fallback_from"], line["model"]) for line in lines] == [
        ("mixed", "small", "other"),
        ("mini", "small", "large"),
    ]
    assert {line["fallback_reason"] for line in lines} == {"no_engine"}


async def test_names_that_only_a_fallback_serves_stand_in_the_list_of_models() -> None:
    async with world(fakes(LARGE), fallbacks={"gone": "large", "lost": "missing"}) as w:
        cards = {card["id"]: card for card in orjson.loads((await w.get("/v1/models"))[1])["data"]}
        assert list(cards) == ["large", "gone"]
        assert cards["gone"] | {"id": "large", "root": "/large"} == cards["large"]
        assert orjson.loads((await w.get("/v1/models/gone"))[1]) == cards["gone"]
        problems = orjson.loads((await w.get("/ready"))[1])["warnings"]
        found = [each["reason"] for each in problems if each["what"] == "fallback"]
        assert found == ["gone: no engine serves gone", "lost: no engine serves lost, missing"]


async def test_a_tenants_list_limits_its_fallbacks() -> None:
    tenants = {"a": {"models": ["small", "other"]}, "b": {"models": ["small"]}}
    async with world(fakes(SMALL, LARGE, OTHER), fallbacks=FALLBACKS, tenants=tenants) as w:
        await w.engines[0].stop()
        body = {"model": "small", "prompt": "x"}
        status, headers, _ = await w.post(body, headers={"x-tenant": "a"})
        assert (status, headers["x-lmetric-instance"]) == (200, "e2")
        assert (await w.post(body, headers={"x-tenant": "b"}))[0] in (502, 503)
        assert (await w.post(body))[1]["x-lmetric-instance"] == "e1"


@pytest.mark.parametrize("before", [{"gone": "large"}, {}], ids=["others", "none"])
async def test_a_reload_replaces_the_fallbacks(before: dict[str, str]) -> None:
    async with world(fakes(LARGE), fallbacks=before) as w:
        values = w.server.fleet.config.model_dump(exclude_unset=True)
        assert (await w.post({"model": "gone", "prompt": "x"}))[0] == (200 if before else 404)
        config = ServerConfig.model_validate({**values, "fallbacks": {"new": "large"}})
        await Reloads(w.server, lambda: config).reload()
        assert (await w.post({"model": "gone", "prompt": "x"}))[0] == 404
        assert (await w.post({"model": "new", "prompt": "x"}))[0] == 200


@pytest.mark.parametrize(
    ("fallbacks", "said"),
    [
        ({"m": ["m"]}, "fallbacks.m: it leads back to 'm'; expected other models"),
        ({"one": ["m"]}, "fallbacks.one: it leads back to 'm'; expected other models"),
        ({"m": ["one"]}, "fallbacks.m: it names the alias 'one'; expected names of models"),
        ({"m": ["x", "y", "x"]}, "fallbacks.m: it names 'x' twice; remove one"),
        ({"m": []}, "at least 1 item"),
        ({"m": ""}, "at least 1 character"),
    ],
)
def test_what_cannot_be_a_fallback(fallbacks: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig(aliases={"one": "m"}, fallbacks=fallbacks)


async def test_a_request_that_falls_back_is_charged_once() -> None:
    tenants = {"alice": {"budgets": [{"counts": "requests", "limit": 2, "per": "hour"}]}}
    refuses, asked, alice = too_long(VLLM_TOO_LONG), {"model": "small", "prompt": "x"}, {"x-tenant": "alice"}
    async with world(fakes(SMALL, LARGE, first=refuses), fallbacks=FALLBACKS, tenants=tenants) as w:
        for left in (1, 0):
            status, headers, _ = await w.post(asked, headers=alice)
            assert (status, headers["x-ratelimit-remaining-requests"]) == (200, f"{left}")
        assert (await w.post(asked, headers=alice))[0] == 429
        assert await fallbacks(w) == {("small", "large", "context_length_exceeded"): 2}
