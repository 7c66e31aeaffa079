"""``lmetric-router report``: missed SLOs in records, and what would have met them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lmetric.cli.help import BASIC, DISAGGREGATION, RESULTS
from lmetric.cli.records import RecordPaths
from lmetric_lab.cli.options import AllowCode, check_file
from lmetric_lab.cli.whatif import (
    CacheBlocks,
    Jobs,
    Json,
    KvBytesPerToken,
    MaxBatchTokens,
    MaxError,
    MaxSequences,
    Model,
    Seeds,
    SloText,
    TransferRate,
    chosen,
    fitted,
    fleets,
)
from lmetric_lab.defaults import COMPARED


def command(
    records: RecordPaths,
    slo: SloText,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Policies to simulate besides the recorded one; repeatable.",
            show_default=", ".join(COMPARED),
            rich_help_panel=BASIC,
        ),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="3P5D",
            help="Prefill and decode pools to simulate, too; repeatable.",
            show_default="none",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    transfer: TransferRate = None,
    kv_bytes_per_token: KvBytesPerToken = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate/--no-simulate", help="Simulate changes.", rich_help_panel=RESULTS),
    ] = True,
    seeds: Seeds = 3,
    model: Model = None,
    allow_code: AllowCode = False,
    max_batch_tokens: MaxBatchTokens = None,
    max_sequences: MaxSequences = None,
    cache_blocks: CacheBlocks = None,
    max_error: MaxError = None,
    jobs: Jobs = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT", help="File for the report as HTML.", show_default="none", rich_help_panel=BASIC
        ),
    ] = None,
    json_: Json = None,
) -> None:
    """Report missed SLOs of recorded requests.

    The report has rows by engine, tenant and prompt length, and the main causes.
    Changes are simulated as in whatif: other policies, then more engines.
    """
    from dataclasses import replace

    from lmetric._core import BadValueError
    from lmetric.cli.show import note, print_json, print_text, write_json
    from lmetric.file_errors import write_file
    from lmetric.record_files import read_records
    from lmetric_lab.slo import Goal
    from lmetric_lab.whatif import WhatIfError, recording_of
    from lmetric_lab.whatif.report_page import page
    from lmetric_lab.whatif.slo_report import simulate_options, slo_report

    try:
        goal = Goal.of(slo)
    except BadValueError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    to_stdout = json_ is not None and str(json_) == "-"
    check_file("--html", html)
    check_file("--json", None if to_stdout else json_)
    pools = fleets(roles or [], transfer, kv_bytes_per_token)
    found = read_records(list(records))
    for text in found.notes:
        note(f"note: {text}")
    one = found.of(model)
    report, check = slo_report(one, goal), None
    if simulate and not report.reached:
        try:
            recording = recording_of(one, code=None if allow_code else ())
            choices = chosen(policy or COMPARED, recording.policy)
            fit, check = fitted(
                recording,
                seeds,
                max_error,
                batch=max_batch_tokens,
                sequences=max_sequences,
                blocks=cache_blocks,
                kv_bytes=kv_bytes_per_token,
            )
            report = simulate_options(
                report, goal, recording, fit, check, choices, fleets=pools, seeds=seeds, jobs=jobs
            )
        except WhatIfError as error:
            report = replace(report, why_none=str(error))
    if to_stdout:
        print_json(report)
    else:
        _print(report)
        print_text(report.advice())
    # Last: a full disk then costs only the files.
    if json_ is not None and not to_stdout:
        write_json(json_, report)
        note(f"wrote {json_}")
    if html is not None:
        write_file(html, page(report, check, f"SLO report: {one.models[0]}").encode())
        note(f"wrote {html}")


def _print(report: Any) -> None:
    from lmetric.cli.show import print_table

    for title, rows in (("engine", report.engines), ("tenant", report.tenants), ("prompt", report.prompts)):
        body = [
            [row.name, f"{row.requests}", f"{row.met:.1%}", f"{row.ttft_missed:.1%}",
             f"{row.tpot_missed:.1%}", f"{row.e2e_missed:.1%}", f"{row.failed}",
             ", ".join(f"{name} {count}" for name, count in row.causes.items())]
            for row in rows
        ]  # fmt: skip
        columns = [
            "requests",
            "within SLO",
            "TTFT missed",
            "TPOT missed",
            "end to end missed",
            "failed",
            "causes",
        ]
        print_table([title, *columns], body)
    if report.options:
        body = [
            [
                each.label,
                each.fleet,
                f"{each.met[0]:.1%}",
                f"{each.met[1]:.1%}",
                f"{each.met[2]:.1%}",
            ]
            for each in report.options
        ]
        print_table(["simulated policy", "fleet", "within SLO", "least", "most"], body)
