"""Endurance runs: millions of distinct prompts, once each, while memory is sampled.

    python bench/chaos/soak.py core [--prompts 10000000] [--out FILE.csv]
    python bench/chaos/soak.py sockets [--prompts 1000000] [--out FILE.csv]

`core` routes prompts through `lm.Router` in this process: route, tokens, end; some requests fail,
and some tickets are dropped. `sockets` sends them through a router process to mock engines over
real connections: plain answers, streams, and clients that leave in the middle. Both have a sample
per percent, and fail if memory grows by more than 4 MiB after the first 30%, or if a request is
left in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import random
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
import numpy as np
from growth import growth_after
from routers import OwnRouter, in_flight, settled

import lmetric as lm
from lmetric_lab.ports import free_ports

MOCK = Path(__file__).parents[1] / "http" / "mock.py"
# Full after a few percent of the prompts.
INDEX_BYTES = 32 << 20
SMALL_INDEX_BYTES = 4 << 20
WARM_SHARE, MOST_MIB = 0.3, 4.0
SAMPLES = 100
# Shape of the prompts of `core`: tokens, and shared tokens at their beginning.
TOKENS, SHARED, FAMILIES = 256, 128, 64
OPEN = 64  # requests in flight
CONNECTIONS = 32


@dataclass
class Sample:
    """The state after some prompts."""

    prompts: int
    seconds: float
    rss_mib: float
    in_flight: int


class GrowthError(AssertionError):
    """Memory grew, or requests are left."""


def check(samples: list[Sample]) -> float:
    """Returns the growth of memory after the warm-up, MiB. Raises GrowthError."""
    growth = growth_after([each.rss_mib for each in samples], WARM_SHARE)
    if growth > MOST_MIB:
        raise GrowthError(f"memory grew by {growth:.1f} MiB after the warm-up, expected {MOST_MIB:g} at most")
    if samples[-1].in_flight:
        raise GrowthError(f"{samples[-1].in_flight} requests are in flight at the end, expected 0")
    return growth


def own_rss_mib() -> float:
    """The resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def core(prompts: int) -> list[Sample]:
    """Routes distinct prompts in this process."""
    router = lm.Router("lmetric", index_bytes=INDEX_BYTES)
    for number in range(8):
        router.add_instance(f"e{number}", cache_blocks=50_000)
    rng = np.random.default_rng(1)
    families = [rng.integers(0, 100_000, TOKENS, dtype=np.uint32) for _ in range(FAMILIES)]
    running: deque[lm.Ticket] = deque()
    samples: list[Sample] = []
    began = time.monotonic()
    ticked = began

    def end(ticket: lm.Ticket, number: int) -> None:
        if number % 100 == 1:
            return  # dropped: its client left
        if number % 100 == 2:
            ticket.failed("engine_error")
            return
        ticket.tokens(15)
        ticket.done(prompt_tokens=TOKENS, cached_tokens=SHARED, output_tokens=16)

    for number in range(prompts):
        ids = families[number % FAMILIES].copy()
        ids[SHARED], ids[SHARED + 1] = number & 0xFFFF, number >> 16
        _, ticket = router.route(lm.Request(ids, max_tokens=16))
        ticket.sent()
        ticket.first_token()
        running.append(ticket)
        if len(running) > OPEN:
            end(running.popleft(), number)
        del ticket
        if number % 1024 == 0 and (now := time.monotonic()) - ticked > 1.0:
            router.tick()
            ticked = now
        if (number + 1) % max(1, prompts // SAMPLES) == 0:
            last = number + 1 > prompts - max(1, prompts // SAMPLES)
            while last and running:
                end(running.popleft(), number)
            seconds = round(time.monotonic() - began, 2)
            samples.append(Sample(number + 1, seconds, round(own_rss_mib(), 2), router.in_flight()))
    return samples


WORDS = ["river ", "stone ", "cloud ", "engine ", "garden ", "letter ", "silver ", "winter "]
SHARED_TEXTS = ["".join(random.Random(number).choices(WORDS, k=60)) for number in range(FAMILIES)]
TAIL = "".join(random.Random(99).choices(WORDS, k=60))


def request(number: int) -> bytes:
    """The bytes of a request. Each prompt is sent once."""
    stream = b'"stream":true,"max_tokens":4,' if number % 8 == 0 else b'"max_tokens":1,'
    text = f"{SHARED_TEXTS[number % FAMILIES]}{number} {TAIL}".encode()
    body = b'{"model":"mock",%b"messages":[{"role":"user","content":"%b"}]}' % (stream, text)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


class Client(asyncio.Protocol):
    """A kept connection with one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self.buffer = b""
        self.done: asyncio.Future[bytes] | None = None

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        """Sends a request. Returns its whole answer; empty: the connection broke."""
        self.buffer = b""
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self.done

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n") + 4
        if end < 4 or self.done is None or self.done.done():
            return
        head = self.buffer[:end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            whole = len(self.buffer) == end + int(head[at + 15 : head.find(b"\r", at)])
        else:
            whole = self.buffer.endswith(b"\r\n0\r\n\r\n")
        if whole:
            self.done.set_result(self.buffer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if self.done is not None and not self.done.done():
            self.done.set_result(b"")


def is_right(number: int, answer: bytes) -> bool:
    """Whether an answer is whole, and of the kind that was asked for."""
    if not answer.startswith(b"HTTP/1.1 200 "):
        return False
    if number % 8:
        return b'"content":"ok"' in answer
    return answer.count(b"chat.completion.chunk") >= 4 and answer.count(b"data: [DONE]") == 1


async def sockets(prompts: int, seconds: float) -> list[Sample]:
    """Sends distinct prompts through a router process, for a time at most."""
    ports = free_ports(4)
    mock = await asyncio.create_subprocess_exec(sys.executable, str(MOCK), *map(str, ports))
    try:
        with tempfile.TemporaryDirectory() as folder:
            engines = [f"http://127.0.0.1:{port}" for port in ports]
            config = {"index_bytes": SMALL_INDEX_BYTES}
            router = OwnRouter(Path(folder), engines, config, timed=False, model="mock")
            async with aiohttp.ClientSession() as session:
                try:
                    await router.start(session)
                    return await _sent(router, session, prompts, seconds)
                finally:
                    await router.stop()
    finally:
        mock.kill()
        await mock.wait()


async def _sent(
    router: OwnRouter, session: aiohttp.ClientSession, prompts: int, seconds: float
) -> list[Sample]:
    loop = asyncio.get_running_loop()
    port = int(router.url.rpartition(":")[2])
    samples: list[Sample] = []
    numbers = count()
    began = time.monotonic()
    done = 0

    async def connected() -> Client:
        return (await loop.create_connection(Client, "127.0.0.1", port))[1]

    async def client() -> None:
        nonlocal done
        here = await connected()
        while (number := next(numbers)) < prompts and time.monotonic() - began < seconds:
            answer = here.ask(request(number))
            if number % 500 == 8:  # a stream: its client leaves in the middle
                await asyncio.wait([answer], timeout=0.008)
                here.transport.abort()
                here = await connected()
            elif not is_right(number, got := await answer):
                raise GrowthError(f"request {number}: {got[:300]!r}")
            done += 1
        here.transport.close()

    async def sample() -> None:
        at = max(1, prompts // SAMPLES)
        while True:
            while done < at * (len(samples) + 1):  # noqa: ASYNC110 - a poll costs clients nothing
                await asyncio.sleep(0.05)
            take(await in_flight(router, session))

    def take(left: float | None) -> None:
        used = round(time.monotonic() - began, 2)
        samples.append(Sample(done, used, round(router.rss_mib(), 2), int(left or 0)))

    sampling = asyncio.create_task(sample())
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(client())
    sampling.cancel()
    take(float(await settled(router, session)))
    return samples


def main() -> None:
    """Runs one of the two, and writes its samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=("core", "sockets"))
    parser.add_argument("--prompts", type=int, help="number of prompts; default: as above")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="longest time of `sockets`")
    parser.add_argument("--out", type=Path, help="CSV file of the samples")
    given = parser.parse_args()
    if given.kind == "core":
        samples = core(given.prompts or 10_000_000)
    else:
        samples = asyncio.run(sockets(given.prompts or 1_000_000, given.seconds))
    if given.out is not None:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Sample)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(each) for each in samples)
    last = samples[-1]
    print(
        f"{last.prompts} prompts in {last.seconds:.0f} s, {last.rss_mib:.1f} MiB, in flight {last.in_flight}"
    )
    print(f"growth after the warm-up: {check(samples):+.2f} MiB")


if __name__ == "__main__":
    main()
