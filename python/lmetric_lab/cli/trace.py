"""``lmetric-router trace``: describes or converts a trace file, or generates a synthetic trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli.help import Command
from lmetric_lab.cli.options import TRACE_HELP, BlockTokens, ClosedLoop, Format, SessionRate, SkipBadLines
from lmetric_lab.defaults import trace_path

if TYPE_CHECKING:
    from lmetric_lab.sim.traces import BadLine, Trace, TraceSummary

group = typer.Typer(help="Describe, convert, list or make traces.", no_args_is_help=True)


File = Annotated[Path, typer.Argument(parser=trace_path, metavar="FILE", help=TRACE_HELP)]


@group.command(cls=Command)
def show(
    file: File,
    format: Format = None,
    block_tokens: BlockTokens = None,
    closed_loop: ClosedLoop = None,
    session_rate: SessionRate = None,
    skip_bad_lines: SkipBadLines = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print requests, rate and lengths of a trace, and the hit rate of an unlimited cache."""
    from lmetric.cli.show import print_json
    from lmetric_lab.sim.traces import summarize_trace

    trace = load_noting(
        file,
        skip_bad_lines,
        format=format,
        block_tokens=block_tokens,
        closed_loop=closed_loop,
        session_rate=session_rate,
    )
    summary = summarize_trace(trace)
    if as_json:
        print_json(summary)
    else:
        _print(summary)


@group.command(cls=Command)
def convert(
    file: File,
    out: Annotated[Path, typer.Option(help="Output file in Mooncake format; .gz, .xz, .zst: compressed.")],
    format: Format = None,
    block_tokens: BlockTokens = None,
    closed_loop: ClosedLoop = None,
    session_rate: SessionRate = None,
    skip_bad_lines: SkipBadLines = False,
) -> None:
    """Write a trace in Mooncake format, with its sessions, joins and think times.

    The result has times, lengths and hash IDs only. It has no names and no text of the input.
    """
    from lmetric.cli.show import note
    from lmetric_lab.sim.traces import write_trace

    trace = load_noting(
        file,
        skip_bad_lines,
        format=format,
        block_tokens=block_tokens,
        closed_loop=closed_loop,
        session_rate=session_rate,
    )
    write_trace(trace, out)
    note(f"{out}: {len(trace)} requests over {trace.duration_seconds:.0f} s")


@group.command(cls=Command)
def make(
    description: Annotated[
        str, typer.Argument(help="YAML file, coding-agents, or YAML text: '{synthetic: sessions, ...}'.")
    ],
    out: Annotated[Path, typer.Option(help="Output file in Mooncake format; .gz, .xz, .zst: compressed.")],
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Replaces the seed of the description.", show_default="as described"),
    ] = None,
    session_rate: Annotated[
        float | None,
        typer.Option(help="Replaces the rate: sessions per second.", show_default="as described"),
    ] = None,
) -> None:
    """Write a synthetic trace. Equal descriptions give identical files."""
    from lmetric.cli.show import note
    from lmetric_lab.sim.synthetic import read_synthetic
    from lmetric_lab.sim.traces import write_trace

    trace = read_synthetic(description, seed=seed, session_rate=session_rate).make()
    write_trace(trace, out)
    note(f"{out}: {len(trace)} requests over {trace.duration_seconds:.0f} s")


@group.command("list", cls=Command)
def list_(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the traces with a name: those in the package, and public traces.

    A public trace is downloaded on first use into the folder LMETRIC_TRACE_DIR (by default, a
    folder in the user's cache), and its checksum is verified.
    """
    from dataclasses import asdict

    from lmetric.cli.show import print_json, print_text
    from lmetric_lab.public_traces import PUBLIC_TRACES

    if as_json:
        print_json([{**asdict(each), "path": str(each.path)} for each in PUBLIC_TRACES.values()])
        return
    print_text("slice: 1,000 requests of mooncake-conversation (in the package)")
    print_text("coding-agents: 350 synthetic agents, fitted to recorded sessions (in the package)")
    for each in PUBLIC_TRACES.values():
        print_text(f"{each.name}: {each.about} License: {each.license}.")
        where = each.path if each.path.exists() else f"not downloaded yet, to {each.path}"
        for line in (*each.facts().splitlines(), f"file: {where}"):
            print(f"    {line}")  # addresses and paths are not wrapped


def load_noting(file: Path, skip_bad_lines: bool, **settings: Any) -> Trace:
    """The trace of a file, after a note on its bad lines. `settings`: of `load_trace`."""
    from lmetric.cli.show import note
    from lmetric_lab.sim.traces import load_trace

    trace = load_trace(file, on_bad_line="skip" if skip_bad_lines else "stop", **settings)
    report_bad_lines(trace.bad_lines, note)
    return trace


def report_bad_lines(bad_lines: tuple[BadLine, ...], note: Callable[[str], None]) -> None:
    """Notes the first skipped lines and the number of the others."""
    for bad in bad_lines[:3]:
        note(f"skipped {bad}")
    if len(bad_lines) > 3:
        note(f"skipped {len(bad_lines) - 3} more lines")


def _print(summary: TraceSummary) -> None:
    from lmetric.cli.show import print_table

    title = f"{summary.name}: {summary.requests} requests in {summary.duration_seconds:.1f} s"
    if summary.requests_per_second is not None:
        title += f", {summary.requests_per_second:.3f} requests/s"
    rows = [
        [name, *(f"{value:.0f}" for value in (each.mean, each.p50, each.p90, each.p99, each.max, each.total))]
        for name, each in (("prompt", summary.input_tokens), ("answer", summary.output_tokens))
    ]
    print_table(["tokens", "mean", "p50", "p90", "p99", "max", "total"], rows, title=title)
    facts = [
        ["blocks", f"{summary.blocks} of {summary.block_tokens} tokens, {summary.distinct_blocks} distinct"],
        ["hit rate of an unlimited cache", f"{summary.ideal_hit_ratio:.1%} of prompt tokens"],
        [
            "conversations",
            f"{summary.sessions}; {summary.waiting_requests} requests wait for an earlier answer",
        ],
        ["simultaneous arrivals", f"{summary.simultaneous_requests} requests"],
        ["bad lines", str(summary.bad_lines)],
    ]
    print_table(["", ""], facts)
