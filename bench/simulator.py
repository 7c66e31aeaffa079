"""Times simulated clusters, ours and Dynamo's offline replay: one process per run, in turn.

    python bench/simulator.py TRACE [--rivals DIR] [--repeats 5] [--out FILE]

The Mooncake conversation trace, one policy, everything recorded. It runs on 16 engines of 4,000
blocks of 512 tokens and of 16,384 blocks of 64 tokens. It also runs 16 times as fast on 256
engines, and on pools of 4 prefill and 12 decode engines. Dynamo's `run_mocker_trace_replay` plays
the same requests on the same cache (blocks of 64), by round robin and by its KV router; its step
times are its own. We read the trace outside the timing (once for all runs of a study); Dynamo reads
it inside its call.

Figures are seconds of processor time (the cost of a run) and of wall clock, medians with their
range, and the peak memory of the process, the interpreter included. Two runs are compared in every
figure to see whether they repeat.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import about, median_range, write_result

# Name: policy, instances, tokens of a block, blocks of an engine, speed; decode policy of pools.
OURS: dict[str, tuple[str | int | float, ...]] = {
    "16 engines, 4,000 x 512": ("lmetric", 16, 512, 4000, 2.2),
    "16 engines, 16,384 x 64": ("lmetric", 16, 64, 16384, 2.2),
    "16 engines, 16,384 x 64, round robin": ("round_robin", 16, 64, 16384, 2.2),
    "256 engines, 4,000 x 512, 16 times as fast": ("lmetric", 256, 512, 4000, 35.2),
    "256 engines, 16,384 x 64, 16 times as fast": ("lmetric", 256, 64, 16384, 35.2),
    "4P12D, 4,000 x 512, least_requests": ("lmetric", 16, 512, 4000, 2.2, "least_requests"),
    "4P12D, 4,000 x 512, sibyl": ("lmetric", 16, 512, 4000, 2.2, "sibyl"),
    "4P12D, 4,000 x 512, sibyl_plus": ("lmetric", 16, 512, 4000, 2.2, "sibyl_plus"),
}
# Seconds of one core that a run may take.
BUDGETS = dict(zip(OURS, (0.15, 0.5, 0.5, 1.5, 1.5), strict=False))
DYNAMO = {"Dynamo, 16,384 x 64, round robin": "round_robin", "Dynamo, 16,384 x 64, kv_router": "kv_router"}

MEASURE = """
import hashlib, json, resource, sys, time

def measure(play):
    cpu, wall = time.process_time(), time.perf_counter()
    digest = play()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu": cpu, "wall": wall, "peak_mib": peak, "digest": digest}))
"""
OUR_RUN = """
from lmetric.profiles import load_profile
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.workload import prepare
from lmetric_lab.sim.traces import load_trace

path, policy, instances, block, blocks, speed, *decode = json.loads(sys.argv[1])
pools = {"roles": "4P12D", "decode_policy": decode[0]} if decode else {}
profile = {**load_profile("independent-sim").constants(), "block_tokens": block, "cache_blocks": blocks}
profile.setdefault("kv_bytes_per_token", 131072)
workload = prepare(load_trace(path).faster(speed), profile)

def play():
    run = simulate(workload, policy=policy, instances=instances, profile=profile, **pools)
    columns = (run.instance, run.hit_tokens, run.first_token_seconds, run.finished_seconds)
    return hashlib.sha256(b"".join(c.tobytes() for c in columns)).hexdigest()

measure(play)
"""
DYNAMO_RUN = """
import os
os.environ["DYN_LOG"] = "error"
from dynamo._core import run_mocker_trace_replay

path, mode = json.loads(sys.argv[1])

def play():
    engine = {"engine": {"num_gpu_blocks": 16384, "block_size": 64}}
    result = run_mocker_trace_replay([path], extra_engine_args=engine, num_workers=16, router_mode=mode,
                                     trace_block_size=512, arrival_speedup_ratio=2.2)
    timed = ("wall_time_ms", "processed_tokens_per_s", "processed_output_tokens_per_s")
    figures = {k: v for k, v in result.summary.items() if k not in timed}
    return hashlib.sha256(json.dumps(figures, sort_keys=True, default=str).encode()).hexdigest()

measure(play)
"""


def run(python: str, code: str, argument: list[Any]) -> dict[str, Any]:
    """Runs one simulation in a process of its own."""
    argv = [python, "-c", MEASURE + code, json.dumps(argument)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"simulator.py: a run failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rivals", type=Path, help="a virtual environment with ai-dynamo-runtime")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    samples: dict[str, list[dict[str, Any]]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "trace.jsonl"
        packed = options.trace.read_bytes()
        plain.write_bytes(gzip.decompress(packed) if options.trace.suffix == ".gz" else packed)
        for _ in range(options.repeats):
            loads.append(os.getloadavg())
            for name, told in OURS.items():
                argument = [str(options.trace), *told]
                samples.setdefault(name, []).append(run(sys.executable, OUR_RUN, argument))
            for name, mode in DYNAMO.items() if options.rivals else ():
                python = str(options.rivals / "bin" / "python")
                samples.setdefault(name, []).append(run(python, DYNAMO_RUN, [str(plain), mode]))

    rows = []
    print(f"{'':46}{'cpu s':>22}{'wall s':>22}{'peak MiB':>10}  repeats")
    for name, runs in samples.items():
        row = {key: median_range([r[key] for r in runs]) for key in ("cpu", "wall", "peak_mib")}
        same = len({r["digest"] for r in runs}) == 1 if len(runs) > 1 else None
        rows.append({"name": name, **row, "bit_equal": same, "budget_seconds": BUDGETS.get(name)})
        cells = (f"{m:.3f} ({low:.3f}-{high:.3f})".rjust(22) for m, low, high, _ in (row["cpu"], row["wall"]))
        print(
            name.ljust(46), *cells, f"{row['peak_mib'][0]:9.0f}", {True: "yes", False: "no", None: "?"}[same]
        )
    result = {**about(None, ["rustc"]), "load_average": loads, "trace": options.trace.name, "rows": rows}
    if options.rivals:
        code = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"
        argv = [str(options.rivals / "bin" / "python"), "-c", code]
        told = subprocess.run(argv, capture_output=True, text=True, check=True)
        result["versions"]["ai-dynamo-runtime"] = told.stdout.strip()
    print("raw:", write_result(result, "simulator", options.out), file=sys.stderr)


if __name__ == "__main__":
    main()
