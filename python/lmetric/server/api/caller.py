"""The sender of a request, as its credential names it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lmetric.server.api.errors import ApiError


class Caller(NamedTuple):
    """The sender of a request, and its rights.

    ``key_id``: ID of the API key, or of a token's subject; empty: none. ``issuer``: of its JSON Web
    Token; empty: it has none. ``claims``: the claims that the router has read. ``slo_class``: the
    class of its requests; empty: its tenant's; None: the credential names none, so the header may.
    ``models``: the only names of models that it may use; None: all. ``issued``: whether its API key
    was issued by /admin/keys.
    """

    tenant: str
    key_id: str = ""
    issuer: str = ""
    claims: str = ""
    slo_class: str | None = None
    models: frozenset[str] | None = None
    issued: bool = False

    @property
    def any_tenant(self) -> bool:
        """Whether its tenant may have any name, which no file of the router lists."""
        return self.issued or bool(self.issuer)

    @property
    def credential(self) -> str | None:
        """Its credential, for decision records; None: it has none."""
        if self.issuer:
            return f"JWT of {self.issuer}, subject {self.key_id or 'unnamed'}, {self.claims}"
        return f"API key {self.key_id}" if self.key_id else None


NOBODY = Caller("")
OTHER_TENANTS = "(other tenants)"  # in counts: tokens and issued keys may name any number of tenants


def by_header(tenants: Iterable[str]) -> dict[str, str]:
    """Returns tenants by the header x-tenant, read as latin-1: clients send latin-1 or UTF-8."""
    return {each: each for each in tenants} | {str(each.encode(), "latin-1"): each for each in tenants}


class UnknownKeyError(ApiError):
    """The key of a token is not known yet, and the issuer's keys are read again.

    ``read``: ends when they have been read; then ``finish`` returns the caller, or raises ApiError.
    """

    def __init__(self, read: asyncio.Future[None], finish: Callable[[], Caller]) -> None:
        super().__init__(
            503,
            "the issuer's keys are being read; send the request again",
            code="issuer_unreachable",
            headers={"retry-after": "1"},
        )
        self.read = read
        self.finish = finish
