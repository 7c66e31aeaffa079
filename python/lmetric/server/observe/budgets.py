"""Budgets of tenants: what requests reserve, what they have used, and what is refused."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal
from zoneinfo import ZoneInfo

from prometheus_client.core import CounterMetricFamily, Metric

from lmetric._core import Board, BudgetRefusal, Budgets
from lmetric.config import BudgetConfig, TenantConfig
from lmetric.server.api.errors import ApiError
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer

# By tenant: the windows of its budgets, as the core reads them.
Windows = dict[str, list[dict[str, Any]]]

_ZONE_YEARS = 30  # changes of a time zone are known for this long from the start on
_DAY_SECONDS = 86_400
_STEP_DAYS = 5  # no zone changes its offset twice in this time; Gaza does in 7 days of 2040


class TenantBudgets(Observer):
    """Reserves the budgets of requests, and settles them when requests end."""

    def __init__(self, tenants: Mapping[str, TenantConfig], board: Board | None = None) -> None:
        self.core = Budgets(time.time() - time.monotonic(), board)
        self.exceeded: Counter[tuple[str, str]] = Counter()  # by tenant and shadow window
        self.configure(windows_of(tenants))

    def configure(self, windows: Windows) -> None:
        """Replaces the budgets. Counts stay. Raises BadValueError."""
        self.core.set(windows)
        self.limited = windows.keys()  # the tenants with budgets

    def tidy(self) -> Literal["full", "locked"] | None:
        """Makes room in the shared memory for new windows, a few at each call.

        Returns why this worker counts some windows alone: the memory is full, or another worker has
        stopped with its lock.
        """
        return self.core.tidy((time.monotonic(), time.time()))

    def reserve(self, request: ClientRequest, model: str, output_tokens: int, now: float) -> None:
        """Reserves what a request may use at most. Raises ApiError (429).

        ``now``: seconds on the monotonic clock.
        """
        asked = (request.prompt_tokens, output_tokens)
        scope = (model, request.caller.key_id, request.slo_class)
        made = self.core.reserve(request.tenant, scope, asked, (now, time.time()))
        if made is None:
            return
        if isinstance(made, BudgetRefusal):
            raise _refusal(model, made)
        request.reservation, request.limit_lines = made, made.lines
        for window in made.exceeded:
            self.exceeded[request.tenant, window] += 1

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Settles a request that has ended. A request without an answer gives all back."""
        made = request.reservation
        if made is None:
            return
        request.reservation = None
        if relay is None or not relay.committed or not 0 < relay.status < 400:
            made.release()
            return
        usage = relay.usage
        if usage is None:
            made.keep()
            return
        made.settle(usage.counted(request.prompt_tokens), (request.ended_at, time.time()))

    def metrics(self) -> Iterator[Metric]:
        """Yields the metrics, with their present values."""
        exceeded = CounterMetricFamily(
            "lmetric_tenant_budget_exceeded",
            "Requests above a budget with `shadow: true`, which refuses nothing",
            labels=("tenant", "budget"),
        )
        for labels, count in self.exceeded.items():
            exceeded.add_metric(labels, count)
        yield exceeded


def windows_of(tenants: Mapping[str, TenantConfig]) -> Windows:
    """Returns the windows of all budgets. A reload calls it in a thread: time zones take long."""
    return {name: [*map(_window, each.budgets)] for name, each in tenants.items() if each.budgets}


def _window(budget: BudgetConfig) -> dict[str, Any]:
    own = budget.model_dump(exclude={"name", "time_zone"})
    zone = budget.time_zone
    return own | {"name": budget.label, "time_zone": zone and (zone, _offsets(zone))}


@cache  # there are about 600 time zones
def _offsets(name: str) -> list[tuple[float, float]]:
    """Returns a time zone's offsets from UTC in seconds, each from a Unix time on."""
    zone = ZoneInfo(name)

    def offset(at: float) -> float:
        found = datetime.fromtimestamp(at, UTC).astimezone(zone).utcoffset()
        assert found is not None
        return found.total_seconds()

    start = time.time() // _DAY_SECONDS * _DAY_SECONDS - _DAY_SECONDS
    found = [(start, offset(start))]
    for number in range(_STEP_DAYS, 366 * _ZONE_YEARS, _STEP_DAYS):
        day = start + number * _DAY_SECONDS
        if (after := offset(day)) != found[-1][1]:
            low, high = day - _STEP_DAYS * _DAY_SECONDS, day
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if offset(middle) == after else (middle, high)
            found.append((high, after))
    return found


def _refusal(model: str, refused: BudgetRefusal) -> ApiError:
    """Returns the 429 for a request that a window refuses."""
    headers = dict(refused.fields)
    text = (
        f"{model}: budget {refused.window!r}: the request asks for {refused.asked} {refused.counts}, "
        f"{refused.used} of {refused.limit} per {refused.per} are used; "
    )
    if refused.retry_after_seconds is None:
        headers["x-should-retry"] = "false"  # for OpenAI's clients
        text += "it never fits: send a shorter prompt or a smaller max_tokens"
    else:
        wait = max(1, math.ceil(refused.retry_after_seconds))
        headers["retry-after"] = f"{wait}"
        text += f"try again in about {wait} s"
    return ApiError(429, text, code="rate_limit_exceeded", headers=headers)
