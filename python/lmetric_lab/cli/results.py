"""Reports and warnings of simulated runs, which several commands print."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmetric.cli.show import note
from lmetric.file_errors import write_file

if TYPE_CHECKING:
    from lmetric_lab.sim.max_load import MaxLoad
    from lmetric_lab.sim.setups import Result


def write_report(
    results: Sequence[Result],
    title: str,
    page: Path | None,
    figures: Path | None,
    *,
    max_loads: Sequence[MaxLoad] = (),
) -> None:
    """Write a report of simulated runs: the HTML file `page`, and PNG figures into `figures`."""
    from lmetric_lab.sim.figures import save_pngs
    from lmetric_lab.sim.report import build

    command = shlex.join(["lmetric-router", *sys.argv[1:]])
    made = build(results, title=title, command=command, max_loads=max_loads)
    if page is not None:
        write_file(page, made.html.encode())
    if figures is not None:
        save_pngs(made.drawings, figures)


def warn_unscored(results: Iterable[Result]) -> None:
    """Print a warning for each policy that scored no instance in some decisions."""
    counts: Counter[str] = Counter()
    for result in results:
        policies = (result.setup.policy, result.setup.decode_policy)
        label = " and ".join(each.label for each in policies if each is not None)
        counts[label] += result.unscored
    for label, count in (+counts).items():
        note(f"warning: {label} scored no instance in {count} decisions; least_requests decided")
