"""The figures of a report, drawn with matplotlib.

Each figure is one panel of the width of a phone. A policy has the same color in all figures.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmetric.defaults import DEFAULT_POLICY
from lmetric.file_errors import write_file
from lmetric_lab.sim.max_load import MaxLoad
from lmetric_lab.sim.plots import COLOURS, DASHES, INK, RC, legend
from lmetric_lab.sim.setups import QUANTILES, Result
from lmetric_lab.sim.study import Cell, latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALWAYS = (DEFAULT_POLICY, "vllm")  # in every figure with lines, if they were run
_LEADER_COLOUR = "#c8102e"
_MOST_LINES = 10


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure for a page: an SVG, and a PNG on request."""

    name: str  # for files
    title: str
    caption: str
    svg: bytes
    figure: Figure

    @property
    def data_uri(self) -> str:
        """The SVG for an ``<img>`` of the template, so that its IDs cannot collide with others."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode()

    def png(self) -> bytes:
        """The figure as PNG, with its title."""
        file = io.BytesIO()
        self.figure.suptitle(self.title, x=0.01, horizontalalignment="left", fontsize=12)
        self.figure.savefig(file, format="png", dpi=160)
        return file.getvalue()


def base(cell: Cell) -> str:
    """The policy without its parameters, which has one color."""
    return cell.results[0].setup.choice.base


class Styles:
    """Colors and dashes of policies, in the order of `cells`. Variants of a policy share a
    color."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._known: dict[str, tuple[str, str]] = {DEFAULT_POLICY: (_LEADER_COLOUR, "-")}
        for cell in cells:
            number = len(self._known) - 1
            style = (COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)])
            self._known.setdefault(base(cell), style)

    def colour(self, cell: Cell) -> str:
        """The color of a cell as ``#rrggbb``."""
        return self._known[base(cell)][0]

    def line(self, cell: Cell) -> dict[str, Any]:
        """Arguments of a line. The leader's line is thicker and on top."""
        colour, dash = self._known[base(cell)]
        leads = base(cell) == DEFAULT_POLICY
        width, order = (2.4, 5) if leads else (1.6, 3)
        return {"color": colour, "linestyle": dash, "linewidth": width, "zorder": order}


def shown(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one load for figures with lines.

    These are the best ten policies by mean TTFT, each with its best variant. The default
    policy and vllm are always included.
    """
    ranked = sorted(cells, key=lambda cell: _mean(cell) or float("inf"))
    best: dict[str, Cell] = {}
    for cell in ranked:
        best.setdefault(base(cell), cell)
    chosen = list(dict.fromkeys([*(name for name in _ALWAYS if name in best), *best]))[:_MOST_LINES]
    return [cell for name, cell in best.items() if name in chosen]


def _mean(cell: Cell) -> float | None:
    found = cell.over_seeds(partial(latency, name="ttft_seconds", part="mean"))
    return None if found is None else found[0]


def draw(
    name: str, title: str, caption: str, paint: Callable[[Figure], None], size: tuple[float, float]
) -> Drawing:
    """Create a drawing: `paint` draws on a figure of `size` inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        svg = io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return Drawing(name, title, caption, svg.getvalue(), figure)


def cdf(cells: Sequence[Cell], styles: Styles, name: str, what: str) -> Drawing:
    """The distribution of `name` (a column of `Curves`) at one load, averaged over seeds per
    quantile."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for cell in cells:
            curves = [curve for r in cell.results if (curve := getattr(r.curves, name))]
            if curves:
                values = np.mean(np.array(curves), axis=0)
                axes.plot(np.maximum(values, 1e-4), QUANTILES, label=cell.policy, **styles.line(cell))
        axes.set(xscale="log", xlabel=f"{what}, seconds", ylabel="share of requests", ylim=(0, 1))
        _plain_log(axes.xaxis)
        legend(axes, figure)

    return draw(
        f"cdf_{name.removesuffix('_seconds')}", f"{what}, CDF",
        "Further left is better. Each curve: quantiles averaged over the seeds.", paint, (5.6, 4.4),
    )  # fmt: skip


def against_load(
    by_policy: dict[str, list[Cell]], styles: Styles, name: str, title: str, label: str,
    quantity: Callable[[Result], float | None], *, log: bool,
) -> Drawing:  # fmt: skip
    """A quantity against the offered load. The band is the range over the seeds."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for policy, cells in by_policy.items():
            points = [
                (cell.results[0].arrivals_per_second, *spread)
                for cell in cells
                if (spread := cell.over_seeds(quantity)) is not None
            ]
            if points:
                x, mean, low, high = np.array(sorted(points)).T
                style = styles.line(cells[0])
                axes.plot(x, mean, marker="o", markersize=3.5, label=policy, **style)
                axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
        axes.set(xlabel="offered load, requests/s", ylabel=label)
        if log:
            axes.set_yscale("log")
            _plain_log(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
        legend(axes, figure)

    return draw(
        name, title, "Band: range over the seeds.", paint, (5.6, 4.4),
    )  # fmt: skip


def bars(
    cells: Sequence[Cell], styles: Styles, name: str, title: str, caption: str, label: str,
    quantity: Callable[[Result], float | None], *, most_is_best: bool,
) -> Drawing:  # fmt: skip
    """A quantity of every policy at one load, best first. Whiskers show the range over the
    seeds."""
    known = [(spread, cell) for cell in cells if (spread := cell.over_seeds(quantity)) is not None]
    known.sort(key=lambda pair: pair[0][0], reverse=not most_is_best)

    def paint(figure: Figure) -> None:
        values = [(cell.policy, *spread, styles.colour(cell)) for spread, cell in known]
        _bars(figure, values, label)

    return draw(name, title, caption, paint, (5.6, 0.9 + 0.26 * max(3, len(known))))


def max_loads(loads: Sequence[MaxLoad], colours: dict[str, str]) -> Drawing:
    """The highest arrival rate that each policy sustained."""
    ranked = sorted(loads, key=lambda load: load.arrivals_per_second)

    def paint(figure: Figure) -> None:
        rates = [
            (load.setup.choice.label, *3 * (load.arrivals_per_second,), colours[load.setup.choice.label])
            for load in ranked
        ]
        _bars(figure, rates, "requests/s")

    return draw(
        "max_load", "Highest load sustained", "Bisection of the trace's speed; see the definitions.",
        paint, (5.6, 0.9 + 0.26 * max(3, len(ranked))),
    )  # fmt: skip


def _bars(figure: Figure, values: Sequence[tuple[str, float, float, float, str]], label: str) -> None:
    axes = figure.subplots()
    rows = np.arange(len(values))
    means = np.array([mean for _, mean, *_ in values])
    # Outliers are cut off, so that the other bars stay readable.
    limit = min(1.12 * max(most for _, _, _, most, _ in values), 4 * max(float(np.median(means)), 1e-9))
    axes.barh(rows, means, color=[colour for *_, colour in values], height=0.68, zorder=2)
    reach = np.array([(mean - least, most - mean) for _, mean, least, most, _ in values]).T.clip(0)
    if reach.any():
        axes.errorbar(means, rows, xerr=reach, fmt="none", ecolor=INK, elinewidth=1, capsize=2, zorder=3)
    for row, (_, mean, _, most, _) in enumerate(values):
        axes.annotate(
            f"{mean:.3g}", (min(most, limit), row), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=8.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(rows, [_short(name) for name, *_ in values])
    axes.set(xlabel=label)
    axes.set(xlim=(0, limit or 1), ylim=(-0.7, len(values) - 0.3))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def over_time(cell: Cell, colour: str, part: slice, top: float) -> Drawing | None:
    """Prefill work of two instances in each window of `part`, for one policy.

    Source: LMETRIC, Figures 10 and 27.
    """
    told = next((result for result in cell.results if result.unevenness is not None), None)
    if told is None or told.unevenness is None:
        return None
    view = told.unevenness

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        seconds = (np.arange(len(view.mean)) * view.window_seconds)[part]
        columns = (view.least, view.most, view.mean, view.first, view.second)
        thousands = [np.array(column[part]) / 1e3 for column in columns]
        least, most, mean, first, second = thousands
        axes.fill_between(seconds, least, most, color="#e4e4e4", linewidth=0, label="all instances")
        axes.plot(seconds, mean, color="#707070", linewidth=1, linestyle="--", label="their mean")
        axes.plot(seconds, first, color=colour, linewidth=1.1, label="instance A")
        axes.plot(seconds, second, color=INK, linewidth=1.1, label="instance B")
        axes.set(
            xlabel="seconds from the first measured arrival",
            ylabel=f"thousand prompt tokens\ncomputed in {view.window_seconds:g} s",
            ylim=(0, top / 1e3 * 1.05),
        )
        axes.margins(x=0)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=4, handlelength=1.4, columnspacing=1)

    uneven = told.figures.imbalance
    caption = (
        f"Imbalance {uneven:.2f}. A and B: the instances with the most varied work; seed {told.setup.seed}."
    )
    return draw(f"over_time_{_slug(cell.policy)}", cell.policy, caption, paint, (5.6, 3.1))


def sweep(
    knob: str, cells: Sequence[Cell], leader: Cell | None, styles: Styles
) -> Drawing:  # fmt: skip
    """TTFT, TPOT and hit rate against one parameter of a policy, with `leader` as a horizontal
    line."""
    name = base(cells[0])
    others = [f"{k}={v:g}" for k, v in cells[0].results[0].setup.choice.knobs.items() if k != knob]
    rows: list[tuple[str, Callable[[Result], float | None]]] = [
        ("mean TTFT, s", partial(latency, name="ttft_seconds", part="mean")),
        ("mean TPOT, s", partial(latency, name="tpot_seconds", part="mean")),
        ("hit rate", lambda result: result.figures.hit_ratio),
    ]
    ordered = sorted(cells, key=lambda cell: cell.results[0].setup.choice.knobs[knob])

    def paint(figure: Figure) -> None:
        panels = figure.subplots(3, 1, sharex=True)
        for axes, (label, quantity) in zip(panels, rows, strict=True):
            points = [
                (cell.results[0].setup.choice.knobs[knob], *spread)
                for cell in ordered
                if (spread := cell.over_seeds(quantity)) is not None
            ]
            if points:
                x, mean, low, high = np.array(points).T
                colour = styles.colour(cells[0])
                axes.plot(x, mean, marker="o", markersize=4, color=colour, label=name)
                axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            if leader is not None and (spread := leader.over_seeds(quantity)) is not None:
                axes.axhline(
                    spread[0], color=_LEADER_COLOUR, linestyle="--", linewidth=1.4, label=leader.policy
                )
            axes.set(ylabel=label)
            axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
        panels[-1].set(xlabel=knob)
        legend(panels[0], figure)

    return draw(
        _slug("_".join(("sweep", name, knob, *others))), ", ".join((f"{name}: {knob}", *others)),
        "Band: range over the seeds.", paint, (5.6, 5.6),
    )  # fmt: skip


def sweeps(cells: Sequence[Cell]) -> Iterator[tuple[str, list[Cell]]]:
    """The parameters with several values among the cells of one load, with equal other
    parameters."""
    families: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        policy = cell.results[0].setup.choice
        for knob in policy.knobs:
            others = tuple(sorted((name, value) for name, value in policy.knobs.items() if name != knob))
            families.setdefault((base(cell), knob, others), []).append(cell)
    for (_, knob, _), family in families.items():
        if len(family) > 1:
            yield knob, family


def save_pngs(drawings: Sequence[tuple[str, Drawing]], directory: Path) -> None:
    """Each drawing as ``PREFIX-NAME.png`` (no prefix: ``NAME.png``)."""
    directory.mkdir(parents=True, exist_ok=True)
    for prefix, drawing in drawings:
        write_file(directory / f"{prefix}-{drawing.name}.png".removeprefix("-"), drawing.png())


def _plain_log(axis: Any) -> None:
    """Sets ticks such as 0.1, 1, 10 instead of powers, with 2 and 5 between them on short
    ranges."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = np.log10(max(high, 1e-9) / max(low, 1e-9))
    steps = (
        (1.0,) if decades > 3 else (1.0, 2.0, 5.0) if decades > 0.9 else (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    )
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _short(label: str) -> str:
    return label if len(label) <= 32 else f"{label[:18]}…{label[-13:]}"


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)[:40].strip("_")
