"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmetric.cli.help import BASIC, RESULTS, TRACE
from lmetric.cli.usage import above_zero
from lmetric_lab.defaults import trace_path

TRACE_HELP = (
    "Trace file (Mooncake, Qwen-Bailian, Azure, AIPerf, WEKA or OpenTelemetry format, also .gz, .xz "
    "or .zst) or YAML file of a synthetic trace; or a name from `lmetric-router trace list`. Names in "
    "the package: slice and coding-agents."
)
TraceFile = Annotated[
    Path,
    typer.Option(
        parser=trace_path,
        metavar="FILE",
        show_default="slice",
        help=TRACE_HELP,
        rich_help_panel=BASIC,
    ),
]
Format = Annotated[
    str | None, typer.Option(help="Format of the trace.", show_default="detected", rich_help_panel=TRACE)
]
ClosedLoop = Annotated[
    bool | None,
    typer.Option(
        help="Send a turn only after the previous answer.",
        show_default="as in the trace",
        rich_help_panel=TRACE,
    ),
]
SessionRate = Annotated[
    float | None,
    typer.Option(
        help="Sessions per second, if the trace has no start times of sessions or is synthetic.",
        show_default="all start at 0",
        rich_help_panel=TRACE,
    ),
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens per hash ID.", show_default="from the file or format", rich_help_panel=TRACE
    ),
]
SloTtft = Annotated[
    float | None,
    typer.Option(
        help="Goodput: maximum TTFT, seconds.",
        callback=above_zero,
        show_default="no SLO",
        rich_help_panel=RESULTS,
    ),
]
SloTpot = Annotated[
    float | None,
    typer.Option(
        help="Goodput: maximum TPOT, seconds.",
        callback=above_zero,
        show_default="no SLO",
        rich_help_panel=RESULTS,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(min=1, help="Use only the first N requests.", show_default="all", rich_help_panel=TRACE),
]
MaxInputTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Skip requests with longer prompts.", show_default="no limit", rich_help_panel=TRACE
    ),
]
Start = Annotated[
    float, typer.Option(min=0, help="Skip the first S seconds of the trace.", rich_help_panel=TRACE)
]
Speed = Annotated[
    float,
    typer.Option(help="Arrival rate relative to the trace.", callback=above_zero, rich_help_panel=BASIC),
]
SkipBadLines = Annotated[
    bool, typer.Option(help="Skip and count invalid lines instead of failing.", rich_help_panel=TRACE)
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run Python code that the data names, such as mine.py:score. Read the code first.",
        rich_help_panel=TRACE,
    ),
]


def check_file(flag: str, path: Path | None) -> None:
    """Raises BadParameter if `path` cannot be written, before minutes of work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        reason = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise typer.BadParameter(f"{path}: {reason}", param_hint=flag)
