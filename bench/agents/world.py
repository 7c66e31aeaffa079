"""The scenarios of the agents study: the synthetic workload, the pressure on the caches, and the
policies.

The pressure is the mean working set of live programs under a cache without an end, divided by the
capacity of all caches. Each seed has its own working set, hence its own capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from lmetric.profiles import load_profile
from lmetric.sim.agents import AgentsTrace
from lmetric.sim.programs import working_set_tokens
from lmetric.sim.run import Run, Workload, prepare, simulate

INSTANCES = 8
PROFILE = load_profile("independent-sim")
ENDLESS_BLOCKS = 1_000_000  # of an instance: more than a run ever names


@dataclass(frozen=True)
class Stage:
    """The workload under a pressure; 0: caches without an end."""

    pressure: float
    seconds: float = 5400.0

    @property
    def label(self) -> str:
        """The heading of the scenario."""
        return f"pressure {self.pressure:g}" if self.pressure else "caches without an end"


@dataclass(frozen=True)
class Rival:
    """A policy, with settings of the simulator."""

    label: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


LMETRIC = Rival("lmetric", "lmetric")
ADMITTED = Rival(
    "lmetric, admission",
    "lmetric",
    {"programs": {"kind": "admit", "theta": 1.0, "sessions": False, "max_hold_seconds": 1e9}},
)
# Far above the caches, nothing is held: new programs go where the fewest tokens are expected, and
# all further requests follow.
STICKY = Rival(
    "sticky, placed by load",
    "lmetric",
    {"programs": {"kind": "admit", "theta": 10.0, "free": 0.0, "sessions": False, "max_hold_seconds": 1e9}},
)
POLICIES = [
    LMETRIC,
    Rival("session_affinity", "session_affinity"),
    Rival("linear", "linear"),
    Rival("least_requests", "least_requests"),
    STICKY,
    ADMITTED,
]
# Twice the GPU's blocks, 50 GB/s; an instance pays 5% of a load's time in its next step.
HOST = {"host_tier": {"capacity": 2.0, "gigabytes_per_second": 50.0, "step_ratio": 0.05}}
TIERED = [
    LMETRIC,
    Rival("lmetric, host tier not scored", "lmetric", {**HOST, "tiers": "off"}),
    Rival("lmetric, host tier", "lmetric", HOST),
    Rival("session_affinity, host tier", "session_affinity", HOST),
    Rival("lmetric, host tier, admission", "lmetric", {**HOST, **ADMITTED.settings}),
]


@cache
def workload(seed: int, seconds: float) -> Workload:
    """The prepared trace of a seed."""
    made = AgentsTrace(seed=seed, instances=INSTANCES, duration_seconds=seconds)
    return prepare(made.make(), PROFILE)


@cache
def working_set_blocks(seed: int, seconds: float) -> float:
    """The mean working set per instance, in blocks."""
    made = workload(seed, seconds)
    tokens = working_set_tokens(made.trace, run(made, LMETRIC, ENDLESS_BLOCKS, seed))
    return tokens / INSTANCES / PROFILE.block_tokens


def run(made: Workload, rival: Rival, cache_blocks: int, seed: int) -> Run:
    """Simulates a policy on engines with this many blocks."""
    return simulate(
        made,
        policy=rival.policy,
        instances=INSTANCES,
        profile=PROFILE.model_copy(update={"cache_blocks": cache_blocks}),
        admission="vllm",
        cached_answers=True,
        seed=seed,
        **rival.settings,
    )


def play(stage: Stage, rival: Rival, seed: int) -> dict[str, float]:
    """The figures of a run. Without an end of a program, its times would be missing: that fails."""
    made = workload(seed, stage.seconds)
    blocks = ENDLESS_BLOCKS
    if stage.pressure:
        blocks = round(working_set_blocks(seed, stage.seconds) / stage.pressure)
    played = run(made, rival, blocks, seed)
    shown = played.summary()
    programs, ttft = shown.programs, shown.ttft_seconds
    if programs is None or programs.failed or programs.jct_mean_seconds is None or ttft is None:
        raise RuntimeError(f"{rival.label}, {stage.label}, seed {seed}: programs without an end")
    return {
        "jct": programs.jct_mean_seconds,
        "jct_p50": programs.jct_p50_seconds or 0.0,
        "jct_p95": programs.jct_p95_seconds or 0.0,
        "turns": programs.turns_per_minute or 0.0,
        "recomputed": programs.recomputed_share,
        "stretch": programs.stretch_max or 0.0,
        "hold": programs.max_hold_seconds,
        "ttft": ttft.mean,
        "capacity": blocks * PROFILE.block_tokens,
    }
