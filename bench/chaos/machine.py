"""Scenarios of the router's machine: no file descriptors, no room for the log, a stepped clock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import resource
import subprocess
from pathlib import Path

import aiohttp
import orjson
from routers import OwnRouter
from stage import RuleError, Stage, stage, until
from traffic import MODEL

NEWCOMERS = 60
# The longest CPU time of a router in the seconds without descriptors: it serves 6 streams, and must
# not try to accept in a loop.
SHORT_SECONDS, MOST_CPU_SECONDS = 4.0, 2.0
LOG_BYTES = 20_000
STEPS_SECONDS = (3600.0, -7200.0, 86_400.0, -400 * 86_400.0, 10 * 365 * 86_400.0, 0.0)
CLOCK = Path(__file__).with_name("stepped_clock.c")


async def no_descriptors(folder: Path, seed: int, *, timed: bool = False) -> dict[str, float | str]:
    """The router may open no more files, while clients connect. Later, it may again.

    Open streams end well, requests on open connections are answered, new clients wait or get an
    error, and no engine counts as failed.
    """
    async with stage(folder, seed) as it:
        router = await it.router(timed=timed)
        running = it.traffic(router, rate=40.0)
        streams = asyncio.create_task(running.run(1.5, it.session))
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector) as kept:
            await _status(kept, router)
            await asyncio.sleep(1.6)  # all streams have begun
            limits = resource.prlimit(router.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, (router.open_files(), limits[1]))
            used = router.cpu_seconds()
            newcomers = [asyncio.create_task(_newcomer(router)) for _ in range(NEWCOMERS)]
            await asyncio.sleep(SHORT_SECONDS)
            used = router.cpu_seconds() - used
            kept_status = await _status(kept, router)
            await streams
            resource.prlimit(router.pid, resource.RLIMIT_NOFILE, limits)
            waited = await asyncio.gather(*newcomers)
        took = await until(lambda: _serves(it, router), "a new client is served")
        log = router.log(1_000_000)
        figures = await it.check(running)
        if kept_status not in (200, 503):
            raise RuleError(f"a request on an open connection got {kept_status}, expected 200 or 503")
        if used > MOST_CPU_SECONDS:
            raise RuleError(f"{used:.1f} s of CPU time in {SHORT_SECONDS:g} s without descriptors")
        if "engine down" in log or "not usable" in log:
            raise RuleError(f"an engine counted as failed: {log[-2000:]}")
        if len(log) > 100_000:
            raise RuleError(f"the log grew by {len(log)} bytes")
        return figures | {
            "loop": "asyncio" if timed else "uvloop",
            "on an open connection": kept_status,
            "newcomers with an answer": sum(status == 200 for status in waited),
            "newcomers closed or 503": sum(status != 200 for status in waited),
            "CPU, s": round(used, 2),
            "served again after, s": round(took, 2),
        }


async def no_descriptors_asyncio(folder: Path, seed: int) -> dict[str, float | str]:
    """As `no_descriptors`, on asyncio's own loop."""
    return await no_descriptors(folder, seed, timed=True)


async def _status(session: aiohttp.ClientSession, router: OwnRouter) -> int:
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
    async with session.post(f"{router.url}/v1/completions", json=body) as response:
        await response.read()
        return response.status


async def _newcomer(router: OwnRouter) -> int:
    """The status that a new client gets; 0: its connection was closed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        with contextlib.suppress(aiohttp.ClientError):
            return await _status(session, router)
    return 0


async def _serves(it: Stage, router: OwnRouter) -> bool:
    return await _newcomer(router) == 200 and await _newcomer(router) == 200 and bool(it.engines)


async def log_at_its_limit(folder: Path, seed: int) -> dict[str, float | str]:
    """The log file reaches the size that the process may write. Later, it may write more.

    Requests are served, and the log then has the number of lost lines, once.
    """
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (LOG_BYTES, resource.RLIM_INFINITY))
    file = folder / "log"
    async with stage(folder, seed) as it:
        # The callbacks' file must be writable, so this router is not timed.
        router = await it.router({"log": {"json": True, "access": True}}, timed=False, log=file, preset=limit)
        traffic = it.traffic(router, rate=60.0)
        await traffic.run(4.0, it.session)
        if file.stat().st_size != LOG_BYTES:
            raise RuleError(f"the log has {file.stat().st_size} bytes: its limit was not reached")
        (lost,) = (await router.metric(it.session, "lmetric_log_lines_dropped_total")).values()
        resource.prlimit(router.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        await traffic.run(0.5, it.session)
        figures = await it.check(traffic)
        told = [line for line in router.log(1_000_000).splitlines() if "log lines were dropped" in line]
        if len(told) != 1:
            raise RuleError(f"the log says {len(told)} times that lines were dropped, expected once")
        (line,) = (
            orjson.loads(each[each.index('{"lines"') :]) if '{"lines"' in each else {} for each in told
        )
        return figures | {"lost lines": lost, "reason": str(line.get("reason"))}


async def log_on_a_full_disk(folder: Path, seed: int) -> dict[str, float | str]:
    """No line of the log can be written, from the start: /dev/full is a disk without room."""
    async with stage(folder, seed) as it:
        router = await it.router({"log": {"json": True, "access": True}}, timed=False, log=Path("/dev/full"))
        traffic = it.traffic(router)
        await traffic.run(3.0, it.session)
        figures = await it.check(traffic)
        (lost,) = (await router.metric(it.session, "lmetric_log_lines_dropped_total")).values()
        if lost < len(traffic.asked):
            raise RuleError(f"{lost} lost lines, expected {len(traffic.asked)} or more")
        return figures | {"lost lines": lost, "exit code after SIGTERM": await router.terminate()}


def build_clock(folder: Path) -> Path:
    """Returns the library that steps a process's wall clock. Raises CalledProcessError."""
    library = folder / "stepped_clock.so"
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(CLOCK)]
    subprocess.run(command, check=True)
    return library


async def clock_stepped(folder: Path, seed: int) -> dict[str, float | str]:
    """The router's wall clock is stepped under load: hours, days and years, in both directions.

    Its engines publish KV events and keep their clocks. Nothing but the times in the log changes.
    """
    offset = folder / "offset"
    offset.write_bytes(bytes(8))
    environ = {"LD_PRELOAD": str(build_clock(folder)), "STEPPED_CLOCK": str(offset)}
    async with stage(folder, seed, kv_events=True) as it:
        config = {"kv_events": {"without_tokenizer": True}}
        router = await it.router(config, environ=environ)
        traffic = it.traffic(router)
        sending = asyncio.create_task(traffic.run(1.2 * len(STEPS_SECONDS), it.session))
        for step in STEPS_SECONDS:
            await asyncio.sleep(1.0)
            with offset.open("r+b") as file:
                file.write(int(step * 1e9).to_bytes(8, "little", signed=True))
        await sending
        figures = await it.check(traffic)
        lines = [orjson.loads(line) for line in router.log(1_000_000).splitlines()]
        bad = [line for line in lines if line["level"] in ("warning", "error")]
        if bad:
            raise RuleError(f"the steps had effects: {bad[:3]}")
        page = {each["name"]: each for each in await router.page(it.session, "/debug/engines")}
        if not all(each["healthy"] for each in page.values()):
            raise RuleError(f"an engine is not healthy: {page}")
        return figures | {"steps": len(STEPS_SECONDS)}
