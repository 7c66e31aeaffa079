"""The page at which other routers publish their load."""

from __future__ import annotations

from aiohttp import web

from lmetric.server.api.own_pages import OBJECT, Pages, answer
from lmetric.server.background import replicas
from lmetric.server.http.pages.call import Call, json

PAGES = Pages()


@PAGES.page(replicas.PATH, "replicas", "replica").on(
    "POST",
    "Exchange load between routers; only with `replicas.urls`",
    answer("Accepted", OBJECT),
    *(400, 401, 404, 409, 413),
    body={"type": "string", "format": "binary"},
    media=replicas.CONTENT_TYPE,
)
async def _receive(call: Call) -> web.Response:
    return json(call.front.replicas.receive(await call.body(replicas.MOST_MESSAGE_BYTES)))
