"""Compares the simulator with live emulated engines, on the same trace.

    python bench/trust/run.py [clocks|ranks|all] [--repeats 3] [--quick] [--check] [--docs] [--out
    FILE]

`clocks`: the same placements under two clocks, see clocks.py. `ranks`: the order of policies, and a
control that must lose, see ranks.py. Both together take some 9 minutes; method and figures:
docs/research/trust.md. `--quick` takes half a minute and only shows that all parts work.
`--check` exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvloop

from lmetric_lab.demo import SLICE

sys.path.insert(0, str(Path(__file__).parent.parent))
from clocks import GOAL, two_clocks
from live import Scene
from ranks import POLICIES, rank_agreement
from tables import LABELS, RANKED, SIDES, render, write_into

from common import about, write_result

CLOCKS = Scene(
    trace_file=str(SLICE),
    engines=4,
    profile="qwen3-30b-a3b-h20",
    speed=2.0,
    requests=550,
    max_input_tokens=16_000,
    max_output_tokens=4096,
)
# Answers are cut, and the engines' clock runs faster, so that 2 cores carry some 20 runs in
# minutes.
RANKS = replace(CLOCKS, speed=2.2, requests=400, max_output_tokens=100, clock_speed=5.0)
CONTROL_REQUESTS = 100


def main() -> int:
    """Runs the requested parts. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("clocks", "ranks", "all"), default="all")
    parser.add_argument("--policies", default=",".join(POLICIES), help="of `ranks`; default: %(default)s")
    parser.add_argument(
        "--repeats", type=int, default=3, help="live runs of each policy; default: %(default)s"
    )
    parser.add_argument("--seeds", type=int, default=8, help="simulated runs of each; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few requests, two policies")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--docs", action="store_true", help="put the tables into docs/research/trust.md")
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-trust.json")
    arguments = parser.parse_args()
    clocks, ranks, control_requests = CLOCKS, RANKS, CONTROL_REQUESTS
    policies, repeats = arguments.policies.split(","), arguments.repeats
    if arguments.quick:
        clocks = replace(
            CLOCKS, engines=2, speed=2.5, requests=30, max_input_tokens=8000, max_output_tokens=40
        )
        ranks = replace(RANKS, requests=100)
        control_requests, repeats, policies = 60, 1, ["lmetric", "random"]
    result: dict[str, Any] = {"about": about(None, []) | {"load_average": os.getloadavg()}}
    missed = []
    if arguments.what in ("clocks", "all"):
        result["clocks"] = {"scene": _scene(clocks)} | uvloop.run(two_clocks(clocks, "lmetric"))
        missed += [] if result["clocks"]["within_goal"] else [f"clocks: not within {GOAL:.0%}"]
    if arguments.what in ("ranks", "all"):
        found = uvloop.run(
            rank_agreement(
                ranks, policies, repeats=repeats, seeds=arguments.seeds, control_requests=control_requests
            )
        )
        result["ranks"] = {"scene": _scene(ranks)} | found
        # Knowing more than the live router does is another question, which may have another order.
        missed += [
            f"ranks, {LABELS[quantity]}: {pair} the other way round"
            for quantity in RANKED
            for pair in found[quantity]["agreement"]["as_live"]["contradictions"]
        ]
        control = found["control"]
        missed += [f"control, {side}: it did not lose" for side in SIDES if not control[side]["loses"]]
    tables = render(result)
    print("\n\n".join(tables.values()))
    if arguments.docs:
        write_into(Path(__file__).parents[2] / "docs" / "research" / "trust.md", tables, result["about"])
    print("written:", write_result(result, "trust", arguments.out), file=sys.stderr)
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return 1 if arguments.check and missed else 0


def _scene(scene: Scene) -> dict[str, Any]:
    return asdict(scene) | {"trace_file": Path(scene.trace_file).name}


if __name__ == "__main__":
    sys.exit(main())
