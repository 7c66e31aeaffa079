"""A paper's simulations rerun, figure by figure: each figure makes `results/FIGURE.json`, and its part of
docs/reproduction.md is made of that file alone."""

from __future__ import annotations

import argparse
import json
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
from scipy import stats

from common import ROOT
from common import commit as git_commit

PAGE = ROOT / "docs" / "reproduction.md"
Told = dict[str, Any]
Stage, Rival, Outcome = TypeVar("Stage"), TypeVar("Rival"), TypeVar("Outcome")
HOW = """Each figure makes results/FIGURE.json, its tables in docs/reproduction.md are made of that."""


def spread(found: Sequence[float], scale: float = 1, digits: int = 2) -> str:
    """``mean ±half the range`` over seeds."""
    half = (max(found) - min(found)) / 2 * scale
    text = f"{np.mean(found) * scale:.{digits}f}"
    return f"{text} ±{half:.{digits}f}" if len(found) > 1 else text


def bounds(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two figures over the seeds that both have: geometric mean, 95% bounds by Student's t."""
    both = min(len(ours), len(theirs))
    logs = np.log(np.asarray(ours[:both]) / np.asarray(theirs[:both]))
    half = 0.0
    if len(logs) > 1:
        half = float(stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    mean = float(logs.mean())
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def columns(found: Sequence[Any], digits: int = 4) -> dict[str, list[float]]:
    """What came of some seeds (dataclasses or dicts), turned into a list for each figure."""
    each = [one if isinstance(one, dict) else asdict(one) for one in found]
    return {name: [float(f"{float(one[name]):.{digits}g}") for one in each] for name in each[0]}


def grouped(rows: Iterable[Told], by: str) -> dict[str, list[Told]]:
    """Rows that have the same `by`, in the order in which they came."""
    groups: dict[str, list[Told]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    return groups


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_traces: Path | None = None


def traces() -> Path:
    """The folder of the traces, in a `Pool` and its workers."""
    if _traces is None:
        raise RuntimeError("a Pool says where the traces are")
    return _traces


def _use(folder: Path) -> None:
    global _traces
    _traces = folder


class Pool:
    """A study's world that plays its runs in processes, as many at once as there are cores."""

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
        """A job of a worker."""
        return self._pool.submit(function, *arguments)

    def each(
        self,
        function: Callable[..., Any],
        cases: Iterable[tuple[Any, ...]],
        most_seeds: Callable[..., int | None] = lambda *_: None,
    ) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
        """Every case with `function(*case, seed)` of each seed, or of the first `most_seeds(*case)`: all are
        begun at once, and come in order."""
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
        """Every rival on every stage: one outcome of `play(stage, rival, seed)` for each seed, or for the
        first `most_seeds(stage)`."""
        cases = product(stages, rivals)
        for (stage, rival), found in self.each(play, cases, lambda stage, _: most_seeds(stage)):
            yield stage, rival, found


@dataclass
class Rerun:
    """The figures of a study. `marker` is what its parts of the page stand between; a maker takes the study's
    world (with `seeds`, `quick`, `close`) and gives what its JSON file holds beside its name and origin;
    `rendered` makes Markdown of that."""

    folder: Path
    marker: str
    rendered: Callable[[Told], str]
    figures: dict[str, tuple[str, Callable[[Any], Told]]] = field(default_factory=dict)

    def figure(self, name: str, title: str) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Registers a function as the maker of a figure."""

        def register(maker: Callable[[Any], Any]) -> Callable[[Any], Any]:
            self.figures[name] = (title, maker)
            return maker

        return register

    def parser(self, about: str | None, *, seeds: int, traces: str) -> argparse.ArgumentParser:
        """What all drivers take; `traces` names the files that are read."""
        parser = argparse.ArgumentParser(
            description=about, epilog=HOW, formatter_class=argparse.RawTextHelpFormatter
        )
        parser.add_argument("--figure", help=f"some of {', '.join(self.figures)} [default: all]")
        parser.add_argument(
            "--seeds", type=int, default=seeds, help=f"for arrivals, lengths and ties [{seeds}]"
        )
        parser.add_argument("--quick", action="store_true", help="few seeds, small; nothing is written")
        folder = ROOT.parent / "shared" / "traces"
        parser.add_argument("--traces", type=Path, default=folder, metavar="DIR", help=f"with {traces}")
        parser.add_argument("--results", type=Path, metavar="DIR", help="elsewhere; the page stays as it is")
        parser.add_argument("--render", action="store_true", help="only make the page from the results")
        parser.add_argument(
            "--check", action="store_true", help="fail if the page is not what the results make"
        )
        return parser

    def main_of_pool(self, about: str | None, world: type[Pool], *, seeds: int, traces: str) -> None:
        """`main` of a study that is played in processes."""
        parser = self.parser(about, seeds=seeds, traces=traces)
        parser.add_argument("--first-seed", type=int, default=0, help="[0]")
        self.main(parser, world)

    def main(self, parser: argparse.ArgumentParser, world: Callable[[argparse.Namespace], Any]) -> None:
        """Does what was asked for; `world` is made where figures are."""
        options = parser.parse_args()
        results = options.results or self.folder / "results"
        if options.check:
            text = PAGE.read_text()
            sys.exit(f"run.py: {PAGE} is stale: --render" if self.page(text, results) != text else 0)
        if not options.render:
            names = options.figure.split(",") if options.figure else list(self.figures)
            if unknown := [name for name in names if name not in self.figures]:
                parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(self.figures)}")
            keeps = options.results is not None or not options.quick
            try:
                self._make(names, world(options), results if keeps else None)
            except FileNotFoundError as error:
                sys.exit(f"run.py: {error}; --traces DIR says where the traces are")
        if options.render or not (options.quick or options.results):
            PAGE.write_text(self.page(PAGE.read_text(), results))

    def page(self, text: str, results: Path) -> str:
        """The page with every part between its markers made anew."""

        def filled(match: re.Match[str]) -> str:
            path = results / f"{match[1]}.json"
            if not path.exists():
                sys.exit(f"run.py: no {path}: run it with --figure {match[1]}")
            told = json.loads(path.read_text())
            origin = f"{told['seeds']} seeds, at commit {told['commit']}."
            return f"<!-- {self.marker} {match[1]} -->\n\n{self.rendered(told)}\n\n{origin}\n\n{end}"

        end = f"<!-- /{self.marker} -->"
        return re.sub(rf"<!-- {self.marker} (\w+) -->.*?{end}", filled, text, flags=re.DOTALL)

    def _make(self, names: list[str], world: Any, results: Path | None) -> None:
        commit = git_commit()  # of the code as it is loaded, not as it may be when a figure is done
        try:
            for name in names:
                title, maker = self.figures[name]
                started = time.perf_counter()
                about = {"commit": commit, "seeds": len(world.seeds), "quick": world.quick}
                told = {"figure": name, "title": title, **about, **maker(world)}
                print(f"\n## {title}\n\n{self.rendered(told)}", flush=True)
                print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
                if results is not None:
                    results.mkdir(parents=True, exist_ok=True)
                    text = json.dumps(told, indent=1, ensure_ascii=False)
                    (results / f"{name}.json").write_text(text + "\n")
        finally:
            world.close()
