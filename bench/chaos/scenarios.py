"""Faults of routers and of their machine. Each scenario checks the rules of `stage.py` at its end.

    python bench/chaos/scenarios.py [--seed N] [SCENARIO ...]

It prints a line of figures per scenario, and fails if a router breaks a rule.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import clients
import machine
import routers_apart

Figures = dict[str, float | str]
Scenario = Callable[[Path, int], Awaitable[Figures]]

SCENARIOS: dict[str, Scenario] = {
    "router killed": routers_apart.router_killed,
    "routers apart": routers_apart.partition,
    "events cut": routers_apart.events_cut,
    "no descriptors": machine.no_descriptors,
    "no descriptors, asyncio": machine.no_descriptors_asyncio,
    "log at its limit": machine.log_at_its_limit,
    "log on a full disk": machine.log_on_a_full_disk,
    "clock stepped": machine.clock_stepped,
    "idle clients": clients.idle_clients,
    "clients that leave": clients.clients_that_leave,
}


async def play(name: str, seed: int) -> Figures:
    """Plays a scenario. Raises RuleError."""
    with tempfile.TemporaryDirectory() as folder:
        return await SCENARIOS[name](Path(folder), seed)


def main() -> None:
    """Plays scenarios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    for name in given.scenarios or SCENARIOS:
        if name not in SCENARIOS:
            parser.error(f"unknown scenario {name!r}; expected one of {', '.join(SCENARIOS)}")
        figures = asyncio.run(play(name, given.seed))
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
