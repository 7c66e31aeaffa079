"""The state of a running router in a terminal, from its page /debug/live.

`watch` yields states; `screen` turns a state into tables of `rich`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmetric._core import LmetricError

PATH = "/debug/live"
SILENT_SECONDS = 10.0  # without an update, the connection counts as lost
MAX_LINE_BYTES = 1 << 26
COLUMNS = ("batch", "queue", "queued_tokens", "cache", "hit_rate", "age_seconds")
_COLORS = {"usable": "green", "full": "yellow", "draining": "dim", "warming": "dim"}

State = dict[str, Any]


class RouterUnavailableError(LmetricError):
    """The router does not answer, or refuses to show its state."""


def _session(token: str | None) -> aiohttp.ClientSession:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=MAX_LINE_BYTES)


def _unreachable(url: str, error: Exception) -> RouterUnavailableError:
    why = str(error) or f"no data for {SILENT_SECONDS:g} s"
    return RouterUnavailableError(f"{url}: no answer from a router ({why}); check its URL, and that it runs")


async def _check(url: str, answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    body = await answer.read()
    try:
        message = str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = "the answer is not from lmetric-router"
    hint = "; give --token" if answer.status in (401, 403) else ""
    raise RouterUnavailableError(f"{url}{PATH}: status {answer.status}: {message}{hint}")


async def read_once(url: str, token: str | None = None) -> State:
    """Returns the present state of a router.

    Args:
        url: address of the router, such as ``http://127.0.0.1:8000``.
        token: the admin token, or an API key; None: no credential.

    Raises:
        RouterUnavailableError: no answer, or another status than 200.
    """
    url = url.rstrip("/")
    try:
        async with _session(token) as session, session.get(url + PATH) as answer:
            await _check(url, answer)
            state: State = orjson.loads(await answer.read())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise _unreachable(url, error) from None
    return state


async def watch(url: str, token: str | None = None) -> AsyncIterator[State]:
    """Yields the state of a router once a second, until its stream ends.

    Arguments and errors are as for `read_once`.
    """
    url = url.rstrip("/")
    state: State = {}
    try:
        headers = {"accept": "text/event-stream"}
        async with _session(token) as session, session.get(url + PATH, headers=headers) as answer:
            await _check(url, answer)
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
                        state["history"] = value
                    else:
                        state |= value
                    if name == "update":
                        yield state
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise _unreachable(url, error) from None


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


def screen(state: State, *, by: str = "batch", rows: int | None = None) -> RenderableType:
    """Returns the tables of a state.

    Args:
        by: the column of `COLUMNS` that orders the engines.
        rows: most engines shown; None: all.
    """
    parts: list[RenderableType] = [_head(state), _rates(state["now"])]
    listed = ordered(engines(state), by)
    if listed:
        shown = listed[:rows]
        parts.append(_engines(shown))
        if len(listed) > len(shown):
            parts.append(Text(f"and {len(listed) - len(shown)} more engines", style="dim"))
    for event in state["events"][:5]:
        parts.append(Text(_event(event), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(state: State) -> Text:
    summary = state["summary"]
    modes = ", ".join(f"{count} {mode}" for mode, count in summary["modes"].items())
    text = Text(f"{summary['usable']} of {summary['engines']} engines usable{f' ({modes})' if modes else ''}")
    for model, guard in state.get("guard", {}).items():
        on = f"{guard['suspected']} suspected, {guard['filtering']} filtered" if guard["on"] else "off"
        text.append(f"; guard of {model}: {on}")
    return text


def _rates(now: dict[str, Any]) -> Text:
    times = "   ".join(
        f"{name} {seconds(now[f'{key}_p50'])} (p95 {seconds(now[f'{key}_p95'])})"
        for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"))
    )
    in_flight = "" if now["in_flight"] is None else f"   {now['in_flight']:,.0f} in flight"
    return Text(
        f"{times}   hits {share(now['hit_rate'])}{in_flight}\n"
        f"per second: {_rate(now['requests_per_second'])} requests, "
        f"{_rate(now['errors_per_second'])} errors, "
        f"{_rate(now['prompt_tokens_per_second'])} prompt tokens, "
        f"{_rate(now['output_tokens_per_second'])} output tokens"
    )


def _engines(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("engine", overflow="fold")
    for title in ("state", "role", "mode"):
        table.add_column(title, no_wrap=True)
    for title in ("batch", "queue", "queued tokens", "cache", "hits", "age"):
        table.add_column(title, justify="right")
    for row in rows:
        state = Text(row["state"], style=_COLORS.get(row["state"], "bold red"))
        table.add_row(
            row["name"],
            state,
            row["role"] or "–",
            row["mode"] or "–",
            _count(row["batch"]),
            _count(row["queue"]),
            _count(row["queued_tokens"]),
            share(row["cache"]),
            share(row["hit_rate"]),
            seconds(row["age_seconds"]),
        )
    return table


def _event(event: dict[str, Any]) -> str:
    ends = " -> ".join(each for each in (event.get("source"), event.get("target")) if each)
    tokens = f", {event['tokens']:,} tokens" if event.get("tokens") else ""
    return f"{event['kind']} {ends}{': ' if ends else ''}{event['outcome']}{tokens}"


def seconds(value: float | None) -> str:
    """Returns a duration for people."""
    if value is None:
        return "–"
    if value < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def share(value: float | None) -> str:
    """Returns a fraction in percent."""
    return "–" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
