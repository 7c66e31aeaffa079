"""Simulates other policies on recorded requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, prod
from statistics import fmean
from typing import TypeVar

from lmetric_lab.sim.backends import Threads
from lmetric_lab.sim.ranking import ranking
from lmetric_lab.sim.setups import PolicyChoice, Result, Setup, run
from lmetric_lab.sim.study import Cell, latency
from lmetric_lab.sim.summary import Slo, Spread
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.workload import Workload
from lmetric_lab.whatif.check import Fleet, plan, saved
from lmetric_lab.whatif.fit import EngineFit
from lmetric_lab.whatif.recording import Recording

T = TypeVar("T")


def compare(
    recording: Recording,
    fit: EngineFit,
    policies: list[PolicyChoice],
    *,
    seeds: int = 3,
    fleet: Fleet | None = None,
    slo: Slo | None = None,
    closed_loop: bool = True,
    jobs: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Result]:
    """The results of each policy with each seed, without the first tenth of the requests.

    ``fleet``: None: as recorded. ``closed_loop``: turns of named sessions
    follow the previous answer. Raises LmetricError for a policy that cannot run.
    """

    def figures(setup: Setup, workload: Trace | Workload) -> Result:
        return _with_requests(run(setup, workload), fit.request_seconds)

    return each_run(
        recording, fit, policies, figures, seeds=seeds, fleet=fleet, slo=_in_engine(slo, fit),
        closed_loop=closed_loop, jobs=jobs, progress=progress,
    )  # fmt: skip


def each_run(
    recording: Recording,
    fit: EngineFit,
    policies: list[PolicyChoice],
    work: Callable[[Setup, Trace | Workload], T],
    *,
    seeds: int = 3,
    fleet: Fleet | None = None,
    slo: Slo | None = None,
    closed_loop: bool = True,
    jobs: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[T]:
    """The results of ``work`` on the setup of each policy and seed, policy by policy."""
    trace = recording.closed_loop() if closed_loop else None
    setups, workloads = plan(recording, fit, policies, seeds, trace=trace, fleet=fleet, slo=slo)
    found: dict[int, T] = {}
    with saved(fit) as path:
        named = [replace(setup, profile=str(path)) for setup in setups]
        items = [(index, workloads[setup.seed]) for index, setup in enumerate(named)]
        for index, result in Threads(jobs).map(lambda index, workload: work(named[index], workload), items):
            found[index] = result
            progress()
    return [found[index] for index in range(len(named))]


def _with_requests(result: Result, seconds: float) -> Result:
    """The result with the time of a request outside of the engine in its TTFT and its end."""
    figures = result.figures
    ttft, e2e = _later(figures.ttft_seconds, seconds), _later(figures.e2e_seconds, seconds)
    return replace(result, figures=replace(figures, ttft_seconds=ttft, e2e_seconds=e2e))


def _later(spread: Spread | None, seconds: float) -> Spread | None:
    if spread is None:
        return None
    return Spread(*(getattr(spread, each.name) + seconds for each in fields(Spread)))


@dataclass(frozen=True, slots=True)
class Place:
    """A policy in the ranking.

    ``score`` is the geometric mean of mean TTFT and mean TPOT, relative to the best policy's mean:
    mean, low and high. The interval has the range over the seeds and the error of the fit.
    ``apart``: whether its interval overlaps with no better one.
    """

    policy: str
    score: tuple[float, float, float]
    apart: bool


def places(cells: Sequence[Cell], error: float) -> list[Place]:
    """The policies, best first. Policies that cannot keep up with the load come last.

    ``error``: relative error of scores, as `FitCheck.score_error`.
    """
    ranked = [standing.policy for standing in ranking(cells)]
    scores = {cell.policy: [_score(result) for result in cell.results] for cell in ranked}
    best = fmean(scores[ranked[0].policy])
    found: list[Place] = []
    for cell in ranked:
        own = [value / best for value in scores[cell.policy]]
        low, high = min(own) / (1 + error), max(own) * (1 + error)
        most = max((place.score[2] for place in found), default=0.0)
        found.append(Place(cell.policy, (fmean(own), low, high), low > most))
    return found


def _score(result: Result) -> float:
    parts = [latency(result, name, "mean") for name in ("ttft_seconds", "tpot_seconds")]
    known = [part for part in parts if part]
    return float(prod(known) ** (1 / len(known))) if known else inf


def _in_engine(slo: Slo | None, fit: EngineFit) -> Slo | None:
    """The SLO without the time of a request outside of the engine, which runs do not have."""
    if slo is None or slo.ttft_seconds is None:
        return slo
    return Slo(max(slo.ttft_seconds - fit.request_seconds, 1e-9), slo.tpot_seconds)
