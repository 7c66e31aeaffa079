"""Ranks policies: the one order of study reports and of the sentences that end runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from lmetric_lab.sim.max_load import Rule
from lmetric_lab.sim.setups import Result
from lmetric_lab.sim.study import Cell, latency

T = TypeVar("T")
KEEP_UP = Rule().keep_up


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a policy that decide its place.

    Attributes:
        ttft_seconds: mean TTFT; None: no request got a token.
        tpot_seconds: mean TPOT; None: no answer has two tokens.
        unfinished: number of requests without a complete answer.
        first_token_share: share of the requests with a first token when the last one arrived.
    """

    ttft_seconds: float | None
    tpot_seconds: float | None
    unfinished: int = 0
    first_token_share: float = 1.0

    @property
    def keeps_up(self) -> bool:
        """Whether the fleet sustains the load: the default of `lmetric_lab.sim.max_load.Rule`."""
        return self.first_token_share >= KEEP_UP

    @property
    def is_excluded(self) -> bool:
        """Whether the policy comes last, because its means leave out requests or depend on the
        length of the trace."""
        return self.unfinished > 0 or not self.keeps_up


@dataclass(frozen=True, slots=True)
class Standing(Generic[T]):
    """A policy in the ranking.

    `latency` is the geometric mean of its mean TTFT and its mean TPOT, each relative to the lowest
    of all policies. So 1 has the lowest of both, and twice the TTFT weighs as much as twice the
    TPOT. If no policy has a TPOT, the TTFT counts alone. None: the policy lacks one of them.
    """

    policy: T
    measured: Measured
    latency: float | None


def rank(policies: Iterable[T], measure: Callable[[T], Measured]) -> list[Standing[T]]:
    """Sorts policies by `latency`, best first.

    Policies with unfinished requests, or that cannot keep up, come last.
    """
    found = [(policy, measure(policy)) for policy in policies]
    columns = [[each.ttft_seconds for _, each in found], [each.tpot_seconds for _, each in found]]
    lowest = [min((value for value in column if value is not None), default=0.0) for column in columns]

    def relative(*values: float | None) -> float | None:
        counted = [(value, least) for value, least in zip(values, lowest, strict=True) if least > 0]
        ratios = [value / least for value, least in counted if value is not None]
        product: float = 1.0
        for ratio in ratios:
            product *= ratio
        return product ** (1 / len(ratios)) if ratios and len(ratios) == len(counted) else None

    standings = [
        Standing(policy, measured, relative(measured.ttft_seconds, measured.tpot_seconds))
        for policy, measured in found
    ]
    return sorted(standings, key=_place)


def _place(standing: Standing[T]) -> tuple[bool, float]:
    return standing.measured.is_excluded, float("inf") if standing.latency is None else standing.latency


def ranking(cells: Sequence[Cell]) -> list[Standing[Cell]]:
    """The policies of one load of a study, best first: `rank` by means over the seeds."""
    return rank(cells, measured_of)


def over_loads(cells: Sequence[Cell]) -> list[tuple[str, dict[str, Standing[Cell]]]]:
    """The policies of all loads of a study, best first, with their standing by load.

    The order is by the geometric mean of `latency` over the loads. A policy that is excluded at a
    load, or lacks it, comes last.
    """
    found: dict[str, dict[str, Standing[Cell]]] = {cell.policy: {} for cell in cells}
    loads = list(dict.fromkeys(cell.load for cell in cells))
    for load in loads:
        for standing in ranking([cell for cell in cells if cell.load == load]):
            found[standing.policy.policy][load] = standing

    def place(entry: tuple[str, dict[str, Standing[Cell]]]) -> tuple[bool, float]:
        standings = entry[1].values()
        last = len(standings) < len(loads) or any(each.measured.is_excluded for each in standings)
        return last, math.prod(math.inf if each.latency is None else each.latency for each in standings)

    return sorted(found.items(), key=place)


def measured_of(cell: Cell) -> Measured:
    """The results of a cell: means over the seeds, and unfinished requests of all seeds."""
    ttft, tpot = (
        cell.over_seeds(partial(latency, name=name, part="mean")) for name in ("ttft_seconds", "tpot_seconds")
    )
    share = cell.over_seeds(lambda result: result.first_token_share)
    return Measured(
        None if ttft is None else ttft[0],
        None if tpot is None else tpot[0],
        unfinished=sum(result.figures.failed for result in cell.results),
        first_token_share=0.0 if share is None else share[0],
    )


def equal(cells: Sequence[Cell]) -> list[list[str]]:
    """Groups of two or more policies of one load with equal results on each seed.

    Such policies placed the requests alike. Often one of them lacks its data: `session_affinity`
    decides like `least_requests` on a trace without sessions.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for cell in cells:
        groups.setdefault(tuple(map(_figures, cell.results)), []).append(cell.policy)
    return [names for names in groups.values() if len(names) > 1]


def _figures(result: Result) -> object:
    """A run's figures without the policy's name and the time of the computation."""
    return replace(result.figures, policy="", decode_policy=None, wall_seconds=0.0)
