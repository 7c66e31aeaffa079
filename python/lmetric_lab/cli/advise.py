"""``lmetric-router advise``: how many engines the recent requests need, once or all the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmetric.cli.help import BASIC, ENGINES, RESULTS, TRACE
from lmetric.cli.records import RecordPaths
from lmetric_lab.cli.options import AllowCode, check_file
from lmetric_lab.cli.whatif import (
    CacheBlocks,
    Json,
    KvBytesPerToken,
    MaxBatchTokens,
    MaxError,
    MaxSequences,
    Model,
    SloText,
    TransferRate,
    limits_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lmetric_lab.capacity import Advice

WATCH = "Watch"
PORT = 9400
MIN_WATCH_SECONDS = 5.0


def command(
    records: RecordPaths,
    slo: SloText,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE=PRICE,…",
            help="Price of an engine per hour; the first type is the recorded one.",
            show_default="none",
            rich_help_panel=BASIC,
        ),
    ] = None,
    type_: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="TYPE=PROFILE,…",
            help="Other engine types: an engine profile, or x0.4: relative to the recorded engines.",
            show_default="none",
            rich_help_panel=BASIC,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Further policies to play.",
            show_default="the recorded one alone",
            rich_help_panel=BASIC,
        ),
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="2P6D",
            help="Pools of prefill and decode engines to play; repeatable.",
            show_default="none",
            rich_help_panel=BASIC,
        ),
    ] = None,
    transfer: TransferRate = None,
    kv_bytes_per_token: KvBytesPerToken = None,
    startup: Annotated[
        float, typer.Option(help="Start of an engine, seconds.", rich_help_panel=ENGINES)
    ] = 120.0,
    every: Annotated[
        float,
        typer.Option(
            help="Time between two decisions, seconds; with --watch also between two rounds.",
            rich_help_panel=ENGINES,
        ),
    ] = 60.0,
    min_engines: Annotated[int, typer.Option(help="Fewest engines.", rich_help_panel=ENGINES)] = 1,
    max_engines: Annotated[int, typer.Option(help="Most engines.", rich_help_panel=ENGINES)] = 256,
    headroom: Annotated[
        float,
        typer.Option(help="Share of the forecast demand to serve on top of it.", rich_help_panel=RESULTS),
    ] = 0.1,
    window: Annotated[
        float,
        typer.Option(
            help="Time before the last record to read, seconds; with --watch before now.",
            rich_help_panel=TRACE,
        ),
    ] = 1800.0,
    model: Model = None,
    allow_code: AllowCode = False,
    max_batch_tokens: MaxBatchTokens = None,
    max_sequences: MaxSequences = None,
    cache_blocks: CacheBlocks = None,
    max_error: MaxError = None,
    json_: Json = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Follow the records of running routers, and serve advice at /metrics and /advice.",
            rich_help_panel=WATCH,
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on.", show_default="127.0.0.1", rich_help_panel=WATCH),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port; 0: any free one.", show_default=str(PORT), rich_help_panel=WATCH
        ),
    ] = None,
    log_json: Annotated[
        bool | None,
        typer.Option(
            "--log-json/--log-text", help="Log JSON lines.", show_default="text", rich_help_panel=WATCH
        ),
    ] = None,
) -> None:
    """Advise how many engines the recent requests need.

    The command fits the simulator to the last minutes of records and forecasts the demand.
    Then it finds the fewest engines that meet the SLO, and the engine to remove first.
    If the fit is poor, it gives no advice and exits with 1. With --watch, it advises all the time,
    on each model in the records, until SIGTERM or Ctrl-C.
    """
    from functools import partial

    from lmetric._core import BadValueError
    from lmetric.cli.show import note, print_json, write_json
    from lmetric.record_files import read_records
    from lmetric_lab.capacity import Goal, Question, Twin
    from lmetric_lab.capacity.goals import read_types
    from lmetric_lab.sim.pools import Roles
    from lmetric_lab.sim.setups import PolicyChoice, split_policies

    to_stdout = json_ is not None and str(json_) == "-"
    check_file("--json", None if to_stdout else json_)
    if not 60 <= window <= 86_400:
        raise typer.BadParameter(f"{window:g} is not 60 to 86400", param_hint="--window")
    _check_watch(
        watch, records, every, {"--json": json_}, {"--host": host, "--port": port, "--log-json": log_json}
    )
    try:
        question = Question(
            Goal.of(slo),
            read_types(price or [], type_ or []),
            startup_seconds=startup,
            every_seconds=every,
            headroom=headroom,
            min_engines=min_engines,
            max_engines=max_engines,
            policies=tuple(
                choice for text in split_policies(policy or []) for choice in PolicyChoice.parse(text)
            ),
            roles=tuple(map(Roles.of, roles or [])),
            transfer=transfer,
        )
    except BadValueError as error:
        raise typer.BadParameter(str(error)) from None
    for choice in question.policies:
        choice.build()
    limits = limits_of(max_error)
    twin = partial(
        Twin, question, limits, window, max_batch_tokens, max_sequences, cache_blocks, kv_bytes_per_token,
        code=None if allow_code else (),
    )  # fmt: skip
    if watch:
        from lmetric.lean_imports import import_structlog

        import_structlog()
        from lmetric_lab.capacity.watch import Watch, run_watch

        code = run_watch(
            Watch(records, window, every, twin, slo=slo, model=model),
            host="127.0.0.1" if host is None else host,
            port=PORT if port is None else port,
            json_lines=bool(log_json),
        )
        raise SystemExit(code)
    found = read_records(list(records))
    for text in found.notes:
        note(f"note: {text}")
    one = found.of(model)
    now = max(float(each["at"]) + float(each["e2e_seconds"]) for each in one.requests)
    advice = twin().advise(one, now)
    for text in advice.notes:
        note(f"note: {text}")
    if to_stdout:
        print_json(advice)
        return
    _print(advice)
    if json_ is not None:  # last: a full disk then costs only the file
        write_json(json_, advice)
        note(f"wrote {json_}")


def _check_watch(
    watch: bool, records: list[Path], every: float, once: dict[str, object], served: dict[str, object]
) -> None:
    """Raises BadParameter for options that do not go together.

    ``once``: values of options without --watch by name; ``served``: of those with it.
    """
    for name, value in (once if watch else served).items():
        if value is not None:
            raise typer.BadParameter("not with --watch" if watch else "needs --watch", param_hint=name)
    if not watch:
        return
    if every < MIN_WATCH_SECONDS:
        raise typer.BadParameter(f"{every:g} is not at least {MIN_WATCH_SECONDS:g}", param_hint="--every")
    for path in records:
        if path.is_file() and path.suffix != ".jsonl":
            raise typer.BadParameter(f"{path}: a running router writes *.jsonl", param_hint="RECORDS")


def _print(advice: Advice) -> None:
    from lmetric.cli.show import print_table, print_text

    errors = ", ".join(f"{name} {error:+.1%}" for name, error in advice.fit_errors.items())
    print_text(
        f"{advice.requests} requests in {advice.seconds:.0f} s on {advice.engines} engines; "
        f"{advice.within_now:.1%} within the SLO. Errors of the fit: {errors}."
    )
    print_text(
        f"Demand: {advice.rate_now:.3g} requests/s now, {advice.rate_wanted:.3g} "
        f"({advice.rate_low:.3g} to {advice.rate_high:.3g}) in the next {advice.horizon_seconds:.0f} s."
    )
    priced = any(each.cost_per_hour is not None for each in advice.candidates)
    rows = [
        [
            each.change,
            str(each.engines),
            each.type,
            each.policy if each.roles is None else f"{each.policy}, {each.roles}",
            f"{each.within:.1%}",
            "yes" if each.enough else "no",
            *(["–" if each.cost_per_hour is None else f"{each.cost_per_hour:,.2f}"] if priced else []),
        ]
        for each in advice.candidates
    ]
    columns = ["change", "engines", "type", "policy", "within SLO", "meets the SLO"]
    print_table([*columns, *(["cost per hour"] if priced else [])], rows, title="Played:")
    removals = [
        [each.engine, f"{each.only_here_tokens:,}", f"{each.reused_tokens:,}", f"{each.requests:,}"]
        for each in advice.removals
    ]
    print_table(
        ["engine", "tokens only in its cache", "reused tokens", "requests"],
        removals,
        title="First to remove:",
    )
    print_text(advice.text())
