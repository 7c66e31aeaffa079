"""The pages of administrators. Only routers with `admin.enabled` load them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from lmetric.server.api.errors import ApiError
from lmetric.server.api.own_pages import OwnPage, Pages
from lmetric.server.http.pages import admin, canary, keys, usage, workers
from lmetric.server.http.pages.admin import RELOAD
from lmetric.server.http.pages.call import Call, check_method
from lmetric.server.worker.repeats import MARK, AdminChange

if TYPE_CHECKING:
    from lmetric.server.worker.worker import Worker

_PARTS = (admin, canary, usage, keys, workers)
PAGES = Pages({path: page for part in _PARTS for path, page in part.PAGES.items()})
# Pages that reach all workers by themselves.
_IN_ALL_WORKERS = (RELOAD, keys.PATH)


async def answer(call: Call) -> web.StreamResponse:
    """Answers a page, after the check of the request's credential. Raises ApiError."""
    front, request = call.front, call.request
    page, call.name = _at(call)
    check_method(call, page)
    response: web.StreamResponse = await page.handler(request.method)(call)
    worker = front.worker
    changes = (
        request.method not in ("GET", "HEAD")
        and response.status < 300
        and not call.path.startswith(_IN_ALL_WORKERS)
    )
    if worker is not None and changes and not call.is_repeated:
        await _repeat(call, worker)
    return response


def _at(call: Call) -> tuple[OwnPage, str]:
    """The page at a path, and the name in it. Raises ApiError."""
    path = call.path
    if path.startswith(workers.NAMED):
        return PAGES[f"{workers.NAMED}{{name}}"], path.removeprefix(workers.NAMED)
    if path.startswith(canary.PATH):
        return canary.at(call), ""
    if path.startswith(f"{keys.PATH}/"):
        return keys.at(call)
    page = None if "{" in path else PAGES.get(path)
    return admin.at(call) if page is None else (page, "")


async def _repeat(call: Call, worker: Worker) -> None:
    """Makes a change in all other workers. Raises ApiError."""
    request = call.request
    headers = ((MARK, str(worker.number)),)
    change = AdminChange(
        request.method, call.target, headers, call.taken, kept=call.kept, removed=call.removed
    )
    if failed := await worker.repeat(change):
        told = "; ".join(failed)
        raise ApiError(502, f"not all workers have made the change; send it again: {told}", code="workers")
