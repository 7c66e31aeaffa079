"""The engines under the paths of vllm-router and sglang-router, which trainers and harnesses call.

These pages read and change what /admin/engines does, under the same access rules. Where the two
routers differ, answers have the fields of both. `bench/rivals/worker_paths.py` compares them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote

from aiohttp import web
from pydantic import ValidationError

from lmetric.config import EngineConfig
from lmetric.server.api.errors import ApiError, bad, not_valid
from lmetric.server.api.own_pages import OBJECT, TEXT, OwnPage, Pages, answer, in_path, in_query
from lmetric.server.api.request import read_object
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.http.pages import members
from lmetric.server.http.pages.call import Call, json, only_value

PAGES = Pages()
TAG = "workers"
NAMED = "/workers/"
# Roles by the rivals' types of workers. `encode`: of sglang-router's successor, smg.
_ROLES = {"regular": None, "prefill": "prefill", "decode": "decode", "encode": "encode"}
_URL = in_query("url", "URL of the engine", TEXT)
_WORKER = in_path("name", "ID of the worker, or its URL with %3A and %2F")
_BODY = {
    "type": "object",
    "required": ["url"],
    "properties": {
        "url": TEXT,
        "worker_type": {"enum": list(_ROLES)},
        "model_id": {"type": ["string", "null"]},
        "api_key": {"type": ["string", "null"]},
    },
}
_DONE = answer("Done", OBJECT)


def _page(path: str) -> OwnPage:
    return PAGES.page(path, TAG, "admin")


_WORKERS, _ONE = _page("/workers"), _page(f"{NAMED}{{name}}")


@_WORKERS.on("GET", "List the engines as workers", answer("Workers", OBJECT), 401, 403)
async def _list(call: Call) -> web.Response:
    workers = [_shown(engine) for engine in call.front.fleet.engines() if not engine.leaving]
    kinds = [worker["worker_type"] for worker in workers]
    stats = {f"{kind}_count": kinds.count(kind) for kind in _ROLES}
    return json({"workers": workers, "total": len(workers), "stats": stats})


@_WORKERS.on("POST", "Add an engine, or ask a known one again", _DONE, 400, 401, 403, body=_BODY)
async def _create(call: Call) -> web.Response:
    """Adds an engine. Fields that mean nothing to the router are in the answer's ``ignored``."""
    given = read_object(await call.body())
    has_role = "worker_type" in given
    kind = given.pop("worker_type", "regular")
    if not isinstance(kind, str) or kind not in _ROLES:
        raise _failed("ADD", f"worker_type must be one of {', '.join(_ROLES)}", "worker_type")
    fields = {name: given.pop(name) for name in ("url", "api_key") if given.get(name) is not None}
    model = given.pop("model_id", None)
    if model is not None and not isinstance(model, str):
        raise _failed("ADD", "model_id must be a name, a string", "model_id")
    engine, known = await _added(call, {**fields, "role": _ROLES[kind]}, model, has_role=has_role)
    location = f"/workers/{quote(engine.name, safe='')}"
    text = f"Worker {engine.config.url} already exists" if known else _ADDED.format(engine.config.url)
    done = {"success": True, "status": "accepted", "worker_id": engine.name, "url": engine.config.url}
    response = json({**done, "location": location, "message": text, "ignored": sorted(given)})
    response.headers["location"] = location
    return response


@_ONE.on("GET", "Show a worker", answer("Worker", OBJECT), 401, 403, 404, parameters=(_WORKER,))
async def _show(call: Call) -> web.Response:
    return json(_shown(_known(call.front.fleet, unquote(call.name))[0]))


@_ONE.on("DELETE", "Remove a worker", _DONE, 401, 403, 404, 409, parameters=(_WORKER,))
async def _delete(call: Call) -> web.Response:
    """Removes the engine with this ID, or all engines at this URL. Running requests continue."""
    engines = _known(call.front.fleet, unquote(call.name))
    for engine in engines:
        await members.remove(call, engine, 0)
    text = f"Worker {engines[0].config.url} removed successfully"
    return json({"success": True, "status": "accepted", "worker_id": engines[0].name, "message": text})


def _url(call: Call) -> str:
    """Returns the URL in the query. Raises ApiError (400)."""
    if url := only_value(call.query, "url"):
        return url
    raise bad("the query must be url=URL, with one URL", "url")


@_page("/add_worker").on(
    "POST", "Add an engine by its URL", answer("Added", TEXT, "text/plain"), 400, 401, 403, parameters=(_URL,)
)
async def _add(call: Call) -> web.Response:
    url = _url(call)
    engine, known = await _added(call, {"url": url}, None)
    if known:
        raise _failed("ADD", f"Worker {engine.config.url} already exists", "url")
    return web.Response(text=_ADDED.format(engine.config.url))


@_page("/remove_worker").on(
    "POST",
    "Remove an engine by its URL; without one there, nothing changes",
    answer("Removed", TEXT, "text/plain"),
    *(400, 401, 403, 409),
    parameters=(_URL,),
)
async def _remove(call: Call) -> web.Response:
    url = _url(call)
    engines = _found(call.front.fleet, url)
    for engine in engines:
        await members.remove(call, engine, 0)
    if not engines:  # 200, as from the rivals: trainers end a worker only after a success here
        return web.Response(text=f"Worker {url} not found; nothing was removed")
    return web.Response(text=f"Successfully removed worker: {url}")


@_page("/list_workers").on("GET", "List the URLs of the engines", answer("URLs", OBJECT), 401, 403)
async def _urls(call: Call) -> web.Response:
    engines = call.front.fleet.engines()
    return json({"urls": list(dict.fromkeys(each.config.url for each in engines if not each.leaving))})


_ADDED = "Successfully added worker: {}"


def _shown(engine: Engine) -> dict[str, Any]:
    """Describes an engine with the rivals' names of fields.

    ``error``: why it gets no requests, or only as another role; None: it gets them.
    """
    unusable = engine.unusable
    return {
        "id": engine.name,
        "url": engine.config.url,
        "model_id": "unknown" if engine.model is None else engine.model.name,
        "worker_type": "regular" if engine.role == "both" else engine.role,
        "is_healthy": engine.healthy and engine.misfit is None,
        "load": engine.running,
        "connection_mode": "HTTP",
        "error": engine.misfit or engine.unfit or (None if unusable is None else unusable.reason),
    }


def _found(fleet: Fleet, key: str) -> list[Engine]:
    """Returns the engine with an ID, or else the engines at a URL."""
    engine = fleet.engine(key)
    if engine is not None and not engine.leaving:
        return [engine]
    url = key.rstrip("/")
    return [each for each in fleet.engines() if each.config.url == url and not each.leaving]


def _known(fleet: Fleet, key: str) -> list[Engine]:
    """Returns the engines that `_found` finds. Raises ApiError (404) if there are none."""
    if engines := _found(fleet, key):
        return engines
    raise ApiError(404, f"Worker {key} not found", more={"code": "WORKER_NOT_FOUND"})


async def _added(
    call: Call, fields: dict[str, Any], model: str | None, *, has_role: bool = False
) -> tuple[Engine, bool]:
    """Adds an engine. Returns it, and whether the router knew it before. Raises ApiError.

    A known engine is asked for its features again: a process that registers may be a new one. A
    server of two models is two engines.
    """
    try:
        config = EngineConfig.model_validate(fields)
    except ValidationError as error:
        raise _failed("ADD", not_valid(error).message, "url") from None
    known = _found(call.front.fleet, config.url)
    same = [each for each in known if model is None or _serves(each, model)]
    if same or any(each.configured_model is None for each in known):
        first = (same or known)[0]
        differ = [
            name
            for name, differs in (
                ("model_id", not same),
                ("worker_type", has_role and config.role != first.config.role),
                ("api_key", config.api_key not in (None, first.config.api_key)),
            )
            if differs
        ]
        if differ:
            text = f"Worker {first.config.url} already exists with another {differ[0]}; remove it first"
            raise _failed("ADD", text, differ[0])
        first.ask_anew()
        return first, True
    try:
        return await members.add(call, config, model), False
    except ApiError as error:
        status = 400 if error.status == 409 else error.status
        raise _failed("ADD", error.message, error.param, status=status) from None


def _serves(engine: Engine, model: str) -> bool:
    return model in (engine.configured_model, None if engine.model is None else engine.model.name)


def _failed(what: str, message: str, param: str | None, status: int = 400) -> ApiError:
    return ApiError(status, message, param=param, more={"code": f"{what}_WORKER_FAILED"})
