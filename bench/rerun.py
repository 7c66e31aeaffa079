"""Drivers of the studies: each figure is simulated, stored in `results`, and rendered into a
page."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml
from scipy.special import stdtrit  # scipy.stats takes 0.7 s more to import

from common import ROOT
from common import commit as git_commit
from result_files import paths_of, read_figure, read_index, write_figure
from shown import select

PAGES = ROOT / "docs" / "research"
Told = dict[str, Any]
Stage, Rival, Outcome = TypeVar("Stage"), TypeVar("Rival"), TypeVar("Outcome")
SEEDS = ("seeds", "first_seed")
HOW = """Each figure is stored as CSV in results; docs/research shows its tables."""


def spread(found: Sequence[float], scale: float = 1, digits: int = 2) -> str:
    """``mean ±half the range`` over seeds."""
    half = (max(found) - min(found)) / 2 * scale
    text = f"{np.mean(found) * scale:.{digits}f}"
    return f"{text} ±{half:.{digits}f}" if len(found) > 1 else text


def bounds(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two figures over the seeds that both have: geometric mean, 95% bounds by
    Student's t."""
    both = min(len(ours), len(theirs))
    logs = np.log(np.asarray(ours[:both]) / np.asarray(theirs[:both]))
    half = 0.0
    if len(logs) > 1:
        quantile = stdtrit(len(logs) - 1, 0.975)
        half = float(quantile * logs.std(ddof=1) / np.sqrt(len(logs)))
    mean = float(logs.mean())
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def change(ours: Sequence[float], theirs: Sequence[float], *, with_bounds: bool = False) -> str:
    """Returns the relative change over the seeds, in percent; with its bounds if there are any."""
    mean, low, high = ((each - 1) * 100 for each in bounds(ours, theirs))
    return f"{mean:+.1f}% [{low:+.1f}, {high:+.1f}]" if with_bounds and len(ours) > 1 else f"{mean:+.1f}%"


def columns(found: Sequence[Any], digits: int = 4) -> dict[str, list[float]]:
    """Returns a dict with a list per figure from the results of some seeds (dataclasses or
    dicts)."""
    each = [one if isinstance(one, dict) else asdict(one) for one in found]
    return {name: [float(f"{float(one[name]):.{digits}g}") for one in each] for name in each[0]}


def grouped(rows: Iterable[Told], by: str) -> dict[str, list[Told]]:
    """Returns rows with the same `by`, in their order."""
    groups: dict[str, list[Told]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    return groups


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_traces: Path | None = None


def traces() -> Path:
    """Returns the traces' folder, in a `Pool` and its workers."""
    if _traces is None:
        raise RuntimeError("no folder of traces: make a Pool first")
    return _traces


def _use(folder: Path) -> None:
    global _traces
    _traces = folder


class Pool:
    """A study's scenarios that run in processes, one per core."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.quick: bool = options.quick
        self.seeds = range(options.first_seed, options.first_seed + (1 if self.quick else options.seeds))
        _use(options.traces)
        cores = len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(cores, initializer=_use, initargs=(options.traces,))

    def close(self) -> None:
        """Ends the workers."""
        self._pool.shutdown(cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Starts a job in a worker."""
        return self._pool.submit(function, *arguments)

    def each(
        self,
        function: Callable[..., Any],
        cases: Iterable[tuple[Any, ...]],
        most_seeds: Callable[..., int | None] = lambda *_: None,
    ) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
        """Runs every case with `function(*case, seed)` for each seed, or for the first
        `most_seeds(*case)`. Jobs start at once and results come in order."""
        begun = [
            (case, [self.submit(function, *case, seed) for seed in self.seeds[: most_seeds(*case)]])
            for case in cases
        ]
        for case, jobs in begun:
            yield case, [job.result() for job in jobs]

    def all(
        self,
        play: Callable[[Stage, Rival, int], Outcome],
        stages: Iterable[Stage],
        rivals: Iterable[Rival],
        most_seeds: Callable[[Stage], int | None] = lambda _: None,
    ) -> Iterator[tuple[Stage, Rival, list[Outcome]]]:
        """Runs every rival on every scenario: `play(stage, rival, seed)` for each seed, or for the
        first `most_seeds(stage)`."""
        cases = product(stages, rivals)
        for (stage, rival), found in self.each(play, cases, lambda stage, _: most_seeds(stage)):
            yield stage, rival, found


@dataclass
class Rerun:
    """The figures of a study.

    `page` is the name of the study's page in `docs/research`. A figure is between
    `<!-- figure NAME -->` and `<!-- /figure -->`; the first marker may choose rows (`shown`).

    A maker takes the study's scenarios (with `seeds`, `quick`, `close`) and returns the figure's
    tables, as `result_files` stores them. `rendered` makes Markdown of them.
    """

    folder: Path
    page: str
    rendered: Callable[[Told], str]
    figures: dict[str, tuple[str, Callable[[Any], Told]]] = field(default_factory=dict)

    def figure(self, name: str, title: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Registers a function as the maker of a figure."""

        def register(maker: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self.figures[name] = (title, maker)
            return maker

        return register

    def parser(self, about: str | None, *, seeds: int, traces: str) -> argparse.ArgumentParser:
        """Returns the arguments of all drivers; `traces` names the files that are read."""
        parser = argparse.ArgumentParser(
            description=about, epilog=HOW, formatter_class=argparse.RawTextHelpFormatter
        )
        parser.add_argument("--figure", help=f"some of {', '.join(self.figures)} [default: all]")
        parser.add_argument("--seeds", type=int, help=f"how many [as many as are stored, else {seeds}]")
        parser.set_defaults(usual_seeds=seeds)
        parser.add_argument("--quick", action="store_true", help="few seeds, small; nothing is written")
        folder = ROOT.parent / "shared" / "traces"
        parser.add_argument("--traces", type=Path, default=folder, metavar="DIR", help=f"with {traces}")
        parser.add_argument(
            "--results", type=Path, metavar="DIR", help="another folder for results; the page stays unchanged"
        )
        parser.add_argument("--render", action="store_true", help="only render the page from the results")
        parser.add_argument("--check", action="store_true", help="fail if the page differs from the results")
        return parser

    def main_of_pool(self, about: str | None, world: type[Pool], *, seeds: int, traces: str) -> None:
        """Runs `main` of a study that is played in processes."""
        parser = self.parser(about, seeds=seeds, traces=traces)
        parser.add_argument("--first-seed", type=int, help="[the stored one, else 0]")
        self.main(parser, world)

    def main(self, parser: argparse.ArgumentParser, world: Callable[[argparse.Namespace], Any]) -> None:
        """Runs the driver; `world` is called only if figures are made."""
        options = parser.parse_args()
        results = options.results or self.folder / "results"
        page = PAGES / self.page
        shipped = not (options.quick or options.results or getattr(options, "scenario", None))
        if options.check:
            text = page.read_text()
            sys.exit(f"run.py: {page} is stale: --render" if self.filled(text, results) != text else 0)
        if not options.render:
            names = options.figure.split(",") if options.figure else list(self.figures)
            if unknown := [name for name in names if name not in self.figures]:
                parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(self.figures)}")
            try:
                for seeds, some in self._by_seeds(names, options).items():
                    of = argparse.Namespace(**vars(options) | dict(zip(SEEDS, seeds, strict=True)))
                    self._make(some, world(of), results if options.results or shipped else None)
            except FileNotFoundError as error:
                sys.exit(f"run.py: {error}; set --traces DIR to the folder of the traces")
        if options.render or shipped:
            page.write_text(self.filled(page.read_text(), results))

    def filled(self, text: str, results: Path) -> str:
        """Returns the page with every figure rendered from its results."""
        known = read_index(results)

        def part(match: re.Match[str]) -> str:
            name = match[1]
            if name not in known:
                sys.exit(f"run.py: {results} has no figure {name}: run it with --figure {name}")
            told = read_figure(results, name)
            stored = self.folder.relative_to(ROOT) / "results"
            file = paths_of(results, name)[0].name
            first = f" from {told['first_seed']} on" if told["first_seed"] else ""
            values = f"[{file}](../../{stored}/{file})"
            origin = f"{told['seeds']} seeds{first}, at commit {told['commit']}; all values: {values}."
            chosen = yaml.safe_load(match[2] or "{}")
            shown = select(self.rendered(told), chosen, f"{self.page}, figure {name}")
            begin = match[0].partition("\n")[0]
            return f"{begin}\n\n{shown}\n\n{origin}\n\n<!-- /figure -->"

        figure = r"<!-- figure (\w+)(?: (\{.*?\}))? -->.*?<!-- /figure -->"
        return re.sub(figure, part, text, flags=re.DOTALL)

    def _by_seeds(self, names: list[str], options: argparse.Namespace) -> dict[tuple[int, ...], list[str]]:
        """Returns the figures by number of seeds and first seed: the requested values, else those
        of the stored figure."""
        results = self.folder / "results"
        stored = read_index(results) if results.exists() and not options.quick else {}
        usual = {"seeds": options.usual_seeds, "first_seed": 0}
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            asked = {each: value for each in SEEDS if (value := vars(options).get(each)) is not None}
            told = usual | stored.get(name, {}) | asked
            groups.setdefault(tuple(told[each] for each in SEEDS), []).append(name)
        return groups

    def _make(self, names: list[str], world: Any, results: Path | None) -> None:
        commit = git_commit()  # of the loaded code: files may change while a figure is made
        try:
            for name in names:
                title, maker = self.figures[name]
                started = time.perf_counter()
                about = {"commit": commit, "seeds": len(world.seeds), "first_seed": world.seeds[0]}
                about["quick"] = world.quick
                told = {"figure": name, "title": title, **about, **maker(world)}
                print(f"\n## {title}\n\n{self.rendered(told)}", flush=True)
                print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
                if results is not None:
                    write_figure(told, results)
        finally:
            world.close()
