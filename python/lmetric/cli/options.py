"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmetric.defaults import trace_path

TraceFile = Annotated[
    Path,
    typer.Option(
        parser=trace_path,
        metavar="FILE",
        show_default="slice",
        help="Trace file: Mooncake, Qwen-Bailian or Azure; .gz is decompressed. slice: the recorded trace in "
        "the package.",
    ),
]
Format = Annotated[str | None, typer.Option(help="Format of the trace [default: told from its content].")]
ClosedLoop = Annotated[
    bool | None, typer.Option(help="A turn waits for the answer before it [default: if the trace says so].")
]
BlockTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens under one hash id [default: the file's or format's].")
]
SloTtft = Annotated[float | None, typer.Option(help="Goodput counts a TTFT of at most S seconds.")]
SloTpot = Annotated[float | None, typer.Option(help="Goodput counts a TPOT of at most S seconds.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Take only the first N requests.")]
MaxInputTokens = Annotated[int | None, typer.Option(min=1, help="Leave out requests with longer prompts.")]
Start = Annotated[float, typer.Option(min=0, help="Begin this many trace seconds in.")]
Speed = Annotated[float, typer.Option(help="Arrivals this many times as fast as in the trace.")]
SkipBadLines = Annotated[bool, typer.Option(help="Count lines that cannot be read and go on.")]


def check_file(flag: str, path: Path | None) -> None:
    """An error now where `path` could not be written after minutes of work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise typer.BadParameter(f"{path}: {reason}", param_hint=flag)
