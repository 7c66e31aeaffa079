"""What the SIBYL study plays: decode pools, lengths, loads and rivals, and what is kept of a run.

A load is a share of what a decode pool could sustain if its batches could grow without end: under Eq. (15)
the curve's peak over an answer's mean length; under the step-time model one request for every
``mean answer x (seconds a sequence + seconds a context token x mean context)``. A *life* is the time that a
mean answer takes at that load. Runs last `LIVES` lives, of which the first `WARM_UP` and the last `TAIL` do
not count: answers reach 8,192 tokens, half as much again as the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from lmetric import _core
from lmetric.profiles import Profile, load_profile
from lmetric.sim.run import Run, Workload, prepare, simulate
from lmetric.sim.setups import PolicyChoice
from lmetric.sim.synthetic import check_synthetic
from lmetric.sim.traces import Trace

LENGTHS = ("sibyl-random", "sharegpt-like", "zeta-like")
ENGINES = {
    "Eq. 15, held": "sibyl-eq15-held",
    "step time": "independent-pd",
    "Eq. 15, as printed": "sibyl-eq15-as-printed",
}
WARM_UP, TAIL, LIVES = 2.5, 1.5, 7.0
# SIBYL's Algorithm 2: prompts take their own time and wait for none, their KV is there at once.
ALGORITHM_2: dict[str, Any] = {"prefill": "unlimited", "transfer": None}


@dataclass(frozen=True)
class Rival:
    """A decode policy with the settings of its run."""

    label: str
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)


SIBYL = Rival("SIBYL", "sibyl")
ROUND_ROBIN = Rival("round robin", "round_robin")
LEAST_REQUESTS = Rival("least requests, bound ones too (REQLEVEL)", "least_requests")
ILS = Rival("ILS, tokens", "ils")
POWER_OF_TWO = Rival("power of two", "power_of_two")
MAIN = [ROUND_ROBIN, ILS, LEAST_REQUESTS, SIBYL]
RIVALS = [
    ROUND_ROBIN,
    Rival("random", "random"),
    POWER_OF_TWO,
    ILS,
    Rival("ILS, requests", "ils_requests"),
    LEAST_REQUESTS,
    Rival("least tokens, bound ones too", "least_tokens"),
    SIBYL,
]
ABLATIONS = [
    SIBYL,
    Rival("prob @ 1", "sibyl(survival=0)"),
    Rival("no type 1", "sibyl(type1=0)"),
    Rival("no type 2", "sibyl(type2=0)"),
    Rival("no type 3", "sibyl(type3=0)"),
    LEAST_REQUESTS,
]
LATE = [
    Rival(f"{rival.label}, late", rival.policy, {"binding": "late"}) for rival in (ILS, LEAST_REQUESTS, SIBYL)
]


def beyond() -> list[Rival]:
    """Policies of ours, where this version has them."""
    ours = {"sibyl_plus": "sibyl_plus", "oracle_plus": "oracle lengths"}
    names = {row["name"] for row in _core.policy_table()}
    return [Rival(label, name) for name, label in ours.items() if name in names]


@dataclass(frozen=True)
class Stage:
    """Decode instances under a load."""

    lengths: str
    engine: str
    decodes: int
    load: float | None  # None: `rate`
    rate: float = 0.0
    arrivals: str = "poisson"  # or a coefficient of variation
    lives: float = LIVES

    @property
    def label(self) -> str:
        told = f"{self.rate:g}/s" if self.load is None else f"load {self.load:g}"
        bursts = "" if self.arrivals == "poisson" else f", bursts (cv {self.arrivals})"
        return f"{self.lengths}, {self.engine}, {self.decodes} decode instances, {told}{bursts}"


@cache
def sample(lengths: str) -> Trace:
    """Some requests, for their means."""
    told = {"synthetic": "requests", "rate": 1000, "duration_seconds": 100, "lengths": lengths, "seed": 0}
    return check_synthetic(told | {"block_tokens": 512}, lengths).make()


def limit(profile: Profile, lengths: str) -> float:
    """Requests a second that a decode instance could sustain with a batch without end, or at its peak."""
    trace = sample(lengths)
    output = trace.output_tokens.astype(np.float64)
    if (curve := profile.decode_throughput) is not None:
        peak = curve.gamma - curve.beta**2 / (4 * curve.alpha)
        return float(peak / output.mean())
    context = trace.input_tokens.mean() + (output**2).mean() / (
        2 * output.mean()
    )  # of a token, over all made
    each = profile.decode_seconds_per_sequence + profile.decode_seconds_per_context_token * context
    return float(1 / (output.mean() * each))


def life(profile: Profile, lengths: str, load: float) -> float:
    """Seconds that a mean answer takes at that load, were it spread evenly."""
    output = float(sample(lengths).output_tokens.mean())
    if (curve := profile.decode_throughput) is not None:
        # The smaller batch that makes `load` of the peak: alpha n^2 + beta n + gamma = load x peak.
        made = load * (curve.gamma - curve.beta**2 / (4 * curve.alpha))
        root = curve.beta**2 - 4 * curve.alpha * (curve.gamma - made)
        batch = (-curve.beta + root**0.5) / (2 * curve.alpha)
        return output * batch / made
    return output * profile.fixed_seconds / (1 - load)


@dataclass(frozen=True)
class Outcome:
    """Of the requests that count: TPOT in ms, and shares."""

    mean: float
    p50: float
    p99: float
    p999: float
    least_loaded: float  # hand-overs to the instance with the least context tokens: Table 1
    without_end: float  # requests that never ended, on engines that stand still
    batch: float  # mean of the decode instances
    requests: int


class World:
    """Stages as workloads, each made once."""

    def __init__(self, *, quick: bool, seeds: int) -> None:
        self.quick, self.seeds = quick, range(seeds)

    def sizes(self, *decodes: int) -> tuple[int, ...]:
        """Decode instances: all of them, or one small pool."""
        return (8,) if self.quick else decodes

    @staticmethod
    @lru_cache(maxsize=4)
    def workload(stage: Stage, seed: int) -> tuple[Workload, float]:
        """What arrives, and the length of a life."""
        profile = load_profile(ENGINES[stage.engine])
        per_instance = limit(profile, stage.lengths)
        rate = stage.rate if stage.load is None else stage.load * per_instance * stage.decodes
        seconds = life(profile, stage.lengths, rate / (per_instance * stage.decodes))
        arrivals = "poisson" if stage.arrivals == "poisson" else {"cv": float(stage.arrivals)}
        told = {
            "synthetic": "requests", "rate": rate, "duration_seconds": seconds * stage.lives, "seed": seed,
            "arrivals": arrivals, "lengths": stage.lengths, "block_tokens": 512,
        }  # fmt: skip
        return prepare(check_synthetic(told, stage.label).make(), profile), seconds

    def play(self, stage: Stage, rival: Rival, seed: int, **settings: Any) -> Outcome:
        """One run in steady state."""
        workload, seconds = self.workload(stage, seed)
        (choice,) = PolicyChoice.parse(rival.policy)
        told: dict[str, Any] = {"policy": "round_robin", "roles": {"prefill": 1, "decode": stage.decodes}}
        told |= ALGORITHM_2
        told |= {"decode_policy": choice.build(), "decode_knobs": dict(choice.knobs) or None}
        profile = ENGINES[stage.engine]
        run = simulate(workload, profile=profile, seed=seed, **{**told, **rival.settings, **settings})
        return outcome(run, WARM_UP * seconds, (stage.lives - TAIL) * seconds)

    def outcomes(self, stage: Stage, rival: Rival, **settings: Any) -> list[Outcome]:
        """One run for each seed."""
        return [self.play(stage, rival, seed, **settings) for seed in self.seeds]

    def all(self, stages: list[Stage], rivals: list[Rival]) -> Iterator[tuple[Stage, Rival, list[Outcome]]]:
        """Every rival on every stage."""
        for stage in stages:
            for rival in rivals:
                yield stage, rival, self.outcomes(stage, rival)


def outcome(run: Run, begin: float, end: float) -> Outcome:
    """The figures of the requests that arrived between `begin` and `end`."""
    counts = (run.arrival_seconds >= begin) & (run.arrival_seconds < end)
    ended = counts & np.isfinite(run.finished_seconds)
    tpot = run.tpot_seconds[ended] * 1e3
    known = tpot[~np.isnan(tpot)]
    p50, p99, p999 = (float(p) for p in np.percentile(known, (50, 99, 99.9))) if len(known) else (np.nan,) * 3
    buckets = slice(*(int(at / run.timeline.bucket_seconds) for at in (begin, end)))
    decodes = [role == "decode" for role in (run.roles.each() if run.roles else [])]
    return Outcome(
        mean=float(known.mean()) if len(known) else np.nan,
        p50=p50,
        p99=p99,
        p999=p999,
        least_loaded=float(run.handoff_least_loaded[counts].mean()),
        without_end=1 - float(ended.sum() / counts.sum()),
        batch=float(run.timeline.running[decodes, buckets].mean()),
        requests=int(counts.sum()),
    )
