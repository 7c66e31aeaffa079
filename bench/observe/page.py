"""Measures memory and frame times of the live page with 1,000 engines, in Chromium.

    python bench/observe/page.py memory [--minutes 60] [--out FILE]
    python bench/observe/page.py frames [--minutes 4] [--out FILE]

A router with 1,000 engines sends the page an update each second, and about 15 requests per second
end.

`memory`: each 5 minutes, the JavaScript heap and the nodes of the document after a forced
collection of garbage (CDP, `Performance.getMetrics`). Also the CPU time of all processes.

`frames`: the distance of two calls of `requestAnimationFrame`. `draw` is the script's time of an
update. `idle` has the frames of an empty document, in the same browser before the page opens.
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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "http"))
import proc

from common import ROOT, about, percentile, write_result

ENGINES = 1000
PORTS = {"memory": 21000, "frames": 23000}  # of the first engine: both can run at once
CLIENTS, TOKENS = 3, 16
SAMPLE_SECONDS = 300.0
IDLE_SECONDS = 30.0
SLOW_FRAME_MS = 50.0
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
UPDATES = "Number(document.documentElement.dataset.updates || 0)"


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """An empty page in Chromium."""
    from playwright.async_api import async_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    async with async_playwright() as play:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        chromium = await play.chromium.launch(executable_path=program, args=arguments)
        try:
            yield await chromium.new_page(viewport={"width": 1400, "height": 1000})
        finally:
            await chromium.close()


@contextlib.asynccontextmanager
async def router(first: int, folder: Path) -> AsyncIterator[str]:
    """A router on the port before ``first``, and one process for all engines, from that port on."""
    ports = [first + number for number in range(ENGINES)]
    config = folder / "router.yaml"
    engines = [{"url": f"http://127.0.0.1:{port}", "name": f"e{n}"} for n, port in enumerate(ports)]
    config.write_text(yaml.safe_dump({"port": first - 1, "model": "mock", "engines": engines}))
    mock = [sys.executable, ROOT / "bench" / "http" / "mock.py", *map(str, ports)]
    engine = await asyncio.create_subprocess_exec(*mock)
    serve = [sys.executable, "-c", SERVE, "serve", "--config", config]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*serve, stderr=log)
    url = f"http://127.0.0.1:{first - 1}"
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


async def memory(url: str, minutes: float) -> dict[str, Any]:
    """Samples the memory of the page and the CPU time of this process and its descendants."""
    async with traffic(url), browser() as page:
        session = await page.context.new_cdp_session(page)
        await session.send("Performance.enable")
        await page.goto(url + "/ui")
        await asyncio.sleep(3)
        began, samples = time.monotonic(), []
        for number in range(round(minutes * 60 / SAMPLE_SECONDS) + 1):
            await asyncio.sleep(began + number * SAMPLE_SECONDS - time.monotonic())
            await session.send("HeapProfiler.collectGarbage")
            found = (await session.send("Performance.getMetrics"))["metrics"]
            metrics = {each["name"]: each["value"] for each in found}
            sample = {
                "seconds": round(time.monotonic() - began),
                "updates": await page.evaluate(UPDATES),
                "heap_mib": round(metrics["JSHeapUsedSize"] / 2**20, 2),
                "nodes": metrics["Nodes"],
                "listeners": metrics["JSEventListeners"],
                "cpu_seconds": round(proc.cpu_seconds(proc.tree(os.getpid())), 1),
            }
            samples.append(sample)
            print(json.dumps(sample), file=sys.stderr, flush=True)
    return {"samples": samples}


async def frames(url: str, minutes: float) -> dict[str, Any]:
    """Watches the frames of an empty document, then of the page, in ms."""

    def figures(times: list[float]) -> dict[str, float]:
        times.sort()
        return {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99), "max": times[-1]}

    async with traffic(url), browser() as page:
        await page.goto(url + "/health")
        await page.evaluate(WATCH)
        await asyncio.sleep(IDLE_SECONDS)
        idle = (await page.evaluate("window.watched"))["frames"]
        await page.goto(url + "/ui")
        await asyncio.sleep(3)
        await page.evaluate(WATCH)
        await asyncio.sleep(minutes * 60)
        found = await page.evaluate("window.watched")
        return {
            "updates": await page.evaluate(UPDATES),
            "frames": len(found["frames"]),
            "frames_above_50_ms": sum(each > SLOW_FRAME_MS for each in found["frames"]),
            "idle_ms": figures(idle),
            "frame_ms": figures(found["frames"]),
            "draw_ms": figures(found["draws"]),
        }


async def measured(part: str, minutes: float) -> dict[str, Any]:
    """Returns the figures of a part."""
    with tempfile.TemporaryDirectory() as folder:
        async with router(PORTS[part], Path(folder)) as url:
            return await {"memory": memory, "frames": frames}[part](url, minutes)


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PORTS)
    parser.add_argument("--minutes", type=float, help="default: 60 for the memory, 4 for the frames")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-page-PART.json")
    given = parser.parse_args()
    minutes = given.minutes or {"memory": 60.0, "frames": 4.0}[given.part]
    start, before = about(None, []), os.getloadavg()
    found = asyncio.run(measured(given.part, minutes))
    settings = {"engines": ENGINES, "minutes": minutes, "load_average": [before, os.getloadavg()]}
    print(json.dumps({name: each for name, each in found.items() if name != "samples"}))
    print(write_result({**start, **settings, **found}, f"page-{given.part}", given.out))


if __name__ == "__main__":
    main()
