"""Engines' KV cache events over real ZMQ sockets: from the wire into the index."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import zmq

import lmetric as lm
from lmetric._core import EventFeed
from lmetric_lab.emulated import EngineOptions, EngineServer
from waiting import PATIENCE_SECONDS, until_threads

END = (2**64 - 1).to_bytes(8, "big")
BLOCK = 16


def until(condition: Callable[[], object], *engines: Publisher) -> None:
    """Waits for what another thread is about to do, while engines answer what they are asked."""

    def looked() -> object:
        for engine in engines:
            engine.answer()
        return condition()

    until_threads(looked)


def stored(hashes: list[Any], tokens: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return event | more


def removed(*hashes: Any, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


class Publisher:
    """An engine's publisher, which can be made to lose batches and to die."""

    def __init__(
        self, endpoint: str = "tcp://127.0.0.1:*", *, replay: bool = True, topic: str = "", keep: int = 10_000
    ) -> None:
        self.context = zmq.Context()
        self.topic, self.keep = topic.encode(), keep
        self.pub = self.context.socket(zmq.XPUB)  # which sees subscriptions
        self.subscriptions: list[bytes] = []
        self.pub.set_hwm(100_000)
        if endpoint.startswith("connect "):
            self.pub.connect(endpoint.removeprefix("connect "))
        else:
            self.pub.bind(endpoint)
        self.endpoint = self.pub.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.past: list[tuple[int, bytes]] = []
        self.next = 0
        self.clock: Callable[[], float] = time.time
        self.asked: list[int] = []
        self.router: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if replay:
            self.serve("tcp://127.0.0.1:*")

    def serve(self, endpoint: str) -> None:
        self.router = self.context.socket(zmq.ROUTER)
        self.router.set_hwm(0)
        self.router.bind(endpoint)
        self.replay_endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def publish(self, *events: Any, lose: bool = False) -> None:
        payload = msgpack.packb([self.clock(), list(events), 0])
        self.past = [*self.past, (self.next, payload)][-self.keep :]
        if not lose:
            self.pub.send_multipart((self.topic, self.next.to_bytes(8, "big"), payload))
        self.next += 1

    def heard(self) -> bool:
        """Whether somebody has subscribed to its topic: what was published before is lost.

        A router may know of the connection before the engine knows of the subscription.
        """
        while self.pub.poll(0):
            self.subscriptions.append(self.pub.recv())
        return any(s[:1] == b"\x01" and self.topic.startswith(s[1:]) for s in self.subscriptions)

    def answer(self) -> None:
        """Serves the replays that were asked for."""
        while self.router is not None and self.router.poll(0):
            client, _, start = self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for number, payload in self.past:
                if number >= self.asked[-1]:
                    self.router.send_multipart((client, b"", self.topic, number.to_bytes(8, "big"), payload))
            self.router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def publisher(*args: Any, **options: Any) -> Iterator[Publisher]:
    engine = Publisher(*args, **options)
    try:
        yield engine
    finally:
        engine.close()


class Bed:
    """A router of two instances and its feed."""

    def __init__(self) -> None:
        self.router = lm.Router(kv_source="exact", block_size=BLOCK, seed=1)
        for name in ("e0", "e1"):
            self.router.add_instance(name)
        self.feed = EventFeed(self.router)

    def held(self, tokens: list[int], name: str = "e0", **of: Any) -> int:
        """Blocks of the prompt that the instance holds from its front on."""
        prompt = np.array([*tokens, 0], dtype=np.uint32)
        hits = self.router.cached_tokens(lm.Request(token_ids=prompt, **of))
        return int(hits[self.router.instances().index(name)]) // BLOCK

    def status(self, name: str = "e0", rank: int = 0) -> dict[str, Any]:
        return self.feed.status(name)[rank]

    def subscribe(self, engine: Publisher, name: str = "e0", **options: Any) -> None:
        given: dict[str, Any] = {"replay_endpoint": engine.replay_endpoint}
        self.feed.subscribe(name, engine.endpoint, **(given | options))

    def settle(self, engine: Publisher, state: str, name: str = "e0") -> None:
        """Waits for a state, and until every published event has arrived."""

        def settled() -> bool:
            status = self.status(name)
            return engine.heard() and (status["state"], status["last_sequence"]) == (
                state,
                engine.next - 1 if engine.next else None,
            )

        until(settled, engine)


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.feed.close()


def test_blocks_of_the_wire_reach_the_index(bed: Bed) -> None:
    tokens = list(range(100, 164))
    with publisher() as engine:
        bed.subscribe(engine)
        assert bed.status()["state"] == "connecting"
        bed.settle(engine, "live")  # nothing was published so far, and silence is no death
        engine.publish(stored([1, 2], tokens[:32]))
        # Signed numbers, and digests. Only the last 8 bytes of a digest count.
        engine.publish(stored([-5], tokens[32:48], parent=2))
        engine.publish(stored([bytes(24) + b"\xff" * 8], tokens[48:], parent=(-5) % 2**64))
        bed.settle(engine, "live")
        assert bed.held(tokens) == 4
        engine.publish(removed(2**64 - 1), ["BlockRemoved", [-5], "GPU"])
        bed.settle(engine, "live")
        assert (bed.held(tokens), bed.held(tokens, "e1")) == (2, 0)
        engine.publish(CLEARED, stored([7], tokens[:16]))
        bed.settle(engine, "live")
        assert bed.held(tokens) == 1
        status = bed.status()
        assert status["last_batch_age_seconds"] < 5
        counted = {"batches": 5, "events": 7, "blocks_stored": 5, "blocks_removed": 2, "cleared": 1}
        at_rest = {"gaps": 0, "resyncs": 0, "restarts": 0, "unknown_parent": 0, "skipped": {}}
        expected = counted | at_rest | {"block_size": 16, "reported_rank": 0, "connected": True}
        assert {key: status[key] for key in expected} == expected


def test_what_was_published_before_is_asked_for(bed: Bed) -> None:
    tokens = list(range(64))
    with publisher() as engine:
        engine.publish(stored([1, 2], tokens[:32]))
        bed.subscribe(engine)
        engine.publish(stored([3], tokens[32:48], parent=2))
        bed.settle(engine, "live")
        assert bed.held(tokens) == 3
        assert engine.asked[0] == 0
    # A publisher that keeps less than it sent: a part is known, and known to be a part.
    with publisher(keep=2) as engine:
        for number in range(5):
            engine.publish(stored([10 + number], [number] * BLOCK))
        bed.subscribe(engine, "e1")
        bed.settle(engine, "incomplete", "e1")
        assert [bed.held([n] * BLOCK, "e1") for n in range(5)] == [0, 0, 0, 1, 1]
        # A cleared cache is known again.
        engine.publish(CLEARED)
        bed.settle(engine, "live", "e1")
        assert bed.held([4] * BLOCK, "e1") == 0


def test_what_is_published_before_the_subscription_arrives_is_asked_for(bed: Bed) -> None:
    tokens = list(range(64))
    with publisher() as engine:
        engine.publish(stored([1], tokens[:16]))
        bed.subscribe(engine)
        bed.settle(engine, "live")
        # The replay is over, this event gets lost, and the engine sends no later event.
        engine.publish(stored([2], tokens[16:32], parent=1), lose=True)
        bed.settle(engine, "live")
        assert bed.held(tokens) == 2
        status = bed.status()
        assert (status["gaps"], status["restarts"], status["replayed"]) == (0, 0, 2)


def test_lost_batches_are_played_again(bed: Bed) -> None:
    tokens = list(range(64))
    with publisher() as engine:
        bed.subscribe(engine)
        bed.settle(engine, "live")
        engine.publish(stored([1], tokens[:16]))
        bed.settle(engine, "live")
        for block in (2, 3):
            engine.publish(stored([block], tokens[16 * block - 16 : 16 * block], parent=block - 1), lose=True)
        engine.publish(stored([4], tokens[48:], parent=3))
        bed.settle(engine, "live")
        assert bed.held(tokens) == 4
        status = bed.status()
        assert (status["gaps"], status["resyncs"], status["replayed"]) == (1, 0, 3)


def test_batches_lost_for_good_leave_nothing_that_may_be_wrong(bed: Bed) -> None:
    tokens = list(range(64))
    with publisher(replay=False) as engine:
        bed.subscribe(engine)
        until(lambda: engine.heard() and bed.status()["connected"])
        assert bed.status()["state"] == "incomplete"  # nobody can say what was stored before
        engine.publish(stored([1, 2], tokens[:32]))
        bed.settle(engine, "live")  # number 0: nothing was
        engine.publish(removed(2), lose=True)
        engine.publish(stored([9], [9] * BLOCK), stored([3], tokens[32:48], parent=2))
        bed.settle(engine, "incomplete")
        assert (bed.held(tokens), bed.held([9] * BLOCK)) == (0, 1)
        status = bed.status()
        assert (status["gaps"], status["resyncs"], status["unknown_parent"]) == (1, 1, 1)
        # A full report of a reused prefix refills it, however often it comes.
        for _ in range(3):
            engine.publish(stored([1, 2], tokens[:32]))
        engine.publish(removed(2))
        bed.settle(engine, "incomplete")
        assert bed.held(tokens) == 1


@pytest.mark.parametrize("replay", [True, False])
def test_a_restarted_engine_has_an_empty_cache(bed: Bed, replay: bool) -> None:
    tokens = list(range(64))
    with publisher(replay=replay) as engine:
        bed.subscribe(engine)
        until(lambda: engine.heard() and bed.status()["connected"], engine)
        for block in range(1, 4):
            engine.publish(stored([block], tokens[16 * block - 16 : 16 * block], parent=block - 1 or None))
        bed.settle(engine, "live")
        assert bed.held(tokens) == 3
        endpoints = engine.endpoint, engine.replay_endpoint
    until(lambda: not bed.status()["connected"])
    with publisher(endpoints[0], replay=False) as engine:
        # The same numbers before the router reconnects: only replay shows the new process.
        for block in range(1, 4):
            engine.publish(stored([block], [block] * BLOCK))
        if replay:
            engine.serve(str(endpoints[1]))
        until(lambda: engine.heard() and bed.status()["connected"], engine)
        engine.publish(stored([4], [4] * BLOCK))
        bed.settle(engine, "live" if replay else "incomplete")
        assert bed.held(tokens) == 0
        assert [bed.held([n] * BLOCK) for n in range(1, 5)] == ([1, 1, 1, 1] if replay else [0, 0, 0, 1])
        assert bed.status()["restarts" if replay else "resyncs"] == 1


def test_engines_that_connect_are_told_apart_by_topic(bed: Bed) -> None:
    with publisher() as one:
        port = int(one.endpoint.rpartition(":")[2])
    endpoint = f"tcp://127.0.0.1:{port}"
    names = ["e0", "e1"]
    for name in names:
        bed.feed.subscribe(name, endpoint, topic=f"kv@{name}", bind=True)
    bed.router.add_instance("e2")
    with pytest.raises(lm.BadValueError, match="topic for each engine"):
        bed.feed.subscribe("e2", endpoint, topic="kv@e0", bind=True)
    with (
        publisher(f"connect {endpoint}", replay=False, topic="kv@e0") as e0,
        publisher(f"connect {endpoint}", replay=False, topic="kv@e1") as e1,
        publisher(f"connect {endpoint}", replay=False, topic="kv@stranger") as stranger,
    ):
        until(lambda: bed.status("e1")["connections"] == 3)
        until(lambda: e0.heard() and e1.heard() and stranger.heard())
        stranger.publish(stored([1], [9] * BLOCK))
        e0.publish(stored([1], [0] * BLOCK))
        e1.publish(stored([1], [1] * BLOCK))
        bed.settle(e0, "live", "e0")
        bed.settle(e1, "live", "e1")
        until(lambda: bed.status()["skipped"].get("other_topic") == 1)
        assert bed.status()["other_topic"] == "kv@stranger"
        assert [[bed.held([n] * BLOCK, name) for n in (0, 1, 9)] for name in names] == [[1, 0, 0], [0, 1, 0]]
    until(lambda: not bed.status()["connected"])


def test_strangers_at_a_bound_port_end_no_connection(bed: Bed) -> None:
    """rust 7.12: connections without ZMTP's handshake do not mark engines as lost."""
    with zmq.Context() as context, context.socket(zmq.SUB) as one:
        port = one.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    bed.feed.subscribe("e0", endpoint, topic="kv@e0", bind=True)
    with publisher(f"connect {endpoint}", replay=False, topic="kv@e0") as engine:
        until(lambda: engine.heard() and bed.status()["connected"])
        engine.publish(stored([1], [1] * BLOCK))
        bed.settle(engine, "live")
        for bytes_sent in (
            b"",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            bytes(200),
            b"\xff" * 64,
            b"\x16\x03\x01",
        ):
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(bytes_sent)
                    stranger.shutdown(socket.SHUT_WR)
                    with contextlib.suppress(OSError):
                        while stranger.recv(100):
                            pass
        # The thread has seen all of it when it answers.
        bed.feed.subscribe("e1", endpoint, topic="kv@e1", bind=True)
        assert bed.status("e1")["connected"], "an engine is connected to the address"
        engine.publish(stored([2], [2] * BLOCK, parent=1))
        bed.settle(engine, "live")
        status = bed.status()
        assert (status["connected"], status["connections"], status["resyncs"]) == (True, 1, 0)
    until(lambda: not bed.status()["connected"])


def test_a_message_that_is_too_large_costs_its_own_engine_its_events(bed: Bed) -> None:
    """security F5: at most 4 MiB; only this engine is ignored, and the reason is shown."""
    assert EventFeed.MAX_MESSAGE_BYTES == 4 << 20
    assert EventFeed.MAX_SOURCE_BYTES <= 100 << 20
    with publisher(replay=False) as bad, publisher() as good:
        bed.subscribe(bad)
        bed.subscribe(good, "e1")
        until(lambda: bad.heard() and bed.status()["connected"])
        bad.publish(stored([1], [1] * BLOCK))
        bed.settle(bad, "live")
        bad.publish(bytes(EventFeed.MAX_MESSAGE_BYTES))
        until(lambda: bed.status()["over_limit"])
        assert "more than 4194304 bytes" in bed.status()["over_limit"]
        assert (bed.status()["state"], bed.held([1] * BLOCK)) == ("incomplete", 0)
        good.publish(stored([1], [1] * BLOCK))
        bed.settle(good, "live", "e1")
        assert bed.status("e1")["over_limit"] is None


def test_blocks_match_prompts_with_the_same_images_at_the_same_places(bed: Bed) -> None:
    """Extra keys as vLLM sends them: adapter, images (identity, offset from the block), salt."""
    tokens = list(range(64))
    cat, dog = ("cat", 10, 20), ("dog", 30, 3)
    of_blocks = [[["cat", 10]], [["cat", -6], ["dog", 14]], [["dog", -2]], None]
    with publisher() as engine:
        bed.subscribe(engine)
        engine.publish(stored([1, 2, 3, 4], tokens, extra_keys=of_blocks))
        salted = [[["cat", 0], "tenant"], [["cat", -16]]]
        lora = {"lora_name": "sql", "lora_id": 1}
        with_lora = [["sql", *keys] for keys in salted]
        engine.publish(stored([11, 12], tokens[:32], extra_keys=salted))
        engine.publish(stored([21, 22], tokens[:32], extra_keys=with_lora, **lora))
        bed.settle(engine, "live")
        assert bed.held(tokens, images=[cat, dog]) == 4
        assert bed.held(tokens, images=[cat]) == 1
        assert bed.held(tokens, images=[cat, ("cow", 30, 3)]) == 1
        assert bed.held(tokens, images=[("cat", 11, 19), dog]) == 0
        assert bed.held(tokens) == 0
        # The prompt ends behind its last image that is known.
        assert bed.held(tokens[:32], images=[cat, dog]) == 2
        large = [("cat", 0, 20)]
        assert bed.held(tokens, images=large, cache_salt="tenant") == 2
        assert bed.held(tokens, images=large, cache_salt="tenant", lora_name="sql") == 2
        assert bed.held(tokens, images=large) == 0
        assert bed.held(tokens, images=large, cache_salt="other") == 0


def test_images_of_a_request_are_checked() -> None:
    request = lm.Request(range(40), images=[("a", 2, 3), ("b", 5, 4)])
    assert repr(request) == "Request(40 token IDs, 2 images)"
    assert request.images == [("a", 2, 3), ("b", 5, 4)]
    assert request.token_ids is not None
    assert request.token_ids.tolist() == list(range(40))
    assert lm.Request(range(40)).images == []
    for images in ([("a", 2, 3), ("b", 4, 1)], [("a", 2**63, 1)]):
        with pytest.raises(lm.BadValueError, match="images in order, which do not overlap"):
            lm.Request(range(40), images=images)
    with pytest.raises(lm.BadValueError, match="token_ids alone"):
        lm.Request(text="x", images=[("a", 0, 1)])


def test_adapters_salts_pictures_tiers_and_groups(bed: Bed) -> None:
    tokens = list(range(64))
    with publisher() as engine:
        bed.subscribe(engine)
        bed.settle(engine, "live")
        engine.publish(stored([1, 2], tokens[:32], extra_keys=[["tenant"], None]))
        engine.publish(stored([3], tokens[32:48], parent=2, extra_keys=[None]))
        lora = {"lora_name": "sql", "lora_id": 1}
        engine.publish(
            stored([11, 12], tokens[:32], extra_keys=[["sql", "tenant"], ["sql"]], **lora),
            stored([21, 22], tokens[:32], extra_keys=[["sql"], ["sql", ["picture", 3]]], **lora),
            stored([31], tokens[:16], lora_id=7),
            stored([41], tokens[:16], cache_salt="by field"),
            stored([51], tokens[:16], extra_keys=[[["picture", 0]]]),
        )
        # Other tiers and groups of layers say nothing of what a prompt would hit.
        engine.publish(
            stored([61], tokens[:16], medium="CPU_FAR"),
            removed(1, medium="CPU_FAR"),
            stored([62], tokens[:16], group_idx=1, kv_cache_spec_kind="chunked_local_attention"),
            stored([63], [5] * BLOCK, group_idx=0, kv_cache_spec_kind="full_attention"),
            stored([63], [5] * BLOCK, group_idx=2, kv_cache_spec_kind="full_attention"),
            removed(63, group_idx=1),
            stored([], [], medium="TAPE", block_size=0),
            stored([64], [], block_size=0),
            stored([65], [6] * 8, block_size=8),
            {"type": "BlocksMoved", "from": "GPU"},
            stored([66], ["text"]),
        )
        bed.settle(engine, "live")
        assert bed.held(tokens) == 0
        assert bed.held(tokens, cache_salt="tenant") == 3
        assert bed.held(tokens, lora_name="sql", cache_salt="tenant") == 2
        assert bed.held(tokens, lora_name="sql") == 1
        assert bed.held(tokens, cache_salt="by field") == 1
        assert bed.held([5] * BLOCK) == 1
        status = bed.status()
        assert status["skipped"] == {
            "group": 3, "no_tokens": 1, "block_size": 1, "unknown_event": 1, "malformed_event": 1
        }  # fmt: skip
        assert status["tiers"] == {"CPU_FAR": 0, "TAPE": 0}
        engine.publish(removed(63, group_idx=0))
        bed.settle(engine, "live")
        assert bed.held([5] * BLOCK) == 0


def test_what_cannot_be_read_is_counted_and_harms_nothing(bed: Bed) -> None:
    noise = random.Random(7)
    with publisher() as engine:
        bed.subscribe(engine)
        bed.settle(engine, "live")
        for length in range(200):
            payload = noise.randbytes(length)
            engine.past.append((engine.next, payload))
            engine.pub.send_multipart((b"", engine.next.to_bytes(8, "big"), payload))
            engine.next += 1
        engine.pub.send_multipart((b"", b"short", b""))
        engine.pub.send_multipart((b"",))
        engine.pub.send_multipart([b""] * 9)
        engine.publish(stored([1], [1] * BLOCK))
        bed.settle(engine, "live")
        assert bed.held([1] * BLOCK) == 1
        skipped = bed.status()["skipped"]
        assert skipped["malformed_batch"] + skipped.get("malformed_event", 0) >= 190
        assert skipped["malformed_message"] == 3
        assert bed.status()["last_error"]


def test_ranks_are_caches_of_one_instance(bed: Bed) -> None:
    with publisher() as zero, publisher() as one:
        for rank, engine in enumerate((zero, one)):
            bed.subscribe(engine, rank=rank)
        until(lambda: all(s["state"] == "live" for s in bed.feed.status("e0").values()), zero, one)
        zero.publish(stored([1], [1] * BLOCK))
        until(lambda: bed.held([1] * BLOCK) == 1)
        one.publish(stored([1], [1] * BLOCK), stored([2], [2] * BLOCK))
        until(lambda: bed.held([2] * BLOCK) == 1)
        one.publish(CLEARED)
        until(lambda: bed.held([2] * BLOCK) == 0)
        assert bed.held([1] * BLOCK) == 1
        with pytest.raises(lm.BadValueError, match="second one of rank 1"):
            bed.subscribe(one, rank=1)
    assert EventFeed.rank_endpoint("tcp://[::1]:5557", 3) == "tcp://[::1]:5560"
    for wrong in ("ipc:///tmp/kv", "tcp://host", "tcp://host:65535"):
        with pytest.raises(lm.BadValueError, match="rank 3"):
            EventFeed.rank_endpoint(wrong, 3)


def test_instances_come_and_go(bed: Bed) -> None:
    with publisher() as engine, publisher(replay=False) as other:
        bed.subscribe(other, "e1")
        until(lambda: other.heard() and bed.status("e1")["connected"])
        other.publish(stored([1], [7] * BLOCK))
        bed.settle(other, "live", "e1")
        bed.subscribe(engine)
        bed.settle(engine, "live")
        engine.publish(stored([1], [1] * BLOCK))
        bed.settle(engine, "live")
        # Events of a removed instance are dropped; a new one of its name learns all from the start.
        bed.router.remove_instance("e0")
        engine.publish(stored([2], [2] * BLOCK), removed(1))
        until(lambda: bed.status()["skipped"].get("instance_gone") == 2, engine)
        bed.router.add_instance("e0")
        until(lambda: bed.held([2] * BLOCK) == 1, engine)
        assert bed.held([1] * BLOCK) == 0
        # An instance whose `kv_source` changes back to exact learns all from the start, too.
        bed.router.update_instance("e0", kv_source="approximate")
        engine.publish(stored([3], [3] * BLOCK))
        until(lambda: bed.status()["skipped"].get("not_exact"), engine)
        bed.router.update_instance("e0", kv_source="exact")
        until(lambda: bed.held([3] * BLOCK) == 1, engine)
        # So does an instance whose blocks the router forgets while its cache is intact.
        bed.router.blocks_cleared("e0")
        assert bed.held([3] * BLOCK) == 0
        until(lambda: bed.held([3] * BLOCK) == 1, engine)
        # None of this is any other instance's concern.
        assert (bed.status("e1")["state"], bed.held([7] * BLOCK, "e1")) == ("live", 1)
        assert sorted(bed.feed.instances()) == ["e0", "e1"]
        assert bed.feed.unsubscribe("e0")
        assert not bed.feed.unsubscribe("e0")
        assert (bed.held([3] * BLOCK), bed.feed.status("e0"), bed.feed.instances()) == (0, {}, ["e1"])
        bed.subscribe(engine)
        until(lambda: bed.held([3] * BLOCK) == 1, engine)
    bed.feed.close()
    bed.feed.close()
    with pytest.raises(lm.BadValueError, match="after close"):
        bed.feed.unsubscribe("e0")


def test_another_block_size_is_learned_from_the_start(bed: Bed) -> None:
    tokens = list(range(64))
    with publisher() as engine:
        bed.subscribe(engine)
        engine.publish(stored([1, 2], tokens, block_size=32))
        bed.settle(engine, "live")
        assert bed.status()["skipped"] == {"block_size": 2}
        assert bed.status()["block_size"] == 32
        bed.router.configure(block_size=32)
        assert bed.router.block_size == 32
        until(lambda: bed.held(tokens) == 4, engine)
        with pytest.raises(lm.BadValueError, match="block_size"):
            bed.router.configure(block_size=0)
        with pytest.raises(lm.BadValueError, match="32, the router's"):
            bed.feed.subscribe("e1", engine.endpoint, block_size=16)


def test_wrong_addresses_are_refused_with_what_would_be_right(bed: Bed) -> None:
    for endpoint, what in [
        ("tcp://*:5557", "no wildcard"),
        ("tcp://0.0.0.0:5557", "no wildcard"),
        ("http://host:1", "an engine's address"),
        ("tcp://host", "an engine's address"),
        ("ipc:///\0", "an engine's address"),
        ("ipc:///" + 200 * "x", "an engine's address"),
    ]:
        with pytest.raises(lm.BadValueError, match=f"endpoint of e0: .*{what}"):
            bed.feed.subscribe("e0", endpoint)
    with pytest.raises(lm.BadValueError, match=r"endpoint of e0: .*bind"):
        bed.feed.subscribe("e0", "tcp://192.0.2.1:5557", bind=True)
    with pytest.raises(lm.UnknownNameError, match="did you mean"):
        bed.feed.subscribe("e_0", "tcp://127.0.0.1:5557")
    assert bed.feed.instances() == []


def test_an_engine_that_is_not_there_yet(bed: Bed) -> None:
    with publisher() as engine:
        endpoint, replay = engine.endpoint, str(engine.replay_endpoint)
    bed.feed.subscribe("e0", endpoint, replay_endpoint=replay)
    time.sleep(0.2)
    assert (bed.status()["state"], bed.status()["connected"]) == ("connecting", False)
    with publisher(endpoint, replay=False) as engine:
        engine.serve(replay)
        engine.publish(stored([1], [1] * BLOCK))
        until(lambda: bed.held([1] * BLOCK) == 1, engine)
        bed.settle(engine, "live")


@pytest.mark.parametrize("form", ["localhost", "ipc", "abstract"])
def test_names_and_unix_sockets(bed: Bed, form: str, tmp_path: Path) -> None:
    bound = {
        "localhost": "tcp://127.0.0.1:*",
        "ipc": f"ipc://{tmp_path}/kv",
        "abstract": f"ipc://@{tmp_path}/kv",
    }[form]
    with publisher(bound) as engine:
        engine.publish(stored([1], [1] * BLOCK))
        replay = str(engine.replay_endpoint).replace("127.0.0.1", "localhost")
        endpoint = engine.endpoint.replace("127.0.0.1", "localhost")
        bed.feed.subscribe("e0", endpoint, replay_endpoint=replay)
        engine.publish(stored([2], [2] * BLOCK))
        bed.settle(engine, "live")
        assert (bed.held([1] * BLOCK), bed.held([2] * BLOCK)) == (1, 1)
    until(lambda: not bed.status()["connected"])


def test_a_name_without_an_address_does_not_stop_the_others(bed: Bed) -> None:
    bed.feed.subscribe("e0", "tcp://no-engine.invalid:5557")
    with publisher() as engine:
        bed.subscribe(engine, "e1")
        engine.publish(stored([1], [1] * BLOCK))
        bed.settle(engine, "live", "e1")
    assert (bed.status()["state"], bed.status()["connected"]) == ("connecting", False)


def test_a_unix_socket_to_connect_to(bed: Bed, tmp_path: Path) -> None:
    """security F9: binding a path replaces the socket of a process that is gone, no other file."""
    path = tmp_path / "kv"
    path.write_text("secret")
    with pytest.raises(lm.BadValueError, match="an address to bind"):
        bed.feed.subscribe("e0", f"ipc://{path}", bind=True)
    assert path.read_text() == "secret"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    bed.feed.subscribe("e0", f"ipc://{path}", bind=True)
    with publisher(f"connect ipc://{path}", replay=False) as engine:
        until(lambda: engine.heard() and bed.status()["connected"])
        engine.publish(stored([1], [1] * BLOCK))
        bed.settle(engine, "live")
    bed.feed.unsubscribe("e0")
    bed.feed.subscribe("e0", f"ipc://{path}", bind=True)  # the file may be another router's by now


def test_engines_find_a_place_among_strangers(bed: Bed) -> None:
    """Connections to a bound address are bounded: those without a handshake give way."""
    with zmq.Context() as context, context.socket(zmq.SUB) as one:
        port = one.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    bed.feed.subscribe("e0", endpoint, bind=True)
    with contextlib.ExitStack() as open_ones:
        strangers = [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)
        ]
        with publisher(f"connect {endpoint}", replay=False) as engine:
            until(lambda: engine.heard() and bed.status()["connected"])
            engine.publish(stored([1], [1] * BLOCK))
            bed.settle(engine, "live")
        for stranger in strangers[:30]:
            stranger.settimeout(PATIENCE_SECONDS)
            while stranger.recv(1000):
                pass


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"


def test_strangers_do_not_displace_an_engine_in_its_handshake(bed: Bed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    bed.feed.subscribe("e0", f"tcp://127.0.0.1:{port}", bind=True)
    with contextlib.ExitStack() as open_ones:
        engine, *others = [
            open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)
        ]
        engine.sendall(GREETING + READY)
        until(lambda: bed.status()["connected"])
        # A message without end costs the publisher its connection, and its engine learns why.
        engine.sendall(b"\x01\0" * 17)
        until(lambda: not bed.status()["connected"])
        assert "more than 16 frames" in bed.status()["last_error"]
        # As many as have finished their handshakes are bounded, too.
        for stranger in others:
            stranger.sendall(GREETING + READY)
        until(lambda: bed.status()["connected"])
        assert bed.status()["connections"] <= 1 + 4


def test_who_is_no_publisher_is_named(bed: Bed) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        bed.feed.subscribe("e0", f"tcp://127.0.0.1:{port}")
        until(lambda: bed.status()["last_error"])
        assert bed.status()["last_error"].endswith("is this the engine's port for KV events?")
    secret = zmq.curve_keypair()[1]
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        (other.curve_server, other.curve_secretkey) = (True, secret)
        port = other.bind_to_random_port("tcp://127.0.0.1")
        bed.feed.subscribe("e1", f"tcp://127.0.0.1:{port}")
        until(lambda: bed.status("e1")["last_error"])
        assert "ZMTP's handshake" in bed.status("e1")["last_error"]


def test_pushed_load_reports_reach_the_indicators(bed: Bed) -> None:
    with publisher(replay=False, topic="load") as engine:
        bed.feed.subscribe_load("e1", engine.endpoint, topic="load")
        until(lambda: engine.heard() and (bed.feed.load_status("e1") or {})["connected"])
        assert bed.feed.load_status("e0") is None
        for payload in (["LoadStat", 3, 5, 250, 1000, 0, "more"], ["LoadStat", -1, 0, 0, 0], {"no": 1}):
            number = engine.next.to_bytes(8, "big")
            engine.pub.send_multipart((b"load", number, msgpack.packb(payload)))
            engine.next += 1
        until(lambda: (bed.feed.load_status("e1") or {})["skipped"].get("malformed_message") == 2)
        columns = bed.router.indicators()
        assert (columns["r_bs"][1], columns["q_bs"][1], columns["kv_usage"][1]) == (3, 5, 0.25)
        assert bed.feed.status("e1") == {}


def load(running: float, waiting: float, **more: Any) -> dict[str, Any]:
    """An event of the schedulers of lmetric-vllm."""
    return {"type": "LmetricLoad", "running": running, "waiting": waiting} | more


def test_load_events_reach_the_indicators_between_blocks(bed: Bed) -> None:
    tokens = list(range(2 * BLOCK))
    with publisher() as engine:
        engine.publish(load(7, 7, prefill_tokens=70))  # replayed: it is old
        bed.subscribe(engine)
        bed.settle(engine, "live")
        assert np.isnan(bed.router.indicators()["reported_running"][0])
        engine.publish(load(3, 5, kv_usage=0.25, prefill_tokens=900))
        engine.publish(stored([1, 2], tokens))
        bed.settle(engine, "live")
        columns = bed.router.indicators()
        assert (columns["r_bs"][0], columns["q_bs"][0], columns["kv_usage"][0]) == (3, 5, 0.25)
        assert columns["queued_prefill_tokens"][0] == 900
        # The newest by arrival counts, from whatever source.
        bed.router.report_load("e0", waiting=1, running=4, kv_usage=0.5)
        columns = bed.router.indicators()
        assert (columns["r_bs"][0], columns["q_bs"][0], columns["queued_prefill_tokens"][0]) == (4, 1, 0)
        # A load in a gap counts at once; the replay brings the lost blocks, and no old load.
        engine.publish(load(9, 9))
        engine.publish(stored([3], tokens[:BLOCK], parent=2), lose=True)
        engine.publish(load(1, 0, kv_usage=0.75))
        bed.settle(engine, "live")
        assert bed.router.indicators()["r_bs"][0] == 1
        assert bed.held([*tokens, *tokens[:BLOCK]]) == 3
        status = bed.status()
        assert (status["gaps"], status["restarts"], status["loads"]) == (1, 0, 4)
        assert status["skipped"] == {}


def test_bad_load_events_harm_nothing(bed: Bed) -> None:
    tokens = list(range(BLOCK))
    with publisher() as engine:
        bed.subscribe(engine)
        bed.settle(engine, "live")
        engine.publish(load(3, 5))
        wrong: list[dict[str, Any]] = [
            load(-1, 0),
            load(1e10, 0),
            load(float("nan"), 0),
            load(1, float("inf")),
            load(1, 1, kv_usage=1.5),
            load(1, 1, prefill_tokens=[1]),
            load(1, 1, prefill_tokens="1"),
            {"type": "LmetricLoad"},
            load(1, 1, more="x" * 2000),
        ]
        for event in wrong:
            engine.publish(event)
        engine.publish(stored([1], tokens))
        bed.settle(engine, "live")
        assert bed.status()["skipped"] == {"malformed_load": len(wrong)}
        assert (bed.router.indicators()["r_bs"][0], bed.held(tokens)) == (3, 1)
        # The load of one rank is not the instance's.
        bed.router.add_instance("ranks")
        with publisher() as other:
            bed.subscribe(other, "ranks", rank=1)
            until(lambda: other.heard() and bed.status("ranks", 1)["state"] == "live", other)
            other.publish(load(3, 5))
            until(lambda: bed.status("ranks", 1)["loads"] == 1, other)
            assert bed.router.indicators()["r_bs"][2] == 0


def test_what_vllm_said(bed: Bed) -> None:
    """Recorded: a prompt of three blocks, the same with a salt, and a full report of the first."""
    recorded = json.loads((Path(__file__).parent / "samples" / "vllm-0.32.0.json").read_text())["events"]
    tokens = recorded[0][2][1][0]["token_ids"]
    bed.router.configure(block_size=32)
    with publisher(topic=recorded[0][0]) as engine:
        bed.subscribe(engine, topic=recorded[0][0], block_size=32)
        bed.settle(engine, "live")
        for _, _, (_, events, _) in recorded:
            engine.publish(*events)
        engine.publish(removed(recorded[0][2][1][0]["block_hashes"][2], group_idx=0))
        bed.settle(engine, "live")
        assert bed.status()["skipped"] == {}
        # `held` counts blocks of 16 tokens. The report was no second copy.
        assert (bed.held(tokens), bed.held(tokens, cache_salt="tenantA")) == (4, 6)


async def test_what_is_predicted_is_what_the_engine_has_cached(bed: Bed) -> None:
    """Over a small cache that evicts all the time, joined late and cut off in between."""
    dice = random.Random(3)
    options = EngineOptions(
        port=0,
        clock_speed=1000.0,
        cache_blocks=40,
        kv_events_endpoint="tcp://*:0",
        kv_events_replay_endpoint="tcp://127.0.0.1:0",
    )
    async with EngineServer(options) as server, aiohttp.ClientSession() as http:
        told = server.description()
        endpoint = told["kv_events_endpoint"].replace("*", "127.0.0.1")
        replay = told["kv_events_replay_endpoint"]
        begun = [[dice.randrange(2000) for _ in range(dice.randrange(20, 200))] for _ in range(6)]
        right = 0
        for turn in range(60):
            if turn in (10, 40):
                bed.feed.subscribe("e0", endpoint, replay_endpoint=replay)
            if turn == 30:
                bed.feed.unsubscribe("e0")
            prompt = [*dice.choice(begun), *(dice.randrange(2000) for _ in range(dice.randrange(1, 60)))]
            if dice.random() < 0.3:
                begun[dice.randrange(len(begun))] = prompt
            salt = dice.choice([None, "tenant"])
            deadline = time.monotonic() + PATIENCE_SECONDS
            while (status := bed.feed.status("e0")) and time.monotonic() < deadline:
                # The events of the last answer's last step have arrived.
                if status[0]["state"] == "live" and status[0]["last_sequence"] == server_sequence(server):
                    break
                await asyncio.sleep(0.002)
            tokens = np.array(prompt, dtype=np.uint32)
            predicted = int(bed.router.cached_tokens(lm.Request(token_ids=tokens, cache_salt=salt))[0])
            body = {"prompt": prompt, "max_tokens": 3} | ({} if salt is None else {"cache_salt": salt})
            async with http.post(f"{server.url}/v1/completions", json=body) as response:
                usage = (await response.json())["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert predicted == (cached if status else 0), f"turn {turn}"
            right += cached > 0 and bool(status)
        assert right > 10
        assert bed.status()["blocks_removed"] > 50


def server_sequence(server: EngineServer) -> int:
    """Number of the last batch that the engine published."""
    [rank] = server._ranks
    assert rank.kv_feed is not None
    return rank.kv_feed._sequence - 1
