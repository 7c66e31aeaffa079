"""Canaries on real routers with embedded engines: equal policies, and a worse one.

Each run replays conversations through `serve --embedded` with a canary, and reads the router's own
comparison. A canary with the same policy must show no difference in about 95% of the runs. The
requests of these runs are also split again by many salts, which shows how often an interval of
equal policies contains zero. A canary with a worse policy must be found.

python bench/canary/run.py --out /tmp/canary.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import about, write_result
from lmetric.canary import METRICS, Comparison, Outcome, Splitter
from lmetric.record_files import read_records
from lmetric_lab.replay import Client, Player
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.traces import Trace

RUN = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"
BLOCK = 16
FIRST_BLOCKS, TURN_BLOCKS = 120, 20  # of a conversation's first prompt, and of each further turn
THINK_SECONDS = 0.5


def conversations(count: int, turns: int, rate: float, seed: int) -> Trace:
    """Conversations that begin ``rate`` times a second. Each turn repeats the earlier ones."""
    rng = np.random.default_rng(seed)
    rows = []
    begins = np.cumsum(rng.exponential(1 / rate, count))
    for session in range(count):
        first = FIRST_BLOCKS + int(rng.integers(40))
        for turn in range(1 + int(rng.integers(turns, 2 * turns))):
            rows.append(
                (begins[session] + turn * (THINK_SECONDS + 0.5), session, turn, first + turn * TURN_BLOCKS)
            )
    rows.sort()
    index = {(session, turn): place for place, (_, session, turn, _) in enumerate(rows)}
    lengths = np.array([blocks for *_, blocks in rows])
    return Trace(
        name="conversations",
        arrival_seconds=np.array([at for at, *_ in rows]),
        input_tokens=lengths * BLOCK + 1,
        output_tokens=2 + rng.geometric(1 / 20, len(rows)),
        hash_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        hash_ids=np.concatenate(
            [session * 100_000 + np.arange(blocks) for _, session, _, blocks in rows]
        ).astype(np.uint64),
        block_tokens=BLOCK,
        previous=np.array([index.get((session, turn - 1), -1) for _, session, turn, _ in rows]),
        think_seconds=np.full(len(rows), THINK_SECONDS),
        sessions=np.array([session for _, session, *_ in rows]),
    )


async def run(
    trace: Trace, canary: str, seed: int, engines: int, folder: Path, *, rollback: bool = False
) -> dict[str, Any]:
    """Serves the trace with a canary. Returns the state of the canary at the end."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC_")}
    trial = {"policy": canary, "share": 0.5, "salt": f"run {seed}", "warmup_seconds": 5}
    if not rollback:
        trial |= {"rollback_ttft_increase": None, "rollback_error_increase": None}
    file = folder.with_suffix(".json")  # JSON is YAML
    file.write_bytes(orjson.dumps({"admin": True, "canary": trial}))
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, "serve", "--port", "0", "--log-json", "--embedded", str(engines),
        "--policy", "lmetric", "--records", str(folder), "--config", str(file),
        stderr=asyncio.subprocess.PIPE, env=environ,
    )  # fmt: skip
    assert router.stderr is not None
    try:
        url = ""
        while not url and (line := await router.stderr.readline()):
            if b'"listening"' in line:
                url = orjson.loads(line)["url"]
        reader = asyncio.create_task(router.stderr.read())
        assert trace.sessions is not None
        names = [f"session {number}" for number in trace.sessions.tolist()]
        async with Client(url) as client:
            player = Player(
                trace, client, PromptWriter(seed=seed).prompt, fields=lambda index: {"user": names[index]}
            )
            await player.run()
            failed = sum(not record.completed for record in player.records)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/admin/canary") as answer:
            (state,) = orjson.loads(await answer.read())
        router.terminate()
        await reader
    finally:
        if router.returncode is None:
            router.kill()
        await router.wait()
    return short({"failed": failed, **state})


def outcome(request: dict[str, Any]) -> Outcome:
    """The result of a recorded request."""
    return Outcome(
        request["status"] >= 500,
        request["e2e_seconds"],
        request.get("ttft_seconds"),
        max(0, request.get("output_tokens", 0) - 1),
        request["prompt_tokens"] if "cached_tokens" in request else 0,
        request.get("cached_tokens", 0),
    )


def coverage(folders: list[Path], salts: int, share: float) -> dict[str, float]:
    """Share of new splits of each run in which the interval of a metric contains zero."""
    inside: dict[str, list[bool]] = {name: [] for name in METRICS}
    for folder in folders:
        requests = [(f"{each['session']}".encode(), outcome(each)) for each in read_records(folder).requests]
        for salt in range(salts):
            splitter, comparison = Splitter(f"again {salt}", share), Comparison()
            for key, each in requests:
                place = splitter.place(key)
                comparison.add(place.canary, place.bucket, each)
            for found in comparison.differences():
                if found.interval[0] < found.interval[1]:  # some value differs
                    inside[found.metric].append(not found.excludes_zero)
    return {name: float(np.mean(found)) for name, found in inside.items() if found}


def short(state: dict[str, Any]) -> dict[str, Any]:
    """The parts of a run's state that the result file keeps."""
    run = state["canary"]
    kept = ("stable", "canary", "interval", "clear")
    metrics = {name: {key: row[key] for key in kept} for name, row in run["metrics"].items()}
    return {
        "state": state["state"],
        "reason": state["reason"],
        "failed": state["failed"],
        "canary": {"requests": run["requests"], "groups": run["groups"], "metrics": metrics},
    }


def shown(state: dict[str, Any]) -> str:
    """The difference of the mean TTFT of a run."""
    row = state["canary"]["metrics"]["ttft_seconds"]
    low, high = row["interval"] or (float("nan"), float("nan"))
    return (
        f"{state['state']}: TTFT {row['stable'] * 1e3:.1f} ms stable, {row['canary'] * 1e3:.1f} ms canary, "
        f"95% {low * 1e3:+.1f} to {high * 1e3:+.1f} ms"
    )


async def main() -> None:
    """Runs all cases and prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--equal", type=int, default=5, help="runs with the same policy")
    parser.add_argument("--worse", type=int, default=3, help="runs with each worse policy")
    parser.add_argument("--policies", default="round_robin,random", help="worse policies")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=120)
    parser.add_argument(
        "--turns", type=int, default=3, help="least turns of a conversation; twice as many at most"
    )
    parser.add_argument("--rate", type=float, default=4.0, help="conversations per second")
    parser.add_argument("--salts", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    flags = parser.parse_args()
    settings = {name: value for name, value in vars(flags).items() if name != "out"}
    made: dict[str, Any] = about(None, []) | {"settings": settings, "equal": [], "worse": {}, "rollback": {}}

    def trace(seed: int) -> Trace:
        return conversations(flags.conversations, flags.turns, flags.rate, seed)

    with tempfile.TemporaryDirectory(prefix="lmetric-") as name:
        folders = []
        for seed in range(flags.equal):
            folders.append(Path(name) / f"equal-{seed}")
            made["equal"].append(await run(trace(seed), "lmetric", seed, flags.engines, folders[-1]))
            print(f"lmetric, seed {seed}: {shown(made['equal'][-1])}", file=sys.stderr)
        rows = [row for each in made["equal"] for row in each["canary"]["metrics"].values()]
        rows = [row for row in rows if row["interval"] and row["interval"][0] < row["interval"][1]]
        made["equal_inside"] = [sum(not row["clear"] for row in rows), len(rows)]
        for share in (0.5, 0.2):
            made[f"coverage_{share}"] = coverage(folders, flags.salts, share)
        for policy in flags.policies.split(",") if flags.worse else []:
            made["worse"][policy] = []
            for seed in range(flags.worse):
                folder = Path(name) / f"{policy}-{seed}"
                made["worse"][policy].append(await run(trace(seed), policy, seed, flags.engines, folder))
                print(f"{policy}, seed {seed}: {shown(made['worse'][policy][-1])}", file=sys.stderr)
            state = await run(
                trace(0), policy, 0, flags.engines, Path(name) / f"{policy}-rollback", rollback=True
            )
            made["rollback"][policy] = state
            print(
                f"{policy}, with rollback after {sum(state['canary']['requests'].values())} requests: "
                f"{state['reason']}",
                file=sys.stderr,
            )
    inside, rows_count = made["equal_inside"]
    print(f"equal policies: {inside} of {rows_count} intervals contain zero")
    for share in (0.5, 0.2):
        for name, each in made[f"coverage_{share}"].items():
            print(f"new splits, share {share}: {name} {each:.1%}")
    for policy, states in made["worse"].items():
        found = sum(state["canary"]["metrics"]["ttft_seconds"]["clear"] for state in states)
        print(f"{policy}: found in {found} of {len(states)} runs")
    if flags.out:
        print(write_result(made, "canary", flags.out))


if __name__ == "__main__":
    asyncio.run(main())
