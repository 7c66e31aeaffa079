"""The scenarios of the study of prefix fetch: a recorded hour and a synthetic hot spot, and the
figures of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hot_spot import surge
from lmetric.profiles import Profile, load_profile
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.workload import Workload, prepare
from rerun import ROOT, traces

SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"
INSTANCES = 16
# The independent simulation's engines take 100 us per prompt token.
PREFILL_SECONDS = 1e-4
HOT_SPEED = 0.9  # 54 requests/s: 30% of LMETRIC's sustained load on the hot spot's quiet traffic


@dataclass(frozen=True)
class Rival:
    """How requests are placed, and whether prefixes are fetched."""

    label: str
    policy: str = "lmetric"
    pull: str = "none"
    transfer: str = "none"
    knobs: Mapping[str, float] = field(default_factory=dict, hash=False)
    guard: bool = False

    def pulling(self, pull: str, transfer: str, label: str) -> Rival:
        """Returns the rival with prefix fetches."""
        return replace(self, label=label, pull=pull, transfer=transfer)


LMETRIC = Rival("lmetric")
GUARDED = Rival("lmetric, guard", guard=True)
VLLM = Rival("vllm", "vllm")
WEIGHING = Rival("lmetric_pull", "lmetric_pull")
BESIDE = Rival("lmetric_pull(by_batch=0)", "lmetric_pull", knobs={"by_batch": 0.0})


def link(cost: float, *, shared: bool = True) -> str:
    """Returns a link over which a token takes this share of its prefill time."""
    gigabytes = load_profile("independent-sim").kv_bytes_per_token or 0
    speed = gigabytes / (cost * PREFILL_SECONDS) / 1e9
    return f"{speed:.6g}, fixed=0{'' if shared else ', unshared'}"


@dataclass(frozen=True)
class Stage:
    """The requests and their speed."""

    speed: float  # times the recorded arrivals
    share: float = 0.0  # share of the requests with a common prefix, on synthetic traffic
    tokens: int = 0  # tokens of that prefix
    slice: bool = False  # only the packaged part of the recorded hour
    # Engines admit as vLLM does, the router has a live server's signals, and its index is fed so.
    live: str = ""
    engine: str = "independent-sim"

    @property
    def label(self) -> str:
        if self.tokens:
            return f"{self.share:.0%} of the requests, {self.tokens:,} tokens"
        live = f"; {self.engine}, seen live, {self.live} index" if self.live else ""
        return f"Mooncake conversation, {self.speed:g} times as fast{live}"

    @property
    def profile(self) -> Profile:
        return load_profile(self.engine).in_blocks_of(64 if self.tokens else 512)


@dataclass(frozen=True)
class Outcome:
    """Figures of a run; for the hot spot, of the hot requests unless noted."""

    ttft: float  # mean, s
    ttft_p50: float
    ttft_p99: float
    tpot: float  # mean, ms
    tpot_p50: float
    tpot_p99: float
    others: float  # mean TPOT of all other requests, ms
    found: float  # share of the prompt tokens found in the instance's own cache
    pulled: float  # share of the prompt tokens that were fetched
    pulls: float  # share of the requests that fetched
    wait: float  # mean seconds of a fetch
    instances: float  # number of instances that took a hot request
    filters: float  # alarms of the guard


def recorded(speed: float, seed: int, path: Path | None = None) -> Trace:
    """Returns the recorded hour or a part of it, faster; the seed moves arrivals by up to a
    millisecond."""
    trace = load_trace(path or traces() / "mooncake_conversation.jsonl.gz").faster(speed)
    moved = trace.arrival_seconds + np.random.default_rng(seed).uniform(0, 1e-3, len(trace))
    return replace(trace, arrival_seconds=np.sort(moved))


@lru_cache(maxsize=4)
def made(stage: Stage, seed: int) -> tuple[Workload, NDArray[np.bool_]]:
    """Returns the trace and a mask of the measured requests."""
    if stage.tokens:
        trace, hot, _ = surge(seed, stage.share, stage.tokens, known=True)
        return prepare(trace, stage.profile).faster(stage.speed), hot
    trace = recorded(stage.speed, seed, SLICE if stage.slice else None)
    return prepare(trace, stage.profile), np.ones(len(trace), np.bool_)


def play(stage: Stage, rival: Rival, seed: int) -> Outcome:
    """Runs one simulation; the recorded hour by the rules of the independent simulation."""
    workload, counts = made(stage, seed)
    rules: dict[str, Any] = {"signals": "step_end"}
    if stage.live:
        rules = {"admission": "vllm", "signals": "delayed", "index": stage.live}
    elif stage.tokens:
        # Engines that share blocks among running requests: reserving would count the hot prefix for
        # each.
        rules = {"admission": "vllm"}
    run = simulate(
        workload,
        programs="none",
        policy=rival.policy,
        knobs=dict(rival.knobs) or None,
        instances=INSTANCES,
        profile=stage.profile,
        seed=seed,
        guard=rival.guard,
        prefix_fetch=rival.pull,
        transfer=rival.transfer,
        **rules,
    )
    return outcome(run, counts)


def outcome(run: Run, counts: NDArray[np.bool_]) -> Outcome:
    """Returns the figures of a run."""
    ttft, tpot = run.ttft_seconds[counts], run.tpot_seconds[counts] * 1e3
    tpot, others = tpot[~np.isnan(tpot)], run.tpot_seconds[~counts] * 1e3
    prompt, pulled = run.input_tokens[counts].sum(), run.fetch_instance[counts] >= 0
    return Outcome(
        ttft=float(ttft.mean()),
        ttft_p50=float(np.median(ttft)),
        ttft_p99=float(np.percentile(ttft, 99)),
        tpot=float(tpot.mean()),
        tpot_p50=float(np.median(tpot)),
        tpot_p99=float(np.percentile(tpot, 99)),
        others=float(np.nanmean(others)) if len(others) else 0.0,
        found=float(run.hit_tokens[counts].sum() / prompt),
        pulled=float(run.fetched_tokens[counts].sum() / prompt),
        pulls=float(pulled.mean()),
        wait=float(run.fetch_seconds[counts][pulled].mean()) if pulled.any() else 0.0,
        instances=float(len(np.unique(run.instance[counts]))),
        filters=float(run.guard_filters),
    )
