"""Renders the verdicts in the pages of `docs/research`.

    python bench/verdicts.py            # writes the pages
    python bench/verdicts.py --check    # fails if a page differs from the results

Each study has two sources. `bench/STUDY/verdicts.md` holds the text; a field such as
`{linear_ttft:+.0%}` is Python's format syntax. In `bench/STUDY/verdict_figures.py`, `figures(raw)`
reads the results and returns the value of each field, and `WRITTEN` lists the numbers that a person
may write: settings and figures of the paper. Any other number is an error, except in backquotes and
in the columns `claim` and `paper` of a table.

The table of claims stands between `<!-- verdicts STUDY -->` and `<!-- /verdicts -->`. Text after a
line `<!-- part NAME -->` in `verdicts.md` stands between `<!-- verdicts STUDY NAME -->` and `<!--
/verdicts -->`.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from string import Formatter
from types import ModuleType
from typing import Any

import numpy as np

from common import ROOT
from rerun import bounds
from result_files import read_figure, read_index

# `verdict_figures.py` imports this module by this name.
sys.modules.setdefault("verdicts", sys.modules[__name__])

DOCS = ROOT / "docs" / "research"
STUDIES = ("reproduce", "sibyl", "libra", "star", "uniboost")
MARKED = re.compile(r"(<!-- verdicts (\w+)(?: (\w+))? -->\n).*?(\n<!-- /verdicts -->)", re.DOTALL)
PART = re.compile(r"^<!-- part (\w+) -->\n", re.MULTILINE)
Row = dict[str, Any]


class Span:
    """Several values, formatted as the smallest and the largest in size: `12 to 37%`; as one value
    if they agree."""

    def __init__(self, values: Iterable[float]) -> None:
        found = sorted(float(value) for value in values)
        if not found:
            raise ValueError("no values to quote")
        one_sign = found[0] >= 0 or found[-1] <= 0
        self.values = sorted(found, key=abs) if one_sign else found

    def __format__(self, spec: str) -> str:
        first, last = format(self.values[0], spec), format(self.values[-1], spec)
        if first == last:
            return last
        return f"{first.removesuffix('%') if last.endswith('%') else first} to {last}"


def mean(values: Sequence[float]) -> float:
    """Returns the mean over seeds."""
    return float(np.mean(values))


class Scenarios:
    """Rows of a figure, by scenario and by rival."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: dict[str, dict[str, Row]] = {}
        for row in rows:
            stage = next(row[key] for key in ("stage", "group") if key in row)
            rival = next(row[key] for key in ("policy", "system", "order") if key in row)
            self.rows.setdefault(stage, {})[rival] = row

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def of(self, *parts: str) -> Scenarios:
        """Returns the scenarios whose name contains all parts."""
        return self._where(lambda name: all(part in name for part in parts), f"with {parts}")

    def without(self, *parts: str) -> Scenarios:
        """Returns the scenarios whose name contains none of the parts."""
        return self._where(lambda name: not any(part in name for part in parts), f"without {parts}")

    def __or__(self, other: Scenarios) -> Scenarios:
        """Returns the scenarios of both."""
        both = Scenarios([])
        both.rows = self.rows | other.rows
        return both

    def _where(self, keeps: Callable[[str], bool], what: str) -> Scenarios:
        chosen = Scenarios([])
        chosen.rows = {name: rows for name, rows in self.rows.items() if keeps(name)}
        if not chosen.rows:
            raise KeyError(f"no scenario {what}; there are {list(self.rows)}")
        return chosen

    def row(self, rival: str) -> Row:
        """Returns the row of a rival, in the only scenario."""
        (rows,) = self.rows.values()
        return rows[full_name(rival, rows)]

    def mean(self, rival: str, name: str) -> float:
        """Returns a figure of a rival in the only scenario."""
        return mean(self.row(rival)[name])

    def each(self, rival: str, name: str) -> list[float]:
        """Returns a figure of a rival in each scenario."""
        return [mean(rows[full_name(rival, rows)][name]) for rows in self.rows.values()]

    def ratios(self, rival: str, base: str, name: str) -> list[float]:
        """Returns a figure of a rival over another's in each scenario: mean ratio of the seeds that
        both have."""
        found = []
        for rows in self.rows.values():
            ours, theirs = (rows[full_name(each, rows)][name] for each in (rival, base))
            found.append(bounds(ours, theirs)[0])
        return found

    def ratio(self, rival: str, base: str, name: str) -> float:
        """Returns a figure of a rival over another's, in the only scenario."""
        (one,) = self.ratios(rival, base, name)
        return one


def full_name(rival: str, rows: Mapping[str, Row]) -> str:
    """Returns a rival's full name, from its name or the beginning of its name if that is unique."""
    found = [rival] if rival in rows else [name for name in rows if name.startswith(rival)]
    if len(found) != 1:
        raise KeyError(f"{rival!r} names {found or 'nothing'}; there are {list(rows)}")
    return found[0]


class Played:
    """Runs on real engines: the rows of files that benchmarks wrote. Equal seeds of several files
    are several runs."""

    def __init__(self, *paths: Path) -> None:
        self._rows = []
        for number, path in enumerate(paths):
            with path.open() as file:
                self._rows += [row | {"seed": f"{row['seed']}/{number}"} for row in csv.DictReader(file)]

    def values(self, name: str, measure: str, side: str = "live") -> dict[str, float]:
        """Returns a measure of an order or a system, by seed."""
        found = {
            row["seed"]: float(row[measure])
            for row in self._rows
            if (row.get("order", row.get("system")), row["side"]) == (name, side)
        }
        if not found:
            raise KeyError(f"no {side} run of {name!r}")
        return found

    def mean(self, name: str, measure: str, side: str = "live") -> float:
        """Returns the mean of a measure over the seeds."""
        return mean(list(self.values(name, measure, side).values()))

    def changes(self, name: str, base: str, measure: str, side: str = "live") -> Span:
        """Returns the change of a measure against another order's, by the seeds that both have."""
        ours, theirs = (self.values(each, measure, side) for each in (name, base))
        return Span(ours[seed] / theirs[seed] - 1 for seed in ours.keys() & theirs.keys())

    def change(self, name: str, base: str, measure: str) -> float:
        """Returns the median of `changes` in live runs."""
        return float(np.median(self.changes(name, base, measure).values))


@dataclass
class Raw:
    """The results of a study."""

    folder: Path

    def __call__(self, figure: str) -> dict[str, Any]:
        """Returns a figure's tables."""
        return read_figure(self.folder, figure)

    def scenarios(self, *figures: str) -> Scenarios:
        """Returns the rows of one or more figures."""
        return Scenarios(row for figure in figures for row in self(figure)["rows"])

    def bench(self, kind: str) -> dict[str, Any]:
        """Returns the newest raw file of a kind in `bench/results`."""
        path = sorted((ROOT / "bench" / "results").glob(f"*-{kind}.json"))[-1]
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded

    def played(self, *names: str) -> Played:
        """Returns the runs on real engines in files of `bench/engine_schedulers/real`."""
        return Played(*(ROOT / "bench" / "engine_schedulers" / "real" / f"{name}.csv" for name in names))


def module(study: str) -> ModuleType:
    """Loads `verdict_figures.py` of a study."""
    spec = spec_from_file_location(f"verdict_figures_{study}", ROOT / "bench" / study / "verdict_figures.py")
    if spec is None or spec.loader is None:
        raise ImportError(study)
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def results_of(study: str) -> Path:
    """Returns the folder with a study's results."""
    return ROOT / "bench" / study / "results"


def render(study: str, results: Callable[[str], Path] = results_of) -> dict[str | None, str]:
    """Returns the parts of a study's verdicts, by name, with every field filled from the
    results."""
    source_module = module(study)
    source = ROOT / "bench" / study / "verdicts.md"
    template = source.read_text()
    figures: dict[str, object] = source_module.figures(Raw(results(study)))
    refuse_written_numbers(PART.sub("", template), source_module.WRITTEN, source)
    fields = {re.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name}
    if wrong := fields ^ set(figures):
        where = "verdicts.md and verdict_figures.py do not name the same figures"
        sys.exit(f"verdicts.py: {study}: {where}: {', '.join(sorted(wrong))}")
    first, *others = PART.split(template.format_map(figures))
    return {None: first.strip()} | {
        name: text.strip() for name, text in zip(others[::2], others[1::2], strict=True)
    }


def refuse_written_numbers(template: str, written: Sequence[str], source: Path) -> None:
    """Exits if an outcome has a number that is not in `written`, or if `written` has an unused
    number."""
    unused = set(written)
    for line in template.splitlines():
        text = line.split(" | ", 2)[-1] if line.startswith("| ") else line
        literal = "".join(f"{before}\0" for before, *_ in Formatter().parse(text))
        literal = re.sub(r"\]\([^)]*\)|`[^`]*`", "", literal)  # Remove addresses of links and names in code.
        for allowed in sorted(written, key=len, reverse=True):
            literal, count = re.subn(rf"(?<![\d.,]){re.escape(allowed)}(?!\d|[.,]\d)", "", literal)
            unused -= {allowed} if count else set()
        if found := re.findall(r"[\d.,]*\d", literal):
            told = (
                "a number of a run belongs into figures() of verdict_figures.py, a setting into its WRITTEN"
            )
            sys.exit(f"verdicts.py: {source}: {', '.join(found)} in {line[:60]!r}...: {told}")
    if unused:
        sys.exit(
            f"verdicts.py: {source} does not hold {', '.join(sorted(unused))} of WRITTEN: remove it there"
        )


def ages(results: Callable[[str], Path]) -> str:
    """Returns the commits of the figures, by study."""
    lines = ["| study | commits of the code that ran (number of figures) |", "| --- | --- |"]
    for study in (*STUDIES, "planner"):
        commits = Counter(told["commit"] for told in read_index(results(study)).values())
        told = ", ".join(f"{commit} ({number})" for commit, number in sorted(commits.items()))
        lines.append(f"| `bench/{study}` | {told} |")
    return "\n".join(lines)


def pages_in(docs: Path) -> dict[Path, str]:
    """Returns the pages that hold verdicts, by path in the documentation's folder."""
    return {path.relative_to(docs): path.read_text() for path in sorted(docs.glob("*.md"))}


def render_pages(pages: Mapping[Path, str], results: Callable[[str], Path] = results_of) -> dict[Path, str]:
    """Returns the pages with all verdicts rendered again."""
    made: dict[tuple[str, str | None], str] = {("ages", None): ages(results)}
    for study in STUDIES:
        made |= {(study, name): part for name, part in render(study, results).items()}
    found = Counter((match[2], match[3]) for text in pages.values() for match in MARKED.finditer(text))
    if wrong := {part for part in found.keys() | made.keys() if found[part] != 1 or part not in made}:
        names = sorted(" ".join(filter(None, part)) for part in wrong)
        sys.exit(f"verdicts.py: the pages and the sources must each have once: {', '.join(names)}")

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{made[match[2], match[3]]}\n{match[4]}"

    return {path: MARKED.sub(part, text) for path, text in pages.items()}


def main() -> None:
    """Renders or checks the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="another folder of pages")
    parser.add_argument("--results", type=Path, metavar="DIR", help="results of each study in DIR/STUDY")
    options = parser.parse_args()
    before = pages_in(options.docs)
    results = results_of if options.results is None else lambda study: options.results / study
    for path, new in render_pages(before, results).items():
        old = before[path]
        if not options.check:
            (options.docs / path).write_text(new)
        elif old != new:
            pairs = zip(old.splitlines(), new.splitlines(), strict=False)
            line = next((f"{a!r}, the results make {b!r}" for a, b in pairs if a != b), "its length differs")
            sys.exit(f"verdicts.py: {options.docs / path} is stale, run bench/verdicts.py: {line}")


if __name__ == "__main__":
    main()
