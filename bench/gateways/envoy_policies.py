"""Compares the endpoint picker inside Envoy with Envoy's own policies, on emulated engines.

python bench/gateways/envoy_policies.py: conversations with shared prompts, through Envoy's
ROUND_ROBIN and LEAST_REQUEST, through Envoy with the picker, and through `serve` without Envoy.
Each run has new engines. Each seed has its own trace, which all arms serve one after another.
Writes envoy.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "bench", "bench/whatif")]

from run import write_trace  # noqa: E402

from common import commit  # noqa: E402
from epp_world import engine_cluster, example, manager  # noqa: E402
from lmetric_lab.ports import free_ports  # noqa: E402

ARMS = ("envoy ROUND_ROBIN", "envoy LEAST_REQUEST", "envoy, picker lmetric", "serve lmetric")


def without_picker(config: dict[str, Any], policy: str) -> None:
    """Removes the picker from Envoy's configuration."""
    manager(config)["http_filters"] = manager(config)["http_filters"][-1:]
    engines = engine_cluster(config)
    del engines["load_balancing_policy"]
    engines["lb_policy"] = policy
    config["static_resources"]["clusters"] = [engines]


def start_arm(stack: ExitStack, arm: str, urls: list[str], *settings: str) -> str:
    """Starts the routers of an arm. Returns its URL. ``settings``: further words for ours."""
    pages, picker, gateway, admin = free_ports(4)
    if "lmetric" in arm:
        command = "serve" if arm.startswith("serve") else "epp"
        words = ["--policy", "lmetric", "--log-json", *settings]
        example.start_router(stack, command, urls, (pages, picker), *words)
    if not arm.startswith("envoy"):
        return f"http://127.0.0.1:{pages}"
    places = [url.removeprefix("http://") for url in urls]
    text = example.envoy_config((gateway, admin), [f"127.0.0.1:{picker}"], places, False)
    config = yaml.safe_load(text)
    if "lmetric" not in arm:
        without_picker(config, arm.split()[1])
    example.start_envoy(stack, yaml.safe_dump(config), admin)
    return f"http://127.0.0.1:{gateway}"


def replay(arm: str, trace: Path, engines: int) -> dict[str, Any]:
    """Runs a trace through one arm. Returns its report."""
    with ExitStack() as stack:
        target = start_arm(stack, arm, example.emulated_engines(stack, engines))
        call = [*example.LMETRIC, "replay", "--target", target, "--model", "emulated", "--json"]
        done = subprocess.run([*call, "--trace", str(trace)], stdout=subprocess.PIPE, text=True, check=True)
        report: dict[str, Any] = json.loads(done.stdout)
        return report


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes and prints a table."""
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(file.read_text(), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("envoy.csv"))
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="lmetric-") as folder:
        for seed in given.seeds:
            trace = Path(folder) / f"{seed}.jsonl"
            write_trace(trace, given.requests, given.rate, seed)
            turn = seed % len(ARMS)  # no arm is always the first
            for arm in ARMS[turn:] + ARMS[:turn]:
                report = replay(arm, trace, given.engines)["report"]
                rows.append(
                    {"arm": arm, "seed": seed, "engines": given.engines, "rate": given.rate} | shown(report)
                )
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write(given.out, rows)


def shown(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a report for the table."""
    row = {name: report[name] for name in ("requests", "failed")}
    row["hit_rate"] = round(report["hit_rate"], 4)
    for name in ("ttft", "tpot", "e2e"):
        times = report[f"{name}_seconds"]
        row |= {f"{name}_{part}_seconds": round(times[part], 4) for part in ("mean", "p50", "p99")}
    return row | {"commit": commit()}


if __name__ == "__main__":
    main()
