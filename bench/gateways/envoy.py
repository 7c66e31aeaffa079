"""Compares the endpoint picker inside Envoy with Envoy's own policies, on emulated engines.

python bench/gateways/envoy.py: the same trace and seed through Envoy's LEAST_REQUEST and
ROUND_ROBIN, through Envoy with the picker, and through `serve` without Envoy. Each has new engines.
Then the time of a decision for prompts of 100,000 tokens. Writes envoy.csv and envoy_decision.csv.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import yaml
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "envoy"), str(ROOT / "tests"), str(Path(__file__).parents[1])]

import run as example  # noqa: E402

from common import commit  # noqa: E402
from epp_world import exchange, free_ports, request_body, request_head  # noqa: E402

ARMS = ("envoy ROUND_ROBIN", "envoy LEAST_REQUEST", "envoy, picker lmetric", "serve lmetric")
PART_BYTES = 16_384  # as Envoy sends a body over HTTP/1.1
TOKENS_PER_PROMPT = 100_000
TOKENIZER = ROOT / "python" / "lmetric" / "engines" / "emulated" / "tokenizer.json"


def without_picker(config: dict[str, Any], policy: str) -> None:
    """Removes the picker from Envoy's configuration."""
    resources = config["static_resources"]
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][-1:]
    (engines,) = [each for each in resources["clusters"] if each["name"] == "engines"]
    del engines["load_balancing_policy"]
    engines["lb_policy"] = policy
    resources["clusters"] = [engines]


def envoy(stack: ExitStack, urls: list[str], picker: int, policy: str | None) -> str:
    """Starts Envoy. Returns its URL. ``policy``: its own; None: it asks the picker."""
    admin, gateway = free_ports(2)
    text = example.CONFIG.read_text()
    places = [url.removeprefix("http://").rsplit(":", 1) for url in urls]
    for word, value in {
        "ADMIN_PORT": str(admin),
        "GATEWAY_PORT": str(gateway),
        "FAIL_OPEN": "false",
        "PICKERS": example.PLACE % ("127.0.0.1", picker),
        "ENGINES": ", ".join(example.PLACE % (host, port) for host, port in places),
    }.items():
        text = text.replace(word, value)
    config = yaml.safe_load(text)
    if policy is not None:
        without_picker(config, policy)
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    flags = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"]
    process = example.started(stack, [example.envoy_program(), "-c", str(file), *flags])
    example.wait_for(f"http://127.0.0.1:{admin}/ready", process)
    return f"http://127.0.0.1:{gateway}"


def replay(arm: str, given: argparse.Namespace) -> dict[str, Any]:
    """Runs the trace through one arm. Returns its report."""
    with ExitStack() as stack:
        urls = example.emulated_engines(stack, given.engines)
        pages, picker = free_ports(2)
        engines = [word for url in urls for word in ("--engine", url)]
        command = "serve" if arm.startswith("serve") else "epp"
        words = [*example.LMETRIC, command, "--port", str(pages), "--policy", "lmetric", *engines]
        words += ["--set", f"epp.port={picker}", "--log-level", "error", "--log-json"]
        target = f"http://127.0.0.1:{pages}"
        if "lmetric" in arm:
            example.wait_for(f"{target}/ready", example.started(stack, words))
        if arm.startswith("envoy"):
            policy = arm.split()[1] if "lmetric" not in arm else None
            target = envoy(stack, urls, picker, policy)
        call = [
            *example.LMETRIC,
            "replay",
            "--target",
            target,
            "--model",
            "emulated",
            "--json",
            "--seed",
            "1",
        ]
        call += ["--trace", "slice", "--requests", str(given.requests), "--speed", str(given.speed)]
        done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
        report: dict[str, Any] = json.loads(done.stdout)
        return report


async def decisions(target: str, number: int, *, shared: bool) -> list[float]:
    """Returns the seconds from the end of each body to the pick.

    ``shared``: the prompts are turns of one conversation.
    """
    seconds = []
    vocabulary = sorted(Tokenizer.from_file(str(TOKENIZER)).get_vocab())
    words = [word for word in vocabulary if word[:1] in (" ", "Ġ") and word[1:].isalpha()]
    words = [" " + word[1:] for word in words]
    for turn in range(number):
        draw = random.Random(0 if shared else turn)
        prompt = "".join(draw.choices(words, k=TOKENS_PER_PROMPT)) + f" turn {turn}"
        body = orjson.dumps({"model": "emulated", "prompt": prompt, "max_tokens": 1, "stream": True})
        parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        async with exchange(target) as stream:
            await stream.send(request_head(), *(request_body(part, False) for part in parts[:-1]))
            await asyncio.sleep(0.05)
            begin = time.perf_counter()
            await stream.send(request_body(parts[-1], True))
            answer = await stream.call.read()
            seconds.append(time.perf_counter() - begin)
            assert answer.HasField("request_headers"), answer
    return seconds


def measure_decisions(number: int) -> list[dict[str, Any]]:
    """Returns the rows of envoy_decision.csv."""
    rows = []
    with ExitStack() as stack:
        urls = example.emulated_engines(stack, 4)
        pages, picker = free_ports(2)
        engines = [word for url in urls for word in ("--engine", url)]
        words = [*example.LMETRIC, "epp", "--port", str(pages), "--policy", "lmetric", *engines]
        words += ["--set", f"epp.port={picker}", "--log-level", "error", "--log-json"]
        example.wait_for(f"http://127.0.0.1:{pages}/ready", example.started(stack, words))
        for shared in (True, False):
            taken = asyncio.run(decisions(f"127.0.0.1:{picker}", number, shared=shared))
            taken = taken[1:] if shared else taken  # the first turn is a new prompt
            cuts = statistics.quantiles(taken, n=20, method="inclusive")
            rows.append(
                {
                    "prompts": "turns of one conversation" if shared else "new texts",
                    "decisions": len(taken),
                    "p50_seconds": round(statistics.median(taken), 5),
                    "p95_seconds": round(cuts[-1], 5),
                    "commit": commit(),
                }
            )
    return rows


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(file.read_text(), end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--decisions", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    rows = []
    for arm in ARMS:
        report = replay(arm, given)
        print(json.dumps({"arm": arm, **report}), file=sys.stderr, flush=True)
        rows.append({"arm": arm, "engines": given.engines, "speed": given.speed} | shown(report["report"]))
    write(given.out / "envoy.csv", rows)
    write(given.out / "envoy_decision.csv", measure_decisions(given.decisions))


def shown(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a report for the table."""
    row = {name: report[name] for name in ("requests", "failed")}
    row["hit_rate"] = round(report["hit_rate"], 4)
    for name in ("ttft", "tpot", "e2e"):
        times = report[f"{name}_seconds"]
        row |= {f"{name}_{part}_seconds": round(times[part], 4) for part in ("mean", "p50", "p99")}
    return row | {"commit": commit()}


if __name__ == "__main__":
    main()
