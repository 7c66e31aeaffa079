"""Changes of administrators that one worker makes in all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import orjson

# Fields of a client's request for a page that the other workers get with it.
FORWARDED = ("host", "authorization", "x-api-key", "api-key", "x-tenant", "origin")
# Kinds of kept changes: of one engine, the weights of all or of the named engines, and policies.
REMOVED, ADDED = "removed", "added"  # only configured engines are kept removed
DRAINING, ROLE, INDICATORS = "draining", "role", "indicators"
WEIGHTS, POLICY = ("", "weights"), ("", "policy")
MARK = "x-lmetric-worker"  # of requests among workers: the number of the worker that has made a change


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


class EngineState(NamedTuple):
    """The changes of an engine by administrators, as a worker has them.

    Attributes:
        role: None: no administrator has set it.
        weights: version of its weights, as announced by a trainer.
        pushed: pushed values, by indicator.
        added: whether an administrator has added it.
    """

    draining: bool
    role: str | None
    weights: str | None
    pushed: Mapping[str, float | None]
    added: bool


def left_of(
    what: tuple[str, ...], change: AdminChange, engines: Mapping[str, EngineState]
) -> tuple[tuple[str, ...], AdminChange] | None:
    """Returns what still holds of a kept change, and its key; None: nothing.

    An engine loses its changes if its source removes it and lists it again. The weights of an
    engine whose process has restarted are those of its start.

    ``engines``: engines by name, as a worker has them that has made the change.
    """
    if what[:2] == WEIGHTS:
        version, names = str(orjson.loads(change.body)["version"]), what[2:] or tuple(engines)
        have = tuple(name for name in names if name in engines and engines[name].weights == version)
        if have == names:
            return what, change
        body = orjson.dumps({**orjson.loads(change.body), "engines": have})
        return ((*WEIGHTS, *have), change._replace(body=body)) if have else None
    if what[0] not in engines:  # it is of all engines, or of an engine that is gone
        return what, change
    state, kind, holds = engines[what[0]], what[1], True
    if kind == DRAINING:
        holds = change.target.partition("?")[0].endswith("/drain") is state.draining
    elif kind == ROLE:
        holds = orjson.loads(change.body)["role"] == state.role
    elif kind == INDICATORS:
        values = orjson.loads(change.body)
        left = {name: value for name, value in values.items() if state.pushed.get(name, ...) == value}
        if left and left != values:
            return (what[0], INDICATORS, *sorted(left)), change._replace(body=orjson.dumps(left))
        holds = left == values
    elif kind == ADDED:
        holds = state.added
    return (what, change) if holds else None


def forwarded(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns the fields of a request for a page that the other workers get with it."""
    return tuple((name, headers[name]) for name in FORWARDED if name in headers)
