"""The router as a process before real engines, and its decision records."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from openai import AsyncOpenAI

from lmetric.config import PoolSettings, ServerConfig
from lmetric.config.written import folded
from test_server_process import RUN, RUN_FORCED, Process, router
from vllm_process import VllmEngine


@dataclass
class Served:
    """A router that listens, a client of OpenAI's library, and one for the router's own pages."""

    process: Process
    client: AsyncOpenAI
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.process.url

    async def page(self, path: str) -> Any:
        """A page of the router, as JSON if it is JSON."""
        async with self.session.get(self.url + path) as response:
            body = await response.read()
            assert response.status == 200, (path, response.status, body)
            return orjson.loads(body) if response.content_type == "application/json" else body.decode()

    async def engines(self) -> dict[str, dict[str, Any]]:
        """/debug/engines, by name."""
        return {engine["name"]: engine for engine in await self.page("/debug/engines")}

    async def indicator(self, name: str) -> dict[str, float | None]:
        """One indicator, by engine."""
        (model,) = (await self.page("/debug/indicators")).values()
        return {engine: values[name] for engine, values in model.items()}

    async def record(self, headers: Any) -> dict[str, Any]:
        """The decision record of an answer, once the outcome is in it."""
        async with asyncio.timeout(30):
            while True:
                record: dict[str, Any] = await self.page(
                    f"/debug/decisions/{headers['x-lmetric-decision']}?full=1"
                )
                if record.get("outcome"):
                    return record
                await asyncio.sleep(0.01)

    async def until(self, true: Callable[[], Any], seconds: float = 10.0) -> None:
        """Waits for an awaitable that comes out true."""
        async with asyncio.timeout(seconds):
            while not await true():  # noqa: ASYNC110 - another process is asked
                await asyncio.sleep(0.05)


def configured(folder: Path, **values: Any) -> tuple[list[str], str]:
    """The flags and the code of a router whose settings and constants are `values`.

    Operators cannot set constants. Some tests need others, for crowded machines or short prompts.
    """
    constants = {name: values.pop(name) for name in list(values) if name in PoolSettings.__class_vars__}
    file = folder / "router.yaml"
    file.write_text(yaml.safe_dump(folded(values, ServerConfig)))
    run = "from lmetric.config import PoolSettings\n"
    run += "".join(f"PoolSettings.{name} = {value!r}\n" for name, value in constants.items())
    return ["--config", str(file)], run + RUN_FORCED


@contextlib.asynccontextmanager
async def served(engines: Sequence[VllmEngine], *flags: str, run: str = RUN) -> AsyncIterator[Served]:
    """`lmetric-router serve` before engines; at the end nothing may be in flight."""
    given = [word for engine in engines for word in ("--engine", engine.url)]
    async with router(*given, *flags, run=run) as process:
        await process.listening(180)  # on a crowded machine
        # Keep reading its output, or the pipe would fill.
        assert process.process.stderr is not None
        reader = asyncio.create_task(_drain(process))
        try:
            async with (
                aiohttp.ClientSession() as session,
                AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client,
            ):
                world = Served(process, client, session)
                yield world

                async def idle() -> bool:
                    return all(count == 0 for count in (await world.indicator("bs")).values())

                await world.until(idle, seconds=60)
        except BaseException:
            print("".join(process.log[-100:]))
            raise
        finally:
            reader.cancel()


async def _drain(process: Process) -> None:
    assert process.process.stderr is not None
    while line := await process.process.stderr.readline():
        process.log.append(line.decode())
