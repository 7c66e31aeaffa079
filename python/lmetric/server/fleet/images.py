"""Learns the images of a model's prompts from its engines (`/v1/chat/completions/render`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import orjson
import structlog

from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.parsing import RENDER
from lmetric.server.upstream.connection import UpstreamError
from lmetric.tokens.errors import NotAligned, NotPredictable

if TYPE_CHECKING:
    from lmetric.tokens.images import Image
    from lmetric.tokens.prompt import PromptTokenizer, Tokens

log = structlog.get_logger("lmetric.tokens")

RENDER_SECONDS = 30.0  # time limit of one image
AT_ONCE = 2  # images that engines render at a time, for one model
MOST_WAITING = 64  # images, those in flight included
MOST_WAITING_BYTES = 64 << 20  # of the requests with these images
RETRY_SECONDS = 60.0  # after an engine that has no `/render`, and after an image that has failed
MOST_FAILED = 1024


class _Place(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Place]]


class _Rendered(msgspec.Struct):
    """An engine's prompt with one image."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    features: _Features | None = None


_ANSWER = msgspec.json.Decoder(_Rendered)


class Images:
    """Has new images rendered, one by one, while their requests go on."""

    def __init__(
        self,
        model: str,
        engines: Mapping[str, Engine],
        *,
        tokenizer: Callable[[], PromptTokenizer | None],
        name_for: Callable[[str], str],
    ) -> None:
        self._model = model
        self._engines = engines
        self._tokenizer = tokenizer
        self._name_for = name_for
        self._tasks: dict[bytes, asyncio.Task[None]] = {}  # by image
        self._bytes = 0  # of the requests with these images
        self._failed: dict[bytes, float] = {}  # by image: time until which it is not tried again
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._off_until = 0.0  # engines do not render until then

    @property
    def waiting(self) -> int:
        """Images that are not rendered yet."""
        return len(self._tasks)

    def learn(self, images: Iterable[Image], call: ParsedRequest) -> None:
        """Starts to learn unknown images of a request. An image beyond the limits is left out: it
        is learned when it comes again."""
        now, size = time.monotonic(), len(call.body)
        if now < self._off_until or (tokenizer := self._tokenizer()) is None:
            return
        from lmetric.tokens.images import PROCESSOR_FIELDS  # the tokenizer has loaded it

        fields = {name: call.request[name] for name in PROCESSOR_FIELDS if call.request.get(name)}
        for image in images:
            key = image.key
            if key is None or key in self._tasks or now < self._failed.get(key, 0.0):
                continue
            if len(self._tasks) >= MOST_WAITING or self._bytes + size > MOST_WAITING_BYTES:
                return
            self._bytes += size
            learning = self._learn(key, image, fields=fields, tokenizer=tokenizer)
            task = asyncio.create_task(learning, name="image")
            self._tasks[key] = task
            task.add_done_callback(partial(self._ended, key, size))

    def close(self) -> None:
        """Stops all work."""
        for task in self._tasks.values():
            task.cancel()

    def _ended(self, key: bytes, size: int, _: asyncio.Task[None]) -> None:
        self._bytes -= size
        del self._tasks[key]

    async def _learn(
        self, key: bytes, image: Image, *, fields: Mapping[str, Any], tokenizer: PromptTokenizer
    ) -> None:
        try:
            async with self._slots:
                await self._render(key, image, fields=fields, tokenizer=tokenizer)
        except (UpstreamError, NotAligned, NotPredictable, msgspec.DecodeError, ValueError) as error:
            if len(self._failed) >= MOST_FAILED:
                self._failed.clear()
            self._failed[key] = time.monotonic() + RETRY_SECONDS
            log.info("cannot learn an image", model=self._model, reason=str(error))

    async def _render(
        self, key: bytes, image: Image, *, fields: Mapping[str, Any], tokenizer: PromptTokenizer
    ) -> None:
        usable = [
            engine
            for engine in self._engines.values()
            if engine.healthy
            and not engine.held
            and not engine.encodes
            and engine.capabilities.engine == "vllm"
        ]
        if not usable or time.monotonic() < self._off_until:
            return
        engine = min(usable, key=lambda engine: engine.upstream.in_use)
        chat = {"messages": [{"role": "user", "content": [image.part]}], **fields}
        own = {"model": self._name_for(engine.name), "mm_payload": "none"}
        # An image may have megabytes.
        body = await asyncio.to_thread(orjson.dumps, {**chat, **own})
        status, answer = await engine.upstream.post(RENDER, body, RENDER_SECONDS)
        if status in (403, 404, 405, 501):
            self._off_until = time.monotonic() + RETRY_SECONDS
            log.warning(
                "prompts with images are matched as text: the engine does not render them; "
                "start it with --enable-scale-out",
                model=self._model,
                engine=engine.name,
                status=status,
            )
            return
        if status != 200:
            raise ValueError(f"{RENDER}: status {status}")
        rendered = _ANSWER.decode(answer)
        features = rendered.features
        hashes = [] if features is None else features.mm_hashes.get("image", [])
        places = [] if features is None else features.mm_placeholders.get("image", [])
        if len(hashes) != 1 or len(places) != 1:
            raise NotAligned(f"the engine has {len(hashes)} images in place of one")
        from lmetric.tokens.images import aligned

        tokens = await asyncio.to_thread(_template_tokens, tokenizer, chat)
        token_ids = np.array(rendered.token_ids, dtype=np.uint32)
        place = places[0]
        tokenizer.images.add(key, aligned(tokens, token_ids, hashes[0], place.offset, place.length))


def _template_tokens(tokenizer: PromptTokenizer, chat: Mapping[str, Any]) -> Tokens:
    tokens = tokenizer.encode(tokenizer.chat_text(chat))
    assert tokens is not None  # without a limit the result is never None
    return tokens
