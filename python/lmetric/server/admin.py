"""The router's own pages: health, models, metrics, debugging, administration."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from pydantic import ValidationError

from lmetric._core import LmetricError
from lmetric.config import EngineConfig
from lmetric.server.fleet import Engine, Pool
from lmetric.server.front import Front
from lmetric.server.metrics import CONTENT_TYPE
from lmetric.server.openai import ApiError, bad

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2


async def pages(front: Front, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
    """Answers what is not for an engine. Raises ApiError."""
    if path == "/health":
        _only(request, path, "GET", "HEAD")
        return web.Response()
    if path == "/ready":
        _only(request, path, "GET", "HEAD")
        if front.draining or not front.fleet.ready():
            why = "shutting down" if front.draining else "no engine can take requests"
            raise ApiError(503, f"not ready: {why}", code="not_ready", headers={"retry-after": "2"})
        return web.Response()
    if path == "/metrics":
        _only(request, path, "GET", "HEAD")
        return web.Response(body=front.metrics.render(), headers={"content-type": CONTENT_TYPE})
    known = path in ("/v1/models", "/debug/engines", "/debug/indicators")
    if not known and not path.startswith(("/v1/models/", "/debug/decisions/", "/admin/")):
        raise _unknown(front, path)
    front.keys.tenant(request.headers.get("authorization"), request.headers.get("x-api-key"))
    if path.startswith("/admin/"):
        return await _admin(front, request, path)
    _only(request, path, "GET", "HEAD")
    if path == "/v1/models":
        return _json(front.fleet.models())
    if path.startswith("/v1/models/"):
        name = path.removeprefix("/v1/models/")
        front.fleet.find(name)
        cards = orjson.loads(front.fleet.models())["data"]
        return _json(next(card for card in cards if card["id"] == name))
    if path == "/debug/engines":
        return _json(_engines(front.fleet.engines()))
    if path == "/debug/indicators":
        return _json({pool.name: _indicators(pool) for pool in front.fleet.pools})
    return _json(_receipt(front, path.removeprefix("/debug/decisions/")))


def _only(request: web.BaseRequest, path: str, *methods: str) -> None:
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise ApiError(
            405, f"{request.method} is not allowed on {path}; use {methods[0]}", headers={"allow": allowed}
        )


def _unknown(front: Front, path: str) -> ApiError:
    hint = "; leave out the second /v1" if path.startswith("/v1/v1/") else ""
    for known in sorted(front.paths):
        if known.endswith(path) or path.rstrip("/") == known:
            hint = f"; did you mean {known}?"
    return ApiError(404, f"unknown path {path}{hint}", code="unknown_path")


def _json(value: Any) -> web.Response:
    body = value if isinstance(value, bytes) else orjson.dumps(value, option=_OPTIONS)
    return web.Response(body=body, content_type="application/json")


def _engines(engines: Iterable[Engine]) -> list[dict[str, Any]]:
    ages: dict[str, float] = {}
    shown = []
    for engine in engines:
        pool, told = engine.pool, engine.capabilities
        if pool is not None and engine.name not in ages:
            column = pool.router.indicators()["report_age_seconds"]
            ages |= dict(zip(pool.router.instances(), column.tolist(), strict=True))
        age = ages.get(engine.name, math.nan)
        shown.append(
            {
                "name": engine.name,
                "url": engine.config.url,
                "model": pool.name if pool else None,
                "healthy": engine.healthy,
                "draining": engine.draining,
                "last_error": engine.last_error,
                "mode": engine.mode.name,
                "mode_reason": engine.mode.reason,
                "capabilities": {**asdict(told), "full_report": told.full_report is not None},
                "load": {
                    "reports": engine.load_reports,
                    "age_seconds": age if math.isfinite(age) else None,
                    "error": engine.load_error,
                },
                "kv_events": pool.kv.status(engine.name) if pool else None,
                "refilling": engine.refill is not None,
                "tokenizer": _tokenizer(pool) if pool else None,
            }
        )
    return shown


def _tokenizer(pool: Pool) -> dict[str, Any]:
    known = pool.tokenizer
    return {"folder": str(known.folder) if known is not None else None, "note": pool.tokenizer_note}


def _indicators(pool: Pool) -> dict[str, dict[str, float | None]]:
    columns = pool.router.indicators()
    return {
        instance: {
            name: float(column[i]) if np.isfinite(column[i]) else None for name, column in columns.items()
        }
        for i, instance in enumerate(pool.router.instances())
    }


def _receipt(front: Front, label: str) -> dict[str, Any]:
    head, dash, tail = label.partition("-")
    index, number = (head, tail) if dash else ("0", head)
    if not (index.isascii() and index.isdigit() and number.isascii() and number.isdigit()) or len(label) > 40:
        raise bad(f"{label!r} is not the id of a decision; the header x-lmetric-decision has it")
    pools = front.fleet.pools
    if int(index) < len(pools):
        pool = pools[int(index)]
        receipt = pool.router.receipt(int(number)) if int(number) < 2**64 else None
        if receipt is not None:
            return {"model": pool.name, **receipt, "id": pool.decision_label(receipt["id"])}
    raise ApiError(404, f"no receipt of decision {label}: unknown, or too old (receipt_bytes bounds them)")


async def _admin(front: Front, request: web.BaseRequest, path: str) -> web.Response:
    if not front.config.admin:
        raise ApiError(403, "administration is off; set admin: true")
    if path == "/admin/engines":
        _only(request, path, "POST")
        return _json(await _add(front, request))
    if path == "/admin/guard":
        _only(request, path, "POST")
        body = await _object(request, {"on"})
        if not isinstance(body.get("on"), bool):
            raise bad("on must be true or false", "on")
        for pool in front.fleet.pools:
            pool.router.set_guard(body["on"])
        return _json({"guard": body["on"]})
    name, _, verb = path.removeprefix("/admin/engines/").partition("/")
    engine = next((e for e in front.fleet.engines() if e.name == name), None)
    if engine is None or engine.pool is None:
        raise ApiError(404, f"no engine {name!r}; /debug/engines lists them")
    if not verb:
        _only(request, path, "DELETE")
        engine.pool.remove(name)
    elif verb in ("drain", "undrain"):
        _only(request, path, "POST")
        engine.draining = verb == "drain"
        engine.pool.router.drain(name, engine.draining)
    else:
        raise _unknown(front, path)
    return _json(*_engines([engine]))


async def _add(front: Front, request: web.BaseRequest) -> dict[str, Any]:
    body = await _object(request, {"model", *EngineConfig.model_fields})
    model = body.pop("model", None)
    try:
        config = EngineConfig.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise bad(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    fleet = front.fleet
    if any(engine.name == config.label for engine in fleet.engines()):
        raise ApiError(409, f"there is an engine {config.label!r} already")
    engine = Engine(config, front.config)
    if model is None:
        fleet.unplaced.append(engine)
    elif isinstance(model, str) and model:
        try:
            fleet.pool(model).add(engine)
        except LmetricError as error:
            raise bad(str(error)) from None
    else:
        raise bad("model must be a name", "model")
    return _engines([engine])[0]


async def _object(request: web.BaseRequest, known: set[str]) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise bad(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    for name in body:
        if name not in known:
            raise bad(f"unknown field {name!r}; known: {', '.join(sorted(known))}", name)
    return body
