"""Usage per day, tenant, API key and model: answered requests and their tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple

import orjson
from prometheus_client.core import CounterMetricFamily, Metric

from lmetric._core import BadValueError
from lmetric.server.api.caller import OTHER_TENANTS
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer
from lmetric.server.fleet.fleet import Fleet

DAYS = 400  # with usage; a further day takes the place of the oldest one
# Rows of a day and of a table: an engine with ever new models must not fill memory or disk.
DAY_ROWS, MOST_ROWS = 10_000, 100_000
OTHER_MODELS = "(other models)"  # the model of further rows, which have no API key
COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens")
COLUMNS = ("day", "tenant", "key", "model", *COUNTS)


class Row(NamedTuple):
    """The usage of a tenant, an API key and a model on a day (UTC, such as 2026-01-31).

    ``key``: ID of the API key; empty: none. ``counts``: in the order of `COUNTS`; input tokens
    include the cached ones.
    """

    day: str
    tenant: str
    key: str
    model: str
    counts: tuple[int, ...]


class UsageTable:
    """Usage by day, tenant, API key and model."""

    def __init__(self) -> None:
        self._days: dict[str, dict[tuple[str, str, str], list[int]]] = {}
        self._size = 0  # rows
        self._changed: set[str] = set()  # days that differ from those of the last `save`

    def row(self, day: str, key: tuple[str, str, str]) -> list[int]:
        """Returns the counts of a row, for adding. ``key``: tenant, API key and model."""
        self._changed.add(day)
        rows = self._days.get(day)
        if rows is not None and (known := rows.get(key)) is not None:
            return known
        return self._new_row(day, key)

    def _new_row(self, day: str, key: tuple[str, str, str]) -> list[int]:
        rows = self._days.get(day)
        if rows is None:
            # By number, not by date: a clock that was wrong for a while costs few days.
            while len(self._days) >= DAYS:
                self._drop(min(self._days))
            rows = self._days[day] = {}
        tenant, api_key, model = key
        if len(rows) >= DAY_ROWS or self._size >= MOST_ROWS:
            api_key, model = "", OTHER_MODELS
            if (tenant, api_key, model) not in rows and len(rows) >= 2 * DAY_ROWS:
                tenant = OTHER_TENANTS
        known = rows.get((tenant, api_key, model))
        if known is None:
            known = rows[tenant, api_key, model] = [0] * len(COUNTS)
            self._size += 1
        return known

    def _drop(self, day: str) -> None:
        self._size -= len(self._days.pop(day))
        self._changed.add(day)

    def rows(self) -> list[Row]:
        """Returns the rows, ordered by day, tenant, API key and model.

        Another thread may call this, because a table may be large.
        """
        return [row for day in sorted(self._days) for row in self._of_day(day)]

    def _of_day(self, day: str) -> list[Row]:
        rows = self._days.get(day, {})
        return [Row(day, *key, tuple(rows[key])) for key in sorted(rows)]

    def take(self) -> list[Row]:
        """Returns the rows, and begins at 0."""
        rows = self.rows()
        self._days.clear()
        self._changed.clear()
        self._size = 0
        return rows

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Adds rows of another table."""
        for row in rows:
            known = self.row(row.day, row[1:4])
            for place, count in enumerate(row.counts):
                known[place] += count

    def save(self) -> dict[str, bytes | None]:
        """Returns a file for each day that has changed since the last call, by name, for `restore`.

        None: the day was dropped.
        """
        changed, self._changed = self._changed, set()
        return {f"usage-{day}.json": self._saved(day) for day in changed}

    def _saved(self, day: str) -> bytes | None:
        if day not in self._days:
            return None
        rows = [[*row[:4], *row.counts] for row in self._of_day(day)]
        return orjson.dumps({"columns": COLUMNS, "rows": rows})

    def restore(self, content: bytes) -> None:
        """Adds a saved day. Raises BadValueError for a broken one; then nothing is added."""
        try:
            saved = orjson.loads(content)
            if tuple(saved["columns"]) != COLUMNS:
                raise ValueError("other columns")
            rows = [
                Row(_day(day), str(tenant), str(key), str(model), tuple(map(_count, counts)))
                for day, tenant, key, model, *counts in saved["rows"]
            ]
            if any(len(row.counts) != len(COUNTS) for row in rows):
                raise ValueError("a row of another length")
        except (ValueError, TypeError, KeyError) as error:
            raise BadValueError(
                f"saved usage: {len(content)} bytes are not valid ({error}); expected a whole file of this "
                "version of the router"
            ) from None
        self.add_rows(rows)


def _day(text: str) -> str:
    return datetime.strptime(text, "%Y-%m-%d").strftime("%Y-%m-%d")


def _count(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number


class Usage(Observer):
    """Counts the usage of requests at their ends."""

    def __init__(self, fleet: Fleet) -> None:
        self.table = UsageTable()
        self._since_start: dict[tuple[str, str], list[int]] = {}  # by tenant and model
        self._day, self._day_ends = "", 0.0
        fleet.on_model_removed.append(self._forget)

    def _forget(self, model: str) -> None:
        """Drops the metrics of a model that was removed. The table keeps its rows."""
        self._since_start = {key: total for key, total in self._since_start.items() if key[1] != model}

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Counts a request with an engine's answer."""
        if relay is None or (usage := relay.usage) is None or request.status != 200 or request.model is None:
            return
        now = time.time()
        if not self._day_ends - 86_400 <= now < self._day_ends:
            self._day = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d")
            self._day_ends = (now // 86_400 + 1) * 86_400
        tenant, model = request.tenant, request.model.name
        total = self._since_start.get((tenant, model))
        if total is None:
            if len(self._since_start) >= DAY_ROWS:
                tenant = OTHER_TENANTS
            total = self._since_start.setdefault((tenant, model), [0] * len(COUNTS))
        row = self.table.row(self._day, (request.tenant, request.caller.key_id, model))
        input_tokens, cached_tokens, output_tokens = usage.counted(request.prompt_tokens)
        for counts in (row, total):
            counts[0] += 1
            counts[1] += input_tokens
            counts[2] += cached_tokens
            counts[3] += output_tokens

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics, with their present values."""
        tokens = CounterMetricFamily(
            "lmetric_usage_tokens",
            "Tokens of answered requests, by kind: input, cached (a part of input), output",
            labels=("tenant", "model", "kind"),
        )
        requests = CounterMetricFamily(
            "lmetric_usage_requests",
            "Requests with an engine's answer of status 200",
            labels=("tenant", "model"),
        )
        for labels, (count, *kinds) in self._since_start.items():
            requests.add_metric(labels, count)
            for name, amount in zip(("input", "cached", "output"), kinds, strict=True):
                tokens.add_metric((*labels, name), amount)
        yield from (requests, tokens)
