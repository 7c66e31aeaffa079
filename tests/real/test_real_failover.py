"""One of two vLLM engines fails under 16 streams: no stream breaks, no token is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from tokenizers import Tokenizer

from constants import configured
from lmetric.server import Server
from lmetric.server.fleet.model import Model
from split_world import CHAT, COMPLETIONS, equal, heard
from test_real_split import fresh, request
from vllm_process import VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Start = Callable[..., list[VllmEngine]]
# The engines share two cores with the router. `SEEN`: the failing engine's streams have this many
# tokens, and not `TOKENS`.
STREAMS, TOKENS, SEEN = 16, 600, 10
USAGE = {"include_usage": True}
PATIENT: dict[str, Any] = {
    "policy": "round_robin",
    "health": {"timeout": 30},
    "timeouts": {"connect": 30, "between_chunks": 60},
}


class World:
    """A router in this event loop."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, engines: list[VllmEngine]) -> None:
        self.server = server
        self.session = session
        self.engines = engines
        self.tokens: list[int] = []
        self.places: list[str | None] = []

    @property
    def model(self) -> Model:
        return self.server.fleet.models[0]

    async def stream(self, number: int, path: str, body: dict[str, Any], url: str | None) -> bytes:
        """Returns the bytes of a stream from the router, or from the engine at `url`."""
        raw = b""
        address = (url or f"http://127.0.0.1:{self.server.port}") + path
        async with self.session.post(address, json=body) as response:
            assert response.status == 200, await response.read()
            self.places[number] = response.headers.get("x-lmetric-instance")
            async for piece in response.content.iter_any():
                raw += piece
                self.tokens[number] = raw.count(b'"finish_reason":null')
        return raw

    def is_halfway(self, running: int) -> bool:
        """Whether the first engine sends its half of the streams.

        A slow one serves them in turn: then one of them is half over.
        """
        assert running, "no stream met the fault"
        first = self.engines[0].url.removeprefix("http://")
        seen = [seen for seen, place in zip(self.tokens, self.places, strict=True) if place == first]
        whole = [tokens for tokens in seen if SEEN <= tokens < TOKENS]
        return len(whole) >= len(self.tokens) // 2 or any(tokens >= TOKENS // 2 for tokens in whole)

    async def run(
        self,
        bodies: list[tuple[str, dict[str, Any]]],
        fault: Callable[[VllmEngine], None] | None = None,
        url: str | None = None,
    ) -> list[bytes]:
        """Returns the answers of streams at once. `fault`: of the first engine, in the middle."""
        self.tokens, self.places = [0] * len(bodies), [None] * len(bodies)
        tasks = [asyncio.create_task(self.stream(n, *each, url)) for n, each in enumerate(bodies)]
        if fault is not None:
            async with asyncio.timeout(300):
                while not self.is_halfway(sum(not task.done() for task in tasks)):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            await asyncio.to_thread(fault, self.engines[0])
        return await asyncio.gather(*tasks)


@contextlib.asynccontextmanager
async def world(engines: list[VllmEngine], **config: Any) -> AsyncIterator[World]:
    values = PATIENT | {"port": 0, "engines": [{"url": e.url} for e in engines]} | config
    with configured(values) as settings:
        server = Server(settings)
        await server.start()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:
                w = World(server, session, engines)
                async with asyncio.timeout(60):
                    while not all(e.identified for e in w.model.engines.values()):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                yield w
                async with asyncio.timeout(60):
                    while w.model.router.in_flight() or server.front.relays:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
        finally:
            await server.stop()


def kill_core(engine: VllmEngine) -> None:
    """Kills the engine core alone: the API server reports an error in each stream."""
    for pid in engine.processes():
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("the engine has no core process")


def greedy() -> list[tuple[str, dict[str, Any]]]:
    """Chats and completions, with and without token ids and usage."""
    return [
        (
            path,
            request(
                path,
                20 + 40 * (n % 4),
                TOKENS,
                stream=True,
                stream_options=USAGE if n % 3 else None,
                return_token_ids=n % 2 == 0,
            ),
        )
        for n, path in enumerate([CHAT, COMPLETIONS] * (STREAMS // 2))
    ]


def salted(bodies: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the requests with salts of their own: no cached block of a run helps another."""
    return [(path, body | {"cache_salt": fresh("run")}) for path, body in bodies]


FAULTS: dict[str, Callable[[VllmEngine], None]] = {
    "machine": VllmEngine.kill,
    "core": kill_core,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_greedy_stream_breaks(vllm_engines: Start, fault: str) -> None:
    engines = vllm_engines(2)
    async with world(engines) as w:
        bodies = greedy()
        expected = [heard(raw) for raw in await w.run(salted(bodies), url=engines[1].url)]
        found = [heard(raw) for raw in await w.run(salted(bodies), FAULTS[fault])]
        for said, want in zip(found, expected, strict=True):
            equal(said, want)
        print(dict(w.model.failovers), dict(w.model.not_resumable))
        assert set(w.model.failovers) == {"continued"}
        assert w.model.failovers["continued"] >= STREAMS // 2 - 1
        assert not w.model.not_resumable


async def test_an_engine_that_hangs(vllm_engines: Start) -> None:
    engines = vllm_engines(2)
    limits = {"connect": 30, "between_chunks": 5}
    async with world(engines, timeouts=limits, health={"timeout": 30, "interval": 600}) as w:
        bodies = greedy()
        expected = [heard(raw) for raw in await w.run(salted(bodies), url=engines[1].url)]
        try:
            found = [heard(raw) for raw in await w.run(salted(bodies), VllmEngine.freeze)]
        finally:
            engines[0].thaw()
        for said, want in zip(found, expected, strict=True):
            equal(said, want)
        assert set(w.model.failovers) == {"continued"}


async def test_sampled_streams_lose_and_double_no_token(vllm_engines: Start) -> None:
    """Sampled tokens differ between runs; their number, usage and text must fit together. Without a
    seed: vLLM 0.32 on CPU crashes if it samples a batch with seeds."""
    engines = vllm_engines(2)
    tokens = Tokenizer.from_file(str(engines[0].model / "tokenizer.json"))
    async with world(engines) as w:
        bodies = [
            (path, body | {"temperature": 1.0, "return_token_ids": True, "stream_options": USAGE})
            for path, body in greedy()
        ]
        for raw in await w.run(salted(bodies), VllmEngine.kill):
            said = heard(raw)
            assert "error" not in said
            assert len(said["ids"]) == said["usage"]["completion_tokens"] == TOKENS
            assert said["finish"] == "length"
            prompt = prompt_ids(raw)
            assert said["usage"]["prompt_tokens"] == len(prompt)
            # The text is the text of exactly these tokens. Engines and library show bytes that are
            # no characters differently.
            whole, before = (tokens.decode(ids) for ids in (prompt + said["ids"], prompt))
            assert whole.startswith(before.rstrip("�"))
            assert characters(whole) == characters(before) + characters(said["text"])
        assert set(w.model.failovers) == {"continued"}


def prompt_ids(raw: bytes) -> list[int]:
    first = orjson.loads(raw.partition(b"\n\n")[0].removeprefix(b"data: "))
    return first.get("prompt_token_ids") or first["choices"][0]["prompt_token_ids"]


def characters(text: str) -> str:
    return text.replace("�", "")


async def test_logprobs_and_stop_strings_continue(vllm_engines: Start) -> None:
    engines = vllm_engines(2)
    async with world(engines) as w:
        plain = [(path, body | {"stream_options": USAGE}) for path, body in greedy()]
        texts = [heard(raw)["text"] for raw in await w.run(salted(plain), url=engines[1].url)]
        bodies = []
        for n, ((path, body), text) in enumerate(zip(plain, texts, strict=True)):
            stop = text[-40:-33] if n % 2 else [text[-30:-20], "not there"]
            more: dict[str, Any] = {"stop": stop, "include_stop_str_in_output": n % 4 == 0}
            if path == COMPLETIONS:
                more["logprobs"] = 2
            bodies.append((path, body | more))
        expected = await w.run(salted(bodies), url=engines[1].url)
        found = await w.run(salted(bodies), VllmEngine.kill)
        for raw, want in zip(found, expected, strict=True):
            equal(heard(raw), heard(want))
            assert [row[:2] for row in logprobs(raw)] == [row[:2] for row in logprobs(want)]
            for (_, _, one), (_, _, other) in zip(logprobs(raw), logprobs(want), strict=True):
                assert one == pytest.approx(other, abs=1e-3)
        assert set(w.model.failovers) == {"continued"}


def logprobs(raw: bytes) -> list[tuple[str, int, float]]:
    """Returns token, offset and log probability of each token of a completion."""
    rows = []
    for line in raw.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                told = choice.get("logprobs") or {"tokens": [], "text_offset": [], "token_logprobs": []}
                rows += zip(told["tokens"], told["text_offset"], told["token_logprobs"], strict=True)
    return rows
