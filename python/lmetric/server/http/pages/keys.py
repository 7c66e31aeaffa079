"""The pages under /admin/keys: they issue, list and revoke API keys."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import structlog
from aiohttp import web

from lmetric._core import LmetricError
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.issued import (
    KEY_ID_DIGITS,
    MOST_CHARACTERS,
    MOST_KEYS,
    MOST_SECONDS,
    IssuedKey,
    issue,
    revoke,
    shown_time,
)
from lmetric.server.api.keys import Keys
from lmetric.server.api.own_pages import JSON, TEXT, OwnPage, Pages, answer, in_path
from lmetric.server.http.connection import ClientConnection
from lmetric.server.http.forwarding import UNIX
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages.call import Call, json, unknown
from lmetric.server.observe.usage import Row

PATH = "/admin/keys"
LISTED_SECONDS = 30 * 86_400  # after its expiry, a key is in the list for this long
PAGES = Pages()
_NAMED = f"{PATH}/{{id}}"
_FIELDS = ("tenant", "name", "expires_in_seconds", "expires_at")

_TIME: JSON = {"type": ["string", "null"], "format": "date-time"}
_KEY: JSON = {
    "type": "object",
    "required": ["id", "tenant", "name", "created", "expires", "state", "source", "last_used"],
    "properties": {
        "id": {**TEXT, "description": "First digits of the key's SHA-256 hash, as in /admin/usage"},
        "tenant": TEXT,
        "name": TEXT,
        "created": _TIME,
        "expires": _TIME,
        "state": {"enum": ["active", "expired", "revoked"]},
        "source": {"enum": ["file", "admin"]},
        "last_used": {"type": ["string", "null"], "description": "Day of the last answered request, UTC"},
    },
}
_MADE: JSON = {
    **_KEY,
    "required": [*_KEY["required"], "key"],
    "properties": {**_KEY["properties"], "key": {**TEXT, "description": "The key. It is shown only once"}},
}

log = structlog.get_logger("lmetric.keys")


def at(call: Call) -> tuple[OwnPage, str]:
    """The page of a key at a path that begins with `PATH`, and the key's ID. Raises ApiError."""
    name = call.path.removeprefix(f"{PATH}/")
    if "/" in name:
        raise unknown(call)
    return PAGES[_NAMED], name


_PAGE = PAGES.page(PATH, "admin", "admin")


@_PAGE.on(
    "GET",
    "List the API keys: those of `auth.keys_file`, and those issued here",
    answer("Keys", {"type": "array", "items": _KEY}),
    *(401, 403, 409),
)
async def _list(call: Call) -> web.Response:
    keys = _keys(call.front)
    usage = await call.front.usage_rows()
    return await asyncio.to_thread(_listed, keys, keys.issued.all(), usage)


def _listed(keys: Keys, issued: Iterable[IssuedKey], usage: Iterable[Row]) -> web.Response:
    last_used: dict[str, str] = {}
    for row in usage:  # ordered by day
        last_used[row.key] = row.day
    no_times = {"created": None, "expires": None}
    rows = [
        {
            "id": each.key_id,
            "tenant": each.tenant,
            "name": "",
            **no_times,
            "state": "active",
            "source": "file",
        }
        for each in keys.of_file()
    ]
    oldest = time.time() - LISTED_SECONDS
    listed = sorted((key for key in issued if key.expires > oldest), key=lambda key: key.created)
    rows += [_shown(keys, key) for key in listed]
    return json([{**row, "last_used": last_used.get(str(row["id"]))} for row in rows])


def _shown(keys: Keys, key: IssuedKey) -> dict[str, str | None]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "created": shown_time(key.created),
        "expires": shown_time(key.expires),
        "state": keys.issued.state(key),
        "source": "admin",
    }


@_PAGE.on(
    "POST",
    "Issue an API key; the answer shows it once",
    answer("The key", _MADE),
    *(400, 401, 403, 409, 500),
    body={
        "type": "object",
        "required": ["tenant"],
        "properties": {
            "tenant": {**TEXT, "minLength": 1, "maxLength": MOST_CHARACTERS},
            "name": {**TEXT, "maxLength": MOST_CHARACTERS, "default": ""},
            "expires_in_seconds": {"type": "number", "minimum": 1, "maximum": MOST_SECONDS},
            "expires_at": {**TEXT, "format": "date-time"},
        },
        "oneOf": [{"required": ["expires_in_seconds"]}, {"required": ["expires_at"]}],
    },
    status=201,
)
async def _issue(call: Call) -> web.Response:
    front = call.front
    keys = _keys(front)
    if not keys.issued.stored:
        raise ApiError(
            409,
            "set state_folder, and restart: without it, a key would not survive the router's next restart",
            code="no_state_folder",
        )
    body = await call.fields(set(_FIELDS))
    tenant, name = _text(body, "tenant", least=1), _text({"name": "", **body}, "name", least=0)
    expires = _expiry(body, time.time())
    if not keys.issued.has_room():
        raise ApiError(
            409,
            f"there are {MOST_KEYS} API keys that have not expired, the limit; a revoked key counts until "
            "its expiry",
            code="too_many_keys",
        )
    key, issued = issue(tenant, name, expires)
    await _change(front, issued)
    _audit(call, "API key issued", issued)
    response = json({**_shown(keys, issued), "last_used": None, "key": key})
    response.set_status(201)
    response.headers["cache-control"] = "no-store"
    return response


@PAGES.page(_NAMED, "admin", "admin").on(
    "DELETE",
    "Revoke an issued API key at once",
    answer("The key", _KEY),
    *(401, 403, 404, 409, 500),
    parameters=(in_path("id", "ID of the key"),),
)
async def _revoke(call: Call) -> web.Response:
    keys = _keys(call.front)
    if any(each.key_id == call.name for each in keys.of_file()):
        raise ApiError(
            409,
            f"key {call.name} is in auth.keys_file: remove it there, and reload",
            code="key_of_file",
        )
    issued = next((key for key in keys.issued.all() if key.id == call.name), None)
    if issued is None:
        raise ApiError(404, f"no API key has the ID {call.name[:KEY_ID_DIGITS]!r}; GET {PATH} lists them")
    ended = revoke(issued, time.time())
    await _change(call.front, ended)
    if not issued.revoked:
        _audit(call, "API key revoked", ended)
    return json({**_shown(keys, ended), "last_used": None})


def _keys(front: Frontend) -> Keys:
    """Returns the API keys. Raises ApiError (409) if requests need none."""
    keys = front.admission.identity.keys
    if not keys.on:
        raise ApiError(
            409,
            "requests need no API key, because auth.keys_file is not set; set it first: its file may be "
            "{} if state_folder is set",
            code="no_api_keys",
        )
    return keys


async def _change(front: Frontend, key: IssuedKey) -> None:
    """Applies a change in all workers and routers. Raises ApiError (500) if it cannot be stored."""
    try:
        await front.change_keys([key])
    except LmetricError as error:
        done = "the key is revoked until the next restart" if key.revoked else "no key was issued"
        raise ApiError(500, f"{error}; {done}; correct it, and send the request again") from None


def _audit(call: Call, event: str, key: IssuedKey) -> None:
    client = call.request.protocol
    assert isinstance(client, ClientConnection)
    log.info(
        event,
        key_id=key.id,
        tenant=key.tenant,
        name=key.name or None,
        expires=shown_time(key.expires),
        by="admin",
        client=client.sender or UNIX,
    )


def _text(body: Mapping[str, Any], field: str, least: int) -> str:
    """Returns a text of the body. Raises ApiError."""
    text = body.get(field)
    if not isinstance(text, str) or not least <= len(text) <= MOST_CHARACTERS or not text.isprintable():
        raise bad(f"{field} must be a string of {least} to {MOST_CHARACTERS} printable characters", field)
    return text


def _expiry(body: Mapping[str, Any], now: float) -> int:
    """Returns the Unix time at which a key expires. Raises ApiError."""
    given = [field for field in ("expires_in_seconds", "expires_at") if body.get(field) is not None]
    if len(given) != 1:
        raise bad("set one of expires_in_seconds and expires_at", "expires_in_seconds")
    (field,) = given
    value = body[field]
    if field == "expires_in_seconds":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MOST_SECONDS:
            raise bad(f"{field} must be a number of seconds from 1 to {MOST_SECONDS}", field)
        return math.ceil(now + value)
    try:
        at = datetime.fromisoformat(value)
        seconds = math.ceil(at.timestamp()) if at.tzinfo is not None else 0
    except (TypeError, ValueError, OverflowError):
        seconds = 0
    if not now < seconds <= now + MOST_SECONDS:
        raise bad(
            f"{field} must be a time of the next ten years with its time zone, such as "
            f"{shown_time(int(now) + 86_400)}",
            field,
        )
    return seconds
