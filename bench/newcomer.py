"""How many requests a new, cold engine gets at first, by policy: is a slow start needed?

A fleet of engines at a steady load gets one more engine. Prefills of an engine run one after
another; decodes run beside them and slow each other down. The router is the real core router.

    python bench/newcomer.py [--engines 4] [--policies lmetric least_requests]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from array import array
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import lmetric as lm

PREFIX_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 4096, 256, 150
PREFILL_TOKENS_PER_SECOND = 8_000.0
STEP_SECONDS, SLOTS = 0.015, 32  # a decode step takes STEP_SECONDS * (1 + batch size / SLOTS)
WARM_SECONDS, AFTER_SECONDS = 60.0, 60.0


@dataclass
class Engine:
    """A simulated engine with an unlimited prefix cache."""

    free_at: float = 0.0
    batch: int = 0
    cached: set[int] = field(default_factory=set)


@dataclass
class Row:
    at: float
    instance: str
    ttft: float


def run(policy: str, engines: int, rate: float, prefixes: int, seed: int) -> tuple[list[Row], int]:
    """Returns the requests, and the newcomer's most requests in flight."""
    rng = random.Random(seed)
    router = lm.Router(policy, seed=seed)
    fleet = {f"e{i}": Engine() for i in range(engines)}
    for name in fleet:
        router.add_instance(name)
    heads = [array("I", (rng.randrange(50_000) for _ in range(PREFIX_TOKENS))) for _ in range(prefixes)]
    order, events = itertools.count(), []  # type: ignore[var-annotated]
    heapq.heappush(events, (0.0, next(order), "arrive", None))
    rows: list[Row] = []
    added, running, most = False, 0, 0
    while events:
        now, _, what, about = heapq.heappop(events)
        if now > WARM_SECONDS + AFTER_SECONDS:
            break
        if not added and now >= WARM_SECONDS:
            added = True
            fleet["new"] = Engine()
            router.add_instance("new")
        if what == "arrive":
            heapq.heappush(events, (now + rng.expovariate(rate), next(order), "arrive", None))
            which = rng.randrange(prefixes)
            own = array("I", (rng.randrange(50_000) for _ in range(OWN_TOKENS)))
            decision, ticket = router.route(lm.Request(token_ids=heads[which] + own), now=now)
            ticket.sent(now)
            engine = fleet[decision.instance]
            new = OWN_TOKENS + (0 if which in engine.cached else PREFIX_TOKENS)
            engine.cached.add(which)
            engine.free_at = max(engine.free_at, now) + new / PREFILL_TOKENS_PER_SECOND
            rows.append(Row(now, decision.instance, engine.free_at - now))
            running += decision.instance == "new"
            most = max(most, running)
            heapq.heappush(events, (engine.free_at, next(order), "first", (ticket, decision.instance)))
            continue
        ticket, name = about  # type: ignore[misc]
        engine = fleet[name]
        if what == "first":
            ticket.first_token(now)
            engine.batch += 1
            seconds = OUTPUT_TOKENS * STEP_SECONDS * (1 + engine.batch / SLOTS)
            heapq.heappush(events, (now + seconds, next(order), "done", about))
        else:
            ticket.done(output_tokens=OUTPUT_TOKENS, now=now)
            engine.batch -= 1
            running -= name == "new"
    return rows, most


def figures(rows: list[Row], most: int) -> dict[str, Any]:
    """Returns the newcomer's share and TTFT in the time after it came."""
    shown: dict[str, Any] = {"most in flight": most}
    for begin, end in ((0, 2), (2, 10), (10, 60)):
        part = [row for row in rows if WARM_SECONDS + begin <= row.at < WARM_SECONDS + end]
        new = [row.ttft for row in part if row.instance == "new"]
        old = [row.ttft for row in part if row.instance != "new"]
        key = f"{begin}-{end} s"
        shown[f"share {key}"] = f"{len(new) / len(part):.0%}"
        shown[f"TTFT new / old {key}"] = f"{mean(new or [0]):.2f} / {mean(old or [0]):.2f}"
    return shown


def main() -> None:
    """Prints one line per policy and load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--policies", nargs="+", default=["lmetric", "least_requests", "round_robin"])
    parser.add_argument("--rates", nargs="+", type=float, default=[10.0, 20.0])
    args = parser.parse_args()
    for rate in args.rates:
        for policy in args.policies:
            print(policy, f"{rate:g}/s", figures(*run(policy, args.engines, rate, args.prefixes, 1)))


if __name__ == "__main__":
    main()
