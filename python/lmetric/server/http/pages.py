"""The router's own pages: health, models, metrics, debugging, administration."""

import asyncio
import contextlib
import difflib
import functools
import hmac
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, get_args
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import orjson
import structlog
from aiohttp import web
from pydantic import ValidationError

from lmetric._core import LmetricError
from lmetric.config import (
    ADMIN,
    CONFIGURED,
    POLICY_KNOBS,
    EngineConfig,
    KvEvents,
    PolicyChange,
    Role,
    unix_path,
)
from lmetric.engines.adapter import MOST_NAME_CHARACTERS
from lmetric.server.api import openapi
from lmetric.server.api.errors import ApiError, bad, not_valid
from lmetric.server.api.own_pages import OWN_PAGES, OwnPage
from lmetric.server.api.paths import REALTIME
from lmetric.server.api.request import read_object
from lmetric.server.background import replicas
from lmetric.server.discovery import Found
from lmetric.server.fleet import priority
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.policies import check as check_policy
from lmetric.server.fleet.pool import Pool
from lmetric.server.fleet.summary import summary
from lmetric.server.http import canary
from lmetric.server.http.frontend import DRAINING, Frontend
from lmetric.server.http.home import debug_index, decisions, home
from lmetric.server.http.live import PAGE, live, static
from lmetric.server.http.protocol import upgrade_required, wants_websocket
from lmetric.server.observe.live_view import event_shown
from lmetric.server.upstream.allowed import AllowedEngines
from lmetric.timeline import timeline
from lmetric.why import because

log = structlog.get_logger("lmetric.server")

_DECISIONS = "/debug/decisions/"
_MODELS = "/v1/models/"
_UI = "/ui/"
_ENGINE = "/admin/engines/{name}"
# Paths that the error for an unknown path compares it with.
_COMPARED = [path for path, page in OWN_PAGES.items() if "{" not in path and page.access != "replica"]
LONGEST_COMPARED_PATH = 200
_LABEL = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,20})-([0-9a-f]{16})")
# Size limit of a request body for a page.
PAGE_BODY_BYTES = 1 << 20
ENGINES_IN_TURN = 128  # engines that a page describes in one turn of the event loop, 40 µs each
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2
# Fields of a tenant's own record with `errors.show_engines: false`.
_WITHOUT_ENGINES = frozenset(
    (
        *("id", "model", "request_id", "trace_id", "at_seconds", "held_seconds", "priority", "program"),
        *("program_tokens", "prompt_tokens", "predicted_cached_tokens", "predicted_tier_tokens"),
        *("cached_tokens", "output_tokens", "ttft_seconds", "e2e_seconds", "outcome"),
    )
)


async def pages(front: Frontend, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
    """Answers requests that are not for engines. Raises ApiError.

    ``path``: the spelling of the client, because proxies in front of the router filter by it. The
    body is read after the check of the request's credential.
    """
    if path == replicas.PATH and front.replicas.on:
        _only(request, path, OWN_PAGES[replicas.PATH])
        front.replicas.authorize(request.headers)
        return _json(front.replicas.receive(await front.read_body(request, PAGE_BODY_BYTES)))
    if path.startswith("/admin/"):
        return await _admin(front, request, path, query)
    if path == REALTIME or path.startswith(f"{REALTIME}/"):
        instead = "connect to an engine directly, or send audio to /v1/audio/transcriptions"
        if wants_websocket(request.headers):
            raise upgrade_required(REALTIME, instead)
        raise ApiError(
            501,
            f"{REALTIME} needs WebSocket, which the router does not relay; {instead}",
            code="not_implemented",
            headers={"connection": "close"},
        )
    page = _page(path)
    if page is None or page.access == "replica":
        raise _unknown(front, path, request.method)
    _admit(front, request, path, page)
    match page.path:
        case "/":
            return await home(front, request)
        case "/health":
            for pool in front.fleet.pools:
                _check(pool)
            return web.Response()
        case "/ready":
            return _ready(front, front.access.is_admin(request.headers))
        case "/metrics":
            text, kind = await front.metrics.render(request.headers.get("accept"))
            return web.Response(body=text, headers={"content-type": kind})
        case "/openapi.json":
            return _json(_openapi())
        case "/v1/models":
            return _json(front.fleet.models())
        case "/v1/models/{model}":
            name = unquote(path.removeprefix(_MODELS))
            if name not in front.fleet.names and (found := front.fleet.seek(name)) is not None:
                await found
            front.fleet.find(name)
            return _json(front.fleet.card(name))
        case "/debug":
            return debug_index(request)
        case "/debug/decisions":
            return _json(decisions(front, query))
        case "/debug/decisions/{id}":
            return _json(_record(front, request, path.removeprefix(_DECISIONS), _full(query)))
        case "/debug/engines":
            return await _large_json(await _engines(front.fleet, front.fleet.engines()))
        case "/debug/indicators":
            return _json({pool.name: _indicators(pool) for pool in front.fleet.pools})
        case "/debug/discovery":
            return _json(front.discovery.state())
        case "/debug/admission":
            return _json({pool.name: pool.held.snapshot() for pool in front.fleet.pools})
        case "/debug/programs":
            return _json({pool.name: pool.programs.snapshot() for pool in front.fleet.pools})
        case "/debug/live":
            return await live(front, request, path)
        case "/ui":
            return static(front, request, PAGE)
        case "/ui/{file}":
            return static(front, request, path.removeprefix(_UI))
        case "/debug/replicas":
            return _json(front.replicas.state())
    raise AssertionError(f"{page.path}: no answer")


def _page(path: str) -> OwnPage | None:
    """Returns the page at a path, but not the pages under /admin."""
    if path.startswith(_DECISIONS):
        path = "/debug/decisions/{id}"
    elif path.startswith(_MODELS):
        path = "/v1/models/{model}"
    elif path.startswith(_UI):
        path = "/ui/{file}"
    return OWN_PAGES.get(path)


def _admit(front: Frontend, request: web.BaseRequest, path: str, page: OwnPage) -> None:
    """Checks the credential and the method. Raises ApiError."""
    if page.access == "admin":
        front.access.require_admin(request.headers, path)
    elif page.access == "tenant":
        front.access.tenant(request.headers)
    _only(request, path, page)
    if page.access == "metrics":
        front.access.require_metrics(request.headers, path)


def _ready(front: Frontend, admin: bool) -> web.Response:
    """Answers /ready. Names and addresses of engines are for administrators only."""
    state = summary(front.fleet, names=admin)
    if front.phase < DRAINING and front.fleet.ready():
        return _json({"ready": True, **state})
    reasons = front.fleet.unusable
    why = "no usable engine" if reasons is None else f"no usable engine: {reasons.summary}"
    if front.phase >= DRAINING:
        why = "shutting down"
    more = {"ready": False, **state}
    raise ApiError(503, f"not ready: {why}", code="not_ready", headers={"retry-after": "2"}, more=more)


def _only(request: web.BaseRequest, path: str, page: OwnPage) -> None:
    methods = page.allowed
    if request.method not in methods:
        allowed = ", ".join(methods)
        raise ApiError(
            405, f"{request.method} is not allowed on {path}; use {methods[0]}", headers={"allow": allowed}
        )


def _unknown(front: Frontend, path: str, method: str) -> ApiError:
    paths = sorted(front.paths)
    near = [known for known in paths if known.endswith(path) or path.rstrip("/") == known][-1:]
    if not near and len(path) <= LONGEST_COMPARED_PATH:
        near = difflib.get_close_matches(path, [*paths, *_COMPARED], n=1, cutoff=0.8)
    if path.startswith("/v1/v1/"):
        hint = "; leave out the second /v1"
    elif near:
        hint = f"; did you mean {near[0]}?"
    else:
        hint = (
            "; to relay it to the engines, add it to paths in the configuration" if method == "POST" else ""
        )
    return ApiError(404, f"unknown path {path}{hint}", code="unknown_path")


def _json(value: Any) -> web.Response:
    body = value if isinstance(value, bytes) else orjson.dumps(value, option=_OPTIONS)
    return web.Response(body=body, content_type="application/json")


async def _large_json(value: Any) -> web.Response:
    """As `_json`, in a thread: the value may have an entry for each of 10,000 engines."""
    return await asyncio.to_thread(_json, value)


@functools.cache
def _openapi() -> bytes:
    return orjson.dumps(openapi.document(), option=_OPTIONS)


async def _engines(fleet: Fleet, engines: Iterable[Engine]) -> list[dict[str, Any]]:
    ages: dict[str, float] = {}
    shown: list[dict[str, Any]] = []
    for engine in list(engines):
        if len(shown) % ENGINES_IN_TURN == ENGINES_IN_TURN - 1:
            await asyncio.sleep(0)
        pool, capabilities = fleet.pool_of(engine), engine.capabilities
        if pool is not None and engine.name not in ages:
            column = pool.router.indicators(names=["report_age_seconds"])["report_age_seconds"]
            ages |= dict(zip(pool.router.instances(), column.tolist(), strict=True))
        age = ages.get(engine.name, math.nan)
        shown.append(
            {
                "name": engine.name,
                "url": engine.config.url,
                "model": pool.name if pool else None,
                "source": engine.source,
                "role": engine.role,
                "group": engine.config.group_label,
                "unfit": engine.unfit,
                "healthy": engine.healthy,
                "service": engine.service.shown(time.monotonic()),
                "ready": engine.ready,
                "draining": engine.draining or engine.switches > 0,
                "leaving": engine.leaving,
                "running": engine.running,
                "warming": pool is not None and pool.changes is not None and pool.changes.warms(engine.name),
                "sends_prefixes": engine.sends_prefixes,
                "last_error": engine.last_error,
                "mode": engine.mode.name,
                "mode_reason": engine.mode.reason,
                "capabilities": {**asdict(capabilities), "full_report": capabilities.full_report is not None},
                "load": {
                    "reports": engine.load_reports,
                    "age_seconds": age if math.isfinite(age) else None,
                    "error": engine.load_error,
                    "missing_metrics": engine.missing_metrics,
                },
                "kv_events": pool.kv.status(engine.name) if pool else None,
                "tiers": pool.router.tiers(engine.name) if pool else None,
                "refilling": engine.refill is not None,
                "priority": priority.how(engine) if pool and pool.settings.priority is not None else None,
                "tokenizer": _tokenizer(pool, engine) if pool else None,
            }
        )
    return shown


def _tokenizer(pool: Pool, engine: Engine) -> dict[str, Any]:
    known = pool.tokenizer
    return {
        "folder": str(known.folder) if known is not None else None,
        "note": pool.tokenizer_note,
        "compared": known is not None and engine.compared is known,
        "differs": engine.tokens_differ,
    }


def _indicators(pool: Pool) -> dict[str, dict[str, float | None]]:
    columns = pool.router.indicators()
    return {
        instance: {
            name: float(column[i]) if np.isfinite(column[i]) else None for name, column in columns.items()
        }
        for i, instance in enumerate(pool.router.instances())
    }


def _full(query: str) -> bool:
    """Returns whether a decision record shows its empty fields, too."""
    if query not in ("", "full=0", "full=1"):
        raise bad("the query must be empty or full=1", "full")
    return query == "full=1"


def _record(front: Frontend, request: web.BaseRequest, label: str, full: bool) -> dict[str, Any]:
    """Returns a decision record, for an administrator or for the tenant of the request.

    ``full``: with the fields that are null.
    """
    admin = front.access.is_admin(request.headers)
    tenant = "" if admin else front.access.tenant(request.headers)
    parts = _LABEL.fullmatch(label)
    if parts is None:
        raise bad(f"{label!r} is not a decision id; expected the value of the header x-lmetric-decision")
    index, number = int(parts[1] or 0), int(parts[2])
    pool = next((pool for pool in front.fleet.pools if pool.index == index), None)
    if pool is not None and number < 2**64:
        own = hmac.compare_digest(pool.labels.label(number, tenant), label)
        record = pool.router.explain(number) if own or admin else None
        if record is not None:
            shown = {"model": pool.name, **record, "id": label}
            if (other := pool.hedging.other(number)) is not None:
                shown["other_attempt"] = pool.labels.label(other, tenant)
            tracing = front.tracing
            if tracing is not None and (trace := tracing.of_decision(index, number)) is not None:
                shown["trace_id"] = trace
            engine = pool.engines.get(record["instance"])
            shown["because"] = because(record, pool.policies.formula)
            if events := pool.activity.of(number):
                shown["events"] = [event_shown(event, record["at_seconds"]) for event in events]
            shown["timeline"] = timeline(shown)
            if record["priority"] is not None and engine is not None:
                shown["priority_sent"] = priority.how(engine)
            if not admin and not front.config.errors.show_engines:
                shown = {name: value for name, value in shown.items() if name in _WITHOUT_ENGINES}
            return shown if full else {name: value for name, value in shown.items() if value is not None}
    # The same answer for unknown records and for records of other tenants.
    raise ApiError(404, f"no record of decision {label}: it is unknown or too old")


async def _admin(front: Frontend, request: web.BaseRequest, path: str, query: str) -> web.Response:
    front.access.require_admin(request.headers, path)
    if not front.config.admin.enabled:
        raise ApiError(403, "administration is off; set admin.enabled: true")
    if path == "/admin/engines":
        _only(request, path, OWN_PAGES[path])
        if request.method == "GET":
            return await _large_json(await _engines(front.fleet, front.fleet.engines()))
        return _json(await _add(front, request))
    if path == "/admin/guard":
        _only(request, path, OWN_PAGES[path])
        body = await _object(front, request, {"on"})
        if not isinstance(body.get("on"), bool):
            raise bad("on must be true or false", "on")
        for pool in front.fleet.pools:
            pool.router.configure(guard=body["on"])
        return _json({"guard": body["on"]})
    if path == "/admin/reload":
        _only(request, path, OWN_PAGES[path])
        return _json(await _reload(front))
    if path == "/admin/policy":
        _only(request, path, OWN_PAGES[path])
        pools = front.fleet.pools if request.method == "GET" else await _set_policy(front, request)
        return _json([_policy(pool) for pool in pools])
    if path.startswith(canary.PATH):
        return await canary.answer(front, request, path)
    name, verb = path.removeprefix("/admin/engines/"), ""
    if front.fleet.engine(unquote(name)) is None:  # a name may contain slashes
        name, _, verb = name.rpartition("/") if "/" in name else (name, "", "")
    name = unquote(name)
    engine = front.fleet.engine(name)
    if engine is None:
        raise ApiError(404, f"no engine {name!r}; /debug/engines lists them")
    if not verb:
        _only(request, path, OWN_PAGES[_ENGINE])
        await _remove(front, engine, query)
        removed = front.fleet.engine(name) is not engine
        return _json({**(await _engines(front.fleet, [engine]))[0], "removed": removed})
    page = OWN_PAGES.get(f"{_ENGINE}/{verb}")
    if page is None:
        raise _unknown(front, path, request.method)
    _only(request, path, page)
    if verb == "role":
        await _switch(front.fleet, engine, await _object(front, request, {"role", "drain"}))
        return _json(*await _engines(front.fleet, [engine]))
    if verb == "indicators":
        return _json(await _push(front, engine, request))
    engine.draining = verb == "drain"
    engine.hold()
    return _json(*await _engines(front.fleet, [engine]))


async def _reload(front: Frontend) -> dict[str, Any]:
    """Applies the configuration as it is now. Returns the changes."""
    if front.reread is None:
        raise ApiError(409, "the router was started without a configuration to read again", code="no_reload")
    try:
        return await front.reread()
    except LmetricError as error:
        raise ApiError(400, str(error), code="bad_configuration") from None


async def _push(front: Frontend, engine: Engine, request: web.BaseRequest) -> dict[str, Any]:
    """Applies pushed values, by indicator. null: the value is no longer known."""
    pool = front.fleet.pool_of(engine)
    if pool is None:
        raise ApiError(409, f"{engine.name}: its model is not known yet; retry later", code="no_model")
    values = read_object(await front.read_body(request, PAGE_BODY_BYTES))
    try:
        pool.indicators.check_push(values)
        pool.router.report_load(engine.name, extra=values)
    except (ValueError, LmetricError) as error:
        raise bad(str(error)) from None
    return {"engine": engine.name, "indicators": values}


def _policy(pool: Pool) -> dict[str, Any]:
    stats, settings = pool.router.stats(instances=False), pool.policies.settings
    return {
        "model": pool.name,
        **{name: getattr(settings, name) for pair in POLICY_KNOBS.items() for name in pair},
        "guard": bool(stats["guard_on"]),
        "guard_reason": pool.router.guard_reason,
        "fallbacks": pool.router.policy_fallbacks(),
    }


async def _set_policy(front: Frontend, request: web.BaseRequest) -> list[Pool]:
    """Replaces policies while requests are in flight. New code must come from the configuration."""
    body = await _object(front, request, {*PolicyChange.model_fields, "model"})
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
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
    try:
        for pool in front.fleet.pools if model is None else [front.fleet.find(model).pool]:
            settings = pool.policies.settings.model_copy(update=changes)
            for policy, knobs in given.items():
                check_policy(settings, getattr(settings, policy), getattr(settings, knobs))
        return front.fleet.replace_policies(changes, model)
    except LmetricError as error:
        raise ApiError(400, str(error), param="policy", code="bad_policy") from None


async def _switch(fleet: Fleet, engine: Engine, body: dict[str, Any]) -> None:
    """Changes an engine's role once it is idle, or after ``drain`` seconds (default: 0)."""
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
        pool = fleet.pool_of(engine)
        if pool is not None:
            pool.set_role(engine)
            if engine.unfit is not None:
                unfit, engine.role_set = engine.unfit, None
                pool.set_role(engine)
                raise ApiError(409, f"{engine.name}: {unfit}", param="role", code="unfit")
    finally:
        engine.switches -= 1
        engine.hold()


async def _remove(front: Frontend, engine: Engine, query: str) -> None:
    """Removes an engine. With ``drain=SECONDS``: once it is idle, or after that time."""
    given = parse_qs(query, keep_blank_values=True)
    try:
        (text,) = given.pop("drain", ["0"])
        seconds = float(text)
        if given or not 0 <= seconds <= 86_400:
            raise ValueError
    except ValueError:
        raise bad("the query must be empty or drain=SECONDS (0 to 86400)", "drain") from None
    members = front.discovery.members
    if engine.source not in (CONFIGURED, ADMIN):
        raise ApiError(
            409,
            f"{engine.source} lists {engine.name} and would add it again: remove it there, or drain it",
            code="discovered",
        )
    await members.change(engine.source, partial(_without, engine.name), seconds)
    await members.settled(engine)


async def _add(front: Frontend, request: web.BaseRequest) -> dict[str, Any]:
    body = await _object(front, request, {"model", *EngineConfig.model_fields})
    model = body.pop("model", None)
    if model is not None and (not isinstance(model, str) or not 0 < len(model) <= MOST_NAME_CHARACTERS):
        raise bad(f"model must be a name, a string of 1 to {MOST_NAME_CHARACTERS} characters", "model")
    if body.get("tls") is not None:
        raise bad("files of TLS come from the configuration: set engine_tls there", "tls")
    try:
        config = EngineConfig.model_validate(body)
    except ValidationError as error:
        raise not_valid(error) from None
    await _check_addresses(front, config)
    fleet, members = front.fleet, front.discovery.members
    added = Found(config, model)
    known = [Found(other.config, other.model) for other in fleet.engines() if not other.leaving]

    def with_added(listed: Sequence[Found]) -> Sequence[Found]:
        for other in (*known, *listed):
            if other.config.label == config.label or added.is_also(other):
                raise ApiError(409, f"engine {other.config.label!r} at {other.config.url} already exists")
        return [*listed, added]

    await members.change(ADMIN, with_added)
    engine = fleet.engine(config.label)
    if engine is None:
        await members.change(ADMIN, partial(_without, config.label))
        raise bad(f"the engine cannot be added for model {model!r}; see the log for the reason")
    return (await _engines(front.fleet, [engine]))[0]


def _without(name: str, listed: Sequence[Found]) -> Sequence[Found]:
    return [each for each in listed if each.config.label != name]


def _check(pool: Pool) -> None:
    """Raises ApiError if the pool's core router is broken, which only a restart repairs."""
    try:
        pool.router.in_flight()
    except LmetricError as error:
        raise ApiError(500, f"model {pool.name}: {error}", code="router_broken") from None


async def _check_addresses(front: Frontend, config: EngineConfig) -> None:
    """Raises ApiError (400, 403) unless the router may connect to all addresses of an engine."""
    if unix_path(config.url) is not None:
        raise ApiError(403, "/admin adds no engines at unix sockets", param="url", code="engine_not_allowed")
    urls = [config.url]
    if isinstance(config.kv_events, KvEvents):
        given = config.kv_events
        endpoints = [each for each in (given.endpoint, given.replay_endpoint) if each is not None]
        if given.bind or any(each.startswith("ipc:") for each in endpoints):
            raise ApiError(
                403,
                "/admin adds no engines with kv_events.bind or KV events at unix sockets: they would let an "
                "administrator replace files; set them in the configuration",
                param="kv_events",
                code="engine_not_allowed",
            )
        urls += endpoints
    allowed = AllowedEngines(front.config.admin.allowed_engines)
    for host in {urlsplit(url).hostname for url in urls}:
        if host and host != "*":  # none: the engine's own host; *: all addresses of this machine
            await allowed.check(host)


async def _object(front: Frontend, request: web.BaseRequest, known: set[str]) -> dict[str, Any]:
    body = read_object(await front.read_body(request, PAGE_BODY_BYTES))
    for name in body:
        if name not in known:
            raise bad(f"unknown field {name!r}; known: {', '.join(sorted(known))}", name)
    return body
