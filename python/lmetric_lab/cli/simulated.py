"""Prints and writes the results of ``simulate``: tables, the verdict and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmetric_lab.sim.setups import Result
    from lmetric_lab.sim.study import Cell


def write_results(results: list[Result], path: Path | None) -> None:
    """Writes the results as JSON; None: to stdout."""
    from dataclasses import asdict
    from importlib.metadata import version

    from lmetric.cli.show import print_json, write_json

    setup = asdict(results[0].setup)
    for name in ("policy", "decode_policy", "seed", "fraction_of_max"):
        del setup[name]
    for name in ("local_order", "split", "rebalance"):
        setup["settings"].pop(name, None)  # differs between runs
    told = {
        "version": version("lmetric-router"),
        "setting": setup,
        "runs": [asdict(result.figures) for result in results],
    }
    if path is None:
        print_json(told)
    else:
        write_json(path, told)


def print_results(results: list[Result]) -> None:
    """Prints the tables of all figures."""
    from lmetric.cli.show import print_text
    from lmetric_lab.sim.study import cells

    first = results[0]
    wall = sum(result.figures.wall_seconds for result in results)
    seeds = 1 + max(result.setup.seed for result in results)
    spread = f"mean over {seeds} seeds ± half their range; " if seeds > 1 else ""
    print_text(
        f"{first.figures.requests} requests measured, {first.arrivals_per_second:.2f} requests/s, "
        f"{first.setup.roles or first.setup.instances} instances of {first.setup.profile}; {spread}"
        f"{len(results)} runs in {wall:.2f} s of run time"
    )
    print_tables(cells(results))


def print_tables(cells: list[Cell]) -> None:
    """Prints the figures of one load, one table per kind."""
    from lmetric.cli.show import print_table
    from lmetric_lab.sim.table import rows, table_of

    slo = str(cells[0].results[0].setup.slo)
    table = table_of(result for cell in cells for result in cell.results)
    if not slo:
        table = tuple((head, columns) for head, columns in table if head != "goodput")
    values = rows(cells, table)
    labels = _labels(cells)
    position = 0
    merged = []
    for head, columns in table:
        part = [row[position : position + len(columns)] for row in values]
        position += len(columns)
        if len(columns) > 3:
            body = [[label, *_cells(row)] for label, row in zip(labels, part, strict=True)]
            print_table([head, *(column.title for column in columns)], body, spare=("p99.9",))
        else:
            merged.append((head, columns, part))
    titles = [f"{head} {column.title}" for head, columns, _ in merged for column in columns]
    body = [
        [label, *(text for _, _, part in merged for text in _cells(part[index]))]
        for index, label in enumerate(labels)
    ]
    print_table([f"goodput: {slo}" if slo else "", *titles], body)


def verdict(results: list[Result]) -> str:
    """The comparison of the policies in a sentence."""
    from functools import partial

    from lmetric_lab.cli.verdict import Entry, sentence
    from lmetric_lab.sim.ranking import measured_of
    from lmetric_lab.sim.study import cells, latency

    found = cells(results)
    return sentence(
        [
            Entry(
                label,
                cell.over_seeds(partial(latency, name="ttft_seconds", part="mean")),
                cell.over_seeds(partial(latency, name="tpot_seconds", part="mean")),
                requests=sum(result.figures.requests for result in cell.results),
                unfinished=measured.unfinished,
                seeds=len(cell.results),
                first_token_share=measured.first_token_share,
            )
            for label, cell, measured in zip(_labels(found), found, map(measured_of, found), strict=True)
        ]
    )


def _labels(cells: list[Cell]) -> list[str]:
    """The policy of each cell, with the settings that differ between the cells."""
    firsts = [cell.results[0] for cell in cells]
    columns = [
        [_way(each, figure, setting) for each in firsts]
        for figure, setting in (("local_order", ""), ("split", "split"), ("rebalance", "rebalance"))
    ]
    shown = [names for names in columns if len(set(names)) > 1]
    return [", ".join([cell.policy, *each]) for cell, *each in zip(cells, *shown, strict=True)]


def _way(result: Result, figure: str, setting: str) -> str:
    """The local order, split or rebalance of a result, with its settings."""
    from lmetric.option_values import shown

    given = result.setup.settings.get(setting)
    return shown(given) if isinstance(given, Mapping) else str(getattr(result.figures, figure))


def _cells(row: list[Any]) -> list[str]:
    return ["–" if value is None else str(value) for value in row]
