"""The pages under /admin/canary: state of the canaries, and their commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import ValidationError

from lmetric._core import LmetricError
from lmetric.config import CanaryConfig, CanaryStart
from lmetric.server.api.errors import ApiError, bad, not_valid
from lmetric.server.api.own_pages import ARRAY, OBJECT, OwnPage, Pages, answer, schema
from lmetric.server.api.request import read_object
from lmetric.server.fleet.canary import CanaryError, Event, State
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.policies import build
from lmetric.server.fleet.policies import check as check_policy
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages.call import Call, dumps, json

PATH = "/admin/canary"
BODY_BYTES = 1 << 16
PAGES = Pages()
_ERRORS = (400, 401, 403, 404, 409)


_STATE = answer("State of the canary", OBJECT)
_ONLY = {"properties": {"model": {"type": "string", "description": "Default: the only model"}}}


def _page(path: str) -> OwnPage:
    return PAGES.page(path, "admin", "admin")


def at(call: Call) -> OwnPage:
    """The page at a path that begins with `PATH`. Raises ApiError."""
    page = PAGES.get(call.path)
    if page is None:
        raise ApiError(
            404, f"unknown path {call.path}; commands are start, promote and rollback", code="unknown_path"
        )
    return page


@_page(PATH).on(
    "GET", "Show canaries and shadows, with their differences", answer("Canaries", ARRAY), 401, 403
)
async def _show(call: Call) -> web.Response:
    return json([model.try_policies().shown() for model in call.front.fleet.models])


@_page(f"{PATH}/start").on(
    "POST",
    "Route a share of the requests under another policy",
    _STATE,
    *_ERRORS,
    body=schema("CanaryStart"),
)
async def _start(call: Call) -> web.Response:
    return await _command(call, _begin)


@_page(f"{PATH}/promote").on(
    "POST", "Make the canary's policy the policy of all requests", _STATE, *_ERRORS, body=_ONLY
)
async def _promote(call: Call) -> web.Response:
    return await _command(call, _make_policy)


@_page(f"{PATH}/rollback").on("POST", "End the canary, or undo its promotion", _STATE, *_ERRORS, body=_ONLY)
async def _roll_back(call: Call) -> web.Response:
    return await _command(call, _end)


async def _command(
    call: Call, carry_out: Callable[[Model, dict[str, Any], bool], Awaitable[None]]
) -> web.Response:
    """Carries out a command on a model's canary. Answers with its state.

    Another worker that has carried it out may repeat it here.
    """
    body = read_object(await call.body(BODY_BYTES) or b"{}")
    model = _model(call.front, body.get("model"))
    try:
        async with model.try_policies().canary.command_lock:  # commands follow each other
            await carry_out(model, body, call.is_repeated)
        call.taken = dumps(body)
    except CanaryError as error:
        raise ApiError(409, str(error), code="canary_state") from None
    except LmetricError as error:
        raise ApiError(400, str(error), param="policy", code="bad_policy") from None
    return json(model.try_policies().shown())


def _model(front: Frontend, model: object) -> Model:
    """Returns the model of a command. Raises ApiError."""
    if model is not None and not isinstance(model, str):
        raise bad("model must be a name, a string", "model")
    return front.fleet.catalog.find(model).model


async def _begin(model: Model, body: dict[str, Any], repeated: bool) -> None:
    try:
        given = CanaryStart.model_validate(body)
    except ValidationError as error:
        raise not_valid(error) from None
    config = CanaryConfig.model_validate(given.model_dump(exclude={"model"}))
    canary = model.try_policies().canary
    if repeated and canary.running and canary.run is not None and canary.run.salt == config.salt:
        return
    before, built = None, None
    while model.policies is not before:  # also if other policies came meanwhile
        before = model.policies
        check_policy(before.settings, config.policy, config.knobs)
        canary.check(Event.START)
        built = await asyncio.to_thread(build, before.settings, config.policy, config.knobs)
    canary.start(config, built=built)
    if canary.run is not None:
        body["salt"] = canary.run.salt  # a session has the same arm in all workers


async def _make_policy(model: Model, body: dict[str, Any], repeated: bool) -> None:
    _check_fields(body)
    canary = model.try_policies().canary
    if repeated and canary.state is State.PROMOTED:
        return
    if not repeated:
        canary.check_results()
    canary.promote()


async def _end(model: Model, body: dict[str, Any], repeated: bool) -> None:
    _check_fields(body)
    canary = model.try_policies().canary
    if not repeated or canary.state is not State.ROLLED_BACK:
        canary.roll_back()


def _check_fields(body: dict[str, Any]) -> None:
    for name in body:
        if name != "model":
            raise bad(f"unknown field {name!r}; known: model", name)
