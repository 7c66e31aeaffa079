"""Counts the core's instructions in two checkouts, by callgrind (Debian: valgrind).

    python bench/core_instructions.py --before CHECKOUT

CHECKOUT is another working tree of this repository, with its extension built in the same cargo
profile as this one's (`cargo build --release -p lmetric-py --lib`). The script counts the stages of
a decision, a token event and two simulations. Counts do not depend on other work on the machine.
Index memory is the figure of `Router.stats()` after 10,000 prompts on 64 instances. A run takes
some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DECIDE = """
from lmetric import _core
sizes = dict(prompt_tokens=[2000], iterations=1000, stored_pairs=10_000)
_core.bench_decision(policies=["lmetric"], instances=[{instances}], **sizes)
"""
# Checkouts before `lmetric.Request` take the prompt as a keyword, and their tickets end with
# `finished`.
ROUTER = """
import numpy as np, lmetric as lm
def route(router, tokens, now):
    if hasattr(lm, "Request"):
        return router.route(lm.Request(tokens), now=now)
    return router.route(tokens=tokens, now=now)
def end(ticket, now):
    (ticket.segment_done if hasattr(ticket, "segment_done") else ticket.finished)(now=now)
router = lm.Router("lmetric", seed=1)
for slot in range({instances}):
    router.add_instance(f"e{{slot}}")
"""
EVENTS = """
tokens, now = np.arange(2000, dtype=np.uint32), 0.0
for _ in range(300):
    now += 0.01
    _, ticket = route(router, tokens, now)
    ticket.sent(now=now + 0.1)
    ticket.first_token(now=now + 0.2)
    now += 0.2
    for _ in range(50):
        now += 0.02
        ticket.tokens(1, now=now)
    end(ticket, now)
"""
MEMORY = """
for k in range(10_000):
    _, ticket = route(router, np.arange(320, dtype=np.uint32) + np.uint32(k * 1000), 0.001 * k)
    ticket.sent(now=0.001 * k)
    ticket.first_token(now=0.001 * k)
    end(ticket, 0.001 * k)
print(router.stats()["index_bytes"])
"""
SIMULATE = """
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.workload import prepare
from lmetric_lab.sim.synthetic import read_synthetic
sizes = "input_tokens: {{p50: 1000, mean: 1500}}, output_tokens: {{p50: 100, mean: 150}}"
rate = "rate: 8.0, duration_seconds: 60, "
trace = read_synthetic("{{synthetic: sessions, seed: 3, " + rate + sizes + "}}").make()
simulate(prepare(trace, "qwen2.5-14b-a100"), profile="qwen2.5-14b-a100", **{fleet})
"""
# Name, function (its name differs between checkouts), calls in one run.
STAGES = [
    ("hash", r"hash::hash_tokens_after", 1000),
    ("match", r"(State>|Caches)::match_prefix", 1000),
    ("score", r"(State|Router)>::choose ", 1000),
    ("commit", r"Router>::commit ", 1000),
]
FLEETS = {
    "simulation, LMETRIC, 16 engines": 'dict(policy="lmetric", instances=16)',
    "simulation, SIBYL, 4P12D": 'dict(policy="sibyl", roles="4P12D", decode_policy="sibyl")',
}


def run(checkout: Path, code: str, *under: str) -> str:
    """Returns the output of Python ``code`` with the package of ``checkout``."""
    env = {**os.environ, "PYTHONPATH": str(checkout / "python"), "PYTHONHASHSEED": "0"}
    done = subprocess.run([*under, sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"core_instructions.py: {checkout}: exit status {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def counts(checkout: Path, code: str) -> str:
    """Returns each function's instructions, callees included, as lines of callgrind_annotate."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        run(checkout, code, "valgrind", "--tool=callgrind", f"--callgrind-out-file={out}")
        annotate = ["callgrind_annotate", "--threshold=100", "--inclusive=yes", "--show-percs=no", out]
        return subprocess.run(annotate, capture_output=True, text=True, check=True).stdout


def of(text: str, function: str) -> int:
    """Returns the count of the first line that names ``function``."""
    line = next((line for line in text.splitlines() if re.search(function, line)), None)
    if line is None:
        sys.exit(f"core_instructions.py: no function {function!r} was counted; is the extension stripped?")
    return int(line.split()[0].replace(",", ""))


def measure(checkout: Path) -> dict[str, float]:
    """Returns all figures of one checkout: instructions, and bytes of the index."""
    figures: dict[str, float] = {}
    for instances in (4, 16, 256):
        text = counts(checkout, DECIDE.format(instances=instances))
        # Filling the index also hashes: one prompt per instance and 80 more.
        for name, function, calls in STAGES:
            calls += instances + 80 if name == "hash" else 0
            figures[f"{name}, {instances} instances"] = of(text, function) / calls
    router = ROUTER.format(instances=16)
    figures["token event"] = of(counts(checkout, router + EVENTS), r"(Router|Lifecycle)>::advance ") / 15_900
    for name, fleet in FLEETS.items():
        figures[name] = of(counts(checkout, SIMULATE.format(fleet=fleet)), "lmetric_sim::cluster::simulate ")
    figures["index, bytes per block"] = int(run(checkout, ROUTER.format(instances=64) + MEMORY)) / 200_000
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, metavar="CHECKOUT")
    options = parser.parse_args()
    before, after = measure(options.before.resolve()), measure(ROOT)
    print("| | before | after | difference |\n| --- | --- | --- | --- |")
    for name, old in before.items():
        form = ".1f" if old < 100 else ",.0f"
        print(f"| {name} | {old:{form}} | {after[name]:{form}} | {after[name] / old - 1:+.1%} |")


if __name__ == "__main__":
    main()
