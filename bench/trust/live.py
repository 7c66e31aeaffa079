"""The live side: emulated engines in real time, a trace sent to them or to a router, and its
outcome.

Prompts are sent as token ids, so the cores' time goes into engines and streams, not into a
tokenizer. Equal block ids of the trace are equal token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric.engines.embedded import stop_process
from lmetric.profiles import Profile
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.emulated.text import shared_text
from lmetric_lab.replay import Client, Player, Record
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.summary import tpot_seconds
from lmetric_lab.sim.traces import Trace, load_trace

_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
# Means that an engine reports of its requests by its own clock: from reading a request to the end
# of the step that makes the token.
_ENGINE_MEANS = {
    "ttft_seconds": "time_to_first_token_seconds",
    "tpot_seconds": "request_time_per_output_token_seconds",
    "e2e_seconds": "e2e_request_latency_seconds",
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A scenario for the live and the simulated side."""

    trace_file: str
    engines: int
    profile: str
    speed: float  # arrivals on the engines' clock against the trace's
    requests: int  # the most
    max_input_tokens: int  # requests with longer prompts are left out
    max_output_tokens: int  # longer answers are cut
    clock_speed: float = 1.0  # speed of the engines' clock against the wall's

    def trace(self) -> Trace:
        """Returns the requests by the engines' clock, the first at 0."""
        trace = (
            load_trace(self.trace_file).at_most(self.max_input_tokens).first(self.requests).faster(self.speed)
        )
        return replace(
            trace,
            arrival_seconds=trace.arrival_seconds - trace.arrival_seconds[0],
            output_tokens=np.clip(trace.output_tokens, 1, self.max_output_tokens),
        )

    def options(self) -> EngineOptions:
        """Returns the options of an engine."""
        return EngineOptions(profile=self.profile, clock_speed=self.clock_speed)

    def resolved_profile(self) -> Profile:
        """Returns the constants that the engines run with, for the simulator."""
        return self.options().resolved_profile()


class TokenPrompts:
    """Prompts of a trace's block ids as JSON lists of token ids. Another `seed` gives other ids."""

    def __init__(self, seed: int = 0) -> None:
        self._writer = PromptWriter([f"{token}," for token in shared_text().words], seed=seed)

    def prompt(self, trace: Trace, index: int) -> orjson.Fragment:
        """Returns the prompt of the trace's request `index`."""
        return orjson.Fragment(f"[{self._writer.prompt(trace, index)[:-1]}]")


class Placed:
    """Sends each request to its engine, without a router in between."""

    def __init__(self, clients: Sequence[Client], instances: NDArray[np.int64]) -> None:
        self._clients = clients
        self._instances = instances

    def body(self, prompt: str | orjson.Fragment, output_tokens: int) -> bytes:
        """Returns the request for `output_tokens` tokens after `prompt`."""
        return self._clients[0].body(prompt, output_tokens)

    async def send(self, body: bytes, record: Record, start: float) -> None:
        """Sends `body` now and fills in `record`."""
        await self._clients[self._instances[record.index]].send(body, record, start)


@dataclass(frozen=True, slots=True)
class Live:
    """Client measurements: one entry per request, in the trace's order; seconds of the engines'
    clock."""

    ttft_seconds: NDArray[np.float64]  # from the time at which the trace wants it sent
    tpot_seconds: NDArray[np.float64]  # NaN if there is only one token
    e2e_seconds: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    late_seconds: NDArray[np.float64]  # wall seconds sent after its time
    failures: list[str]  # number of requests that did not complete; they are NaN above

    @staticmethod
    def of(records: Sequence[Record], clock_speed: float) -> Live:
        """Makes them from the records of all requests."""
        records = sorted(records, key=lambda record: record.index)
        for record in records:
            if not record.completed:
                record.first_token = record.last_token = None

        def column(name: str) -> NDArray[np.float64]:
            values = [getattr(record, name) for record in records]
            return np.array([np.nan if value is None else value for value in values], np.float64)

        due, first, last = column("due"), column("first_token"), column("last_token")
        tokens = np.array([record.output_tokens for record in records], np.int64)
        return Live(
            ttft_seconds=(first - due) * clock_speed,
            tpot_seconds=tpot_seconds(first, last, tokens) * clock_speed,
            e2e_seconds=(last - due) * clock_speed,
            prompt_tokens=np.array([record.prompt_tokens or 0 for record in records], np.int64),
            hit_tokens=np.array([record.cached_tokens or 0 for record in records], np.int64),
            output_tokens=tokens,
            late_seconds=column("sent") - due,
            failures=[f"{r.index}: {r.error or 'unfinished'} {r.detail}" for r in records if not r.completed],
        )


async def play(trace: Trace, sender: Placed | Client, clock_speed: float, seed: int = 0) -> Live:
    """Sends `trace`, whose times are the engines', and waits for the answers."""
    player = Player(trace.faster(clock_speed), sender, TokenPrompts(seed).prompt)
    await player.run()
    return Live.of(player.records, clock_speed)


class Engines:
    """Engines as separate processes, with an empty cache after each call of `fresh`."""

    def __init__(self, embedded: EmbeddedEngines, session: aiohttp.ClientSession) -> None:
        self.urls = embedded.urls
        self._session = session

    async def fresh(self) -> None:
        """Empties the prefix caches."""
        for url in self.urls:
            async with self._session.post(f"{url}/reset_prefix_cache") as answer:
                answer.raise_for_status()

    async def means(self) -> dict[str, float]:
        """Returns the means over the requests of all engines since their start, by the engines' own
        clocks."""
        sums = dict.fromkeys(_ENGINE_MEANS, 0.0)
        counts = dict.fromkeys(_ENGINE_MEANS, 0.0)
        for url in self.urls:
            async with self._session.get(f"{url}/metrics") as answer:
                answer.raise_for_status()
                lines = (await answer.text()).splitlines()
            for name, metric in _ENGINE_MEANS.items():
                for line in lines:
                    if line.startswith(f"vllm:{metric}_sum"):
                        sums[name] += float(line.rpartition(" ")[2])
                    elif line.startswith(f"vllm:{metric}_count"):
                        counts[name] += float(line.rpartition(" ")[2])
        return {name: sums[name] / counts[name] for name in sums}


@contextlib.asynccontextmanager
async def engines(scene: Scene) -> AsyncIterator[Engines]:
    """Returns the scene's engines."""
    async with (
        EmbeddedEngines(scene.engines, scene.options()) as embedded,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        yield Engines(embedded, session)


@contextlib.asynccontextmanager
async def placed(urls: Sequence[str], instances: NDArray[np.int64]) -> AsyncIterator[Placed]:
    """Returns a sender straight to the engines at `urls`."""
    async with contextlib.AsyncExitStack() as stack:
        yield Placed([await stack.enter_async_context(Client(url)) for url in urls], instances)


@contextlib.asynccontextmanager
async def router(policy: str, urls: Sequence[str], scene: Scene) -> AsyncIterator[Client]:
    """Returns a client of `lmetric-router serve` over the engines at `urls`, in a process of its
    own."""
    profile = scene.resolved_profile()
    settings = {
        "block_size": profile.block_tokens,
        "cache_blocks": profile.cache_blocks,
        "guard": "false",
    }
    command = [sys.executable, "-m", "lmetric.cli", "serve", "--log-json", "--port", "0", "--experimental"]
    command += ["--policy", policy]
    command += [word for url in urls for word in ("--engine", url)]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC_")}
    with tempfile.NamedTemporaryFile("rb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log.fileno(), stderr=log.fileno(), env=environ
        )
        try:
            async with Client(await _ready(process, log.name)) as client:
                yield client
        finally:
            await stop_process(process, _STOP_SECONDS)


async def _ready(process: asyncio.subprocess.Process, log: str) -> str:
    """Returns the URL on which the router reports to listen, once it is ready."""
    deadline = time.monotonic() + _START_SECONDS
    url = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while process.returncode is None and time.monotonic() < deadline:
            if url is None:
                with open(log, "rb") as said:  # noqa: ASYNC230
                    lines = [line for line in said if b'"listening"' in line]
                url = orjson.loads(lines[0])["url"] if lines else None
            else:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{url}/ready") as answer:
                        if answer.status == 200:
                            return str(url)
            await asyncio.sleep(0.05)
    with open(log, "rb") as said:  # noqa: ASYNC230
        raise SystemExit("the router did not become ready: " + said.read().decode(errors="replace")[-500:])
