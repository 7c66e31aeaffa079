"""Measures the CPU time that a shadow and a canary add to a request, in the router's process.

    python bench/canary/cost.py [--rounds 15] [--out FILE]

A request is a decision about a prompt of 1,000 tokens, its end, and with a canary also its outcome
for the comparison. Nothing is sent. All three variants run in turn in each round, with 1,000
requests each, and "more" compares with `off` of the same round.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import structlog

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import about, median_range, write_result
from lmetric import Request
from lmetric.canary import Outcome
from lmetric.config import ServerConfig
from lmetric.server.fleet.fleet import Fleet

REQUESTS, TOKENS, SESSIONS = 1000, 1000, 200
OUTCOME = Outcome(False, e2e_seconds=1.0, ttft_seconds=0.1, further_tokens=50)
TRIALS: dict[str, dict[str, Any]] = {
    "off": {},
    "shadow": {"shadow": {"policy": "vllm"}},
    "canary": {"canary": {"policy": "vllm", "share": 0.5, "warmup_seconds": 0}},
}


def model_of(engines: int, trial: dict[str, Any]) -> Any:
    """Returns a model with this many engines, and a policy on trial."""
    fleet = Fleet(ServerConfig.model_validate({"model": "m", "policy": "lmetric", **trial}))
    fleet.build()
    (model,) = fleet.models
    for number in range(engines):
        model.router.add_instance(f"e{number}")
    return model


def microseconds(model: Any, requests: list[Request]) -> float:
    """Returns the CPU time of a request."""
    trials, route = model.trials, model.router.route
    began = time.thread_time()
    for request in requests:
        now = time.monotonic()
        placed = None
        if trials is not None and trials.on:
            _, ticket, placed = trials.route(request, now, None)
        else:
            _, ticket = route(request, now=now, arrival=None)
        ticket.done(now=now)
        if placed is not None:
            trials.canary.ended(placed, now, OUTCOME)
    return (time.thread_time() - began) / len(requests) * 1e6


def measured(engines: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns medians and ranges of the variants, and of their differences to `off`."""
    models = {name: model_of(engines, trial) for name, trial in TRIALS.items()}
    rng = np.random.default_rng(engines)
    found: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        requests = [
            Request(rng.integers(0, 100_000, TOKENS, np.uint32), session=f"s{rng.integers(SESSIONS)}")
            for _ in range(REQUESTS)
        ]
        names = list(models)[number % len(models) :] + list(models)[: number % len(models)]
        for name in names:
            value = microseconds(models[name], requests)
            if number:  # the first round warms up
                found[name].append(value)
    return {
        name: {
            "request_us": median_range(values),
            "more_us": median_range([a - b for a, b in zip(values, found["off"], strict=True)]),
        }
        for name, values in found.items()
    }


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: bench/results/DATE-canary-cost.json")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    before = os.getloadavg()
    cells = {str(engines): measured(engines, given.rounds) for engines in (4, 256)}
    for engines, variants in cells.items():
        for name, cell in variants.items():
            (us, low, high, _), (more, least, most, _) = cell["request_us"], cell["more_us"]
            print(
                f"{engines} engines, {name}: {us:.1f} us ({low:.1f} to {high:.1f}), "
                f"more: {more:+.1f} ({least:+.1f} to {most:+.1f})"
            )
    load = {"load_average": [before, os.getloadavg()]}
    result = {**about(None, []), **load, "unit": "us of CPU: median, least, greatest, rounds", "cells": cells}
    print(write_result(result, "canary-cost", given.out))


if __name__ == "__main__":
    main()
