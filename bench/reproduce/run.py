"""Reruns the LMETRIC paper's study in the simulator and writes the tables of docs/reproduction.md.

    python bench/reproduce/run.py                 # all figures
    python bench/reproduce/run.py --figure 10     # one, or several: --figure 10,27
    python bench/reproduce/run.py --quick         # small traces from the package, nothing is written
    python bench/reproduce/run.py --render        # the page from the files in results/, --check compares

Each figure writes `results/FIGURE.json`; the page's tables are made of those files alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from book import FIGURES, rendered, to_json
from world import ROOT, World

for _module in ("comparisons", "imbalance", "predictor", "factors", "hotspots", "ours"):
    import_module(_module)  # registers its figures

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "reproduction.md"


def about(world: World) -> dict[str, Any]:
    """What a result was made from."""
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {"commit": told.stdout.strip(), "seeds": len(world.seeds), "quick": world.quick}


def page(text: str, results: Path) -> str:
    """The page with every table between its markers made anew."""

    def filled(match: re.Match[str]) -> str:
        path = results / f"{match[1]}.json"
        if not path.exists():
            sys.exit(f"run.py: no {path}: run it with --figure {match[1]}")
        return f"<!-- figure {match[1]} -->\n\n{rendered(json.loads(path.read_text()))}\n\n<!-- /figure -->"

    return re.sub(r"<!-- figure (\w+) -->.*?<!-- /figure -->", filled, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--figure", help=f"some of {', '.join(FIGURES)} [default: all]")
    parser.add_argument("--seeds", type=int, default=5, help="for tie-breaking and synthetic traces [5]")
    parser.add_argument("--quick", action="store_true", help="two seeds, small traces, two stages")
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", metavar="DIR",
                        help="with mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz")  # fmt: skip
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="elsewhere; the page stays as it is [default: results/ here]",
    )
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
    world = World(options.traces, seeds=2 if options.quick else options.seeds, quick=options.quick)
    try:
        for name in names:
            title, maker = FIGURES[name]
            started, before = time.perf_counter(), world.runs_made
            told = to_json(name, title, maker(world), about(world))
            print(f"\n## {title}\n\n{rendered(told)}", flush=True)
            seconds = time.perf_counter() - started
            print(f"{name}: {world.runs_made - before} runs, {seconds:.1f} s", file=sys.stderr, flush=True)
            if results is not None:
                results.mkdir(parents=True, exist_ok=True)
                path = results / f"{name}.json"
                path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        sys.exit(f"run.py: {error}; --traces DIR says where the traces are")
    finally:
        world.close()


if __name__ == "__main__":
    main()
