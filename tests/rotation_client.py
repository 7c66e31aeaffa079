"""A client process of `test_server_rotation.py`: closed loops over raw connections.

    python rotation_client.py PORT CONNECTIONS

Each line on the standard input is a JSON list of credentials to send from then on, in turn. The
process prints a line when no request with earlier credentials is in flight. At the end of the
input, it prints the answers: their number by status and by second, and the first refusals.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

BODY = b'{"model":"mock","messages":[{"role":"user","content":"x"}],"max_tokens":1}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nauthorization: Bearer %b\r\n\r\n%b"
)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
SHOWN = 5  # refusals


class Load:
    """The load of this process. ``turn``: how often the credentials have changed."""

    def __init__(self) -> None:
        self.requests: Iterator[bytes] = iter(())
        self.turn = 0
        self.in_flight = Counter[int]()  # by turn
        self.statuses = Counter[str]()
        self.seconds = Counter[int]()  # answers by second since 1970
        self.refusals: list[str] = []
        self.ends = False

    def switch(self, credentials: list[str]) -> None:
        """Uses other credentials from now on."""
        made = [REQUEST % (len(BODY), each.encode(), BODY) for each in credentials]
        self.requests = itertools.cycle(made)
        self.turn += 1
        self.report()

    def report(self) -> None:
        """Prints a line if the last change is complete."""
        if not any(count for turn, count in self.in_flight.items() if turn != self.turn):
            print("switched", flush=True)


class Connection(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.answer = b""
        self.turn = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def send(self) -> None:
        load = self.load
        if load.ends:
            self.transport.close()
            return
        self.turn = load.turn
        load.in_flight[self.turn] += 1
        self.transport.write(next(load.requests))

    def data_received(self, data: bytes) -> None:
        self.answer += data
        head, end, body = self.answer.partition(b"\r\n\r\n")
        length = LENGTH.search(head + b"\r\n")
        if not end or length is None or len(body) < int(length[1]):
            return
        load, self.answer = self.load, b""
        status = head[9:12].decode()
        load.statuses[status] += 1
        load.seconds[int(time.time())] += 1
        if status != "200" and len(load.refusals) < SHOWN:
            load.refusals.append(f"{status} {body.decode(errors='replace')[:300]}")
        load.in_flight[self.turn] -= 1
        if self.turn != load.turn and not load.in_flight[self.turn]:
            load.report()
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.load.ends:
            self.load.statuses["lost connection"] += 1


async def main(port: int, connections: int) -> None:
    """Runs the loops until the input ends."""
    loop, load = asyncio.get_running_loop(), Load()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    load.switch(json.loads(await lines.readline()))
    opened = [
        await loop.create_connection(lambda: Connection(load), "127.0.0.1", port) for _ in range(connections)
    ]
    while line := await lines.readline():
        load.switch(json.loads(line))
    load.ends = True
    while any(load.in_flight.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    for transport, _ in opened:
        transport.close()
    print(json.dumps([load.statuses, load.seconds, load.refusals]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
