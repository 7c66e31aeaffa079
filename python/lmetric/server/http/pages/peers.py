"""The pages at which other routers publish their load, and read this router's API keys."""

from __future__ import annotations

from urllib.parse import parse_qs

from aiohttp import web

from lmetric.server.api.errors import bad
from lmetric.server.api.own_pages import OBJECT, TEXT, Pages, answer, in_query
from lmetric.server.api.replica_pages import CONTENT_TYPE, KEYS_PATH, MOST_MESSAGE_BYTES, PATH, STORED_PATH
from lmetric.server.http.pages.call import Call, json

PAGES = Pages()


@PAGES.page(PATH, "replicas", "replica").on(
    "POST",
    "Exchange load between routers; only with `replicas.urls`",
    answer("Accepted", OBJECT),
    *(400, 401, 404, 409, 413),
    body={"type": "string", "format": "binary"},
    media=CONTENT_TYPE,
)
async def _receive(call: Call) -> web.Response:
    replicas = call.front.replicas
    assert replicas is not None  # else the page does not exist
    return json(await replicas.receive(await call.body(MOST_MESSAGE_BYTES)))


@PAGES.page(KEYS_PATH, "replicas", "replica").on(
    "GET",
    "Records of issued API keys for another router, with hashes of the keys; only with `replicas.urls`",
    answer("Records", OBJECT),
    *(400, 401, 404),
    parameters=(
        in_query("after", "Version of the records that the other router has received", {"type": "integer"}),
        in_query("copied", "Version of the records that it has stored", {"type": "integer"}),
        in_query("router", "ID of the other router", TEXT),
    ),
)
async def _keys(call: Call) -> web.Response:
    try:
        given = parse_qs(call.query, max_num_fields=3)
        (after,), (copied,), (router,) = (given.pop(name) for name in ("after", "copied", "router"))
        if given:
            raise ValueError
        versions = int(after), int(copied)
    except (KeyError, ValueError):
        raise bad("the query must be after=VERSION&copied=VERSION&router=ID", "after") from None
    return json(await call.front.keys_page(router, *versions))


@PAGES.page(STORED_PATH, "replicas", "replica").on(
    "GET",
    "The engine of a stored response, for another router; only with `replicas.urls`",
    answer("Model and engine; an empty object: the response is unknown", OBJECT),
    *(400, 401, 404),
    parameters=(
        in_query("tenant", "Tenant that made the response", TEXT),
        in_query("id", "ID of the response", TEXT),
    ),
)
async def _stored(call: Call) -> web.Response:
    try:
        given = parse_qs(call.query, keep_blank_values=True, errors="surrogateescape", max_num_fields=2)
        (tenant,), (response_id,) = (given.pop(name) for name in ("tenant", "id"))
        if given:
            raise ValueError
    except (KeyError, ValueError):
        raise bad("the query must be tenant=NAME&id=ID", "id") from None
    holder = call.front.stored.known(tenant, response_id)
    return json({} if holder is None else holder._asdict())
