"""Images in prompts: the tokens and the identity that engines give them, learned from an engine.

An engine puts many tokens in the place of an image, and hashes their blocks with its identity
(vLLM's `mm_hash`). Both depend on the image and on the engine's processor, so the router reads
them from the engine's `/render`, once for each image. No image is decoded here, and no URL is read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric.tokens.errors import NotAligned

Tokens = NDArray[np.uint32]

# Fields of a request that change how an engine reads an image.
PROCESSOR_FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
# Most images that are known, and most tokens of them together (4 bytes each).
MOST_IMAGES, MOST_TOKENS = 16_384, 16 << 20


class Image(NamedTuple):
    """An image in a chat. ``key``: equal for equal images; None: a remote image, whose content is
    unknown. ``part``: the content part of the request."""

    key: bytes | None
    part: Mapping[str, Any]


class ImageTokens(NamedTuple):
    """An image in a prompt: its identity, the template's token in its place, and its tokens."""

    identifier: str
    placeholder: int
    tokens: Tokens


class ImagePrompt(NamedTuple):
    """A prompt with images."""

    tokens: Tokens | None  # up to the first unknown image; None: no image's place is known
    images: list[tuple[str, int, int]]  # identity, position of the first token, number of tokens
    total_tokens: int  # of the whole prompt: an unknown image counts like the last known one
    unknown: list[Image]  # images to learn
    image_count: int  # all images of the prompt


def in_chat(part: dict[str, Any]) -> dict[str, Any]:
    """A content part as chats have it: vLLM takes no `input_image` of the Responses API there."""
    if part.get("type") != "input_image" or type(url := part.get("image_url")) is not str:
        return part
    named = {"uuid": part["uuid"]} if "uuid" in part else {}
    return {"type": "image_url", "image_url": {"url": url}, **named}


def image_of(part: dict[str, Any], request: Mapping[str, Any]) -> Image:
    """An image of a request, from a content part of type `image_url` or `input_image`."""
    part = in_chat(part)
    uuid, url = part.get("uuid"), part.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    digest = blake2b(digest_size=16)
    if uuid is not None:  # the client's name of the image: vLLM takes it for the content
        if type(uuid) is not str:
            return Image(None, part)
        digest.update(b"uuid\0" + uuid.encode("utf-8", "surrogatepass"))
    elif type(url) is str and url.startswith("data:"):
        digest.update(url.encode("utf-8", "surrogatepass"))
    else:
        return Image(None, part)
    for name in PROCESSOR_FIELDS:
        if value := request.get(name):
            digest.update(b"\0%s\0" % name.encode() + orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
    return Image(digest.digest(), part)


def aligned(template: Tokens, rendered: Tokens, identifier: str, offset: int, length: int) -> ImageTokens:
    """The only image of an engine's prompt.

    ``template``: tokens of the chat template; ``rendered``: tokens of the engine, with the image's
    at ``offset``. Raises NotAligned.
    """
    end = offset + length
    if not 0 <= offset < end <= len(rendered) or len(template) + length - 1 != len(rendered):
        raise NotAligned("one token of the template does not become the image's tokens")
    placeholder = int(template[offset])
    alone = np.count_nonzero(template == placeholder) == 1
    before = np.array_equal(template[:offset], rendered[:offset])
    if not (alone and before and np.array_equal(template[offset + 1 :], rendered[end:])):
        raise NotAligned("the engine's text around the image is not the template's text")
    return ImageTokens(identifier, placeholder, rendered[offset:end].copy())


class KnownImages:
    """The images of one tokenizer, the latest ones. It is thread-safe."""

    def __init__(self) -> None:
        self._known: dict[bytes, ImageTokens] = {}
        self._tokens = 0
        self._last: ImageTokens | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: bytes, image: ImageTokens) -> None:
        """Adds an image, and forgets the oldest ones if there are too many."""
        with self._lock:
            self._put(key, image)
            self._last = image
            while len(self._known) > MOST_IMAGES or self._tokens > MOST_TOKENS:
                oldest = next(iter(self._known))
                self._tokens -= len(self._known.pop(oldest).tokens)

    def _put(self, key: bytes, image: ImageTokens) -> None:
        before = self._known.pop(key, None)
        self._known[key] = image
        self._tokens += len(image.tokens) - (0 if before is None else len(before.tokens))

    def _find(self, images: list[Image]) -> list[ImageTokens | None]:
        with self._lock:
            found = [None if image.key is None else self._known.get(image.key) for image in images]
            for image, known in zip(images, found, strict=True):
                if known is not None and image.key is not None:
                    self._put(image.key, known)
            return found

    def expand(self, template: Tokens, images: list[Image]) -> ImagePrompt:
        """The engine's prompt of a template's tokens with these images."""
        found, last = self._find(images), self._last
        pairs = zip(images, found, strict=True)
        unknown = [image for image, known in pairs if known is None and image.key is not None]
        if last is None:
            return ImagePrompt(None, [], 0, unknown, len(images))
        at = np.flatnonzero(template == last.placeholder)
        # Otherwise a text contains the placeholder, or this template writes another one.
        if len(at) != len(images) or any(known and known.placeholder != last.placeholder for known in found):
            return ImagePrompt(None, [], 0, unknown, len(images))
        pieces, placed, end, length = [], [], 0, 0
        for place, known in zip(at.tolist(), found, strict=True):
            pieces.append(template[end:place])
            length += place - end
            end = place
            if known is None:
                break
            placed.append((known.identifier, length, len(known.tokens)))
            pieces.append(known.tokens)
            length += len(known.tokens)
            end = place + 1
        else:
            pieces.append(template[end:])
        sizes = sum(len((known or last).tokens) for known in found)
        total = len(template) - len(images) + sizes
        return ImagePrompt(np.concatenate(pieces), placed, total, unknown, len(images))
