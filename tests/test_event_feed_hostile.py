"""Publishers of KV events that send what no engine sends, over real ZMQ sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from lmetric._core import EventFeed
from test_event_feed import BLOCK, Bed, Publisher, publisher, stored, until

LATE = msgpack.packb(1.0)
MOST = b"\xff\xff\xff\xff"  # a declared length of 2^32 - 1
GROWTH_BYTES = EventFeed.MAX_SOURCE_BYTES


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.feed.close()


def batch(event: bytes) -> bytes:
    """A batch with one event, of which each byte is given."""
    return b"\x93" + LATE + b"\x91" + event + b"\x00"


def of(field: str, value: bytes) -> bytes:
    """A batch with a stored block, in which one field is given as bytes."""
    fields = {name: msgpack.packb(each) for name, each in stored([1], [1] * BLOCK).items()}
    fields[field] = value
    content = b"".join(msgpack.packb(name) + each for name, each in fields.items())
    return batch(bytes([0x80 + len(fields)]) + content)


def wrong(field: str, value: Any) -> bytes:
    return of(field, msgpack.packb(value))


HUGE_HASH = b"\xcf" + b"\xff" * 8
PAYLOADS = {
    "deep lists": b"\x91" * 1_000_000,
    "deep lists in an event": batch(b"\x91" * 1_000_000),
    "deep maps": batch(b"\x81\xa1a" * 300_000),
    "deep field": of("extra_keys", b"\x91" * 1_000_000),
    "deep unknown field": batch(b"\x82\xa4type\xabBlockStored\xa1x" + b"\x91" * 1_000_000),
    "many events": b"\x93" + LATE + b"\xdd" + MOST,
    "many fields": batch(b"\xdf" + MOST),
    "many hashes": of("block_hashes", b"\xdd" + MOST),
    "many tokens": of("token_ids", b"\xdd" + MOST),
    "many extra keys": of("extra_keys", b"\xdd" + MOST),
    "a long name": of("lora_name", b"\xdb" + MOST),
    "long bytes": of("block_hashes", b"\x91\xc6" + MOST),
    "a long extension": of("token_ids", b"\xc9" + MOST + b"\x01"),
    "empty events": b"\x93" + LATE + b"\xdd\x00\x0f\x00\x00" + b"\x90" * 983_040 + b"\x00",
    "block size 0": wrong("block_size", 0),
    "block size -1": wrong("block_size", -1),
    "block size 2^31": wrong("block_size", 1 << 31),
    "block size 2^64 - 1": of("block_size", HUGE_HASH),
    "block size 1.5": wrong("block_size", 1.5),
    "tokens as text": wrong("token_ids", ["a"] * BLOCK),
    "tokens as fractions": wrong("token_ids", [1.5] * BLOCK),
    "tokens below 0": wrong("token_ids", [-1] * BLOCK),
    "tokens above 2^32": wrong("token_ids", [1 << 40] * BLOCK),
    "tokens as lists": wrong("token_ids", [[1]] * BLOCK),
    "no tokens": wrong("token_ids", []),
    "tokens that are a text": wrong("token_ids", "a" * BLOCK),
    "a hash as a fraction": wrong("block_hashes", [1.5]),
    "a parent as a list": wrong("parent_block_hash", [1]),
}


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def send(engine: Publisher, payload: bytes) -> None:
    engine.past.append((engine.next, payload))
    engine.pub.send_multipart((engine.topic, engine.next.to_bytes(8, "big"), payload))
    engine.next += 1


def serves(bed: Bed, good: Publisher, number: int) -> None:
    """Waits until an event of the honest engine counts."""
    good.publish(stored([number], [number] * BLOCK))
    until(lambda: bed.held([number] * BLOCK, "e1") == 1, good)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_bad_payload_costs_its_batch_alone(bed: Bed, name: str) -> None:
    with publisher() as bad, publisher() as good:
        bed.subscribe(bad)
        bed.subscribe(good, "e1")
        bed.settle(bad, "live")
        bed.settle(good, "live", "e1")
        before = resident()
        for _ in range(5):
            send(bad, PAYLOADS[name])
        serves(bed, good, 7)
        until(lambda: bed.status()["skipped"] or bed.status()["over_limit"], bad)
        assert bed.held([1] * BLOCK) == 0
        assert resident() - before < GROWTH_BYTES
        serves(bed, good, 8)
        if not bed.status()["over_limit"]:
            bad.publish(stored([9], [9] * BLOCK))
            until(lambda: bed.held([9] * BLOCK) == 1, bad)


def test_parents_in_a_circle(bed: Bed) -> None:
    with publisher() as bad, publisher() as good:
        bed.subscribe(bad)
        bed.subscribe(good, "e1")
        bed.settle(bad, "live")
        bed.settle(good, "live", "e1")
        bad.publish(stored([1], [1] * BLOCK))
        bad.publish(stored([2], [2] * BLOCK, 1))
        for _ in range(100):
            bad.publish(stored([1], [1] * BLOCK, 2), stored([2], [2] * BLOCK, 1), stored([3], [3] * BLOCK, 3))
        bad.publish({"type": "BlockRemoved", "block_hashes": [1, 2, 3], "medium": "GPU"})
        bed.settle(bad, "live")
        assert bed.held([1] * BLOCK) == bed.held([3] * BLOCK) == 0
        serves(bed, good, 7)


# The number 2^64 - 1 ends replays; no batch has it.
@pytest.mark.parametrize("numbers", [(1 << 63,), (2**64 - 1, 2**64 - 2, 0), (1 << 63, 5, 1 << 62, 0)])
def test_batches_with_wild_numbers(bed: Bed, numbers: tuple[int, ...]) -> None:
    with publisher() as bad, publisher() as good:
        bed.subscribe(bad)
        bed.subscribe(good, "e1")
        bed.settle(bad, "live")
        bed.settle(good, "live", "e1")
        bad.publish(stored([1], [1] * BLOCK))
        bed.settle(bad, "live")
        before = resident()
        for number in numbers:
            payload = msgpack.packb([time.time(), [stored([2], [2] * BLOCK)], 0])
            bad.pub.send_multipart((b"", number.to_bytes(8, "big"), payload))
        until(lambda: bed.status()["gaps"], bad)
        serves(bed, good, 7)
        until(lambda: bed.held([1] * BLOCK) == 0, bad)  # events are lost: it claims too little
        assert resident() - before < GROWTH_BYTES


def test_a_flood_of_topics(bed: Bed) -> None:
    with publisher() as bad, publisher() as good:
        bed.subscribe(bad)
        bed.subscribe(good, "e1")
        bed.settle(bad, "live")
        bed.settle(good, "live", "e1")
        before = resident()
        for number in range(50_000):
            topic = b"%d" % number + b"a" * 1000
            bad.pub.send_multipart((topic, number.to_bytes(8, "big"), b"\x93"))
        until(lambda: bed.status()["last_error"], bad)
        serves(bed, good, 7)
        # The publisher's own queue is in this process, too.
        until(lambda: resident() - before < GROWTH_BYTES, bad)


Number = Callable[[int], int]


@pytest.mark.parametrize(
    ("number_of", "size"),
    [(lambda _: 0, 100), (lambda number: (1 << 63) - number, 100), (lambda number: number, 1 << 20)],
    ids=["same", "backwards", "large"],
)
def test_a_replay_without_end(bed: Bed, number_of: Number, size: int) -> None:
    """It is given up as soon as its batches are known already."""
    with publisher(replay=False) as bad, publisher() as good:
        replays = bad.context.socket(zmq.ROUTER)
        replays.set_hwm(10)  # its own queue is in this process, too
        replays.bind("tcp://127.0.0.1:*")
        bad.replay_endpoint = replays.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        bed.subscribe(good, "e1")
        bed.settle(good, "live", "e1")
        bed.subscribe(bad)
        until(lambda: bad.heard() and replays.poll(0), good)
        clients, number, before = [b""], 0, resident()
        payload = msgpack.packb([time.time(), [stored([1], [1] * BLOCK)], 0]) + bytes(size)

        def over() -> bool:
            nonlocal number
            while replays.poll(0):
                clients.append(replays.recv_multipart()[0])
            for _ in range(100):
                sequence = number_of(number).to_bytes(8, "big")
                try:
                    replays.send_multipart((clients[-1], b"", b"", sequence, payload), zmq.NOBLOCK)
                except zmq.Again:
                    break
                number += 1
            return bed.status()["unanswered"] > 0 if size < 1 << 20 else number > 2000

        until(over, good)
        assert resident() - before < GROWTH_BYTES
        assert bed.status()["state"] == "incomplete" or size == 1 << 20
        serves(bed, good, 7)
