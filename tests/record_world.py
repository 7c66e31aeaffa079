"""Records of simulated requests, in the schema of `serve`, for tests of their readers."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from lmetric.profiles import load_profile
from lmetric.record_schema import SCHEMA_VERSION
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace
from lmetric_lab.whatif import Recording

PROFILE = load_profile("independent-sim").in_blocks_of(16)
SETTINGS: dict[str, Any] = {
    "profile": PROFILE, "instances": 4, "admission": "vllm", "signals": "delayed",
    "split": "none", "prefix_fetch": "none",
}  # fmt: skip


def make_trace(requests: int = 400, rate: float = 7.0, seed: int = 1, answer_tokens: float = 60) -> Trace:
    """Prompts with shared beginnings: forty families of 1,600 to 6,400 tokens."""
    rng = np.random.default_rng(seed)
    family = rng.integers(0, 40, requests)
    shared = rng.integers(100, 400, 40)[family]
    own = rng.integers(8, 80, requests)
    lists = [
        np.concatenate((f * 10_000 + np.arange(s), 10**6 + index * 1_000 + np.arange(o))).astype(np.uint64)
        for index, (f, s, o) in enumerate(zip(family, shared, own, strict=True))
    ]
    return Trace(
        name="test",
        arrival_seconds=np.cumsum(rng.exponential(1 / rate, requests)),
        input_tokens=(shared + own) * 16 + rng.integers(0, 16, requests),
        output_tokens=2 + rng.geometric(1 / answer_tokens, requests),
        hash_offsets=np.concatenate(([0], np.cumsum(shared + own))).astype(np.int64),
        hash_ids=np.concatenate(lists),
        block_tokens=16,
    )


def simulated(trace: Trace, policy: str, seed: int = 0) -> Run:
    """A run of the fleet that the records describe."""
    return simulate(trace, policy=policy, seed=seed, **SETTINGS)


def write_records(
    folder: Path,
    trace: Trace,
    run: Run,
    change: Callable[[int, dict[str, Any]], Any] = lambda *_: None,
    **header: Any,
) -> Path:
    """Writes a file of records of a run. ``change`` may change the line of each request."""
    names = [f"e{number}" for number in range(4)]
    engine = {"kind": "vllm", "role": "both", "mode": "exact", "usable": True, "block_tokens": 16}
    head = {"type": "header", "schema": SCHEMA_VERSION, "router_version": "0.1.0", "at": 1e9, "key_id": "k"}
    fleet = {
        "type": "fleet", "at": 1e9, "model": "m", "policy": run.policy, "knobs": {}, "block_tokens": 16,
        "engines": [engine | {"name": name, "cache_blocks": PROFILE.cache_blocks} for name in names],
    }  # fmt: skip
    lines: list[dict[str, Any]] = [head | {"sample": 1.0} | header, fleet]
    for index in range(len(trace)):
        line: dict[str, Any] = {
            "type": "request", "at": 1e9 + float(trace.arrival_seconds[index]), "model": "m",
            "path": "/v1/completions", "stream": True, "status": 200, "outcome": "finished",
            "policy": run.policy, "instance": names[int(run.instance[index])],
            "prompt_tokens": int(trace.input_tokens[index]), "output_tokens": int(run.output_tokens[index]),
            "cached_tokens": int(run.hit_tokens[index]), "hash_unit": "tokens", "hash_block": 16,
            "hashes": base64.b64encode(trace.blocks(index).astype("<u8").tobytes()).decode(),
            "ttft_seconds": float(run.ttft_seconds[index]) + 0.01,
            "tpot_seconds": float(run.tpot_seconds[index]),
            "e2e_seconds": float(run.e2e_seconds[index]) + 0.01,
        }  # fmt: skip
        change(index, line)
        lines.append(line)
    path = folder / "records-test.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    return path


def recorded(arrivals: Any, duration: float = 1.0) -> Recording:
    """Requests of one engine at these times, which all take the same time."""
    count = len(arrivals)
    plain = make_trace(count)
    full = np.full(count, 0.1)
    return Recording(
        trace=replace(plain, arrival_seconds=np.asarray(arrivals, np.float64)),
        instance=np.zeros(count, np.int64), held_seconds=0 * full, ttft_seconds=full, tpot_seconds=full,
        e2e_seconds=np.full(count, duration), cached_tokens=0 * full, engines=("e0",),
        policy=None, guard=None, block_tokens=16, cache_blocks=100, exact=True, sessions=False, notes=(),
    )  # fmt: skip  # type: ignore[arg-type]
