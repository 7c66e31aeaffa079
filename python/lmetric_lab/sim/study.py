"""Runs a study's grid: first the maximum loads, if requested, then all missing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from hashlib import sha256
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lmetric._core import LmetricError
from lmetric_lab.sim import max_load
from lmetric_lab.sim.backends import Backend
from lmetric_lab.sim.max_load import MaxLoad, Rule
from lmetric_lab.sim.programs import ProgramFigures
from lmetric_lab.sim.setups import Result, Setup, TraceChoice, named, run
from lmetric_lab.sim.store import Store
from lmetric_lab.sim.study_file import Study

if TYPE_CHECKING:
    from lmetric_lab.sim.traces import Trace
    from lmetric_lab.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a study is: `stage` is "maximum loads" or "runs"."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished study, in the order of its grid."""

    name: str
    results: list[Result]
    max_loads: list[MaxLoad]
    reused: int  # runs from an earlier start


class Library:
    """A cache of traces: each is read once, with its digest, and prepared once per block size."""

    def __init__(self) -> None:
        self._traces: dict[TraceChoice, Trace] = {}
        self._ready: dict[tuple[TraceChoice, int], Workload] = {}
        self._digests: dict[TraceChoice, str] = {}

    def workload(self, setup: Setup) -> Workload:
        """The workload of `setup`, at the trace's own speed. Raises `TraceError` and `OSError`."""
        from lmetric_lab.sim.workload import prepare

        choice, profile = setup.trace, setup.engine
        key = (choice, profile.block_tokens)
        if key not in self._ready:
            if choice not in self._traces:
                self._traces[choice] = choice.load()
            self._ready[key] = prepare(self._traces[choice], profile)
        return self._ready[key]

    def digest(self, setup: Setup) -> str:
        """Digest of the trace file."""
        if setup.trace not in self._digests:
            self._digests[setup.trace] = setup.trace.digest()
        return self._digests[setup.trace]


def run_study(
    study: Study, store: Store, backend: Backend, progress: Callable[[Progress], None] = lambda _: None
) -> Outcome:
    """Run `study` on `backend` and keep each result in `store`. Stored results are not computed
    again.

    After an interrupt, the store has all finished runs.
    """
    library = Library()
    for setup in study.setups:
        library.workload(setup)
    loads = _max_loads(study, store, backend, library, progress)
    setups = [_at_its_load(setup, study, loads) for setup in study.setups]
    keys = [setup.key(library.digest(setup)) for setup in setups]
    missing = {key: setup for key, setup in zip(keys, setups, strict=True) if key not in store.runs}
    total = len(set(keys))
    reused = total - len(missing)
    progress(Progress("runs", reused, total))
    items = [(keyed, library.workload(keyed[1])) for keyed in missing.items()]
    for done, (_, result) in enumerate(backend.map(_run, items), start=reused + 1):
        store.add(result)
        progress(Progress("runs", done, total))
    # Labels are not part of the key: stored runs get the current labels.
    results = [_named(store.runs[key], setup) for key, setup in zip(keys, setups, strict=True)]
    return Outcome(study.name, results, loads, reused)


def _run(keyed: tuple[str, Setup], trace: Trace | Workload) -> Result:
    key, setup = keyed
    try:
        return run(setup, trace, key)
    except LmetricError as error:
        place = ", ".join((setup.choice.label, *filter(None, setup.group), setup.load, f"seed {setup.seed}"))
        raise LmetricError(f"{place}: {error}") from error


def _named(result: Result, setup: Setup) -> Result:
    return replace(result, setup=setup, figures=named(result.figures, setup))


def _max_loads(
    study: Study, store: Store, backend: Backend, library: Library, progress: Callable[[Progress], None]
) -> list[MaxLoad]:
    keys = [_search_key(setup, study.rule, library.digest(setup)) for setup in study.searches]
    missing = {k: setup for k, setup in zip(keys, study.searches, strict=True) if k not in store.max_loads}
    reused = len(set(keys)) - len(missing)
    items = [(keyed, library.workload(keyed[1])) for keyed in missing.items()]
    if keys:
        progress(Progress("maximum loads", reused, len(set(keys))))
    for done, (_, found) in enumerate(backend.map(partial(_find, study.rule), items), start=reused + 1):
        store.add(found)
        progress(Progress("maximum loads", done, len(set(keys))))
    return [
        replace(found, setup=replace(setup, speed=found.speed, fraction_of_max=1.0))
        for found, setup in ((store.max_loads[k], s) for k, s in zip(keys, study.searches, strict=True))
    ]


def _find(rule: Rule, keyed: tuple[str, Setup], trace: Trace | Workload) -> MaxLoad:
    key, setup = keyed
    return max_load.find(setup, trace, rule, key)


def _search_key(setup: Setup, rule: Rule, digest: str) -> str:
    return sha256(f"max load {setup.key(digest)} {rule}".encode()).hexdigest()[:24]


def _at_its_load(setup: Setup, study: Study, loads: Iterable[MaxLoad]) -> Setup:
    if setup.fraction_of_max is None:
        return setup
    found = next(
        load for load in loads
        if (load.setup.trace, load.setup.group) == (setup.trace, setup.group)
        and (load.setup.policy, load.setup.decode_policy) == study.reference
    )  # fmt: skip
    return replace(setup, speed=found.speed * setup.fraction_of_max)


@dataclass(frozen=True, slots=True)
class Cell:
    """The runs of one policy at one load, which differ only in their seed."""

    group: tuple[str, ...]
    load: str
    policy: str
    results: list[Result]

    def over_seeds(self, quantity: Callable[[Result], float | None]) -> tuple[float, float, float] | None:
        """Mean, minimum and maximum of a quantity; None if a run does not have it."""
        values = [quantity(result) for result in self.results]
        known = [value for value in values if value is not None]
        return (fmean(known), min(known), max(known)) if values and len(known) == len(values) else None


def cells(results: Iterable[Result]) -> list[Cell]:
    """Results grouped over seeds, in the order of their first run."""
    found: dict[tuple[Any, ...], Cell] = {}
    for result in results:
        setup = result.setup
        key = (setup.group, setup.load, setup.choice.label)
        found.setdefault(key, Cell(*key, [])).results.append(result)
    return list(found.values())


_PARTS = ("mean", "p50", "p90", "p99", "p999")


def summary(outcome: Outcome) -> dict[str, Any]:
    """The figures of a study: mean, minimum and maximum of each cell over its seeds."""
    return {
        "study": outcome.name,
        "runs": len(outcome.results),
        "max_loads": [asdict(load) for load in outcome.max_loads],
        "cells": [_told(cell) for cell in cells(outcome.results)],
    }


def _told(cell: Cell) -> dict[str, Any]:
    first = cell.results[0]

    def spread(quantity: Callable[[Result], float | None]) -> dict[str, float] | None:
        found = cell.over_seeds(quantity)
        return None if found is None else dict(zip(("mean", "least", "most"), found, strict=True))

    told: dict[str, Any] = {
        "trace": first.setup.trace.label,
        "instances": first.setup.instances,
        "profile": first.setup.profile,
        "block_tokens": first.setup.engine.block_tokens,
        "settings": first.setup.settings,
        "policy": first.setup.policy.label,
        "decode_policy": first.figures.decode_policy,
        "roles": first.setup.roles,
        "load": cell.load,
        "speed": first.setup.speed,
        "arrivals_per_second": first.arrivals_per_second,
        "seeds": [result.setup.seed for result in cell.results],
        "hit_ratio": spread(lambda result: result.figures.hit_ratio),
        "block_hit_ratio": spread(lambda result: result.figures.block_hit_ratio),
        "imbalance": spread(lambda result: result.figures.imbalance),
        "optimal_assignment_ratio": spread(lambda result: result.figures.optimal_assignment_ratio),
        "goodput_requests_per_second": spread(lambda r: r.figures.goodput.requests_per_second),
        "goodput_tokens_per_second": spread(lambda r: r.figures.goodput.tokens_per_second),
        "goodput_share": spread(lambda result: result.figures.goodput.share),
    }
    if first.figures.programs is not None:
        told["programs"] = {
            each.name: spread(partial(_of_programs, name=each.name)) for each in fields(ProgramFigures)
        }
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
        told[name] = {part: spread(partial(latency, name=name, part=part)) for part in _PARTS}
    return told


def _of_programs(result: Result, name: str) -> float | None:
    programs = result.figures.programs
    return None if programs is None else getattr(programs, name)


def latency(result: Result, name: str, part: str) -> float | None:
    """A figure of a run's latencies, such as ``("ttft_seconds", "p99")``; None if no request has
    it."""
    spread = getattr(result.figures, name)
    return None if spread is None else float(getattr(spread, part))
