"""Heads of requests, mutated at random: the router's two parsers must agree on them."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage

from lmetric._core import MAX_REQUEST_FIELDS, RequestHead, RequestReader, WireError
from lmetric.server.http.protocol import violation

LIMIT = 64 << 10
CORPUS = Path(__file__).parent.parent / "fuzz" / "corpus" / "request_head"
PIECES = [
    *(
        b"\r\n",
        b"\r",
        b"\n",
        b" ",
        b"\t",
        b":",
        b",",
        b"\x00",
        b"\x0b",
        b"\xff",
        b"?",
        b"#",
        b"%",
        b"//",
        b"\\",
    ),
    *(b"POST ", b"GET ", b"CONNECT ", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/2.0\r\n", b"http://h:1"),
    *(
        b"host: x\r\n",
        b"Host: [::1]:80\r\n",
        b"host: a/b\r\n",
        b"content-length: 3\r\n",
        b"Content-Length: +3\r\n",
    ),
    *(b"content-length: 0x3\r\n", b"content-length: 3, 3\r\n", b"transfer-encoding: chunked\r\n"),
    *(b"Transfer-Encoding: gzip, chunked\r\n", b"expect: 100-continue\r\n", b"upgrade: h2c\r\n"),
    *(b"connection: close\r\n", b"connection: upgrade\r\n", b"content-encoding: gzip\r\n", b"\r\n x: y\r\n"),
]


def mutated(seeds: list[bytes], seed: int) -> Iterator[bytes]:
    """Heads made from others, without end."""
    rng = random.Random(seed)
    while True:
        head = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(head) + 1)
            end = min(len(head), at + rng.choice((0, 0, 1, 2, 8)))
            kind = rng.random()
            if kind < 0.5:
                head[at:end] = rng.choice(PIECES)
            elif kind < 0.8:
                head[at:end] = bytes([rng.randrange(256)])
            else:
                start = rng.randrange(len(head) + 1)
                head[at:at] = head[start : start + rng.randint(1, 30)]
        yield bytes(head)


class Parsers:
    """Both parsers, each given one head."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._protocol = BaseProtocol(loop)
        self._loop = loop
        self._requests = RequestReader(False, "x", LIMIT, {})
        self.both = 0

    def by_aiohttp(self, head: bytes) -> RawRequestMessage | None:
        parser = HttpRequestParser(
            self._protocol,
            self._loop,
            2**16,
            max_line_size=LIMIT,
            max_field_size=LIMIT,
            max_headers=MAX_REQUEST_FIELDS,
        )
        try:
            messages, _, _ = parser.feed_data(head)
        except HttpProcessingError:
            return None
        return messages[0][0] if messages else None

    def by_the_router(self, head: bytes) -> RequestHead | None:
        try:
            return self._requests.read(head)
        except WireError:
            return None

    def check(self, head: bytes) -> None:
        """Asserts that nothing is read in two ways.

        The router refuses what its own parser refuses. aiohttp reads only whole heads.
        """
        ours = self.by_the_router(head)
        if ours is None or not (ours.framed or ours.chunked):
            return  # it is refused, and the connection closes
        theirs = self.by_aiohttp(head[: ours.start])
        if theirs is None:
            assert not ours.plain, f"aiohttp refuses a request that goes the short way: {head!r}"
            return
        self.both += 1
        assert theirs.path.encode("utf-8", "surrogateescape") == ours.target, head
        assert bool(theirs.chunked) == ours.chunked, head
        assert int(theirs.headers.get("content-length", 0)) == ours.length, head
        assert ours.keep_alive or theirs.should_close, head
        if ours.plain:
            message: Any = SimpleNamespace(version=theirs.version, headers=theirs.headers)
            assert violation(message, theirs.path) is None, head


def seeds() -> list[bytes]:
    found = [path.read_bytes() for path in sorted(CORPUS.iterdir())]
    assert len(found) > 10
    return found


@pytest.fixture
def parsers() -> Iterator[Parsers]:
    loop = asyncio.new_event_loop()
    yield Parsers(loop)
    loop.close()


def test_both_parsers_agree_on_heads(parsers: Parsers) -> None:
    """Reliability L: two parsers, one verdict."""
    corpus = seeds()
    for head in corpus:
        parsers.check(head)
    for _, head in zip(range(5_000), mutated(corpus, 7), strict=False):
        parsers.check(head)
    assert parsers.both > 500


@pytest.mark.nightly
def test_both_parsers_agree_on_heads_for_a_minute(parsers: Parsers) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    end = time.monotonic() + 60
    for head in mutated(seeds(), seed):
        parsers.check(head)
        if time.monotonic() > end:
            break
    assert parsers.both > 10_000
