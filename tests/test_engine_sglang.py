"""The stand-in for SGLang over real sockets: what of its protocol the router and doctor use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio

from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.emulated.sglang import sglang_message

SAMPLE = json.loads((Path(__file__).parent / "samples" / "sglang-0.5.23.json").read_text())


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def options(**changes: Any) -> EngineOptions:
    given = {
        "port": 0,
        "api": "sglang",
        "clock_speed": 100.0,
        "kv_events_endpoint": "tcp://*:0",
        "load_publish_endpoint": "tcp://*:0",
        "kv_events_topic": "kv",
    }
    return EngineOptions.model_validate(given | changes)


async def get(url: str, path: str) -> Any:
    async with aiohttp.ClientSession() as http, http.get(url + path) as response:
        return response.status, await response.read()


async def post(url: str, body: Any, path: str = "/v1/completions") -> Any:
    async with aiohttp.ClientSession() as http, http.post(url + path, json=body) as response:
        return response.status, await response.json(), response.headers


def listen(context: zmq.asyncio.Context, port: int, topic: bytes) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.setsockopt(zmq.RCVTIMEO, 3000)
    socket.connect(f"tcp://127.0.0.1:{port}")
    return socket


async def test_pages_have_the_fields_of_the_sample() -> None:
    async with EngineServer(options(kv_events_replay_endpoint="tcp://*:0")) as engine:
        for path in ("/v1/models", "/model_info", "/server_info", "/v1/loads?include=core"):
            status, body = await get(engine.url, path)
            ours, theirs = json.loads(body), json.loads(SAMPLE["pages"][path])
            assert status == 200
            assert ours.keys() <= theirs.keys(), path
            if path == "/server_info":
                assert ours["kv_events"].keys() == theirs["kv_events"].keys()
                assert "+lmetric." in ours["version"]
            if "loads" in path:
                assert ours["loads"][0].keys() <= theirs["loads"][0].keys()
        names = {line.split("{")[0] for line in SAMPLE["pages"]["/metrics"].splitlines() if line[0] != "#"}
        page = (await get(engine.url, "/metrics"))[1].decode()
        assert names <= {line.split("{")[0] for line in page.splitlines()}
        assert "vllm:" not in page
        for path in ("/version", "/kv_event_sources", "/load"):
            assert (await get(engine.url, path))[0] == 404, path
        status, error, _ = await post(engine.url, {"prompt": [1], "model": "other"})
        assert (status, error["object"], error["code"]) == (404, "error", 404)
        status, _, headers = await post(engine.url, {"prompt": [1], "max_tokens": 1})
        assert (status, "X-Request-Id" in headers) == (200, False)
    silent = options(kv_events=False, load_publish_endpoint=None, cached_tokens=False, metrics=False)
    async with EngineServer(silent) as engine:
        info = json.loads((await get(engine.url, "/server_info"))[1])
        assert (info["kv_events"], info["enable_cache_report"]) == (None, False)
        _, answer, _ = await post(engine.url, {"prompt": [1], "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"] is None
        assert (await get(engine.url, "/metrics"))[0] == 404


async def test_events_have_signed_hashes_and_the_salt_beside_them(context: zmq.asyncio.Context) -> None:
    async with EngineServer(options()) as engine:
        block = json.loads((await get(engine.url, "/server_info"))[1])["kv_events"]
        assert block["endpoint_host"] == "*"
        socket = listen(context, block["endpoint_port_base"], b"kv")
        hashes: list[int] = []
        for number in range(200):
            await post(engine.url, {"prompt": [number] * 33, "max_tokens": 1, "cache_salt": "tenant"})
            while await socket.poll(20):
                topic, sequence, payload = await socket.recv_multipart()
                _, [event], rank = msgpack.unpackb(payload)
                assert (topic, len(sequence), rank) == (b"kv", 8, 0)
                assert event.keys() <= SAMPLE["events"][1][2][1][0].keys()
                assert (event["cache_salt"], event["block_size"], event["medium"]) == ("tenant", 16, "GPU")
                assert len(event["token_ids"]) == 16 * len(event["block_hashes"])
                hashes += event["block_hashes"]
            if len(hashes) > 20:
                break
        assert all(-(2**63) <= one < 2**63 for one in hashes)
        assert any(one < 0 for one in hashes)
    assert sglang_message(("removed", "GPU", 2**64 - 9), 16) == {
        "type": "BlockRemoved",
        "block_hashes": [-9],
        "medium": "GPU",
    }


async def test_load_is_pushed_when_it_changes_and_every_second(context: zmq.asyncio.Context) -> None:
    async with EngineServer(options(clock_speed=1.0, max_sequences=1)) as engine:
        block = json.loads((await get(engine.url, "/server_info"))[1])["kv_events"]
        socket = listen(context, block["load_endpoint_port_base"], block["load_topic"].encode())

        async def stat() -> list[Any]:
            topic, _, payload = await socket.recv_multipart()
            assert topic == b"load"
            value = msgpack.unpackb(payload)
            assert len(value) == len(SAMPLE["load"][0][2])
            return list(value)

        assert (await stat())[:3] == ["LoadStat", 0, 0]
        body = {"prompt": [5] * 40, "max_tokens": 200}
        running = [asyncio.create_task(post(engine.url, body)) for _ in range(3)]
        while (now := await stat())[:3] != ["LoadStat", 1, 2]:
            assert now[4] == block["block_size"] * int(now[4] / block["block_size"])
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_higher_priority_runs_first() -> None:
    async with EngineServer(options(clock_speed=1.0, max_sequences=1, order="priority")) as engine:
        ended: list[int] = []

        async def ask(priority: int, max_tokens: int) -> None:
            body = {"prompt": [7] * 20, "max_tokens": max_tokens, "priority": priority}
            await post(engine.url, body)
            ended.append(priority)

        # The first runs for three seconds; meanwhile the others queue.
        asks = [asyncio.create_task(ask(0, 300))]
        await asyncio.sleep(0.05)
        asks += [asyncio.create_task(ask(priority, 2)) for priority in (1, 9)]
        await asyncio.gather(*asks)
        assert ended == [0, 9, 1]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (64, 1, "The input (64 tokens) is longer than the model's context length (64 tokens)."),
        (60, 5, "Requested token count exceeds the model's maximum context length of 64 tokens"),
    ],
)
async def test_a_prompt_and_an_answer_that_are_too_long(prompt: int, max_tokens: int, message: str) -> None:
    """SGLang refuses what vLLM cuts."""
    async with EngineServer(options(max_model_len=64)) as engine:
        status, answer, _ = await post(engine.url, {"prompt": [7] * prompt, "max_tokens": max_tokens})
    assert status == 400
    assert message in answer["message"]


def test_only_sglang_pushes_its_load() -> None:
    with pytest.raises(ValueError, match="only with api sglang"):
        EngineOptions(load_publish_endpoint="tcp://*:0")
