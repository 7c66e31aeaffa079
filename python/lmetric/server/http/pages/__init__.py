"""The router's own pages: health, models, metrics, debugging, administration.

Each page is declared beside its handler. The pages of `health` are loaded at the start, others by
the first call of one of them; `table` has all.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from aiohttp import web

from lmetric.server.api.errors import ApiError
from lmetric.server.api.own_pages import OwnPage, Pages
from lmetric.server.api.paths import REALTIME
from lmetric.server.api.replica_pages import PATH
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages import health
from lmetric.server.http.pages.call import Call, check_method, is_administration, unknown
from lmetric.server.http.protocol import upgrade_required, wants_websocket

_OF_SESSIONS = ("/finish_session", "/liveness", "/readiness", "/health_generate")


async def pages(front: Frontend, request: web.BaseRequest, path: str, query: str) -> web.StreamResponse:
    """Answers requests that are not for engines. Raises ApiError.

    ``path``: as the client spells it. The body is read after the check of the request's credential.
    """
    call = Call(front, request, path, query, _open_paths, _every_page)
    if is_administration(path):
        return await _admin(call)
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
    if path.startswith(PATH) and (front.replicas is None or not front.replicas.on):
        raise unknown(call)
    page, call.name = _at(path)
    if page is None:
        raise unknown(call)
    _admit(call, page)
    response: web.StreamResponse = await page.handler(request.method)(call)
    return response


def _at(path: str) -> tuple[OwnPage | None, str]:
    """The page at a path, and the name at its end."""
    pages = load_pages(path)
    for named, page in pages.items():
        start, _, name = named.partition("{")
        if name and path.startswith(start):
            return page, path.removeprefix(start)
    return (None if "{" in path else pages.get(path)), ""


def load_pages(path: str) -> Pages:
    """Imports the pages among which a path is, without those of administrators."""
    if path.startswith("/debug/"):
        from lmetric.server.http.pages.debug import PAGES
    elif path in _OF_SESSIONS:
        from lmetric.server.http.pages.sessions import PAGES
    elif path.startswith(PATH):
        from lmetric.server.http.pages.peers import PAGES
    else:
        return health.PAGES
    return PAGES


def _admit(call: Call, page: OwnPage) -> None:
    """Checks the credential and the method. Raises ApiError."""
    front, request = call.front, call.request
    if page.access == "admin":
        front.access.require_admin(request, call.path)
    elif page.access == "tenant":
        front.access.tenant(request)
    check_method(call, page)
    if page.access == "metrics":
        front.access.require_metrics(request, call.path)
    elif page.access == "replica" and front.replicas is not None:
        front.replicas.authorize(request.headers)


async def _admin(call: Call) -> web.StreamResponse:
    """Answers a page of administrators. Raises ApiError."""
    if not call.is_repeated:  # the token may be another one since the change
        call.front.access.require_admin(call.request, call.path)
        if not call.front.config.admin.enabled:
            raise ApiError(403, "administration is off; set admin.enabled: true")
    response: web.StreamResponse = await load_administration().answer(call)
    return response


def load_administration() -> ModuleType:
    """Imports the pages that only routers with `admin.enabled` need."""
    from lmetric.server.http.pages import administration

    return administration


def _open_paths() -> Iterable[str]:
    """The paths of the pages for clients and for readers of /debug."""
    for pages in (health.PAGES, load_pages("/debug/"), load_pages(_OF_SESSIONS[0])):
        yield from pages


def _every_page() -> Iterable[OwnPage]:
    from lmetric.server.http.pages.table import PAGES

    return PAGES.values()
