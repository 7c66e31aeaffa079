"""Finds the maximum load of a fleet: the highest speed of a trace that it sustains, by bisection.

The LMETRIC paper scales each trace to half of the maximum load of its testbed (section 6), without
a method to find the maximum. Here a load is *sustained* under two conditions:

- When the last request arrives, at least `keep_up` of all requests have their first token.
- If `good_share` is set, at least this share of the measured requests met the SLO. (Some long
  prompts miss a tight SLO even on an idle fleet.)

The result is the highest sustained speed, to a relative `tolerance`. The next higher speed failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmetric._core import LmetricError
from lmetric_lab.sim.setups import Result, Setup, run
from lmetric_lab.sim.traces import Trace

if TYPE_CHECKING:
    from lmetric_lab.sim.workload import Workload

_FASTEST, _SLOWEST = 2.0**14, 2.0**-14


@dataclass(frozen=True, slots=True)
class Rule:
    """The conditions of a sustained load, and the tolerance of the search."""

    keep_up: float = 0.95
    good_share: float | None = None
    tolerance: float = 0.02

    def sustained(self, result: Result) -> bool:
        """Whether the fleet kept up in this run."""
        good = self.good_share is None or result.figures.goodput.share >= self.good_share
        return good and result.first_token_share >= self.keep_up


@dataclass(frozen=True, slots=True)
class MaxLoad:
    """The maximum load of one setup. `setup` has the speed of the result."""

    key: str
    setup: Setup
    rule: Rule
    speed: float
    arrivals_per_second: float
    tried: list[tuple[float, bool]]  # speeds in the order tried, and whether each was sustained


def find(setup: Setup, trace: Trace | Workload, rule: Rule, key: str = "") -> MaxLoad:
    """Bisect the speed of `trace` for `setup`, whose own speed is ignored.

    Raises:
        LmetricError: no limit between 1 / 16384 and 16384 times the trace's rate. Or the trace is
            closed loop, so that it slows down with the fleet.
    """
    requests = trace if isinstance(trace, Trace) else trace.trace
    if requests.previous is not None and bool((requests.previous >= 0).any()):
        raise LmetricError(
            f"no maximum load: requests of {requests.name} wait for answers, so its rate depends on the "
            f"fleet; set speeds as loads, or run it open loop (closed_loop: false, Trace.open_loop())"
        )
    tried: list[tuple[float, bool]] = []
    rates: dict[float, float] = {}

    def sustained(speed: float) -> bool:
        result = run(replace(setup, speed=speed, fraction_of_max=None), trace)
        rates[speed] = result.arrivals_per_second
        tried.append((speed, rule.sustained(result)))
        return tried[-1][1]

    low, high = _bracket(sustained, f"{setup.choice.label} on {', '.join(filter(None, setup.group))}")
    while high / low > 1 + rule.tolerance:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if sustained(middle) else (low, middle)
    return MaxLoad(key, replace(setup, speed=low, fraction_of_max=1.0), rule, low, rates[low], tried)


def _bracket(sustained: Callable[[float], bool], what: str) -> tuple[float, float]:
    """Two adjacent powers of two: the lower one is sustained, the upper one is not."""
    speed = 1.0
    if sustained(speed):
        while sustained(speed * 2):
            speed *= 2
            if speed >= _FASTEST:
                raise LmetricError(f"no maximum load: {what} sustains the trace {speed:g} times as fast")
        return speed, speed * 2
    while not sustained(speed / 2):
        speed /= 2
        if speed <= _SLOWEST:
            raise LmetricError(
                f"no maximum load: {what} does not sustain even {speed:g} of the trace's rate; "
                f"check max_load.keep_up and max_load.good_share"
            )
    return speed / 2, speed
