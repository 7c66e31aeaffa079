"""Pages under the paths of vllm-router and sglang-router that need no administration."""

from __future__ import annotations

from aiohttp import web

from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.own_pages import OBJECT, TEXT, Pages, answer, in_query
from lmetric.server.http.pages.call import MAX_QUERY_LENGTH, Call, json, only_value
from lmetric.server.http.place import session_key
from lmetric.server.http.running import DRAINING

PAGES = Pages()
_DONE = answer("Done", OBJECT)


@PAGES.page("/finish_session", "sessions", "tenant").on(
    "POST",
    "End the agent programs of a session, so that they free their place in the caches",
    _DONE,
    *(400, 401),
    parameters=(in_query("session_id", "As the header x-session-id of the session's requests", TEXT),),
)
async def _finish(call: Call) -> web.Response:
    """Ends a session. ``programs``: how many had not ended, so 0 for unknown and ended sessions."""
    front = call.front
    session = only_value(call.query, "session_id")
    if not session:
        raise bad(f"the query must be session_id=ID, at most {MAX_QUERY_LENGTH} characters", "session_id")
    tenant, spelled = front.access.tenant(call.request), str(session.encode(), "latin-1")
    keys = [session_key(tenant, each) for each in {session, spelled}]  # of bodies, and of headers
    programs = 0
    for model in front.fleet.models:
        programs += sum(model.router.finish_session(key) or 0 for key in keys)
        model.held.poke()
    return json({"status": "ok", "session_id": session, "programs": programs})


@PAGES.page("/liveness", "health", "open").on(
    "GET", "Whether the process answers", answer("It does", TEXT, "text/plain")
)
async def _liveness(call: Call) -> web.Response:
    return web.Response(text="OK")


@PAGES.page("/readiness", "health", "open").on(
    "GET", "Whether an engine accepts requests, with counts of workers", _DONE, 503
)
async def _readiness(call: Call) -> web.Response:
    engines = [each for each in call.front.fleet.engines() if not each.leaving]
    healthy = sum(each.healthy for each in engines)
    if not _is_ready(call):
        more = {"status": "not ready", "reason": "insufficient healthy workers"}
        raise ApiError(503, "not ready: no usable engine", code="not_ready", more=more)
    return json({"status": "ready", "healthy_workers": healthy, "total_workers": len(engines)})


@PAGES.page("/health_generate", "health", "open").on(
    "GET",
    "Whether an engine accepts requests; sends no request to an engine",
    answer("One does", TEXT, "text/plain"),
    503,
)
async def _health_generate(call: Call) -> web.Response:
    if not _is_ready(call):
        raise ApiError(503, "not ready: no usable engine", code="not_ready")
    return web.Response(text="OK")


def _is_ready(call: Call) -> bool:
    return call.front.running.phase < DRAINING and call.front.fleet.ready()
