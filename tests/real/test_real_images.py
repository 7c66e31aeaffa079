"""Chats with images on real engines: the router predicts their cached tokens exactly."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from router_world import Served, served
from vllm_process import BLOCK, VllmEngine, environment, vision_model

pytestmark = pytest.mark.nightly

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CHATS = 200
WORDS = ("the", "router", "sends", "each", "request", "to", "an", "engine", "that", "holds", "its", "prompt")


def png(seed: int, width: int = 60, height: int = 45, mode: str = "RGB") -> bytes:
    """A random image. An engine converts other modes, which changes the image's identity."""
    channels, kind = {"L": (1, 0), "RGB": (3, 2), "RGBA": (4, 6)}[mode]
    pixels = random.Random(seed)
    rows = b"".join(b"\0" + pixels.randbytes(width * channels) for _ in range(height))

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


MODES = ("RGB", "L", "RGBA", "RGB", "L", "RGBA")
IMAGES = [url(png(seed, 40 + 30 * seed, 45, mode)) for seed, mode in enumerate(MODES)]


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": IMAGES[number]}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.fixture
async def world(vllm_engines: Callable[..., list[VllmEngine]]) -> AsyncIterator[Served]:
    """A router before two engines with a vision model."""
    model, packages = vision_model(environment())
    environ = {"PYTHONPATH": str(packages)}
    engines = vllm_engines(2, environ=environ, model=str(model), enable_scale_out=True)
    async with served(engines, "--set", f"tokenizer={model}", "--set", f"block_size={BLOCK}") as w:

        async def exact() -> bool:
            return all(each["mode"] == "exact" for each in (await w.engines()).values())

        await w.until(exact, seconds=60)
        yield w


async def learned(w: Served) -> None:
    """Waits until no image is being learned."""

    async def idle() -> bool:
        return not any(each["tokenizer"]["images_waiting"] for each in (await w.engines()).values())

    await w.until(idle, seconds=60)


async def send(w: Served, body: dict[str, Any], path: str = CHAT) -> tuple[int, int, int]:
    """Sends a request; returns the predicted and the reported cached tokens, and the prompt's."""
    async with w.session.post(w.url + path, json={"model": "tiny", "max_tokens": 4} | body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        record = await w.record(response.headers)
    await learned(w)
    return record["predicted_cached_tokens"], record["cached_tokens"], record["prompt_tokens"]


async def test_predicted_equals_reported_over_chats_with_repeated_images(world: Served) -> None:
    """Differences come only with images that the router meets for the first time."""
    choose = random.Random(1)
    met: set[int] = set()
    totals: Counter[str] = Counter()
    open_chats: list[list[dict[str, Any]]] = []
    for _ in range(CHATS):
        if open_chats and choose.random() < 0.6:
            messages = choose.choice(open_chats)
            messages.append({"role": "assistant", "content": "It sends it on."})
        else:
            messages = [{"role": "system", "content": "Look at each image. " * choose.randint(0, 9)}]
            open_chats.append(messages)
        shown = [choose.randrange(len(IMAGES)) for _ in range(choose.randint(0, 3))]
        parts = [image(number) for number in shown]
        parts.insert(choose.randint(0, len(parts)), text(" ".join(choose.choices(WORDS, k=30))))
        messages.append({"role": "user", "content": parts})
        if len(messages) > 12:
            open_chats.remove(messages)
        predicted, reported, _ = await send(world, {"messages": messages})
        is_new = not met.issuperset(shown)
        met.update(shown)
        assert predicted <= reported if is_new else predicted == reported, (predicted, reported, messages)
        totals += {"chats": 1, "new": is_new, "hits": reported > 0, "cached": reported}
    print(dict(totals))
    assert totals["chats"] == CHATS
    assert totals["new"] <= len(IMAGES)
    assert totals["hits"] > CHATS / 2


async def test_messages_and_responses_are_predicted_too(world: Served) -> None:
    """Their images become those of a chat: of one image, all three have the same identity."""
    words = " ".join(WORDS * 4)

    def block(number: int) -> dict[str, Any]:
        data = IMAGES[number].partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    def shown(number: int) -> dict[str, Any]:
        return {"type": "input_image", "image_url": IMAGES[number]}

    await send(world, {"messages": [{"role": "user", "content": [image(0), image(1)]}]})
    call = {"type": "tool_use", "id": "t1", "name": "screen", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("Seen."), block(1)]}
    messages = [
        {"role": "user", "content": [block(0), text(words)]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, text(words)]},
    ]
    for count in (1, 1, 3, 3):
        predicted, reported, _ = await send(world, {"messages": messages[:count]}, MESSAGES)
        assert predicted == reported, count
    assert reported > 4 * BLOCK
    said = {"type": "input_text", "text": words}
    items = [{"role": "user", "content": [said, shown(1), shown(0)]}, {"role": "user", "content": [said]}]
    for count in (1, 1, 2, 2):
        predicted, reported, _ = await send(world, {"input": items[:count]}, RESPONSES)
        assert predicted == reported, count
    assert reported > 2 * BLOCK


async def test_names_of_images_stand_for_their_content(world: Served) -> None:
    """vLLM's `uuid`: the identity is the name, also of other data."""
    named = [image(0) | {"uuid": "screen 1"}, text(" ".join(WORDS * 4))]
    other = [image(1) | {"uuid": "screen 1"}, *named[1:]]
    await send(world, {"messages": [{"role": "user", "content": named}]})
    for content in (named, other, named):
        predicted, reported, prompt = await send(world, {"messages": [{"role": "user", "content": content}]})
        assert predicted == reported == (prompt - 1) // BLOCK * BLOCK


async def test_video_counts_no_wrong_hit(world: Served) -> None:
    """Its blocks have an identity that the router does not know, so nothing is predicted."""
    words, reported = text(" ".join(WORDS * 8)), []

    def video(seed: int) -> dict[str, Any]:
        frames = (url(png(seed + number)).partition(",")[2] for number in range(4))
        return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(frames)}"}}

    one, other = video(20), video(30)
    for parts in ([words, one], [words, one, words], [words, other, image(0)], [one, words]):
        for _ in range(3):  # both engines get it
            predicted, cached, _ = await send(world, {"messages": [{"role": "user", "content": parts}]})
            assert predicted == 0
            reported.append(cached)
    assert max(reported) > 2 * BLOCK


BAD: dict[str, Any] = {
    "no image": {"url": url(b"no image")},
    "cut": {"url": IMAGES[0][:200]},
    "not base64": {"url": "data:image/png;base64,%%%"},
    "no data": {"url": "data:,"},
    "refused": {"url": "http://127.0.0.1:1/a.png"},
    "no scheme": {"url": "a.png"},
    "a file": {"url": "file:///etc/passwd"},
    "a number": {"url": 3},
    "nothing": None,
    "large": {"url": url(bytes(2 << 20))},
}


@pytest.mark.parametrize("name", BAD)
async def test_the_engine_judges_bad_images(world: Served, name: str) -> None:
    """The client gets the engine's own answer, and nothing stays in flight (`served`)."""
    parts = [image(0), {"type": "image_url", "image_url": BAD[name]}, text("What is this?")]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
    engine = next(iter((await world.engines()).values()))
    answers = []
    for base in (world.url, world.url, engine["url"]):
        async with world.session.post(base + CHAT, json=body) as response:
            answers.append((response.status, (await response.json()).get("error")))
        await learned(world)
    through, again, direct = answers
    assert through == again == direct
    assert through[0] >= 400
