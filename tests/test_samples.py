"""The protocol samples through the real event feed: ZMQ in, what the router knows out."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

import lmetric as lm
from lmetric._core import EventFeed
from waiting import until_threads as until

SAMPLES = Path(__file__).parent / "samples"


@contextmanager
def publisher() -> Iterator[tuple[str, Callable[[Any], None]]]:
    """An endpoint, and what sends the frames of a sample there."""
    context = zmq.Context()
    socket = context.socket(zmq.XPUB)  # which sees subscriptions
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    subscribed: list[bytes] = []

    def send(sample: Any) -> None:
        if not subscribed:  # what is sent before is for nobody
            assert socket.poll(10_000), "nobody subscribed"
            subscribed.append(socket.recv())
        topic, sequence, payload = sample
        socket.send_multipart((topic.encode(), sequence.to_bytes(8, "big"), msgpack.packb(payload)))

    try:
        yield f"tcp://127.0.0.1:{port}", send
    finally:
        context.destroy(linger=0)


@contextmanager
def hearing(block_size: int, endpoint: str, topic: str) -> Iterator[tuple[lm.Router, EventFeed]]:
    router = lm.Router("lmetric", block_size=block_size)
    router.add_instance("e0")
    router.update_instance("e0", kv_source="exact")
    with EventFeed(router) as feed:
        feed.subscribe("e0", endpoint, topic=topic)
        until(lambda: feed.status("e0")[0]["connected"])
        yield router, feed


def held(router: lm.Router, tokens: list[int], **domain: str) -> int:
    return int(router.cached_tokens(lm.Request(token_ids=array("I", [*tokens, 1]), **domain))[0])


def test_vllm_events() -> None:
    events = json.loads((SAMPLES / "vllm-0.32.0.json").read_text())["events"]
    topic, [stored] = events[0][0], events[0][2][1]
    tokens = stored["token_ids"]
    with publisher() as (endpoint, send), hearing(32, endpoint, topic) as (router, feed):
        send(events[0])
        until(lambda: held(router, tokens) == 96)
        assert held(router, tokens, cache_salt="tenantA") == 0
        send(events[1])
        until(lambda: held(router, tokens, cache_salt="tenantA") == 96)
        send(events[2])  # the same again, on request: no further copies of the blocks
        removed = {"type": "BlockRemoved", "block_hashes": stored["block_hashes"][2:], "medium": "GPU"}
        send([topic, 3, [0.0, [removed], 0]])
        until(lambda: held(router, tokens) == 64)
        status = feed.status("e0")[0]
        assert (status["batches"], status["gaps"], status["skipped"]) == (4, 0, {})
        assert status["block_size"] == 32


def test_predicted_hits_equal_those_of_vllm_0_33() -> None:
    """Replays events and hits of its own KV cache manager. With a drafter, a hash also covers the
    token behind its block, so predictions are too high by up to a block."""
    models = msgpack.unpackb((SAMPLES / "vllm-0.33.0-groups.msgpack").read_bytes())
    for (name, size, steps), above in zip(models, (0, 16), strict=True):
        total = high = 0
        with publisher() as (endpoint, send), hearing(size, endpoint, "") as (router, feed):
            for sequence, (prompt, hit, payload) in enumerate(steps):
                request = lm.Request(token_ids=array("I", prompt))
                predicted = int(router.cached_tokens(request)[0])
                # vLLM computes at least one token.
                predicted = min(predicted, (len(prompt) - 1) // size * size)
                assert hit <= predicted <= hit + above, (name, sequence)
                total, high = total + hit, high + (predicted > hit)
                batch = msgpack.unpackb(payload)
                stored = [each for each in batch[1] if each["type"] == "BlockStored"]
                assert all(("lookahead_token_ids" in each) == (above > 0) for each in stored)
                send(["", sequence, batch])
                until(lambda: feed.status("e0")[0]["last_sequence"] == sequence)  # noqa: B023
            status = feed.status("e0")[0]
        assert total > 1000
        assert (high > 0) == (above > 0)
        assert status["blocks_removed"] > 0
        assert (status["skipped"], status["unknown_parent"], status["gaps"]) == ({}, 0, 0)


def test_sglang_events() -> None:
    plain, salted, adapted, moved, cleared = json.loads((SAMPLES / "sglang-0.5.23.json").read_text())[
        "events"
    ]
    tokens = [11, 12, 13, 14, 15, 16, 17, 18]
    with publisher() as (endpoint, send), hearing(4, endpoint, "kv") as (router, feed):
        send(plain)
        until(lambda: held(router, tokens) == 4)
        send(salted)
        until(lambda: held(router, tokens, cache_salt="tenant") == 8)
        send(adapted)
        until(lambda: held(router, tokens) == 8)
        assert held(router, tokens, lora_name="sql") == 4
        send(moved)
        until(lambda: held(router, tokens, cache_salt="tenant") == 0)
        status = feed.status("e0")[0]
        assert status["tiers"] == {"CPU": 1}
        assert held(router, tokens) == 8  # a copy elsewhere takes none away
        send(cleared)
        until(lambda: held(router, tokens) == 0)
        status = feed.status("e0")[0]
        assert (status["batches"], status["gaps"], status["cleared"]) == (5, 0, 1)
        assert (status["blocks_removed"], status["unknown_parent"], status["skipped"]) == (2, 0, {})


def test_predicted_hits_equal_those_of_sglangs_radix_cache() -> None:
    """Replays what SGLang's own cache and publisher sent, against the hits that it found."""
    page, steps = msgpack.unpackb((SAMPLES / "sglang-0.5.23-radix.msgpack").read_bytes())
    hits: dict[str | None, int] = {None: 0, "tenant": 0}
    with publisher() as (endpoint, send), hearing(page, endpoint, "kv") as (router, feed):
        for step, (prompt, salt, hit, frames) in enumerate(steps):
            request = lm.Request(token_ids=array("I", prompt), cache_salt=salt)
            predicted = int(router.cached_tokens(request)[0])
            # SGLang computes at least one token.
            assert min(predicted, (len(prompt) - 1) // page * page) == hit, (step, salt)
            hits[salt] += hit
            if frames:
                topic, sequence, payload = frames
                number = int.from_bytes(sequence, "big")
                send([topic.decode(), number, msgpack.unpackb(payload)])
                until(lambda: feed.status("e0")[0]["last_sequence"] == number)  # noqa: B023
        status = feed.status("e0")[0]
    assert min(hits.values()) > 400
    assert status["blocks_removed"] > 100
    assert (status["skipped"], status["unknown_parent"], status["gaps"]) == ({}, 0, 0)


def test_sglang_load() -> None:
    [stat] = json.loads((SAMPLES / "sglang-0.5.23.json").read_text())["load"]
    with publisher() as (endpoint, send):
        router = lm.Router("lmetric")
        router.add_instance("e0")
        with EventFeed(router) as feed:
            feed.subscribe_load("e0", endpoint, topic="load")
            until(lambda: feed.load_status("e0")["connected"])
            send(stat)
            until(lambda: router.indicators()["reported_waiting"][0] == 2)
            assert router.indicators()["reported_running"][0] == 3
            assert router.indicators()["kv_usage"][0] == 13107 / 131072
