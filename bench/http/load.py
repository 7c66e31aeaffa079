"""Generates load that wrk cannot make: open-loop arrivals, and many streams at once. Prints one
line of JSON.

    python bench/http/load.py closed PORT CONNECTIONS BYTES SECONDS NONCE PIDS
    python bench/http/load.py open PORT BYTES RATE SECONDS NONCE PIDS
    python bench/http/load.py streams PORT COUNT SECONDS NONCE PIDS
    python bench/http/load.py answers PORT COUNT BYTES TOKENS NONCE PIDS

`closed` is wrk's closed loop for machines without wrk; it costs more CPU time than wrk.

`answers` are whole streams: COUNT at once, of TOKENS tokens each, from the requests to the ends.
PIDS are the router's processes, comma-separated, "-" for none. Their CPU time is taken over the
same window.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import random
import re
import sys
import time
from collections import deque

import uvloop
from proc import cpu_seconds

WARM_SECONDS = 0.5
FRAMING = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")  # Routers that reframe chunks may cut inside an event.
SENT_AT = re.compile(rb'"content":"(\d+)"')


@functools.cache
def shared(number: int, size: int) -> str:
    """Returns the shared beginning of this number, cut to its size."""
    return "".join(random.Random(number).choices(WORDS, k=size // 6 + 1))[:size]


def request(size: int, nonce: str, ordinal: int, extra: str = "") -> bytes:
    """Returns a chat request of ``size`` bytes of body; half of it is one of 16 shared
    beginnings."""
    half = max(0, size - 160) // 2
    system, user = shared(ordinal % 16, half), f"{nonce}-{ordinal} {TAIL[:half]}"
    messages = f'[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}]'
    extra = extra or '"max_tokens":1,'
    body = f'{{"model":"mock",{extra}"messages":{messages}}}'.encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


WORDS = ["river ", "stone ", "cloud ", "engine ", "garden ", "letter ", "silver ", "winter "]
TAIL = "".join(random.Random(99).choices(WORDS, k=6000))


class Timer:
    """Calls back at given moments of the monotonic clock, which event loops round to a
    millisecond."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: object) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._fired, callback)

    def at(self, moment: float) -> None:
        """Sets the moment to wait for."""
        seconds, rest = divmod(max(moment, 1e-6), 1)
        spec = (ctypes.c_long * 4)(0, 0, int(seconds), max(int(rest * 1e9), 1))
        if self._libc.timerfd_settime(self._fd, 1, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _fired(self, callback: object) -> None:
        os.read(self._fd, 8)
        callback()  # type: ignore[operator]


class Client(asyncio.Protocol):
    """One kept connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self.buffer = b""
        self.done: asyncio.Future[bytes] | None = None

    def ask(self, data: bytes) -> asyncio.Future[bytes]:
        """Sends the request. The future holds the whole answer."""
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
            whole = len(self.buffer) >= end + int(head[at + 15 : head.find(b"\r", at)])
        else:
            whole = self.buffer.endswith(b"\r\n0\r\n\r\n")
        if whole:
            self.done.set_result(self.buffer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if self.done is not None and not self.done.done():
            self.done.set_result(b"")


async def closed(
    port: int, count: int, size: int, seconds: float, nonce: str, pids: list[int]
) -> dict[str, object]:
    """Keeps a request open on each of ``count`` connections; latency as in `open_loop`."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    errors, ordinal = 0, 0
    began = time.monotonic() + WARM_SECONDS
    end = began + seconds

    async def one(client: Client) -> None:
        nonlocal errors, ordinal
        while (now := time.monotonic()) < end:
            ordinal += 1
            answer = await client.ask(request(size, nonce, ordinal))
            errors += not answer.startswith(b"HTTP/1.1 200")
            if now >= began:
                latencies.append(time.monotonic() - now)

    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]
    running = asyncio.gather(*map(one, clients))
    await asyncio.sleep(WARM_SECONDS)
    first, cpu_start, start = len(latencies), cpu_seconds(pids), time.monotonic()
    await asyncio.sleep(seconds)
    used, done, took = cpu_seconds(pids) - cpu_start, len(latencies) - first, time.monotonic() - start
    await asyncio.wait_for(running, 10)
    latencies.sort()
    return {
        "requests": done,
        "requests_per_second": done / took,
        "errors": errors,
        "p50_us": latencies[len(latencies) // 2] * 1e6,
        "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
        "cpu_us": used / done * 1e6,
    }


async def open_loop(
    port: int, size: int, rate: float, seconds: float, nonce: str, pids: list[int]
) -> dict[str, object]:
    """Sends Poisson arrivals; latency runs from the moment of sending to the last byte."""
    loop = asyncio.get_running_loop()
    rng = random.Random(nonce)
    due, arrivals = 0.0, []
    while due < WARM_SECONDS + seconds:
        due += rng.expovariate(rate)
        arrivals.append(due)
    requests = [request(size, nonce, i) for i in range(len(arrivals))]
    idle: deque[Client] = deque()
    for _ in range(32):
        idle.append((await loop.create_connection(Client, "127.0.0.1", port))[1])
    latencies: list[float] = []
    errors, following, cpu_start = 0, 0, 0.0
    tasks: set[asyncio.Task[None]] = set()
    over = asyncio.Event()

    async def one(data: bytes, measured: bool) -> None:
        nonlocal errors
        client = idle.pop() if idle else (await loop.create_connection(Client, "127.0.0.1", port))[1]
        start = time.perf_counter()
        answer = await client.ask(data)
        took = time.perf_counter() - start
        if answer.startswith(b"HTTP/1.1 200"):
            idle.append(client)
            if measured:
                latencies.append(took)
        else:
            errors += 1

    def fire() -> None:
        nonlocal following, cpu_start
        now = time.monotonic() - start
        while following < len(arrivals) and arrivals[following] <= now:
            measured = arrivals[following] >= WARM_SECONDS
            if measured and not cpu_start:
                cpu_start = cpu_seconds(pids) or 1e-9
            task = loop.create_task(one(requests[following], measured))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            following += 1
        if following < len(arrivals):
            timer.at(start + arrivals[following])
        else:
            over.set()

    start = time.monotonic()
    timer = Timer(loop, fire)
    fire()
    await over.wait()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    used = cpu_seconds(pids) - cpu_start
    latencies.sort()
    count = len(latencies)
    return {
        "requests": count,
        "errors": errors,
        "p50_us": latencies[count // 2] * 1e6,
        "p99_us": latencies[count * 99 // 100] * 1e6,
        "cpu_us": used / count * 1e6,
    }


class Stream(asyncio.Protocol):
    """One streamed answer; delays of its chunks go to a shared list."""

    def __init__(self, data: bytes, delays: list[int]) -> None:
        self.data, self.delays, self.rest, self.tokens = data, delays, b"", 0
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self.transport.write(self.data)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        now = time.monotonic_ns()
        buffer, end = self.rest + data, 0
        for match in SENT_AT.finditer(buffer):
            self.delays.append(now - int(match[1]))
            self.tokens += 1
            end = match.end()
        self.rest = buffer[end:]
        if self.rest.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(b"data: [DONE]" in FRAMING.sub(b"", self.rest))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if not self.done.done():
            self.done.set_result(False)


async def streams(port: int, count: int, seconds: float, nonce: str, pids: list[int]) -> dict[str, object]:
    """Runs ``count`` streams at once, a token each 5 ms; the window is between their first and last
    tokens."""
    loop = asyncio.get_running_loop()
    tokens = int((WARM_SECONDS + seconds + 0.3) / 0.005)
    extra = f'"stream":true,"max_tokens":{tokens},'
    delays: list[int] = []
    running: list[Stream] = []
    start = time.monotonic()
    for i in range(count):
        data = request(1024, nonce, i, extra)
        running.append(
            (await loop.create_connection(lambda data=data: Stream(data, delays), "127.0.0.1", port))[1]
        )
    await asyncio.sleep(max(0.0, start + WARM_SECONDS - time.monotonic()))
    began, first, cpu_start = time.monotonic(), len(delays), cpu_seconds(pids)
    await asyncio.sleep(seconds)
    used, last, took = cpu_seconds(pids) - cpu_start, len(delays), time.monotonic() - began
    whole = await asyncio.wait_for(asyncio.gather(*(stream.done for stream in running)), 20)
    # An event that was cut in two is not recognized; a stream that lacks more than a few tokens is
    # broken.
    errors = sum(
        not done or stream.tokens < 0.97 * tokens for stream, done in zip(running, whole, strict=True)
    )
    window = sorted(delays[first:last])
    chunks = len(window)
    return {
        "chunks": chunks,
        "chunks_per_second": chunks / took,
        "errors": errors,
        "p50_us": window[chunks // 2] / 1e3 if chunks else None,
        "p99_us": window[chunks * 99 // 100] / 1e3 if chunks else None,
        "cpu_us": used / chunks * 1e6 if chunks else None,
    }


async def answers(
    port: int, count: int, size: int, tokens: int, nonce: str, pids: list[int]
) -> dict[str, object]:
    """Runs ``count`` whole streams at once; CPU time per stream, from its request to its end."""
    loop = asyncio.get_running_loop()
    delays: list[int] = []
    running: list[Stream] = []
    extra = f'"stream":true,"max_tokens":{tokens},'
    requests = [request(size, nonce, i, extra) for i in range(count)]
    began, cpu_start = time.monotonic(), cpu_seconds(pids)
    for data in requests:
        running.append(
            (await loop.create_connection(lambda data=data: Stream(data, delays), "127.0.0.1", port))[1]
        )
    whole = await asyncio.wait_for(asyncio.gather(*(stream.done for stream in running)), 60)
    used, took = cpu_seconds(pids) - cpu_start, time.monotonic() - began
    errors = sum(
        not done or stream.tokens < 0.97 * tokens for stream, done in zip(running, whole, strict=True)
    )
    delays.sort()
    return {
        "requests": count,
        "seconds": took,
        "errors": errors,
        "p50_us": delays[len(delays) // 2] / 1e3,
        "p99_us": delays[len(delays) * 99 // 100] / 1e3,
        "cpu_us": used / count * 1e6,
    }


def main() -> None:
    """Runs one load."""
    kind, port, *numbers, nonce, pids = sys.argv[1:]
    processes = [] if pids == "-" else [int(pid) for pid in pids.split(",")]
    if kind == "open":
        size, rate, seconds = numbers
        run = open_loop(int(port), int(size), float(rate), float(seconds), nonce, processes)
    elif kind == "closed":
        count, size, seconds = numbers
        run = closed(int(port), int(count), int(size), float(seconds), nonce, processes)
    elif kind == "answers":
        count, size, tokens = numbers
        run = answers(int(port), int(count), int(size), int(tokens), nonce, processes)
    else:
        count, seconds = numbers
        run = streams(int(port), int(count), float(seconds), nonce, processes)
    print(json.dumps(uvloop.run(run)))


if __name__ == "__main__":
    main()
