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
from lmetric_lab.sim.agents import AgentsTrace
from lmetric_lab.sim.distributions import LogNormal
from lmetric_lab.sim.programs import working_set_tokens
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.workload import Workload, prepare

INSTANCES = 8
PROFILE = load_profile("independent-sim")
ENDLESS_BLOCKS = 1_000_000  # of an instance: more than a run ever names


# Changes of the synthetic workload, by name.
WORKLOADS: dict[str, dict[str, Any]] = {
    "": {},
    "no forks": {"fork_share": 0.0},
    "five times the chats": {"chat_rate": 0.11},
    "gaps four times as long": {"gap_seconds": LogNormal(p50=8, p99=207.8)},
    "1.5 times the load": {"rate": 0.009},
}


@dataclass(frozen=True)
class Stage:
    """The workload under a pressure; 0: caches without an end."""

    pressure: float
    seconds: float = 5400.0
    workload: str = ""  # in `WORKLOADS`

    @property
    def label(self) -> str:
        """The heading of the scenario."""
        heading = f"pressure {self.pressure:g}" if self.pressure else "caches without an end"
        return f"{self.workload}, {heading}" if self.workload else heading


@dataclass(frozen=True)
class Rival:
    """A policy, with settings of the simulator."""

    label: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


LMETRIC = Rival("lmetric", "lmetric")


def admitted(label: str, run: Mapping[str, Any] | None = None, **settings: Any) -> Rival:
    """Admission with changed settings; `run`: further settings of the simulator."""
    # The oldest programs first, and 120 s: defaults when the figures were made.
    told = {"shortest_first": False, "forget_seconds": 120.0}
    programs = {"kind": "admit", "sessions": False, "max_hold_seconds": 1e9, **told, **settings}
    return Rival(label, "lmetric", {"programs": programs, **(run or {})})


FINAL = {"session_final": True}
ADMITTED = admitted("lmetric, admission")
ADMITTED_FINAL = admitted("lmetric, admission, ends reported", FINAL)
# Far above the caches, nothing is held: new programs go where the fewest tokens are expected, and
# all further requests follow.
STICKY = admitted("sticky, placed by load", theta=10.0, free=0.0)
THUNDER = Rival(
    "ThunderAgent-like", "lmetric", {"programs": {"kind": "thunder_agent", "sessions": False}, **FINAL}
)
# The defaults of `dynamo.thunderagent_router`, except its period of 5 s: ours is 0.5 s.
DYNAMO = Rival(
    "Dynamo's ThunderAgent",
    "lmetric",
    {
        "programs": {
            "kind": "thunder_agent",
            "theta": 0.95,
            "pause_to": 0.80 / 0.95,
            "resume": 0.85 / 0.95,
            "half_life_seconds": 0.0,
            "shared_roots": False,
            "max_wait_seconds": 1800.0,
            "sessions": False,
        },
        **FINAL,
    },
)
# Sticky sessions that leave a crowded instance: by prefix (SGLang), and by cost (Dynamo).
OVERFLOW = [Rival("cache_aware", "cache_aware"), Rival("dynamo", "dynamo")]
RIVALS = [LMETRIC, STICKY, *OVERFLOW, THUNDER, DYNAMO]
VARIANTS = [
    ADMITTED,
    admitted("gaps taken as twice as long", gap_error=2.0),
    admitted("gaps taken as half as long", gap_error=0.5),
    admitted("no finish reason", finish_reason=False),
    admitted("cache reported 5% too large", {"reported_cache_ratio": 1.05}),
    admitted("cache reported 20% too large", {"reported_cache_ratio": 1.2}),
    admitted("the same, not measured", theta=1.2),
    admitted("cache reported 20% too small", {"reported_cache_ratio": 0.8}),
    admitted("theta 0.95", theta=0.95),
    admitted("resume 1", resume=1.0),
    admitted("shortest first", shortest_first=True),
    admitted("with prefix fetch", {"prefix_fetch": True}),
    ADMITTED_FINAL,
    THUNDER,
]
POLICIES = [
    LMETRIC,
    Rival("session_affinity", "session_affinity"),
    Rival("linear", "linear"),
    Rival("least_requests", "least_requests"),
    STICKY,
    THUNDER,
    DYNAMO,
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
def workload(seed: int, seconds: float, name: str) -> Workload:
    """The prepared trace of a seed."""
    made = AgentsTrace(seed=seed, instances=INSTANCES, duration_seconds=seconds, **WORKLOADS[name])
    return prepare(made.make(), PROFILE)


@cache
def working_set_blocks(seed: int, seconds: float, name: str) -> float:
    """The mean working set per instance, in blocks."""
    made = workload(seed, seconds, name)
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
        **{"programs": "none", **rival.settings},
    )


def play(stage: Stage, rival: Rival, seed: int) -> dict[str, float]:
    """The figures of a run. Without an end of a program, its times would be missing: that fails."""
    made = workload(seed, stage.seconds, stage.workload)
    blocks = ENDLESS_BLOCKS
    if stage.pressure:
        blocks = round(working_set_blocks(seed, stage.seconds, stage.workload) / stage.pressure)
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
