"""Changes of administrators that one worker makes in all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Fields of a client's request for a page that the other workers get with it.
FORWARDED = ("host", "authorization", "x-api-key", "origin")
MARK = "x-lmetric-worker"  # of requests among workers: the number of the worker that has made a change


class AdminChange(NamedTuple):
    """A change of an administrator, for the other workers. It needs no token of the administrator.

    A change is kept for new workers, while the token may become another one.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def forwarded(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the fields of a request for a page that the other workers get with it."""
    return tuple((name, headers[name]) for name in FORWARDED if name in headers)
