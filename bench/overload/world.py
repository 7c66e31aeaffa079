"""The scenarios of the overload study: the workload, the offered load, and admission.

The load is the rate of arrivals over the capacity. The capacity is the rate at which the fleet
completes requests of the same workload while every engine has a long queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from lmetric.profiles import load_profile
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import RequestsTrace
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import prepare

INSTANCES = 8
PROFILE = load_profile("qwen3-30b-a3b-h20")
LENGTHS = {
    "chats": {
        "input_tokens": {"p50": 200, "mean": 600, "max": 8000},
        "output_tokens": {"p50": 150, "mean": 250, "max": 2000},
    },
    "documents": {
        "input_tokens": {"p50": 3000, "mean": 4500, "max": 30000},
        "output_tokens": {"p50": 120, "mean": 200, "max": 2000},
    },
}
SECONDS = 240.0
WARM_SECONDS = 40.0  # of arrivals that are not counted
CAPACITY_SECONDS = 60.0
TTFT_SECONDS = {"chats": 2.0, "documents": 5.0}
NEIGHBOR, FLOOD = 1, 2  # tenants


@dataclass(frozen=True)
class Stage:
    """Offered load over the capacity. `flood`: further load of another tenant; None: one tenant."""

    load: float
    workload: str = "chats"
    flood: float | None = None

    @property
    def label(self) -> str:
        """The heading of the scenario."""
        flood = "" if self.flood is None else f", the other tenant {self.flood:g}"
        return f"{self.workload}, load {self.load:g}{flood}"


@dataclass(frozen=True)
class Arm:
    """A way of admission; None: every request goes to an engine at once."""

    label: str
    settings: Mapping[str, Any] | None = field(default=None, hash=False)


AT_ONCE = Arm("no admission")
WAITS = Arm("room, no deadline", {"room_seconds": 0.1, "max_waiting": 10**9, "max_waiting_per_tenant": 10**9})
ADMITTED = Arm("admission by TTFT", {"ttft_seconds": None})
ARMS = [AT_ONCE, WAITS, ADMITTED]


def made(workload: str, rate: float, seconds: float, seed: int, tenant: int) -> Trace:
    """Requests of a tenant, with shared prefixes of their own."""
    return RequestsTrace.model_validate(
        {
            "seed": seed + 1000 * tenant,
            "rate": rate,
            "duration_seconds": seconds,
            "prefixes": {"count": 200, "zipf": 1.0, "tokens": {"p50": 800, "mean": 1000, "max": 4000}},
            **LENGTHS[workload],
        }
    ).make()


def joined(traces: Mapping[int, Trace]) -> Trace:
    """The requests of several tenants in order of arrival; the tenant is the session."""
    arrivals = np.concatenate([trace.arrival_seconds for trace in traces.values()])
    order = np.argsort(arrivals, kind="stable")
    tenants = np.concatenate([np.full(len(trace), tenant) for tenant, trace in traces.items()])
    ids, firsts, counts = [], [], []
    base = at = 0
    for trace in traces.values():
        ids.append(trace.hash_ids + np.uint64(base))
        base += int(trace.hash_ids.max()) + 1
        firsts.append(trace.hash_offsets[:-1] + at)
        counts.append(np.diff(trace.hash_offsets))
        at += len(trace.hash_ids)
    flat, first, count = np.concatenate(ids), np.concatenate(firsts)[order], np.concatenate(counts)[order]
    offsets = np.concatenate(([0], np.cumsum(count)))
    places = np.repeat(first - offsets[:-1], count) + np.arange(offsets[-1])
    column = lambda name: np.concatenate([getattr(trace, name) for trace in traces.values()])[order]  # noqa: E731
    return Trace(
        name="overload",
        arrival_seconds=arrivals[order],
        input_tokens=column("input_tokens"),
        output_tokens=column("output_tokens"),
        hash_offsets=offsets,
        hash_ids=flat[places],
        block_tokens=next(iter(traces.values())).block_tokens,
        sessions=tenants[order],
    )


def run(trace: Trace, arm: Arm, seed: int, ttft_seconds: float) -> Run:
    """Plays a trace as in a server."""
    settings = arm.settings
    if settings is not None and "ttft_seconds" in settings:
        settings = {**settings, "ttft_seconds": ttft_seconds}
    return simulate(
        prepare(trace, PROFILE),
        programs="none",
        instances=INSTANCES,
        profile=PROFILE,
        seed=seed,
        signals="delayed",
        admission="vllm",
        output_known=False,
        load_admission=settings,
    )


@cache
def capacity(workload: str, seed: int) -> float:
    """Requests per second that the fleet completes while every engine has a long queue."""
    rate = 125.0 if workload == "chats" else 20.0
    trace = joined({NEIGHBOR: made(workload, rate, 4 * CAPACITY_SECONDS, seed, NEIGHBOR)})
    found = run(trace, AT_ONCE, seed, 1.0)
    ends = found.finished_seconds
    return float(np.sum((ends > CAPACITY_SECONDS) & (ends <= 3 * CAPACITY_SECONDS)) / (2 * CAPACITY_SECONDS))


@dataclass(frozen=True)
class Outcome:
    """The figures of a run; requests of the neighbor if there are two tenants."""

    offered: float  # requests/s
    goodput: float  # requests/s with their first token in time
    refused: float  # share of requests
    late: float  # share of requests with a late first token
    ttft_p50: float
    ttft_p99: float
    wait_p99: float  # of the admitted, in the router


def play(stage: Stage, arm: Arm, seed: int) -> Outcome:
    """The figures of a scenario under an arm."""
    most = capacity(stage.workload, seed)
    slo = TTFT_SECONDS[stage.workload]
    traces = {NEIGHBOR: made(stage.workload, stage.load * most, SECONDS, seed, NEIGHBOR)}
    if stage.flood is not None:
        traces[FLOOD] = made(stage.workload, stage.flood * most, SECONDS, seed, FLOOD)
    trace = joined(traces)
    found = run(trace, arm, seed, slo)
    counted = (trace.arrival_seconds >= WARM_SECONDS) & (trace.sessions == NEIGHBOR)
    ttft = found.ttft_seconds[counted]
    admitted = ~np.isnan(ttft)
    good = admitted & (ttft <= slo)
    refused = ~np.isnan(found.refused_seconds[counted])
    span = SECONDS - WARM_SECONDS
    return Outcome(
        offered=counted.sum() / span,
        goodput=good.sum() / span,
        refused=refused.mean(),
        late=(admitted & ~good).mean(),
        ttft_p50=float(np.percentile(ttft[admitted], 50)),
        ttft_p99=float(np.percentile(ttft[admitted], 99)),
        wait_p99=float(np.percentile(found.hold_seconds[counted][admitted], 99)),
    )
