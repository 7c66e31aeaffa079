"""The result table of `simulate`, studies and reports, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from lmetric_lab.sim.setups import Result
from lmetric_lab.sim.study import Cell, latency

_PARTS = (("mean", "mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("p999", "p99.9"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `better` is -1 if the lowest value is best, 1 if the highest is."""

    title: str
    of: Callable[[Result], float | None]
    scale: float = 1.0
    digits: int = 3
    better: int = -1

    def shows(self, value: float) -> str:
        """The text of a value."""
        scaled = value * self.scale
        return f"{scaled:,.{self.digits if abs(scaled) < 1000 else 0}f}"


def _latencies(name: str, scale: float, digits: int) -> tuple[Column, ...]:
    return tuple(Column(title, partial(latency, name=name, part=p), scale, digits) for p, title in _PARTS)


# Heads, with their columns.
Table = tuple[tuple[str, tuple[Column, ...]], ...]
TABLE: Table = (
    ("TTFT, s", _latencies("ttft_seconds", 1, 3)),
    ("TPOT, ms", _latencies("tpot_seconds", 1e3, 1)),
    ("hits, %", (
        Column("tokens", lambda r: r.figures.hit_ratio, 100, 1, 1),
        Column("blocks", lambda r: r.figures.block_hit_ratio, 100, 1, 1),
    )),
    ("goodput", (
        Column("requests/s", lambda r: r.figures.goodput.requests_per_second, digits=2, better=1),
        Column("tokens/s", lambda r: r.figures.goodput.tokens_per_second, digits=0, better=1),
        Column("share, %", lambda r: r.figures.goodput.share, 100, 1, 1),
    )),
    ("load", (Column("imbalance", lambda r: r.figures.imbalance, digits=2),)),
    ("end to end, s", _latencies("e2e_seconds", 1, 2)),
)  # fmt: skip

# Only with pools, before the last head.
_POOLS = ("pools", (
    Column("least loaded, %", lambda r: r.figures.optimal_assignment_ratio, 100, 1, 1),
    Column("without end", lambda r: float(r.figures.failed) if r.figures.stalled else None, digits=0),
))  # fmt: skip


def _of_programs(title: str, name: str, scale: float = 1.0, digits: int = 1, better: int = -1) -> Column:
    def of(result: Result) -> float | None:
        programs = result.figures.programs
        return None if programs is None else getattr(programs, name)

    return Column(title, of, scale, digits, better)


# Only with programs of several requests, behind the last head.
_PROGRAMS = (
    ("busy time, s", (
        _of_programs("program mean", "busy_mean_seconds"),
        _of_programs("p95", "busy_p95_seconds"),
        _of_programs("user turn mean", "user_turn_busy_mean_seconds"),
        _of_programs("p95", "user_turn_busy_p95_seconds"),
        _of_programs("stretch", "stretch_mean", digits=2),
    )),
    ("programs", (
        _of_programs("recomputed, %", "recomputed_share", 100),
        _of_programs("longest hold, s", "max_hold_seconds"),
        _of_programs("turns/min", "turns_per_minute", better=1),
        _of_programs("JCT mean, s", "jct_mean_seconds"),
    )),
)  # fmt: skip


def table_of(results: Iterable[Result]) -> Table:
    """`TABLE`, with the columns of pools if a result has pools, and of programs if a result has
    programs."""
    results = list(results)
    pools = any(result.figures.decode_policy is not None for result in results)
    table = (*TABLE[:-1], _POOLS, TABLE[-1]) if pools else TABLE
    programs = any(result.figures.programs is not None for result in results)
    return (*table, *_PROGRAMS) if programs else table


@dataclass(frozen=True, slots=True)
class Value:
    """A cell: mean over seeds, half the range ("" for one seed), and whether no other is better."""

    text: str
    half_range: str
    best: bool

    def __str__(self) -> str:
        return f"{self.text} ±{self.half_range}" if self.half_range else self.text


def rows(cells: Sequence[Cell], table: Table = TABLE) -> list[list[Value | None]]:
    """The values of each cell in the order of the table's columns; None: no value."""
    columns = [column for _, below in table for column in below]
    spreads = [[cell.over_seeds(column.of) for column in columns] for cell in cells]
    made: list[list[Value | None]] = []
    for cell, own in zip(cells, spreads, strict=True):
        values: list[Value | None] = []
        for position, column in enumerate(columns):
            found = own[position]
            if found is None:
                values.append(None)
                continue
            mean, least, most = found
            rivals = [other[0] for spread in spreads if (other := spread[position]) is not None]
            gains = [(mean - rival) * column.better for rival in rivals]
            best = min(gains) >= 0 < max(gains)  # none is best if all are equal
            half = column.shows((most - least) / 2) if len(cell.results) > 1 else ""
            values.append(Value(column.shows(mean), half, best))
        made.append(values)
    return made
