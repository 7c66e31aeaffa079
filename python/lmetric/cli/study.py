"""``lmetric-router study``: a grid of simulations from a YAML file, and its report."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lmetric.sim.backends import Backend
    from lmetric.sim.store import Store
    from lmetric.sim.study import Outcome
    from lmetric.sim.study_file import Study

BackendName = StrEnum("BackendName", {"threads": "threads", "ray": "ray"})


def command(
    file: Annotated[
        Path | None,
        typer.Argument(help="The study, a YAML file (see examples/study.yaml); not needed with --policy."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Policies in place of the file's: names, scores, mine.py:score; repeatable.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,…", help="Policies to compare --policy with, or all; repeatable."),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Run on this trace in place of the file's; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where results go [default: FILE's name-results].")
    ] = None,
    backend: Annotated[
        BackendName, typer.Option(help="This machine's cores, or a Ray cluster.")
    ] = BackendName.threads,
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The Ray cluster [default: one started here].")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once [default: cores].")] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html (needs matplotlib).")
    ] = True,
    figures: Annotated[bool, typer.Option("--figures", help="Write the figures as PNGs, too.")] = False,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write runs.parquet, too (needs pyarrow).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Run every combination of policies, knobs, loads, seeds, traces, fleets and settings of a file.

    Results go to DIR: runs.jsonl (a line a run, as it ends), summary.json, runs.csv, report.html. Run again,
    it takes up what is missing: after Ctrl-C (exit code 130), a crash, or a change of the file.
    """
    from lmetric.cli.show import note, print_json, warn_unscored, write_json, write_report
    from lmetric.sim.setups import split_policies
    from lmetric.sim.store import Store, require_pyarrow, write_csv, write_parquet
    from lmetric.sim.study import summary
    from lmetric.sim.study_file import load_study

    if report or figures:
        from lmetric.sim.figures import require_matplotlib

        require_matplotlib()
    if parquet:
        require_pyarrow()
    if file is None and not policy:
        raise typer.BadParameter("give a study file, or --policy", param_hint="FILE")
    if against and not policy:
        raise typer.BadParameter("goes with --policy", param_hint="--against")
    policies = list(dict.fromkeys(split_policies([*(policy or []), *(against or [])])))
    study = load_study(file, trace, policies)
    for message in study.deprecated:
        note(message)
    directory = out if out is not None else Path(f"{file.stem if file else 'comparison'}-results")
    directory.mkdir(parents=True, exist_ok=True)
    with Store(directory / "runs.jsonl") as store:
        where = _backend(backend, ray_address, jobs)
        try:
            outcome = _run(study, store, where)
        except KeyboardInterrupt:
            note(f"interrupted; {len(store.runs)} runs are kept in {store.path}, run again to go on")
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
    note(f"{len(outcome.results)} runs, {outcome.reused} of them there already; results are in {directory}")


def _backend(name: BackendName, address: str | None, jobs: int | None) -> Backend:
    from lmetric.sim.backends import Ray, Threads

    if name is BackendName.threads and address is not None:
        raise typer.BadParameter("goes with --backend ray", param_hint="--ray-address")
    return Threads(jobs) if name is BackendName.threads else Ray(address, jobs)


def _run(study: Study, store: Store, backend: Backend) -> Outcome:
    from lmetric.cli.show import progress
    from lmetric.sim.study import Progress, run_study

    with progress("study") as shown:
        bars = {}

        def tell(state: Progress) -> None:
            if state.stage not in bars:
                bars[state.stage] = shown.add_task(state.stage, total=state.total)
            shown.update(bars[state.stage], completed=state.done, total=state.total)

        return run_study(study, store, backend, tell)


def _print(outcome: Outcome) -> None:
    """Mean TTFT and TPOT by policy and load; the rest is in the files."""
    from functools import partial

    from lmetric.cli.show import print_table
    from lmetric.sim.study import cells, latency

    for load in outcome.max_loads:
        print(
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
