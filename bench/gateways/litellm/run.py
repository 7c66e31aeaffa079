"""Routing inside a LiteLLM proxy: this router's strategy beside LiteLLM's own, on one trace.

Each arm gets fresh emulated engines and a fresh proxy, in turn, and serves the same replayed trace.
The order of the arms changes with the seed. Each run adds its seed to `litellm.csv`:

    for seed in 0 1 2; do
      PYTHONPATH=python .cache/litellm/bin/python bench/gateways/litellm/run.py --seed $seed
    done

`examples/litellm/run --install-only` makes the environment. ``--table`` prints the stored results.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import aiohttp
import orjson

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("bench/whatif", "bench", "examples/litellm")]

from proxy import Proxy  # noqa: E402
from run import RUN, write_trace  # noqa: E402

from common import commit  # noqa: E402
from lmetric.engines.embedded import EmbeddedEngines  # noqa: E402
from lmetric.engines.emulated.options import EngineOptions  # noqa: E402

CALLBACK = HERE / "timed_routing.py"
TOKENIZER = Path(sys.modules[EngineOptions.__module__].__file__ or "").parent
# Name in the table: the strategy of LiteLLM's configuration, and the settings of our callback.
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "simple-shuffle": ("simple-shuffle", {}),
    "least-busy": ("least-busy", {}),
    "latency-based-routing": ("latency-based-routing", {}),
    "lmetric": ("simple-shuffle", {"LMETRIC_POLICY": "lmetric"}),
    "lmetric, KV events": (
        "simple-shuffle",
        {"LMETRIC_POLICY": "lmetric", "LMETRIC_TOKENIZER": str(TOKENIZER)},
    ),
}
FIGURES = {
    "ttft_mean_seconds": 3, "ttft_p99_seconds": 3, "tpot_mean_seconds": 4, "hit_rate": 3,
    "decision_p50_us": 0, "proxy_cpu_ms": 1,
}  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """CPU time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def replay(proxy: Proxy, trace: Path) -> dict[str, Any]:
    """The report of a replay against the proxy."""
    words = ["replay", "--trace", str(trace), "--target", proxy.url, "--model", "emulated", "--chat"]
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, *words, "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OPENAI_API_KEY": proxy.headers["authorization"].removeprefix("Bearer ")},
    )
    out, _ = await done.communicate()
    if done.returncode != 0:
        sys.exit(f"the replay failed:\n{proxy.log[-2000:]}")
    report: dict[str, Any] = orjson.loads(out)["report"]
    return report


async def measure(arm: str, trace: Path, engines: int) -> dict[str, float]:
    """The figures of an arm: seconds, microseconds per decision, CPU milliseconds per request."""
    strategy, env = ARMS[arm]
    with tempfile.TemporaryDirectory() as name:
        times = Path(name) / "times"
        env = env | {"LMETRIC_TIMES": str(times)}
        async with (
            EmbeddedEngines(engines, EngineOptions(port=0), kv_events=True) as embedded,
            Proxy(embedded.urls, Path(name), strategy=strategy, callback=CALLBACK, env=env) as proxy,
        ):
            await warm_up(proxy)
            skip, used = len(times.read_text().split()), cpu_seconds(proxy.pid)
            report = await replay(proxy, trace)
            used = cpu_seconds(proxy.pid) - used
            taken = [1e6 * float(line) for line in times.read_text().split()[skip:]]
    return {
        "requests": report["requests"],
        "failed": report["failed"],
        "ttft_mean_seconds": report["ttft_seconds"]["mean"],
        "ttft_p50_seconds": report["ttft_seconds"]["p50"],
        "ttft_p99_seconds": report["ttft_seconds"]["p99"],
        "tpot_mean_seconds": report["tpot_seconds"]["mean"],
        "hit_rate": report["hit_rate"],
        "decision_p50_us": median(taken),
        "decision_p99_us": quantiles(taken, n=100, method="inclusive")[98],
        "proxy_cpu_ms": 1e3 * used / report["requests"],
    }


async def warm_up(proxy: Proxy) -> None:
    """Sends short requests. In the pause, the strategy asks the engines for their features."""
    body = {"model": "emulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with aiohttp.ClientSession(headers=proxy.headers) as http:
        for pause in (0, 0, 0, 0, 3):
            async with http.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            await asyncio.sleep(pause)


def stored(file: Path) -> list[dict[str, str]]:
    """The rows of the results so far."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def table(rows: list[dict[str, str]]) -> str:
    """The mean of each figure with its range over the seeds, as Markdown."""
    lines = ["| strategy | " + " | ".join(FIGURES) + " |", "| --- |" + " ---: |" * len(FIGURES)]
    for arm in ARMS:
        cells = []
        for figure, digits in FIGURES.items():
            values = [float(row[figure]) for row in rows if row["arm"] == arm]
            cells.append(f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the trace")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--out", type=Path, default=HERE / "litellm.csv")
    parser.add_argument("--table", action="store_true", help="print the stored results and stop")
    given = parser.parse_args()
    if given.table:
        print(table(stored(given.out)))
        return
    first = given.seed % len(given.arms)
    about = {"rate": given.rate, "litellm": version("litellm"), "commit": commit()}
    about["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    rows = [row for row in stored(given.out) if row["seed"] != str(given.seed)]
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "trace.jsonl"
        write_trace(trace, given.requests, given.rate, given.seed)
        for arm in given.arms[first:] + given.arms[:first]:
            found = asyncio.run(measure(arm, trace, given.engines))
            print(arm, found, flush=True)
            shown = {figure: f"{value:.6g}" for figure, value in found.items()}
            rows.append({"arm": arm, "seed": str(given.seed)} | shown | about)
    with given.out.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (int(row["seed"]), list(ARMS).index(row["arm"]))))


if __name__ == "__main__":
    main()
