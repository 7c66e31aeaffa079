"""What the study of the planner plays: recorded and made requests on 16 instances; what is kept of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from world import INSTANCES, recorded

from lmetric.sim.run import Run, Workload, prepare, simulate
from lmetric.sim.synthetic import check_synthetic
from lmetric.sim.traces import Trace

PROFILE = "independent-sim"
TRANSFER = "25"  # GB/s
SECONDS, REQUESTS = 600.0, 20_000  # that made requests arrive in, and how many at most


@dataclass(frozen=True)
class Rival:
    """How requests are placed."""

    label: str
    policy: str = "lmetric"
    knobs: Mapping[str, float] = field(default_factory=dict, hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of the simulator


LMETRIC = Rival("lmetric")
PULLING = Rival("lmetric_pull", "lmetric_pull", settings={"pull": "on"})
PLANNER = Rival("planner", "planner")
ROLES = [f"{n}P{INSTANCES - n}D" for n in (1, 2, 4, 6, 8, 10, 11, 12, 13, 14)]
FIXED = [Rival(roles, settings={"roles": roles}) for roles in ROLES]


@dataclass(frozen=True)
class Stage:
    """What arrives, how fast, and what engines and policies are like."""

    lengths: str = ""  # of made requests; empty: the recorded hour
    load: float = 1.0  # times the recorded arrivals, or as a share of what the instances carry
    signals: str = "exact"
    profile: str = PROFILE

    @property
    def label(self) -> str:
        what = f"{self.lengths}, {self.load:.0%} of what can be carried"
        if not self.lengths:
            what = f"Mooncake conversation, {self.load:g} times as fast"
        rest = [] if self.signals == "exact" else [f"{self.signals} signals"]
        return ", ".join([what, *rest, *([] if self.profile == PROFILE else [self.profile])])


@dataclass(frozen=True)
class Outcome:
    """What came of a run."""

    ttft: float  # mean, s
    ttft_p50: float
    ttft_p99: float
    tpot: float  # mean, ms
    tpot_p50: float
    tpot_p99: float
    e2e: float  # mean, s
    e2e_p50: float
    e2e_p99: float
    apart: float  # share of the requests that decode elsewhere than where they were prefilled


def requests(lengths: str, rate: float, count: float, seed: int) -> Trace:
    """Requests of one rate that share nothing."""
    told = {"synthetic": "requests", "seed": seed, "rate": rate, "lengths": lengths}
    return check_synthetic({**told, "duration_seconds": count / rate}, lengths).make()


@lru_cache(maxsize=16)
def carried(lengths: str, profile: str) -> float:
    """Requests a second that the instances carry: all at once, by when 97% of them are answered."""
    trace = requests(lengths, 1e4, 4000, 99)
    run = simulate(trace, instances=INSTANCES, profile=profile, output_known=False)
    return 0.97 * len(trace) / float(np.percentile(run.finished_seconds, 97))


@lru_cache(maxsize=4)
def made(stage: Stage, seed: int) -> Workload:
    """What arrives."""
    if stage.lengths:
        rate = stage.load * carried(stage.lengths, stage.profile)
        trace = requests(stage.lengths, rate, min(REQUESTS, rate * SECONDS), seed + 1)
    else:
        trace = recorded(stage.load, seed)
    return prepare(trace, stage.profile)


def play(stage: Stage, rival: Rival, seed: int) -> Outcome:
    """One run; nobody knows how long answers get."""
    run = simulate(
        made(stage, seed),
        policy=rival.policy,
        knobs=dict(rival.knobs) or None,
        profile=stage.profile,
        signals=stage.signals,  # type: ignore[arg-type]
        seed=seed,
        output_known=False,
        **{"instances": INSTANCES, "transfer": TRANSFER, "guard": False, **rival.settings},
    )
    return outcome(run)


def outcome(run: Run) -> Outcome:
    """The figures of a run."""
    ttft, e2e = run.ttft_seconds, run.e2e_seconds
    tpot = run.tpot_seconds[~np.isnan(run.tpot_seconds)] * 1e3
    found = {
        f"{name}{suffix}": float(value)
        for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e))
        for suffix, value in (
            ("", values.mean()),
            ("_p50", np.median(values)),
            ("_p99", np.percentile(values, 99)),
        )
    }
    return Outcome(**found, apart=float((run.decode_instance >= 0).mean()))
