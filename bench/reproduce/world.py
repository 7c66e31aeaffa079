"""The scenarios of the study: traces, profiles, loads, and runs that are made once and shared.

A *stage* (scenario) is a trace on a profile. Parameters are tuned on one part of the trace (`tune`)
and measured on another (`judge`): two halves of a recorded trace, or synthetic traces of other
seeds. Each part has its own maximum load, found as `lmetric-router study` finds it. Figures use
half of it, as the paper does (section 4.1), unless noted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from lmetric.policies import Policy, PolicyFunction
from lmetric.profiles import Profile, load_profile
from lmetric_lab.sim.max_load import Rule, find
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.setups import PolicyChoice, Setup, TraceChoice
from lmetric_lab.sim.summary import Slo, figures, measured, prefill_windows
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.traces import Trace, TraceError, load_trace
from lmetric_lab.sim.workload import Workload, prepare
from rerun import ROOT

PROFILE = "qwen3-30b-a3b-h20"
LEAST_REQUESTS = 200  # of a trace file: below, half a trace has no load worth measuring
SLICE = ROOT / "python" / "lmetric_lab" / "data" / "mooncake_conversation_slice.jsonl.gz"
INSTANCES = 16
HALF = 0.5  # of the maximum load
MEASURE = (0.1, 0.9)  # shares of the requests, by arrival
QUANTITIES = ("mean", "p50", "p90", "p95", "p99")

# Synthetic substitutes for traces like the paper's that are not public: short prompts and long
# conversations; tools' prompts shared by many requests; long contexts that grow. The lengths are
# our choice.
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "chat": {
        "synthetic": "sessions", "rate": 4, "duration_seconds": 600, "arrivals": {"cv": 1.5},
        "input_tokens": {"p50": 120, "mean": 350, "max": 8000},
        "output_tokens": {"p50": 250, "mean": 400, "max": 4000},
        "turns": {"quantiles": {0: 1, 0.5: 3, 0.9: 10, 1: 25}},
        "think_seconds": {"p50": 25, "p90": 90, "max": 300},
        "prefixes": {"count": 20, "zipf": 1.0, "tokens": {"p50": 600, "mean": 1000, "max": 4000}},
        "block_tokens": 64, "max_prompt_tokens": 32768,
    },
    "agent": {
        "synthetic": "requests", "rate": 25, "duration_seconds": 400, "arrivals": {"cv": 2},
        "input_tokens": {"p50": 250, "mean": 500, "max": 8000},
        "output_tokens": {"p50": 60, "mean": 110, "max": 2000},
        "prefixes": {"count": 200, "zipf": 1.0, "tokens": {"p50": 1500, "mean": 2500, "max": 16000}},
        "block_tokens": 64,
    },
    "coder": {
        "synthetic": "sessions", "rate": 0.8, "duration_seconds": 600, "arrivals": {"cv": 2},
        "input_tokens": {"p50": 800, "mean": 1800, "max": 16000},
        "output_tokens": {"p50": 120, "mean": 220, "max": 4000},
        "turns": {"quantiles": {0: 1, 0.5: 6, 0.9: 20, 1: 40}},
        "think_seconds": {"p50": 8, "p90": 40, "max": 200},
        "prefixes": {"count": 6, "zipf": 0.8, "tokens": {"p50": 5000, "mean": 6000, "max": 12000}},
        "block_tokens": 64, "max_prompt_tokens": 65536,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A policy with its parameters, and its name in tables. `settings`: of `simulate`, beside the
    figure's."""

    policy: str | Policy | PolicyFunction
    knobs: Mapping[str, float] = field(default_factory=dict)
    label: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        inner = ", ".join(f"{name}={value:g}" for name, value in self.knobs.items())
        return self.label or (f"{self.policy}({inner})" if inner else str(self.policy))


LMETRIC = Choice("lmetric")
DEFAULT = Choice("total_delay", settings={"guard": None, "programs": "auto"})  # what `serve` does
VLLM = Choice("vllm")
SIMULATION = Choice("simulation")


@dataclass(frozen=True, eq=False)
class Part:
    """A trace prepared for a profile, and the speed of its maximum load."""

    workload: Workload
    max_speed: float

    @property
    def requests_per_second(self) -> float:
        """Returns the rate at half of the maximum load."""
        trace = self.workload.trace
        return len(trace) / trace.duration_seconds * self.max_speed * HALF


@dataclass(frozen=True, eq=False)
class Stage:
    """A trace on a profile; `judge` has a part per seed, or one for all."""

    label: str
    profile: Profile | tuple[Profile, ...]  # one per instance, if they differ
    tune: Part
    judge: tuple[Part, ...]

    def part(self, seed: int) -> Part:
        return self.judge[seed % len(self.judge)]

    @property
    def shares(self) -> bool:
        """Returns whether prompts of the trace share prefixes."""
        return bool(self.tune.workload.trace.hash_ids.size)


Figures = dict[str, float]


def figures_of(run: Run) -> Figures:
    """Returns the figures of a run that tables may show, over the measured requests."""
    told = figures(run, Slo(), MEASURE)
    kept = measured(run.arrival_seconds, MEASURE)
    found: Figures = {
        "hit_ratio": told.hit_ratio or 0.0,
        "computed": 1 - (told.hit_ratio or 0.0),  # share of the prompt tokens that is not found cached
        "imbalance": told.imbalance or 0.0,
        "guard_alarms": float(run.guard_alarms),
        "guard_filters": float(run.guard_filters),
        "batch": float(run.timeline.running.mean()),
        "held": float((run.hold_seconds > 0).sum()),  # requests
        "first_half": float((run.instance[kept] < run.instances / 2).mean()),  # share of the requests
    }
    for name in ("ttft", "tpot", "e2e"):
        values = getattr(run, f"{name}_seconds")[kept]
        values = values[~np.isnan(values)]
        found[f"{name}_mean"] = float(values.mean())
        for part in QUANTITIES[1:]:
            found[f"{name}_{part}"] = float(np.percentile(values, float(part[1:])))
    begin, end = (float(run.arrival_seconds[kept[at]]) for at in (0, -1))
    work = prefill_windows(run, begin, end)
    two = np.argsort(-work.std(axis=1), kind="stable")[:2]
    gap = float(np.abs(work[two[0]] - work[two[1]]).mean())
    found["pair_gap"] = gap / float(work.mean()) if work.any() else 0.0
    return found


class World:
    """All scenarios, made on first use, and every run made so far."""

    def __init__(
        self,
        traces: Path,
        *,
        seeds: int,
        quick: bool,
        scenarios: Mapping[str, Trace] | None = None,
        profile: str = PROFILE,
    ) -> None:
        """Makes the scenarios. `scenarios`: traces by label, simulated on `profile` in place of the
        study's own."""
        self.traces, self.quick = traces, quick
        self.scenarios, self.scenario_profile = dict(scenarios or {}), profile
        self.seeds = list(range(seeds))
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="simulate")
        self._made: dict[Any, Any] = {}
        self._profiles = TemporaryDirectory()
        self.stage = cache(self._stage)

    # -- stages
    # ---------------------------------------------------------------------------------------

    @cached_property
    def labels(self) -> list[str]:
        """Returns the scenarios of the main comparison. `-7b`: on Qwen2-7B; `-ref`: on the
        independent simulator's constants, faster and with six times the cache."""
        if self.scenarios:
            return list(self.scenarios)
        if self.quick:
            return ["conversation", "chat"]
        return ["conversation", "conversation-7b", "conversation-ref", "azure", "chat", "agent", "coder"]

    @property
    def stages(self) -> list[Stage]:
        return [self.stage(label) for label in self.labels]

    @property
    def sharing(self) -> list[Stage]:
        """Returns scenarios whose prompts share prefixes."""
        return [stage for stage in self.stages if stage.shares]

    @property
    def outer(self) -> list[Stage]:
        """Returns the first and the last."""
        return list(dict.fromkeys((self.stages[0], self.stages[-1])))

    def profile(self, name: str, block_tokens: int) -> Profile:
        """Returns a shipped profile with the same cache in blocks of this size. Blocks need no
        finer size than the trace has."""
        return load_profile(name).in_blocks_of(block_tokens)

    def _stage(self, label: str) -> Stage:
        profile, (tune, *judge) = self.traces_of(label)
        parts = tuple(self.part(each, profile) for each in judge)
        return Stage(label, profile, self.part(tune, profile), parts)

    def traces_of(self, label: str) -> tuple[Profile, list[Trace]]:
        """Returns a scenario's profile, its tuned trace, and the measured traces."""
        if label in self.scenarios:
            trace = self.scenarios[label]
            return self.profile(self.scenario_profile, trace.block_tokens), list(halves(trace))
        base, _, on = label.partition("-")
        synthetic = base in DESCRIPTIONS
        model = {"7b": "qwen2-7b-h20", "ref": "independent-sim"}.get(on, PROFILE)
        if base == "agent":
            model = "qwen2-7b-h20"  # as in Figure 22
        profile = self.profile(model, 64 if synthetic else 512)
        if synthetic:
            return profile, [self.synthetic(base, seed) for seed in range(len(self.seeds) + 1)]
        return profile, list(self._halves(base))

    def synthetic(self, name: str, seed: int, **changes: Any) -> Trace:
        """Returns a trace of the description, all arrivals as recorded: the paper also replays open
        loop."""
        description = {**DESCRIPTIONS[name], "seed": seed, **changes}
        if self.quick:
            description["duration_seconds"] = description["duration_seconds"] / 4
        made = replace(check_synthetic(description, name).make(), previous=None, think_seconds=None)
        return made.between(0, description["duration_seconds"])

    @cache  # noqa: B019 -- a world lives as long as the program
    def _halves(self, name: str) -> tuple[Trace, Trace]:
        if self.quick:
            trace = load_trace(SLICE)
        elif name == "azure":
            trace = load_trace(self.traces / "azure_conv_2023.csv.gz").without_prefixes()
        else:
            trace = load_trace(self.traces / "mooncake_conversation.jsonl.gz")
        return halves(trace)

    def part(self, trace: Trace, profile: Profile) -> Part:
        """Returns `trace` with the load that LMETRIC sustains on `INSTANCES` engines of
        `profile`."""
        workload = prepare(trace, profile)
        return Part(workload, self.max_speed(workload, profile, LMETRIC))

    def max_speed(self, workload: Workload, profile: Profile | tuple[Profile, ...], choice: Choice) -> float:
        """Returns the highest speed at which a policy keeps up, by the rule of `lmetric-router
        study`."""
        each = (profile,) * INSTANCES if isinstance(profile, Profile) else profile
        counts = Counter(each)
        for one in counts:
            if not (path := self._path(one)).exists():
                path.write_text(yaml.safe_dump(one.model_dump()))
        assert isinstance(choice.policy, str)
        setup = Setup(
            trace=TraceChoice(path="", label=workload.trace.name),
            policy=PolicyChoice(choice.policy, choice.knobs, choice.name),
            instances=len(each),
            profile=" + ".join(f"{number} {self._path(one)}" for one, number in counts.items()),
        )
        return find(setup, workload, Rule()).speed

    def _path(self, profile: Profile) -> Path:
        return Path(self._profiles.name) / f"{abs(hash(profile))}.yaml"

    # -- runs
    # -----------------------------------------------------------------------------------------

    def play(self, stage: Stage, part: Part, choice: Choice, seed: int, fraction: float, **more: Any) -> Run:
        """Runs once without keeping the run. Later values of `choice.settings` and `more` win."""
        settings = {
            "profile": stage.profile,
            "instances": INSTANCES,
            "programs": "none",
            "guard": choice.policy
            in ("lmetric", "lmetric_seconds"),  # expressions are compared as scores alone
            **choice.settings,
            **more,
        }
        return simulate(
            part.workload.faster(part.max_speed * fraction),
            policy=choice.policy,
            knobs=dict(choice.knobs) or None,
            seed=seed,
            **settings,
        )

    def runs(
        self, stage: Stage, choice: Choice, *, fraction: float = HALF, tuning: bool = False, **more: Any
    ) -> list[Figures]:
        """Returns the figures of `choice`, one per seed. `tuning`: on the tuned part in place of
        the evaluation split."""
        return self.many(stage, [choice], fraction=fraction, tuning=tuning, **more)[0]

    def many(
        self,
        stage: Stage,
        choices: Iterable[Choice],
        *,
        fraction: float = HALF,
        tuning: bool = False,
        **more: Any,
    ) -> list[list[Figures]]:
        """Returns `runs` of each choice, over all cores."""

        def key(choice: Choice, seed: int) -> Any:
            told = (choice.policy, sorted(choice.knobs.items()), {**choice.settings, **more})
            return (stage.label, fraction, tuning, seed, repr(told))

        def make(choice: Choice, seed: int) -> Figures:
            part = stage.tune if tuning else stage.part(seed)
            return figures_of(self.play(stage, part, choice, seed, fraction, **more))

        choices = list(choices)
        for choice in choices:
            for seed in self.seeds:
                if key(choice, seed) not in self._made:
                    self._made[key(choice, seed)] = self._pool.submit(make, choice, seed)
        return [[self._made[key(choice, seed)].result() for seed in self.seeds] for choice in choices]

    def each_seed(self, work: Callable[[int], Any]) -> list[Any]:
        """Returns `work(seed)` of each seed, over all cores."""
        return list(self._pool.map(work, self.seeds))

    def tuned(
        self, stage: Stage, policy: str, knob: str, values: Sequence[float], by: str = "ttft_mean"
    ) -> Choice:
        """Returns the parameter value with the least `by` on the tuned part, mean over seeds."""
        choices = [Choice(policy, {knob: value}) for value in values]
        means = [mean(runs, by) for runs in self.many(stage, choices, tuning=True)]
        return choices[int(np.argmin(means))]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._profiles.cleanup()


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """Returns a trace cut in the middle of its time."""
    middle = trace.duration_seconds / 2
    return trace.between(0, middle), trace.between(middle, np.inf)


def read_scenario(path: Path) -> Trace:
    """Reads a trace file, all requests arriving as recorded.

    Raises `OSError` if it cannot be read, `TraceError` if it is no trace, or too small to cut in
    halves.
    """
    trace = load_trace(path, closed_loop=False)
    if (least := min(map(len, halves(trace)))) < LEAST_REQUESTS // 2:
        raise TraceError(
            f"{path}: {least} of {len(trace)} requests in one half of its time; "
            f"expected at least {LEAST_REQUESTS // 2} in each: tuning takes one half, measuring the other"
        )
    return trace


def mean(runs: Sequence[Figures], quantity: str) -> float:
    return float(np.mean([run[quantity] for run in runs]))


def values(runs: Sequence[Figures], quantity: str) -> list[float]:
    return [run[quantity] for run in runs]


def change(new: Sequence[Figures], old: Sequence[Figures], quantity: str) -> list[float]:
    """Returns the relative change per seed, against the run of the same seed and trace; NaN if that
    has 0."""
    pairs = [(a[quantity], b[quantity]) for a, b in zip(new, old, strict=True)]
    return [a / b - 1 if b else np.nan for a, b in pairs]
