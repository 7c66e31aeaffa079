"""The router's own pages: health, models, metrics, debugging, administration.

`PAGES` is the table of all pages, each declared beside its handler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from lmetric.server.api.errors import ApiError
from lmetric.server.api.own_pages import OwnPage, Pages
from lmetric.server.api.paths import REALTIME
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages import admin, canary, debug, health, keys, peers, usage, workers
from lmetric.server.http.pages.admin import RELOAD
from lmetric.server.http.pages.call import Call, check_method, unknown
from lmetric.server.http.protocol import upgrade_required, wants_websocket
from lmetric.server.worker.repeats import MARK, AdminChange, forwarded

if TYPE_CHECKING:
    from lmetric.server.worker.worker import Worker

_PARTS = (health, debug, admin, canary, usage, keys, workers, peers)
PAGES = Pages({path: page for part in _PARTS for path, page in part.PAGES.items()})
# Pages that reach all workers by themselves.
_IN_ALL_WORKERS = (RELOAD, keys.PATH)
# Pages whose path ends with a name, by what comes before it.
_NAMED = {
    path.partition("{")[0]: path for path in PAGES if path.endswith("}") and not path.startswith("/admin/")
}


async def pages(front: Frontend, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
    """Answers requests that are not for engines. Raises ApiError.

    ``path``: as the client spells it. The body is read after the check of the request's credential.
    """
    call = Call(front, request, path, query, PAGES)
    if path.startswith("/admin/"):
        return await _admin(call, None)
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
    page, call.name = _at(path)
    replicas = front.replicas
    if page is None or (page.access == "replica" and (replicas is None or not replicas.on)):
        raise unknown(call)
    if page.tag == workers.TAG:
        return await _admin(call, page)
    _admit(call, page)
    response: web.StreamResponse = await page.handler(request.method)(call)
    return response


def _at(path: str) -> tuple[OwnPage | None, str]:
    """The page at a path, and the name at its end. Pages under /admin are not found."""
    for start, named in _NAMED.items():
        if path.startswith(start):
            return PAGES[named], path.removeprefix(start)
    return (None if "{" in path else PAGES.get(path)), ""


def _admit(call: Call, page: OwnPage) -> None:
    """Checks the credential and the method. Raises ApiError."""
    front, headers = call.front, call.request.headers
    if page.access == "admin":
        front.access.require_admin(headers, call.path)
    elif page.access == "tenant":
        front.access.tenant(headers)
    check_method(call, page)
    if page.access == "metrics":
        front.access.require_metrics(headers, call.path)
    elif page.access == "replica" and front.replicas is not None:
        front.replicas.authorize(headers)


async def _admin(call: Call, page: OwnPage | None) -> web.StreamResponse:
    """Answers a page of administrators. ``page``: None for pages under /admin."""
    front, request = call.front, call.request
    front.access.require_admin(request.headers, call.path)
    if not front.config.admin.enabled:
        raise ApiError(403, "administration is off; set admin.enabled: true")
    if page is None:
        page = None if "{" in call.path else PAGES.get(call.path)
    if call.path.startswith(canary.PATH):
        page = canary.at(call)
    elif call.path.startswith(f"{keys.PATH}/"):
        page, call.name = keys.at(call)
    elif page is None:
        page, call.name = admin.at(call)
    check_method(call, page)
    response: web.StreamResponse = await page.handler(request.method)(call)
    worker = front.worker
    changes = (
        request.method not in ("GET", "HEAD")
        and response.status < 300
        and not call.path.startswith(_IN_ALL_WORKERS)
    )
    if worker is not None and changes and not worker.is_repeated(request.headers.get(MARK)):
        await _repeat(call, worker)
    return response


async def _repeat(call: Call, worker: Worker) -> None:
    """Makes a change in all other workers. Raises ApiError."""
    request = call.request
    headers = (*forwarded(request.headers), (MARK, str(worker.number)))
    change = AdminChange(request.method, call.target, headers, call.taken)
    if failed := await worker.repeat(change):
        told = "; ".join(failed)
        raise ApiError(502, f"not all workers have made the change; send it again: {told}", code="workers")
