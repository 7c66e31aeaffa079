"""A request for one of the router's own pages, and the checks and answers that pages share."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl

import orjson
from aiohttp import web
from msgspec import Struct

from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.own_pages import OwnPage
from lmetric.server.api.request import read_object
from lmetric.server.http.frontend import Frontend
from lmetric.server.worker.repeats import MARK

# Size limit of a request body for a page.
PAGE_BODY_BYTES = 1 << 20
LONGEST_COMPARED_PATH = 200
MAX_QUERY_LENGTH = 4096  # reading 64 kB of parameters or of `%` takes up to 48 ms
# Paths of the pages of `administration`, without those that contain a name.
ADMINISTRATION = (
    *("/admin/engines", "/admin/guard", "/admin/reload", "/admin/weights", "/admin/policy"),
    *("/admin/canary", "/admin/canary/start", "/admin/canary/promote", "/admin/canary/rollback"),
    *("/admin/usage", "/admin/keys", "/workers", "/add_worker", "/remove_worker", "/list_workers"),
)
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_INDENT_2


class Call(Struct, eq=False, gc=False):
    """A request for a page.

    Attributes:
        path: the spelling of the client, because proxies in front of the router filter by it.
        kept: what a new worker repeats of a change: the engine (empty: all) and the kind of change.
            A later change replaces it. None: new workers do not repeat the change.
        removed: names of engines that the change has removed.
        name: what stands for the part ``{...}`` of the page's path, as the client spells it.
        open_paths: loads and returns the paths of pages for clients and for readers of /debug.
        every_page: loads and returns all pages.
    """

    front: Frontend
    request: web.BaseRequest
    path: str
    query: str
    open_paths: Callable[[], Iterable[str]]
    every_page: Callable[[], Iterable[OwnPage]]
    name: str = ""
    taken: bytes = b""  # the body, once it is read
    kept: tuple[str, ...] | None = None
    removed: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """Path and query, as the client spells them."""
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def is_repeated(self) -> bool:
        """Whether the supervisor of the workers sends the request, after another worker got it."""
        worker = self.front.worker
        return worker is not None and worker.is_repeated(self.request.headers.get(MARK))

    async def body(self, limit: int = PAGE_BODY_BYTES) -> bytes:
        """Reads the body of at most ``limit`` bytes. Raises ApiError."""
        self.taken = await self.front.bodies.read(self.request, limit)
        return self.taken

    async def fields(self, known: set[str]) -> dict[str, Any]:
        """Reads a body with these fields at most. Raises ApiError."""
        body = read_object(await self.body())
        for name in body:
            if name not in known:
                raise bad(f"unknown field {name!r}; known: {', '.join(sorted(known))}", name)
        return body


def is_administration(path: str) -> bool:
    """Whether a path is that of a page of administrators."""
    return path.startswith(("/admin/", "/workers/")) or path in ADMINISTRATION


def only_value(query: str, name: str, default: str = "") -> str:
    """Returns the value of a query's only parameter; empty: the query has another parameter."""
    if "&" in query or len(query) > MAX_QUERY_LENGTH:
        return ""
    ((given, value),) = parse_qsl(query, keep_blank_values=True) or [(name, default)]
    return value if given == name else ""


def json(value: Any) -> web.Response:
    """Answers with a value as JSON, or with bytes that are JSON."""
    body = value if isinstance(value, bytes) else dumps(value)
    return web.Response(body=body, content_type="application/json")


def dumps(value: Any) -> bytes:
    """Returns a value as JSON."""
    return orjson.dumps(value, option=_OPTIONS)


async def large_json(value: Any) -> web.Response:
    """As `json`, in a thread: the value may have an entry for each of 10,000 engines."""
    return await asyncio.to_thread(json, value)


def check_method(call: Call, page: OwnPage) -> None:
    """Raises ApiError (405) for a method that the page does not have."""
    methods = page.allowed
    if call.request.method not in methods:
        raise ApiError(
            405,
            f"{call.request.method} is not allowed on {call.path}; use {methods[0]}",
            headers={"allow": ", ".join(methods)},
        )


def unknown(call: Call) -> ApiError:
    """The error for an unknown path, with the nearest path that exists."""
    path, paths = call.path[:LONGEST_COMPARED_PATH], sorted(call.front.arrivals.paths)
    near = [known for known in paths if known.endswith(path) or path.rstrip("/") == known][-1:]
    if not near:
        own = [known for known in call.open_paths() if "{" not in known]
        near = difflib.get_close_matches(path, [*paths, *own, *ADMINISTRATION], n=1, cutoff=0.8)
    if path.startswith("/v1/v1/"):
        hint = "; leave out the second /v1"
    elif near:
        hint = f"; did you mean {near[0]}?"
    else:
        post = call.request.method == "POST"
        hint = "; to relay it to the engines, add it to paths in the configuration" if post else ""
    return ApiError(404, f"unknown path {call.path}{hint}", code="unknown_path")
