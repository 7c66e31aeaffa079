"""Routing inside a LiteLLM proxy: this router's strategy beside LiteLLM's own, on one trace.

Each arm has emulated engines and a proxy of its own, and serves the same replayed traces, one arm
at a time. The order of the arms and the texts change with the seed, so a run finds no prefix of an
earlier run in the caches. The figures go to `litellm.csv`:

    PYTHONPATH=python .cache/litellm/bin/python bench/gateways/litellm/run.py

`examples/litellm/run --install-only` makes the environment. ``--table`` prints the stored results.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
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
from lmetric_lab.embedded import EmbeddedEngines  # noqa: E402
from lmetric_lab.emulated.options import EngineOptions  # noqa: E402

CALLBACK = HERE / "timed_routing.py"
TOKENIZER = Path(sys.modules[EngineOptions.__module__].__file__ or "").parent
# Name in the table: the strategy of LiteLLM's configuration, and the settings of our callback.
ARMS: dict[str, tuple[str, dict[str, str]]] = {
    "simple-shuffle": ("simple-shuffle", {}),
    "least-busy": ("least-busy", {}),
    "latency-based-routing": ("latency-based-routing", {}),
    "lmetric": ("simple-shuffle", {"LMETRIC_POLICY": "lmetric"}),
    "lmetric with KV events": (
        "simple-shuffle",
        {"LMETRIC_POLICY": "lmetric", "LMETRIC_TOKENIZER": str(TOKENIZER)},
    ),
}
ORDER = list(ARMS)
FIGURES = {
    "ttft_mean_seconds": 3, "ttft_p99_seconds": 3, "tpot_mean_seconds": 4, "hit_rate": 3,
    "decision_p50_us": 0, "proxy_cpu_ms": 1,
}  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """CPU time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_seconds() -> tuple[int, int]:
    """Idle and total time of all cores until now, in ticks."""
    ticks = [int(cell) for cell in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


async def replay(proxy: Proxy, trace: Path, seed: int) -> dict[str, Any]:
    """The report of a replay against the proxy."""
    words = ["replay", "--trace", str(trace), "--target", proxy.url, "--model", "emulated", "--chat"]
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, *words, "--seed", str(seed), "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OPENAI_API_KEY": proxy.headers["authorization"].removeprefix("Bearer ")},
    )
    out, _ = await done.communicate()
    if done.returncode != 0:
        sys.exit(f"the replay failed:\n{proxy.log[-2000:]}")
    report: dict[str, Any] = orjson.loads(out)["report"]
    return report


@dataclass(frozen=True)
class Arm:
    """A running proxy over engines of its own, and the file with the times of its choices."""

    proxy: Proxy
    times: Path

    @classmethod
    @asynccontextmanager
    async def started(cls, name: str, engines: int) -> AsyncIterator[Arm]:
        """Starts the engines and the proxy of an arm."""
        strategy, env = ARMS[name]
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder) / "times"
            env = env | {"LMETRIC_TIMES": str(times)}
            async with (
                EmbeddedEngines(engines, EngineOptions(port=0), kv_events=True) as embedded,
                Proxy(embedded.urls, Path(folder), strategy=strategy, callback=CALLBACK, env=env) as proxy,
            ):
                await warm_up(proxy)
                yield cls(proxy, times)

    async def measure(self, trace: Path, seed: int) -> dict[str, float]:
        """Replays a trace and returns the figures of the run."""
        idle, total = machine_seconds()
        skip, used = len(self.times.read_text().split()), cpu_seconds(self.proxy.pid)
        report = await replay(self.proxy, trace, seed)
        used = cpu_seconds(self.proxy.pid) - used
        idle, total = (now - before for now, before in zip(machine_seconds(), (idle, total), strict=True))
        taken = [1e6 * float(line) for line in self.times.read_text().split()[skip:]]
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
            "machine_busy": 1 - idle / total,
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


def table(rows: list[dict[str, str]]) -> str:
    """The mean of each figure with its range over the seeds, as Markdown."""
    lines = ["| strategy | " + " | ".join(FIGURES) + " |", "| --- |" + " ---: |" * len(FIGURES)]
    for arm in [name for name in ARMS if any(row["arm"] == name for row in rows)]:
        cells = []
        for figure, digits in FIGURES.items():
            values = [float(row[figure]) for row in rows if row["arm"] == arm]
            cells.append(f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})")
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


async def run(given: argparse.Namespace) -> None:
    """Runs each seed through all arms, and stores the figures after each seed."""
    about = {"rate": given.rate, "litellm": version("litellm"), "commit": commit()}
    about["date"] = f"{datetime.now(UTC):%Y-%m-%d}"
    async with AsyncExitStack() as stack:
        arms = {
            name: await stack.enter_async_context(Arm.started(name, given.engines)) for name in given.arms
        }
        trace = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "trace.jsonl"
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            write_trace(trace, given.requests, given.rate, seed)
            if given.wait:
                print("ready", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
            first = seed % len(arms)
            for name in given.arms[first:] + given.arms[:first]:
                found = await arms[name].measure(trace, seed)
                print(name, found, flush=True)
                shown = {figure: f"{value:.6g}" for figure, value in found.items()}
                store(given.out, {"arm": name, "seed": str(seed)} | shown | about)


def store(file: Path, row: dict[str, str]) -> None:
    """Adds a row to the results, in place of one of the same arm and seed."""
    rows = {(int(each["seed"]), ORDER.index(each["arm"])): each for each in stored(file)}
    rows[int(row["seed"]), ORDER.index(row["arm"])] = row
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, row, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[key] for key in sorted(rows))


def stored(file: Path) -> list[dict[str, str]]:
    """The rows of the results so far."""
    if not file.exists():
        return []
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3, help="traces")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--requests", type=int, default=125)
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--wait", action="store_true", help="read a line from the input before each seed")
    parser.add_argument("--out", type=Path, default=HERE / "litellm.csv")
    parser.add_argument("--table", action="store_true", help="print the stored results and stop")
    given = parser.parse_args()
    if not given.table:
        asyncio.run(run(given))
    print(table(stored(given.out)))


if __name__ == "__main__":
    main()
