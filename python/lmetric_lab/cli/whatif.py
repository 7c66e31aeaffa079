"""``lmetric-router whatif``: what other policies would have done with recorded requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli.help import BASIC, DISAGGREGATION, ENGINES, RESULTS, TRACE
from lmetric.cli.records import RecordPaths
from lmetric.cli.usage import above_zero
from lmetric_lab.cli.options import AllowCode, SloTpot, SloTtft, check_file
from lmetric_lab.defaults import COMPARED

if TYPE_CHECKING:
    from lmetric_lab.sim.setups import PolicyChoice, Result
    from lmetric_lab.whatif import EngineFit, FitCheck, Limits, Recording
    from lmetric_lab.whatif.check import Fleet

Model = Annotated[
    str | None, typer.Option(help="Model to read.", show_default="the only one", rich_help_panel=TRACE)
]
SloText = Annotated[
    str,
    typer.Option(
        metavar="ttft_p99=2s,…",
        help="Bounds of ttft, tpot and e2e, each with a percentile.",
        rich_help_panel=BASIC,
    ),
]
Seeds = Annotated[
    int, typer.Option(min=1, help="Runs per policy, with seeds 0 to N - 1.", rich_help_panel=BASIC)
]
MaxError = Annotated[
    float | None,
    typer.Option(
        help="Largest error of the fit's mean TTFT, mean TPOT and hit rate.",
        callback=above_zero,
        show_default="0.25, 0.15 and 0.05",
        rich_help_panel=RESULTS,
    ),
]
MaxBatchTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="The engines' maximum tokens per step.", show_default="fitted", rich_help_panel=ENGINES
    ),
]
MaxSequences = Annotated[
    int | None,
    typer.Option(
        min=1, help="The engines' maximum running sequences.", show_default="256", rich_help_panel=ENGINES
    ),
]
CacheBlocks = Annotated[
    int | None,
    typer.Option(
        min=1, help="The engines' KV blocks.", show_default="as the engines report", rich_help_panel=ENGINES
    ),
]
TransferRate = Annotated[
    str | None,
    typer.Option(
        metavar="GB/S[,layers]",
        help="With --roles: bandwidth of KV transfers, also with fixed=SECONDS per transfer; or none.",
        show_default="50",
        rich_help_panel=DISAGGREGATION,
    ),
]
KvBytesPerToken = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --roles: bytes of a token's KV, for the time of transfers.",
        show_default="none",
        rich_help_panel=DISAGGREGATION,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Concurrent runs.", show_default="number of cores", rich_help_panel=RESULTS),
]
OpenLoop = Annotated[
    bool,
    typer.Option(
        "--open-loop",
        help="Keep recorded arrivals, also for turns of sessions.",
        rich_help_panel=TRACE,
    ),
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="OUT",
        help="File for the results as JSON; -: stdout.",
        show_default="none",
        rich_help_panel=BASIC,
    ),
]


def command(
    records: RecordPaths,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Policy names, linear(lam=0.7), or scores; repeatable.",
            show_default=", ".join(COMPARED),
            rich_help_panel=BASIC,
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="Number of engines.", show_default="as recorded", rich_help_panel=BASIC),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="3P5D",
            help="Prefill and decode pools, instead of --instances.",
            show_default="whole engines",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    transfer: TransferRate = None,
    kv_bytes_per_token: KvBytesPerToken = None,
    seeds: Seeds = 3,
    model: Model = None,
    open_loop: OpenLoop = False,
    allow_code: AllowCode = False,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    max_batch_tokens: MaxBatchTokens = None,
    max_sequences: MaxSequences = None,
    cache_blocks: CacheBlocks = None,
    max_error: MaxError = None,
    profile_out: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT",
            help="File for the fitted profile (YAML).",
            show_default="none",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    jobs: Jobs = None,
    json_: Json = None,
) -> None:
    """Simulate policies on recorded requests.

    The command fits an engine profile to the records and simulates the policy that really ran.
    Then it prints the error of this simulation, and the results of each policy.
    If the error is too large, it compares no policies and exits with 1.
    """
    from lmetric.cli.show import note, print_json, print_text, progress, write_json
    from lmetric.file_errors import write_file
    from lmetric_lab.sim.study import cells
    from lmetric_lab.sim.summary import Slo
    from lmetric_lab.whatif import WhatIfError, compare, places
    from lmetric_lab.whatif.check import Fleet, as_yaml

    to_stdout = json_ is not None and str(json_) == "-"
    check_file("--json", None if to_stdout else json_)
    check_file("--profile-out", profile_out)
    if roles is not None and instances is not None:
        raise typer.BadParameter("the pools are the engines: omit --instances", param_hint="--roles")
    pools = fleets([] if roles is None else [roles], transfer, kv_bytes_per_token)
    recording = read(records, model, allow_code=allow_code)
    recorded = Fleet.recorded(recording)
    fleet = pools[0] if pools else recorded if instances is None else Fleet(instances)
    choices = chosen(policy or COMPARED, recording.policy)
    fit, check = fitted(
        recording, seeds, max_error, batch=max_batch_tokens, sequences=max_sequences, blocks=cache_blocks,
        kv_bytes=kv_bytes_per_token,
    )  # fmt: skip
    if profile_out is not None:
        write_file(profile_out, as_yaml(fit).encode())
    told = _told(recording, fit, check)
    if not to_stdout:
        _print_fit(recording, fit, check)
    if check.good:
        slo = Slo(slo_ttft, slo_tpot)
        with progress("runs") as shown:
            bar = shown.add_task("", total=len(choices) * seeds)
            results = compare(
                recording, fit, choices, seeds=seeds, fleet=fleet, slo=slo,
                closed_loop=not open_loop, jobs=jobs, progress=lambda: shown.update(bar, advance=1),
            )  # fmt: skip
        ranked = places(cells(results), check.score_error)
        told |= {"runs": [each.figures for each in results], "ranking": ranked}
        if not to_stdout:
            print_results(results, fleet)
            print_text(_verdict(ranked, check.score_error))
    if to_stdout:
        print_json(told)
    elif json_ is not None:
        write_json(json_, told)
        note(f"wrote {json_}")
    if not check.good:
        raise WhatIfError(check.reason())


def read(paths: Sequence[Path], model: str | None, *, allow_code: bool) -> Recording:
    """The recording in these files, with notes of skipped lines on stderr.

    ``allow_code``: whether the recorded policy may be Python code. Raises LmetricError.
    """
    from lmetric.cli.show import note
    from lmetric.record_files import read_records
    from lmetric_lab.whatif import recording_of

    found = read_records(list(paths))
    for text in found.notes:
        note(f"note: {text}")
    recording = recording_of(found.of(model), code=None if allow_code else ())
    for text in recording.notes:
        note(f"note: {text}")
    return recording


def fleets(roles: Sequence[str], transfer: str | None, kv_bytes: int | None) -> list[Fleet]:
    """Fleets with these pools. Raises typer.BadParameter and BadValueError."""
    from lmetric_lab.sim.pools import Roles, Transfer
    from lmetric_lab.whatif.check import Fleet

    for name, value in (("--transfer", transfer), ("--kv-bytes-per-token", kv_bytes)):
        if value is not None and not roles:
            raise typer.BadParameter("needs --roles with pools, such as 3P5D", param_hint=name)
    found = [Fleet.of(Roles.of(text), transfer) for text in roles]
    moves = transfer is None or Transfer.of(transfer) is not None
    if moves and kv_bytes is None and any(fleet.roles and fleet.roles.prefill for fleet in found):
        raise typer.BadParameter(
            "the time of KV transfers needs --kv-bytes-per-token; or set --transfer none",
            param_hint="--roles",
        )
    return found


def chosen(texts: Iterable[str], recorded: PolicyChoice) -> list[PolicyChoice]:
    """The policies in these texts, after the recorded one, without duplicates."""
    from lmetric_lab.sim.setups import PolicyChoice, split_policies

    parsed = [choice for text in split_policies(texts) for choice in PolicyChoice.parse(text)]
    found = list({choice.label: choice for choice in [recorded, *parsed]}.values())
    for choice in found:
        choice.build()
    return found


def fitted(
    recording: Recording,
    seeds: int,
    max_error: float | None,
    *,
    batch: int | None,
    sequences: int | None,
    blocks: int | None,
    kv_bytes: int | None,
) -> tuple[EngineFit, FitCheck]:
    """The fitted profile, and how well it explains the records."""
    from lmetric_lab.whatif import check_fit, fit_engine

    limits = limits_of(max_error)
    fit = fit_engine(
        recording,
        max_batch_tokens=batch,
        max_sequences=sequences,
        cache_blocks=blocks,
        kv_bytes_per_token=kv_bytes,
    )
    return fit, check_fit(recording, fit, seeds=seeds, limits=limits)


def limits_of(max_error: float | None) -> Limits:
    """The largest errors of a good fit."""
    from lmetric_lab.whatif import Limits

    if max_error is None:
        return Limits()
    return Limits(max_error, max_error, max_error)


def _print_fit(recording: Recording, fit: EngineFit, check: FitCheck) -> None:
    from lmetric.cli.show import print_table, print_text

    seconds = recording.trace.duration_seconds
    print_text(
        f"{len(recording)} requests in {seconds:.0f} s on {recording.most_engines} engines under "
        f"{check.policy}. The fit used the first {fit.requests}; the other {check.requests} check it:"
    )
    body = []
    for each in check.figures:
        scale, unit = (1e3, " ms") if each.unit else (100, "%")
        span = f"{each.simulated * scale:.4g}{unit} ({each.least * scale:.4g} to {each.most * scale:.4g})"
        good = "good" if each.good else "poor"
        limit = f"{each.limit:.0%}" if each.unit else f"{100 * each.limit:.0f} points"
        error = f"{each.error:+.1%}" if each.unit else f"{100 * each.error:+.1f} points"
        body.append([each.name, f"{each.recorded * scale:.4g}{unit}", span, error, limit, good])
    print_table(["fit", "recorded", "simulated (range of seeds)", "error", "limit", ""], body)
    print(check.plot())
    print()


def print_results(results: list[Result], fleet: Fleet) -> None:
    """Prints the figures of each policy."""
    from functools import partial

    from lmetric.cli.show import print_table
    from lmetric_lab.sim.study import cells, latency
    from lmetric_lab.sim.table import Column, rows

    columns = [
        Column("TTFT mean, ms", partial(latency, name="ttft_seconds", part="mean"), 1e3, 0),
        Column("TTFT p99, ms", partial(latency, name="ttft_seconds", part="p99"), 1e3, 0),
        Column("TPOT mean, ms", partial(latency, name="tpot_seconds", part="mean"), 1e3, 1),
        Column("hits, %", lambda r: r.figures.hit_ratio, 100, 1, 1),
    ]
    if str(results[0].setup.slo):
        columns.append(Column("within SLO, %", lambda r: r.figures.goodput.share, 100, 1, 1))
    found = cells(results)
    body = [
        [cell.policy, *("–" if value is None else str(value) for value in row)]
        for cell, row in zip(found, rows(found, (("", tuple(columns)),)), strict=True)
    ]
    seeds = len(found[0].results)
    print_table(
        ["policy", *(column.title for column in columns)],
        body,
        title=f"Simulated on {fleet}, mean over {seeds} seeds ± half the range:",
    )


def _verdict(ranked: Sequence[Any], error: float) -> str:
    """The ranking in words; a tie joins policies whose intervals overlap."""
    text = ranked[0].policy
    for place in ranked[1:]:
        text += f"{', then ' if place.apart else ' or '}{place.policy} ({place.score[0]:.2f})"
    return (
        f"Ranking by TTFT and TPOT, best first: {text}. Numbers are relative to {ranked[0].policy}. "
        '"or" joins policies whose intervals overlap: the range over the seeds, and an error of the fit up '
        f"to {error:.1%}."
    )


def _told(recording: Recording, fit: EngineFit, check: FitCheck) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "version": version("lmetric-router"),
        "records": {
            "requests": len(recording),
            "seconds": recording.trace.duration_seconds,
            "engines": recording.engines,
            "policy": recording.policy.label,
            "hit_ratio": recording.hit_ratio,
            "notes": recording.notes,
        },
        "profile": fit.profile.model_dump(exclude_none=True),
        "fit": {
            "good": check.good,
            "requests": check.requests,
            "request_seconds": fit.request_seconds,
            "cached_answers": fit.cached_answers,
            "figures": check.figures,
            "score_error": check.score_error,
            "quantiles": check.quantiles,
        },
    }
