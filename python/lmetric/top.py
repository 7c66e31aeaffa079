"""The state of a running router, from its pages /debug/live and /debug/decisions/ID.

`watch` yields states. `lmetric.top_screen` turns them into tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from lmetric._core import LmetricError
from lmetric.no_router import no_router

PATH = "/debug/live"
SILENT_SECONDS = 10.0  # without an update, the connection counts as lost
RETRY_SECONDS = 2.0  # until it connects again, as the live page
MAX_LINE_BYTES = 1 << 26
COLUMNS = ("batch", "queue", "queued_tokens", "cache", "hit_rate", "age_seconds")
POINTS_KEPT = 900  # seconds of history

State = dict[str, Any]


class RouterUnavailableError(LmetricError):
    """The router does not answer, or refuses to show its state."""


def _session(token: str | None) -> aiohttp.ClientSession:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=MAX_LINE_BYTES)


def _unreachable(url: str, error: Exception) -> RouterUnavailableError:
    return RouterUnavailableError(no_router(url, error, f"no data for {SILENT_SECONDS:g} s"))


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    body = await answer.read()
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = "the answer is not from lmetric-router"
    hint = "; give --token" if answer.status in (401, 403) else ""
    raise RouterUnavailableError(f"{answer.url}: status {answer.status}: {message}{hint}")


async def _read(url: str, path: str, token: str | None) -> dict[str, Any]:
    url = url.rstrip("/")
    try:
        async with _session(token) as session, session.get(url + path) as answer:
            await _check(answer)
            value: dict[str, Any] = orjson.loads(await answer.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise _unreachable(url, error) from None
    return value


async def read_once(url: str, token: str | None = None) -> State:
    """Returns the present state of a router.

    Args:
        url: address of the router, such as ``http://127.0.0.1:8080``.
        token: the admin token, or an API key; None: no credential.

    Raises:
        RouterUnavailableError: no answer, or another status than 200.
    """
    return await _read(url, PATH, token)


async def read_decision(url: str, decision: str, token: str | None = None) -> dict[str, Any]:
    """Returns a decision record with ``because`` and ``timeline``.

    ``decision``: the value of the header ``x-lmetric-decision``; of ``x-request-id`` if the router
    refused the request. Other arguments and errors are as for `read_once`.
    """
    return await _read(url, f"/debug/decisions/{quote(decision, safe='')}", token)


async def watch(url: str, token: str | None = None) -> AsyncIterator[State]:
    """Yields the state of a router once a second.

    It connects again if the stream ends: the router may have replaced its worker. Arguments and
    errors are as for `read_once`, also if it cannot connect again.
    """
    url = url.rstrip("/")
    state: State = {}
    while True:
        seen = None
        try:
            async for seen in _stream(url, token, state):
                yield seen
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if seen is None:
                raise _unreachable(url, error) from None
        if seen is None:
            raise RouterUnavailableError(f"{url}: the stream ended without an update; run top again")
        await asyncio.sleep(RETRY_SECONDS)


async def _stream(url: str, token: str | None, state: State) -> AsyncIterator[State]:
    """Yields the state at each update, until the stream ends."""
    headers = {"accept": "text/event-stream"}
    async with _session(token) as session, session.get(url + PATH, headers=headers) as answer:
        await _check(answer)
        name = ""
        async for raw in answer.content:
            line = raw.rstrip(b"\n")
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                value = orjson.loads(line[6:])
                if name == "fleet":
                    state["static"] = value
                elif name == "history":
                    kept = state["history"]["points"] if "history" in state else []
                    _extend(kept, value["points"])
                    state["history"] = {**value, "points": kept}
                else:
                    state |= value
                if name == "update":
                    _extend(state["history"]["points"], state["points"])
                    yield state


def _extend(history: list[list[Any]], points: list[list[Any]]) -> None:
    """Adds points that are not in the history yet; the first value of each is its time.

    After a step back of the router's clock, later points of the history are removed.
    """
    start = len(points) - 1
    while start > 0 and points[start - 1][0] <= points[start][0]:
        start -= 1
    fresh = points[max(start, 0) :]
    last = history[-1][0] if history else 0.0
    if fresh and fresh[-1][0] < last:
        history[:] = [point for point in history if point[0] < fresh[0][0]]
        last = history[-1][0] if history else 0.0
    history += [point for point in fresh if point[0] > last]
    del history[:-POINTS_KEPT]


def engines(state: State) -> list[dict[str, Any]]:
    """Returns the engines of a state, one object each; empty in a tenant's view."""
    static, columns = state.get("static"), state.get("engines")
    if static is None or columns is None:
        return []
    rows: dict[str, list[Any]] = {**static["engines"], **columns}
    names = list(rows)
    return [dict(zip(names, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def ordered(rows: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Returns the engines by a column, highest first, engines that are not usable before them."""
    return sorted(rows, key=lambda row: (row["state"] == "usable", -(row[by] or 0), row["name"]))
