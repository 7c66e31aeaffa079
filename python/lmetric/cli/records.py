"""``lmetric-router records``: converts the records that a router wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmetric.cli.help import Command

RecordPaths = Annotated[
    list[Path], typer.Argument(metavar="RECORDS...", help="Record files, or folders of them.")
]

group = typer.Typer(help="Convert the records of a router.", no_args_is_help=True)


@group.callback()
def _group() -> None:
    """Keeps `convert` a command of its own."""


@group.command(cls=Command)
def convert(
    records: RecordPaths,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Output file: FILE.parquet.")],
) -> None:
    """Write records as one Parquet file, with one row per request.

    `whatif` and `report` read the file like the records themselves.
    The command needs pyarrow: pip install pyarrow.
    """
    from lmetric.cli.show import note
    from lmetric.record_files import convert_records, record_paths
    from lmetric.record_parquet import SUFFIX
    from lmetric.record_schema import RecordError

    if out.suffix != SUFFIX:
        raise RecordError(f"--out: {out} is not valid; expected a name that ends in {SUFFIX}")
    for folder in records:
        if folder.is_dir() and folder.resolve() == out.resolve().parent:
            raise RecordError(
                f"--out: {out} is inside the folder {folder}, which would then have each request twice; "
                "choose another folder"
            )
    paths = [path for path in record_paths(records) if path.suffix != SUFFIX]
    if not paths:
        raise RecordError("the input has Parquet files only; expected records as lines of JSON")
    found, requests = convert_records(paths, out)
    for each in found.notes:
        note(each)
    note(f"{out}: {requests} requests of {len(paths)} files, {out.stat().st_size} bytes")
