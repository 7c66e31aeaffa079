"""The live page at /ui, and its data at /debug/live: one JSON object, or a stream of events (SSE).

Each viewer gets at most one update per second, always the latest. A viewer that has not received
the last update gets no new one, so a slow browser costs at most one update of memory.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
from collections import Counter
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

from lmetric.server.api.errors import ApiError
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.running import REPLACED
from lmetric.server.observe.live import Live

if TYPE_CHECKING:
    from lmetric.server.observe.live_view import LiveView

STALLED_SECONDS = 30.0  # a viewer that reads nothing for this time is disconnected
RETRY_MILLISECONDS = 2000  # until a browser connects again

_TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}
PAGE = "index.html"


@functools.cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Returns the files of the page by name, each with its ETag."""
    folder = resources.files("lmetric.server") / "ui"
    found = {}
    for file in folder.iterdir():
        if file.name.rpartition(".")[2] in _TYPES:
            body = file.read_bytes()
            found[file.name] = body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return found


def static(front: Frontend, request: web.BaseRequest, name: str) -> web.Response:
    """Answers with a file of the page. Raises ApiError (404)."""
    _live(front)
    file = _files().get(name)
    if file is None:
        raise ApiError(404, f"unknown path /ui/{name}", code="unknown_path")
    body, tag = file
    headers = {**_HEADERS, "cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return web.Response(status=304, headers=headers)
    kind = _TYPES[name.rpartition(".")[2]]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


def _load_view() -> type[LiveView]:
    """Imports the view, in a thread, for the first viewer: most routers have no viewer."""
    from lmetric.server.observe.live_view import LiveView

    return LiveView


def _live(front: Frontend) -> Live:
    if front.live is None:
        raise ApiError(404, "the live page is off; set ui.enabled: true", code="unknown_path")
    return front.live


def _tenant(front: Frontend, request: web.BaseRequest, path: str) -> str | None:
    """Returns the tenant whose view a request gets; None: the administrator's view.

    Without API keys, there are no tenants that could prove who they are. Raises ApiError (401,
    403).
    """
    if front.admission.identity.on and not front.access.is_admin(request.headers):
        return front.access.tenant(request)
    front.access.require_admin(request, path)
    return None


async def live(front: Frontend, request: web.BaseRequest, path: str) -> web.StreamResponse:
    """Answers /debug/live. Raises ApiError (401, 403, 404, 503)."""
    shown = _live(front)
    tenant = _tenant(front, request, path)
    headers = {**_HEADERS, "cache-control": "no-store", "vary": "accept"}
    if shown.view is None:
        view_of = await asyncio.to_thread(_load_view)
        shown.view = shown.view or view_of(shown)
    if "text/event-stream" not in request.headers.get("accept", "") or request.method == "HEAD":
        body = await shown.view.snapshot(tenant)
        return web.Response(body=body, content_type="application/json", headers=headers)
    viewers = front.config.ui.viewers
    # Tenants leave places for the administrator, and each tenant for the others.
    limit = viewers if tenant is None else (viewers + 1) // 2
    own_limit = viewers if tenant is None else (viewers + 3) // 4
    if shown.viewers.total() >= limit or shown.viewers[tenant] >= own_limit:
        raise ApiError(
            503,
            f"{min(limit, own_limit)} viewers are connected; close one",
            code="too_many_viewers",
            headers={"retry-after": "10"},
        )
    response = web.StreamResponse(headers={**headers, "x-accel-buffering": "no"})
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    access = b"admin" if tenant is None else b"tenant"
    shown.viewers[tenant] += 1
    try:
        await response.prepare(request)
        await response.write(
            b'retry: %d\nevent: hello\ndata: {"access":"%b"}\n\n' % (RETRY_MILLISECONDS, access)
        )
        await _stream(front, request, response, tenant=tenant)
    except (ConnectionError, TimeoutError, ApiError):  # ApiError: its credential is no longer valid
        response.force_close()
        if request.transport is not None:
            request.transport.abort()
    finally:
        shown.viewers -= Counter({tenant: 1})  # keeps no tenant without a viewer
    return response


async def _stream(
    front: Frontend,
    request: web.BaseRequest,
    response: web.StreamResponse,
    tenant: str | None,
) -> None:
    """Sends updates until the viewer leaves or the server ends."""
    shown = _live(front)
    view: LiveView = shown.view
    fleet: int | None = None
    tick, sent = shown.ticks, time.monotonic()
    while not shown.closed and front.running.phase is not REPLACED:
        transport = request.transport
        if transport is None or transport.is_closing():
            return
        if _tenant(front, request, request.path) != tenant:  # its key has ended
            return
        if not transport.get_write_buffer_size():
            shown.dropped += max(shown.ticks - tick - 1, 0)
            tick, sent = shown.ticks, time.monotonic()
            fleet, frames = await view.frames(tenant, fleet)
            async with asyncio.timeout(STALLED_SECONDS):  # a large update waits here
                await response.write(frames)
        elif time.monotonic() - sent > STALLED_SECONDS:
            raise TimeoutError
        await shown.next_tick()
