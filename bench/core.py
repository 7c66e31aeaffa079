"""Writes the core's figures to raw files: stages of a decision, the index, splits, rounds of moves.

    python bench/core.py latency [--out FILE]
    python bench/core.py plans [--out FILE]
    python bench/core.py decode [--out FILE]
    python bench/core.py threads [--out FILE]
    python bench/core.py sizes [--out FILE]
    python bench/core.py memory [--prompts 10000000] [--out FILE]  # minutes, no noise

Runs programs of the repository. `latency` runs `lmetric-router bench --json`, the example
`index_latency` of `lmetric-kv`, and criterion's `score` bench for LMETRIC over 1,024 instances.
`plans` runs the examples `split_latency`, `priority_latency`, `replica_latency` and
`rebalance_latency`; `decode` runs `decode_latency`; `memory` runs `index_memory`. `threads` calls
`Router.route_many` from one and from two threads, in turns. `sizes` times `Router.route` on prompts
of 8k tokens by number of instances, and runs the example `index_fleet`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import lmetric as lm
from common import ROOT, about, percentile, write_result
from fleet import BLOCK, Fleet, Prompt
from lmetric.defaults import DEFAULT_POLICY

Figures = dict[str, Any]
LATENCY = re.compile(r"^(\S.*?)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)$")

CUT = re.compile(r"^(\S.*?)\s+p50\s+([\d.]+) us\s+p99\s+([\d.]+) us", re.MULTILINE)
ROUND = re.compile(r"^(\S.*?) {2,}(\d+) +(\d+) +[\d.]+ +([\d.]+) +([\d.]+) +([\d.]+)$", re.MULTILINE)


def run(*argv: str, timeout: float = 3600) -> str:
    """Returns the standard output of a command in the repository. Exits if the command fails."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        sys.exit(f"core.py: {' '.join(argv)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


# Examples of other crates than the core.
CRATES = {
    "index_fleet": "lmetric-kv",
    "index_latency": "lmetric-kv",
    "split_latency": "lmetric-study",
    "decode_latency": "lmetric-study",
}


def example(name: str, *arguments: str) -> str:
    """Returns the output of an example."""
    what = ["-p", CRATES.get(name, "lmetric-core"), "--example", name, "--", *arguments]
    return run("cargo", "run", "--release", "--locked", "--offline", "-q", *what)


def stages() -> list[dict[str, Any]]:
    """Returns the rows of `lmetric-router bench`."""
    program = str(Path(sys.executable).parent / "lmetric-router")
    flags = ["--policy", "lmetric", "--instances", "256", "--instances", "1024"]
    for tokens in (1_000, 8_000, 32_000, 100_000):
        flags += ["--prompt-tokens", str(tokens)]
    answer = json.loads(run(program, "bench", "--json", "--stored-pairs", "1000000", *flags))
    rows: list[dict[str, Any]] = answer["results"]
    return rows


MEMORY = (
    "prompts",
    "pairs",
    "index_bytes",
    "a_pair",
    "feed_bytes",
    "a_name",
    "resident",
    "evicted",
    "seconds",
)


def memory(printed: str) -> dict[str, list[dict[str, float]]]:
    """Returns the rows of each feed's memory curve."""
    curves: dict[str, list[dict[str, float]]] = {}
    feed = ""
    for line in printed.splitlines():
        words = line.split()
        if " feed, " in line:
            feed = words[0]
        elif len(words) == len(MEMORY) and words[0].isdigit():
            curves.setdefault(feed, []).append(dict(zip(MEMORY, map(float, words), strict=True)))
    if set(curves) != {"approximate", "exact"}:
        sys.exit(f"core.py: index_memory printed no curves of both feeds:\n{printed}")
    return curves


def score_1024() -> dict[str, dict[str, float]]:
    """Criterion's medians and their 95 % intervals, us: the scores, and the scores with the
    choice."""
    what = ["--bench", "score", "--", "--warm-up-time", "1", "--measurement-time", "2", "lmetric.*/1024"]
    run("cargo", "bench", "--locked", "-q", "-p", "lmetric-core", *what)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    answer = {}
    for what_is, name in {"score": "lmetric_score", "score and choice": "lmetric"}.items():
        path = target / "criterion" / "score+best" / name / "1024" / "new" / "estimates.json"
        if not path.is_file():
            sys.exit(f"core.py: criterion left no {path}")
        median = json.loads(path.read_text())["median"]
        interval = median["confidence_interval"]
        bounds = {"low_us": interval["lower_bound"] / 1e3, "high_us": interval["upper_bound"] / 1e3}
        answer[what_is] = {"p50_us": median["point_estimate"] / 1e3, **bounds}
    return answer


def latency() -> Figures:
    """Measures the stages, the scores, and the index alone."""
    printed = example("index_latency").splitlines()
    rows = [match.groups() for line in printed if (match := LATENCY.match(line))]
    return {
        "index_latency": {name: {"p50_us": float(p50), "p99_us": float(p99)} for name, _, p50, p99 in rows},
        "index_latency_printed": printed,
        "score_1024": score_1024(),
        "stages": stages(),
    }


# Calls that are timed one by one, and the examples that time them.
CALLS = {"cuts": "split_latency", "priorities": "priority_latency", "replicas": "replica_latency"}


def plans() -> Figures:
    """Measures searches for splits, whole decisions, priorities, load exchanged between replicas,
    and rounds of rebalancing."""
    calls = {
        what: {
            name: {"p50_us": float(p50), "p99_us": float(p99)} for name, p50, p99 in CUT.findall(example(by))
        }
        for what, by in CALLS.items()
    }
    rounds = ROUND.findall(example("rebalance_latency"))
    if not all(calls.values()) or not rounds:
        sys.exit(f"core.py: {', '.join(CALLS.values())} or rebalance_latency printed no figures")
    return {
        **calls,
        "rounds": [
            {
                "what": what,
                "instances": int(instances),
                "requests": int(requests),
                "left_out_percent": float(left_out),
                "p50_us": float(p50),
                "p99_us": float(p99),
            }
            for what, instances, requests, left_out, p50, p99 in rounds
        ],
    }


DECODE = re.compile(r"^(\w+) +(\d+) +(\d+) +([\d.]+) +([\d.]+)$", re.MULTILINE)


def decode() -> Figures:
    """Measures decisions that choose a decode instance, by policy, instances and requests on
    each."""
    found = DECODE.findall(example("decode_latency"))
    if not found:
        sys.exit("core.py: decode_latency printed no figures")
    return {
        "decisions": [
            {
                "policy": policy,
                "instances": int(instances),
                "requests": int(requests),
                "p50_us": float(p50),
                "p99_us": float(p99),
            }
            for policy, instances, requests, p50, p99 in found
        ]
    }


ROUNDS, BATCHES, BATCH, TOKENS, INSTANCES = 15, 60, 64, 8_192, 256


def batches(router: lm.Router, requests: list[lm.Request], seconds: list[float]) -> None:
    """Routes batches. Appends the CPU seconds of this thread in `route_many`."""
    spent = 0.0
    for start in range(BATCHES):
        batch = [requests[(start * BATCH + n * 37) % len(requests)] for n in range(BATCH)]
        begin = time.thread_time()
        results = router.route_many(batch)
        spent += time.thread_time() - begin
        del results  # the tickets end
    seconds.append(spent)


def by_threads(router: lm.Router, requests: list[lm.Request], count: int) -> dict[str, float]:
    """Returns microseconds of CPU per decision, and decisions per second by the clock."""
    seconds: list[float] = []
    workers = [threading.Thread(target=batches, args=(router, requests, seconds)) for _ in range(count)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    decisions = count * BATCHES * BATCH
    return {
        "cpu_us": sum(seconds) / decisions * 1e6,
        "decisions_per_second": decisions / (time.perf_counter() - begin),
    }


def interval(ratios: list[float]) -> dict[str, float]:
    """The median of ratios, and the order statistics that hold it with at least 95 %."""
    ratios, chance, rank = sorted(ratios), 0.0, 0
    for low in range(len(ratios) // 2):
        chance += math.comb(len(ratios), low) / 2 ** len(ratios)
        if 2 * chance > 0.05:
            break
        rank = low
    return {"median": statistics.median(ratios), "low": ratios[rank], "high": ratios[-1 - rank]}


def threads() -> Figures:
    """Measures `route_many` on one router with one and with two threads, in turns.

    Half of each prompt is shared. Prompts are owned by the request, or arrays of Python's.
    """
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 128_000, TOKENS // 2, dtype=np.uint32)
    prompts = [
        np.concatenate((shared, rng.integers(0, 128_000, TOKENS // 2, dtype=np.uint32))) for _ in range(1000)
    ]
    figures: Figures = {"instances": INSTANCES, "prompt_tokens": TOKENS, "batch": BATCH}
    for kind, requests in {
        "owned": [lm.Request(prompt.tobytes()) for prompt in prompts],
        "arrays": [lm.Request(prompt) for prompt in prompts],
    }.items():
        router = lm.Router("lmetric", seed=1)
        for number in range(INSTANCES):
            router.add_instance(f"e{number}")
        for count in (1, 2):  # fills the index
            by_threads(router, requests, count)
        rounds = [[by_threads(router, requests, count) for count in (1, 2)] for _ in range(ROUNDS)]
        ratios = {
            name: interval([two[name] / one[name] for one, two in rounds])
            for name in ("cpu_us", "decisions_per_second")
        }
        one, two = (statistics.median(each[n]["cpu_us"] for each in rounds) for n in (0, 1))
        cpu, speed = (ratios[name] for name in ("cpu_us", "decisions_per_second"))
        print(
            f"{kind:8} CPU per decision {one:.2f} us, two threads {two:.2f} us: x{cpu['median']:.2f} "
            f"[{cpu['low']:.2f}, {cpu['high']:.2f}]; decisions/s x{speed['median']:.2f} "
            f"[{speed['low']:.2f}, {speed['high']:.2f}]"
        )
        figures[kind] = {"rounds": rounds, "two_over_one": ratios}
    return figures


# Instances of `sizes`, calls of a turn, and turns of each policy.
SIZES, CALLS_OF_A_TURN, TURNS = (16, 64, 256, 1_024, 4_096, 16_384), 4_000, 5
# Calls until the memory of the ring of decision records is not new to the process.
WARM_UP_CALLS = 15_000
WARM_PROMPTS = 16  # so few that caches of the processor hold what a decision needs
# Blocks of each instance in the example `index_fleet`.
FLEET_BLOCKS = 4_000
FLEET_SIZE = re.compile(r": (\d+) pairs, (\d+) bytes, ([\d.]+) a pair, ([\d.]+) s to store")
FLEET_CALL = re.compile(r"^(\w+) (\d+) blocks: ([\d.]+) µs$", re.MULTILINE)


def decisions(router: lm.Router, prompts: list[Prompt], calls: int) -> list[float]:
    """Returns the microseconds of each decision, from the token ids to the chosen instance."""
    samples = []
    for call in range(calls):
        tokens = prompts[call * 7919 % len(prompts)].tokens
        began = time.perf_counter_ns()
        _, ticket = router.route(lm.Request(token_ids=tokens))
        samples.append((time.perf_counter_ns() - began) / 1e3)
        ticket.segment_done()
    return samples


def index_fleet(instances: int) -> dict[str, float]:
    """Returns the memory and the calls of an index of this many instances."""
    printed = example("index_fleet", str(instances), str(FLEET_BLOCKS))
    size = FLEET_SIZE.search(printed)
    calls = FLEET_CALL.findall(printed)
    if size is None or not calls:
        sys.exit(f"core.py: index_fleet printed no figures:\n{printed}")
    pairs, total, each, seconds = map(float, size.groups())
    figures = {"pairs": pairs, "bytes": total, "bytes_per_pair": each, "seconds_to_store": seconds}
    return (
        figures
        | {f"{name}_us": float(us) for name, _, us in calls}
        | {"blocks_of_a_call": float(calls[0][1])}
    )


def sizes() -> Figures:
    """Measures decisions and the index by number of instances.

    The engines' caches hold about a million (instance, block) pairs. Both policies decide in turns.
    """
    rows = []
    for instances in SIZES:
        fleet = Fleet(instances=instances)
        routers = {name: fleet.router(name) for name in ("lmetric", DEFAULT_POLICY)}
        prompts = fleet.prompts[TOKENS // BLOCK]
        gc.collect()
        gc.freeze()  # as the server does
        samples: dict[tuple[str, int], list[float]] = {}
        for router in routers.values():
            decisions(router, prompts, WARM_UP_CALLS)
        for _ in range(TURNS):
            for name, router in routers.items():
                for some in (prompts[:WARM_PROMPTS], prompts):
                    found = samples.setdefault((name, len(some)), [])
                    found += decisions(router, some, CALLS_OF_A_TURN)
        for (name, count), found in samples.items():
            found.sort()
            row = {"instances": instances, "policy": name, "prompts": count, "pairs": fleet.pairs()}
            row |= {key: percentile(found, share) for key, share in (("p50_us", 0.5), ("p99_us", 0.99))}
            rows.append(row | {"calls": len(found)})
            print(
                f"{instances:6} {name:12} {count:4} prompts: p50 {row['p50_us']:.2f} us, "
                f"p99 {row['p99_us']:.2f} us",
                flush=True,
            )
    index = [{"instances": instances} | index_fleet(instances) for instances in SIZES]
    return {"decisions": rows, "index": index, "blocks_of_each_instance": FLEET_BLOCKS}


PARTS = {"latency": latency, "plans": plans, "decode": decode, "threads": threads, "sizes": sizes}
# Names of the raw files.
KINDS = {
    "latency": "core",
    "plans": "plans",
    "decode": "decode",
    "threads": "threads",
    "sizes": "sizes",
    "memory": "memory",
}


def main() -> None:
    """Runs one kind and writes its raw file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument(
        "--prompts", type=int, default=10_000_000, help="distinct prompts of the memory curve"
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-KIND.json")
    options = parser.parse_args()
    result = about(None, ["rustc"])
    load = [os.getloadavg()]
    if options.what == "memory":
        result["index_memory"] = memory(example("index_memory", str(options.prompts)))
    else:
        result |= PARTS[options.what]()
    result["load_average"] = [*load, os.getloadavg()]
    print(f"raw figures: {write_result(result, KINDS[options.what], options.out)}")


if __name__ == "__main__":
    main()
