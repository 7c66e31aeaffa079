"""The highest rate a fleet sustains: the speed of a trace at which it still keeps up, found by bisection.

The LMETRIC paper scales each trace to half of the maximum load its testbed can handle (section 6) and does
not say how that was found. Here a load is *sustained* if

- when the last request arrives, at least `keep_up` of all requests have had their first token (a fleet that
  falls behind by 1 - `keep_up` of the offered work fails), and
- where `good_share` is given, at least that share of the measured requests kept the SLO. (Some long prompts
  break a tight one on an idle fleet.)

The answer is the highest speed found sustained, to a relative `tolerance`; the next one tried above it
failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmetric._core import LmetricError
from lmetric.sim.setups import Result, Setup, run
from lmetric.sim.traces import Trace

if TYPE_CHECKING:
    from lmetric.sim.run import Workload

_FASTEST, _SLOWEST = 2.0**14, 2.0**-14


@dataclass(frozen=True, slots=True)
class Rule:
    """What counts as sustained, and how closely it is found."""

    keep_up: float = 0.95
    good_share: float | None = None
    tolerance: float = 0.02

    def sustained(self, result: Result) -> bool:
        """Whether the fleet kept up in this run."""
        good = self.good_share is None or result.figures.goodput.share >= self.good_share
        return good and result.first_token_share >= self.keep_up


@dataclass(frozen=True, slots=True)
class MaxLoad:
    """The outcome for one set-up; its `setup` runs at the speed found."""

    key: str
    setup: Setup
    rule: Rule
    speed: float
    arrivals_per_second: float
    tried: list[tuple[float, bool]]  # speeds in the order tried, and whether each was sustained


def find(setup: Setup, trace: Trace | Workload, rule: Rule, key: str = "") -> MaxLoad:
    """Bisect the speed of `trace` for `setup` (whose own speed is not looked at).

    Raises `LmetricError` where even 1 / 16384 of the trace's rate is too much, or 16384 times it too little,
    and where requests of the trace wait for the answers before them: such a trace slows down with the fleet.
    """
    requests = trace if isinstance(trace, Trace) else trace.trace
    if requests.previous is not None and bool((requests.previous >= 0).any()):
        raise LmetricError(
            f"no maximum load: requests of {requests.name} wait for answers, so its rate falls with the "
            f"fleet's; give speeds as loads, or play it open loop (closed_loop: false, Trace.open_loop())"
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
    """Neighbouring powers of two, the lower one sustained, the upper one not."""
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
                f"no maximum load: {what} does not even sustain {speed:g} of the trace's rate; "
                f"look at max_load.keep_up and max_load.good_share"
            )
    return speed / 2, speed
