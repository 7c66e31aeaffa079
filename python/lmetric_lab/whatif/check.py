"""Compares a simulation of the policy that ran with the records: the trust in a what-if."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.scenario import Scenario
from lmetric_lab.sim.setups import PolicyChoice, Setup, TraceChoice, play
from lmetric_lab.sim.summary import Slo
from lmetric_lab.sim.workload import Workload, prepare
from lmetric_lab.slo import Metric
from lmetric_lab.whatif.fit import FIT_SHARE, MIN_TIMES, EngineFit, engine_scenario
from lmetric_lab.whatif.recording import Recording, WhatIfError

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
BLOCKS = 10  # of the compared requests, for the standard error of the score
BAR = 30  # characters of the longest bar
JITTER_SECONDS = 0.01  # of arrivals, which differ between the seeds

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines of a simulation.

    ``instances``: the largest number at once. ``roles``: None: all are whole engines. ``transfer``:
    KV transfers between pools, as `lmetric_lab.sim.pools.Transfer` reads them; None: its default.
    ``changing``: whether engines join and leave as recorded.
    """

    instances: int
    roles: Roles | None = None
    transfer: str | None = None
    changing: bool = False

    @classmethod
    def of(cls, roles: Roles, transfer: str | None = None) -> Fleet:
        """Pools for prefill and decode."""
        return cls(roles.instances, roles, transfer)

    @classmethod
    def recorded(cls, recording: Recording) -> Fleet:
        """The recorded fleet."""
        return cls(recording.most_engines, changing=bool(recording.changes))

    def __str__(self) -> str:
        if self.changing:
            return f"at most {self.instances} engines (as recorded)"
        return f"{self.instances} engines" + (f" ({self.roles})" if self.roles else "")


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest errors of a fit that is good enough to compare policies."""

    ttft: float = 0.25  # relative, of the mean
    tpot: float = 0.15  # relative, of the mean
    hit_ratio: float = 0.05  # difference


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity, recorded and simulated: mean over the seeds, with the least and most of them."""

    name: str
    unit: str
    recorded: float
    simulated: float
    least: float
    most: float
    error: float  # relative; of a ratio: the difference
    limit: float

    @property
    def good(self) -> bool:
        """Whether the error is within its limit."""
        return abs(self.error) <= self.limit


@dataclass(frozen=True, slots=True)
class FitCheck:
    """How well the simulation of the recorded policy agrees with the records.

    ``requests``: number of compared requests, which the fit has not seen. ``score_error``: largest
    relative error of the score of a ranking that this comparison does not exclude, with a
    confidence of 95%. ``quantiles``: by quantity, the rows of `QUANTILES`, recorded and simulated,
    in seconds.
    """

    policy: str
    requests: int
    figures: tuple[Figure, ...]
    score_error: float
    quantiles: dict[str, tuple[list[float], list[float]]]

    @property
    def good(self) -> bool:
        """Whether all errors are within their limits."""
        return all(figure.good for figure in self.figures)

    def reason(self) -> str:
        """The errors above their limits, and what to do."""
        bad = ", ".join(
            f"{each.name} {each.error:+.0%} (limit {each.limit:.0%})"
            for each in self.figures
            if not each.good
        )
        return (
            f"the simulation of {self.policy} does not fit the records: {bad}. Record a longer time of "
            "steady traffic, give the engines' settings (--max-batch-tokens, --max-sequences, "
            "--cache-blocks), or accept larger errors with --max-error"
        )

    def plot(self) -> str:
        """Quantiles as bars: recorded above simulated."""
        lines = []
        for name, (recorded, simulated) in self.quantiles.items():
            scale = BAR / max(*recorded, *simulated, 1e-9)
            lines.append(f"{name}, ms")
            for quantile, real, made in zip(QUANTILES, recorded, simulated, strict=True):
                lines.append(
                    f"  p{quantile * 100:<4g} recorded  {'█' * round(real * scale)} {real * 1e3:.4g}"
                )
                lines.append(f"        simulated {'░' * round(made * scale)} {made * 1e3:.4g}")
        return "\n".join(lines)


def check_fit(
    recording: Recording,
    fit: EngineFit,
    *,
    seeds: int = 3,
    limits: Limits | None = None,
    until_seconds: float = np.inf,
) -> FitCheck:
    """Simulates the policy that ran, and compares the requests that the fit did not use.

    ``until_seconds``: requests that arrived later are load and are not compared. Of a running
    fleet, many of them have not ended, so the others are faster in the simulation.

    Raises:
        WhatIfError: too few of the compared requests are streams.
        LmetricError: the policy cannot be built here, such as a file that does not exist.
    """
    limits = limits or Limits()
    from_index = round(FIT_SHARE * len(recording))
    late = (np.arange(len(recording)) >= from_index) & (recording.trace.arrival_seconds <= until_seconds)
    streams = late & ~np.isnan(recording.ttft_seconds)
    several = late & ~np.isnan(recording.tpot_seconds)
    if min(streams.sum(), several.sum()) < MIN_TIMES:
        raise WhatIfError(
            f"{streams.sum()} of the {late.sum()} requests that check the fit have a TTFT and "
            f"{several.sum()} a TPOT; at least {MIN_TIMES} of each are needed: record more streamed requests"
        )
    setups, workloads = plan(recording, fit, [recording.policy], seeds, trace=None)
    runs: list[tuple[Run, Floats]] = []
    with saved(fit) as path:
        for setup in setups:
            run = play(replace(setup, profile=str(path)), workloads[setup.seed])
            runs.append((run, run.ttft_seconds + fit.request_seconds))
    told = late & ~np.isnan(recording.cached_tokens)
    waits = recording.ttft_seconds - recording.held_seconds
    figures = [
        _figure("mean TTFT", "s", waits[streams], [ttft[streams] for _, ttft in runs], limits.ttft),
        _figure(
            "mean TPOT", "s", recording.tpot_seconds[several],
            [run.tpot_seconds[several] for run, _ in runs], limits.tpot,
            weights=(recording.trace.output_tokens[several] - 1).astype(np.float64),
        ),
    ]  # fmt: skip
    tokens = recording.trace.input_tokens
    if told.any():
        total = float(tokens[told].sum())
        hits = [float(run.hit_tokens[told].sum()) / total for run, _ in runs]
        real = float(recording.cached_tokens[told].sum()) / total
        mean = float(np.mean(hits))
        figures.append(
            Figure("hit rate", "", real, mean, min(hits), max(hits), mean - real, limits.hit_ratio)
        )
    first, ttft = runs[0]
    return FitCheck(
        recording.policy.label,
        int(late.sum()),
        tuple(figures),
        _score_error(
            [
                (waits[streams], np.mean([ttft[streams] for _, ttft in runs], axis=0)),
                (
                    recording.tpot_seconds[several],
                    np.mean([run.tpot_seconds[several] for run, _ in runs], axis=0),
                ),
            ]
        ),
        {
            "TTFT": (_quantiles(waits[streams]), _quantiles(ttft[streams])),
            "TPOT": (_quantiles(recording.tpot_seconds[several]), _quantiles(first.tpot_seconds[several])),
        },
    )


def plan(
    recording: Recording,
    fit: EngineFit,
    policies: list[PolicyChoice],
    seeds: int,
    *,
    trace: Any,
    fleet: Fleet | None = None,
    slo: Slo | None = None,
) -> tuple[list[Setup], dict[int, Workload]]:
    """The runs of policies, and the workload of each seed.

    ``trace``: None: recorded arrivals. ``fleet``: None: as recorded. Arrivals differ by up to
    `JITTER_SECONDS` between seeds, as they differ between real runs.
    """
    fleet = fleet or Fleet.recorded(recording)
    played = recording.trace if trace is None else trace
    if not recording.sessions:
        played = replace(played, sessions=None)  # a router would not know them either
    scenario = fleet_scenario(recording, fit)
    if fleet.roles is not None and fleet.transfer is not None:
        scenario = scenario.replace(transfer=fleet.transfer)
    if fleet.changing:
        changes = ",".join(f"{each.at_seconds:f} {each.kind} {each.instance}" for each in recording.changes)
        scenario = scenario.replace(changes=changes)
    setups = [
        Setup(
            trace=TraceChoice("records", "records"),
            policy=policy,
            instances=len(recording.engines) if fleet.changing else fleet.instances,
            roles=None if fleet.roles is None else str(fleet.roles),
            seed=seed,
            settings=scenario.given,
            measure=(0.1, 1.0),
            slo=slo or Slo(),
        )
        for policy in policies
        for seed in range(seeds)
    ]
    workloads = {}
    for seed in range(seeds):
        shift = np.random.default_rng(seed).uniform(0, JITTER_SECONDS, len(played))
        arrivals = np.maximum.accumulate(played.arrival_seconds + (shift if seed else 0.0))
        workloads[seed] = prepare(replace(played, arrival_seconds=arrivals), fit.profile)
    return setups, workloads


def fleet_scenario(recording: Recording, fit: EngineFit) -> Scenario:
    """A scenario with a fleet like the recorded one."""
    return engine_scenario(fit.cached_answers).replace(
        signals="delayed",
        index="exact" if recording.exact else "approximate",
        guard=recording.guard,
    )


def times_of(run: Run, request_seconds: float, slack: float = 1.0) -> dict[Metric, Floats]:
    """TTFT, TPOT and duration of each request; infinite if it never ended.

    ``request_seconds``: time of a request outside of the engine. ``slack``: factor on the others.
    """
    lost = np.isnan(run.finished_seconds)
    return {
        "ttft": np.where(lost, np.inf, run.ttft_seconds * slack + request_seconds),
        "tpot": np.where(lost, np.inf, run.tpot_seconds * slack),
        "e2e": np.where(lost, np.inf, run.e2e_seconds * slack + request_seconds),
    }


@contextmanager
def saved(fit: EngineFit) -> Iterator[Path]:
    """A file with the profile: setups name profiles by their path."""
    with tempfile.TemporaryDirectory(prefix="lmetric-") as folder:
        path = Path(folder) / "recorded.yaml"
        path.write_text(as_yaml(fit))
        yield path


def as_yaml(fit: EngineFit) -> str:
    """The profile as a YAML file."""
    return yaml.safe_dump(fit.profile.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)


def _figure(
    name: str,
    unit: str,
    recorded: Floats,
    simulated: list[Floats],
    limit: float,
    *,
    weights: Floats | None = None,
) -> Figure:
    real = float(np.average(recorded, weights=weights))
    means = [float(np.average(each, weights=weights)) for each in simulated]
    mean = float(np.mean(means))
    return Figure(name, unit, real, mean, min(means), max(means), mean / real - 1.0, limit)


def _score_error(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    """The error of the geometric mean of means, recorded and simulated, plus twice its standard
    error: a jackknife over blocks of requests in the order of their arrival."""

    def error(left_out: int) -> float:
        logs = [
            np.log(np.nanmean(_without(made, left_out)) / np.mean(_without(real, left_out)))
            for real, made in pairs
        ]
        return float(np.mean(logs))

    each = np.array([error(block) for block in range(BLOCKS)])
    deviation = float(np.sqrt((BLOCKS - 1) * each.var()))
    return float(np.expm1(abs(error(-1)) + 2 * deviation))


def _without(values: Floats, block: int) -> Floats:
    """The values without one of `BLOCKS`; -1: all."""
    return (
        values
        if block < 0
        else np.concatenate(
            [part for index, part in enumerate(np.array_split(values, BLOCKS)) if index != block]
        )
    )


def _quantiles(values: Floats) -> list[float]:
    return [float(value) for value in np.nanquantile(values, QUANTILES)]
