"""The style of all figures, and the plot of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmetric._core import LmetricError
from lmetric.extras import install
from lmetric_lab.sim.columns import Columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    "#0072b2", "#e08e00", "#009e73", "#7b3fa0", "#56b4e9", "#8c564b", "#d16ba5", "#7d8b00", "#5c5cd6",
)  # fmt: skip
DASHES = ("-", "--", ":", "-.")
INK, GRID = "#1a1a1a", "#d9d9d9"
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#808080",
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "svg.hashsalt": "lmetric",
    "figure.facecolor": "white",
    "axes.formatter.useoffset": False,
}


def require_matplotlib() -> None:
    """Raises `LmetricError` if matplotlib is missing, before long runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LmetricError(f"reports need matplotlib, which is not installed: {install('studies')}") from None


def plot_runs(runs: Sequence[Columns]) -> Figure:
    """The distributions of TTFT and TPOT of runs, side by side. Raises LmetricError."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        for axes, name in zip(figure.subplots(1, 2), ("ttft_seconds", "tpot_seconds"), strict=True):
            for place, run in enumerate(runs):
                values = np.sort(getattr(run, name)[np.isfinite(getattr(run, name))])
                style = DASHES[place // len(COLOURS) % len(DASHES)]
                axes.plot(
                    np.maximum(values, 1e-4),
                    np.arange(1, len(values) + 1) / max(len(values), 1),
                    label=run.policy,
                    color=COLOURS[place % len(COLOURS)],
                    linestyle=style,
                )
            axes.set(title=name[:4].upper(), xscale="log", xlabel="seconds", ylabel="share of the requests")
        legend(axes, figure)
    return figure


def legend(axes: Axes, figure: Figure) -> None:
    """Adds the legend of a figure below it."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max((len(label) for label in labels), default=0)
    figure.legend(
        handles, labels, loc="outside lower left", ncols=1 if longest > 34 else 2 if longest > 16 else 3,
        handlelength=1.8, columnspacing=1.2,
    )  # fmt: skip
