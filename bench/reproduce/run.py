"""Reruns the LMETRIC paper's study in the simulator and writes the tables of
docs/research/lmetric.md."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from book import RERUN
from world import PROFILE, World, read_scenario

from lmetric.profiles import ProfileError, load_profile
from lmetric_lab.sim.traces import TraceError

for _module in ("comparisons", "imbalance", "predictor", "factors", "hotspots", "ours", "unequal"):
    import_module(_module)  # registers its figures

OWN_SCENARIOS = ("guard", "blocks")  # figures about synthetic traces and about named scenarios


def world(options: argparse.Namespace) -> World:
    """The scenarios of the figures. Exits with an error if a trace file or the profile is not
    usable."""
    scenarios = {}
    for path in options.scenario:
        label = path.name.partition(".")[0]
        if label in scenarios:
            sys.exit(
                f"run.py: --scenario {path}: another scenario is named {label!r} already; rename the file"
            )
        try:
            scenarios[label] = read_scenario(path)
        except OSError as error:
            sys.exit(
                f"run.py: --scenario {path}: {error.strerror}; expected a trace file "
                "(docs/research/traces.md)"
            )
        except TraceError as error:
            sys.exit(f"run.py: --scenario: {error}")
    try:
        load_profile(options.profile)
    except ProfileError as error:
        sys.exit(f"run.py: --profile: {error}")
    seeds = 2 if options.quick else options.seeds
    return World(
        options.traces, seeds=seeds, quick=options.quick, scenarios=scenarios, profile=options.profile
    )


def main() -> None:
    """Runs the driver."""
    files = "mooncake_conversation.jsonl.gz and azure_conv_2023.csv.gz"
    parser = RERUN.parser(__doc__, seeds=5, traces=files)
    parser.add_argument(
        "--scenario",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a trace file in place of the study's own scenarios; docs/research/traces.md lists the\n"
        "formats. May be repeated; nothing is written without --results",
    )
    parser.add_argument(
        "--profile",
        default=PROFILE,
        metavar="NAME",
        help=f"shipped profile or YAML file, for --scenario [{PROFILE}]",
    )
    options = parser.parse_args()
    if options.scenario:
        if wrong := set(OWN_SCENARIOS) & set((options.figure or "").split(",")):
            parser.error(
                f"--figure {', '.join(sorted(wrong))} has scenarios of its own; leave out --scenario"
            )
        for name in OWN_SCENARIOS:
            del RERUN.figures[name]
    RERUN.main(parser, world)


if __name__ == "__main__":
    main()
