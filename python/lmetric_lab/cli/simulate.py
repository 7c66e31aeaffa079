"""``lmetric-router simulate``: simulates policies on a trace with a fleet of engines."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli import routing
from lmetric.cli.help import BASIC, DISAGGREGATION, ENGINES, POLICY, RESULTS, TRACE
from lmetric.defaults import DEFAULT_POLICY, PLANNER
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
from lmetric_lab.defaults import DEFAULT_PROFILE, SLICE

if TYPE_CHECKING:
    from lmetric_lab.sim.setups import PolicyChoice, Result, Setup
    from lmetric_lab.sim.study import Cell

Signals = StrEnum("Signals", {"exact": "exact", "step_end": "step_end", "delayed": "delayed"})
Admission = StrEnum("Admission", {"reserve": "reserve", "vllm": "vllm"})
Index = StrEnum("Index", {"exact": "exact", "approximate": "approximate"})
TierUse = StrEnum("TierUse", {"auto": "auto", "all": "all", "off": "off"})
Binding = StrEnum("Binding", {"early": "early", "late": "late"})
Prefill = StrEnum("Prefill", {"queues": "queues", "unlimited": "unlimited"})
MoveBy = StrEnum("MoveBy", {"fetch": "fetch", "recompute": "recompute"})


_SIGNALS = "Load reports and routers"


def _command(
    trace: TraceFile = SLICE,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Policy names, linear(lam=0.7), scores, or all; repeatable.",
            show_default="vllm, lmetric",
            rich_help_panel=BASIC,
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of engines.", show_default="16, or as --profile gives", rich_help_panel=BASIC
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="16P64D",
            help="Prefill and decode pools, instead of --instances.",
            show_default="none",
            rich_help_panel=DISAGGREGATION,
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
    binding: Annotated[
        Binding | None,
        typer.Option(
            help="With --roles: choose the decode engine on arrival or after prefill.",
            show_default="early",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    prefill: Annotated[
        Prefill | None,
        typer.Option(
            help="With --roles: prompts queue, or each takes only its own time.",
            show_default="queues",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(
            metavar="GB/S[,layers]",
            help="Bandwidth of KV transfers, also with fixed=SECONDS per transfer; or none.",
            show_default="50",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    migration_by: Annotated[
        MoveBy | None,
        typer.Option(
            help="With --rebalance: the KV cache is sent, or the target computes it again.",
            show_default="fetch, as in serve",
            rich_help_panel=DISAGGREGATION,
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="Step times: a shipped profile or a YAML file; mixed fleets: '8 NAME + 8 NAME'.",
            rich_help_panel=BASIC,
        ),
    ] = DEFAULT_PROFILE,
    decode_profile: Annotated[
        str | None,
        typer.Option(
            help="With --roles: profile of decode instances.",
            show_default="--profile",
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
    signals: Annotated[
        Signals,
        typer.Option(help="How current the engine state is that policies read.", rich_help_panel=_SIGNALS),
    ] = Signals.exact,
    admission: Annotated[
        Admission, typer.Option(help="How engines admit requests.", rich_help_panel=ENGINES)
    ] = Admission.reserve,
    local_order: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Order inside an engine (docs/research/local_orders.md); settings in "
            "parentheses: uniboost(gamma=0.2).",
            show_default="fcfs",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    order_slo: Annotated[
        float | None,
        typer.Option(
            help="Order slo: maximum seconds of a step with decodes.",
            show_default="0.1",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    order_think_slo: Annotated[
        float | None,
        typer.Option(
            help="Order slo: maximum seconds of a step with only reasoning tokens.",
            show_default="--order-slo",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    think_slo: Annotated[
        float | None,
        typer.Option(
            help="Goodput: maximum seconds before a reasoning token.",
            show_default="0.1",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    preempt: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="How preempted requests get their KV back: recompute, or swap:GB/S[,host=GB].",
            show_default="recompute",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    cached_answers: Annotated[
        bool,
        typer.Option(
            "--cached-answers",
            help="The next turn's prompt finds the blocks of an answer; needs --admission vllm.",
            rich_help_panel=ENGINES,
        ),
    ] = False,
    changes: Annotated[
        str | None,
        typer.Option(
            "--changes",
            metavar="CHANGES",
            rich_help_panel=BASIC,
            show_default="none",
            help="Instances that join and leave: '600 join 8, 1200 leave 3'.",
        ),
    ] = None,
    host_tier: Annotated[
        str | None,
        typer.Option(
            metavar="TIMES[,GB/S]",
            help="Host memory with a copy of the KV blocks: capacity relative to the GPU's, and bandwidth.",
            show_default="none",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    tiers: Annotated[
        TierUse | None,
        typer.Option(
            help="Tiers below the GPU whose blocks count in scores.",
            show_default="auto",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    tier_load_ratio: Annotated[
        float | None,
        typer.Option(
            help="Seconds to load a token from such a tier over seconds to compute it.",
            show_default="0.02",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    index: Annotated[
        Index,
        typer.Option(
            help="Source of the KV index: the engines' events, or the sent prompts.", rich_help_panel=_SIGNALS
        ),
    ] = Index.exact,
    report_period: Annotated[
        float | None,
        typer.Option(
            help="Delayed signals: seconds between load reports.", show_default="1", rich_help_panel=_SIGNALS
        ),
    ] = None,
    event_delay: Annotated[
        float | None,
        typer.Option(
            help="Delayed signals: seconds until a cache event arrives.",
            show_default="0.02",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    token_stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Engine steps between token reports to the router.",
            show_default="1",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    routers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of routers; each request arrives at one of them.",
            show_default="1",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    sharing: Annotated[
        float | None,
        typer.Option(
            help="Seconds between load messages among the routers.",
            show_default="never",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            help="Profile for TTFT predictions.", show_default="the engines' own", rich_help_panel=POLICY
        ),
    ] = None,
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
        typer.Option(help="Use S seconds of the trace.", show_default="all", rich_help_panel=TRACE),
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
    """Simulate policies on a trace.

    The report has latencies, hit rates, goodput and load imbalance.
    The simulator runs the server's router core and policies. An hour of trace takes about a second.
    The same command always gives the same figures. Ctrl-C prints nothing and exits with 130.
    """
    from lmetric import options
    from lmetric.cli.show import note, print_text
    from lmetric_lab.cli.results import warn_unscored
    from lmetric_lab.queueing import HostTier, Swap
    from lmetric_lab.sim.pools import Roles, Transfer
    from lmetric_lab.sim.run import resolve_fleet
    from lmetric_lab.sim.setups import Setup, TraceChoice, trace_label
    from lmetric_lab.sim.summary import Slo, parse_share

    pools = None if roles is None else Roles.of(roles)
    orders = _orders(local_order)
    split_settings = more["split_settings"]
    pooled = pools is not None and bool(pools.decode)
    choices = _choices(policy or ["vllm", DEFAULT_POLICY])
    planned = not pooled and not more["split"] and any(choice.base == PLANNER for choice in choices)
    if planned:
        more["split_settings"] = None  # the planner's default split
    swept, settings = _options(more)
    planners = {"kind": "apart", **options.parse_settings(split_settings or "")}
    of_planner = {"split": options.canonical("split", planners)} if planned and split_settings else {}
    if "priority" in orders and settings.get("priority", "none") == "none":
        raise typer.BadParameter("priority needs --priority uniboost or vtc", param_hint="--local-order")
    splits, moves = swept["split"], swept["rebalance"]
    if decode_profile is not None and not pooled:
        raise typer.BadParameter("needs --roles with a decode pool", param_hint="--decode-profile")
    if migration_by is not None and not any(move != "none" for move in moves):
        raise typer.BadParameter("needs --rebalance", param_hint="--migration-by")
    fetches = settings.get("prefix_fetch", "none") != "none"
    if not (pooled or planned or any(map(_several_segments, _ways([], splits, moves)))):
        told = {
            "--decode-policy": decode_policy, "--binding": binding, "--prefill": prefill,
            "--transfer": None if fetches else transfer,
        }  # fmt: skip
        for name, given in told.items():
            if given is not None:
                raise typer.BadParameter(
                    "needs --roles with a decode pool (16P64D), or --split, --rebalance or --prefix-fetch",
                    param_hint=name,
                )
    Transfer.of(transfer)
    Swap.of(preempt)
    HostTier.of(host_tier)
    for name, value in (("--speed", speed), ("--duration", duration), ("--report-period", report_period)):
        if value is not None and not value > 0:
            raise typer.BadParameter(f"{value:g} is not above 0", param_hint=name)
    to_stdout = json_ is not None and str(json_) == "-"
    check_file("--json", None if to_stdout else json_)
    check_file("--report", report)
    if report is not None or figures is not None:
        from lmetric_lab.sim.figures import require_matplotlib

        require_matplotlib()
    seconds = _choices(decode_policy or ["least_requests"])
    settings |= {"signals": str(signals), "admission": str(admission), "index": str(index)}
    optional = {
        "report_period_seconds": report_period, "event_delay_seconds": event_delay,
        "token_stride": token_stride, "order_slo": order_slo, "routers": routers, "sharing_seconds": sharing,
        "order_think_slo": order_think_slo, "think_slo_seconds": think_slo,
        "preempt": preempt, "host_tier": host_tier, "changes": changes,
        "cached_answers": cached_answers or None,
        "tiers": tiers and str(tiers), "tier_load_ratio": tier_load_ratio,
        "predictor": predictor, "binding": binding and str(binding), "prefill": prefill and str(prefill),
        "transfer": transfer, "decode_profile": decode_profile,
        "migration_by": migration_by and str(migration_by),
    }  # fmt: skip
    settings |= {name: value for name, value in optional.items() if value is not None}
    taken = TraceChoice(
        path=str(trace), label=trace_label(str(trace)), start=start, format=format, closed_loop=closed_loop,
        duration=duration, requests=requests, max_input_tokens=max_input_tokens, prefixes=prefixes,
        skip_bad_lines=skip_bad_lines, session_rate=session_rate,
    )  # fmt: skip

    def splits_by(choice: PolicyChoice, ways: dict[str, Any]) -> bool:
        default = None if pooled else options.default_of("split", choice.base)
        return options.parse("split", ways["split"]) is not None if "split" in ways else default is not None

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
    if to_stdout or json_ is not None:
        _write_json(results, None if to_stdout else json_)
    if to_stdout:
        note(_verdict(results))
    else:
        _print(results)
        print_text(_verdict(results))
    if report is not None or figures is not None:
        from lmetric_lab.cli.results import write_report

        write_report(results, f"{taken.label}: {len(setups) // seeds} policies", report, figures)
    for path in (report, figures):
        if path is not None:
            note(f"wrote {path}")


command = routing.command(_command, routing.parameters(server=False))


def _choices(texts: list[str]) -> list[PolicyChoice]:
    """The policies in these texts, without duplicates."""
    from lmetric_lab.sim.setups import PolicyChoice, split_policies

    parsed = (PolicyChoice.parse(text) for text in split_policies(texts))
    choices = list({choice.label: choice for each in parsed for choice in each}.values())
    for choice in choices:
        choice.build()
    return choices


def _orders(texts: list[str] | None) -> list[str]:
    """The local orders in these texts, without duplicates; empty without texts."""
    from lmetric_lab.queueing import checked_order
    from lmetric_lab.sim.setups import split_policies

    try:
        return list(dict.fromkeys(map(checked_order, split_policies(texts or []))))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--local-order") from None


def _options(flags: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The values of each swept option, and the settings of the other options."""
    from lmetric import options
    from lmetric._core import LmetricError
    from lmetric_lab.sim.setups import split_policies

    swept: dict[str, list[Any]] = {}
    plain: dict[str, Any] = {}
    for what in options.OPTIONS:
        value = flags[what]
        if what in routing.SWEPT:
            each = list(dict.fromkeys(split_policies(value or [])))
        else:
            each = [] if value is None else [value]
        if settings := options.parse_settings(flags[f"{what}_settings"] or ""):
            each = _with_settings(what, each, settings)
        try:
            found = [options.canonical(what, value) for value in each]
        except LmetricError as error:
            raise typer.BadParameter(str(error), param_hint="--" + what.replace("_", "-")) from None
        if what in routing.SWEPT:
            swept[what] = found
        elif found:
            plain[what] = found[0]
    return swept, plain


def _with_settings(what: str, values: list[Any], settings: dict[str, str]) -> list[Any]:
    """The values, with these settings added to the only value that is not none."""
    from lmetric import options

    kept = [value for value in values if value != "none"]
    if options.SELECTORS[what] == "kind" and len(kept) != 1:
        flag = "--" + what.replace("_", "-")
        raise typer.BadParameter(f"needs one kind: {flag} {'|'.join(options.classes(what))}",
                                 param_hint=f"{flag}-settings")  # fmt: skip
    values = values or [None]
    return [value if value == "none" else options.as_mapping(what, value) | settings for value in values]


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


def _write_json(results: list[Result], path: Path | None) -> None:
    from dataclasses import asdict
    from importlib.metadata import version

    from lmetric.cli.show import print_json, write_json

    setup = asdict(results[0].setup)
    for name in ("policy", "decode_policy", "seed", "fraction_of_max"):
        del setup[name]
    for name in ("local_order", "split", "rebalance"):
        setup["settings"].pop(name, None)  # differs between runs
    told = {
        "version": version("lmetric-router"),
        "setting": setup,
        "runs": [asdict(result.figures) for result in results],
    }
    if path is None:
        print_json(told)
    else:
        write_json(path, told)


def _print(results: list[Result]) -> None:
    from lmetric.cli.show import print_text
    from lmetric_lab.sim.study import cells

    first = results[0]
    wall = sum(result.figures.wall_seconds for result in results)
    seeds = 1 + max(result.setup.seed for result in results)
    spread = f"mean over {seeds} seeds ± half their range; " if seeds > 1 else ""
    print_text(
        f"{first.figures.requests} requests measured, {first.arrivals_per_second:.2f} requests/s, "
        f"{first.setup.roles or first.setup.instances} instances of {first.setup.profile}; {spread}"
        f"{len(results)} runs in {wall:.2f} s of run time"
    )
    print_tables(cells(results))


def print_tables(cells: list[Cell]) -> None:
    """Prints the figures of one load, one table per kind."""
    from lmetric.cli.show import print_table
    from lmetric_lab.sim.table import rows, table_of

    slo = str(cells[0].results[0].setup.slo)
    table = table_of(result for cell in cells for result in cell.results)
    if not slo:
        table = tuple((head, columns) for head, columns in table if head != "goodput")
    values = rows(cells, table)
    labels = _labels(cells)
    position = 0
    merged = []
    for head, columns in table:
        part = [row[position : position + len(columns)] for row in values]
        position += len(columns)
        if len(columns) > 3:
            body = [[label, *_cells(row)] for label, row in zip(labels, part, strict=True)]
            print_table([head, *(column.title for column in columns)], body, spare=("p99.9",))
        else:
            merged.append((head, columns, part))
    titles = [f"{head} {column.title}" for head, columns, _ in merged for column in columns]
    body = [
        [label, *(text for _, _, part in merged for text in _cells(part[index]))]
        for index, label in enumerate(labels)
    ]
    print_table([f"goodput: {slo}" if slo else "", *titles], body)


def _verdict(results: list[Result]) -> str:
    from functools import partial

    from lmetric_lab.cli.verdict import Entry, sentence
    from lmetric_lab.sim.ranking import measured_of
    from lmetric_lab.sim.study import cells, latency

    found = cells(results)
    return sentence(
        [
            Entry(
                label,
                cell.over_seeds(partial(latency, name="ttft_seconds", part="mean")),
                cell.over_seeds(partial(latency, name="tpot_seconds", part="mean")),
                requests=sum(result.figures.requests for result in cell.results),
                unfinished=measured.unfinished,
                seeds=len(cell.results),
                first_token_share=measured.first_token_share,
            )
            for label, cell, measured in zip(_labels(found), found, map(measured_of, found), strict=True)
        ]
    )


def _labels(cells: list[Cell]) -> list[str]:
    """The policy of each cell, with the settings that differ between the cells."""
    firsts = [cell.results[0] for cell in cells]
    columns = [
        [_way(each, figure, setting) for each in firsts]
        for figure, setting in (("local_order", ""), ("split", "split"), ("reschedule", "rebalance"))
    ]
    shown = [names for names in columns if len(set(names)) > 1]
    return [", ".join([cell.policy, *each]) for cell, *each in zip(cells, *shown, strict=True)]


def _way(result: Result, figure: str, setting: str) -> str:
    """The local order, split or rebalance of a result, with its settings."""
    from lmetric.options import shown

    given = result.setup.settings.get(setting)
    return shown(given) if isinstance(given, Mapping) else str(getattr(result.figures, figure))


def _cells(row: list[Any]) -> list[str]:
    return ["–" if value is None else str(value) for value in row]
