"""Images, sound and video of a request, for engines that encode them before its own engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import orjson
from msgspec import Struct

from lmetric.tokens.agents import chat_of_messages, chat_of_responses
from lmetric.tokens.errors import NotPredictable
from lmetric.tokens.images import PROCESSOR_FIELDS, in_chat

KINDS = frozenset({"image_url", "input_image", "audio_url", "input_audio", "video_url"})
# A body without any of these has no such part.
_MARKS = (b"_url", b'"image"', b"input_audio")


class MediaPart(Struct, frozen=True):
    """An image, a sound or a video. ``key``: equal for equal parts; ``part``: the part as JSON."""

    key: bytes
    part: bytes


class Media(Struct, eq=False):
    """The images, sound and video of a request, in their order."""

    parts: list[MediaPart]
    fields: dict[str, Any]  # of the request: they change how an engine reads the parts
    # Of the first images, if their tokens are known: identity, first token and number of tokens.
    places: list[tuple[str, int, int]] = []


def has_media(body: bytes) -> bool:
    """Whether a body may have images, sound or video."""
    return any(mark in body for mark in _MARKS)


def media_of(api: str, request: Mapping[str, Any]) -> Media | None:
    """The media of a request; None: it has none, or its shape is unknown.

    ``api``: chat, messages or responses. It takes up to 3 ns for each byte.
    """
    try:
        chat = request
        if api == "messages":
            chat = chat_of_messages(request, lambda: False, lambda: "low")
        elif api == "responses":
            chat = chat_of_responses(request)
        parts = [_part(part) for part in _found(chat.get("messages"))]
    except (NotPredictable, TypeError, ValueError):  # the engine judges it
        return None
    if not parts:
        return None
    return Media(parts, {name: request[name] for name in PROCESSOR_FIELDS if request.get(name)})


def _found(messages: Any) -> Iterator[dict[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in KINDS:
                yield in_chat(part)


def _part(part: dict[str, Any]) -> MediaPart:
    raw = orjson.dumps(part)
    uuid = part.get("uuid")  # the client's name of the content
    named = b"uuid\0" + uuid.encode() if isinstance(uuid, str) else raw
    return MediaPart(blake2b(named, digest_size=16).digest(), raw)
