"""Compares request routers inside Ray Serve: lmetric-router's and Ray's own.

One Ray serves all routers, each with emulated engines as replicas of its own. The routers play the
same traces in turn, in another order for each trace. With ``--scale-to``, replicas are added in the
middle of each trace. A row per trace and router goes to ray_serve.csv.

The environment TEST_RAY_VENV needs this package's dependencies, ray[serve] and ai-dynamo-runtime:

    TEST_RAY_VENV=DIR PYTHONPATH=python python bench/gateways/ray_serve.py --scale-to 5
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("bench", "bench/whatif", "tests/real")]

from run import RUN, write_trace  # noqa: E402

from common import commit  # noqa: E402
from ray_process import RayServe  # noqa: E402

ARMS = ("Lmetric", "PowerOfTwo", "PrefixAware", "KvAware")
RESULTS = Path(__file__).with_suffix(".csv")
FIGURES = ("ttft_mean_seconds", "ttft_p99_seconds", "tpot_mean_seconds", "hit_rate", "choose_ms", "route_ms")


def make_trace(path: Path, requests: int, rate: float, seed: int) -> None:
    """Writes a trace whose prompts differ from those of other seeds."""
    write_trace(path, requests, rate, seed)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        line["hash_ids"] = [seed * 1_000_000 + block for block in line["hash_ids"]]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def play(
    serve: RayServe, arm: str, trace: Path, seconds: float, scale_to: int | None
) -> dict[str, Any] | None:
    """Returns the report of a replay; None: it failed, or took much longer than its trace."""
    words = ["--trace", str(trace), "--target", f"{serve.url}/{arm}", "--json"]
    replay = subprocess.Popen([sys.executable, "-c", RUN, "replay", *words], stdout=subprocess.PIPE)
    if scale_to is not None:
        time.sleep(seconds / 2)
        serve.scale(scale_to, arm)
    try:
        report, _ = replay.communicate(timeout=seconds + 20)
    except subprocess.TimeoutExpired:
        return None
    finally:
        replay.kill()
    return orjson.loads(report)["report"] if replay.returncode == 0 else None


def milliseconds(times: Path, what: str) -> float:
    """Returns the mean time of a router's step, from the file that it wrote."""
    rows = (line.split() for line in times.read_text().splitlines())
    return fmean(float(value) for name, value in rows if name == what)


def write_row(row: dict[str, Any]) -> None:
    """Appends a row to the results."""
    fresh = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, row, lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerow(row)
    print(row, file=sys.stderr)


def main() -> None:
    """Runs all routers and prints the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="traces")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--scale-to", type=int, help="replicas from the middle of the trace")
    parser.add_argument("--requests", type=int, default=110)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--cache-blocks", type=int, default=6_000, help="KV blocks of a replica")
    flags = parser.parse_args()
    version, rows = commit(), []
    with tempfile.TemporaryDirectory(prefix="lmetric-") as name:
        times, trace = Path(name) / "times", Path(name) / "trace.jsonl"
        words = ("--cache-blocks", str(flags.cache_blocks), "--arms", *flags.arms)
        with RayServe(flags.replicas, *words, RAY_ROUTER_TIMES=str(times)) as serve:
            for seed in range(flags.seeds):
                make_trace(trace, flags.requests, flags.rate, seed)
                seconds = flags.requests / flags.rate
                turn = seed % len(flags.arms)
                for arm in (*flags.arms[turn:], *flags.arms[:turn]):
                    times.write_text("")
                    report = play(serve, arm, trace, seconds, flags.scale_to)
                    if report is None:
                        print(f"{arm}, trace {seed}: the replay failed", file=sys.stderr)
                        continue
                    row = {
                        "date": datetime.now(UTC).date().isoformat(), "commit": version,
                        "router": arm, "replicas": flags.replicas, "scale_to": flags.scale_to or "",
                        "seed": seed, "requests": flags.requests, "failed": report["failed"],
                        "ttft_mean_seconds": round(report["ttft_seconds"]["mean"], 4),
                        "ttft_p99_seconds": round(report["ttft_seconds"]["p99"], 4),
                        "tpot_mean_seconds": round(report["tpot_seconds"]["mean"], 5),
                        "hit_rate": round(report["hit_rate"], 4),
                        "choose_ms": round(milliseconds(times, "choose"), 4),
                        "route_ms": round(milliseconds(times, "route"), 4),
                    }  # fmt: skip
                    rows.append(row)
                    write_row(row)
                    if flags.scale_to and seed + 1 < flags.seeds:
                        serve.scale(flags.replicas, arm)
    print(f"{'router':14}" + "".join(f"{name:>28}" for name in FIGURES))
    for arm in dict.fromkeys(row["router"] for row in rows):
        cells = []
        for figure in FIGURES:
            values = [row[figure] for row in rows if row["router"] == arm]
            cells.append(f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        print(f"{arm:14}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
