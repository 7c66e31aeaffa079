"""The default against LMETRIC where no agents are: recorded and synthetic chats, by load.

    python bench/reproduce/chats.py --traces FOLDER --seeds 2

Loads are shares of the load that LMETRIC sustains on the trace, with 16 instances. FOLDER has
mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from world import DEFAULT, LMETRIC, World, change

LOADS = (0.3, 0.5, 0.7, 0.9, 0.95)
WORKLOADS = ("conversation", "azure", "chat", "agent", "coder")
OF_THE_PAPER = replace(LMETRIC, settings={"guard": None})
FIGURES = ("e2e_mean", "ttft_mean", "ttft_p99", "tpot_mean")


def main() -> None:
    """Prints a row per workload and load: changes in percent, mean and range over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    options = parser.parse_args()
    world = World(options.traces, seeds=options.seeds, quick=False)
    print("| workload | load | mean end to end | mean TTFT | P99 TTFT | mean TPOT |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for label in options.workloads.split(","):
        stage = world.stage(label)
        for load in LOADS:
            ours, theirs = world.many(stage, [DEFAULT, OF_THE_PAPER], fraction=load)
            cells = []
            for name in FIGURES:
                each = np.array(change(ours, theirs, name)) * 100
                cells.append(f"{each.mean():+.1f}% ({each.min():+.1f}, {each.max():+.1f})")
            print(f"| {label} | {load:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
