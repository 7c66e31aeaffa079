"""Compares the ranking of `whatif` with real runs of the same policies.

Each policy serves the same trace on embedded engines, once per seed, and writes records. `whatif`
gets the records of one run alone, in turn of each policy in `--recorded`. Its ranking must have the
same best policy as the real runs, and the same order of every pair of policies whose ranges do not
overlap.

python bench/whatif/run.py --out /tmp/whatif.json
python bench/whatif/run.py --engines 8 --trace slice --speed 2 --out /tmp/overload.json

With `--folder`, a later call reuses the finished runs of an earlier one, so `--seeds 1`, then 2,
then 3 does the work in pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import orjson

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import about
from lmetric.record_files import read_records

POLICIES = ("lmetric", "vllm", "round_robin", "session_affinity")
RUN = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"
WARM_UP = 0.1  # share of the requests that no score counts, as in whatif

Span = tuple[float, float, float]


def write_trace(path: Path, requests: int, rate: float, seed: int = 1) -> None:
    """A trace of conversations that begin with ten shared prompts, few of them popular."""
    rng = np.random.default_rng(seed)
    shared = [[family * 100 + block for block in range(int(rng.choice([2, 4, 6])))] for family in range(10)]
    weights = 1 / np.arange(1, 11)
    live: list[list[int]] = []
    at, fresh, lines = 0.0, 1000, []
    for _ in range(requests):
        at += float(rng.exponential(1 / rate))
        if live and rng.random() < 0.6:
            conversation = live[int(rng.integers(len(live)))]
        else:
            conversation = list(shared[int(rng.choice(10, p=weights / weights.sum()))])
            live = [*live, conversation][-24:]
        for _ in range(int(rng.choice([1, 1, 2, 3]))):
            fresh += 1
            conversation.append(fresh)
        if len(conversation) > 20:
            live = [each for each in live if each is not conversation]
        line = {
            "timestamp": int(at * 1000),
            "input_length": len(conversation) * 512 - int(rng.integers(0, 400)),
            "output_length": 2 + int(rng.exponential(60)),
            "hash_ids": list(conversation),
        }
        lines.append(orjson.dumps(line) + b"\n")
    path.write_bytes(b"".join(lines))


async def serve(policy: str, seed: int, engines: int, replay_words: list[str], folder: Path) -> None:
    """Serves a trace under a policy, with records in ``folder``. ``replay_words``: its flags."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC_")}
    flags = ["--embedded", str(engines), "--policy", policy, "--records", str(folder), "--experimental"]
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, "serve", "--port", "0", "--log-json", "--set", f"seed={seed}", *flags,
        stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    assert router.stderr is not None
    try:
        url = ""
        while not url and (line := await router.stderr.readline()):
            if b'"listening"' in line:
                url = orjson.loads(line)["url"]
        reader = asyncio.create_task(router.stderr.read())
        words = ("replay", *replay_words, "--target", url)
        replay = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            RUN,
            *words,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        if await replay.wait() != 0:
            sys.exit(f"{policy}, seed {seed}: the replay failed")
        router.terminate()
        await reader
        await router.wait()
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()


def score(folder: Path) -> float:
    """Geometric mean of mean TTFT and mean TPOT, seconds."""
    records = read_records(folder)
    first = round(WARM_UP * len(records.requests))
    ttft, tpot = (records.column(f"{name}_seconds")[first:] for name in ("ttft", "tpot"))
    return float(np.sqrt(np.nanmean(ttft) * np.nanmean(tpot)))


async def ranking(folder: Path, policies: list[str], seeds: int) -> dict[str, Any]:
    """The result of `whatif`."""
    words = ("whatif", str(folder), "--policy", ",".join(policies), "--seeds", str(seeds), "--json", "-")
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, *words, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await done.communicate()
    found: dict[str, Any] = orjson.loads(out)
    return found


def relative(scores: dict[str, list[float]]) -> dict[str, Span]:
    """Mean, least and most of each policy's scores, relative to the best mean."""
    best = min(map(fmean, scores.values()))
    return {name: (fmean(own) / best, min(own) / best, max(own) / best) for name, own in scores.items()}


def agreement(real: dict[str, Span], simulated: dict[str, Span]) -> tuple[bool, list[str]]:
    """Whether the best policy is the same, and the pairs in another order.

    Only pairs count whose ranges overlap in neither.
    """
    same = min(real, key=lambda name: real[name][0]) == min(simulated, key=lambda name: simulated[name][0])
    wrong = []
    for one, other in combinations(real, 2):
        signs = []
        for spans in (real, simulated):
            a, b = spans[one], spans[other]
            signs.append(-1 if a[2] < b[1] else 1 if b[2] < a[1] else 0)
        if signs[0] * signs[1] < 0:
            wrong.append(f"{one} and {other}")
    return same, wrong


async def main() -> None:
    """Runs all policies and prints the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--recorded", default="round_robin", help="policies whose first run whatif gets")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rate", type=float, default=7.0, help="requests per second of the made trace")
    parser.add_argument("--trace-seed", type=int, default=1, help="of the made trace")
    parser.add_argument("--trace", help="a trace of replay, instead of the made one")
    parser.add_argument("--speed", type=float, default=1.0, help="of the replay")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    parser.add_argument(
        "--folder", type=Path, help="keeps the records, and reuses those of finished runs; default: a new one"
    )
    flags = parser.parse_args()
    policies = flags.policies.split(",")
    with tempfile.TemporaryDirectory(prefix="lmetric-") as name:
        folder = flags.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        trace = flags.trace or str(folder / "trace.jsonl")
        if not flags.trace:
            write_trace(Path(trace), flags.requests, flags.rate, flags.trace_seed)
        words = ["--trace", trace, "--requests", str(flags.requests), "--speed", str(flags.speed)]
        scores: dict[str, list[float]] = {}
        for seed in range(flags.seeds):
            for policy in policies:
                own = folder / f"{policy}-{seed}"
                if not own.exists():
                    await serve(policy, seed, flags.engines, words, begun := Path(name) / own.name)
                    shutil.move(begun, own)
                scores.setdefault(policy, []).append(score(own))
                print(f"{policy}, seed {seed}: {scores[policy][-1] * 1e3:.1f} ms", file=sys.stderr)
        real = relative(scores)
        whatifs = {}
        for recorded in filter(None, flags.recorded.split(",")):
            found = await ranking(folder / f"{recorded}-0", policies, flags.seeds)
            whatifs[recorded] = compared(recorded, real, found)
    if flags.out:
        local = ("--out", "--folder")
        pairs = pairwise(["", *sys.argv[1:]])
        words_of_command = [word for before, word in pairs if word not in local and before not in local]
        made = {
            **about(None, []),
            "command": f"python bench/whatif/run.py {' '.join(words_of_command)}",
            "score": "geometric mean of mean TTFT and mean TPOT, s; real and whatif are relative to the best",
            "real": real,
            "whatif": whatifs,
            "scores": scores,
        }
        flags.out.write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2) + b"\n")


def compared(recorded: str, real: dict[str, Span], found: dict[str, Any]) -> dict[str, Any]:
    """Prints one ranking of `whatif` next to the real runs, and returns it."""
    simulated = {place["policy"]: tuple(place["score"]) for place in found.get("ranking", [])}
    print(f"\n{f'records of {recorded}':24} {'really run':>22} {'whatif':>22}")
    for policy in sorted(real, key=lambda name: real[name][0]):
        texts = [
            f"{span[0]:.2f} ({span[1]:.2f} to {span[2]:.2f})" if span else "refused"
            for span in (real[policy], simulated.get(policy))
        ]
        print(f"{policy:24} {texts[0]:>22} {texts[1]:>22}")
    for figure in found["fit"]["figures"]:
        print(f"fit: {figure['name']} {figure['error']:+.1%}")
    result: dict[str, Any] = {"policies": simulated, "fit": found["fit"]}
    if simulated:
        same, wrong = agreement(real, simulated)
        print(f"same best policy: {'yes' if same else 'no'}; pairs in another order: {wrong or 'none'}")
        result |= {"same_best": same, "pairs_in_another_order": wrong}
    return result


if __name__ == "__main__":
    asyncio.run(main())
