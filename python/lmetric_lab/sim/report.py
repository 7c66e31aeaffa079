"""Renders a study or simulated runs as a single HTML page, with figures and style included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files

from lmetric.defaults import DEFAULT_POLICY
from lmetric.profiles import Profile
from lmetric_lab.sim import figures
from lmetric_lab.sim.figures import Drawing, Styles, shown
from lmetric_lab.sim.max_load import MaxLoad
from lmetric_lab.sim.ranking import KEEP_UP, Measured, equal, ranking
from lmetric_lab.sim.setups import Result
from lmetric_lab.sim.study import Cell, cells, latency
from lmetric_lab.sim.summary import WINDOW_SECONDS
from lmetric_lab.sim.table import TABLE, Table, Value, rows, table_of

_BEST = 10  # policies of the first table, and rows of a load's table that show at once
_BURST_SECONDS = 400.0  # as in the paper's Figures 10 and 27


@dataclass(frozen=True, slots=True)
class Row:
    policy: str
    colour: str
    values: list[Value | None]


@dataclass(frozen=True, slots=True)
class Load:
    """The table of one load."""

    title: str
    arrivals_per_second: float
    speed: float
    focus: bool
    rows: list[Row]  # best first


@dataclass(frozen=True, slots=True)
class Best:
    """One of the best policies: its place, and the values of `_WHOLE`."""

    place: int
    policy: str
    colour: str
    values: list[str]
    note: str  # why it comes last, if it does


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best policy by a figure, and the position of `DEFAULT_POLICY`."""

    figure: str
    best: str
    best_value: str
    leader_value: str
    place: int
    of: int
    behind: str  # distance of the leader to the best, or to the second best if it leads


@dataclass(frozen=True, slots=True)
class Section:
    """One trace on one fleet with one setting."""

    anchor: str
    title: str
    subtitle: str
    focus: str
    loads: list[Load]
    of: int  # policies at this load
    best: list[Best]
    equal: list[list[str]]
    verdicts: list[Verdict]
    cdfs: list[Drawing]
    latencies: list[Drawing]
    hits: list[Drawing]
    imbalance: list[Drawing]
    over_time: list[Drawing]
    sweeps: list[Drawing]
    sustained: list[str]
    max_loads: list[Drawing]
    chosen_lines: str


@dataclass(frozen=True, slots=True)
class Report:
    """A page and its figures."""

    html: str
    drawings: list[tuple[str, Drawing]]  # anchor (if several sections) and figure


def build(
    results: Sequence[Result], *, title: str, command: str, max_loads: Sequence[MaxLoad] = ()
) -> Report:
    """The report of `results` (at least one). The page shows `command`."""
    from jinja2 import Environment, StrictUndefined

    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells(results):
        groups.setdefault(cell.group, []).append(cell)
    closely = [cell for members in groups.values() for cell in shown(_at(members, _focus(members)))]
    styles = Styles([*closely, *(cell for members in groups.values() for cell in members)])
    table = table_of(results)
    sections = [
        _section(
            index, group, members, styles, table, [load for load in max_loads if load.setup.group == group]
        )
        for index, (group, members) in enumerate(groups.items(), start=1)
    ]
    setups = [result.setup for result in results]
    profiles: dict[str, Profile] = {
        ", ".join(filter(None, setup.group[2:4])): setup.engine for setup in setups
    }
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters["breakable"] = lambda text: re.sub("([_(])", "\\1\u200b", text)  # line break
    template = files("lmetric_lab.sim").joinpath("report.html.j2").read_text(encoding="utf-8")
    html = page.from_string(template).render(
        title=title,
        command=command,
        version=version("lmetric-router"),
        table=table,
        sections=sections,
        profiles=profiles,
        traces={setup.trace.label: setup.trace for setup in setups},
        seeds=sorted({setup.seed for setup in setups}),
        runs=len(results),
        requests=sorted({result.figures.requests for result in results}),
        measure=setups[0].measure,
        slo=str(setups[0].slo),
        rule=max_loads[0].rule if max_loads else None,
        leader=DEFAULT_POLICY,
        most=_BEST,
        whole=[title for title, _ in _WHOLE],
        keep_up=KEEP_UP,
        window=WINDOW_SECONDS,
        burst=_BURST_SECONDS,
        wall=sum(result.figures.wall_seconds for result in results),
        failed=sum(result.figures.failed for result in results),
    )
    several = len(sections) > 1
    drawings = [
        (section.anchor if several else "", drawing)
        for section in sections
        for drawing in (
            *section.cdfs, *section.latencies, *section.hits, *section.imbalance, *section.over_time,
            *section.sweeps, *section.max_loads,
        )
    ]  # fmt: skip
    return Report(html, drawings)


def _section(
    index: int, group: tuple[str, ...], members: list[Cell], styles: Styles, table: Table,
    max_loads: list[MaxLoad],
) -> Section:  # fmt: skip
    loads = list(dict.fromkeys(cell.load for cell in members))
    focus = _focus(members)
    here = _at(members, focus)
    lines = shown(here)
    policies = {cell.policy: [c for c in members if c.policy == cell.policy] for cell in lines}
    rivals = len({figures.base(cell) for cell in here})
    chosen = ""
    if len(lines) < len(here):
        chosen = "Lines: of each policy the variant with the lowest mean TTFT at this load"
        chosen += (
            f"; of the {rivals} policies {DEFAULT_POLICY}, vllm and the best others."
            if rivals > len(lines)
            else "."
        )
    return Section(
        anchor=f"s{index}",
        title=group[0],
        subtitle=", ".join(filter(None, group[1:])),
        focus=focus,
        loads=[
            Load(
                load,
                each[0].results[0].arrivals_per_second,
                each[0].results[0].setup.speed,
                load == focus,
                _rows(each, styles, table),
            )
            for load in loads
            if (each := _at(members, load))
        ],
        of=len(here),
        best=_best(here, styles),
        equal=equal(here),
        verdicts=_verdicts(here),
        cdfs=[
            figures.cdf(lines, styles, "ttft_seconds", "TTFT"),
            figures.cdf(lines, styles, "tpot_seconds", "TPOT"),
        ],
        latencies=_against_load(policies, styles) if len(loads) > 1 else [],
        hits=_hits(here, policies, styles, several=len(loads) > 1),
        imbalance=[
            figures.bars(
                here,
                styles,
                "imbalance",
                "Imbalance",
                "Lower is more even; see the definitions.",
                f"imbalance of prefill work in windows of {WINDOW_SECONDS:g} s",
                _uneven,
                most_is_best=False,
            )
        ],
        over_time=_over_time(here, lines, styles),
        sweeps=[figures.sweep(knob, family, _leader(here), styles) for knob, family in figures.sweeps(here)],
        sustained=[
            f"{load.setup.choice.label} sustains {load.arrivals_per_second:.3g} requests/s "
            f"(speed {load.speed:.3g})"
            for load in max_loads[:1]
        ],
        max_loads=_max_loads(max_loads, here, styles),
        chosen_lines=chosen,
    )


def _focus(members: list[Cell]) -> str:
    """The load for detailed figures: half of the maximum (as in the paper) if it was run, else the
    middle one."""
    firsts = {cell.load: cell.results[0] for cell in members}
    for load, first in firsts.items():
        if first.setup.fraction_of_max == 0.5:
            return load
    return sorted(firsts, key=lambda load: firsts[load].arrivals_per_second)[len(firsts) // 2]


def _at(members: list[Cell], load: str) -> list[Cell]:
    return [cell for cell in members if cell.load == load]


def _leader(members: list[Cell]) -> Cell | None:
    return next((cell for cell in members if cell.policy == DEFAULT_POLICY), None)


# The columns of the table of whole policies, from `TABLE`.
_WHOLE = (
    ("mean TTFT, s", TABLE[0][1][0]),
    ("P99 TTFT, s", TABLE[0][1][3]),
    ("mean TPOT, ms", TABLE[1][1][0]),
    ("P99 TPOT, ms", TABLE[1][1][3]),
    ("hits, %", TABLE[2][1][0]),
)


def _best(members: list[Cell], styles: Styles) -> list[Best]:
    """The best whole policies, and `DEFAULT_POLICY` if it is not among them."""
    placed = list(enumerate(ranking(members), start=1))
    kept = [each for each in placed if each[0] <= _BEST or each[1].policy.policy == DEFAULT_POLICY]
    return [
        Best(
            place,
            standing.policy.policy,
            styles.colour(standing.policy),
            [
                "–" if standing.latency is None else f"{standing.latency:.2f}",
                *(
                    "–"
                    if (found := standing.policy.over_seeds(column.of)) is None
                    else column.shows(found[0])
                    for _, column in _WHOLE
                ),
            ],
            _note(standing.measured),
        )
        for place, standing in kept
    ]


def _note(measured: Measured) -> str:
    if measured.unfinished:
        return f"{measured.unfinished:,} unfinished"
    return "" if measured.keeps_up else "cannot keep up"


def _rows(members: list[Cell], styles: Styles, table: Table) -> list[Row]:
    members = [standing.policy for standing in ranking(members)]
    made = zip(members, rows(members, table), strict=True)
    return [Row(cell.policy, styles.colour(cell), values) for cell, values in made]


def _verdicts(members: list[Cell]) -> list[Verdict]:
    leader = _leader(members)
    if leader is None or len(members) < 2:
        return []
    verdicts = []
    for head, below in TABLE:
        for column in below:
            ranked = sorted(
                (
                    (found[0] * -column.better, found[0], cell)
                    for cell in members
                    if (found := cell.over_seeds(column.of)) is not None
                ),
                key=lambda entry: entry[0],
            )
            own = leader.over_seeds(column.of)
            if not ranked or own is None or column.title in ("p50", "p90", "p99.9", "share, %"):
                continue
            place = 1 + sum(key < own[0] * -column.better for key, *_ in ranked)
            against = ranked[1][1] if place == 1 and len(ranked) > 1 else ranked[0][1]
            verdicts.append(
                Verdict(
                    figure=f"{head.partition(',')[0]} {column.title}",
                    best=ranked[0][2].policy,
                    best_value=column.shows(ranked[0][1]),
                    leader_value=column.shows(own[0]),
                    place=place,
                    of=len(ranked),
                    behind=f"{own[0] / against - 1:+.1%}" if against else "",
                )
            )
    return verdicts


def _against_load(policies: dict[str, list[Cell]], styles: Styles) -> list[Drawing]:
    drawings = []
    for name, short in (("ttft_seconds", "TTFT"), ("tpot_seconds", "TPOT")):
        for part in ("mean", "p99"):
            drawings.append(
                figures.against_load(
                    policies, styles, f"load_{short.lower()}_{part}", f"{part} {short} against load",
                    f"{part} {short}, seconds", partial(latency, name=name, part=part), log=True,
                )
            )  # fmt: skip
    return drawings


def _hits(
    here: list[Cell], policies: dict[str, list[Cell]], styles: Styles, *, several: bool
) -> list[Drawing]:
    def quantity(result: Result) -> float | None:
        return result.figures.hit_ratio

    drawings = [
        figures.bars(
            here, styles, "hits", "Hit rate", "Prompt tokens found cached, of all prompt tokens.",
            "hit rate (tokens)", quantity, most_is_best=True,
        )
    ]  # fmt: skip
    if several:
        drawings.append(
            figures.against_load(
                policies, styles, "load_hits", "Hit rate against load", "hit rate (tokens)", quantity,
                log=False,
            )
        )  # fmt: skip
    return drawings


def _uneven(result: Result) -> float | None:
    return result.figures.imbalance


def _over_time(here: list[Cell], lines: list[Cell], styles: Styles) -> list[Drawing]:
    """Figures over time of the leader, vllm, the fastest other policy and the most uneven
    policy."""
    ranked = sorted(lines, key=lambda cell: (cell.over_seeds(_uneven) or (0.0,))[0])
    vllm = next((cell for cell in lines if cell.policy == "vllm"), None)
    rival = next((cell for cell in lines if cell.policy not in (DEFAULT_POLICY, "vllm")), None)
    several = (_leader(here), vllm, rival, ranked[-1])
    chosen = list({cell.policy: cell for cell in several if cell is not None}.values())
    views = [r.unevenness for cell in chosen for r in cell.results if r.unevenness is not None]
    burst = _burst([view.mean for view in views])
    top = max((max(view.most[burst], default=0.0) for view in views), default=1.0) or 1.0
    drawn = (figures.over_time(cell, styles.colour(cell), burst, top) for cell in chosen)
    return [drawing for drawing in drawn if drawing is not None]


def _burst(means: list[list[float]]) -> slice:
    """The busiest `_BURST_SECONDS` of the run, in windows."""
    length = round(_BURST_SECONDS / WINDOW_SECONDS)
    windows = min((len(mean) for mean in means), default=0)
    work = [sum(mean[index] for mean in means) for index in range(windows)]
    begin = max(range(max(1, windows - length + 1)), key=lambda at: sum(work[at : at + length]))
    return slice(begin, begin + length)


def _max_loads(loads: list[MaxLoad], here: list[Cell], styles: Styles) -> list[Drawing]:
    colours = {cell.policy: styles.colour(cell) for cell in here}
    for load in loads:
        colours.setdefault(load.setup.choice.label, "#808080")
    return [figures.max_loads(loads, colours)] if len(loads) > 1 else []
