"""Stored responses: which engine holds each of them, and which tenant made it.

An engine keeps the response of a POST to /v1/responses in its own memory, under an ID. Later
requests name this ID. The router chooses the ID: otherwise a tenant could overwrite the response of
another tenant. Engines that ignore the router's ID answer with their own. It counts if the router
serves one tenant.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from secrets import token_hex
from typing import NamedTuple

import orjson

from lmetric.config import Limits
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.api.request import ParsedRequest

# Longest ID, in characters. The router's own IDs have 37.
MAX_ID_LENGTH = 256
# The ID at the beginning of an answer that is not known to its end.
_FIRST_ID = re.compile(
    rb'\{(?:"(?:type|sequence_number)":\s*["\w.]+,\s*)*(?:"response":\s*\{)?"id":\s*"([^"\\]{1,256})"'
)
# Characters of an unknown ID in an error.
_SHOWN = 80


class Holder(NamedTuple):
    """The engine of a stored response, by name, and its model."""

    model: str
    engine: str


class StoredResponses:
    """The holders of stored responses, by tenant and ID. Limits bound it; the oldest go first."""

    def __init__(self, limits: Limits) -> None:
        self.configure(limits)
        self._all: OrderedDict[tuple[str, str], Holder] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def configure(self, limits: Limits) -> None:
        """Sets the limits. Responses beyond a lower one are forgotten as new ones come."""
        self._limit = limits.max_stored_responses
        self._tenant_limit = limits.max_stored_responses_per_tenant

    def add(self, tenant: str, response_id: str, holder: Holder) -> None:
        """Adds a response as the newest one."""
        self.forget(tenant, response_id)
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        while len(own) >= self._tenant_limit:
            self.forget(tenant, next(iter(own)))
        while len(self._all) >= self._limit:
            self.forget(*next(iter(self._all)))
        self._all[tenant, response_id] = holder
        self._of_tenant.setdefault(tenant, own)[response_id] = None

    def get(self, tenant: str, response_id: str) -> Holder | None:
        """Returns the holder of a tenant's response; None: it is unknown."""
        return self._all.get((tenant, response_id))

    def forget(self, tenant: str, response_id: str) -> None:
        """Removes a response, if it is known."""
        if self._all.pop((tenant, response_id), None) is not None:
            own = self._of_tenant[tenant]
            del own[response_id]
            if not own:
                del self._of_tenant[tenant]


def not_found(response_id: str, why: str) -> ApiError:
    """Returns the 404 of a stored response."""
    shown = response_id if len(response_id) <= _SHOWN else response_id[:_SHOWN] + "…"
    return ApiError(404, f"response {shown!r} {why}", param="response_id", code="response_not_found")


def assign_id(call: ParsedRequest, *, tenants: bool) -> str | None:
    """Gives the response of a POST to /v1/responses an ID, unless it must not be stored.

    Returns the ID, or None. ``tenants``: the router serves several tenants, so clients may not
    choose IDs, whatever `store` says: engines may read another one. Raises ApiError (400).
    """
    fields = call.brief
    given = fields.get("request_id")
    if tenants and given is not None:
        raise bad("the router serves several tenants and chooses request_id: leave it out", "request_id")
    if not fields.get("store", True):
        return None
    if given is None:
        response_id = f"resp_{token_hex(16)}"
        call.change(("request_id",), {"request_id": response_id})
        return response_id
    if not isinstance(given, str):
        return None  # the engine refuses it
    if len(given) > MAX_ID_LENGTH:
        raise bad(
            f"request_id has {len(given)} characters; at most {MAX_ID_LENGTH} are accepted", "request_id"
        )
    return given


def id_in(begun: bytes, own: str) -> str:
    """Returns the ID under which an engine stores a response; `own` if its answer does not show it.

    ``begun``: an answer or the first events of a stream, or only their first 256 KiB. ``own``: the
    ID in the request.
    """
    if b'"id":"%b"' % own.encode() in begun:
        return own
    if not begun.startswith(b"{"):
        begun = begun.partition(b"data:")[2].partition(b"\n")[0].strip()
    try:
        shown = orjson.loads(begun)
        found = shown.get("response", shown)["id"]
    except orjson.JSONDecodeError:  # incomplete
        first = _FIRST_ID.match(begun)
        return own if first is None else first[1].decode(errors="replace")
    except (AttributeError, LookupError, TypeError):
        return own
    return found if isinstance(found, str) and len(found) <= MAX_ID_LENGTH else own


def previous_id(call: ParsedRequest) -> str | None:
    """Returns the ID of the response that a request continues; None: it continues none."""
    previous = call.brief.get("previous_response_id")
    return previous if isinstance(previous, str) else None
