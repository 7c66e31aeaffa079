"""Setup and stored result of one simulated run: the unit of `simulate`, studies and reports."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from lmetric import _core, plugins
from lmetric._core import LmetricError
from lmetric.defaults import PLANNER
from lmetric.option_values import shown
from lmetric.policies import Policy, PolicyFunction
from lmetric.profiles import Profile, fleet_profiles, load_profile
from lmetric_lab.defaults import DEFAULT_PROFILE
from lmetric_lab.packed import SUFFIXES
from lmetric_lab.public_traces import available
from lmetric_lab.sim.summary import RunFigures, Slo, arrival_span, figures, measured, prefill_windows

if TYPE_CHECKING:
    from lmetric_lab.sim.result import Run
    from lmetric_lab.sim.scenario import Scenario
    from lmetric_lab.sim.traces import Trace
    from lmetric_lab.sim.workload import Workload

Value = str | float | bool | None | Mapping[str, Any]

# Quantiles of stored distributions: every percent, closer in the tail.
QUANTILES = np.concatenate((np.arange(0, 99) / 100, 1 - np.geomspace(1e-2, 1e-4, 13), [1.0]))


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy with its parameters: a registered name, a score, or a mapping as in a
    configuration."""

    policy: str | Mapping[str, Any]
    knobs: Mapping[str, float] = field(default_factory=dict)
    label: str = ""  # name in tables and figures

    @staticmethod
    def parse(text: str) -> list[PolicyChoice]:
        """Reads ``lmetric``, ``p_token * (bs + 1)``, ``linear(lam=0.7)`` (with parameters), or
        ``all``."""
        text = text.strip()
        called = re.fullmatch(r"(\w+)\s*\((.*)\)", text, re.DOTALL)
        names = [row["name"] for row in _core.policy_table()]
        if text == "all":
            return [PolicyChoice(name, {}, name) for name in names]
        if called is None or called[1] not in names:
            return [PolicyChoice(text, {}, text)]
        knobs = {}
        for pair in filter(None, (part.strip() for part in called[2].split(","))):
            name, _, value = (part.strip() for part in pair.partition("="))
            try:
                knobs[name] = float(value)
            except ValueError:
                raise _core.BadValueError(
                    f"policy {text!r}: {pair!r} is not valid; expected NAME=NUMBER"
                ) from None
        return [PolicyChoice(called[1], knobs).labelled()]

    def labelled(self, label: str | None = None) -> PolicyChoice:
        """A copy with this label; None: a label from the policy and its parameters."""
        if label is None:
            inner = ", ".join(f"{name}={value:g}" for name, value in self.knobs.items())
            label = f"{self.base}({inner})" if inner else self.base
        return replace(self, label=label)

    @property
    def base(self) -> str:
        """The policy without its parameters."""
        if isinstance(self.policy, str):
            return self.policy
        return str(self.policy.get("name") or self.policy.get("score"))

    def code(self) -> str | None:
        """Digest of the file with a Python policy; a changed file is a different policy."""
        file = plugins.file_of(self.policy) if isinstance(self.policy, str) else None
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()

    def build(self) -> Policy | PolicyFunction | str:
        """The policy for the router. Raises the errors of `Policy.from_config`, also for unknown
        parameters."""
        policy = self.policy
        if not isinstance(policy, str):  # parameters of the policy itself would win
            policy = {**policy, "knobs": {**(policy.get("knobs") or {}), **self.knobs}}
        built = Policy.from_config(policy, knobs=self.knobs)
        _core.Router(built, knobs=dict(self.knobs) if isinstance(built, str) else None)
        return built


def split_policies(texts: Iterable[str]) -> Iterator[str]:
    """Splits at commas outside parentheses: ``lmetric,linear(lam=0.7),where(bs > 4, 1, 0)`` has
    three parts."""
    for text in texts:
        depth, begin = 0, 0
        for index, letter in enumerate(text):
            depth += (letter in "([{") - (letter in ")]}")
            if letter == "," and depth <= 0:
                yield text[begin:index].strip()
                begin = index + 1
        yield text[begin:].strip()


@dataclass(frozen=True, slots=True)
class TraceChoice:
    """A part of a trace file, or the description of a synthetic trace."""

    path: str  # "": synthetic
    label: str
    synthetic: str | None = None  # the description, as JSON
    start: float = 0.0  # trace seconds to skip at the front
    duration: float | None = None  # trace seconds to use from there
    requests: int | None = None  # number of first requests to use
    max_input_tokens: int | None = None  # skips longer prompts
    prefixes: bool = True  # False: ignore hash_ids, so that requests share no prefix
    closed_loop: bool | None = None  # whether turns wait for answers; None: as in the file
    session_rate: float | None = None  # sessions per second, for sessions without start times
    format: str | None = None  # None: detected
    block_tokens: int | None = None  # per hash ID; None: from the file or format
    skip_bad_lines: bool = False

    def load(self) -> Trace:
        """Reads or makes the trace. Raises `TraceError` and `OSError`, also if no request is
        left."""
        from lmetric_lab.sim.synthetic import check_synthetic
        from lmetric_lab.sim.traces import TraceError, load_trace

        if self.synthetic is not None:
            return check_synthetic(orjson.loads(self.synthetic), self.label).make()
        trace = load_trace(
            self.path,
            format=self.format,
            on_bad_line="skip" if self.skip_bad_lines else "stop",
            block_tokens=self.block_tokens,
            closed_loop=self.closed_loop,
            session_rate=self.session_rate,
        )
        total = len(trace)
        end = float("inf") if self.duration is None else self.start + self.duration
        trace = trace.between(self.start, end)
        if self.max_input_tokens is not None:
            trace = trace.at_most(self.max_input_tokens)
        if self.requests is not None:
            trace = trace.first(self.requests)
        if not len(trace):
            raise TraceError(f"{self.path}: the filters exclude all {total} requests")
        return trace if self.prefixes else trace.without_prefixes()

    def digest(self) -> str:
        """Digest of the file's bytes: results depend on the content of the trace, not on its
        path."""
        if self.synthetic is not None:
            return hashlib.sha256(self.synthetic.encode()).hexdigest()
        with available(Path(self.path)).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def trace_label(path: str) -> str:
    """A file's name without the extensions of its format."""
    name = Path(path).name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name.removesuffix(".jsonl").removesuffix(".csv").removesuffix(".yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All inputs of a run."""

    trace: TraceChoice
    policy: PolicyChoice  # with pools: of the prefill pool
    instances: int
    profile: str = DEFAULT_PROFILE
    roles: str | None = None  # pools, as in 16P64D; `instances` is their sum
    decode_policy: PolicyChoice | None = None  # of the decode pool
    block_tokens: int | None = None  # same memory; None: from the profile
    speed: float = 1.0  # arrival rate relative to the trace
    fraction_of_max: float | None = None  # if `speed` results from the maximum load
    seed: int = 0
    settings: Mapping[str, Value] = field(default_factory=dict)  # further fields of `Scenario`
    measure: tuple[float, float] = (0.0, 1.0)
    slo: Slo = field(default_factory=Slo)

    @property
    def choice(self) -> PolicyChoice:
        """The choice to compare: the policy, or a pair of policies with one label."""
        first, second = self.policy, self.decode_policy
        if second is None:
            return first
        knobs = {**first.knobs, **second.knobs}
        return PolicyChoice(f"{first.base} / {second.base}", knobs, f"{first.label} / {second.label}")

    @property
    def load(self) -> str:
        """The name of the load in tables."""
        if self.fraction_of_max is None:
            return f"speed {self.speed:.4g}"
        return f"{self.fraction_of_max:.4g} of the maximum"

    @property
    def engine(self) -> Profile:
        """The profile of the engines; in mixed fleets of the first engine. Raises
        `ProfileError`."""
        return self.engines[0][1]

    @property
    def engines(self) -> list[tuple[int, Profile]]:
        """Number and profile of the engines of each kind. Raises `ProfileError`."""
        pairs = fleet_profiles(self.profile) or [(self.instances, self.profile)]
        return [(instances, self._in_blocks(name)) for instances, name in pairs]

    @property
    def decode_engine(self) -> Profile | None:
        """The profile of decode instances; None: as the others. Raises `ProfileError`."""
        name = self.settings.get("decode_profile")
        return None if name is None else self._in_blocks(str(name))

    def _in_blocks(self, name: str) -> Profile:
        profile = load_profile(name)
        return profile if self.block_tokens is None else profile.in_blocks_of(self.block_tokens)

    def scenario(self) -> Scenario:
        """The scenario. Raises `ProfileError`, `BadValueError` and the errors of `Policy`."""
        from lmetric_lab.sim.scenario import Scenario

        policy, second = self.policy.build(), self.decode_policy
        fields: dict[str, Any] = {**self.settings, "decode_profile": self.decode_engine}
        if self.roles is not None:
            fields["roles"] = self.roles
        if second is not None:
            fields["decode_policy"] = chosen = second.build()
            fields["decode_knobs"] = dict(second.knobs) if isinstance(chosen, str) else None
        engines = self.engines
        return Scenario(
            policy=policy,
            knobs=dict(self.policy.knobs) if isinstance(policy, str) else None,
            instances=self.instances,
            profile=engines[0][1]
            if len(engines) == 1
            else [profile for instances, profile in engines for _ in range(instances)],
            seed=self.seed,
            **fields,
        )

    @property
    def group(self) -> tuple[str, ...]:
        """Trace, fleet and settings, which must be equal to compare policies."""
        settings = ", ".join(f"{name} {shown(value)}" for name, value in sorted(self.settings.items()))
        blocks = "" if self.block_tokens is None else f"blocks of {self.block_tokens} tokens"
        fleet = self.roles or f"{self.instances} instances"
        return (self.trace.label, fleet, self.profile, blocks, settings)

    def key(self, digest: str) -> str:
        """The key of the run: equal for equal settings, trace bytes (`digest`), profile constants
        and version."""
        told = asdict(self)
        for name in ("path", "label"):
            del told["trace"][name]
        if self.trace.session_rate is None:
            del told["trace"]["session_rate"]
        del told["policy"]["label"], told["fraction_of_max"], told["block_tokens"]
        for name, choice in (("code", self.policy), ("decode_code", self.decode_policy)):
            if choice is not None and (code := choice.code()) is not None:
                told[name] = code
        if self.decode_policy is None:
            del told["decode_policy"]
        else:
            del told["decode_policy"]["label"]
            told["kv_bytes_per_token"] = self.engine.kv_bytes_per_token
        if "prefix_fetch" in self.settings or self.policy.base == PLANNER:
            told["kv_bytes_per_token"] = self.engine.kv_bytes_per_token
        if self.roles is None:
            del told["roles"]
        told |= {
            "digest": digest,
            "profile": self.engine.constants(),
            "version": _version(),
        }
        if len(self.engines) > 1:
            told["profiles"] = [(instances, profile.constants()) for instances, profile in self.engines]
        if predictor := self.settings.get("predictor"):
            told["predictor"] = load_profile(str(predictor)).constants()
        if (decodes := self.decode_engine) is not None:
            told["decode_profile"] = decodes.constants()
        return hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:24]


@cache  # reading it takes 5 ms, and each run of a study has it in its key
def _version() -> str:
    return version("lmetric-router")


@dataclass(frozen=True, slots=True)
class Curves:
    """A run's distributions: values at `QUANTILES`, seconds. TPOT excludes answers of one token."""

    ttft_seconds: list[float]
    tpot_seconds: list[float]
    e2e_seconds: list[float]


@dataclass(frozen=True, slots=True)
class Unevenness:
    """Prompt tokens computed per window of `window_seconds`, as in LMETRIC Figures 10 and 27.

    It has the two instances with the most varied work, and minimum, mean and maximum of all
    instances.
    """

    window_seconds: float
    first: list[float]
    second: list[float]
    least: list[float]
    mean: list[float]
    most: list[float]


@dataclass(frozen=True, slots=True)
class Result:
    """A run: its setup and its stored figures."""

    key: str
    setup: Setup
    figures: RunFigures
    arrivals_per_second: float  # of the whole trace at this speed
    first_token_share: float  # requests with their first token when the last one arrived
    guard_alarms: int
    curves: Curves
    unevenness: Unevenness | None  # of the first seed only
    unscored: int = 0  # decisions without a score, in which the fewest requests decided


def run(setup: Setup, trace: Trace | Workload, key: str = "") -> Result:
    """The figures of `play`."""
    return keep(setup, play(setup, trace), key)


def play(setup: Setup, trace: Trace | Workload) -> Run:
    """Simulate `setup` on `trace`, and apply `setup.speed` to it."""
    from lmetric_lab.sim.run import simulate

    return simulate(trace if setup.speed == 1 else trace.faster(setup.speed), setup.scenario())


def keep(setup: Setup, run: Run, key: str = "") -> Result:
    """The result of `run` for tables and reports."""
    arrivals = run.arrival_seconds
    kept = measured(arrivals, setup.measure)
    if not len(kept):
        first, end = setup.measure
        raise LmetricError(f"the share {first:g}:{end:g} of {len(arrivals)} requests leaves none to measure")
    first, last = arrival_span(np.sort(arrivals))
    arrived = int(np.count_nonzero(~np.isnan(arrivals)))
    return Result(
        key=key,
        setup=setup,
        figures=named(figures(run, setup.slo, setup.measure), setup),
        arrivals_per_second=max(arrived - 1, 0) / max(last - first, 1e-9),
        first_token_share=float(np.mean(run.first_token_seconds <= last)),
        guard_alarms=run.guard_alarms,
        curves=Curves(
            _quantiles(run.ttft_seconds[kept]),
            _quantiles(run.tpot_seconds[kept]),
            _quantiles(run.e2e_seconds[kept]),
        ),
        unevenness=_unevenness(run, kept) if setup.seed == 0 else None,
        unscored=run.unscored,
    )


def named(figures: RunFigures, setup: Setup) -> RunFigures:
    """Figures with the labels of their policies."""
    second = setup.decode_policy
    decode = None if second is None else second.label
    return replace(figures, policy=setup.policy.label, decode_policy=decode)


def _quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    known = values[~np.isnan(values)]
    return [float(f"{value:.6g}") for value in np.quantile(known, QUANTILES)] if len(known) else []


def _unevenness(run: Run, kept: np.ndarray[Any, np.dtype[np.int64]]) -> Unevenness:
    from lmetric_lab.sim.summary import WINDOW_SECONDS

    work = prefill_windows(run, *arrival_span(run.arrival_seconds[kept]))
    order = np.argsort(-work.std(axis=1), kind="stable")
    first, second = work[order[0]], work[order[min(1, len(order) - 1)]]
    columns = (first, second, work.min(axis=0), work.mean(axis=0), work.max(axis=0))
    return Unevenness(WINDOW_SECONDS, *([round(float(each), 1) for each in column] for column in columns))
