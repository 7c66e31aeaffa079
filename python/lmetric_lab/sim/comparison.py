"""Compares policies on one trace, for notebooks and the Python prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmetric._core import BadValueError
from lmetric.policies import PolicyLike
from lmetric_lab.sim.fleet import resolve_fleet
from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.ranking import Measured, rank
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.scenario import Scenario, check_names
from lmetric_lab.sim.summary import arrival_span
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.workload import Workload, prepare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEADS = ("policy", "TTFT mean, s", "TTFT p99, s", "TPOT mean, ms", "hits, %", "latency")


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """The runs of several policies on one trace, best first.

    Attributes:
        runs: the result of each policy, in the order of `latency`.
        latency: for each run, the geometric mean of its mean TTFT and mean TPOT, each relative to
            the lowest of all. None: the run has neither.
    """

    runs: tuple[Run, ...]
    latency: tuple[float | None, ...]

    @property
    def best(self) -> Run:
        """The run of the best policy."""
        return self.runs[0]

    def __getitem__(self, policy: str) -> Run:
        """The run of a policy, by the name that the table shows. Raises KeyError."""
        for run in self.runs:
            if run.policy == policy:
                return run
        raise KeyError(f"{policy!r}; compared: {', '.join(run.policy for run in self.runs)}")

    def plot(self) -> Figure:
        """The distributions of TTFT and TPOT, one line for each policy.

        Raises:
            LmetricError: matplotlib is not installed; the extra ``studies`` installs it.
        """
        from lmetric_lab.sim.plots import plot_runs

        return plot_runs(self.runs)

    def _rows(self) -> list[list[str]]:
        rows = []
        for run, latency in zip(self.runs, self.latency, strict=True):
            shown = run.summary()
            ttft, tpot = shown.ttft_seconds, shown.tpot_seconds
            rows.append(
                [
                    run.policy,
                    f"{ttft.mean:.3f}" if ttft else "–",
                    f"{ttft.p99:.3f}" if ttft else "–",
                    f"{tpot.mean * 1e3:.1f}" if tpot else "–",
                    "–" if shown.hit_ratio is None else f"{shown.hit_ratio:.1%}"[:-1],
                    "–" if latency is None else f"{latency:.2f}",
                ]
            )
        return rows

    def __repr__(self) -> str:
        rows = [list(_HEADS), *self._rows()]
        widths = [max(len(row[index]) for row in rows) for index in range(len(_HEADS))]
        lines = (
            f"{row[0]:<{widths[0]}}  "
            + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            for row in rows
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in _HEADS)
        rows = (
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self._rows()
        )
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def compare(
    policies: Iterable[PolicyLike],
    trace: str | Path | Trace | Workload = "slice",
    scenario: Scenario | None = None,
    **fields: Any,
) -> Comparison:
    """Simulate several policies on the same trace, and rank them.

    Args:
        policies: names, expressions, `Policy` objects or functions.
        trace: as for `simulate`; default: the trace in the package.
        scenario: all other settings; None: the defaults.
        `fields`: fields of `Scenario` by name, which replace those of `scenario`.

    Raises:
        BadValueError: no policy, or one text instead of a list.
        TypeError: a name that is no field of `Scenario`.
        LmetricError, ProfileError, TraceError, FileNotFoundError: as for `simulate`.
    """
    if isinstance(policies, str):
        raise BadValueError(f"policies = {policies!r}: expected a list, such as [{policies!r}, 'vllm']")
    chosen: Sequence[PolicyLike] = list(policies)
    if not chosen:
        raise BadValueError("policies = []: expected at least one policy, such as 'lmetric'")
    check_names(fields, "compare")
    base = (scenario or Scenario()).replace(**fields)
    if not isinstance(trace, Workload):
        trace = load_trace(trace) if isinstance(trace, str | Path) else trace
        count = base.instances if base.roles is None else Roles.of(base.roles).instances
        trace = prepare(trace, resolve_fleet(base.profile, count)[0])
    runs = [simulate(trace, base.replace(policy=policy)) for policy in chosen]
    standings = rank(runs, _measured)
    return Comparison(
        tuple(standing.policy for standing in standings), tuple(standing.latency for standing in standings)
    )


def _measured(run: Run) -> Measured:
    shown = run.summary()
    ttft, tpot = shown.ttft_seconds, shown.tpot_seconds
    _, last = arrival_span(np.sort(run.arrival_seconds))
    return Measured(
        None if ttft is None else ttft.mean,
        None if tpot is None else tpot.mean,
        unfinished=shown.failed,
        first_token_share=float(np.mean(run.first_token_seconds <= last)),
    )
