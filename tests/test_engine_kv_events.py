"""The emulated engine's KV events over real ZMQ sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio

from lmetric_lab.emulated import EngineOptions, EngineServer

END = (2**64 - 1).to_bytes(8, "big")


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def options(**changes: Any) -> EngineOptions:
    given: dict[str, Any] = {
        "port": 0,
        "clock_speed": 100.0,
        "kv_events_endpoint": "tcp://*:0",
        "kv_events_topic": "kv@e0",
    }
    return EngineOptions(**(given | changes))


async def complete(url: str, prompt: list[int], max_tokens: int = 1, **body: Any) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http:
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **body}
        async with http.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200
            return dict(await response.json())


def subscribe(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    socket.setsockopt(zmq.RCVTIMEO, 3000)
    return socket


async def connected(context: zmq.asyncio.Context, server: EngineServer) -> zmq.asyncio.Socket:
    """A subscriber that is sure to hear: it asked until something came."""
    socket = subscribe(context)
    endpoint = server.description()["kv_events_endpoint"]
    socket.connect(endpoint.replace("*", "127.0.0.1"))
    for attempt in range(50):
        await complete(server.url, [2000 + attempt] * 17)
        if await socket.poll(50):
            break
    while await socket.poll(50):
        await socket.recv_multipart()
    return socket


async def batch(socket: zmq.asyncio.Socket) -> tuple[int, list[dict[str, Any]]]:
    topic, sequence, payload = await socket.recv_multipart()
    assert topic == b"kv@e0"
    assert len(sequence) == 8
    moment, events, rank = msgpack.unpackb(payload)
    assert moment > 1.7e9
    assert rank == 0
    return int.from_bytes(sequence, "big"), events


async def test_stored_blocks_name_hashes_tokens_and_parents(context: zmq.asyncio.Context) -> None:
    async with EngineServer(options()) as server:
        socket = await connected(context, server)
        prompt = list(range(100, 140))
        answer = await complete(server.url, prompt, 30)
        sequence, [event] = await batch(socket)
        assert event == {
            "type": "BlockStored",
            "block_hashes": event["block_hashes"],
            "parent_block_hash": None,
            "token_ids": prompt[:32],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        assert len(event["block_hashes"]) == 2
        # Blocks that fill up while tokens are made follow, each behind the one before.
        tokens = prompt + answer["choices"][0]["token_ids"]
        parent = event["block_hashes"][1]
        for number in (2, 3):
            following, [event] = await batch(socket)
            assert (following, event["parent_block_hash"]) == (sequence + number - 1, parent)
            assert event["token_ids"] == tokens[16 * number : 16 * number + 16]
            [parent] = event["block_hashes"]
        # The next turn reuses all four, and tells only what is new.
        answer = await complete(server.url, [*tokens, *range(10)])
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
        _, [event] = await batch(socket)
        assert event["parent_block_hash"] == parent
        # A salt starts another chain, and is named where it starts.
        await complete(server.url, prompt, cache_salt="tenant")
        _, [event] = await batch(socket)
        assert event["extra_keys"] == [["tenant"], None]


async def test_a_cached_prefix_is_told_again_where_asked_for(context: zmq.asyncio.Context) -> None:
    async with EngineServer(options()) as server:
        socket = await connected(context, server)
        prompt = list(range(100, 140))
        await complete(server.url, prompt)
        _, [stored] = await batch(socket)
        await complete(server.url, prompt)
        await complete(server.url, prompt, vllm_xargs={"kv_cache_report_mode": "full"})
        _, [again] = await batch(socket)
        assert again == stored
        assert not await socket.poll(50)


async def test_evictions_come_before_what_they_made_room_for(context: zmq.asyncio.Context) -> None:
    async with EngineServer(options(cache_blocks=5)) as server:
        socket = await connected(context, server)
        await complete(server.url, list(range(100, 164)))
        _, events = await batch(socket)
        stored = events[-1]["block_hashes"]
        # Three of five blocks: the one left over, then two of those, leaf first.
        await complete(server.url, list(range(200, 248)))
        _, events = await batch(socket)
        assert [event["block_hashes"] for event in events[-3:-1]] == [[stored[3]], [stored[2]]]
        assert [event["type"] for event in events[-3:]] == ["BlockRemoved", "BlockRemoved", "BlockStored"]
        async with aiohttp.ClientSession() as http, http.post(f"{server.url}/reset_prefix_cache") as response:
            assert response.status == 200
        assert not await socket.poll(100)  # events leave only when a step runs
        await complete(server.url, list(range(200, 248)))
        _, events = await batch(socket)
        assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]


async def test_replay_plays_past_batches_from_a_number_on(context: zmq.asyncio.Context) -> None:
    changes = {"kv_events_replay_endpoint": "tcp://127.0.0.1:0", "kv_events_buffer_steps": 4}
    async with EngineServer(options(**changes)) as server:
        for number in range(6):
            await complete(server.url, [number] * 20)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 3000)
        socket.connect(server.description()["kv_events_replay_endpoint"])
        for first, expected in [(4, [4, 5]), (0, [2, 3, 4, 5]), (9, [])]:  # the buffer holds four
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            played = []
            while (frames := await socket.recv_multipart())[2] != END:
                assert frames[:2] == [b"", b"kv@e0"]
                played.append(int.from_bytes(frames[2], "big"))
                [event] = msgpack.unpackb(frames[3])[1]
                assert event["token_ids"] == [played[-1]] * 16
            assert frames == [b"", b"", END, b""]
            assert played == expected


async def test_an_endpoint_without_a_wildcard_is_connected_to(context: zmq.asyncio.Context) -> None:
    socket = subscribe(context)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    async with EngineServer(options(kv_events_endpoint=f"tcp://127.0.0.1:{port}")) as server:
        for attempt in range(50):
            await complete(server.url, [100 + attempt] * 17)
            if await socket.poll(50):
                break
        _, [event] = await batch(socket)
        assert event["type"] == "BlockStored"


async def test_ipc_and_self_discovery(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/kv"
    async with EngineServer(options(kv_events_endpoint=endpoint)) as server:
        socket = await connected(context, server)
        await complete(server.url, [7] * 17)
        assert (await batch(socket))[1][0]["token_ids"] == [7] * 16
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/kv_event_sources") as response:
            source = (await response.json())["0"]
        assert source == {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": None, "topic": "kv@e0"}
