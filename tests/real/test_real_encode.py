"""Encoder disaggregation of real engines: one runs only the vision encoder, and the other one loads
what it stored."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router_world import Served, served
from test_real_images import CHAT, MESSAGES, RESPONSES, learned, png, text, url
from vllm_process import BLOCK, VllmEngine, environment, vision_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]  # two engines start one after the other

WORDS = text("Say what this shows, and where it was made. " * 8)


def image(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(png(seed))}}


def asked(*seeds: int) -> dict[str, Any]:
    parts = [*map(image, seeds), WORDS]
    return {
        "model": "tiny",
        "max_tokens": 12,
        "temperature": 0,
        "messages": [{"role": "user", "content": parts}],
    }


@dataclass
class Encoding:
    """A router before an encoder engine and an engine that answers."""

    served: Served
    encoder: VllmEngine
    engine: VllmEngine
    store: Path
    before: frozenset[str] = frozenset()  # images of earlier tests

    @property
    def stored(self) -> dict[str, Path]:
        """The files of the test's encoded images, by the images' identity."""
        found = {file.parent.name: file for file in self.store.glob("*/*.safetensors")}
        return {name: file for name, file in found.items() if name not in self.before}

    async def post(self, base: str, body: dict[str, Any], path: str = CHAT) -> tuple[Any, Any]:
        async with self.served.session.post(base + path, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer, response.headers

    async def alone(self, *seeds: int) -> str:
        """The answer of the engine that answers, with its own encoder. Empties its caches."""
        answer, _ = await self.post(self.engine.url, asked(*seeds))
        for cache in ("prefix", "mm", "encoder"):
            async with self.served.session.post(f"{self.engine.url}/reset_{cache}_cache") as response:
                assert response.status == 200
        return str(answer["choices"][0]["message"]["content"])

    async def routed(self, *seeds: int) -> tuple[str, dict[str, Any]]:
        """The answer through the router, and its record."""
        answer, headers = await self.post(self.served.url, asked(*seeds))
        record = await self.served.record(headers)
        await learned(self.served)
        return str(answer["choices"][0]["message"]["content"]), record

    async def outcomes(self) -> dict[str, float]:
        """The router's counts of images."""
        found = {}
        for line in (await self.served.page("/metrics")).splitlines():
            if line.startswith("lmetric_media_encodings_total{"):
                labels, _, value = line.rpartition(" ")
                found[labels.split('outcome="')[1].split('"')[0]] = float(value)
        return {outcome: count for outcome, count in found.items() if count}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of encoded images. Engines with it serve all tests."""
    return tmp_path_factory.mktemp("encoded")


@pytest.fixture
async def world(vllm_engines: Callable[..., list[VllmEngine]], store: Path) -> AsyncIterator[Encoding]:
    model, packages = vision_model(environment())
    common: dict[str, Any] = {
        "environ": {"PYTHONPATH": str(packages)},
        "model": str(model),
        "enable_scale_out": True,
    }

    def role(name: str) -> dict[str, Any]:
        extra = {"shared_storage_path": str(store)}
        return {"ec_connector": "ECExampleConnector", "ec_role": name, "ec_connector_extra_config": extra}

    (encoder,) = vllm_engines(1, kv_events_config=None, ec_transfer_config=role("ec_producer"), **common)
    (engine,) = vllm_engines(1, ec_transfer_config=role("ec_consumer"), **common)
    flags = "--set", f"tokenizer={model}", "--set", f"block_size={BLOCK}"
    async with served([encoder, engine], *flags) as w:

        async def ready() -> bool:
            found = await w.engines()
            roles = found[encoder.name]["role"], found[engine.name]["role"]
            return roles == ("encode", "both") and found[engine.name]["mode"] == "exact"

        await w.until(ready, seconds=60)
        found = Encoding(w, encoder, engine, store)
        found.before = frozenset(found.stored)
        yield found


async def test_the_engine_that_answers_loads_what_another_one_encoded(world: Encoding) -> None:
    """Its answers are those with its own encoder; and it stays at rest if it has the tokens."""
    chats = [(1,), (2,), (3, 4), (1, 4, 1)]
    alone = [await world.alone(*seeds) for seeds in chats]
    assert not world.stored
    assert [(await world.routed(*seeds))[0] for seeds in chats] == alone
    assert len(world.stored) == 4
    assert len(set(alone)) == len(alone)
    counts = await world.outcomes()
    for seeds, said in zip(chats, alone, strict=True):
        again, record = await world.routed(*seeds)
        assert again == said
        assert record["predicted_cached_tokens"] == record["cached_tokens"] >= BLOCK
        assert record["instance"] == world.engine.name
    later = await world.outcomes()
    assert later["cached"] - counts.get("cached", 0) == 7
    assert later["encoded"] == counts["encoded"]
    # Encoded media are used: those of another image give that image's answer.
    before = set(world.stored)
    await world.alone(5)
    _, other = await world.alone(6), await world.alone(7)
    await world.post(world.encoder.url, asked(6) | {"max_tokens": 1})
    (sixth,) = set(world.stored) - before
    answer, _ = await world.post(world.encoder.url, asked(7) | {"max_tokens": 1})
    (seventh,) = answer["ec_transfer_params"]
    shutil.copy(world.stored[seventh], world.stored[sixth])
    assert (await world.routed(6))[0] == other


async def test_images_of_other_apis_are_encoded(world: Encoding) -> None:
    """They have the same identity, so they are stored once."""
    data = image(11)["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [{"type": "image", "source": source}, WORDS]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": blocks}]}
    await world.post(world.served.url, body, MESSAGES)
    assert len(world.stored) == 1
    for seed in (11, 12, 12):
        shown = {"type": "input_image", "image_url": image(seed)["image_url"]["url"], "detail": "auto"}
        items = [{"role": "user", "content": [shown, {**WORDS, "type": "input_text"}]}]
        body = {"model": "tiny", "max_output_tokens": 4, "input": items}
        _, headers = await world.post(world.served.url, body, RESPONSES)
        record = await world.served.record(headers)
        await learned(world.served)
    assert len(world.stored) == 2
    assert record["predicted_cached_tokens"] == record["cached_tokens"] >= BLOCK
    assert (await world.outcomes()).keys() <= {"encoded", "cached"}


async def test_the_engine_encodes_itself_if_the_other_one_is_killed(world: Encoding) -> None:
    alone = [await world.alone(seed) for seed in (21, 22)]
    world.encoder.kill()
    assert [(await world.routed(seed))[0] for seed in (21, 22)] == alone
    assert not world.stored
    outcomes = await world.outcomes()
    assert sum(outcomes.values()) == outcomes["failed"] + outcomes.get("no_engine", 0) == 2
