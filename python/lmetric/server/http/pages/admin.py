"""The pages under /admin: engines, the guard, the configuration and policies."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args
from urllib.parse import unquote

from aiohttp import web
from pydantic import ValidationError

from lmetric._core import LmetricError
from lmetric.config import POLICY_KNOBS, EngineConfig, PolicyChange, Role
from lmetric.engines.adapter import MOST_NAME_CHARACTERS
from lmetric.server.api.errors import ApiError, bad, not_valid
from lmetric.server.api.own_pages import (
    ARRAY,
    OBJECT,
    TEXT,
    OwnPage,
    Pages,
    answer,
    in_path,
    in_query,
    schema,
)
from lmetric.server.api.request import read_object
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.policies import check as check_policy
from lmetric.server.fleet.replacement import replace_policies
from lmetric.server.fleet.turns import in_turns
from lmetric.server.http.pages import engines, members
from lmetric.server.http.pages.call import Call, json, large_json, only_value, unknown
from lmetric.server.worker.repeats import DRAINING, INDICATORS, POLICY, ROLE, WEIGHTS

PAGES = Pages()
CHANGE = (400, 401, 403, 404)
_NAMED = "/admin/engines/{name}"
# Engines whose blocks leave the KV index in one turn of the event loop. With 65,536 blocks each,
# they take some 20 ms.
EMPTIED_PER_TURN = 2
_VERSION = re.compile("[!-~]{1,200}")
RELOAD = "/admin/reload"


def _page(path: str) -> OwnPage:
    return PAGES.page(path, "admin", "admin")


_ENGINE = answer("Done", schema("Engine"))
_LISTED = {"type": "array", "items": schema("Engine")}
_NAME = in_path("name", "Name of the engine; %2F for a slash")
_SECONDS = {"type": "number", "minimum": 0, "maximum": 86400, "default": 0}
_ENGINES = _page("/admin/engines")


def at(call: Call) -> tuple[OwnPage, str]:
    """The page under /admin/engines at a path, and the name of its engine. Raises ApiError."""
    start, fleet = "/admin/engines/", call.front.fleet
    if not call.path.startswith(start):
        raise unknown(call)
    name, verb = call.path.removeprefix(start), ""
    if fleet.engine(unquote(name)) is None:  # a name may contain slashes
        name, _, verb = name.rpartition("/") if "/" in name else (name, "", "")
    if fleet.engine(unquote(name)) is None:
        raise ApiError(404, f"no engine {unquote(name)!r}; /debug/engines lists them")
    page = PAGES.get(f"{_NAMED}/{verb}" if verb else _NAMED)
    if page is None:
        raise unknown(call)
    return page, name


def named(call: Call) -> Engine:
    """The engine that the path names."""
    engine = call.front.fleet.engine(unquote(call.name))
    assert engine is not None
    return engine


@_ENGINES.on("GET", "List the engines", answer("Engines", _LISTED), 401, 403)
async def _list(call: Call) -> web.Response:
    fleet = call.front.fleet
    return await large_json(await engines.shown(fleet, fleet.engines()))


@_ENGINES.on(
    "POST",
    "Add an engine",
    _ENGINE,
    *(*CHANGE, 409),
    body={"allOf": [schema("EngineConfig"), {"type": "object", "properties": {"model": TEXT}}]},
)
async def _add(call: Call) -> web.Response:
    front = call.front
    body = await call.fields({"model", *EngineConfig.model_fields})
    model = body.pop("model", None)
    if model is not None and (not isinstance(model, str) or not 0 < len(model) <= MOST_NAME_CHARACTERS):
        raise bad(f"model must be a name, a string of 1 to {MOST_NAME_CHARACTERS} characters", "model")
    if body.get("tls") is not None:
        raise bad("files of TLS come from the configuration: set engine_tls there", "tls")
    try:
        config = EngineConfig.model_validate(body)
    except ValidationError as error:
        raise not_valid(error) from None
    engine = await members.add(call, config, model)
    return json((await engines.shown(front.fleet, [engine]))[0])


@_page("/admin/engines/{name}").on(
    "DELETE",
    "Remove an engine",
    _ENGINE,
    *(*CHANGE, 409),
    parameters=(_NAME, in_query("drain", "Most seconds to wait until the engine is idle", _SECONDS)),
)
async def _remove(call: Call) -> web.Response:
    """Removes an engine. With ``drain=SECONDS``: once it is idle, or after that time."""
    front, engine = call.front, named(call)
    try:
        seconds = float(only_value(call.query, "drain", "0"))
        if not 0 <= seconds <= 86_400:
            raise ValueError
    except ValueError:
        raise bad("the query must be empty or drain=SECONDS (0 to 86400)", "drain") from None
    removed = await members.remove(call, engine, seconds)
    return json({**(await engines.shown(front.fleet, [engine]))[0], "removed": removed})


@_page("/admin/engines/{name}/drain").on("POST", "Drain an engine", _ENGINE, *CHANGE, parameters=(_NAME,))
async def _drain(call: Call) -> web.Response:
    return await _hold(call, named(call), True)


@_page("/admin/engines/{name}/undrain").on("POST", "Undrain an engine", _ENGINE, *CHANGE, parameters=(_NAME,))
async def _undrain(call: Call) -> web.Response:
    return await _hold(call, named(call), False)


async def _hold(call: Call, engine: Engine, draining: bool) -> web.Response:
    if engine.draining and not draining:
        # A drained engine restarts faster than health checks see: its settings may differ now.
        engine.ask_anew()
    engine.draining = draining
    engine.hold()
    call.kept = engine.name, DRAINING
    if not (draining or engine.healthy) and (check := call.front.fleet.check(engine)) is not None:
        await check  # it may have been paused or asleep, and may not be any more
    return json(*await engines.shown(call.front.fleet, [engine]))


@_page("/admin/engines/{name}/role").on(
    "POST",
    "Change an engine's role",
    _ENGINE,
    *(*CHANGE, 409),
    body={
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": list(get_args(Role))}, "drain": _SECONDS},
    },
    parameters=(_NAME,),
)
async def _switch(call: Call) -> web.Response:
    """Changes an engine's role once it is idle, or after ``drain`` seconds (default: 0)."""
    fleet, engine = call.front.fleet, named(call)
    body = await call.fields({"role", "drain"})
    role, seconds = body.get("role"), body.get("drain", 0)
    if role not in get_args(Role):
        raise bad(f"role must be one of {', '.join(get_args(Role))}", "role")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 86_400:
        raise bad("drain must be a number of seconds from 0 to 86400", "drain")
    # Administrators also drain engines, and switches may overlap: each undoes only its own hold.
    engine.switches += 1
    engine.hold()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while engine.running:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.05)
        engine.role_set = role
        model = fleet.model_of(engine)
        if model is not None:
            model.set_role(engine)
            if engine.unfit is not None:
                unfit, engine.role_set = engine.unfit, None
                model.set_role(engine)
                raise ApiError(409, f"{engine.name}: {unfit}", param="role", code="unfit")
    finally:
        engine.switches -= 1
        engine.hold()
    call.kept = engine.name, ROLE
    return json(*await engines.shown(fleet, [engine]))


@_page("/admin/engines/{name}/indicators").on(
    "POST",
    "Push values of declared indicators; null withdraws one",
    answer("Done", OBJECT),
    *(*CHANGE, 409),
    body={"type": "object", "additionalProperties": {"type": ["number", "null"]}},
    parameters=(_NAME,),
)
async def _push(call: Call) -> web.Response:
    """Applies pushed values, by indicator. null: the value is no longer known."""
    engine = named(call)
    model = call.front.fleet.model_of(engine)
    if model is None:
        raise ApiError(409, f"{engine.name}: its model is not known yet; retry later", code="no_model")
    values = read_object(await call.body())
    try:
        model.indicators.check_push(values)
        model.router.report_load(engine.name, extra=values)
    except (ValueError, LmetricError) as error:
        raise bad(str(error)) from None
    engine.pushed |= values
    call.kept = engine.name, INDICATORS, *sorted(values)
    return json({"engine": engine.name, "indicators": values})


@_page("/admin/guard").on(
    "POST",
    "Turn the hot-spot guard on or off",
    answer("Done", OBJECT),
    *CHANGE,
    body={"type": "object", "required": ["on"], "properties": {"on": {"type": "boolean"}}},
)
async def _guard(call: Call) -> web.Response:
    on = (await call.fields({"on"})).get("on")
    if not isinstance(on, bool):
        raise bad("on must be true or false", "on")
    for model in call.front.fleet.models:
        model.router.configure(guard=on)
    call.kept = "", "guard"
    return json({"guard": on})


@_page(RELOAD).on(
    "POST", "Read the configuration again, like SIGHUP", answer("Changes", OBJECT), *CHANGE, 409
)
async def _reload(call: Call) -> web.Response:
    """Applies the configuration as it is now. Answers with the changes."""
    front = call.front
    if front.reread is None:
        raise ApiError(409, "the router was started without a configuration to read again", code="no_reload")
    try:
        return json(await front.reread())
    except LmetricError as error:
        raise ApiError(400, str(error), code="bad_configuration") from None


@_page("/admin/weights").on(
    "POST",
    "Announce new weights of engines: what the old ones cached leaves the KV index",
    answer("Engines", _LISTED),
    *(*CHANGE, 409),
    body={
        "type": "object",
        "required": ["version"],
        "properties": {
            "version": {"type": ["string", "integer"], "description": "1 to 200 visible ASCII characters"},
            "engines": {"type": "array", "items": TEXT, "description": "Names; default: all engines"},
            "cache_kept": {
                "type": "boolean",
                "default": False,
                "description": "Whether the engines still use what the old weights cached",
            },
        },
    },
)
async def _weights(call: Call) -> web.Response:
    """Sets the version of engines' weights, of all or none of the named ones, if all are awake."""
    fleet, body = call.front.fleet, await call.fields({"version", "engines", "cache_kept"})
    version, names, kept = body.get("version"), body.get("engines"), body.get("cache_kept", False)
    if isinstance(version, int) and not isinstance(version, bool):
        version = str(version)
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise bad("version must be an integer, or a string of 1 to 200 visible ASCII characters", "version")
    if names is not None and (
        not isinstance(names, list) or not all(isinstance(each, str) for each in names)
    ):
        raise bad("engines must be a list of names", "engines")
    if not isinstance(kept, bool):
        raise bad("cache_kept must be true or false", "cache_kept")
    chosen = list(fleet.engines()) if names is None else _chosen(fleet, names)
    for _ in range(2):  # engines may have woken up since their last check; one may be in progress
        checks = [fleet.check(engine) for engine in chosen if engine.asleep]
        await asyncio.gather(*(check for check in checks if check is not None))
    if asleep := [engine.name for engine in chosen if engine.asleep]:
        reason = f"{asleep[0]} is asleep; announce its weights after /wake_up"
        raise ApiError(409, reason, param="engines", code="engine_asleep")
    await _begin(chosen, version, cache_kept=kept)
    if names != []:
        call.kept = *WEIGHTS, *(names or ())
    return await large_json(await engines.shown(fleet, chosen))


async def _begin(engines: Iterable[Engine], version: str, *, cache_kept: bool) -> None:
    """Sets the version of engines' weights.

    ``cache_kept``: what they have cached still counts. Else it leaves the KV index.
    """
    of_models: dict[str, list[Engine]] = {}
    for engine in engines:
        engine.weights = version
        if engine.model is not None:
            of_models.setdefault(engine.model.name, []).append(engine)
    if not cache_kept:
        await in_turns(_empty(of_models.values()), 1)


def _empty(of_models: Iterable[Sequence[Engine]]) -> Iterator[None]:
    """Takes what engines have cached out of the KV index, of a few engines at each step."""
    for of_model in of_models:
        for at in range(0, len(of_model), EMPTIED_PER_TURN):
            some = [each for each in of_model[at : at + EMPTIED_PER_TURN] if each.model is not None]
            if some and (model := some[0].model) is not None:
                model.begin_empty(some)
            yield


def _chosen(fleet: Fleet, names: Sequence[str]) -> list[Engine]:
    """Returns the engines with these names. Raises ApiError (404)."""
    if unknown := [each for each in names if fleet.engine(each) is None]:
        raise ApiError(404, f"no engine {unknown[0][:200]!r}; /debug/engines lists them", param="engines")
    wanted = frozenset(names)
    return [engine for engine in fleet.engines() if engine.name in wanted]


_POLICY = _page("/admin/policy")


@_POLICY.on("GET", "Show the policies", answer("Policies", ARRAY), 401, 403)
async def _policies(call: Call) -> web.Response:
    return json([_policy(model) for model in call.front.fleet.models])


@_POLICY.on(
    "PUT",
    "Replace policies",
    answer("Done", ARRAY),
    *CHANGE,
    body={
        "allOf": [
            schema("PolicyChange"),
            {"properties": {"model": {"type": "string", "description": "Default: all models"}}},
        ]
    },
)
async def _set_policy(call: Call) -> web.Response:
    """Replaces policies while requests are in flight. New code must come from the configuration."""
    fleet = call.front.fleet
    body = await call.fields({*PolicyChange.model_fields, "model"})
    model_name = body.pop("model", None)
    if model_name is not None and not isinstance(model_name, str):
        raise bad("model must be a name, a string", "model")
    if not POLICY_KNOBS.keys() & body.keys():
        raise bad("set policy, decode_policy or both", "policy")
    try:
        changes = PolicyChange(**body).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise not_valid(error) from None
    given = {policy: knobs for policy, knobs in POLICY_KNOBS.items() if policy in changes}
    for knobs in given.values():
        changes.setdefault(knobs, {})
    call.kept = *POLICY, model_name or "", *sorted(changes)
    try:
        for model in fleet.models if model_name is None else [fleet.catalog.find(model_name).model]:
            settings = model.policies.settings.model_copy(update=changes)
            for policy, knobs in given.items():
                check_policy(settings, getattr(settings, policy), getattr(settings, knobs))
        return json([_policy(model) for model in await replace_policies(fleet, changes, model_name)])
    except LmetricError as error:
        raise ApiError(400, str(error), param="policy", code="bad_policy") from None


def _policy(model: Model) -> dict[str, Any]:
    stats, settings = model.router.stats(instances=False), model.policies.settings
    return {
        "model": model.name,
        **{name: getattr(settings, name) for pair in POLICY_KNOBS.items() for name in pair},
        "guard": bool(stats["guard_on"]),
        "guard_reason": model.router.guard_reason,
        "fallbacks": model.router.policy_fallbacks(),
    }
