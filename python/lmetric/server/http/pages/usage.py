"""The page /admin/usage: requests and tokens per day, tenant and model."""

from __future__ import annotations

import csv
import io
from urllib.parse import parse_qs

from aiohttp import web

from lmetric.server.api.errors import bad
from lmetric.server.api.own_pages import ARRAY, Pages, answer, in_query
from lmetric.server.http.pages.call import Call, large_json
from lmetric.server.observe.usage import COLUMNS

PAGES = Pages()
_FORMATS = ("json", "csv")


@PAGES.page("/admin/usage", "admin", "admin").on(
    "GET",
    "Show answered requests and their tokens by day (UTC), tenant and model",
    answer("Usage", ARRAY),
    400,
    401,
    403,
    parameters=(in_query("format", "json or csv", {"enum": list(_FORMATS), "default": "json"}),),
)
async def _usage(call: Call) -> web.Response:
    given = parse_qs(call.query, keep_blank_values=True)
    (shape, *more) = given.pop("format", ["json"])
    if given or more or shape not in _FORMATS:
        raise bad("the query must be empty, format=json or format=csv", "format")
    rows = [[*row[:3], *row.counts] for row in await call.front.usage_rows()]
    if shape == "json":
        return await large_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([COLUMNS, *rows])
    return web.Response(text=text.getvalue(), content_type="text/csv")
