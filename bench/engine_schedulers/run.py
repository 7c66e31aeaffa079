"""Measures the schedulers of `lmetric-vllm` on a real vLLM engine, beside vLLM's own.

    python bench/engine_schedulers/run.py --venv VLLM_ENVIRONMENT [--seeds 3] [--token-slo-ms 30]

One engine runs at a time, on CPU, with a small model with random weights. All schedulers get the
same requests: short chats that stream, and long prompts that interrupt them. The order of the
schedulers alternates. Printed per run: time between tokens of the chats, time to the first token,
end to end, and tokens per second of all requests.

`--equal N` compares throughput alone: N requests of equal lengths arrive at once, more than there
are slots. All engines have started, one computes at a time, and each seed is a round in which the
schedulers take turns. Printed as CSV: answer tokens per second of each scheduler, and their ratio
to vLLM's own in the same round. `stock-2048` is vLLM's own once more: its spread is the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "real"))

from vllm_process import MODEL, VllmEngine, model  # noqa: E402

LAYERS, HIDDEN = 4, 256
WORDS = ["tree", "river", "stone", "cloud", "light", "paper", "music", "table", "green", "seven"]
FLAGS: dict[str, Any] = {
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 4096,
    "max_model_len": 8192,
    "kv_events_config": None,
    "scheduling_policy": "fcfs",
}


@dataclass
class Asked:
    """A request of the workload."""

    at: float  # seconds from the start
    prompt: str
    tokens: int
    long: bool


@dataclass
class Got:
    """Times that its client saw, in seconds."""

    asked: Asked
    first: float = 0.0
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)


def workload(
    seed: int, seconds: float, chats: float, prompts: float, long_tokens: Sequence[int]
) -> list[Asked]:
    """Chats with 40 to 160 answer tokens, and long prompts with short answers; rates per second."""
    rng = random.Random(seed)
    asked = []
    for rate, is_long in ((chats, False), (prompts, True)):
        at = rng.expovariate(rate)
        while at < seconds:
            words = rng.choice(long_tokens) if is_long else rng.randint(10, 60)
            prompt = " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(words // 3))
            asked.append(Asked(at, prompt, 8 if is_long else rng.randint(40, 160), is_long))
            at += rng.expovariate(rate)
    return sorted(asked, key=lambda each: each.at)


def equal_requests(seed: int, count: int) -> list[Asked]:
    """Requests of equal lengths that arrive at once."""
    rng = random.Random(seed)

    def prompt() -> str:
        return " ".join(rng.choice(WORDS) + str(rng.randrange(100, 1000)) for _ in range(20))

    return [Asked(0.0, prompt(), 64, False) for _ in range(count)]


async def ask(session: aiohttp.ClientSession, url: str, asked: Asked, begun: float) -> Got:
    """Sends a request at its time."""
    await asyncio.sleep(max(0.0, begun + asked.at - time.monotonic()))
    got, sent, last = Got(asked), time.monotonic(), 0.0
    body = {
        "model": MODEL,
        "prompt": asked.prompt,
        "max_tokens": asked.tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if last:
                got.gaps.append(now - last)
            else:
                got.first = now - sent
            last = now
    got.total = time.monotonic() - sent
    return got


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def play(url: str, asked: list[Asked]) -> dict[str, float]:
    """Figures of one run, in milliseconds and tokens per second."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        begun = time.monotonic()
        got = await asyncio.gather(*(ask(session, url, each, begun) for each in asked))
        seconds = time.monotonic() - begun
    chats = [each for each in got if not each.asked.long]
    gaps = [gap * 1e3 for each in chats for gap in each.gaps]
    firsts = [each.first * 1e3 for each in got if each.asked.long]
    return {
        "gap p50": quantile(gaps, 0.5),
        "gap p99": quantile(gaps, 0.99),
        "gap max": max(gaps),
        "chat ttft mean": statistics.mean(each.first for each in chats) * 1e3,
        "long ttft mean": statistics.mean(firsts),
        "long ttft p99": quantile(firsts, 0.99),
        "e2e mean": statistics.mean(each.total for each in got) * 1e3,
        "e2e p99": quantile([each.total * 1e3 for each in got], 0.99),
        "answer tokens/s": sum(each.asked.tokens for each in got) / seconds,
        "seconds": seconds,
    }


def engine_of(
    scheduler: str, venv: Path, folder: Path, settings: dict[str, Any], sequences: int = 64
) -> VllmEngine:
    """An engine with vLLM's own scheduler, or one of lmetric-vllm; `stock-N` has a budget of N
    tokens."""
    flags = FLAGS | {"max_num_seqs": sequences}
    environ = {}
    if scheduler.startswith("stock-"):
        flags["max_num_batched_tokens"] = int(scheduler.removeprefix("stock-"))
    elif scheduler != "stock":
        flags["scheduler_cls"] = f"lmetric_vllm.{scheduler}"
        if scheduler == "SloScheduler":
            flags["additional_config"] = {"lmetric": settings}
        environ["PYTHONPATH"] = f"{ROOT / 'python'}:{ROOT / 'integrations' / 'vllm'}"
    return VllmEngine(venv, model(venv, LAYERS, HIDDEN), folder, flags, environ)


async def served(url: str, asked: list[Asked]) -> float:
    """Tokens per second of all answers."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        begun = time.monotonic()
        await asyncio.gather(*(ask(session, url, each, begun) for each in asked))
        return sum(each.tokens for each in asked) / (time.monotonic() - begun)


def throughput(
    schedulers: Sequence[str], engines: Sequence[VllmEngine], slo_ms: float, count: int, seeds: int
) -> None:
    """Plays the rounds; the first does not count."""
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait()
    turns = list(zip(schedulers, engines, strict=True))
    print("token_slo_ms,scheduler,seed,requests,answer_tokens_per_second,of_stock")
    for seed in range(seeds + 1):
        first = seed % len(turns)
        rates = {
            name: asyncio.run(served(engine.url, equal_requests(seed, count)))
            for name, engine in turns[first:] + turns[:first]
        }
        for name, rate in rates.items() if seed > 0 else ():
            print(f"{slo_ms:g},{name},{seed},{count},{rate:.1f},{rate / rates['stock']:.3f}", flush=True)


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--schedulers", nargs="+", default=["stock", "SloScheduler"])
    parser.add_argument("--token-slo-ms", type=float, default=30.0)
    parser.add_argument("--profile")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--chats", type=float, default=2.0, help="per second")
    parser.add_argument("--prompts", type=float, default=0.4, help="long ones per second")
    parser.add_argument("--long-tokens", type=int, nargs="+", default=[1500, 3000, 6000])
    parser.add_argument("--sequences", type=int, default=64, help="slots of the engine")
    parser.add_argument("--equal", type=int, metavar="N", help="compare throughput alone")
    parser.add_argument("--warm", action="store_true", help="play each workload twice, count the second")
    args = parser.parse_args()
    settings: dict[str, Any] = {"token_slo_ms": args.token_slo_ms}
    if args.profile:
        settings["profile"] = str(Path(args.profile).resolve())
    if args.equal is not None:
        with TemporaryDirectory() as temporary:
            engines = []
            for name in args.schedulers:
                (folder := Path(temporary) / name).mkdir()
                engines.append(engine_of(name, args.venv, folder, settings, args.sequences))
            try:
                throughput(args.schedulers, engines, args.token_slo_ms, args.equal, args.seeds)
            finally:
                for engine in engines:
                    engine.stop()
        return
    for seed in range(1, args.seeds + 1):
        order = args.schedulers if seed % 2 else args.schedulers[::-1]
        for scheduler in order:
            with TemporaryDirectory() as folder:
                engine = engine_of(scheduler, args.venv, Path(folder), settings, args.sequences)
                engine.start()
                try:
                    engine.wait()
                    asked = workload(seed, args.seconds, args.chats, args.prompts, args.long_tokens)
                    if args.warm:
                        again = workload(seed + 100, args.seconds, args.chats, args.prompts, args.long_tokens)
                        asyncio.run(play(engine.url, again))
                    figures = asyncio.run(play(engine.url, asked))
                finally:
                    engine.stop()
            shown = {name: round(value, 1) for name, value in figures.items()}
            print(json.dumps({"scheduler": scheduler, "seed": seed} | shown), flush=True)


if __name__ == "__main__":
    main()
