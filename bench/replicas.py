"""Measures the load messages between routers: bytes, and processor time to make and to receive one.

    python bench/replicas.py messages [--engines 256 4096 16384] [--rounds 20]
    python bench/replicas.py fleet [--routers 1 4 16 64] [--engines 4096] [--rate 10] [--seconds 10]
    python bench/replicas.py clusters

`messages`: two routers, and every engine has a request. Before each message, some of the engines
get a further token, so that their load changes. Medians.

`fleet`: all routers in one process, in simulated time and without sockets. Each places its own
requests by LMETRIC and sends a message to every other one each interval. Each has used every engine
before, as in a fleet that has run for a while. At the end, all routers must count the same load.

`clusters`: the mean end to end in the simulator with the default policy, by number of workers and
of routers. Workers know each other's requests after 10 ms, routers after `replicas.interval` (64
routers: after 0.5 s, as the documentation advises) or never. Two workloads on 16 engines: a slice
of Mooncake's conversations, in which only the router of a request depends on the seed, and
synthetic conversations.

Each part writes `bench/results/DATE-replicas-PART.json`. Times are processor times of one thread.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

import lmetric as lm
from common import about, conversations, write_result
from lmetric.config import ReplicasConfig
from lmetric.profiles import load_profile
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import load_trace
from lmetric_lab.sim.workload import Workload, prepare

Rows = list[dict[str, Any]]
MODEL = "model"
INTERVAL: float = ReplicasConfig().interval
# A request of `fleet`.
PROMPT_TOKENS = 2_000
OUTPUT_TOKENS = 200
TOKENS_PER_SECOND = 20
PREFILL_SECONDS = 0.4
SAMPLES = 8  # full messages
AGREEMENT = 1e-5  # relative: messages have 24 bits of each number


def clock() -> float:
    """Returns the processor time in seconds."""
    return time.process_time_ns() / 1e9


@dataclass
class Member:
    """A router of a fleet, with its messages.

    Attributes:
        open: its requests, each with the time of its next event and the tokens that are left.
    """

    number: int
    router: lm.Router
    version: int = 0
    open: deque[tuple[lm.Ticket, float, int]] = field(default_factory=deque)

    @classmethod
    def of(cls, number: int, engines: int, policy: str) -> Member:
        """Returns a router of this many engines, named as on Kubernetes."""
        router = lm.Router(policy, record_bytes=1 << 16)
        for engine in range(engines):
            router.add_instance(f"vllm-{engine // 64}-{engine % 64}.vllm:8000", cache_blocks=4_000)
        return cls(number, router)

    def enter(self, now: float) -> None:
        """Notes which load has changed."""
        self.version += 1
        self.router.enter_load(self.version, self.version - 1, now=now)

    def message(self, now: float, *, full: bool) -> bytes:
        """Returns a message with the changes of the last version, or with the whole load."""
        base = None if full else self.version - 1
        return lm.encode_load(f"{self.number:x}", self.version, base, [(MODEL, self.router)], now=now)

    def receive(self, body: bytes, now: float) -> None:
        """Applies a message."""
        assert self.router.import_load(lm.LoadMessage(body), MODEL, now=now)

    def place(self, now: float) -> None:
        """Places a request."""
        request = lm.Request(prompt_tokens=PROMPT_TOKENS, max_tokens=OUTPUT_TOKENS)
        _, ticket = self.router.route(request, now=now)
        self.open.append((ticket, now + PREFILL_SECONDS, OUTPUT_TOKENS))

    def step(self, now: float) -> None:
        """Passes on the tokens that the engines have produced since the last step."""
        for _ in range(len(self.open)):
            ticket, due, left = self.open.popleft()
            if due <= now:
                if left == OUTPUT_TOKENS:
                    ticket.first_token(now=now)
                    left -= 1
                else:
                    made = min(round(TOKENS_PER_SECOND * INTERVAL), left)
                    ticket.tokens(made, now=now)
                    left -= made
            if left:
                self.open.append((ticket, due, left))
            else:
                ticket.done(now=now)


def timed(call: Callable[[], object]) -> float:
    """Returns the processor time of a call in milliseconds."""
    began = clock()
    call()
    return (clock() - began) * 1e3


def measure(engines: int, percent: int, rounds: int) -> tuple[float, float, float]:
    """Returns the bytes of a message, and the milliseconds to make and to receive it."""
    now = time.monotonic()
    sender, receiver = (Member.of(number, engines, "round_robin") for number in range(2))
    for _ in range(engines):
        sender.place(now)
    tickets = [ticket for ticket, *_ in sender.open]
    for ticket in tickets:
        ticket.first_token(now=now)
    sender.enter(now)
    receiver.receive(sender.message(now, full=True), now)
    sizes, made, received = [], [], []
    changed = max(engines * percent // 100, 1)
    for number in range(rounds):
        now += INTERVAL
        for place in range(number * changed, (number + 1) * changed):
            tickets[place % engines].tokens(1, now=now)
        bodies: list[bytes] = []

        def make(bodies: list[bytes] = bodies, now: float = now) -> None:
            sender.enter(now)
            bodies.append(sender.message(now, full=False))

        made.append(timed(make))
        received.append(timed(lambda bodies=bodies, now=now: receiver.receive(bodies[0], now)))
        sizes.append(len(bodies[0]))
    return median(sizes), median(made), median(received)


def messages(engines: Iterable[int], rounds: int) -> Rows:
    """Prints the bytes and times of messages."""
    rows = []
    print("| engines | changed | bytes | make, ms | receive, ms |\n| --- | --- | --- | --- | --- |")
    for count in engines:
        for percent in (1, 10, 100):
            size, made, received = measure(count, percent, rounds)
            print(f"| {count:,} | {percent}% | {size:,.0f} | {made:.2f} | {received:.2f} |", flush=True)
            row = {"engines": count, "changed_percent": percent, "bytes": size}
            rows.append(row | {"make_ms": made, "receive_ms": received})
    return rows


def use_all(member: Member, engines: int, now: float) -> None:
    """Places a request on every engine, and ends it."""
    member.router.set_policy("round_robin")
    for _ in range(engines):
        member.place(now)
    for ticket, *_ in member.open:
        ticket.first_token(now=now)
        ticket.done(now=now)
    member.open.clear()
    member.router.set_policy("lmetric")


def exchange(members: list[Member], now: float) -> tuple[list[int], float, float]:
    """Every router sends its changes to all others.

    Returns the bytes of the messages, and the seconds to make and to receive all of them.
    """
    began = clock()
    for member in members:
        member.enter(now)
    bodies = [member.message(now, full=False) for member in members]
    made = clock()
    for sender, body in zip(members, bodies, strict=True):
        for member in members:
            if member is not sender:
                member.receive(body, now)
    return [len(body) for body in bodies], made - began, clock() - made


def disagreement(members: list[Member], now: float) -> float:
    """Returns the greatest relative difference between what two routers count on an engine."""
    names = ["bs", "tokens", "queued_prefill_tokens", "window_prefill_tokens"]
    worst = 0.0
    seen = [member.router.indicators(now, names=names) for member in members]
    for name in names:
        values = np.array([columns[name] for columns in seen])
        spread = np.ptp(values, axis=0) / np.maximum(values.max(axis=0), 1.0)
        worst = max(worst, float(spread.max()))
    return worst


def fleet(routers: Sequence[int], engines: int, rate: float, seconds: float) -> Rows:
    """Prints what each router of a fleet sends per second, and its processor time."""
    return [row for count in routers for row in one_fleet(count, engines, rate, seconds)]


def one_fleet(routers: int, engines: int, rate: float, seconds: float) -> Rows:
    """Prints and returns the rows of a number of routers."""
    now = time.monotonic()
    members = [Member.of(number, engines, "lmetric") for number in range(routers)]
    for member in members:
        use_all(member, engines, now)
        member.enter(now)
    for sender in members:
        body = sender.message(now, full=True)
        for member in members:
            if member is not sender:
                member.receive(body, now)
    sizes, made, received = [], [], []
    rng = np.random.default_rng(1)
    for _ in range(round(seconds / INTERVAL)):
        now += INTERVAL
        for member in members:
            member.step(now)
            for _ in range(rng.poisson(rate * INTERVAL)):
                member.place(now)
        bodies, making, receiving = exchange(members, now)
        sizes.append(mean(bodies))
        made.append(making / routers)
        received.append(receiving / routers)
    worst = disagreement(members, now)
    running = sum(len(member.open) for member in members)
    counted = members[0].router.indicators(now, names=["bs"])["bs"].sum()
    print(f"{routers} routers, {engines} engines, {running} requests in flight ({counted:.0f} counted)")
    assert counted == running
    if routers == 1:
        return []  # it sends nothing
    full = [member.message(now, full=True) for member in members[:SAMPLES]]
    make_full = mean(timed(lambda each=each: each.message(now, full=True)) for each in members[:SAMPLES])
    receive_full = mean(
        timed(lambda body=body, other=other: other.receive(body, now))
        for body, (_, other) in zip(full, pairwise(members), strict=False)
    )
    half = len(sizes) // 2  # by then, as many requests end as begin
    rows = {
        "changes": (mean(sizes[half:]), mean(made[half:]), mean(received[half:])),
        "whole load": (mean(map(len, full)), make_full / 1e3, receive_full / 1e3 * (routers - 1)),
    }
    print(f"greatest difference between routers: {worst:.1e}")
    print("| messages | bytes | MB/s sent | make, % of a core | receive, % of a core |")
    print("| --- | --- | --- | --- | --- |")
    found = []
    for name, (size, making, receiving) in rows.items():
        sent = size * (routers - 1) / INTERVAL / 1e6
        making, receiving = making / INTERVAL * 100, receiving / INTERVAL * 100
        print(f"| {name} | {size:,.0f} | {sent:.2f} | {making:.1f} | {receiving:.1f} |", flush=True)
        row = {"routers": routers, "engines": engines, "in_flight": running, "messages": name, "bytes": size}
        costs = {"make_percent_of_a_core": making, "receive_percent_of_a_core": receiving}
        found.append(row | {"mb_per_second": sent} | costs)
    assert worst < AGREEMENT
    return found


PROFILE = load_profile("independent-sim")
ENGINES, SEEDS = 16, 2
# Workers or routers, and the seconds until they know each other's requests.
COUNTS = [
    *(("workers", count, 0.01) for count in (1, 2, 4)),
    *(("routers", count, seconds) for count, seconds in ((4, INTERVAL), (16, INTERVAL), (64, 0.5))),
    *(("routers without messages", count, None) for count in (4, 16, 64)),
]


def workloads() -> dict[str, Callable[[int], Workload]]:
    """Returns the workloads by name: the requests of a seed."""
    slice_ = prepare(load_trace("slice"), PROFILE)

    def made(seed: int) -> Workload:
        return conversations(seed, 1.25, 200, PROFILE)

    return {"slice": lambda _: slice_, "conversations": made}


def cluster(name: str, routers: int, seconds: float | None, seed: int) -> tuple[float, int]:
    """Returns the mean end to end of a run, and its requests."""
    run = simulate(
        workloads()[name](seed),
        instances=ENGINES,
        profile=PROFILE,
        seed=seed,
        signals="delayed",
        admission="vllm",
        output_known=False,
        routers=routers,
        sharing_seconds=None if routers == 1 else seconds,
    ).e2e_seconds
    return float(run.mean()), len(run)


def clusters() -> Rows:
    """Prints the means of simulated clusters. Uses all cores: the figures depend on no machine."""
    rows = []
    with ProcessPoolExecutor() as pool:
        asked = {
            (name, count): [pool.submit(cluster, name, *count[1:], seed) for seed in range(SEEDS)]
            for name in workloads()
            for count in COUNTS
        }
        for (name, (what, count, seconds)), runs in asked.items():
            means = [run.result()[0] for run in runs]
            if count == 1:
                alone = mean(means)
            row = {"workload": name, "engines": ENGINES, "what": what, "count": count, "seconds": seconds}
            row |= {"requests": [run.result()[1] for run in runs], "mean_e2e_seconds": means}
            rows.append(row | {"of_one": mean(means) / alone})
            print(f"{name}, {count} {what}: {mean(means):.3f} s, x{mean(means) / alone:.4f}", flush=True)
    return rows


def main() -> None:
    """Runs a part, and writes its raw file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("messages")
    part.add_argument("--engines", type=int, nargs="*", default=[256, 4_096, 16_384])
    part.add_argument("--rounds", type=int, default=20, help="number of messages")
    part = parts.add_parser("fleet")
    part.add_argument("--routers", type=int, nargs="+", default=[1, 4, 16, 64])
    part.add_argument("--engines", type=int, default=4_096)
    part.add_argument("--rate", type=float, default=10, help="requests per second and router")
    part.add_argument("--seconds", type=float, default=10, help="simulated seconds")
    parts.add_parser("clusters")
    for part in parts.choices.values():
        part.add_argument("--out", type=Path, help="default: bench/results/DATE-replicas-PART.json")
    given = vars(parser.parse_args())
    name, out = given.pop("part"), given.pop("out")
    load = [os.getloadavg()]
    result = about(None, []) | {"setting": given}
    result["rows"] = {"messages": messages, "fleet": fleet, "clusters": clusters}[name](**given)
    result["load_average"] = [*load, os.getloadavg()]
    print(write_result(result, f"replicas-{name}", out))


if __name__ == "__main__":
    main()
