"""The scenarios of the study of the planner: recorded and synthetic requests on 16 instances, and
the figures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from world import INSTANCES, recorded

from lmetric.profiles import Profile, load_profile
from lmetric_lab.sim import max_load
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.setups import PolicyChoice, Setup, TraceChoice
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload, prepare
from rerun import traces

PROFILE = "independent-sim"
TRANSFER = "25"  # GB/s
SECONDS, REQUESTS = 600.0, 20_000  # seconds in which synthetic requests arrive, and their largest number
CONVERSATION, AZURE = "Mooncake conversation", "Azure conversation"
RECORDED = {CONVERSATION: "mooncake_conversation.jsonl.gz", AZURE: "azure_conv_2023.csv.gz"}
# Seconds of the buckets in which the conversation's arrivals were recorded.
BUCKET_SECONDS = 3.0
STEP_CONSTANTS = (
    "fixed_seconds", "decode_seconds_per_sequence", "decode_seconds_per_context_token",
    "prefill_seconds_per_token", "prefill_seconds_per_attention_pair",
)  # fmt: skip


@dataclass(frozen=True)
class Rival:
    """How requests are placed."""

    label: str
    policy: str = "lmetric"
    knobs: Mapping[str, float] = field(default_factory=dict, hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)  # settings of the simulator


LMETRIC = Rival("lmetric")
PULLING = Rival("lmetric_pull", "lmetric_pull", settings={"prefix_fetch": "on"})
PLANNER = Rival("planner", "planner")
ROLES = [f"{n}P{INSTANCES - n}D" for n in (1, 2, 4, 6, 8, 10, 11, 12, 13, 14)]
FIXED = [Rival(roles, settings={"roles": roles}) for roles in ROLES]


@dataclass(frozen=True)
class Stage:
    """The requests, their speed, and the engines and policies."""

    lengths: str = ""  # name of synthetic requests; empty: the recorded hour
    load: float = 1.0  # times the recorded arrivals, or as a share of the rate that the instances carry
    signals: str = "exact"
    profile: str = PROFILE
    recording: str = CONVERSATION  # without synthetic requests
    shared: bool = True  # False: no two prompts of a recording share a prefix
    redrawn: bool = False  # arrivals of a recording move within their buckets, not by a millisecond
    event_delay: float = 0.02  # delay of cache events in seconds, if signals are delayed
    believed: float = 1.0  # factor by which the router overestimates the time of a step
    routers: int = 1
    sharing: float | None = None  # seconds between two exchanges of load

    @property
    def label(self) -> str:
        what = f"{self.lengths}, {self.load:.0%} of what can be carried"
        if not self.lengths:
            what = f"{self.recording}, {self.load:g} times as fast"
        return ", ".join([what, *self.differs])

    @property
    def differs(self) -> list[str]:
        """Returns the settings that differ from the default."""
        told = {
            f"{self.signals} signals": self.signals != "exact",
            f"cache events {self.event_delay:g} s late": self.event_delay != Stage.event_delay,
            self.profile: self.profile != PROFILE,
            "nothing shared": not self.shared,
            "arrivals redrawn": self.redrawn,
            f"steps believed to last {self.believed:g} times as long": self.believed != 1,
            f"{self.routers} routers that {self._tell}": self.routers != 1,
        }
        return [what for what, so in told.items() if so]

    @property
    def _tell(self) -> str:
        each = "tell each other their load"
        return f"do not {each}" if self.sharing is None else f"{each} every {self.sharing:g} s"

    @property
    def believed_profile(self) -> Profile | None:
        """Returns the router's profile; None: the engines' own."""
        if self.believed == 1:
            return None
        profile = load_profile(self.profile)
        return profile.model_copy(
            update={name: getattr(profile, name) * self.believed for name in STEP_CONSTANTS}
        )


@dataclass(frozen=True)
class Outcome:
    """Figures of a run."""

    ttft: float  # mean, s
    ttft_p50: float
    ttft_p99: float
    tpot: float  # mean, ms
    tpot_p50: float
    tpot_p99: float
    e2e: float  # mean, s
    e2e_p50: float
    e2e_p99: float
    apart: float  # share of the requests that decode elsewhere than on their prefill instance
    kept_up: float  # share that had its first token when the last request arrived


def requests(lengths: str, rate: float, count: float, seed: int) -> Trace:
    """Returns requests of one rate that share nothing."""
    told = {"synthetic": "requests", "seed": seed, "rate": rate, "lengths": lengths}
    return check_synthetic({**told, "duration_seconds": count / rate}, lengths).make()


@lru_cache(maxsize=16)
def carried(lengths: str, profile: str) -> float:
    """Returns the requests per second that the instances carry: all requests at once, until 97% of
    them are answered."""
    trace = requests(lengths, 1e4, 4000, 99)
    run = simulate(trace, programs="none", instances=INSTANCES, profile=profile, output_known=False)
    return 0.97 * len(trace) / float(np.percentile(run.finished_seconds, 97))


@lru_cache(maxsize=4)
def made(stage: Stage, seed: int) -> Workload:
    """Returns the trace."""
    if stage.lengths:
        rate = stage.load * carried(stage.lengths, stage.profile)
        trace = requests(stage.lengths, rate, min(REQUESTS, rate * SECONDS), seed + 1)
    else:
        trace = recorded(stage.load, seed, traces() / RECORDED[stage.recording])
        trace = redrawn(trace, BUCKET_SECONDS / stage.load, seed) if stage.redrawn else trace
        trace = trace if stage.shared else trace.without_prefixes()
    return prepare(trace, stage.profile)


def redrawn(trace: Trace, bucket: float, seed: int) -> Trace:
    """Returns the same requests in the same order, each at a random moment of its bucket."""
    within = np.random.default_rng(seed).uniform(0, bucket, len(trace))
    return replace(trace, arrival_seconds=np.sort(np.floor(trace.arrival_seconds / bucket) * bucket + within))


@lru_cache(maxsize=16)
def most(recording: str, shared: bool = True, rival: Rival = LMETRIC) -> float:
    """Returns the highest speed, times the recording, at which a fleet keeps up by
    `lmetric_lab.sim.max_load`. LMETRIC's is called the maximum load."""
    path = traces() / RECORDED[recording]
    setup = Setup(
        trace=TraceChoice(str(path), recording),
        policy=PolicyChoice(rival.policy, rival.knobs),
        instances=INSTANCES,
        profile=PROFILE,
        settings={"output_known": False, "guard": False, "transfer": TRANSFER, **rival.settings},
    )
    trace = recorded(1.0, 0, path)
    return max_load.find(setup, trace if shared else trace.without_prefixes(), max_load.Rule()).speed


def play(stage: Stage, rival: Rival, seed: int) -> Outcome:
    """Runs one simulation without given answer lengths."""
    run = simulate(
        made(stage, seed),
        programs="none",
        policy=rival.policy,
        knobs=dict(rival.knobs) or None,
        signals=stage.signals,  # type: ignore[arg-type]
        event_delay_seconds=stage.event_delay,
        predictor=stage.believed_profile,
        seed=seed,
        output_known=False,
        **{
            "routers": stage.routers,
            "sharing_seconds": stage.sharing,
            "profile": stage.profile,
            "instances": INSTANCES,
            "transfer": TRANSFER,
            "guard": False,
            **rival.settings,
        },
    )
    return outcome(run)


def outcome(run: Run) -> Outcome:
    """Returns the figures of a run."""
    kept_up = float((run.first_token_seconds <= run.arrival_seconds.max()).mean())
    found = figures(run.ttft_seconds, run.tpot_seconds, run.e2e_seconds)
    return Outcome(**found, apart=float((run.decode_instance >= 0).mean()), kept_up=kept_up)


def figures(
    ttft: NDArray[np.float64], tpot: NDArray[np.float64], e2e: NDArray[np.float64]
) -> dict[str, float]:
    """Returns mean, median and 99th percentile of each, in seconds; NaN: an answer of one token has
    no TPOT."""
    columns = {"ttft": ttft, "tpot": tpot[~np.isnan(tpot)] * 1e3, "e2e": e2e}
    return {
        f"{name}{suffix}": float(value)
        for name, values in columns.items()
        for suffix, value in (
            ("", values.mean()),
            ("_p50", np.median(values)),
            ("_p99", np.percentile(values, 99)),
        )
    }
