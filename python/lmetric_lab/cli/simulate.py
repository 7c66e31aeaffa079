"""``lmetric-router simulate``: simulates policies on a trace with a fleet of engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli.help import BASIC, DISAGGREGATION, ENGINES, RESULTS, TRACE
from lmetric.cli.usage import above_zero
from lmetric.defaults import PLANNER
from lmetric_lab.cli.options import (
    ClosedLoop,
    Format,
    MaxInputTokens,
    Requests,
    SessionRate,
    SkipBadLines,
    SloTpot,
    SloTtft,
    Speed,
    Start,
    TraceFile,
    check_file,
)
from lmetric_lab.defaults import COMPARED, DEFAULT_PROFILE, SLICE

if TYPE_CHECKING:
    from lmetric_lab.sim.setups import PolicyChoice, Result, Setup

# Results state these settings, also if they have their defaults.
_STATED = ("signals", "admission", "index")


def command() -> None:
    """Simulate policies on a trace.

    The report has latencies, hit rates, goodput and load imbalance.
    The simulator runs the server's router core and policies. An hour of trace takes about a second.
    The same command always gives the same figures. Ctrl-C prints nothing and exits with 130.
    """


def build() -> Callable[..., None]:
    """The command with its options. Those of `Scenario` have a slow import."""
    from lmetric.cli import routing
    from lmetric_lab.cli import scenario

    made = routing.command(_command, [*scenario.parameters(), *routing.parameters(server=False)])
    made.__doc__ = command.__doc__
    return made


def _command(
    trace: TraceFile = SLICE,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Policy names, linear(lam=0.7), scores, or all; repeatable.",
            show_default=", ".join(COMPARED),
            rich_help_panel=BASIC,
        ),
    ] = None,
    decode_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X,Y,…",
            help="With --roles: decode policies, combined with each --policy.",
            show_default="least_requests",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens per KV block.", show_default="from the profile", rich_help_panel=ENGINES
        ),
    ] = None,
    speed: Speed = 1.0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs per policy, with seeds 0 to N - 1.", rich_help_panel=BASIC)
    ] = 1,
    measure: Annotated[
        str,
        typer.Option(
            metavar="A:B", help="Part of the requests to measure, e.g. 0.1:0.9.", rich_help_panel=RESULTS
        ),
    ] = "0:1",
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    start: Start = 0.0,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Use S seconds of the trace.",
            callback=above_zero,
            show_default="all",
            rich_help_panel=TRACE,
        ),
    ] = None,
    requests: Requests = None,
    max_input_tokens: MaxInputTokens = None,
    format: Format = None,
    closed_loop: ClosedLoop = None,
    session_rate: SessionRate = None,
    prefixes: Annotated[
        bool,
        typer.Option(
            "--prefixes/--no-prefixes", help="Whether requests share prefixes.", rich_help_panel=TRACE
        ),
    ] = True,
    skip_bad_lines: SkipBadLines = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Concurrent runs.", show_default="number of cores", rich_help_panel=RESULTS),
    ] = None,
    json_: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="OUT",
            help="File for the results as JSON; -: stdout.",
            show_default="none",
            rich_help_panel=BASIC,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write an HTML report.", show_default="none", rich_help_panel=BASIC),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory for the report's figures as PNG files.",
            show_default="none",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    **more: Any,
) -> None:
    """Runs the command. `more` has the flags of `Scenario` and of routing options."""
    from lmetric import option_values, options
    from lmetric.cli.show import note, print_text
    from lmetric_lab.cli import scenario
    from lmetric_lab.cli.results import warn_unscored
    from lmetric_lab.cli.simulated import print_results, verdict, write_results
    from lmetric_lab.sim.fleet import resolve_fleet
    from lmetric_lab.sim.pools import Roles
    from lmetric_lab.sim.scenario import Scenario
    from lmetric_lab.sim.setups import Setup, TraceChoice, trace_label
    from lmetric_lab.sim.summary import Slo, parse_share

    given = scenario.values(more)
    roles, instances = given.pop("roles", None), given.pop("instances", None)
    profile, orders = given.pop("profile", DEFAULT_PROFILE), given.pop("local_order", [])
    pools = None if roles is None else Roles.of(roles)
    split_settings = more["split_settings"]
    pooled = pools is not None and bool(pools.decode)
    choices = _choices(policy or COMPARED)
    planned = not pooled and not more["split"] and any(choice.base == PLANNER for choice in choices)
    if planned:
        more["split_settings"] = None  # the planner's default split
    swept, settings = _options(more)
    planners = {"kind": "apart", **option_values.parse_settings(split_settings or "")}
    of_planner = {"split": option_values.canonical("split", planners)} if planned and split_settings else {}
    if "priority" in orders and settings.get("priority", "none") == "none":
        raise typer.BadParameter("priority needs --priority uniboost or vtc", param_hint="--local-order")
    splits, moves = swept["split"], swept["rebalance"]
    if "decode_profile" in given and not pooled:
        raise typer.BadParameter("needs --roles with a decode pool", param_hint="--decode-profile")
    if "migration_by" in given and not any(move != "none" for move in moves):
        raise typer.BadParameter("needs --rebalance", param_hint="--migration-by")
    fetches = settings.get("prefix_fetch", "none") != "none"
    if not (pooled or planned or any(map(_several_segments, _ways([], splits, moves)))):
        told = {
            "--decode-policy": decode_policy, "--binding": given.get("binding"),
            "--prefill": given.get("prefill"), "--transfer": None if fetches else given.get("transfer"),
        }  # fmt: skip
        for name, value in told.items():
            if value is not None:
                raise typer.BadParameter(
                    "needs --roles with a decode pool (16P64D), or --split, --rebalance or --prefix-fetch",
                    param_hint=name,
                )
    to_stdout = json_ is not None and str(json_) == "-"
    check_file("--json", None if to_stdout else json_)
    check_file("--report", report)
    if report is not None or figures is not None:
        from lmetric_lab.sim.plots import require_matplotlib

        require_matplotlib()
    seconds = _choices(decode_policy or ["least_requests"])
    settings |= {name: Scenario.model_fields[name].default for name in _STATED} | given
    taken = TraceChoice(
        path=str(trace), label=trace_label(str(trace)), start=start, format=format, closed_loop=closed_loop,
        duration=duration, requests=requests, max_input_tokens=max_input_tokens, prefixes=prefixes,
        skip_bad_lines=skip_bad_lines, session_rate=session_rate,
    )  # fmt: skip

    def splits_by(choice: PolicyChoice, ways: dict[str, Any]) -> bool:
        if "split" in ways:
            return option_values.parse("split", ways["split"]) is not None
        return not pooled and options.default_of("split", choice.base) is not None

    setups = [
        Setup(
            trace=taken, policy=choice, decode_policy=second, profile=profile, speed=speed, seed=seed,
            instances=len(resolve_fleet(profile, instances)) if pools is None else pools.instances,
            roles=None if pools is None else str(pools),
            block_tokens=block_tokens,
            settings=settings | ways | (of_planner if choice.base == PLANNER else {}),
            measure=parse_share(measure), slo=Slo(slo_ttft, slo_tpot),
        )
        for choice in choices
        for ways in _ways(orders, splits, moves)
        for second in (seconds if pooled or _several_segments(ways) or splits_by(choice, ways) else [None])
        for seed in range(seeds)
    ]  # fmt: skip
    results = _run(setups, jobs)
    warn_unscored(results)
    if to_stdout:
        write_results(results, None)
        note(verdict(results))
    else:
        print_results(results)
        print_text(verdict(results))
        if json_ is not None:  # last: a full disk then costs only the file
            write_results(results, json_)
    if report is not None or figures is not None:
        from lmetric_lab.cli.results import write_report

        write_report(results, f"{taken.label}: {len(setups) // seeds} policies", report, figures)
    for path in (report, figures):
        if path is not None:
            note(f"wrote {path}")


def _choices(texts: Iterable[str]) -> list[PolicyChoice]:
    """The policies in these texts, without duplicates."""
    from lmetric_lab.sim.setups import PolicyChoice, split_policies

    parsed = (PolicyChoice.parse(text) for text in split_policies(texts))
    choices = list({choice.label: choice for each in parsed for choice in each}.values())
    for choice in choices:
        choice.build()
    return choices


def _options(flags: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The values of each swept option, and the settings of the other options."""
    from lmetric import option_values, options
    from lmetric._core import LmetricError
    from lmetric.cli import routing
    from lmetric_lab.sim.setups import split_policies

    swept: dict[str, list[Any]] = {}
    plain: dict[str, Any] = {}
    for what in options.OPTIONS:
        value, settings = flags.pop(what), option_values.parse_settings(flags.pop(f"{what}_settings") or "")
        if what in routing.SWEPT:
            each: list[Any] = list(dict.fromkeys(split_policies(value or [])))
        else:
            each = [] if value is None else [value]
        if settings:
            each = _with_settings(what, each, settings)
        try:
            found = [option_values.canonical(what, value) for value in each]
        except LmetricError as error:
            raise typer.BadParameter(str(error), param_hint="--" + what.replace("_", "-")) from None
        if what in routing.SWEPT:
            swept[what] = found
        elif found:
            plain[what] = found[0]
    return swept, plain


def _with_settings(what: str, values: list[Any], settings: dict[str, str]) -> list[Any]:
    """The values, with these settings added to the only value that is not none."""
    from lmetric import option_values, options

    kept = [value for value in values if value != "none"]
    if options.SELECTORS[what] == "kind" and len(kept) != 1:
        flag = "--" + what.replace("_", "-")
        raise typer.BadParameter(f"needs one kind: {flag} {'|'.join(option_values.classes(what))}",
                                 param_hint=f"{flag}-settings")  # fmt: skip
    values = values or [None]
    as_mapping = option_values.as_mapping
    return [value if value == "none" else as_mapping(what, value) | settings for value in values]


def _ways(orders: list[str], splits: list[Any], moves: list[Any]) -> list[dict[str, Any]]:
    """The settings of each combination of these values."""
    given = {"local_order": orders, "split": splits, "rebalance": moves}
    named = {name: values for name, values in given.items() if values}
    return [dict(zip(named, each, strict=True)) for each in product(*named.values())]


def _several_segments(ways: dict[str, Any]) -> bool:
    """Whether requests can change their instance without prefill and decode pools."""
    return any(ways.get(name, "none") != "none" for name in ("split", "rebalance"))


def _run(setups: list[Setup], jobs: int | None) -> list[Result]:
    """Every run, in the order of `setups`."""
    from lmetric.cli.show import note, progress
    from lmetric_lab.cli.trace import report_bad_lines
    from lmetric_lab.sim.backends import Threads
    from lmetric_lab.sim.setups import run
    from lmetric_lab.sim.study import Library

    library = Library()
    workload = library.workload(setups[0])
    report_bad_lines(workload.trace.bad_lines, note)
    found: dict[int, Result] = {}
    with progress("runs") as shown:
        bar = shown.add_task("", total=len(setups))
        items = [(index, workload) for index in range(len(setups))]
        for index, result in Threads(jobs).map(lambda index, it: run(setups[index], it), items):
            found[index] = result
            shown.update(bar, advance=1)
    return [found[index] for index in range(len(setups))]
