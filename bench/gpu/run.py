"""Policies and schedulers on real vLLM engines that share one GPU, and the simulator beside them.

    TEST_VLLM_VENV=DIR python bench/gpu/run.py OUT [--engines 4] [--policies ...] [--seeds 1 2]

DIR is a virtual environment with vLLM for CUDA. The model has the shape of Qwen2.5-3B and random
weights, so nothing is downloaded and lengths are those that a request asks for. The script

1. calibrates one engine while the others are idle (`engine.yaml`),
2. plays coding agents' sessions against one engine, without a router, and simulates them with that
   profile (`alone.csv`),
3. plays them against a router over all engines, for each policy and seed, from empty caches
   (`policies.csv`). Seeds change the order of policies and the starts of sessions,
4. starts two engines anew with each scheduler, vLLM's own and those of `lmetric-vllm`, and plays
   chats and long prompts, live and in the simulator (`orders.csv`).

Each run adds a row; a second call plays only what the files do not have. Engines that share a GPU
slow each other down, so times of step 3 are not those of engines with a GPU each.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "real"))
sys.path.insert(0, str(Path(__file__).parents[1] / "trust"))
sys.path.insert(0, str(Path(__file__).parents[1] / "engine_schedulers"))

import orders
from live import Live, play
from orders import Table

from lmetric.profiles import Profile, check_profile, load_profile
from lmetric.profiles.roofline import as_yaml
from lmetric_lab.calibrate import Calibrator
from lmetric_lab.demo import running_router
from lmetric_lab.emulated.text import TOKENIZER_PATH
from lmetric_lab.ports import free_ports
from lmetric_lab.replay import Client
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace
from vllm_process import MODEL, VllmEngine, environment

# The shape of Qwen2.5-3B, with the vocabulary of the emulated engines.
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 2688,
}
BLOCK = 64  # tokens: as in the trace
KV_BYTES = 2 * 36 * 2 * 128 * 2  # of a token: keys and values, layers, KV heads, head size, bfloat16
CACHE_TOKENS = 160_000  # of an engine: a working set fits all engines' caches once, not four times
MAX_CONTEXT, MIN_TURNS, MAX_TURNS = 32_000, 5, 8  # tokens; of a session
MAX_ANSWER, MAX_PAUSE_SECONDS = 128, 3.0
READY_SECONDS = 60.0
SLOTS, ORDERED = 16, 2  # sequences of an engine, and engines, with each order
POLICIES = ["round_robin", "vllm", "llmd_scorers", "total_delay"]


def flags(engines: int, cache_tokens: int) -> dict[str, Any]:
    """Flags of each of `engines` engines, over those of the tests."""
    return {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "enforce_eager": False,
        # Graphs for decoding without a compiled model: an engine starts in seconds.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": 64,
        },
        "max_model_len": SHAPE["max_position_embeddings"],
        "block_size": BLOCK,
        "num_gpu_blocks_override": cache_tokens // BLOCK,
        "kv_cache_memory_bytes": cache_tokens * KV_BYTES,
        "gpu_memory_utilization": 0.9 / engines,  # an engine starts only if so much is free
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "tensor_parallel_size": 1,
    }


def model(folder: Path) -> Path:
    """Writes the model's configuration and tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    shutil.copy(TOKENIZER_PATH, folder / "tokenizer.json")
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind | special))
    return folder


@functools.cache
def recorded() -> Trace:
    """The coding agents' trace, which takes seconds to make."""
    return load_trace("coding-agents")


def agents(count: int, seconds: float, seed: int) -> Trace:
    """The beginnings of `count` sessions of the coding agents' trace, which start within
    `seconds`. Contexts, answers and pauses are cut."""
    trace = recorded()
    assert trace.sessions is not None
    kept: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    for session in np.unique(trace.sessions):
        turns = np.flatnonzero(trace.sessions == session)[:MAX_TURNS]
        fits = trace.input_tokens[turns] + MAX_ANSWER <= MAX_CONTEXT
        turns = turns[: len(turns) if fits.all() else int(np.argmin(fits))]
        if len(turns) >= MIN_TURNS:
            kept.append(turns)
        if len(kept) == count:
            break
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.uniform(0, seconds, len(kept)))
    arrival = trace.arrival_seconds.copy()
    for turns, start in zip(rng.permutation(np.arange(len(kept))), starts, strict=True):
        arrival[kept[turns]] = start
    chosen = np.sort(np.concatenate(kept))
    starts_of = arrival[chosen]
    # `take` sorts by arrivals, which are the trace's own until its last step.
    cut = replace(trace.take(chosen), arrival_seconds=np.zeros(len(chosen)))
    cut = cut.take(np.argsort(starts_of, kind="stable"))
    assert cut.think_seconds is not None
    return replace(
        cut,
        arrival_seconds=np.sort(starts_of),
        output_tokens=np.clip(cut.output_tokens, 1, MAX_ANSWER),
        think_seconds=np.clip(cut.think_seconds, 0, MAX_PAUSE_SECONDS),
    )


@dataclass
class Row:
    """The figures of a run. Times are seconds."""

    what: str  # a policy, or `alone` and `simulated`
    seed: int
    engines: int
    requests: int
    failed: int
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    e2e_mean: float
    e2e_p99: float
    hit: float  # share of the prompt tokens
    output_tokens: int
    seconds: float

    @staticmethod
    def of(what: str, seed: int, engines: int, run: Live | Run, **counts: Any) -> Row:
        """Makes it from what clients measured, or from a simulation; `counts`: the other fields."""
        ttft, e2e = run.ttft_seconds, run.e2e_seconds
        return Row(
            what,
            seed,
            engines,
            len(ttft),
            ttft_mean=float(np.nanmean(ttft)),
            ttft_p50=float(np.nanpercentile(ttft, 50)),
            ttft_p99=float(np.nanpercentile(ttft, 99)),
            tpot_mean=float(np.nanmean(run.tpot_seconds)),
            e2e_mean=float(np.nanmean(e2e)),
            e2e_p99=float(np.nanpercentile(e2e, 99)),
            **counts,
        )


async def emptied(engines: Sequence[VllmEngine]) -> None:
    """Empties the caches of idle engines."""
    async with aiohttp.ClientSession() as session:
        for engine in engines:
            async with session.post(f"{engine.url}/reset_prefix_cache") as response:
                response.raise_for_status()


async def played(what: str, trace: Trace, url: str, seed: int, engines: int = 1) -> Row:
    """Plays `trace` against `url`."""
    began = time.monotonic()
    async with Client(url) as client:
        live = await play(trace, client, 1.0, seed)
    for failure in live.failures[:3]:
        print("failed:", failure, flush=True)
    return Row.of(
        what,
        seed,
        engines,
        live,
        failed=len(live.failures),
        hit=float(live.hit_tokens.sum() / max(1, live.prompt_tokens.sum())),
        output_tokens=int(live.output_tokens.sum()),
        seconds=time.monotonic() - began,
    )


async def warm(engines: Sequence[VllmEngine]) -> None:
    """Sends each engine a few requests, so that no run pays for the first use of a kernel."""
    trace = agents(2, 0.1, seed=99)
    await asyncio.gather(*(played("warm", trace, engine.url, seed=99) for engine in engines))


async def calibrated(engine: VllmEngine, tokens: int) -> Profile:
    """Calibrates an engine."""
    async with Calibrator(
        engine.url, budget_tokens=tokens, max_batch=32, max_prompt_tokens=24_000
    ) as calibrator:
        made = await calibrator.run()
    print(made.profile.note, flush=True)
    return made.profile


async def ready(url: str, engines: int) -> None:
    """Waits until the router follows the caches of all engines exactly."""
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            async with session.get(f"{url}/debug/engines") as response:
                known = await response.json()
            if len(known) == engines and all(each["healthy"] and each["mode"] == "exact" for each in known):
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"no exact index: {[each['mode_reason'] for each in known]}")
            await asyncio.sleep(0.1)


def configuration(engines: Sequence[VllmEngine], folder: Path) -> Path:
    """Writes the router's configuration. It names the endpoints of KV events, which older versions
    of vLLM do not report."""
    listed = [
        {
            "url": engine.url,
            "kv_events": {
                "endpoint": f"tcp://127.0.0.1:{engine.events_port}",
                "replay_endpoint": f"tcp://127.0.0.1:{engine.replay_port}",
            },
        }
        for engine in engines
    ]
    path = folder / "router.yaml"
    path.write_text(json.dumps({"experimental": True, "block_size": BLOCK, "engines": listed}))
    return path


async def routed(trace: Trace, policy: str, seed: int, engines: Sequence[VllmEngine]) -> Row:
    """Plays `trace` against a router with `policy`."""
    await emptied(engines)
    words = ["--config", str(configuration(engines, engines[0].folder)), "--policy", policy]
    async with running_router(free_ports(1)[0], words) as url:
        await ready(url, len(engines))
        return await played(policy, trace, url, seed, len(engines))


def simulated(trace: Trace, profile: Profile, seed: int) -> Row:
    """Plays `trace` in the simulator, on one engine."""
    run = simulate(
        trace,
        policy="round_robin",
        instances=1,
        profile=profile,
        admission="vllm",
        cached_answers=True,
        seed=seed,
    )
    return Row.of(
        "simulated",
        seed,
        1,
        run,
        failed=0,
        hit=run.summary().hit_ratio or 0.0,
        output_tokens=int(trace.output_tokens.sum()),
        seconds=0.0,
    )


def schedulers(given: argparse.Namespace, shape: Path, folder: Path, late: Callable[[], bool]) -> None:
    """Plays each order of engines, live and simulated, until it is `late`."""
    path = (given.out / "engine.yaml").resolve()
    most = {"max_sequences": SLOTS, "max_batch_tokens": orders.BUDGET_TOKENS}
    profile = check_profile(load_profile(str(path)).model_dump() | most, str(path))
    mix = orders.Mix(long_prompt=(4_000, 16_000))
    slo, rate = orders.slo_of(profile, mix), orders.rate_of(profile, mix.burst(BLOCK), ORDERED, given.load)
    print(f"token SLO {slo * 1e3:.0f} ms, {rate:.2f} requests/s", flush=True)
    table = Table(given.out / "orders.csv", orders.Row)

    def make(flags_of_order: dict[str, Any], environ: dict[str, str]) -> VllmEngine:
        all_flags = flags(ORDERED, given.cache_tokens) | given.flags | flags_of_order
        return VllmEngine(environment(), shape, folder, all_flags, environ)

    for seed in given.seeds:
        trace = mix.trace(seed, rate, BLOCK)
        for order in orders.shuffled(given.orders, seed):
            if table.has(order=order, side="live", seed=seed) or late():
                continue
            with orders.running(
                order, ORDERED, make, sequences=SLOTS, slo_ms=slo * 1e3, profile=path
            ) as engines:
                try:
                    asyncio.run(warm(engines))
                    table.add(asyncio.run(orders.played(order, trace, mix, seed, engines, path)))
                finally:
                    for engine in engines:
                        shutil.copy(engine.log, given.out / f"{order}-{seed}-{engine.port}.log")
            table.add(orders.simulated(order, trace, mix, seed, ORDERED, profile, slo))
    print(orders.compared(table.rows()), flush=True)


def main() -> None:
    """Plays the runs that the files do not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=14.0, help="in which the sessions start")
    parser.add_argument("--alone", type=int, default=8, help="sessions of the run on one engine")
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS)
    parser.add_argument("--calibrate-tokens", type=int, default=400_000)
    parser.add_argument("--flags", type=json.loads, default={}, help="more flags of the engines, as JSON")
    # Transfers of KV between the engines of a card need more of its environment than the others.
    alone = [name for name, each in orders.ORDERS.items() if "kv_transfer_config" not in each.flags]
    parser.add_argument("--orders", nargs="*", default=alone, choices=orders.ORDERS)
    parser.add_argument("--load", type=float, default=1.1, help="of the orders' engines, of their most")
    parser.add_argument("--at-most", type=float, default=float("inf"), help="begin no run after S seconds")
    given = parser.parse_args()
    begun = time.monotonic()

    def late() -> bool:
        return time.monotonic() - begun > given.at_most

    given.out.mkdir(parents=True, exist_ok=True)
    venv = environment()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = model(folder / MODEL)
        engines = [
            VllmEngine(venv, shape, folder, flags(given.engines, given.cache_tokens) | given.flags)
            for _ in range(given.engines)
        ]
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.wait()
            print(f"{len(engines)} engines ready after {time.monotonic() - begun:.0f} s", flush=True)
            asyncio.run(warm(engines))
            profile_file = given.out / "engine.yaml"
            if not profile_file.exists():
                asyncio.run(emptied(engines))
                profile_file.write_text(as_yaml(asyncio.run(calibrated(engines[0], given.calibrate_tokens))))
            profile = load_profile(str(profile_file))
            print(f"calibrated after {time.monotonic() - begun:.0f} s", flush=True)
            alone = Table(given.out / "alone.csv", Row)
            if not alone.has(what="alone", seed=1):
                trace = agents(given.alone, given.seconds, seed=1)
                asyncio.run(emptied(engines))
                alone.add(asyncio.run(played("alone", trace, engines[0].url, seed=1)))
                alone.add(simulated(trace, profile, seed=1))
            table = Table(given.out / "policies.csv", Row)
            for seed in given.seeds:
                trace = agents(given.sessions, given.seconds, seed)
                for policy in random.Random(seed).sample(given.policies, len(given.policies)):
                    if not table.has(what=policy, seed=seed) and not late():
                        table.add(asyncio.run(routed(trace, policy, seed, engines)))
        finally:
            for engine in engines:
                shutil.copy(engine.log, given.out / f"engine-{engine.port}.log")
                engine.stop()
        if given.orders:
            schedulers(given, shape, folder, late)


if __name__ == "__main__":
    main()
