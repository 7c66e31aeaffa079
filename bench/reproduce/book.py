"""Claims, tables and figures: what a reproduction says, as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from world import World

from rerun import Rerun, markdown

Expected = Literal["less", "more", "about 0", ""]
NEAR = 0.03  # what "about 0" allows
MARKS = {"same": "✓", "opposite": "**✗**", "other": "**✗**", "not told apart": "~", "": ""}
MATTERS = 0.01  # smaller changes are told from nothing by no one


@dataclass
class Ours:
    """Our figure on one stage: a value for each seed."""

    stage: str
    values: list[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def verdict(self, expected: Expected) -> str:
        """Whether every seed agrees with the sign that the paper's claim has."""
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
    """A claim of the paper: `paper` is its figure, `ours` ours, as changes (0.1: 10% more) or as levels."""

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
        """``-42.7% [-43.7, -42.1] ✓``: mean, least and most, verdict."""
        unit = {"ratio": "", "points": " points"}.get(self.unit, "%")
        told = self.shown(one.mean) + unit
        if len(set(one.values)) > 1:
            told += f" [{self.shown(min(one.values))}, {self.shown(max(one.values))}]"
        return f"{told} {MARKS[one.verdict(self.expected)]}".strip()


@dataclass
class Table:
    """Figures beside each other; cells are text."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass
class Made:
    """What a figure's function makes."""

    claims: list[Claim] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def figure(name: str, title: str) -> Callable[[Callable[[World], Made]], object]:
    """Registers a function as the maker of a figure."""

    def register(maker: Callable[[World], Made]) -> Callable[[World], Made]:
        RERUN.figure(name, title)(lambda world: to_json(maker(world)))
        return maker

    return register


def to_json(made: Made) -> dict[str, Any]:
    told: dict[str, Any] = asdict(made)
    for claim in told["claims"]:
        for ours in claim["ours"]:
            ours["values"] = [float(f"{value:.5g}") for value in ours["values"]]
    return told


def from_json(told: dict[str, Any]) -> Made:
    claims = [Claim(**{**c, "ours": [Ours(**ours) for ours in c["ours"]]}) for c in told["claims"]]
    return Made(claims, [Table(**table) for table in told["tables"]])


def rendered(told: dict[str, Any]) -> str:
    """A figure's part of the page."""
    made = from_json(told)
    by_stages: dict[tuple[str, ...], list[Claim]] = {}
    for claim in made.claims:
        by_stages.setdefault(tuple(one.stage for one in claim.ours), []).append(claim)
    parts = [
        markdown(
            ["claim", "paper", *stages],
            ([claim.text, claim.paper, *map(claim.cell, claim.ours)] for claim in claims),
        )
        for stages, claims in by_stages.items()
    ]
    shown = [f"{table.title}\n\n{markdown(table.head, table.rows)}".strip() for table in made.tables]
    if made.claims and shown:
        shown = ["<details><summary>All figures</summary>", *shown, "</details>"]
    return "\n\n".join(parts + shown)


RERUN = Rerun(Path(__file__).parent, "figure", rendered)
