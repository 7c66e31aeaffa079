"""Measures memory and frame times of the live page with 1,000 engines, in Chromium.

    python bench/observe/page.py [--minutes 15] [--updates 3600] [--rate 10] [--out FILE]

`real`: the page of a router with 1,000 engines, for ``--minutes``. The router sends an update each
second, and 15 requests per second end.

`hour`: an hour of updates in less time. The updates of the last minute of the real run are sent
again, at most ``--rate`` per second, until the page has drawn ``--updates``. Each has the next
second as its time, and its requests have new ids, so the page makes as many rows as in an hour, or
more.

Memory is the JavaScript heap after a forced collection of garbage (CDP, `Performance.getMetrics`).
A frame's time is the distance of two calls of `requestAnimationFrame`; `draw` is the script's time
of an update.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import ROOT, about, percentile, write_result

ENGINES, ENGINE_PORT, ROUTER_PORT, COPY_PORT = 1000, 21000, 18390, 18391
CLIENTS, TOKENS = 3, 16
SAMPLES = 10  # of the memory, in each part
SLOW_FRAME_MS = 50.0
PATIENCE_SECONDS = 2.0  # the page connects again if it receives nothing for 10 s
SERVE = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"
WATCH = """() => {
  const watched = window.watched = { frames: [], draws: [] };
  const root = document.documentElement.dataset;
  let last = performance.now(), updates = root.updates;
  const frame = (now) => {
    watched.frames.push(now - last);
    last = now;
    if (root.updates !== updates) watched.draws.push(Number(root.updateMilliseconds));
    updates = root.updates;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame((now) => { last = now; requestAnimationFrame(frame); });
}"""
DRAWN = "Number(document.documentElement.dataset.updates || 0)"
TAKE = """() => {
  const { frames, draws } = window.watched;
  const taken = { frames: frames.splice(0), draws: draws.splice(0) };
  return { ...taken, updates: Number(document.documentElement.dataset.updates || 0) };
}"""


class Page:
    """A page in Chromium, its memory over time, and the times of its frames."""

    def __init__(self, page: Any, session: Any) -> None:
        self._page, self._session = page, session
        self.began = time.monotonic()
        self.memory: list[dict[str, float]] = []
        self.frames: list[float] = []
        self.draws: list[float] = []
        self.updates = 0

    async def until(self, updates: int) -> int:
        """Waits until the page has drawn this many updates, or for PATIENCE_SECONDS.

        Returns the number of its updates.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        drawn: int = await self._page.evaluate(DRAWN)
        while drawn < updates and time.monotonic() < end:
            await asyncio.sleep(0.02)
            drawn = await self._page.evaluate(DRAWN)
        return drawn

    async def sample(self) -> None:
        """Takes the frames since the last call, then the memory."""
        await self.take()
        await self._session.send("HeapProfiler.collectGarbage")
        found = (await self._session.send("Performance.getMetrics"))["metrics"]
        metrics = {each["name"]: each["value"] for each in found}
        sample = {
            "seconds": round(time.monotonic() - self.began),
            "updates": self.updates,
            "heap_mib": round(metrics["JSHeapUsedSize"] / 2**20, 2),
            "nodes": metrics["Nodes"],
            "listeners": metrics["JSEventListeners"],
        }
        self.memory.append(sample)
        print(json.dumps(sample), file=sys.stderr, flush=True)
        await self._page.evaluate("() => { window.watched.frames.length = 0; }")  # collecting made one slow

    async def take(self) -> None:
        """Takes the frames since the last call."""
        taken = await self._page.evaluate(TAKE)
        self.frames += taken["frames"]
        self.draws += taken["draws"]
        self.updates = taken["updates"]

    def result(self) -> dict[str, Any]:
        """Returns the figures of the page, in ms and MiB."""
        frames, draws = sorted(self.frames), sorted(self.draws)
        return {
            "updates": self.updates,
            "frames": len(frames),
            "frame_ms": {"p50": percentile(frames, 0.5), "p99": percentile(frames, 0.99), "max": frames[-1]},
            "frames_above_50_ms": sum(each > SLOW_FRAME_MS for each in frames),
            "draw_ms": {"p50": percentile(draws, 0.5), "p99": percentile(draws, 0.99), "max": draws[-1]},
            "memory": self.memory,
        }


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Page]:
    """Opens the live page in Chromium."""
    from playwright.async_api import async_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as play:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = await play.chromium.launch(executable_path=program, args=arguments)
        try:
            page = await chromium.new_page(viewport={"width": 1400, "height": 1000})
            session = await page.context.new_cdp_session(page)
            await session.send("Performance.enable")
            await page.goto(url + "/ui")
            await page.evaluate(WATCH)
            await asyncio.sleep(3)
            yield Page(page, session)
        finally:
            await chromium.close()


@contextlib.asynccontextmanager
async def router(folder: Path) -> AsyncIterator[str]:
    """A router, and one process for all engines."""
    ports = [ENGINE_PORT + number for number in range(ENGINES)]
    config = folder / "router.yaml"
    engines = [{"url": f"http://127.0.0.1:{port}", "name": f"e{n}"} for n, port in enumerate(ports)]
    config.write_text(yaml.safe_dump({"port": ROUTER_PORT, "model": "mock", "engines": engines}))
    mock = [sys.executable, ROOT / "bench" / "http" / "mock.py", *map(str, ports)]
    engine = await asyncio.create_subprocess_exec(*mock)
    serve = [sys.executable, "-c", SERVE, "serve", "--config", config]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*serve, stderr=log)
    url = f"http://127.0.0.1:{ROUTER_PORT}"
    try:
        async with aiohttp.ClientSession() as client:
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(url + "/ready") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)
            else:
                sys.exit(f"page.py: the router does not start:\n{(folder / 'log').read_text()[-2000:]}")
        yield url
    finally:
        for each in (process, engine):
            each.terminate()
            await each.wait()


@contextlib.asynccontextmanager
async def traffic(url: str) -> AsyncIterator[None]:
    """Streams one after the other, of some clients."""

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        turn = 0
        while True:
            turn += 1
            content = f"system {number % 2} " * 40 + f"turn {turn}"
            body = {"model": "mock", "stream": True, "max_tokens": TOKENS}
            body["messages"] = [{"role": "user", "content": content}]
            async with session.post(url + "/v1/chat/completions", json=body) as answer:
                await answer.read()
            await asyncio.sleep(0.1)

    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(client(number, session)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def blocks(url: str, kept: deque[tuple[str, Any]], first: dict[str, Any]) -> None:
    """Reads the page's events: keeps the last updates, and the first event of each other name."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 24) as client,
        client.get(url + "/debug/live", headers={"accept": "text/event-stream"}) as answer,
    ):
        name = ""
        async for raw in answer.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if name == "update":
                    kept.append((name, event))
                else:
                    first.setdefault(name, event)


async def real(url: str, minutes: float) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """Watches the real page. Returns its figures, the last updates and the first other events."""
    kept: deque[tuple[str, Any]] = deque(maxlen=60)
    first: dict[str, Any] = {}
    reader = asyncio.create_task(blocks(url, kept, first))
    try:
        async with traffic(url), opened(url) as page:
            await page.sample()
            for _ in range(SAMPLES):
                await asyncio.sleep(minutes * 60 / SAMPLES)
                await page.sample()
            return page.result(), [event for _, event in kept], first
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def later(update: dict[str, Any], number: int, start: float) -> bytes:
    """Returns a kept update as the update of another second."""
    at = start + number
    shift = at - update["points"][-1][0] if update["points"] else 0.0
    points = [[point[0] + shift, *point[1:]] for point in update["points"]]

    def moved(each: dict[str, Any]) -> dict[str, Any]:
        names = {name: f"{each[name]}-{number}" for name in ("id", "request_id") if each.get(name)}
        return each | names | {"at": each["at"] + shift}

    changed = {
        "points": points,
        "requests": [moved(each) for each in update["requests"]],
        "events": [moved(each) for each in update["events"]],
    }
    return b"event: update\ndata: %b\n\n" % json.dumps(update | changed).encode()


async def hour(url: str, kept: list[Any], first: dict[str, Any], updates: int, rate: float) -> dict[str, Any]:
    """Shows the page an hour of updates in less time. Its files come from the router."""
    start = first["history"]["points"][-1][0] if first["history"]["points"] else 0.0
    watching: list[Page] = []

    async def live(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for name in ("hello", "fleet", "history"):
            await response.write(f"event: {name}\ndata: {json.dumps(first[name])}\n\n".encode())
        number = drawn = 0
        due = time.monotonic()
        while drawn < updates:
            number += 1
            await response.write(later(kept[number % len(kept)], number, start))
            due = max(due + 1 / rate, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            if watching:  # one after the other: the page draws only the last one of several
                drawn = await watching[0].until(drawn + 1)
        await asyncio.sleep(3600)
        return response

    async with aiohttp.ClientSession() as client:

        async def file(request: web.Request) -> web.Response:
            async with client.get(url + request.path) as answer:
                fields = {"content-type": answer.headers["content-type"]}
                return web.Response(body=await answer.read(), headers=fields)

        app = web.Application()
        app.router.add_get("/debug/live", live)
        app.router.add_get("/{path:.*}", file)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", COPY_PORT).start()
        try:
            async with opened(f"http://127.0.0.1:{COPY_PORT}") as page:
                watching.append(page)
                await page.sample()
                for number in range(1, SAMPLES + 1):
                    while await page.until(updates * number // SAMPLES) < updates * number // SAMPLES:
                        pass
                    await page.sample()
                return page.result()
        finally:
            await runner.cleanup()


async def measured(minutes: float, updates: int, rate: float) -> dict[str, Any]:
    """Returns the figures of both parts."""
    with tempfile.TemporaryDirectory() as folder:
        async with router(Path(folder)) as url:
            live, kept, first = await real(url, minutes)
            faster = await hour(url, kept, first, updates, rate) if updates else None
    return {"real": live, "hour": faster}


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15, help="of the real page")
    parser.add_argument("--updates", type=int, default=3600, help="of the hour; 0: without it")
    parser.add_argument("--rate", type=float, default=10, help="updates per second of the hour")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-page.json")
    given = parser.parse_args()
    before = os.getloadavg()
    parts = asyncio.run(measured(given.minutes, given.updates, given.rate))
    settings = {
        "load_average": [before, os.getloadavg()],
        "engines": ENGINES,
        "minutes": given.minutes,
        "rate": given.rate,
    }
    print("| part | updates | heap, MiB: first, last, greatest | frame, ms: p50, p99, max | above 50 ms |")
    print("| --- | --- | --- | --- | --- |")
    for name, part in parts.items():
        if part is None:
            continue
        heap, frame = [each["heap_mib"] for each in part["memory"]], part["frame_ms"]
        shown = f"{heap[0]:.1f}, {heap[-1]:.1f}, {max(heap):.1f} | {frame['p50']:.1f}, {frame['p99']:.1f}"
        slow = f"{frame['max']:.0f} | {part['frames_above_50_ms']} of {part['frames']}"
        print(f"| {name} | {part['updates']} | {shown}, {slow} |")
    print(write_result({**about(None, []), **settings, "parts": parts}, "page", given.out))


if __name__ == "__main__":
    main()
