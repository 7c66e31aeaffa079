"""SIBYL on real vLLM engines on CPU: one engine prefills, two decode, KV moves by NIXL.

    python bench/sibyl/real.py --venv VLLM_ENVIRONMENT OUT [--seeds 1 2 3]

Each decode engine has a processor of its own, so that one cannot use the time that another leaves.
The engine that prefills, router and client use both. The model is small and has random weights. All
systems get the same requests, live and in the simulator with a profile of the decode engine. Each
run adds rows to OUT/real.csv; a second call plays what the file does not have.

With `early`, the router chooses the decode engine with the engine that prefills, as in the paper.
vLLM moves the KV cache after the prompt and not layer by layer. So this does not test the paper's
overlap of transfer and prefill, only the choice with older loads.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("bench/engine_schedulers", "bench/trust", "tests/real")]

from live import Live, TokenPrompts  # noqa: E402
from orders import Table, rate_of, unshared  # noqa: E402

from lmetric.profiles import Profile, load_profile  # noqa: E402
from lmetric.profiles.roofline import as_yaml  # noqa: E402
from lmetric_lab.calibrate import Calibrator  # noqa: E402
from lmetric_lab.demo import running_router  # noqa: E402
from lmetric_lab.ports import free_ports  # noqa: E402
from lmetric_lab.replay import Client, Player  # noqa: E402
from lmetric_lab.sim.result import Run  # noqa: E402
from lmetric_lab.sim.run import simulate  # noqa: E402
from lmetric_lab.sim.traces import Trace  # noqa: E402
from vllm_process import NIXL, VllmEngine, kv_bytes, model  # noqa: E402

LAYERS, HIDDEN = 4, 512
DECODES = 2
SLOTS = 32
BLOCK = 32
FLAGS: dict[str, Any] = {
    "scheduling_policy": "fcfs",
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": 1024,
    "max_model_len": 4096,
    "num_gpu_blocks_override": 2048,
    "kv_events_config": None,
    "kv_transfer_config": NIXL,
}
# Sets when the decode engine is chosen, a constant of the router.
PROGRAM = (
    "import sys; from lmetric.config import PoolSettings; PoolSettings.binding = sys.argv.pop(1);"
    "from lmetric.cli import main; main()"
)


@dataclass(frozen=True)
class System:
    """A rule for the decode engine, and when it is asked."""

    policy: str
    binding: str = "late"


SYSTEMS = {
    "round_robin": System("round_robin"),
    "least_requests": System("least_requests"),
    "sibyl": System("sibyl"),
    "sibyl_early": System("sibyl", "early"),
    "sibyl_plus": System("sibyl_plus"),
}


@dataclass(frozen=True)
class Chats:
    """Requests with short prompts; the answers are log-normal, as in recorded chats."""

    requests: int
    prompt: tuple[int, int] = (16, 400)
    answer_median: float = 90.0
    answer_sigma: float = 1.0
    longest_answer: int = 800

    def trace(self, seed: int, rate: float) -> Trace:
        """The requests, `rate` per second."""
        rng = np.random.default_rng(seed)
        prompts = rng.integers(*self.prompt, self.requests, endpoint=True)
        answers = rng.lognormal(np.log(self.answer_median), self.answer_sigma, self.requests)
        answers = np.clip(answers, 2, self.longest_answer).astype(np.int64)
        gaps = rng.exponential(1 / rate, self.requests)
        return unshared(f"chats-{seed}", seed, gaps, prompts, answers, BLOCK)


@dataclass
class Row:
    """Figures of a run. Times are seconds. TPOT counts requests with at least 20 tokens."""

    system: str
    side: str  # live or simulated
    seed: int
    requests: int
    failed: int
    tpot_mean: float
    tpot_p99: float
    ttft_mean: float
    e2e_mean: float
    e2e_p99: float

    @staticmethod
    def of(system: str, side: str, seed: int, run: Live | Run, trace: Trace, failed: int) -> Row:
        """From what clients measured, or from a simulation."""
        tpot = run.tpot_seconds[trace.output_tokens >= 20]
        e2e = run.e2e_seconds
        return Row(
            system,
            side,
            seed,
            len(trace),
            failed,
            tpot_mean=float(np.nanmean(tpot)),
            tpot_p99=float(np.nanpercentile(tpot, 99)),
            ttft_mean=float(np.nanmean(run.ttft_seconds)),
            e2e_mean=float(np.nanmean(e2e)),
            e2e_p99=float(np.nanpercentile(e2e, 99)),
        )


def start(engines: Sequence[VllmEngine]) -> None:
    """Starts the first engine on all processors, and each other one on a processor of its own."""
    every = sorted(os.sched_getaffinity(0))
    if len(every) < DECODES:
        raise SystemExit(f"{len(every)} processors; expected one for each of the {DECODES} decode engines")
    for number, engine in enumerate(engines):
        # Processes inherit it.
        os.sched_setaffinity(0, every if number == 0 else {every[number - 1]})
        engine.start()
    os.sched_setaffinity(0, every)
    for engine in engines:
        engine.wait()


async def played(
    name: str, trace: Trace, seed: int, engines: Sequence[VllmEngine], profile: Path, folder: Path
) -> Row:
    """Plays the requests through a router."""
    system = SYSTEMS[name]
    given = [{"url": e.url, "role": "decode" if n else "prefill"} for n, e in enumerate(engines)]
    config = folder / "router.yaml"
    config.write_text(yaml.safe_dump({"engines": given, "health": {"timeout": 30}, "guard": False}))
    words = ["--config", str(config), "--policy", "round_robin", "--decode-policy", system.policy]
    words += ["--profile", str(profile), "--programs", "none", "--experimental"]
    program = ("-c", PROGRAM, system.binding)
    async with running_router(free_ports(1)[0], words, program) as url, Client(url) as client:
        # Other tokens in each run: the engines stay, and their caches would know the prompts.
        tokens = TokenPrompts(len(SYSTEMS) * seed + list(SYSTEMS).index(name))
        player = Player(trace, client, tokens.prompt)
        await player.run()
    live = Live.of(player.records, 1.0)
    for failure in live.failures[:3]:
        print("failed:", failure, flush=True)
    return Row.of(name, "live", seed, live, trace, len(live.failures))


def simulated(name: str, trace: Trace, seed: int, profile: Profile) -> Row:
    """Plays the requests in the simulator."""
    run = simulate(
        trace,
        policy="round_robin",
        roles={"prefill": 1, "decode": DECODES},
        decode_policy=SYSTEMS[name].policy,
        binding=SYSTEMS[name].binding,
        profile=profile,
        admission="vllm",
        programs="none",
        seed=seed,
    )
    return Row.of(name, "simulated", seed, run, trace, run.summary().failed)


async def calibrated(url: str) -> Profile:
    """The profile of an engine."""
    async with Calibrator(url, budget_tokens=40_000, max_batch=SLOTS, max_prompt_tokens=2000) as calibrator:
        profile = (await calibrator.run()).profile
    return profile.model_copy(update={"kv_bytes_per_token": kv_bytes(LAYERS, HIDDEN)})


def compared(rows: Sequence[dict[str, str]]) -> str:
    """A Markdown table per measure: means over seeds, with the lowest and the highest."""
    lines = []
    for measure in ("tpot_mean", "tpot_p99", "ttft_mean", "e2e_mean", "e2e_p99"):
        lines += ["", f"| {measure.replace('_', ' ')}, ms | live | simulated |", "| --- | ---: | ---: |"]
        for name in SYSTEMS:
            cells = []
            for side in ("live", "simulated"):
                found = [float(r[measure]) * 1e3 for r in rows if (r["system"], r["side"]) == (name, side)]
                if found:
                    cells.append(f"{np.mean(found):.1f} ({min(found):.1f} to {max(found):.1f})")
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Plays what the file does not have, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--load", type=float, default=0.6, help="of what two engines serve that only decode")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    shape, chats = model(given.venv, LAYERS, HIDDEN), Chats(given.requests)
    table, path = Table(given.out / "real.csv", Row), (given.out / "engine.yaml").resolve()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        engines = [VllmEngine(given.venv, shape, folder, FLAGS) for _ in range(1 + DECODES)]
        try:
            start(engines)
            if not path.exists():
                path.write_text(as_yaml(asyncio.run(calibrated(engines[1].url))))
            profile = load_profile(str(path))
            rate = rate_of(profile, chats.trace(seed=0, rate=1e6), DECODES, given.load)
            print(f"{rate:.2f} requests/s", flush=True)
            for seed in given.seeds:
                trace = chats.trace(seed, rate)
                for name in random.Random(seed).sample(given.systems, len(given.systems)):
                    if table.has(system=name, side="live", seed=seed):
                        continue
                    table.add(asyncio.run(played(name, trace, seed, engines, path, folder)))
                    table.add(simulated(name, trace, seed, profile))
        finally:
            for engine in engines:
                engine.stop()
    print(compared(table.rows()))


if __name__ == "__main__":
    main()
