"""The pages about the process: health, metrics, models, the live page, and this list of pages."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Iterable
from importlib import import_module

from aiohttp import web

from lmetric._core import LmetricError
from lmetric.server.api.errors import ApiError
from lmetric.server.api.own_pages import ADMIN, KEY, OBJECT, TEXT, OwnPage, Pages, answer, in_path, schema
from lmetric.server.api.paths import decoded
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.summary import summary
from lmetric.server.http.pages.call import Call, dumps, json
from lmetric.server.http.running import DRAINING

PAGES = Pages()

_INDEX = answer("For browsers as HTML", OBJECT)
_INDEX["content"]["text/html"] = {"schema": TEXT}
_FAMILIES = "lmetric.server.observe.families"  # loaded by the first call of /metrics
_SCRIPT = answer("File", TEXT, "text/javascript")
_SCRIPT["content"]["text/css"] = {"schema": TEXT}


@PAGES.page("/", "health", "open", more=(KEY, ADMIN)).on(
    "GET", "State of the fleet, API paths and pages", _INDEX
)
async def _home(call: Call) -> web.Response:
    from lmetric.server.http.home import home

    return await home(call.front, call.request, [page for page in PAGES.values() if page.link])


@PAGES.page("/health", "health", "open", "200 while the process works").on(
    "GET", "Whether the process works", answer("It works"), 500
)
async def _health(call: Call) -> web.Response:
    for model in call.front.fleet.models:
        _check(model)
    return web.Response()


@PAGES.page("/ready", "health", "open", "200 while an engine accepts requests", more=(ADMIN,)).on(
    "GET",
    "Whether an engine can accept requests; engines by mode, and warnings with their fixes",
    answer("Ready", schema("Ready")),
    503,
)
async def _ready(call: Call) -> web.Response:
    """Names and addresses of engines are for administrators only."""
    front = call.front
    state = summary(front.fleet, names=front.access.is_admin(call.request.headers))
    if front.running.phase < DRAINING and front.fleet.ready():
        return json({"ready": True, **state})
    reasons = front.fleet.unusable
    why = "no usable engine" if reasons is None else f"no usable engine: {reasons.summary}"
    if front.running.phase >= DRAINING:
        why = "shutting down"
    more = {"ready": False, **state}
    raise ApiError(503, f"not ready: {why}", code="not_ready", headers={"retry-after": "2"}, more=more)


@PAGES.page("/metrics", "health", "metrics", "metrics for Prometheus").on(
    "GET", "Metrics in Prometheus' text format", answer("Metrics", TEXT, "text/plain"), 401, 403
)
async def _metrics(call: Call) -> web.Response:
    if _FAMILIES not in sys.modules:
        await asyncio.to_thread(import_module, _FAMILIES)  # takes 5 ms
    from lmetric.server.observe import exposition, families

    front, openmetrics = call.front, exposition.wants_openmetrics(call.request.headers.get("accept"))
    if front.worker is not None:
        text = (await front.worker.metrics(openmetrics)).encode()
    else:
        text = await exposition.render(families.families(front.metrics), openmetrics)
    kind = exposition.OPENMETRICS if openmetrics else exposition.TEXT
    return web.Response(body=text, headers={"content-type": kind})


@PAGES.page("/ui", "health", "open", "live page: engines, rates and requests").on(
    "GET", "Live page; its data is at /debug/live", answer("Page", TEXT, "text/html"), 404
)
async def _ui(call: Call) -> web.Response:
    from lmetric.server.http.live import PAGE, static

    return static(call.front, call.request, PAGE)


@PAGES.page("/ui/{file}", "health", "open").on(
    "GET",
    "Scripts and styles of the live page",
    _SCRIPT,
    404,
    parameters=(in_path("file", "Name of the file, such as page.js"),),
)
async def _file(call: Call) -> web.Response:
    from lmetric.server.http.live import static

    return static(call.front, call.request, call.name)


@PAGES.page("/v1/models", "models", "tenant", "served models").on(
    "GET", "List the served models", answer("Models", schema("Models")), 401
)
async def _models(call: Call) -> web.Response:
    front = call.front
    return json(front.fleet.catalog.page(front.access.caller(call.request)))


@PAGES.page("/v1/models/{model}", "models", "tenant").on(
    "GET",
    "Show a model",
    answer("Model", schema("Model")),
    *(401, 404),
    parameters=(in_path("model", "Name of the model or of an adapter"),),
)
async def _model(call: Call) -> web.Response:
    fleet, name = call.front.fleet, decoded(call.name)
    catalog, caller = fleet.catalog, call.front.access.caller(call.request)
    if not catalog.allows(caller, name):
        raise catalog.unknown(name, caller)
    if not catalog.serves(name, caller) and (found := fleet.seek(name)) is not None:
        await found
    if not catalog.serves(name, caller):
        raise catalog.unknown(name, caller)
    return json(catalog.card(name, caller))


@PAGES.page("/openapi.json", "health", "open", "OpenAPI document of all paths").on(
    "GET", "This document", answer("OpenAPI document", OBJECT)
)
async def _openapi(call: Call) -> web.Response:
    return json(await asyncio.to_thread(_document, call.every_page))


@PAGES.page("/debug", "debug", "admin", "engines, indicators and decisions").on(
    "GET", "List the debug pages", _INDEX, 401, 403
)
async def _debug_index(call: Call) -> web.Response:
    from lmetric.server.http.home import debug_index
    from lmetric.server.http.pages import debug

    links = {path: page.link for path, page in debug.PAGES.items() if page.link}
    return debug_index(call.request, links)


@functools.cache
def _document(pages: Callable[[], Iterable[OwnPage]]) -> bytes:
    """Describes the pages, in a thread: most routers never load the descriptions."""
    from lmetric.server.api.openapi import document

    return dumps(document(pages()))


def _check(model: Model) -> None:
    """Raises ApiError if the model's core router is broken, which only a restart repairs."""
    try:
        model.router.in_flight()
    except LmetricError as error:
        raise ApiError(500, f"model {model.name}: {error}", code="router_broken") from None
