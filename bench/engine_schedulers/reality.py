"""The simulator against two real vLLM engines on CPU, with several orders on the same requests.

    python bench/engine_schedulers/reality.py --venv VLLM_ENVIRONMENT OUT [--seeds 1 2 3]

The engines have a small model with random weights. Both are calibrated at once, because they share
the machine. Then each seed plays each order, live and in the simulator with that profile. Each run
adds rows to OUT/orders.csv; a second call plays what the file does not have.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from orders import ORDERS, Mix, Row, Table, compared, played, rate_of, running, shuffled, simulated, slo_of

from lmetric.profiles import Profile, load_profile
from lmetric.profiles.roofline import as_yaml
from lmetric_lab.calibrate import Calibrator
from vllm_process import VllmEngine, kv_bytes, model

LAYERS, HIDDEN = 4, 512
SLOTS = 8
FLAGS: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_model_len": 8192}
BLOCK = 32


async def calibrated(engines: Sequence[VllmEngine], tokens: int) -> Profile:
    """Calibrates the engines at once and returns the profile with the median step."""

    async def one(engine: VllmEngine) -> Profile:
        async with Calibrator(
            engine.url, budget_tokens=tokens, max_batch=SLOTS, max_prompt_tokens=6000
        ) as calibrator:
            return (await calibrator.run()).profile

    made = await asyncio.gather(*map(one, engines))
    middle = statistics.median_low(each.prefill_seconds_per_token for each in made)
    chosen = next(each for each in made if each.prefill_seconds_per_token == middle)
    return chosen.model_copy(update={"kv_bytes_per_token": kv_bytes(LAYERS, HIDDEN)})


def main() -> None:
    """Plays what the file does not have, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS)
    parser.add_argument("--requests", type=int, default=Mix.requests)
    parser.add_argument("--load", type=float, default=1.1, help="of what the engines serve at most")
    parser.add_argument("--calibrate-tokens", type=int, default=60_000)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    shape, mix = model(given.venv, LAYERS, HIDDEN), Mix(requests=given.requests)
    table, path = Table(given.out / "orders.csv", Row), (given.out / "engine.yaml").resolve()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def make(flags: dict[str, Any], environ: dict[str, str]) -> VllmEngine:
            return VllmEngine(given.venv, shape, folder, FLAGS | flags, environ)

        if not path.exists():
            with running("fcfs", given.engines, make, sequences=SLOTS, slo_ms=0.0, profile=path) as engines:
                path.write_text(as_yaml(asyncio.run(calibrated(engines, given.calibrate_tokens))))
        profile = load_profile(str(path))
        slo = slo_of(profile, mix)
        rate = rate_of(profile, mix.burst(profile.block_tokens), given.engines, given.load)
        print(f"token SLO {slo * 1e3:.0f} ms, {rate:.2f} requests/s", flush=True)
        for seed in given.seeds:
            trace = mix.trace(seed, rate, BLOCK)
            for order in shuffled(given.orders, seed):
                if table.has(order=order, side="live", seed=seed):
                    continue
                with running(
                    order, given.engines, make, sequences=SLOTS, slo_ms=slo * 1e3, profile=path
                ) as engines:
                    table.add(asyncio.run(played(order, trace, mix, seed, engines, path)))
                table.add(simulated(order, trace, mix, seed, given.engines, profile, slo))
    print(compared(table.rows()))


if __name__ == "__main__":
    main()
