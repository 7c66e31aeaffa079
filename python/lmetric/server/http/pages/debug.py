"""The pages under /debug: state of the router, and explanations of decisions."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from lmetric.server.api.errors import ApiError, bad
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
from lmetric.server.background import replica_state
from lmetric.server.fleet.model import Model
from lmetric.server.http.live import live
from lmetric.server.http.pages import engines
from lmetric.server.http.pages.call import Call, json, large_json
from lmetric.server.worker.repeats import forwarded

_LABEL = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,20})-([0-9a-f]{16})")
# Fields of a tenant's own record with `errors.show_engines: false`.
_WITHOUT_ENGINES = frozenset(
    (
        *("id", "model", "alias", "fallback_from", "fallback_reason", "credential", "request_id"),
        *("trace_id", "at_seconds", "held_seconds", "level", "aged_levels", "priority"),
        *("program", "program_tokens", "prompt_tokens"),
        *("predicted_cached_tokens", "predicted_tier_tokens", "cached_tokens", "output_tokens"),
        *("ttft_seconds", "e2e_seconds", "outcome"),
    )
)

PAGES = Pages()


def _page(path: str, link: str) -> OwnPage:
    return PAGES.page(path, "debug", "admin", link)


_STREAM = answer("State; as events with `Accept: text/event-stream`", OBJECT)
_STREAM["content"]["text/event-stream"] = {"schema": TEXT}
_LIMIT = in_query(
    "limit", "Decisions of each model", {"type": "integer", "minimum": 1, "maximum": 200, "default": 20}
)
_FULL = in_query("full", "1: also the fields without a value, as null", {"enum": [0, 1], "default": 0})


@_page("/debug/engines", "engines: health, mode of the KV index, capabilities, load reports").on(
    "GET",
    "Engines with modes, capabilities and load",
    answer("State", {"type": "array", "items": schema("Engine")}),
    *(401, 403),
)
async def _engines(call: Call) -> web.Response:
    fleet = call.front.fleet
    return await large_json(await engines.shown(fleet, fleet.engines_by_name()))


@_page("/debug/indicators", "the values that policies read, by engine").on(
    "GET", "Indicators of each engine, by model", answer("State", OBJECT), 401, 403
)
async def _indicators_of_all(call: Call) -> web.Response:
    return await indicators_of(call.front.fleet.models)


async def indicators_of(models: Iterable[Model]) -> web.Response:
    """Answers with the indicators of each engine, by model. A thread writes the text."""
    found = [(model.name, (model.router.instances(), model.router.indicators())) for model in models]
    return await asyncio.to_thread(lambda: json({name: _by_engine(*table) for name, table in found}))


@_page("/debug/decisions", "recent decisions; /debug/decisions/ID explains one decision").on(
    "GET", "List the latest decisions", answer("Decisions", ARRAY), 400, 401, 403, parameters=(_LIMIT,)
)
async def _decisions(call: Call) -> web.Response:
    from lmetric.server.http.home import decisions

    return json(await decisions(call.front, call.query))


@_page("/debug/discovery", "service discovery: sources and their engines").on(
    "GET", "State of the discovery sources", answer("State", ARRAY), 401, 403
)
async def _discovery(call: Call) -> web.Response:
    return json(call.front.discovery.state())


@_page("/debug/admission", "admission: waiting requests, predicted waits and counts").on(
    "GET",
    "Admission by load: waiting requests and predicted waits",
    answer("Admission by model; null: off", OBJECT),
    *(401, 403),
)
async def _admission(call: Call) -> web.Response:
    return json({model.name: model.held.snapshot() for model in call.front.fleet.models})


@_page("/debug/programs", "agent programs: counts, and expected tokens in each engine's cache").on(
    "GET", "Agent programs and the working sets of the caches", answer("Programs by model", OBJECT), 401, 403
)
async def _programs(call: Call) -> web.Response:
    return json({model.name: model.programs.snapshot() for model in call.front.fleet.models})


@_page("/debug/replicas", "other routers and their published load").on(
    "GET", "State of the exchange with other routers", answer("State", OBJECT), 401, 403
)
async def _replicas(call: Call) -> web.Response:
    return json(replica_state.state(call.front.replicas, call.front.process))


@PAGES.page("/debug/live", "debug", "viewer", "the data of the live page").on(
    "GET",
    "Rates, engines and requests of the last minutes, or as events each second",
    _STREAM,
    *(401, 403, 404, 503),
)
async def _live(call: Call) -> web.StreamResponse:
    return await live(call.front, call.request, call.path)


@PAGES.page("/debug/decisions/{id}", "debug", "record").on(
    "GET",
    "Explain a decision",
    answer("Decision record", OBJECT),
    *(400, 401, 404),
    parameters=(
        in_path("id", "Value of the header x-lmetric-decision; x-request-id of a refused request"),
        _FULL,
    ),
)
async def _decision(call: Call) -> web.Response:
    worker = call.front.worker
    try:
        return json(_record(call, _full(call.query)))
    except ApiError as error:
        if error.status != 404 or worker is None or call.is_repeated:
            raise
        if (found := await worker.find(call.target, forwarded(call.request.headers))) is None:
            raise
        return json(found)


def _by_engine(engines: Sequence[str], columns: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Returns the indicators of each engine. In JSON, NaN is null."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return {engine: dict(zip(columns, row, strict=True)) for engine, row in zip(engines, rows, strict=True)}


def _full(query: str) -> bool:
    """Returns whether a decision record shows its empty fields, too."""
    if query not in ("", "full=0", "full=1"):
        raise bad("the query must be empty or full=1", "full")
    return query == "full=1"


def _record(call: Call, full: bool) -> dict[str, Any]:
    """Returns a decision record, for an administrator or for the tenant of the request.

    ``full``: with the fields that are null.
    """
    front, label = call.front, call.name
    admin = front.access.is_admin(call.request.headers)
    tenant = "" if admin else front.access.tenant(call.request)
    if (refused := front.running.refusals.record(label, None if admin else tenant)) is not None:
        return refused if full else {name: value for name, value in refused.items() if value is not None}
    parts = _LABEL.fullmatch(label)
    if parts is None:
        raise ApiError(
            404,
            f"no record of {label[:80]!r}; expected the value of the header x-lmetric-decision, or the "
            "x-request-id of a request that the router has recently refused",
        )
    index, number = int(parts[1] or 0), int(parts[2])
    model = next((model for model in front.fleet.models if model.index == index), None)
    if model is not None and number < 2**64:
        own = hmac.compare_digest(model.labels.label(number, tenant), label)
        record = model.router.explain(number) if own or admin else None
        if record is not None:
            from lmetric.timeline import timeline
            from lmetric.why import because

            other = model.hedging.others.get(number)
            notes = model.notes.get(number) or model.notes.get(other or 0, {})
            shown = {"model": model.name, **notes, **record, "id": label}
            if versions := model.request_weights.get(number):
                shown["weights"] = versions
            if other is not None:
                shown["other_attempt"] = model.labels.label(other, tenant)
            tracing = front.running.tracing
            if tracing is not None and (trace := tracing.of_decision(index, number)) is not None:
                shown["trace_id"] = trace
            engine = model.engines.get(record["instance"])
            began = record["at_seconds"]
            # A policy may name other tenants.
            formula = model.formula(record["arm"], began) if admin else None
            shown["because"] = because(shown, formula)
            if events := model.activity.of(number):
                shown["events"] = [
                    {"after_seconds": round(max(event.at - began, 0.0), 6), **event.shown()}
                    for event in events
                ]
            shown["timeline"] = timeline(shown)
            if record["priority"] is not None and engine is not None and model.priority is not None:
                shown["priority_sent"] = model.priority.how(engine)
            if not admin and not front.config.errors.show_engines:
                shown = {name: value for name, value in shown.items() if name in _WITHOUT_ENGINES}
            return shown if full else {name: value for name, value in shown.items() if value is not None}
    # The same answer for unknown records and for records of other tenants.
    raise ApiError(404, f"no record of decision {label}: it is unknown or too old")
