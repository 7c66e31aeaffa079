"""The page /admin/usage: requests and tokens per day, tenant, API key and model.

Each row names its router: other routers have usage of their own, and the sum is that of all.
"""

from __future__ import annotations

import asyncio
import csv
import io
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from lmetric.extras import install
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.own_pages import ARRAY, JSON, TEXT, Pages, in_query
from lmetric.server.http.pages.call import Call, json, only_value
from lmetric.server.observe.usage import COLUMNS, Row

PAGES = Pages()
_FORMATS = ("json", "csv", "parquet")
_PARQUET = "application/vnd.apache.parquet"
_CONTENT: JSON = {
    "application/json": {"schema": ARRAY},
    "text/csv": {"schema": TEXT},
    _PARQUET: {"schema": {"type": "string", "format": "binary"}},
}
_SHOWN = ("router", *COLUMNS)
_TEXTS = 5  # the first columns


@PAGES.page("/admin/usage", "admin", "admin").on(
    "GET",
    "Show answered requests of this router and their tokens by day (UTC), tenant, API key and model",
    {"description": "Usage", "content": _CONTENT},
    400,
    401,
    403,
    501,
    parameters=(
        in_query("format", "parquet needs the extra `parquet`", {"enum": list(_FORMATS), "default": "json"}),
    ),
)
async def _usage(call: Call) -> web.Response:
    shape = only_value(call.query, "format", "json")
    if shape not in _FORMATS:
        raise bad(f"the query must be empty or format=FORMAT, one of {', '.join(_FORMATS)}", "format")
    found = await call.front.usage_rows()
    config = call.front.config
    router = f"{socket.gethostname()}:{config.port}" if config.port else socket.gethostname()
    return await asyncio.to_thread(_answer, found, shape, router)  # tables may be large


def _answer(found: Sequence[Row], shape: str, router: str) -> web.Response:
    """Returns the rows of a router in a format. Raises ApiError (501)."""
    rows = [[router, *row[:4], *row[4]] for row in found]
    if shape == "json":
        return json([dict(zip(_SHOWN, row, strict=True)) for row in rows])
    if shape == "parquet":
        return web.Response(body=_parquet(rows), content_type=_PARQUET)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([_SHOWN, *rows])
    return web.Response(text=text.getvalue(), content_type="text/csv")


def _parquet(rows: list[list[Any]]) -> bytes:
    """Returns the rows as a Parquet file. Raises ApiError (501) without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ApiError(
            501, f"format=parquet needs pyarrow: {install('parquet')}", code="not_implemented"
        ) from None
    kinds = [pyarrow.string()] * _TEXTS + [pyarrow.int64()] * (len(_SHOWN) - _TEXTS)
    schema = pyarrow.schema([*zip(_SHOWN, kinds, strict=True)])
    table = pyarrow.Table.from_pylist([dict(zip(_SHOWN, row, strict=True)) for row in rows], schema)
    file = pyarrow.BufferOutputStream()
    parquet.write_table(table, file, compression="zstd")
    content: bytes = file.getvalue().to_pybytes()
    return content
