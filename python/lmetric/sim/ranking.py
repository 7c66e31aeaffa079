"""Ranks whole policies by TTFT and TPOT together, and finds policies with equal results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lmetric.sim.setups import Result
from lmetric.sim.study import Cell, latency


@dataclass(frozen=True, slots=True)
class Standing:
    """A policy in the ranking.

    `latency` is the geometric mean of its mean TTFT and its mean TPOT, each relative to the lowest
    of all policies. So 1 has the lowest of both, and twice the TTFT weighs as much as twice the
    TPOT. None: a run has no TTFT or no TPOT.
    """

    cell: Cell
    latency: float | None


def ranking(cells: Sequence[Cell]) -> list[Standing]:
    """The policies of one load, best first; policies without a latency last."""
    columns = [
        [cell.over_seeds(partial(latency, name=name, part="mean")) for cell in cells]
        for name in ("ttft_seconds", "tpot_seconds")
    ]
    lowest = [min((found[0] for found in column if found is not None), default=0.0) for column in columns]

    def relative(*found: tuple[float, float, float] | None) -> float | None:
        each = [
            spread[0] / least
            for spread, least in zip(found, lowest, strict=True)
            if spread is not None and least > 0
        ]
        return (each[0] * each[1]) ** 0.5 if len(each) == len(columns) else None

    standings = [Standing(cell, relative(*found)) for cell, *found in zip(cells, *columns, strict=True)]
    return sorted(standings, key=lambda standing: standing.latency or float("inf"))


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
