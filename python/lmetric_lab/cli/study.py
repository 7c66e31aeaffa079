"""``lmetric-router study``: a grid of simulations from a YAML file, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmetric.cli.help import BASIC, RESULTS
from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.cli.options import AllowCode

if TYPE_CHECKING:
    from lmetric_lab.sim.backends import Backend
    from lmetric_lab.sim.store import Store
    from lmetric_lab.sim.study import Cell, Outcome
    from lmetric_lab.sim.study_file import Study

_EXECUTION = "Execution"
_RANKED = 10  # policies of the printed ranking; the default policy is always in it
BackendName = StrEnum("BackendName", {"threads": "threads", "ray": "ray"})


def command(
    file: Annotated[
        Path | None,
        typer.Argument(help="Study file (YAML), e.g. examples/study.yaml; optional with --policy."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Replace the policies of the file: names, scores, mine.py:score; repeatable.",
            show_default="as in FILE",
            rich_help_panel=BASIC,
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Policies to compare with --policy, or all; repeatable.",
            show_default="none",
            rich_help_panel=BASIC,
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Replace the traces of the file; repeatable.",
            show_default="as in FILE",
            rich_help_panel=BASIC,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for results.",
            show_default="NAME-results, from FILE's name",
            rich_help_panel=BASIC,
        ),
    ] = None,
    allow_code: AllowCode = False,
    backend: Annotated[
        BackendName,
        typer.Option(help="Run on this machine's cores, or on a Ray cluster.", rich_help_panel=_EXECUTION),
    ] = BackendName.threads,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of the Ray cluster.",
            show_default="start one here",
            rich_help_panel=_EXECUTION,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Concurrent runs.", show_default="number of cores", rich_help_panel=_EXECUTION
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report/--no-report", help="Write report.html (needs matplotlib).", rich_help_panel=RESULTS
        ),
    ] = True,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also write the figures as PNG files.", rich_help_panel=RESULTS)
    ] = False,
    parquet: Annotated[
        bool,
        typer.Option("--parquet", help="Also write runs.parquet (needs pyarrow).", rich_help_panel=RESULTS),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON.", rich_help_panel=BASIC)
    ] = False,
) -> None:
    """Run a grid of simulations from a file, and write a report.

    The grid has all combinations of policies, parameters, loads, seeds, traces and fleets.
    DIR gets the results: runs.jsonl (one line per finished run), summary.json, runs.csv and
    report.html. If you repeat the command, it runs only missing combinations. That helps after
    Ctrl-C (exit code 130) or a change of the file.
    """
    from lmetric.cli.show import note, print_json, write_json
    from lmetric_lab.cli.results import warn_unscored, write_report
    from lmetric_lab.sim.setups import split_policies
    from lmetric_lab.sim.store import Store, require_pyarrow, write_csv, write_parquet
    from lmetric_lab.sim.study import summary
    from lmetric_lab.sim.study_file import load_study

    if file is None and not policy:
        raise typer.BadParameter("missing study file; pass FILE or --policy", param_hint="FILE")
    if against and not policy:
        raise typer.BadParameter("needs --policy", param_hint="--against")
    if report or figures:
        from lmetric_lab.sim.plots import require_matplotlib

        require_matplotlib()
    if parquet:
        require_pyarrow()
    policies = list(dict.fromkeys(split_policies([*(policy or []), *(against or [])])))
    study = load_study(file, trace, policies, allow_code=allow_code)
    directory = out if out is not None else Path(f"{file.stem if file else 'comparison'}-results")
    directory.mkdir(parents=True, exist_ok=True)
    with Store(directory / "runs.jsonl") as store:
        where = _backend(backend, ray_address, jobs)
        try:
            outcome = _run(study, store, where)
        except KeyboardInterrupt:
            note(f"interrupted; kept {len(store.runs)} runs in {store.path}; repeat the command to continue")
            raise
        finally:
            where.close()
        warn_unscored(outcome.results)
        told = summary(outcome)
        write_json(directory / "summary.json", told)
        write_csv(directory / "runs.csv", outcome.results)
        if parquet:
            write_parquet(directory / "runs.parquet", outcome.results)
        if report or figures:
            write_report(
                outcome.results,
                outcome.name,
                directory / "report.html" if report else None,
                directory / "figures" if figures else None,
                max_loads=outcome.max_loads,
            )
    if as_json:
        print_json(told)
    else:
        _print(outcome)
    note(f"{len(outcome.results)} runs ({outcome.reused} reused); results are in {directory}")


def _backend(name: BackendName, address: str | None, jobs: int | None) -> Backend:
    from lmetric_lab.sim.backends import Ray, Threads

    if name is BackendName.threads and address is not None:
        raise typer.BadParameter("needs --backend ray", param_hint="--ray-address")
    return Threads(jobs) if name is BackendName.threads else Ray(address, jobs)


def _run(study: Study, store: Store, backend: Backend) -> Outcome:
    from lmetric.cli.show import progress
    from lmetric_lab.sim.study import Progress, run_study

    with progress("study") as shown:
        bars = {}

        def tell(state: Progress) -> None:
            if state.stage not in bars:
                bars[state.stage] = shown.add_task(state.stage, total=state.total)
            shown.update(bars[state.stage], completed=state.done, total=state.total)

        return run_study(study, store, backend, tell)


def _print(outcome: Outcome) -> None:
    """Prints mean TTFT and TPOT by policy and load, then the ranking; the files have the other
    figures."""
    from functools import partial

    from lmetric.cli.show import print_table, print_text
    from lmetric_lab.sim.study import cells, latency

    for load in outcome.max_loads:
        print_text(
            f"{', '.join(filter(None, load.setup.group))}: {load.setup.choice.label} sustains "
            f"{load.arrivals_per_second:.2f} requests/s (speed {load.speed:.3g})"
        )
    found = cells(outcome.results)
    for group in dict.fromkeys(cell.group for cell in found):
        members = [cell for cell in found if cell.group == group]
        loads = list(dict.fromkeys(cell.load for cell in members))
        by_place = {(cell.policy, cell.load): cell for cell in members}
        for name, unit, scale, digits in (("ttft_seconds", "s", 1, 3), ("tpot_seconds", "ms", 1e3, 1)):
            rows = []
            for policy in dict.fromkeys(cell.policy for cell in members):
                spreads = [
                    by_place[policy, load].over_seeds(partial(latency, name=name, part="mean"))
                    for load in loads
                ]
                rows.append([policy, *("–" if s is None else f"{s[0] * scale:.{digits}f}" for s in spreads)])
            title = f"mean {name.partition('_')[0].upper()}, {unit}: {', '.join(filter(None, group))}"
            print_table(["policy", *loads], rows, title=title)
        _print_ranking(members, loads)


def _print_ranking(members: Sequence[Cell], loads: Sequence[str]) -> None:
    from lmetric.cli.show import note, print_table
    from lmetric_lab.sim.ranking import over_loads

    ranked = over_loads(members)
    rows, excluded = [], False
    for place, (policy, standings) in enumerate(ranked, start=1):
        if place > _RANKED and policy != DEFAULT_POLICY:
            continue
        row = [str(place), policy]
        for load in loads:
            standing = standings.get(load)
            latency = None if standing is None else standing.latency
            mark = "*" if standing is not None and standing.measured.is_excluded else ""
            excluded |= bool(mark)
            row.append("–" if latency is None else f"{latency:.2f}{mark}")
        rows.append(row)
    title = "ranking by latency: mean TTFT and TPOT relative to the lowest (geometric mean)"
    columns = [load.replace(" of the maximum", " max") for load in loads]  # to fit 80 columns
    print_table(["place", "policy", *columns], rows, title=title, keys=2)
    if excluded:
        note("* unfinished requests, or cannot keep up: such policies come last")
    if (more := len(ranked) - len(rows)) > 0:
        note(f"{more} more policies are in the report")
