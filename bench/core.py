"""The core's own figures: stages of a decision, percentiles of the index and its memory, as a raw file.

    python bench/core.py [--out FILE]

Runs what the repository ships for that, one after the other, and keeps what each printed:
`lmetric-router bench --json`, the examples `index_latency` and `index_memory` of `lmetric-core`, and
criterion's `score` bench for LMETRIC over 1,024 instances.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, about, write_result

LATENCY = re.compile(r"^(\S.*?)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)$")


def run(*argv: str, timeout: float = 600) -> str:
    """Standard output of a command in the repository; its failure ends the run."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        sys.exit(f"core.py: {' '.join(argv)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def example(name: str) -> str:
    """What an example of the core prints."""
    return run("cargo", "run", "--release", "--locked", "-q", "-p", "lmetric-core", "--example", name)


def stages() -> list[dict[str, Any]]:
    """Rows of `lmetric-router bench`."""
    program = str(Path(sys.executable).parent / "lmetric-router")
    flags = ["--policy", "lmetric", "--instances", "256", "--instances", "1024"]
    for tokens in (1_000, 8_000, 32_000, 100_000):
        flags += ["--prompt-tokens", str(tokens)]
    answer = json.loads(run(program, "bench", "--json", "--stored-pairs", "1000000", *flags))
    rows: list[dict[str, Any]] = answer["results"]
    return rows


MEMORY = (
    "prompts",
    "pairs",
    "index_bytes",
    "a_pair",
    "feed_bytes",
    "a_name",
    "resident",
    "evicted",
    "seconds",
)


def memory(printed: str) -> dict[str, list[dict[str, float]]]:
    """Feed -> rows of its memory curve."""
    curves: dict[str, list[dict[str, float]]] = {}
    feed = ""
    for line in printed.splitlines():
        words = line.split()
        if " feed, " in line:
            feed = words[0]
        elif len(words) == len(MEMORY) and words[0].isdigit():
            curves.setdefault(feed, []).append(dict(zip(MEMORY, map(float, words), strict=True)))
    if set(curves) != {"approximate", "exact"}:
        sys.exit(f"core.py: index_memory printed no curves of both feeds:\n{printed}")
    return curves


def score_1024() -> dict[str, float]:
    """Criterion's median and its 95 % interval, us."""
    what = ["--bench", "score", "--", "--warm-up-time", "1", "--measurement-time", "2", "lmetric/1024"]
    run("cargo", "bench", "--locked", "-q", "-p", "lmetric-core", *what)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    found = sorted(target.glob("criterion/score+best/lmetric/1024/new/estimates.json"))
    if not found:
        sys.exit("core.py: criterion left no estimates of score+best/lmetric/1024")
    median = json.loads(found[0].read_text())["median"]
    interval = median["confidence_interval"]
    bounds = {"low_us": interval["lower_bound"] / 1e3, "high_us": interval["upper_bound"] / 1e3}
    return {"p50_us": median["point_estimate"] / 1e3, **bounds}


def main() -> None:
    """Runs all and writes the raw file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-core.json")
    options = parser.parse_args()
    load = [os.getloadavg()]
    latency = example("index_latency")
    rows = [match.groups() for line in latency.splitlines() if (match := LATENCY.match(line))]
    result = {
        **about(None, ["rustc"]),
        "index_latency": {name: {"p50_us": float(p50), "p99_us": float(p99)} for name, _, p50, p99 in rows},
        "index_latency_printed": latency.splitlines(),
        "index_memory": memory(example("index_memory")),
        "score_1024": score_1024(),
        "stages": stages(),
        "load_average": [*load, os.getloadavg()],
    }
    print(f"raw figures: {write_result(result, 'core', options.out)}")


if __name__ == "__main__":
    main()
