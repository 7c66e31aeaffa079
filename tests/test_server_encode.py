"""Engines of the role `encode`: they get the images, sound and video of requests, before the
request's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import EngineConfig
from lmetric.doctor import Target, examine
from lmetric.roles import Role
from lmetric.server.fleet.kv_mode import Mode
from lmetric.server.fleet.model import Model
from lmetric.tokens.media import media_of
from server_world import FakeEngine, Request, World, answer, plain, world
from test_server_images import CHAT, FACE, HILL, VLLM, Renderer, chat, folder, image, learned

__all__ = ["folder"]

TEXT = {"type": "text", "text": "What is this?"}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}


class Encoder:
    """An engine that only encodes. ``status``: of its answers."""

    def __init__(self) -> None:
        self.status = 200
        self.params: Any = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.engine = FakeEngine(behave=self, metrics=VLLM)

    async def __call__(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path == "/v1/completions":
            writer.write(
                plain(200, orjson.dumps({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}))
            )
            return True
        if request.path != CHAT:  # its tokenizer is compared with the router's
            return await answer(engine, request, writer)
        await self.gate.wait()
        parts = request.json["messages"][0]["content"]
        params = {str(part): {"metadata": {}} for part in parts} if self.params == {} else self.params
        said = {
            "choices": [{"message": {"content": ""}, "finish_reason": "stop"}],
            "ec_transfer_params": params,
        }
        writer.write(plain(self.status, orjson.dumps(said)))
        return True

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request.json for request in self.engine.requests if request.path == CHAT]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The media that it got."""
        return [part for body in self.bodies for part in body["messages"][0]["content"]]


@contextlib.asynccontextmanager
async def encoding(
    encoders: int = 2, engines: list[FakeEngine] | None = None, **config: Any
) -> AsyncIterator[tuple[World, list[Encoder]]]:
    """A router before a plain engine and some that encode."""
    found = [Encoder() for _ in range(encoders)]
    fakes = [*(engines or [FakeEngine(metrics=VLLM)]), *(each.engine for each in found)]
    for fake in fakes:  # each keeps its port
        await fake.start()
        await fake.stop()
    entries = [{"url": fake.url, "name": f"e{n}"} for n, fake in enumerate(fakes)]
    for entry in entries[len(fakes) - encoders :]:
        entry["role"] = "encode"
    health = {"interval": 0.05, "down_after": 1}
    async with world(fakes, **({"model": "tiny", "engines": entries, "health": health} | config)) as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        yield w, found


def model(w: World) -> Model:
    return w.server.fleet.models[0]


async def ok(w: World, body: dict[str, Any], path: str = CHAT) -> dict[str, str]:
    status, headers, said = await w.post(body, path)
    assert status == 200, said
    return dict(headers)


async def test_images_are_encoded_before_the_request_is_sent() -> None:
    async with encoding(1) as (w, (encoder,)):
        encoder.gate.clear()
        body = chat(TEXT, image(FACE), mm_processor_kwargs={"size": 1}, temperature=0)
        sending = asyncio.create_task(ok(w, body))
        await encoder.engine.asked(1)
        await asyncio.sleep(0.05)
        assert not w.engines[0].requests
        encoder.gate.set()
        await sending
        (sent,) = encoder.bodies
        assert sent == {
            "model": "tiny",
            "max_tokens": 1,
            "stream": False,
            "mm_processor_kwargs": {"size": 1},
            "messages": [{"role": "user", "content": [image(FACE)]}],
        }
        (got,) = w.engines[0].requests
        assert got.json == body | {"ec_transfer_params": {str(image(FACE)): {"metadata": {}}}}
        assert model(w).encodings == {"encoded": 1, "cached": 0}
        _, page = await w.get("/metrics")
        assert b'lmetric_media_encodings_total{model="tiny",outcome="encoded"} 1.0' in page
        assert b'lmetric_instance_role{instance="e1",model="tiny",role="encode"} 1.0' in page


async def test_engines_that_encode_get_nothing_else() -> None:
    async with encoding(1, policy="lmetric") as (w, (encoder,)):
        for body in (chat(TEXT), chat(TEXT, stream=True), {"model": "tiny", "messages": []}):
            await ok(w, body)
        await ok(w, {"model": "tiny", "prompt": "An image_url."}, "/v1/completions")
        assert len(w.engines[0].requests) == 4
        assert not encoder.bodies
        assert not model(w).encodings
        await w.engines[0].stop()
        await w.until(lambda: not model(w).engines["e0"].healthy)
        status, _, said = await w.post(chat(TEXT))
        assert (status, said["error"]["code"]) == (503, "no_engine")
        assert (await w.get("/ready"))[0] == 503
        assert not encoder.bodies


async def test_equal_media_go_to_the_same_engine_and_others_are_spread() -> None:
    urls = [f"{FACE}{number}" for number in range(40)]
    async with encoding(2) as (w, encoders):
        await ok(w, chat(*map(image, urls), image(urls[0])))
        shares = [[part["image_url"]["url"] for part in each.parts] for each in encoders]
        assert sorted(itertools.chain(*shares)) == sorted(urls)
        assert min(map(len, shares)) > 5
        assert [len(each.bodies) for each in encoders] == [1, 1]  # at the same time
        for url in urls[:8]:
            await ok(w, chat(image(url), TEXT))
        for each, share in zip(encoders, shares, strict=True):
            assert {part["image_url"]["url"] for part in each.parts} == set(share)
        assert model(w).encodings == {"encoded": 48, "cached": 1}


async def test_both_engines_encode_at_once() -> None:
    async with encoding(2) as (w, encoders):
        for each in encoders:
            each.gate.clear()
        sending = asyncio.create_task(ok(w, chat(*(image(f"{FACE}{n}") for n in range(20)))))
        for each in encoders:
            await each.engine.asked(1)
        encoders[0].gate.set()
        await asyncio.sleep(0.05)
        assert not w.engines[0].requests
        encoders[1].gate.set()
        await sending
        assert len(w.engines[0].requests[0].json["ec_transfer_params"]) == 20


@pytest.mark.parametrize("part", [SOUND, VIDEO, image("https://example.com/a.png"), image(FACE, uuid="a")])
async def test_sound_video_and_remote_images_are_encoded_too(part: dict[str, Any]) -> None:
    async with encoding(2) as (w, encoders):
        await ok(w, chat(part, TEXT))
        assert [each.parts for each in encoders].count([part]) == 1


async def test_images_of_messages_and_responses_are_encoded() -> None:
    async with encoding(1) as (w, (encoder,)):
        source = {"type": "base64", "media_type": "image/png", "data": "FACE"}
        said = [{"type": "image", "source": source}, TEXT]
        body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": said}]}
        await ok(w, body, "/v1/messages")
        shown = {"type": "input_image", "image_url": HILL}
        await ok(w, {"model": "tiny", "input": [{"role": "user", "content": [shown]}]}, "/v1/responses")
        assert encoder.parts == [image(FACE), image(HILL)]


@pytest.mark.parametrize("size", [10, 100_000], ids=["at once", "in a thread"])
async def test_the_engine_judges_malformed_requests_with_media(size: int) -> None:
    """Security: a tool without a name made an error 500 with a traceback in the log."""
    shown = [{"type": "input_image", "image_url": HILL}, {"type": "input_text", "text": "x" * size}]
    tools = [{"type": "namespace", "tools": [{"type": "function"}]}]
    async with encoding(1) as (w, (encoder,)):
        body = {"model": "tiny", "input": [{"role": "user", "content": shown}], "tools": tools}
        await ok(w, body, "/v1/responses")
        assert not encoder.parts
        assert w.engines[0].requests[-1].json["tools"] == tools


async def test_large_images_are_read_and_sent_in_full() -> None:
    large = FACE + "A" * (3 << 20)
    async with encoding(1) as (w, (encoder,)):
        await ok(w, chat(image(large), TEXT))
        assert encoder.parts == [image(large)]
        assert w.engines[0].requests[0].json["messages"][0]["content"][0] == image(large)


async def test_another_engine_encodes_after_a_failure() -> None:
    async with encoding(2) as (w, encoders):
        await ok(w, chat(image(FACE)))
        first, second = sorted(encoders, key=lambda each: not each.bodies)
        first.status = 500
        await ok(w, chat(image(FACE)))
        assert [len(each.bodies) for each in (first, second)] == [2, 1]
        await first.engine.stop()
        await ok(w, chat(image(FACE)))
        assert len(second.bodies) == 2
        assert model(w).encodings == {"encoded": 3, "cached": 0}
        assert len(w.engines[0].requests) == 3


async def test_without_an_engine_that_encodes_the_request_goes_on() -> None:
    async with encoding(2) as (w, encoders):
        for each in encoders:
            each.status = 503
        await ok(w, chat(image(FACE), image(HILL)))
        assert "ec_transfer_params" not in w.engines[0].requests[-1].json
        assert model(w).encodings == {"failed": 2, "cached": 0}
        for each in encoders:
            await each.engine.stop()
        await ok(w, chat(image(FACE)))
        await w.until(lambda: not any(each.healthy for each in model(w).encoders.values()))
        await ok(w, chat(image(FACE)))
        assert model(w).encodings == {"failed": 3, "no_engine": 1, "cached": 0}
        assert len(w.engines[0].requests) == 3


@pytest.mark.parametrize(("status", "params", "outcome"), [(400, {}, "refused"), (200, None, "not_stored")])
async def test_the_requests_own_engine_judges_what_is_not_encoded(
    status: int, params: Any, outcome: str
) -> None:
    async with encoding(2) as (w, encoders):
        for each in encoders:
            each.status, each.params = status, params
        await ok(w, chat(image(FACE)))
        assert model(w).encodings == {outcome: 1, "cached": 0}
        assert w.engines[0].requests[0].json == chat(image(FACE))
        assert sum(len(each.bodies) for each in encoders) == 1


async def test_a_client_that_leaves_frees_the_engine_that_encodes() -> None:
    async with encoding(1) as (w, (encoder,)):
        encoder.gate.clear()
        sending = asyncio.create_task(ok(w, chat(image(FACE))))
        await encoder.engine.asked(1)
        sending.cancel()
        await w.until(lambda: model(w).encodings.get("ended") == 1)
        await w.until(lambda: not model(w).encoders["e1"].running)
        encoder.gate.set()
        assert not w.engines[0].requests


async def test_the_engine_may_leave_while_its_images_are_encoded() -> None:
    plain_engines = [FakeEngine(metrics=VLLM), FakeEngine(metrics=VLLM)]
    async with encoding(1, plain_engines) as (w, (encoder,)):
        encoder.gate.clear()
        sending = asyncio.create_task(ok(w, chat(image(FACE))))
        await encoder.engine.asked(1)
        (gone,) = [name for name, each in model(w).router.stats()["instances"].items() if each["bs"]]
        model(w).remove(gone)
        encoder.gate.set()
        await sending
        assert [len(each.requests) for each in plain_engines] == [each.name != gone for each in plain_engines]


async def test_images_that_the_engine_has_cached_are_not_encoded_again(folder: Path) -> None:
    renderer = Renderer(folder)
    rendering = FakeEngine(behave=renderer, metrics=VLLM)
    async with encoding(1, [rendering], tokenizer=str(folder), block_size=4) as (w, (encoder,)):
        await ok(w, chat(image(FACE), TEXT))
        await learned(w)
        await ok(w, chat(image(FACE), TEXT))
        # Its predictions are sure only in the mode `exact`.
        await ok(w, chat(image(FACE), TEXT, image(HILL)))
        assert encoder.parts == [image(FACE), image(FACE), image(FACE), image(HILL)]
        await learned(w)
        model(w).engines["e0"].mode = Mode("exact", "a test")
        await ok(w, chat(image(FACE), TEXT, image(f"{HILL}2")))
        assert encoder.parts[4:] == [image(f"{HILL}2")]
        assert model(w).encodings == {"encoded": 5, "cached": 1}
        await learned(w)
        assert len(renderer.bodies) == 3  # by the engine that answers


async def test_the_role_is_shown_and_is_no_warning() -> None:
    async with encoding(1) as (w, _):
        _, page = await w.get("/debug/engines")
        role = {each["name"]: each["role"] for each in orjson.loads(page)}
        assert role == {"e0": "both", "e1": "encode"}
        _, ready = await w.get("/ready")
        assert "e1" not in ready.decode()


async def test_a_role_is_detected_and_a_wrong_one_is_refused() -> None:
    told = {"vllm_config": {"ec_transfer_config": {"ec_connector": "C", "ec_role": "ec_producer"}}}
    fakes = [FakeEngine(metrics=VLLM) for _ in range(3)]
    for each in fakes[1:]:
        each.extra_pages["/server_info?config_format=json"] = 200, orjson.dumps(told)
        each.extra_pages["/server_info"] = 200, orjson.dumps(told)
    for each in fakes:  # each keeps its port
        await each.start()
        await each.stop()
    entries: list[dict[str, Any]] = [{"url": each.url, "name": f"e{n}"} for n, each in enumerate(fakes)]
    entries[2]["role"] = "both"
    async with world(fakes, model="tiny", engines=entries) as w:
        found = model(w).engines
        # An engine that is refused is identified again and again.
        await w.until(lambda: found["e1"].identified and found["e2"].unfit is not None)
        assert [each.role for each in found.values()] == ["both", "encode", "both"]
        assert [each.unfit for each in found.values()] == [
            None,
            None,
            "role both, but it was started as encode",
        ]
        assert list(model(w).encoders) == ["e1"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": [None, {"content": 3}, {"content": [None, "a", {"type": ["image_url"]}]}]},
        {"messages": [{"content": [TEXT]}]},
    ],
)
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_requests_of_any_shape_have_no_media(body: dict[str, Any], api: str) -> None:
    assert media_of(api, body) is None


@pytest.mark.parametrize(
    ("role", "status", "params", "level", "seen"),
    [
        ("encode", 200, {}, "exact", "encode: it stored an image"),
        ("encode", 400, {}, "exact", "encode: not tested, as it refused an image: status 400"),
        ("encode", 200, None, None, "encode, but it stored no image"),
        ("encode", 500, {}, None, "a chat with an image: status 500"),
        (None, 200, {}, None, "it returned no token: it seems to encode only"),
    ],
)
async def test_doctor_examines_an_engine_that_encodes(
    role: Role | None, status: int, params: Any, level: str | None, seen: str
) -> None:
    encoder = Encoder()
    encoder.status, encoder.params = status, params
    await encoder.engine.start()
    try:
        (found,) = await examine([Target(EngineConfig(url=encoder.engine.url, role=role))])
    finally:
        await encoder.engine.stop()
    assert found.level == level
    assert found.verdicts["role"].seen.startswith(seen)
