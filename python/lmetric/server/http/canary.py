"""The pages under /admin/canary: state of the canaries, and their commands."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web
from pydantic import ValidationError

from lmetric._core import LmetricError
from lmetric.config import CanaryConfig, CanaryStart
from lmetric.server.api.errors import ApiError, bad, not_valid
from lmetric.server.api.own_pages import OWN_PAGES
from lmetric.server.api.request import read_object
from lmetric.server.fleet.canary import CanaryError
from lmetric.server.fleet.policies import check as check_policy
from lmetric.server.fleet.pool import Pool
from lmetric.server.http.frontend import Frontend

PATH = "/admin/canary"
BODY_BYTES = 1 << 16


async def answer(front: Frontend, request: web.BaseRequest, path: str) -> web.Response:
    """Answers a request of an administrator. Raises ApiError."""
    page = OWN_PAGES.get(path)
    if page is None:
        raise ApiError(
            404, f"unknown path {path}; commands are start, promote and rollback", code="unknown_path"
        )
    if request.method not in page.allowed:
        allowed = ", ".join(page.allowed)
        raise ApiError(
            405,
            f"{request.method} is not allowed on {path}; use {page.allowed[0]}",
            headers={"allow": allowed},
        )
    if path == PATH:
        return _json([pool.trials.shown() for pool in front.fleet.pools])
    body = read_object(await front.read_body(request, BODY_BYTES) or b"{}")
    pool = _pool(front, body.get("model"))
    try:
        _command(pool, path.rpartition("/")[2], body)
    except CanaryError as error:
        raise ApiError(409, str(error), code="canary_state") from None
    except LmetricError as error:
        raise ApiError(400, str(error), param="policy", code="bad_policy") from None
    return _json(pool.trials.shown())


def _pool(front: Frontend, model: object) -> Pool:
    """Returns the model of a command. Raises ApiError."""
    if model is not None and not isinstance(model, str):
        raise bad("model must be a name, a string", "model")
    return front.fleet.find(model).pool


def _command(pool: Pool, verb: str, body: dict[str, Any]) -> None:
    """Carries out a command. Raises ApiError, or LmetricError."""
    canary = pool.trials.canary
    if verb == "start":
        try:
            given = CanaryStart.model_validate(body)
        except ValidationError as error:
            raise not_valid(error) from None
        config = CanaryConfig.model_validate(given.model_dump(exclude={"model"}))
        check_policy(pool.policies.settings, config.policy, config.knobs)
        canary.start(config)
        return
    for name in body:
        if name != "model":
            raise bad(f"unknown field {name!r}; known: model", name)
    if verb == "promote":
        canary.check_results()
        canary.promote()
    else:
        canary.roll_back()


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value, option=orjson.OPT_INDENT_2), content_type="application/json")
