"""Changes of administrators that one worker makes in all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Fields of a client's request for a page that the other workers get with it.
FORWARDED = ("host", "authorization", "x-api-key", "api-key", "x-tenant", "origin")
# Kinds of kept changes: of one engine, the weights of all or of the named engines, and policies.
REMOVED, DRAINING, ROLE = "removed", "draining", "role"  # only configured engines are kept removed
WEIGHTS, POLICY = ("", "weights"), ("", "policy")
MARK = "x-lmetric-worker"  # of requests among workers: the number of the worker that has made a change

# By name of an engine: whether an administrator drains it, and the role that an administrator set.
EngineChanges = Mapping[str, tuple[bool, str | None]]


class AdminChange(NamedTuple):
    """A change of an administrator, for the other workers. It needs no token of the administrator.

    A change is kept for new workers, while the token may become another one.

    Attributes:
        kept: the engine (empty: all) and the kind of change, which a later change replaces. None:
            new workers do not repeat the change.
        removed: names of engines that are gone: new workers repeat no earlier change of them.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    kept: tuple[str, ...] | None = None
    removed: tuple[str, ...] = ()


def forwarded(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the fields of a request for a page that the other workers get with it."""
    return tuple((name, headers[name]) for name in FORWARDED if name in headers)
