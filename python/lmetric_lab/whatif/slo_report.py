"""The misses of an SLO in records, their causes, and changes that would have met it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from lmetric.record_schema import Records, failed, invalid
from lmetric_lab.sim.setups import PolicyChoice, Setup, play
from lmetric_lab.sim.summary import measured
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload
from lmetric_lab.slo import Goal, Metric
from lmetric_lab.whatif.check import FitCheck, Fleet, Floats, times_of
from lmetric_lab.whatif.compare import each_run
from lmetric_lab.whatif.fit import EngineFit
from lmetric_lab.whatif.recording import Recording, WhatIfError

PROMPT_CLASSES = (0, 512, 2_048, 8_192, 32_768)  # lower bounds, tokens
MAX_TENANTS = 50  # rows; the others are one row
WARM_UP = 0.1  # share of the simulated requests that fill the caches
MAX_FLEET = 2.0  # largest fleet to try, relative to the recorded one
MISSES = {
    "failed": "the request failed or was refused",
    "held": "the request waited in the router for at least half of the bound of its TTFT",
    "retried": "an earlier engine failed",
    "queue": "the engine had more prompt tokens of other requests to compute than of this one",
    "prompt": "the engine had mostly this prompt to compute",
    "decode": "the first token was in time, and the further tokens were slow or many",
    "unknown": "the record has no load at the decision",
}

METRICS: tuple[Metric, ...] = ("ttft", "tpot", "e2e")

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """The requests of an engine, a tenant or a class of prompts.

    Shares are from 0 to 1. ``met``: requests within all bounds, over all. Failed requests are not.
    Requests without a TTFT or TPOT, which are not streamed or have one token, count as within that
    bound if they succeeded.
    """

    name: str
    requests: int
    failed: int
    met: float
    ttft_missed: float
    tpot_missed: float
    e2e_missed: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    tpot_mean_seconds: float | None
    hit_ratio: float | None
    causes: dict[str, int]  # missed requests by cause, a key of `MISSES`


@dataclass(frozen=True, slots=True)
class Option:
    """A simulation: share of requests within all bounds, mean over seeds, with least and most.

    The recorded share of failed requests counts as missed, because simulations have no failures.
    """

    policy: str
    fleet: str  # "8 engines", "8 engines (3P5D)"
    instances: int
    met: tuple[float, float, float]
    enough: bool  # whether it meets every objective with each seed
    change: bool = True  # false: the recorded policy on the recorded fleet

    @property
    def label(self) -> str:
        """The policy, with a mark if this is what ran."""
        return self.policy if self.change else f"{self.policy} (as recorded)"


@dataclass(frozen=True, slots=True)
class SloReport:
    """A report over records. ``options`` is empty if the simulation does not fit (`why_none`)."""

    slo: str
    objectives: dict[str, float]  # share of requests within each bound
    reached: bool  # whether every objective is met
    whole: Row
    engines: list[Row]
    tenants: list[Row]
    prompts: list[Row]
    policies: list[Row]
    options: list[Option] = field(default_factory=list)
    why_none: str | None = None

    def advice(self) -> str:
        """The smallest change that meets the SLO, in words."""
        shares = ", ".join(f"{share:.1%} within {name}" for name, share in self.objectives.items())
        if self.reached:
            return f"The records meet the SLO: {shares}."
        missed = f"The records miss the SLO: {shares}."
        if self.why_none is not None:
            return f"{missed} No change was simulated: {self.why_none}"
        if (same := _unexplained(self.options)) is not None:
            return (
                f"{missed} The simulation of the recorded fleet meets it ({same.met[0]:.1%}), so it does not "
                "explain the misses, and is no evidence for a change."
            )
        changes = [each for each in self.options if each.change]
        if not changes:
            return missed
        enough = [each for each in changes if each.enough]
        if not enough:
            best = max(changes, key=lambda each: each.met[0])
            return (
                f"{missed} No simulated change meets it; the best is {best.policy} on {best.fleet}, with "
                f"{best.met[0]:.1%} of the requests within all bounds."
            )
        best = min(enough, key=lambda each: (each.instances, -each.met[0]))
        return (
            f"{missed} {best.policy} on {best.fleet} would have met it: {best.met[0]:.1%} "
            f"({best.met[1]:.1%} to {best.met[2]:.1%} over the seeds) of the requests within all bounds."
        )


def _unexplained(options: Iterable[Option]) -> Option | None:
    """The simulation of what ran if it meets the SLO, which the records miss."""
    return next((each for each in options if each.enough and not each.change), None)


def slo_report(records: Records, goal: Goal) -> SloReport:
    """The misses in the records of one model, without simulated changes and invalid requests.

    Raises WhatIfError if all requests are invalid.
    """
    lines = [line for line in records.requests if not invalid(line)]
    if not lines:
        raise WhatIfError(f"all {len(records.requests)} requests are invalid; send requests with an answer")
    times = _times(lines, _recorded(lines))
    return SloReport(
        str(goal),
        dict(zip(map(str, goal.objectives), goal.shares(times), strict=True)),
        goal.margin(times) >= 0,
        _row("all", lines, goal),
        _rows(lines, goal, lambda line: str(line.get("instance", "none"))),
        _most(_rows(lines, goal, lambda line: str(line.get("tenant", "none"))), lines, goal),
        [row for row in map(_by_prompt(lines, goal), pairwise((*PROMPT_CLASSES, None))) if row.requests],
        _rows(lines, goal, lambda line: str(line.get("policy", "none"))),
    )


def _recorded(lines: Sequence[Line]) -> dict[Metric, Floats]:
    """Recorded times of requests."""
    return {name: _column(lines, f"{name}_seconds") for name in METRICS}


def _times(lines: Sequence[Line], recorded: Mapping[Metric, Floats]) -> dict[Metric, Floats]:
    """Times of requests; infinite if they failed."""
    lost = np.array([failed(line) for line in lines], np.bool_)
    return {name: np.where(lost, np.inf, each) for name, each in recorded.items()}


def simulate_options(
    report: SloReport,
    goal: Goal,
    recording: Recording,
    fit: EngineFit,
    check: FitCheck,
    policies: list[PolicyChoice],
    *,
    fleets: Sequence[Fleet] = (),
    seeds: int = 3,
    jobs: int | None = None,
) -> SloReport:
    """The report with simulated policies on the recorded fleet and ``fleets``, then on larger ones.

    The larger ones are only simulated if no fleet before them meets the SLO.
    If engines came and went, the first of these always has the largest recorded number of engines.

    Without a good fit, or if failures alone miss the SLO, it has the reason instead.
    """
    lost = report.whole.failed / max(1, report.whole.requests)
    if any(1 - lost < each.share for each in goal.objectives):
        return _with(
            report,
            [],
            f"{report.whole.failed} of {report.whole.requests} requests failed, more than the SLO allows, "
            "and the simulation has no failures: find their cause first (`reason` in the records)",
        )
    if not check.good:
        return _with(report, [], check.reason())
    options: list[Option] = []
    recorded = Fleet.recorded(recording)
    constant = [Fleet(size) for size in _sizes(recording.most_engines)]
    larger = [fleet for fleet in constant if fleet != recorded]
    for group in ([recorded, *fleets], *([fleet] for fleet in larger)):
        for fleet in group:
            options += _options(recording, fit, policies, fleet, goal, seeds, jobs, lost)
        if any(option.enough for option in options):
            break
    return _with(report, options, None)


def _with(report: SloReport, options: list[Option], why_none: str | None) -> SloReport:
    return replace(report, options=options, why_none=why_none)


def _sizes(recorded: int) -> Iterable[int]:
    """Sizes of fleets, from the recorded one in about eight steps."""
    most = max(recorded + 1, round(MAX_FLEET * recorded))
    return sorted({recorded, *(int(size) for size in np.ceil(np.linspace(recorded + 1, most, 8)))})


def _options(
    recording: Recording,
    fit: EngineFit,
    policies: list[PolicyChoice],
    fleet: Fleet,
    goal: Goal,
    seeds: int,
    jobs: int | None,
    lost: float,
) -> list[Option]:
    """The simulations of policies on a fleet.

    ``lost``: recorded share of failed requests.
    """

    def outcome(setup: Setup, workload: Trace | Workload) -> tuple[float, float]:
        run = play(setup, workload)
        kept = measured(run.arrival_seconds, (WARM_UP, 1.0))
        times = {name: each[kept] for name, each in times_of(run, fit.request_seconds).items()}
        shares = zip(goal.shares(times), goal.objectives, strict=True)
        margin = min((1 - lost) * share - each.share for share, each in shares)
        return (1 - lost) * float(goal.kept(times).mean()), margin

    results = each_run(recording, fit, policies, outcome, seeds=seeds, fleet=fleet, jobs=jobs)
    found = []
    for index, policy in enumerate(policies):
        met, margins = zip(*results[index * seeds : (index + 1) * seeds], strict=True)
        same = policy.label == recording.policy.label and fleet == Fleet.recorded(recording)
        found.append(
            Option(
                policy.label,
                str(fleet),
                fleet.instances,
                (fmean(met), min(met), max(met)),
                min(margins) >= 0,
                not same,
            )
        )
    return found


def _rows(lines: Sequence[Line], goal: Goal, name_of: Callable[[Line], str]) -> list[Row]:
    """The rows by name, the most missed requests first."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(name_of(line), []).append(line)
    rows = [_row(name, each, goal) for name, each in groups.items()]
    return sorted(rows, key=lambda row: (-row.requests * (1 - row.met), row.name))


def _most(rows: list[Row], lines: Sequence[Line], goal: Goal) -> list[Row]:
    """The first `MAX_TENANTS` rows, and one for the others."""
    if len(rows) <= MAX_TENANTS:
        return rows
    shown = {row.name for row in rows[:MAX_TENANTS]}
    others = [line for line in lines if str(line.get("tenant", "none")) not in shown]
    return [*rows[:MAX_TENANTS], _row(f"{len(rows) - MAX_TENANTS} others", others, goal)]


def _by_prompt(lines: Sequence[Line], goal: Goal) -> Callable[[tuple[int | None, int | None]], Row]:
    def row(bounds: tuple[int | None, int | None]) -> Row:
        low, high = bounds[0] or 0, bounds[1]
        inside = [
            line
            for line in lines
            if low <= line["prompt_tokens"] and (high is None or line["prompt_tokens"] < high)
        ]
        return _row(
            f"{low:,} tokens and more" if high is None else f"{low:,} to {high - 1:,} tokens", inside, goal
        )

    return row


def _row(name: str, lines: Sequence[Line], goal: Goal) -> Row:
    recorded = _recorded(lines)
    ttft, tpot = recorded["ttft"], recorded["tpot"]
    bounds = {each.metric: each.seconds for each in goal.objectives}
    over = {name: recorded[name] > bounds.get(name, np.inf) for name in METRICS}
    kept = goal.kept(_times(lines, recorded))
    # A late first token; without a bound of TTFT, a first token after most of the duration.
    late = over["ttft"] | (over["e2e"] & (ttft > recorded["e2e"] / 2))
    longest_wait = bounds.get("ttft", bounds.get("e2e", np.inf)) / 2
    causes = Counter(
        _cause(line, bool(late[index]), longest_wait) for index, line in enumerate(lines) if not kept[index]
    )
    told = [line for line in lines if "cached_tokens" in line]
    tokens = sum(line["prompt_tokens"] for line in told)
    known = ttft[~np.isnan(ttft)]
    n = max(1, len(lines))
    return Row(
        name,
        len(lines),
        sum(map(failed, lines)),
        1 - float((~kept).sum()) / n,
        float(over["ttft"].sum()) / n,
        float(over["tpot"].sum()) / n,
        float(over["e2e"].sum()) / n,
        float(np.percentile(known, 50)) if len(known) else None,
        float(np.percentile(known, 99)) if len(known) else None,
        float(np.nanmean(tpot)) if (~np.isnan(tpot)).any() else None,
        sum(line["cached_tokens"] for line in told) / tokens if tokens else None,
        {name: causes[name] for name in MISSES if causes[name]},
    )


def _cause(line: Line, late: bool, longest_wait: float) -> str:
    """The main cause of a miss: a key of `MISSES`."""
    if failed(line):
        return "failed"
    if not late:
        return "decode"
    if line.get("held_seconds", 0.0) >= longest_wait:
        return "held"
    if line.get("retries"):
        return "retried"
    if "load" not in line:
        return "unknown"
    own = line["prompt_tokens"] - line.get("cached_tokens", line.get("predicted_cached_tokens", 0))
    return "queue" if line["load"].get("queued_prefill_tokens", 0) - own > own else "prompt"


def _column(lines: Sequence[Line], name: str) -> Floats:
    return np.array([line.get(name, np.nan) for line in lines], np.float64)
