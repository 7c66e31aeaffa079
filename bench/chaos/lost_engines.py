"""2,000 streams through two workers, while every 10 s an engine is killed and another one joins.

    python bench/chaos/lost_engines.py [--seconds 240] [--streams 2000] [--out FILE]

Eight emulated engines send each stream two tokens a second, as real engines do: a token of all
streams at once. A stream has 16 tokens, so it meets at most one loss: a router lets only one
further engine continue a request whose engine has failed. A client begins a new stream when one
ends. A stream is lost if it has no whole answer, another number of tokens, or another text than the
other streams of its prompt.

At the same time, `--probes` streams of a mock engine (`bench/http/mock.py`) go through the same
workers, through a bare relay (`bench/http/floor_raw.py`) and to the mock engine directly. Their
tokens carry the time of their sending. The workers run on asyncio's loop, which is slower than
uvloop, because only its turns can be timed (`in_worker/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "http"))

import aiohttp
import load
import yaml
from in_worker.sitecustomize import BIN_SECONDS
from proc import cpu_seconds, rss_mib, tree
from routers import RUN, Router, samples, settled

from common import ROOT, about, percentile, write_result
from lmetric_lab.ports import free_ports

HTTP = ROOT / "bench" / "http"
TOKENIZER = ROOT / "python" / "lmetric_lab" / "emulated"
MODEL, PROBED = "chaos", "mock"
ENGINES, TOKENS, TOKEN_SECONDS, PROMPTS = 8, 16, 0.5, 16
EVERY_SECONDS = 10.0
# Of a profile: a step takes the seconds of a token, however many streams and new prompts it has.
PROFILE = {
    "fixed_seconds": TOKEN_SECONDS,
    "decode_seconds_per_sequence": 0.0,
    "decode_seconds_per_context_token": 0.0,
    "prefill_seconds_per_token": 1e-9,
    "prefill_seconds_per_attention_pair": 0.0,
    "max_batch_tokens": 1 << 17,
    "max_sequences": 4096,
    "block_tokens": 16,
    "cache_blocks": 100_000,
    "kv_bytes_per_token": 98_304,
}
LIMIT_SECONDS = 60.0  # of a stream
TEXT = re.compile(rb'"text":"((?:[^"\\]|\\.)*)"')
OUTPUT_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
WORDS = ["river", "stone", "cloud", "garden", "letter", "silver", "winter", "engine"]


@dataclass
class Engine:
    """An emulated engine as a process."""

    name: str
    url: str
    process: asyncio.subprocess.Process

    @classmethod
    async def start(cls, number: int, profile: Path) -> Engine:
        """Starts one."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lmetric.cli", "engine", "--port", "0", "--exit-with-parent"),
            *("--model", MODEL, "--profile", str(profile), "--no-kv-events"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            ready = json.loads(await process.stdout.readline())
        return cls(f"e{number}", ready["url"], process)

    async def kill(self) -> None:
        """Kills it."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class Fleet:
    """The engines that the router finds in a file."""

    def __init__(self, folder: Path, probed: str) -> None:
        self.file = folder / "engines.yaml"
        self._profile = folder / "profile.yaml"
        self._profile.write_text(yaml.safe_dump(PROFILE))
        self._probed = {"name": PROBED, "url": probed, "model": PROBED}
        self._started = 0
        self.engines: list[Engine] = []
        self.lost = 0

    async def join(self) -> None:
        """Starts an engine and lists it."""
        self._started += 1
        self.engines.append(await Engine.start(self._started, self._profile))
        self._write()

    async def lose(self) -> None:
        """Kills the oldest engine. It leaves the list later."""
        self.lost += 1
        await self.engines.pop(0).kill()

    def _write(self) -> None:
        listed = [{"name": each.name, "url": each.url, "model": MODEL} for each in self.engines]
        part = self.file.with_suffix(".part")
        part.write_text(yaml.safe_dump([self._probed, *listed]))
        part.replace(self.file)

    async def change(self, seconds: float) -> None:
        """Loses an engine and lets one join, each ten seconds, for a time."""
        for turn in range(1, int(seconds / EVERY_SECONDS)):
            began = time.monotonic()
            await self.lose()
            await self.join()
            await asyncio.sleep(max(EVERY_SECONDS - (time.monotonic() - began), 0.0))
            print(f"{turn * EVERY_SECONDS:.0f} s: {self.lost} engines lost", file=sys.stderr, flush=True)


class Stream(asyncio.Protocol):
    """One streamed answer, on a connection of its own."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.raw = bytearray()
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]
        self.transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.raw += data
        if self.raw.endswith(b"0\r\n\r\n"):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        if not self.over.done():
            self.over.set_result(None)


@dataclass
class Clients:
    """Clients that keep a number of streams open."""

    port: int
    ended: int = 0
    lost: list[str] = field(default_factory=list)
    texts: dict[int, Counter[bytes]] = field(default_factory=dict)

    def request(self, number: int) -> bytes:
        """Returns the bytes of a request."""
        prompt = number % PROMPTS
        words = " ".join(WORDS[(prompt + step * (prompt + 1)) % len(WORDS)] for step in range(30))
        body = json.dumps(
            {
                "model": MODEL,
                "prompt": f"{prompt} {words}",
                "max_tokens": TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def run(self, number: int, count: int, until: float) -> None:
        """Sends one stream after the other."""
        # The first streams begin one after the other.
        await asyncio.sleep(TOKENS * TOKEN_SECONDS * number / count)
        while time.monotonic() < until:
            await self._one(number)
            number += count

    async def _one(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        data = self.request(number)
        _, stream = await loop.create_connection(lambda: Stream(data), "127.0.0.1", self.port)
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await stream.over
        except TimeoutError:
            stream.transport.abort()
        raw = load.FRAMING.sub(b"", bytes(stream.raw))
        tokens = OUTPUT_TOKENS.findall(raw)
        self.ended += 1
        if b"data: [DONE]" not in raw or not tokens or int(tokens[-1]) != TOKENS:
            self.lost.append(f"request {number}: {raw[-400:]!r}")
            return
        text = b"".join(TEXT.findall(raw))
        self.texts.setdefault(number % PROMPTS, Counter())[text] += 1

    def others(self) -> int:
        """Returns the number of whole answers with another text than most of their prompt."""
        return sum(found.total() - max(found.values()) for found in self.texts.values())


async def probe(port: int, count: int, seconds: float, delays: list[float]) -> int:
    """Keeps streams of the mock engine open. Adds the microseconds that each token took.

    Returns the number of broken streams.
    """
    tokens = int(seconds / TOKEN_SECONDS)
    found: list[int] = []
    running = []
    loop = asyncio.get_running_loop()
    for number in range(count):
        data = load.request(300, f"probe{port}", number, f'"stream":true,"max_tokens":{tokens},')
        connected = await loop.create_connection(
            lambda data=data: load.Stream(data, found), "127.0.0.1", port
        )
        running.append(connected[1])
        await asyncio.sleep(TOKEN_SECONDS / count)  # so that their tokens do not come at once
    whole = await asyncio.wait_for(
        asyncio.gather(*(stream.done for stream in running)), seconds + LIMIT_SECONDS
    )
    delays += sorted(delay / 1e3 for delay in found)
    return whole.count(False)


def turns(folder: Path, pids: Sequence[int]) -> Counter[int]:
    """Returns the number of turns of these processes by tenths of a millisecond."""
    total: Counter[int] = Counter()
    for pid in pids:
        found = json.loads((folder / f"{pid}.json").read_text())
        total += Counter({int(each): count for each, count in found.items()})
    return total


def turn_figures(counts: Counter[int]) -> dict[str, float]:
    """Returns percentiles of turns, milliseconds: the upper end of their tenth."""
    every = sorted(counts.elements())
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999, "most_ms": 1.0}
    milliseconds = {
        name: (percentile(every, share) + 1) * BIN_SECONDS * 1e3 for name, share in shares.items()
    }
    return milliseconds | {"turns": len(every)}


async def measured(streams: int, probes: int, seconds: float) -> dict[str, Any]:
    """Runs everything. Returns the figures."""
    port, mock_port, relay_port = free_ports(3)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def start(*argv: str) -> asyncio.subprocess.Process:
            process = await asyncio.create_subprocess_exec(sys.executable, *argv)
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
            return process

        mock = f"http://127.0.0.1:{mock_port}"
        await start(str(HTTP / "mock.py"), "--token-seconds", str(TOKEN_SECONDS), str(mock_port))
        await start(str(HTTP / "floor_raw.py"), str(relay_port), mock)
        fleet = Fleet(folder, mock)
        await asyncio.gather(*(fleet.join() for _ in range(ENGINES)))
        config = folder / "router.yaml"
        settings = {
            "port": port,
            "workers": 2,
            "discovery": [{"file": str(fleet.file)}],
            "tokenizer": str(TOKENIZER),
            "limits": {"max_client_share": 1},
        }
        config.write_text(yaml.safe_dump(settings))
        (told := folder / "turns").mkdir()
        path = [str(Path(__file__).parent / "in_worker"), os.environ.get("PYTHONPATH", "")]
        environ = {"TURNS_FOLDER": str(told), "PYTHONPATH": ":".join(filter(None, path))}
        command = [sys.executable, "-c", RUN, "serve", "--config", str(config)]
        router = Router(command, port, environ=environ, model=MODEL)
        stack.push_async_callback(router.stop)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await router.start(session)
        await asyncio.sleep(2.0)  # the rest of its engines
        workers = [pid for pid in tree(router.pid) if pid != router.pid]
        until = time.monotonic() + seconds
        clients = Clients(port)
        delays: dict[str, list[float]] = {"direct": [], "relay": [], "router": []}
        ports = dict(zip(delays, (mock_port, relay_port, port), strict=True))
        running = [asyncio.create_task(clients.run(n, streams, until)) for n in range(streams)]
        await asyncio.sleep(TOKENS * TOKEN_SECONDS)  # until all streams are open
        begun, used, clock = turns(told, workers), cpu_seconds(tree(router.pid)), time.monotonic()
        left = until - clock
        changing = asyncio.create_task(fleet.change(left - EVERY_SECONDS))
        broken = await asyncio.gather(
            *(probe(ports[name], probes, left - EVERY_SECONDS, found) for name, found in delays.items())
        )
        await asyncio.sleep(2 * 1.0)  # until the workers have written their turns
        counted = turns(told, workers) - begun
        used, took = cpu_seconds(tree(router.pid)) - used, time.monotonic() - clock
        memory = {pid: rss_mib([pid]) for pid in workers}
        await changing
        await asyncio.gather(*running)
        in_flight = await settled(router, session)
        async with session.get(f"{router.url}/metrics") as response:
            page = await response.text()
        for engine in fleet.engines:
            await engine.kill()
        await router.terminate()
    names = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999}
    return {
        "streams": clients.ended,
        "lost": len(clients.lost),
        "of_another_text": clients.others(),
        "examples_of_lost": clients.lost[:5],
        "engines_lost": fleet.lost,
        "failovers": samples(page, "lmetric_stream_failovers_total"),
        "in_flight_at_end": in_flight,
        "turn": turn_figures(counted),
        "router_cores": used / took,
        "worker_rss_mib": list(memory.values()),
        "delays": {
            name: {key: percentile(found, share) for key, share in names.items()} | {"tokens": len(found)}
            for name, found in delays.items()
        },
        "broken_probes": dict(zip(delays, broken, strict=True)),
    }


def main() -> None:
    """Measures, prints, writes. Fails if a stream was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=2_000, help="streams at once")
    parser.add_argument("--probes", type=int, default=100, help="streams at once of each probed way")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-lost-engines.json")
    given = parser.parse_args()
    before = os.getloadavg()
    found = asyncio.run(measured(given.streams, given.probes, given.seconds))
    setting = {"streams": given.streams, "seconds": given.seconds, "engines": ENGINES, "tokens": TOKENS}
    result = {
        **about(None, []),
        "load_average": [before, os.getloadavg()],
        "setting": setting | {"probes": given.probes, "token_seconds": TOKEN_SECONDS, "every": EVERY_SECONDS},
        **found,
    }
    print(json.dumps(found, indent=1))
    print(write_result(result, "lost-engines", given.out))
    broken = found["lost"] or found["of_another_text"] or any(found["broken_probes"].values())
    if broken or found["in_flight_at_end"] != "0":
        sys.exit("lost_engines.py: streams were lost, or requests are left")


if __name__ == "__main__":
    main()
