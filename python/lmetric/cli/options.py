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
        help="Trace file: Mooncake, Qwen-Bailian or Azure format, also .gz; slice: the trace in the package.",
    ),
]
Format = Annotated[str | None, typer.Option(help="Format of the trace [default: detected].")]
ClosedLoop = Annotated[
    bool | None, typer.Option(help="Send a turn only after the previous answer [default: as in the trace].")
]
BlockTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens per hash ID [default: from the file or format].")
]
SloTtft = Annotated[float | None, typer.Option(help="Goodput: maximum TTFT, seconds.")]
SloTpot = Annotated[float | None, typer.Option(help="Goodput: maximum TPOT, seconds.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")]
MaxInputTokens = Annotated[int | None, typer.Option(min=1, help="Skip requests with longer prompts.")]
Start = Annotated[float, typer.Option(min=0, help="Skip the first S seconds of the trace.")]
Speed = Annotated[float, typer.Option(help="Arrival rate relative to the trace.")]
SkipBadLines = Annotated[bool, typer.Option(help="Skip and count invalid lines instead of failing.")]


def check_file(flag: str, path: Path | None) -> None:
    """Raises BadParameter if `path` cannot be written, before minutes of work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise typer.BadParameter(f"{path}: {reason}", param_hint=flag)
