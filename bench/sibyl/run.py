"""Reruns the SIBYL paper's simulations, under three engine models, with its rivals and ablations.

    python bench/sibyl/run.py                    # all figures
    python bench/sibyl/run.py --figure 9,8       # some
    python bench/sibyl/run.py --quick            # 8 decode instances, one seed; nothing is written
    python bench/sibyl/run.py --render           # the page from the files in results/; --check compares

Each figure writes `results/FIGURE.json`; its tables in docs/reproduction.md are made of that.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from world import (
    ABLATIONS,
    LATE,
    LEAST_REQUESTS,
    LENGTHS,
    MAIN,
    POWER_OF_TWO,
    RIVALS,
    ROUND_ROBIN,
    SIBYL,
    Outcome,
    Rival,
    Stage,
    World,
    beyond,
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "reproduction.md"
Row = dict[str, Any]
Maker = Callable[[World], list[Row]]
FIGURES: dict[str, tuple[str, Maker]] = {}


def figure(name: str, title: str) -> Callable[[Maker], Maker]:
    """Registers a function as the maker of a figure."""

    def register(maker: Maker) -> Maker:
        FIGURES[name] = (title, maker)
        return maker

    return register


def row(stage: Stage, rival: Rival, found: Sequence[Outcome]) -> Row:
    """A stage and a rival with its figures, one for each seed."""
    columns = [asdict(outcome) for outcome in found]
    values = {name: [float(f"{column[name]:.5g}") for column in columns] for name in columns[0]}
    return {"stage": stage.label, "policy": rival.label, **values}


def rows(world: World, stages: Iterable[Stage], rivals: Sequence[Rival]) -> list[Row]:
    made = []
    for stage, rival, found in world.all(list(stages), list(rivals)):
        made.append(row(stage, rival, found))
        print(f"{stage.label}: {rival.label}: p99 {made[-1]['p99']}", file=sys.stderr, flush=True)
    return made


@figure("independent", "The stage of the independent simulation (12 requests/s)")
def independent(world: World) -> list[Row]:
    (decodes,) = world.sizes(64)
    stage = Stage("sharegpt-like", "step time", decodes, None, rate=12 * decodes / 64)
    return rows(world, [stage], [*RIVALS, *LATE, *beyond()])


@figure("9", "Figure 9 and Table 1: 64 decode instances")
def figure_9(world: World) -> list[Row]:
    # Under the step-time model 0.4 is a batch of 45, about what the memory of an H20 holds.
    loads = {"Eq. 15, held": (0.4, 0.8), "step time": (0.2, 0.4)}
    stages = [
        Stage(lengths, engine, decodes, load)
        for decodes in world.sizes(64)
        for engine in loads
        for lengths in LENGTHS
        for load in (loads[engine][-1:] if world.quick else loads[engine])
    ]
    return rows(world, stages, [*MAIN, *beyond()])


LIVES_OF_MANY = 5.0  # pools of hundreds are slow to play, and have more requests to count


@figure("15", "Figure 15 and Table 6: 128 and 256 decode instances")
def figure_15(world: World) -> list[Row]:
    stages = [
        Stage(lengths, "Eq. 15, held", decodes, 0.4, lives=LIVES_OF_MANY)
        for lengths in ("sharegpt-like", "zeta-like")
        for decodes in world.sizes(128, 256)
    ]
    return rows(world, stages, [*MAIN, *beyond()])


@figure("8", "Figure 8: ablations")
def figure_8(world: World) -> list[Row]:
    stages = [
        Stage("sharegpt-like", engine, decodes, 0.4)
        for decodes in world.sizes(64)
        for engine in ("Eq. 15, held", "step time")
    ]
    return rows(world, stages, ABLATIONS)


@figure("printed", "Eq. (15) as printed: engines past 105 requests stand still")
def as_printed(world: World) -> list[Row]:
    stages = [
        Stage("sharegpt-like", "Eq. 15, as printed", decodes, load)
        for decodes in world.sizes(64)
        for load in (0.4, 0.8)
    ]
    return rows(world, stages, MAIN)


@figure("light", "A load so light that most instances are idle: where Table 1's ratios can come from")
def light(world: World) -> list[Row]:
    stages = [
        Stage("sharegpt-like", "Eq. 15, held", decodes, load)
        for decodes in world.sizes(64)
        for load in ((0.02,) if world.quick else (0.005, 0.02, 0.1))
    ]
    return rows(world, stages, MAIN)


@figure("queues", "Real prefill queues under LMETRIC, KV at 50 GB/s, Poisson and bursty arrivals")
def queues(world: World) -> list[Row]:
    made = []
    for decodes in world.sizes(64):
        for arrivals in ("poisson", "3"):
            stage = Stage("zeta-like", "step time", decodes, 0.4, arrivals=arrivals)
            real = {
                "policy": "lmetric", "roles": {"prefill": decodes // 8, "decode": decodes},
                "prefill": "queues", "transfer": "50",
            }  # fmt: skip
            for rival in [*MAIN, *LATE, *beyond()]:
                made.append(row(stage, rival, world.outcomes(stage, rival, **real)))
                print(f"{stage.label}: {rival.label}: p99 {made[-1]['p99']}", file=sys.stderr, flush=True)
    return made


@figure(
    "plus", "sibyl_plus: batches that the memory of an engine would hold no more, where rules differ most"
)
def plus(world: World) -> list[Row]:
    stages = [
        Stage(lengths, "step time", decodes, 0.7)
        for decodes in world.sizes(32)
        for lengths in (LENGTHS[:1] if world.quick else LENGTHS)
    ]
    return rows(world, stages, [LEAST_REQUESTS, POWER_OF_TWO, ROUND_ROBIN, SIBYL, *beyond()])


# -- files and the page --------------------------------------------------------------------------------------


def rendered(told: dict[str, Any]) -> str:
    """A figure's part of the page: a table for each stage."""
    parts = []
    for stage in dict.fromkeys(each["stage"] for each in told["rows"]):
        here = [each for each in told["rows"] if each["stage"] == stage]
        tails = [np.mean(each["p99"]) for each in here]
        best = min(tails) if max(tails) > min(tails) * 1.001 else 0.0  # none, where all are equal
        head = ["decode policy", "TPOT mean, ms", "p50", "p99", "p99.9", "least loaded, %", "batch"]
        stuck = any(max(each["without_end"]) > 0 for each in here)
        lines = [head + (["without end, %"] if stuck else [])]
        lines.append(["---"] * len(lines[0]))
        for each in here:
            cells = [spread(each[name]) for name in ("mean", "p50", "p99", "p999")]
            if np.mean(each["p99"]) <= best * 1.001:
                cells[2] = f"**{cells[2]}**"
            cells += [spread(each["least_loaded"], 100), spread(each["batch"])]
            lines.append([each["policy"], *cells, *([spread(each["without_end"], 100)] if stuck else [])])
        requests = int(np.mean(here[0]["requests"]))
        parts.append(f"{stage} ({requests:,} requests counted):\n\n" + "\n".join(map(_line, lines)))
    parts.append(f"{told['seeds']} seeds, at commit {told['commit']}.")
    return "\n\n".join(parts)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def spread(found: Sequence[float], scale: float = 1) -> str:
    """``mean ±half the range`` over seeds."""
    half = (max(found) - min(found)) / 2 * scale
    text = f"{np.mean(found) * scale:.1f}"
    return f"{text} ±{half:.1f}" if len(found) > 1 else text


def page(text: str, results: Path) -> str:
    """The page with every table between its markers made anew."""

    def filled(match: re.Match[str]) -> str:
        path = results / f"{match[1]}.json"
        if not path.exists():
            sys.exit(f"run.py: no {path}: run it with --figure {match[1]}")
        return f"<!-- sibyl {match[1]} -->\n\n{rendered(json.loads(path.read_text()))}\n\n<!-- /sibyl -->"

    return re.sub(r"<!-- sibyl (\w+) -->.*?<!-- /sibyl -->", filled, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--figure", help=f"some of {', '.join(FIGURES)} [default: all]")
    parser.add_argument("--seeds", type=int, default=2, help="for arrivals, lengths and ties [2]")
    parser.add_argument("--quick", action="store_true", help="8 decode instances, one seed")
    parser.add_argument("--results", type=Path, metavar="DIR", help="elsewhere; the page stays as it is")
    parser.add_argument("--render", action="store_true", help="only make the page from the results")
    parser.add_argument("--check", action="store_true", help="fail if the page is not what the results make")
    options = parser.parse_args(argv)
    results = options.results or HERE / "results"
    if options.check:
        text = PAGE.read_text()
        sys.exit(f"run.py: {PAGE} is stale: --render" if page(text, results) != text else 0)
    if not options.render:
        names = options.figure.split(",") if options.figure else list(FIGURES)
        if unknown := [name for name in names if name not in FIGURES]:
            parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
        make(names, options, None if options.quick and not options.results else results)
    if options.render or not (options.quick or options.results):
        PAGE.write_text(page(PAGE.read_text(), results))


def make(names: list[str], options: argparse.Namespace, results: Path | None) -> None:
    world = World(quick=options.quick, seeds=1 if options.quick else options.seeds)
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    for name in names:
        title, maker = FIGURES[name]
        started = time.perf_counter()
        about = {"commit": told.stdout.strip(), "seeds": len(world.seeds), "quick": world.quick}
        made = {"figure": name, "title": title, **about, "rows": maker(world)}
        print(f"\n## {title}\n\n{rendered(made)}", flush=True)
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        if results is not None:
            results.mkdir(parents=True, exist_ok=True)
            (results / f"{name}.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
