"""Reruns the LMETRIC paper's study in the simulator and writes the tables of docs/studies/lmetric.md."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from book import RERUN
from world import World

for _module in ("comparisons", "imbalance", "predictor", "factors", "hotspots", "ours"):
    import_module(_module)  # registers its figures


def world(options: argparse.Namespace) -> World:
    return World(options.traces, seeds=2 if options.quick else options.seeds, quick=options.quick)


if __name__ == "__main__":
    files = "mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz"
    RERUN.main(RERUN.parser(__doc__, seeds=5, traces=files), world)
