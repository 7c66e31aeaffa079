"""Compares request routers inside Ray Serve: lmetric-router's and Ray's own.

Each router serves the same trace with the same emulated engines as replicas, once per seed, in an
application of its own. With ``--scale-to``, the number of replicas changes in the middle.

RAY_VENV=/path/of/the/environment python bench/gateways/ray_serve.py --out /tmp/ray.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from lmetric.machine import machine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "whatif"))

from run import RUN, write_trace  # noqa: E402

ROUTERS = {
    "lmetric": ("lmetric.gateways.ray_serve.LmetricRequestRouter", "lmetric"),
    "power_of_two": ("ray.serve._private.request_router.pow_2_router.PowerOfTwoChoicesRequestRouter", None),
    "prefix_aware": (
        "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter",
        None,
    ),
}
FIGURES = ("ttft_mean", "ttft_p99", "tpot_mean", "hit_ratio")


async def serve(
    router: str, trace: Path, replicas: int, scale_to: int | None, seconds: float
) -> dict[str, Any]:
    """The report of a replay against one router."""
    path, policy = ROUTERS[router]
    words = ["--router", path, "--replicas", str(replicas), *(["--policy", policy] if policy else [])]
    folders = (ROOT / "python", ROOT / "examples" / "ray_serve")
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    }  # fmt: skip
    world = await asyncio.create_subprocess_exec(
        str(Path(os.environ["RAY_VENV"]) / "bin" / "python"), str(ROOT / "bench/gateways/ray_world.py"),
        *words,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    assert world.stdin is not None
    assert world.stdout is not None
    try:
        port = (await _line(world.stdout, "ready")).split()[1]
        target = f"http://127.0.0.1:{port}"
        replay = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, "replay", "--trace", str(trace), "--target", target, "--json",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        if scale_to is not None:
            await asyncio.sleep(seconds / 2)
            world.stdin.write(f"{scale_to}\n".encode())
            await _line(world.stdout, "scaled")
        told, _ = await replay.communicate()
        if replay.returncode != 0:
            sys.exit(f"{router}: the replay failed")
        world.stdin.close()
        await world.wait()
    finally:
        if world.returncode is None:
            world.kill()
            await world.wait()
    return orjson.loads(told)  # type: ignore[no-any-return]


async def _line(stream: asyncio.StreamReader, word: str) -> str:
    while line := (await stream.readline()).decode():
        if line.startswith(word):
            return line
    sys.exit(f"Ray ended before it was {word}")


def figures(report: dict[str, Any]) -> dict[str, float]:
    """The figures of a report: seconds, and the share of cached prompt tokens."""
    return {
        "ttft_mean": report["ttft_seconds"]["mean"], "ttft_p99": report["ttft_seconds"]["p99"],
        "tpot_mean": report["tpot_seconds"]["mean"], "hit_ratio": report["hit_rate"],
        "failed": report["failed"],
    }  # fmt: skip


async def main() -> None:
    """Runs all routers and prints the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="traces")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--scale-to", type=int, help="replicas from the middle of the trace")
    parser.add_argument("--requests", type=int, default=220)
    parser.add_argument("--rate", type=float, default=7.0, help="requests per second")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    flags = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="lmetric-") as name:
        for seed in range(flags.seeds):
            trace = Path(name) / f"{seed}.jsonl"
            write_trace(trace, flags.requests, flags.rate, seed)
            for router in ROUTERS:
                seconds = flags.requests / flags.rate
                report = await serve(router, trace, flags.replicas, flags.scale_to, seconds)
                found.setdefault(router, []).append(figures(report))
                print(f"{router}, trace {seed}: {found[router][-1]}", file=sys.stderr)
    print(f"{'router':14}" + "".join(f"{name:>28}" for name in FIGURES))
    for router, runs in found.items():
        cells = []
        for figure in FIGURES:
            values = [run[figure] for run in runs]
            cells.append(f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        print(f"{router:14}" + "".join(f"{cell:>28}" for cell in cells))
    if flags.out:
        made = {
            "machine": machine(),
            "command": f"python bench/gateways/ray_serve.py {' '.join(sys.argv[1:])}",
            "routers": found,
        }
        flags.out.write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2) + b"\n")


if __name__ == "__main__":
    asyncio.run(main())
