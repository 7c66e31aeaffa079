"""The result of a simulated run: its columns, with summaries and displays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from lmetric.extras import install
from lmetric_lab.sim.columns import Columns
from lmetric_lab.sim.programs import PROGRAM_SHARE
from lmetric_lab.sim.summary import RunFigures, Slo, figures, optimal_assignment_ratio

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# Arrays of a run that do not have one entry per request.
_NOT_PER_REQUEST = ("gap_edges_seconds", "gap_counts")


@dataclass(frozen=True, slots=True, repr=False)
class Run(Columns):
    """The result of a run: columns with one entry per request in trace order, times on the trace's
    clock."""

    @property
    def optimal_assignment_ratio(self) -> float | None:
        """The share of KV transfers to the instance with the fewest context tokens at the end of
        prefill.

        Ties count. None: no transfer. Source: SIBYL, Table 1.
        """
        return optimal_assignment_ratio(self.handoff_least_loaded)

    def summary(
        self,
        *,
        slo_ttft_seconds: float | None = None,
        slo_tpot_seconds: float | None = None,
        share: tuple[float, float] = (0.0, 1.0),
        program_share: tuple[float, float] = PROGRAM_SHARE,
    ) -> RunFigures:
        """Latency percentiles, hit rates, rates, goodput and load imbalance of the run, and the
        figures of programs if a program has several requests.

        Args:
            slo_ttft_seconds: maximum TTFT of answers that count as goodput; None: no bound.
            slo_tpot_seconds: maximum TPOT of answers that count as goodput; None: no bound.
            share: the requests to summarize, as fractions in order of arrival: ``(0.1, 0.9)``
                excludes the first and the last tenth.
            program_share: the programs to summarize, as fractions in order of arrival; default:
                without the first tenth.
        """
        return figures(self, Slo(slo_ttft_seconds, slo_tpot_seconds), share, program_share)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with one row per request, in trace order.

        It has every column of the run, and ``ttft_seconds``, ``tpot_seconds`` and ``e2e_seconds``.
        Seconds are on the simulated clock.

        Raises:
            ImportError: pandas is not installed; the extra ``pandas`` installs it.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError(
                f"Run.to_pandas needs pandas, which is not installed; run: {install('pandas')}"
            ) from None
        columns = {
            each.name: column
            for each in fields(self)
            if each.name not in _NOT_PER_REQUEST
            and isinstance(column := getattr(self, each.name), np.ndarray)
        }
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
            columns[name] = getattr(self, name)
        return pandas.DataFrame(columns)

    def plot(self) -> Figure:
        """The distributions of TTFT and TPOT. `Comparison.plot` draws several runs.

        Raises:
            LmetricError: matplotlib is not installed; the extra ``studies`` installs it.
        """
        from lmetric_lab.sim.plots import plot_runs

        return plot_runs([self])

    def _rows(self) -> list[tuple[str, str]]:
        shown = self.summary()
        rows = [("requests", f"{shown.requests:,}" + (f", {shown.failed:,} failed" if shown.failed else ""))]
        for name, spread in (
            ("TTFT", shown.ttft_seconds), ("TPOT", shown.tpot_seconds), ("end to end", shown.e2e_seconds)
        ):  # fmt: skip
            if spread is not None:
                rows.append((name, f"mean {spread.mean:.3g} s, p99 {spread.p99:.3g} s"))
        if shown.hit_ratio is not None:
            rows.append(("cached prompt tokens", f"{shown.hit_ratio:.1%}"))
        rows.append(("throughput", f"{shown.requests_per_second:.3g} requests/s"))
        if (programs := shown.programs) is not None and programs.busy_mean_seconds is not None:
            for name, mean, p95 in (
                ("program busy", programs.busy_mean_seconds, programs.busy_p95_seconds),
                ("user turn busy", programs.user_turn_busy_mean_seconds, programs.user_turn_busy_p95_seconds),
            ):
                if mean is not None:
                    rows.append((name, f"mean {mean:.4g} s, p95 {p95:.4g} s"))
            rows.append(("stretch", f"mean {programs.stretch_mean:.3g}"))
            rows.append(("recomputed tokens", f"{programs.recomputed_share:.1%}"))
            rows.append(("longest hold", f"{programs.max_hold_seconds:.3g} s"))
        return rows

    def __repr__(self) -> str:
        rows = "; ".join(f"{name} {value}" for name, value in self._rows())
        return f"Run(policy={self.policy!r}, instances={self.instances}, seed={self.seed}; {rows})"

    def _repr_html_(self) -> str:
        rows = [("policy", self.policy), ("instances", str(self.instances)), *self._rows()]
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        return f"<table>{''.join(cells)}</table>"
