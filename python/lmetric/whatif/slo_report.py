"""The misses of an SLO in records, their causes, and changes that would have met it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmetric.record_files import Records
from lmetric.sim.setups import PolicyChoice, Result
from lmetric.sim.study import cells
from lmetric.sim.summary import Slo
from lmetric.whatif.check import FitCheck, Fleet
from lmetric.whatif.compare import compare
from lmetric.whatif.fit import EngineFit
from lmetric.whatif.recording import Recording

PROMPT_CLASSES = (0, 512, 2_048, 8_192, 32_768)  # lower bounds, tokens
MAX_TENANTS = 50  # rows; the others are one row
MAX_FLEET = 2.0  # largest fleet to try, relative to the recorded one
MISSES = {
    "failed": "the request failed or was refused",
    "held": "the request waited in the router for at least half of the TTFT SLO",
    "retried": "an earlier engine failed",
    "queue": "the engine had more prompt tokens of other requests to compute than of this one",
    "prompt": "the engine had mostly this prompt to compute",
    "decode": "the first token was in time, and the further tokens were slow",
    "unknown": "the record has no load at the decision",
}

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """The requests of an engine, a tenant or a class of prompts.

    Shares are from 0 to 1. ``met``: requests that met all SLOs, over all. Requests without a TTFT
    or TPOT, which are not streamed or have one token, count as within that SLO if they succeeded.
    """

    name: str
    requests: int
    failed: int
    met: float
    ttft_missed: float
    tpot_missed: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    tpot_mean_seconds: float | None
    hit_ratio: float | None
    causes: dict[str, int]  # missed requests by cause, a key of `MISSES`


@dataclass(frozen=True, slots=True)
class Option:
    """A simulated change: share of good requests, mean over seeds, with least and most."""

    policy: str
    fleet: str  # "8 engines", "8 engines (3P5D)"
    instances: int
    met: tuple[float, float, float]
    enough: bool  # whether it meets the target with each seed


@dataclass(frozen=True, slots=True)
class SloReport:
    """A report over records. ``options`` is empty if the simulation does not fit (`why_none`)."""

    slo: Slo
    target: float  # share of requests that must meet the SLO
    whole: Row
    engines: list[Row]
    tenants: list[Row]
    prompts: list[Row]
    policies: list[Row]
    options: list[Option] = field(default_factory=list)
    why_none: str | None = None

    def advice(self) -> str:
        """The smallest change that meets the target, in words."""
        if self.whole.met >= self.target:
            return f"The records meet the target: {self.whole.met:.1%} of the requests are within the SLO."
        missed = f"{self.whole.met:.1%} of the requests are within the SLO; the target is {self.target:.1%}."
        if self.why_none is not None:
            return f"{missed} No change was simulated: {self.why_none}"
        if not self.options:
            return missed
        enough = [each for each in self.options if each.enough]
        if not enough:
            best = max(self.options, key=lambda each: each.met[0])
            return (
                f"{missed} No simulated change meets the target; the best is {best.policy} on "
                f"{best.fleet}, with {best.met[0]:.1%}."
            )
        best = min(enough, key=lambda each: (each.instances, -each.met[0]))
        return (
            f"{missed} {best.policy} on {best.fleet} would have met it: {best.met[0]:.1%} "
            f"({best.met[1]:.1%} to {best.met[2]:.1%} over the seeds)."
        )


def slo_report(records: Records, slo: Slo, target: float) -> SloReport:
    """The misses in the records of one model, without simulated changes."""
    lines = records.requests
    return SloReport(
        slo,
        target,
        _row("all", lines, slo),
        _rows(lines, slo, lambda line: str(line.get("instance", "none"))),
        _most(_rows(lines, slo, lambda line: str(line.get("tenant", "none"))), lines, slo),
        [row for row in map(_by_prompt(lines, slo), pairwise((*PROMPT_CLASSES, None))) if row.requests],
        _rows(lines, slo, lambda line: str(line.get("policy", "none"))),
    )


def simulate_options(
    report: SloReport,
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

    Without a good fit, it has the reason instead.
    """
    if not check.good:
        return _with(report, [], check.reason())
    options: list[Option] = []
    recorded, *larger = (Fleet(size) for size in _sizes(len(recording.engines)))
    for group in ([recorded, *fleets], *([fleet] for fleet in larger)):
        for fleet in group:
            results = compare(recording, fit, policies, seeds=seeds, fleet=fleet, slo=report.slo, jobs=jobs)
            options += _options(results, fleet, report.target)
        if any(option.enough for option in options):
            break
    return _with(report, options, None)


def _with(report: SloReport, options: list[Option], why_none: str | None) -> SloReport:
    return replace(report, options=options, why_none=why_none)


def _sizes(recorded: int) -> Iterable[int]:
    """Sizes of fleets, from the recorded one in about eight steps."""
    most = max(recorded + 1, round(MAX_FLEET * recorded))
    return sorted({recorded, *(int(size) for size in np.ceil(np.linspace(recorded + 1, most, 8)))})


def _options(results: Sequence[Result], fleet: Fleet, target: float) -> list[Option]:
    found = []
    for cell in cells(results):
        share = cell.over_seeds(lambda result: result.figures.goodput.share)
        if share is not None:
            found.append(Option(cell.policy, str(fleet), fleet.instances, share, share[1] >= target))
    return found


def _rows(lines: Sequence[Line], slo: Slo, name_of: Callable[[Line], str]) -> list[Row]:
    """The rows by name, the most missed requests first."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(name_of(line), []).append(line)
    rows = [_row(name, each, slo) for name, each in groups.items()]
    return sorted(rows, key=lambda row: (-row.requests * (1 - row.met), row.name))


def _most(rows: list[Row], lines: Sequence[Line], slo: Slo) -> list[Row]:
    """The first `MAX_TENANTS` rows, and one for the others."""
    if len(rows) <= MAX_TENANTS:
        return rows
    shown = {row.name for row in rows[:MAX_TENANTS]}
    others = [line for line in lines if str(line.get("tenant", "none")) not in shown]
    return [*rows[:MAX_TENANTS], _row(f"{len(rows) - MAX_TENANTS} others", others, slo)]


def _by_prompt(lines: Sequence[Line], slo: Slo) -> Callable[[tuple[int | None, int | None]], Row]:
    def row(bounds: tuple[int | None, int | None]) -> Row:
        low, high = bounds[0] or 0, bounds[1]
        inside = [
            line
            for line in lines
            if low <= line["prompt_tokens"] and (high is None or line["prompt_tokens"] < high)
        ]
        return _row(
            f"{low:,} tokens and more" if high is None else f"{low:,} to {high - 1:,} tokens", inside, slo
        )

    return row


def _row(name: str, lines: Sequence[Line], slo: Slo) -> Row:
    ttft, tpot = _column(lines, "ttft_seconds"), _column(lines, "tpot_seconds")
    failed = np.array([line["status"] != 200 for line in lines], np.bool_)
    late = np.zeros(len(lines), np.bool_) if slo.ttft_seconds is None else ttft > slo.ttft_seconds
    slow = np.zeros(len(lines), np.bool_) if slo.tpot_seconds is None else tpot > slo.tpot_seconds
    missed = failed | late | slow
    causes = Counter(
        _cause(line, bool(late[index]), slo) for index, line in enumerate(lines) if missed[index]
    )
    told = [line for line in lines if "cached_tokens" in line]
    tokens = sum(line["prompt_tokens"] for line in told)
    known = ttft[~np.isnan(ttft)]
    n = max(1, len(lines))
    return Row(
        name,
        len(lines),
        int(failed.sum()),
        1 - float(missed.sum()) / n,
        float(late.sum()) / n,
        float(slow.sum()) / n,
        float(np.percentile(known, 50)) if len(known) else None,
        float(np.percentile(known, 99)) if len(known) else None,
        float(np.nanmean(tpot)) if (~np.isnan(tpot)).any() else None,
        sum(line["cached_tokens"] for line in told) / tokens if tokens else None,
        {name: causes[name] for name in MISSES if causes[name]},
    )


def _cause(line: Line, late: bool, slo: Slo) -> str:
    """The main cause of a miss: a key of `MISSES`."""
    if line["status"] != 200:
        return "failed"
    if not late:
        return "decode"
    if slo.ttft_seconds is not None and line.get("held_seconds", 0.0) >= slo.ttft_seconds / 2:
        return "held"
    if line.get("retries"):
        return "retried"
    if "load" not in line:
        return "unknown"
    own = line["prompt_tokens"] - line.get("cached_tokens", line.get("predicted_cached_tokens", 0))
    return "queue" if line["load"]["queued_prefill_tokens"] - own > own else "prompt"


def _column(lines: Sequence[Line], name: str) -> NDArray[np.float64]:
    return np.array([line.get(name, np.nan) for line in lines], np.float64)
