"""Encode: engines that run only the encoder prepare a request's images, sound and video.

Each engine gets a chat of media alone, as vLLM's disaggregated encoder needs it, and stores the
encoded media where the request's own engine finds them by their identity. Equal media always go to
the same engine: it has them cached, and no two engines write them at the same time. A failure only
costs time, because the request's own engine encodes what it does not find.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from msgspec import Struct

from lmetric.engines.handover import CHAT, with_fields
from lmetric.server.execution.exchange import SATURATED
from lmetric.server.execution.failures import blame, blame_status
from lmetric.server.execution.plan import EngineLost, Step, Way
from lmetric.server.execution.progress import Progress
from lmetric.server.fleet.engine import Engine

if TYPE_CHECKING:
    from lmetric.tokens.media import Media, MediaPart

PARAMS = "ec_transfer_params"

log = structlog.get_logger("lmetric.relay")


class _Batch(Struct, eq=False):
    """Media that an engine encodes. ``tried``: engines that failed to."""

    parts: list[MediaPart]
    tried: frozenset[str]


def encode(p: Progress, target: Engine) -> Way[None]:
    """Has the media of a request encoded, by all their engines at once."""
    media, p.media = p.media, None
    assert media is not None  # the caller checks it
    outcomes, params = p.model.encodings, dict[str, Any]()
    parts = _missing(p, media, target)
    outcomes["cached"] += len(media.parts) - len(parts)
    p.encoding = running = dict[Step, _Batch]()
    _send(p, media, _Batch(parts, frozenset()), running=running)
    try:
        while running:
            step, outcome, again = yield from _next(p, params)
            batch = running.pop(step)
            if again:
                tried = batch.tried | {step.engine.name}
                _send(p, media, _Batch(batch.parts, tried), running=running)
            else:
                outcomes[outcome] += len(batch.parts)
    except GeneratorExit:
        outcomes["ended"] += sum(len(batch.parts) for batch in running.values())
        raise
    if params:
        fields = {PARAMS: params}
        if p.first is None:
            p.body = with_fields(p.body, fields)
        else:  # a prefill gets them, too
            p.first.add(fields)
            p.body = p.first.body
    if target.model is not p.model:
        raise EngineLost(target, "refused", "it was removed")


def _missing(p: Progress, media: Media, target: Engine) -> list[MediaPart]:
    """Returns the media whose tokens the request's engine does not have cached, each once."""
    cached = p.decision.predicted_cached_tokens if target.mode.name == "exact" else 0
    known = 0
    for _, first, length in media.places:
        known += first + length <= cached
    return list({part.key: part for part in media.parts[known:]}.values())


def _send(p: Progress, media: Media, batch: _Batch, *, running: dict[Step, _Batch]) -> None:
    """Sends each part to its engine that is usable and has not failed to encode it."""
    usable = [
        engine
        for engine in p.model.encoders.values()
        if engine.in_service and not engine.held and engine.name not in batch.tried
    ]
    if not usable:
        p.model.encodings["failed" if batch.tried else "no_engine"] += len(batch.parts)
        return
    groups: dict[Engine, list[MediaPart]] = {}
    for part in batch.parts:
        groups.setdefault(_engine_of(part, usable), []).append(part)
    for engine, parts in groups.items():
        body = _body(p.model.names.name_for(engine.name), media, parts)
        step = p.own_step(engine, body, CHAT)
        running[step] = _Batch(parts, batch.tried)
        p.acts.append(step)


def _engine_of(part: MediaPart, engines: Iterable[Engine]) -> Engine:
    """Returns the same engine for equal media, on all routers, as long as it is usable."""

    def rank(engine: Engine) -> bytes:
        return blake2b(engine.name.encode(), key=part.key, digest_size=8).digest()

    return max(engines, key=rank)


def _body(model: str, media: Media, parts: list[MediaPart]) -> bytes:
    """Returns a chat of media alone. Its text and its answer would have no effect."""
    head = orjson.dumps({"model": model, "max_tokens": 1, "stream": False, **media.fields})[:-1]
    pieces = [head, b',"messages":[{"role":"user","content":[', parts[0].part]
    for part in parts[1:]:
        pieces += [b",", part.part]
    return b"".join((*pieces, b"]}]}"))


def _next(p: Progress, params: dict[str, Any]) -> Way[tuple[Step, str, bool]]:
    """Waits for an engine. Returns its step, the outcome, and whether another engine shall try."""
    try:
        attempt, _ = yield None
    except EngineLost as lost:
        if lost.step is None:
            raise
        blame(p, lost)
        return lost.step, "failed", lost.kind != "timeout"
    step, status = attempt.step, attempt.reader.status
    if status != 200:
        blame_status(p, attempt)
        log.debug("media were not encoded", model=p.model.name, engine=step.engine.name, status=status)
        return step, "refused", status >= 500 or status in SATURATED or status == 404
    stored = _stored(bytes(attempt.answer))
    if not stored:
        log.warning(
            "an engine stored no media: start it with an ec_role of ec_producer",
            model=p.model.name,
            engine=step.engine.name,
        )
        return step, "not_stored", False
    params.update(stored)
    return step, "encoded", False


def _stored(answer: bytes) -> dict[str, Any]:
    """Returns what the request's engine needs to find the media, by their identity."""
    try:
        found = orjson.loads(answer)[PARAMS]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
