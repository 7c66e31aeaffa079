"""Routing inside a LiteLLM proxy: this router's strategy beside LiteLLM's own, on one trace.

Each strategy gets fresh emulated engines and a fresh proxy, in turn, and plays the same
conversations. Then it answers single requests, whose header says the time that LiteLLM spent. Run
it in an environment with litellm[proxy] and this package:

    PYTHONPATH=python:examples/litellm:bench VENV/bin/python bench/gateways/litellm/run.py
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from proxy import Proxy

import result_files
from lmetric.engines.embedded import EmbeddedEngines
from lmetric.engines.emulated.options import EngineOptions

ROOT = Path(__file__).parents[3]
CALLBACK = ROOT / "examples" / "litellm" / "lmetric_routing.py"
TOKENIZER = Path(sys.modules[EngineOptions.__module__].__file__ or "").parent
ENGINES, PROFILE, CACHE_BLOCKS = 4, "qwen2.5-32b-a100", 3_000
SINGLE_REQUESTS = 40
# Name in the table: LiteLLM's strategy, or our policy and whether it has the tokenizer.
STRATEGIES: dict[str, dict[str, Any]] = {
    "lmetric, KV events": {"policy": "lmetric", "tokenizer": True},
    "lmetric, estimated caches": {"policy": "lmetric"},
    "least-busy": {"strategy": "least-busy"},
    "simple-shuffle": {"strategy": "simple-shuffle"},
}


@dataclass
class Run:
    """Measurements of one strategy: seconds, tokens and milliseconds."""

    ttft_seconds: list[float] = field(default_factory=list)
    e2e_seconds: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    failed: int = 0
    overhead_ms: list[float] = field(default_factory=list)


def conversations(seed: int, count: int, seconds: float) -> list[tuple[float, list[str]]]:
    """Start time and the user's turns of each conversation. Eight applications share prefixes."""
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(f"{rng.randrange(16**4):04x}" for _ in range(words))

    shared = [text(400) for _ in range(8)]
    starts = sorted(rng.uniform(0, seconds) for _ in range(count))
    return [
        (start, [f"{rng.choice(shared)} {text(150)}", *(text(100) for _ in range(rng.randint(2, 4)))])
        for start in starts
    ]


async def play(proxy: Proxy, http: aiohttp.ClientSession, trace: list[tuple[float, list[str]]]) -> Run:
    run, begun = Run(), time.perf_counter()

    async def converse(start: float, turns: list[str]) -> None:
        await asyncio.sleep(max(0.0, start - (time.perf_counter() - begun)))
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": await answer(proxy, http, messages, run)})
            await asyncio.sleep(1.0)

    await asyncio.gather(*(converse(start, turns) for start, turns in trace))
    for number in range(SINGLE_REQUESTS):
        body = {
            "model": "emulated",
            "messages": [{"role": "user", "content": f"{number} " * 500}],
            "max_tokens": 2,
        }
        async with http.post(f"{proxy.url}/v1/chat/completions", json=body) as got:
            await got.read()
            run.overhead_ms.append(float(got.headers["x-litellm-overhead-duration-ms"]))
    return run


async def answer(proxy: Proxy, http: aiohttp.ClientSession, messages: list[dict[str, str]], run: Run) -> str:
    body = {
        "model": "emulated",
        "messages": messages,
        "max_tokens": 60,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, first, said = time.perf_counter(), None, ""
    async with http.post(f"{proxy.url}/v1/chat/completions", json=body) as got:
        if got.status != 200:
            run.failed += 1
            return "failed"
        async for line in got.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = orjson.loads(line[6:])
            content = ((chunk.get("choices") or [{}])[0].get("delta") or {}).get("content")
            if content:
                first = first or time.perf_counter()
                said += content
            if usage := chunk.get("usage"):
                run.prompt_tokens += usage["prompt_tokens"]
                run.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if first is None:
        run.failed += 1
        return "failed"
    run.ttft_seconds.append(first - sent)
    run.e2e_seconds.append(time.perf_counter() - sent)
    return said


async def measure(name: str, trace: list[tuple[float, list[str]]]) -> Run:
    how = STRATEGIES[name]
    options = EngineOptions(port=0, profile=PROFILE, cache_blocks=CACHE_BLOCKS)
    env = {"LMETRIC_POLICY": how.get("policy", ""), "LMETRIC_TOKENIZER": str(TOKENIZER)}
    if not how.get("tokenizer"):
        del env["LMETRIC_TOKENIZER"]
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EmbeddedEngines(ENGINES, options, kv_events=True) as engines,
            Proxy(
                engines.urls,
                Path(folder),
                strategy=how.get("strategy", "simple-shuffle"),
                callback=CALLBACK if "policy" in how else None,
                env=env,
            ) as proxy,
            aiohttp.ClientSession(
                headers=proxy.headers,
                timeout=aiohttp.ClientTimeout(total=600),
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
            ) as http,
        ):
            warm = {"model": "emulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            for _ in range(5):
                async with http.post(f"{proxy.url}/v1/chat/completions", json=warm) as got:
                    await got.read()
            await asyncio.sleep(3)  # the strategy asks engines for their features
            return await play(proxy, http, trace)


def row(name: str, runs: list[Run]) -> dict[str, Any]:
    def each(value: Any) -> list[float]:
        return [float(value(run)) for run in runs]

    return {
        "strategy": name,
        "ttft_mean_seconds": each(lambda run: statistics.fmean(run.ttft_seconds)),
        "ttft_p50_seconds": each(lambda run: statistics.median(run.ttft_seconds)),
        "ttft_p99_seconds": each(lambda run: statistics.quantiles(run.ttft_seconds, n=100)[98]),
        "e2e_mean_seconds": each(lambda run: statistics.fmean(run.e2e_seconds)),
        "cached_share": each(lambda run: run.cached_tokens / max(1, run.prompt_tokens)),
        "overhead_p50_ms": each(lambda run: statistics.median(run.overhead_ms)),
        "requests": each(lambda run: len(run.ttft_seconds)),
        "failed": each(lambda run: run.failed),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--conversations", type=int, default=70)
    options.add_argument("--seconds", type=float, default=45.0)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = options.parse_args()
    names = list(STRATEGIES)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for seed in range(given.rounds):
        trace = conversations(seed, given.conversations, given.seconds)
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            run = asyncio.run(measure(name, trace))
            runs[name].append(run)
            print(seed, row(name, [run]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    load = Path("/proc/loadavg").read_text().split()[0]
    told = {
        "figure": "litellm",
        "title": f"Inside LiteLLM {version('litellm')}, {ENGINES} engines {PROFILE}",
        "commit": commit.stdout.strip(),
        "seeds": given.rounds,
        "first_seed": 0,
        "quick": False,
        "columns": ["ttft_mean_seconds", "cached_share", "overhead_p50_ms"],
        "machine_load": load,
        "rows": [row(name, runs[name]) for name in names],
    }
    result_files.write_figure(told, given.out)


if __name__ == "__main__":
    main()
