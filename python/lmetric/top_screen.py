"""Tables of `lmetric-router top`: the state of a router, and why a request went to its engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lmetric.top import State, engines, ordered
from lmetric.why import number

_COLORS = {"usable": "green", "full": "yellow", "draining": "dim", "warming": "dim"}
_PARTS = {
    "wait": "waits",
    "fetch": "prefix fetch",
    "prefill": "to first token",
    "decode": "decode",
    "answer": "whole answer",
}
_LEVELS = {"bad": "bold red", "warn": "bold yellow", "note": "bold"}
_WIDE = 100  # columns of a terminal for all columns of the tables
_BLOCKS = "▁▂▃▄▅▆▇█"
_TREND_SECONDS = 300.0
_TREND_WIDTH = 15
_BAR_WIDTH = 30
_FIXED_LINES = 12  # of the screen: state, hot engines, times, and the heads of the tables
_TALL = 30  # lines of a terminal for all rates
_REQUESTS, _EVENTS = 10, 5

Series = list[float | None]
Rate = tuple[str, str, Callable[[float | None], str]]


def screen(
    state: State, *, by: str = "batch", height: int | None = None, width: int = _WIDE
) -> RenderableType:
    """Returns the status and the tables of a state.

    Args:
        by: the column of `lmetric.top.COLUMNS` that orders the engines.
        height: lines of the terminal; None: show all engines.
        width: columns of the terminal; a narrow one gets fewer columns of the tables.
    """
    listed = ordered(engines(state), by)
    rows, requests, events = len(listed), _REQUESTS, _EVENTS
    about, problems = _about(state), _problems(state)
    rates = _RATES if height is None or height >= _TALL else _RATES[:_SHORT_RATES]
    if height is not None:
        about, problems = about[: max(height // 20, 1)], problems[: max(height // 8, 2)]
        for line in (*about, *problems):  # so that their number is that of their lines
            line.no_wrap, line.overflow = True, "ellipsis"
        free = max(height - _FIXED_LINES - len(rates) - len(about) - len(problems), 5)
        events = min(_EVENTS, free // 5)
        rows = min(rows, max((free - events) * 3 // 5, 2))
        requests = max(free - events - rows, 2)
    narrow = width < _WIDE
    parts: list[RenderableType] = [*problems, *about, _head(state), *_hot(state)]
    parts.append(_rates(state, rates, narrow))
    if listed:
        parts.append(_engines(listed[:rows], narrow))
        if len(listed) > rows:
            parts.append(Text(_more(len(listed) - rows), style="dim"))
    if state["requests"]:
        parts.append(_requests(state["requests"][:requests], narrow))
    for event in state["events"][:events]:
        parts.append(Text(_event(event), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _about(state: State) -> list[Text]:
    """Returns a line for each model, with its policy; a tenant's view has none."""
    static = state.get("static")
    if static is None:
        return []
    lines: list[Text] = []
    for model in static["models"]:
        formula = f" = {model['formula']}" if model["formula"] else ""
        text = (
            f"{model['model'] or 'no model yet'}: policy {model['policy']}{formula}; guard {model['guard']}"
        )
        lines.append(Text(f"{text}; version {static['router']}" if not lines else text))
    return lines


def _problems(state: State) -> list[Text]:
    """Returns the lines of `problems`: what is wrong, since when, why, and what to do."""
    lines = []
    for each in state.get("problems", ()):
        since = f" since {_clock(each['since'])}" if each["since"] is not None else ""
        line = Text(f"{each['what']}{since}", style=_LEVELS[each["level"]])
        reason = f": {each['reason']}" if each["reason"] else ""
        fix = f"; fix: {each['fix']}" if each["fix"] else ""
        line.append(reason + fix, style="default not bold")
        lines.append(line)
    return lines


def _clock(unix: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix))


def _head(state: State) -> Text:
    summary = state["summary"]
    modes = ", ".join(f"{count} {mode}" for mode, count in summary["modes"].items())
    text = Text(f"{summary['usable']} of {summary['engines']} engines usable{f' ({modes})' if modes else ''}")
    for model, guard in state.get("guard", {}).items():
        on = f"{guard['suspected']} suspected, {guard['filtering']} filtered" if guard["on"] else "off"
        text.append(f"; guard of {model}: {on}")
    return text


def _hot(state: State) -> list[Text]:
    """Returns the line of the hot engines; a tenant's view has none."""
    spots = state.get("hot_spots")
    if spots is None:
        return []

    def named(each: dict[str, Any]) -> str:
        return (
            f"{each['name']} with batch {_count(each['batch'])} ({each['times']:.1f}x the mean of its role)"
        )

    if spots["hot"]:
        return [Text(f"Hot: {', '.join(map(named, spots['hot']))}", style="bold yellow")]
    busiest = f" Busiest: {named(spots['busiest'])}." if spots["busiest"] else ""
    return [Text(f"No engine is hot.{busiest}", style="dim")]


def _rates(state: State, rates: Sequence[Rate], narrow: bool) -> Table:
    """Returns the table of the present values, and of those of the last minutes.

    ``rates``: of `_RATES`.
    """
    fields, points = state["history"]["fields"], state["history"]["points"]
    now = state["now"]
    end = points[-1][0] if points else 0.0

    def column(name: str, since: float) -> Series:
        place = fields.index(name)
        return [point[place] for point in points if point[0] > end - since]

    table = _table()
    windows = (60.0,) if narrow else (60.0, _TREND_SECONDS)
    for title in ("", "now", "1 min") if narrow else ("", "now", "1 min", "5 min"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    table.add_column("last 5 min", no_wrap=True)
    for title, key in (("TTFT p50, p95", "ttft"), ("TPOT p50, p95", "tpot"), ("E2E p50, p95", "e2e")):
        cell = f"{seconds(now[f'{key}_p50'])}, {seconds(now[f'{key}_p95'])}"
        # The points hold quantiles of one second each, which give no quantile of a longer window.
        table.add_row(title, cell, *("" for _ in windows), _trend(points, fields.index(f"{key}_p50"), end))
    for title, key, unit in rates:
        cells = [unit(now[key])]
        for since in windows:
            weights = column("prompt_tokens_per_second", since) if key == "hit_rate" else None
            cells.append(unit(_mean(column(key, since), weights)))
        table.add_row(title, *cells, _trend(points, fields.index(key), end))
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False)


def _mean(values: Series, weights: Series | None = None) -> float | None:
    """Returns the mean of the known values."""
    known = [
        (value, weight or 0.0)
        for value, weight in zip(values, weights or [1.0] * len(values), strict=True)
        if value is not None
    ]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _trend(points: Sequence[Sequence[Any]], place: int, end: float) -> str:
    """Returns one character for each 20 seconds, in proportion to the largest mean."""
    step = _TREND_SECONDS / _TREND_WIDTH
    groups: list[Series] = [[] for _ in range(_TREND_WIDTH)]
    for point in points:
        back = int((end - point[0]) / step)
        if back < _TREND_WIDTH:
            groups[-1 - back].append(point[place])
    means = [_mean(group) for group in groups]
    most = max((mean for mean in means if mean is not None), default=0.0) or 1.0
    last = len(_BLOCKS) - 1
    return "".join(" " if mean is None else _BLOCKS[round(mean / most * last)] for mean in means)


def _engines(rows: Sequence[dict[str, Any]], narrow: bool) -> Table:
    table = _table()
    table.add_column("engine", no_wrap=True, overflow="ellipsis")
    for title in ("state", "mode") if narrow else ("state", "role", "mode"):
        table.add_column(title, no_wrap=True)
    for title in ("batch", "queue", "tokens", "cache", "hits", "age"):
        table.add_column(title, justify="right")
    for row in rows:
        state = Text(row["state"], style=_COLORS.get(row["state"], "bold red"))
        table.add_row(
            row["name"],
            state,
            *([] if narrow else [row["role"] or "–"]),
            row["mode"] or "–",
            _count(row["batch"]),
            _count(row["queue"]),
            _count(row["queued_tokens"]),
            share(row["cache"]),
            share(row["hit_rate"]),
            seconds(row["age_seconds"]),
        )
    return table


def _requests(requests: Sequence[dict[str, Any]], narrow: bool) -> Table:
    table = _table()
    table.add_column("decision", no_wrap=True, overflow="fold")
    table.add_column("engine", no_wrap=True, overflow="ellipsis")
    for title in ("prompt", "cached", *(() if narrow else ("output",)), "TTFT", "TPOT"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for each in requests:
        runs = each["status"] is None
        prompt, cached = each["prompt_tokens"], each.get("cached_tokens")
        hit = (
            f"{'~' if each['predicted'] else ''}{cached / prompt:.0%}"
            if prompt and cached is not None
            else "–"
        )
        table.add_row(
            each["id"] or "–",
            each["instance"] or "–",
            _count(prompt),
            hit,
            *([] if narrow else [_count(each.get("output_tokens"))]),
            seconds(each.get("ttft_seconds")),
            seconds(each.get("tpot_seconds")),
            Text("running", style="green") if runs else Text(_ended(each), style=_status(each["status"])),
        )
    return table


def _ended(request: dict[str, Any]) -> str:
    """Returns the status of a finished request, with its end-to-end time if it has no TTFT."""
    status, code = request["status"], request.get("code")
    if status < 400 and request["ttft_seconds"] is None:
        return f"{status} in {seconds(request['seconds'])}"
    return f"{status} {code}" if code else str(status)


def _status(status: int) -> str:
    return "bold red" if status >= 400 else ""


def _event(event: dict[str, Any]) -> str:
    ends = " -> ".join(each for each in (event.get("source"), event.get("target")) if each)
    tokens = f", {event['tokens']:,} tokens" if event.get("tokens") else ""
    return f"{event['kind']} {ends}{': ' if ends else ''}{event['outcome']}{tokens}"


def why(record: dict[str, Any]) -> RenderableType:
    """Returns why a request went to its engine: the sentence, its engines and the alternatives.

    ``record``: of ``/debug/decisions/ID``.
    """
    reason = record.get("because") or "the router does not show its engines"
    reason = reason[0].upper() + reason[1:]
    parts: list[RenderableType] = [
        Text(f"Request {record.get('request_id') or record['id']}: {record['outcome']}", style="bold"),
        Text(reason),
    ]
    if (credential := record.get("credential")) is not None:
        parts.append(Text(f"Sent with {credential}", style="dim"))
    if record.get("timeline"):
        parts.append(_timeline(record["timeline"]))
    if record.get("best"):
        parts.append(_alternatives(record))
        if (more := record["scored"] - len(record["best"])) > 0:
            parts.append(Text(_more(more), style="dim"))
    return Group(*parts)


def _timeline(timeline: Sequence[dict[str, Any]]) -> Table:
    start = min(part["from_seconds"] for part in timeline)
    length = max(part["to_seconds"] for part in timeline) - start
    table = _table()
    for title in ("engine", "part"):
        table.add_column(title, no_wrap=True)
    for title in ("from", "to"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part in timeline:
        first, last = (
            round((part[key] - start) / length * _BAR_WIDTH) for key in ("from_seconds", "to_seconds")
        )
        first = min(first, _BAR_WIDTH - 1)
        bar = " " * first + "█" * max(last - first, 1)
        ends = (seconds(part["from_seconds"]), seconds(part["to_seconds"]))
        table.add_row(part["engine"] or "router", _PARTS[part["kind"]], *ends, bar)
    return table


def _alternatives(record: dict[str, Any]) -> Table:
    best = record["best"]
    chosen = (record.get("tried") or [record["instance"]])[0]
    table = _table()
    table.add_column("engine", overflow="fold")
    wins = "highest" if record["prefer"] == "max" else "lowest"
    for title in (f"score ({wins} wins)", *best[0]["terms"]):
        table.add_column(title, justify="right")
    for each in best:
        own = each["instance"] == chosen
        values = [
            "–" if value is None else number(value) for value in (each["score"], *each["terms"].values())
        ]
        name = f"{each['instance']} ✓" if own else each["instance"]
        table.add_row(name, *values, style="bold" if own else "")
    return table


def seconds(value: float | None) -> str:
    """Returns a duration for people."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} s" if abs(value) < 1000 else f"{value:,.0f} s"


def share(value: float | None) -> str:
    """Returns a fraction in percent."""
    return "–" if value is None else f"{value:.0%}"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


# Title, key and unit of each rate. A short terminal gets the first ones.
_RATES: tuple[Rate, ...] = (
    ("hit rate", "hit_rate", share),
    ("requests/s", "requests_per_second", _rate),
    ("errors/s", "errors_per_second", _rate),
    ("in flight", "in_flight", _count),
    ("prompt tokens/s", "prompt_tokens_per_second", _rate),
    ("output tokens/s", "output_tokens_per_second", _rate),
)
_SHORT_RATES = 4


def _more(engines: int) -> str:
    return f"and {engines} more engine{'s' * (engines != 1)}"
