"""Chats with images in the server: images are learned from an engine, and what cannot be learned is
routed all the same."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.server.fleet import images as learning
from lmetric.server.fleet.model import Model
from lmetric.tokens.prompt import PromptTokenizer
from server_world import FakeEngine, Request, World, answer, decision_id, plain, world
from token_folders import byte_level, write_folder

CHAT, RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}"
)
VLLM = b'vllm:cache_config_info{engine="0"} 1\n'
SIZE = 12  # tokens of an image
FACE, HILL = "data:image/png;base64,FACE", "data:image/png;base64,HILL"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|image|>"])
    return write_folder(tmp_path_factory.mktemp("model"), tokenizer, TEMPLATE)


def image(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], **more}


class Renderer:
    """An engine's `/render`, with the tokens of a folder. ``answers``: status and body, by URL."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PromptTokenizer.load(folder)
        self.bodies: list[dict[str, Any]] = []
        self.answers: dict[Any, tuple[int, bytes]] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path != RENDER:
            return await answer(engine, request, writer)
        body = orjson.loads(request.body)
        self.bodies.append(body)
        (part,) = body["messages"][0]["content"]
        url = part["image_url"]["url"]
        await self.gate.wait()
        status, said = self.answers.get(url) or (200, self.rendered(body, str(hash(url))))
        writer.write(plain(status, said))
        return True

    def rendered(self, body: dict[str, Any], identifier: str) -> bytes:
        text = self.tokenizer.chat_text(body)
        tokens = self.tokenizer.encode(text)
        assert tokens is not None
        place = tokens.tolist().index(int(self.tokenizer.encode(text._replace(text="<|image|>"))[0]))
        token_ids = [*tokens[:place].tolist(), *range(SIZE), *tokens[place + 1 :].tolist()]
        where = {"image": [{"offset": place, "length": SIZE}]}
        features = {"mm_hashes": {"image": [identifier]}, "mm_placeholders": where, "kwargs_data": None}
        return orjson.dumps({"token_ids": token_ids, "features": features, "sampling_params": {}})


@contextlib.asynccontextmanager
async def rendering(folder: Path, count: int = 1) -> AsyncIterator[tuple[World, Renderer]]:
    renderer = Renderer(folder)
    engines = [FakeEngine(behave=renderer, metrics=VLLM) for _ in range(count)]
    async with world(engines, tokenizer=str(folder), block_size=4, model="tiny") as w:
        await w.until(lambda: all(each.identified for each in model(w).engines.values()))
        yield w, renderer


def model(w: World) -> Model:
    return w.server.fleet.models[0]


async def record(w: World, body: dict[str, Any]) -> dict[str, Any]:
    status, headers, said = await w.post(body, CHAT)
    assert status == 200, said
    got = model(w).router.explain(decision_id(headers))
    assert got is not None
    return got


async def learned(w: World) -> None:
    await w.until(lambda: model(w).images_waiting == 0)


async def test_an_image_is_rendered_once_and_then_known(folder: Path) -> None:
    async with rendering(folder) as (w, renderer):
        text = {"type": "text", "text": "What is this?"}
        await record(w, chat(image(FACE), text))
        await learned(w)
        # Its request goes on meanwhile, and is matched as text.
        assert model(w).tokenizers.text_prompts == {"media": 1}
        (body,) = renderer.bodies
        assert body == chat(image(FACE), mm_payload="none")
        without = len(renderer.tokenizer.encode(renderer.tokenizer.chat_text(chat(image(FACE), text))))
        first = await record(w, chat(image(FACE), text))
        assert (first["prompt_tokens"], first["predicted_cached_tokens"]) == (without - 1 + SIZE, 0)
        again = await record(w, chat(image(FACE), text))
        assert again["predicted_cached_tokens"] == (without - 2 + SIZE) // 4 * 4  # all but the last token
        # Another image has the same tokens, but another identity.
        new = await record(w, chat(image(HILL), text))
        assert new["prompt_tokens"] == without - 1 + SIZE
        before = new["predicted_cached_tokens"]  # the block before the image
        assert before == 4
        await learned(w)
        other = await record(w, chat(image(HILL), text))
        assert other["predicted_cached_tokens"] == before
        assert len(renderer.bodies) == 2
        assert model(w).tokenizers.text_prompts == {"media": 1, "image": 1}
        # A new image ends what can hit, and what is before it counts.
        cut = await record(w, chat(image(FACE), text, image(FACE + "2"), text))
        assert cut["predicted_cached_tokens"] > SIZE
        await learned(w)
        _, page = await w.get("/metrics")
        assert b'lmetric_text_prompts_total{model="tiny",reason="image"} 2.0' in page


async def test_an_image_in_flight_is_not_rendered_again(folder: Path) -> None:
    async with rendering(folder) as (w, renderer):
        renderer.gate.clear()
        for _ in range(3):
            await record(w, chat(image(FACE), image(FACE)))
        await w.until(lambda: len(renderer.bodies) == 1)
        assert model(w).images_waiting == 1
        renderer.gate.set()
        await learned(w)
        assert len(renderer.bodies) == 1


async def test_the_settings_of_a_request_are_part_of_its_images(folder: Path) -> None:
    async with rendering(folder) as (w, renderer):
        await record(w, chat(image(FACE), mm_processor_kwargs={"size": 1}))
        await record(w, chat(image(FACE)))
        await learned(w)
        assert sorted(len(body) for body in renderer.bodies) == [3, 4]
        assert {"size": 1} in [body.get("mm_processor_kwargs") for body in renderer.bodies]


@pytest.mark.parametrize(
    "part",
    [
        image("https://example.com/a.png"),  # the router reads no URL, and its content may change
        image("file:///etc/passwd"),
        image(FACE, uuid=3),
        image(None),
        image({}),
        {"type": "image_url"},
        {"type": "image_url", "image_url": FACE[5:]},
    ],
)
async def test_an_image_without_a_known_content_is_routed_and_not_rendered(
    folder: Path, part: dict[str, Any]
) -> None:
    async with rendering(folder) as (w, renderer):
        await record(w, chat(image(FACE)))
        await learned(w)
        for _ in range(2):
            got = await record(w, chat(image(FACE), part, {"type": "text", "text": "word " * 50}))
        assert got["prompt_tokens"] > 50
        assert 0 < got["predicted_cached_tokens"] <= SIZE + 8
        assert len(renderer.bodies) == 1
        # The engine gets the client's bytes, and judges them.
        assert w.engines[0].requests[-1].json["messages"][0]["content"][1] == part


@pytest.mark.parametrize(
    "said",
    [
        (400, b'{"error": {"message": "cannot identify image file"}}'),
        (500, b""),
        (200, b"not JSON"),
        (200, b'{"token_ids": [1, 2]}'),
        (200, b'{"token_ids": [-1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": '
         b'[{"offset": 0, "length": 1}]}}}'),
        (200, b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}}'),
        (200, b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": '
         b'[{"offset": 5, "length": 1}]}}}'),
    ],
)  # fmt: skip
async def test_an_image_that_an_engine_cannot_render_is_left_alone(
    folder: Path, said: tuple[int, bytes]
) -> None:
    async with rendering(folder) as (w, renderer):
        renderer.answers[HILL] = said
        for _ in range(3):
            await record(w, chat(image(HILL)))
            await learned(w)
        assert len(renderer.bodies) == 1
        await record(w, chat(image(FACE)))
        await learned(w)
        current = model(w).tokenizers.current
        assert current is not None
        assert len(current.images) == 1


async def test_an_engine_without_render_is_asked_once_a_minute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rendering(folder) as (w, renderer):
        renderer.answers = dict.fromkeys((FACE, HILL), (403, b"Scale-out endpoints are disabled."))
        for url in (FACE, HILL, FACE):
            await record(w, chat(image(url)))
            await learned(w)
        assert len(renderer.bodies) == 1
        monkeypatch.setattr(model(w)._images, "_off_until", 0.0)
        renderer.answers = {}
        await record(w, chat(image(FACE)))
        await learned(w)
        assert len(renderer.bodies) == 2
        assert (await record(w, chat(image(FACE))))["prompt_tokens"] > SIZE


async def test_images_that_wait_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "MOST_WAITING", 3)
    async with rendering(folder) as (w, renderer):
        renderer.gate.clear()
        await record(w, chat(*(image(f"{FACE}{number}") for number in range(9))))
        assert model(w).images_waiting == 3
        renderer.gate.set()
        await learned(w)
        assert len(renderer.bodies) == 3
        monkeypatch.setattr(learning, "MOST_WAITING_BYTES", 1)
        await record(w, chat(image(HILL)))
        assert model(w).images_waiting == 0


async def test_a_large_image_is_read_in_a_thread(folder: Path) -> None:
    async with rendering(folder) as (w, renderer):
        large = "data:image/png;base64," + "A" * (3 << 20)
        for _ in range(2):
            got = await record(w, chat(image(large)))
            await learned(w)
        assert got["prompt_tokens"] > SIZE
        assert len(renderer.bodies) == 1


async def test_a_router_stops_while_an_image_is_rendered(folder: Path) -> None:
    async with rendering(folder) as (w, renderer):
        renderer.gate.clear()
        await record(w, chat(image(FACE)))
        await w.until(lambda: len(renderer.bodies) == 1)
