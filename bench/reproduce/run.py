"""Reruns the LMETRIC paper's study in the simulator and writes the tables of docs/reproduction.md.

    python bench/reproduce/run.py                 # all figures
    python bench/reproduce/run.py --figure 10     # one, or several: --figure 10,27
    python bench/reproduce/run.py --quick         # small traces from the package, nothing is written
    python bench/reproduce/run.py --render        # the page from the files in results/, --check compares

Each figure writes `results/FIGURE.json`; the page's tables are made of those files alone.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from book import RERUN
from world import World

from rerun import ROOT

for _module in ("comparisons", "imbalance", "predictor", "factors", "hotspots", "ours"):
    import_module(_module)  # registers its figures


def world(options: argparse.Namespace) -> World:
    return World(options.traces, seeds=2 if options.quick else options.seeds, quick=options.quick)


def main() -> None:
    parser = RERUN.parser(__doc__, seeds=5)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", metavar="DIR",
                        help="with mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz")  # fmt: skip
    try:
        RERUN.main(parser, world)
    except OSError as error:
        sys.exit(f"run.py: {error}; --traces DIR says where the traces are")


if __name__ == "__main__":
    main()
