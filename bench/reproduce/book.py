"""Claims, tables and figures of a reproduction, as tables and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from world import World

from rerun import Rerun, markdown

Expected = Literal["less", "more", "about 0", ""]
NEAR = 0.03  # what "about 0" allows
MARKS = {"same": "✓", "opposite": "**✗**", "other": "**✗**", "not told apart": "~", "": ""}
MATTERS = 0.01  # smaller changes are not distinguishable from zero


@dataclass
class Ours:
    """Our figure in one scenario: a value per seed."""

    stage: str
    values: list[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def verdict(self, expected: Expected) -> str:
        """Returns whether every seed agrees with the sign of the paper's claim."""
        least, most = min(self.values), max(self.values)
        if not expected:
            return ""
        if expected == "about 0":
            return "same" if abs(self.mean) <= NEAR else "other"
        if expected == "less":
            least, most = -most, -least
        if abs(self.mean) < MATTERS or least <= 0 <= most:
            return "not told apart"
        return "same" if least > 0 else "opposite"


@dataclass
class Claim:
    """A claim of the paper. `paper` is its figure, `ours` ours, as changes (0.1: 10% more) or as
    levels."""

    text: str
    paper: str
    expected: Expected
    ours: list[Ours]
    unit: Literal["change", "share", "ratio", "points"] = "change"

    def shown(self, value: float) -> str:
        if self.unit == "ratio":
            return f"{value:.2f}"
        return f"{100 * value:{'' if self.unit == 'share' else '+'}.1f}"

    def cell(self, one: Ours) -> str:
        """Returns ``-42.7% [-43.7, -42.1] ✓``: mean, least and most, verdict. A dash if there is no
        mean."""
        if np.isnan(one.mean):
            return "–"
        unit = {"ratio": "", "points": " points"}.get(self.unit, "%")
        told = self.shown(one.mean) + unit
        if len(set(one.values)) > 1:
            told += f" [{self.shown(min(one.values))}, {self.shown(max(one.values))}]"
        return f"{told} {MARKS[one.verdict(self.expected)]}".strip()


Row = dict[str, Any]  # text that names the row, and lists with a number per seed


@dataclass
class Made:
    """Result of a figure's function. Without claims, the page shows the table `traces`."""

    claims: list[Claim] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)


def rounded(values: Iterable[float]) -> list[float]:
    """Rounds to five digits."""
    return [float(f"{value:.5g}") for value in values]


def figure(name: str, title: str) -> Callable[[Callable[[World], Made]], object]:
    """Registers a function as the maker of a figure."""

    def register(maker: Callable[[World], Made]) -> Callable[[World], Made]:
        RERUN.figure(name, title)(lambda world: to_tables(maker(world)))
        return maker

    return register


def to_tables(made: Made) -> Row:
    """Returns tables: `claims` has a row per claim, `rows` a row per scenario with a column per
    claim."""
    told: Row = {"claims": []}
    by_stage: dict[str, Row] = {}
    for claim in (claim for claim in made.claims if claim.ours):
        told["claims"].append({name: getattr(claim, name) for name in ("text", "paper", "expected", "unit")})
        for ours in claim.ours:
            by_stage.setdefault(ours.stage, {"stage": ours.stage})[claim.text] = rounded(ours.values)
    return told | {"rows": list(by_stage.values())} | made.tables


def claims_of(told: Row) -> list[Claim]:
    """Returns the claims of a figure with our values."""
    return [
        Claim(**about, ours=[Ours(row["stage"], row[text]) for row in told["rows"] if text in row])
        for about in told.get("claims", [])
        for text in [about["text"]]
    ]


def rendered(told: Row) -> str:
    """Returns a figure's part of the page: its claims, or the table `traces` if it has no
    claims."""
    claims = claims_of(told)
    if not claims and "traces" not in told:
        return "Not simulated: no scenario has prompts that share prefixes."
    if not claims:
        return markdown(list(told["traces"][0]), (list(row.values()) for row in told["traces"]))
    by_stages: dict[tuple[str, ...], list[Claim]] = {}
    for claim in claims:
        by_stages.setdefault(tuple(one.stage for one in claim.ours), []).append(claim)
    parts = [
        markdown(
            ["claim", "paper", *stages],
            ([claim.text, claim.paper, *map(claim.cell, claim.ours)] for claim in same),
        )
        for stages, same in by_stages.items()
    ]
    return "\n\n".join(parts)


RERUN = Rerun(Path(__file__).parent, "lmetric.md", rendered)
