"""The router before NVIDIA Dynamo: two frontends, each with a worker of its engine simulator.

Dynamo is other code than vLLM: its own HTTP server, tokenizer, scheduler, prefix cache and events.
TEST_DYNAMO_VENV names its environment; else `install_dynamo` makes one.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router_world import Served, configured, served
from test_real_router import FIXED, text, until_exact
from vllm_process import BLOCK, CACHE, HERE, MODEL, environment, free_port, locked, model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

BLOCKS = 512


def venv() -> Path:
    """The virtual environment with Dynamo."""
    if named := os.environ.get("TEST_DYNAMO_VENV"):
        if not (Path(named) / "bin" / "python").exists():
            raise FileNotFoundError(f"TEST_DYNAMO_VENV={named}: no virtual environment there")
        return Path(named)
    target = CACHE.parent / "dynamo"
    with locked("dynamo"):
        if not (target / "installed").exists():
            subprocess.run([HERE / "install_dynamo", target], check=True, timeout=1800)
            (target / "installed").touch()
    return target


class Dynamo:
    """A frontend and a worker. They find each other by files, so other frontends do not see them.

    ``kind``: the engine whose scheduler and cache the worker follows.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        self.name, self.url = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.port}"
        self._folder, self._kind = folder / str(self.port), kind
        self._folder.mkdir()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def entry(self) -> dict[str, Any]:
        """Its entry in the router's configuration: it reports none of this."""
        events = {
            "endpoint": f"tcp://127.0.0.1:{self.events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
        }
        return {"url": self.url, "kv_events": events}

    def start(self, *programs: str) -> None:
        """Starts its programs: frontend, mocker."""
        if not self._running:  # or the frontend would find the worker that was killed
            shutil.rmtree(self._folder / "discovery", ignore_errors=True)
        flags = {
            "frontend": ["--http-host", "127.0.0.1", "--http-port", str(self.port), "--namespace", "test"],
            "mocker": [
                *("--model-path", str(model(environment())), "--model-name", MODEL),
                *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)),
                *("--zmq-kv-events-ports", str(self.events_port)),
                *("--zmq-replay-ports", str(self.replay_port)),
                *("--max-model-len", "4096", "--engine-type", self._kind),
            ],
        }
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("DYN_", "LMETRIC_", "PYTHON"))}
        environ = inherited | {
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_NAMESPACE": "test",
            "HF_HUB_OFFLINE": "1",
        }
        for program in programs:
            with (self._folder / f"{program}.log").open("ab") as log:
                self._running[program] = subprocess.Popen(
                    [venv() / "bin" / "python", "-m", f"dynamo.{program}", *flags[program]],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=environ,
                )

    def lists_its_model(self) -> bool:
        """Whether its frontend has found a worker."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                return MODEL.encode() in answer.read()
        except OSError:
            return False

    async def ready(self, *, listed: bool = True) -> None:
        """Waits until its frontend lists the model, or no longer does."""
        try:
            async with asyncio.timeout(120):
                while await asyncio.to_thread(self.lists_its_model) is not listed:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        except TimeoutError:
            logs = [path.read_text(errors="replace")[-3000:] for path in self._folder.glob("*.log")]
            raise RuntimeError("\n".join(logs)) from None

    def kill(self, *programs: str) -> None:
        """Ends programs at once."""
        for program in programs:
            process = self._running.pop(program)
            process.send_signal(signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """Ends all its programs."""
        self.kill(*list(self._running))


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Dynamo]]:
    """Two frontends with a worker each, of the kind in the parameter."""
    both = [Dynamo(tmp_path, getattr(request, "param", "vllm")) for _ in range(2)]
    try:
        for each in both:
            each.start("frontend", "mocker")
        yield both
    finally:
        for each in both:
            each.stop()


@asynccontextmanager
async def before(pair: list[Dynamo], folder: Path, **values: Any) -> AsyncIterator[Served]:
    """A router before them, which follows their events."""
    for each in pair:
        await each.ready()
    flags, run = configured(
        folder,
        engines=[each.entry() for each in pair],
        tokenizer=str(model(environment())),
        block_size=BLOCK,
        **values,
    )
    async with served([], *flags, run=run) as world:
        await until_exact(world)
        yield world


async def ask(world: Served, prompt: Any, tokens: int = 4) -> dict[str, Any]:
    """Sends a chat or a completion. Returns its record, once events of its blocks have come."""
    made: Any = world.client.chat.completions if isinstance(prompt, list) else world.client.completions
    given = {"messages" if isinstance(prompt, list) else "prompt": prompt}
    answer = await made.with_raw_response.create(model=MODEL, max_tokens=tokens, extra_body=FIXED, **given)
    await asyncio.sleep(0.1)
    record = await world.record(answer.headers)
    choice = answer.parse().choices[0]
    return record | {"text": choice.message.content if isinstance(prompt, list) else choice.text}


async def test_openai_client(pair: list[Dynamo], tmp_path: Path) -> None:
    """The list of models, chats and completions, plain and streamed, responses, and errors."""
    async with before(pair, tmp_path, policy="round_robin") as world:
        client = world.client
        assert [card.id async for card in await client.models.list()] == [MODEL]
        for _ in pair:
            chat = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=9, extra_body=FIXED
            )
            assert chat.usage is not None
            assert chat.usage.completion_tokens == 9
            parts = [
                part
                async for part in await client.completions.create(
                    model=MODEL,
                    prompt="The engine",
                    max_tokens=7,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body=FIXED,
                )
            ]
            assert parts[-1].usage is not None
            assert parts[-1].usage.completion_tokens == 7
            assert sum(bool(choice.text) for part in parts for choice in part.choices) == 7
            response = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=5)
            assert response.usage is not None
            assert response.usage.output_tokens == 5
            async with world.session.post(
                f"{world.url}/v1/completions", json={"model": MODEL, "prompt": "x", "temperature": 7}
            ) as refused:
                assert (refused.status, "Temperature" in await refused.text()) == (400, True)
        served_by = {
            name for name, engine in (await world.engines()).items() if engine["service"]["successes"]
        }
        assert served_by == {each.name for each in pair}


@pytest.mark.parametrize("pair", ["vllm", "trtllm"], indirect=True)
async def test_the_prediction_is_what_dynamo_finds(pair: list[Dynamo], tmp_path: Path) -> None:
    """Exactly: in conversations, and with twice as many blocks as the caches hold."""
    async with before(pair, tmp_path) as world:
        rng = random.Random(3)
        chats = [[{"role": "system", "content": text(rng, 90)}] for _ in range(3)]
        prompts = [text(rng, 90) for _ in range(3)]
        records = []
        for _ in range(6):
            for chat in chats:
                chat.append({"role": "user", "content": text(rng, rng.randrange(3, 80))})
                records.append(await ask(world, chat, 20))
                chat.append({"role": "assistant", "content": records[-1]["text"]})
            for number in range(3):
                prompts[number] += " " + text(rng, rng.randrange(3, 80))
                records.append(await ask(world, prompts[number], 20))
                prompts[number] += records[-1]["text"]
        long = [text(rng, 900) for _ in range(72)]
        for number in range(140):
            prompt = long[number // 2] if number % 2 == 0 else rng.choice(long[: number // 2 + 1])
            records.append(await ask(world, prompt[: rng.randrange(len(prompt) // 2, len(prompt))], 2))
        wrong = [each for each in records if each["predicted_cached_tokens"] != each["cached_tokens"]]
        assert wrong == []
        assert sum(each["cached_tokens"] for each in records) > 20_000
        assert {each["instance"] for each in records} == {each.name for each in pair}
        for engine in (await world.engines()).values():
            assert engine["mode"] == "exact"
        page = await world.page("/metrics")
        for each in pair:
            line = f'lmetric_kv_events_total{{instance="{each.name}",model="{MODEL}",what="blocks_removed"}} '
            assert float(page.partition(line)[2].split()[0]) > 20


async def test_a_worker_that_dies_and_comes_back(pair: list[Dynamo], tmp_path: Path) -> None:
    """Its frontend stays healthy and answers 404: the router takes it out, and no request fails."""
    async with before(pair, tmp_path) as world:
        shared = text(random.Random(5), 300)
        await ask(world, shared)
        second = await ask(world, shared)
        assert second["predicted_cached_tokens"] == second["cached_tokens"] > 0
        holder = next(each for each in pair if each.name == second["instance"])
        (other,) = (each for each in pair if each is not holder)
        plain = [asyncio.create_task(ask(world, f"{n} {text(random.Random(n), 40)}", 200)) for n in range(8)]
        await asyncio.sleep(0.5)
        holder.kill("mocker")
        records = await asyncio.gather(*plain)
        assert {each["instance"] for each in records} == {other.name}
        for number in range(40):  # until the frontend's lease of the worker is over, and after it
            assert (await ask(world, f"{number}", 1))["instance"] == other.name
            await asyncio.sleep(0.4)
        await holder.ready(listed=False)

        async def out() -> bool:
            return not (await world.engines())[holder.name]["service"]["in_service"]

        await world.until(out, seconds=15)
        assert (await world.engines())[holder.name]["last_error"] == "GET /v1/models: it lists no model"
        holder.start("mocker")
        await holder.ready()
        await world.until(lambda: _exact(world, holder), seconds=60)
        await _predicted_again(world, holder, other, shared)


async def test_a_frontend_that_dies_and_comes_back(pair: list[Dynamo], tmp_path: Path) -> None:
    async with before(pair, tmp_path) as world:
        shared = text(random.Random(6), 300)
        first = await ask(world, shared)
        holder = next(each for each in pair if each.name == first["instance"])
        (other,) = (each for each in pair if each is not holder)
        plain = [asyncio.create_task(ask(world, f"{n} {text(random.Random(n), 40)}", 200)) for n in range(8)]
        await asyncio.sleep(0.5)
        holder.kill("frontend", "mocker")
        assert {each["instance"] for each in await asyncio.gather(*plain)} == {other.name}
        holder.start("frontend", "mocker")
        await holder.ready()
        await world.until(lambda: _exact(world, holder), seconds=60)
        await _predicted_again(world, holder, other, shared)


async def _exact(world: Served, engine: Dynamo) -> bool:
    shown = (await world.engines())[engine.name]
    ranks = shown["kv_events"]["ranks"].values()  # none while it is out of service
    connected = [rank["connected"] for rank in ranks] == [True]
    return bool(shown["service"]["in_service"] and shown["mode"] == "exact" and connected)


async def _predicted_again(world: Served, engine: Dynamo, other: Dynamo, prompt: str) -> None:
    """Checks that the router has forgotten an engine's old cache, and follows its new one."""
    other.stop()
    counts = []
    for _ in range(2):
        record = await ask(world, prompt)
        assert record["instance"] == engine.name
        assert record["predicted_cached_tokens"] == record["cached_tokens"]
        counts.append(record["cached_tokens"])
    assert counts[0] == 0 < counts[1]
