"""``lmetric-router simulate``: a trace over a fleet of simulated engines, policy by policy."""

from __future__ import annotations

from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lmetric.cli.options import (
    ClosedLoop,
    Format,
    MaxInputTokens,
    Requests,
    SkipBadLines,
    SloTpot,
    SloTtft,
    Speed,
    Start,
    TraceFile,
    check_file,
)
from lmetric.defaults import (
    DEFAULT_PROFILE,
    PLANNER,
    Priority,
    Reschedule,
    default_split,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmetric.sim.setups import PolicyChoice, Result, Setup
    from lmetric.sim.study import Cell

Signals = StrEnum("Signals", {"exact": "exact", "step_end": "step_end", "delayed": "delayed"})
Admission = StrEnum("Admission", {"reserve": "reserve", "vllm": "vllm"})
Index = StrEnum("Index", {"exact": "exact", "approximate": "approximate"})
Binding = StrEnum("Binding", {"early": "early", "late": "late"})
Prefill = StrEnum("Prefill", {"queues": "queues", "unlimited": "unlimited"})


def command(
    trace: TraceFile,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Names, linear(lam=0.7), scores, or all; repeatable [default: vllm, lmetric].",
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(min=1, help="Engines in the fleet [default: 16, or as --profile says]."),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="16P64D", help="Pools in place of --instances: so many prefill, so many decode."
        ),
    ] = None,
    decode_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X,Y,…",
            help="With --roles: where requests decode, each with each --policy [default: least_requests].",
        ),
    ] = None,
    binding: Annotated[
        Binding | None,
        typer.Option(help="With --roles: that is chosen on arrival, or after the prefill [default: early]."),
    ] = None,
    prefill: Annotated[
        Prefill | None,
        typer.Option(help="With --roles: prompts queue, or each takes its own time [default: queues]."),
    ] = None,
    transfer: Annotated[
        str | None,
        typer.Option(
            metavar="GB/S[,layers]",
            help="Where KV moves: how fast, also with fixed=SECONDS; or none [default: 50].",
        ),
    ] = None,
    pull: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Prefixes are pulled from who holds them: none, on, or least=TOKENS,most=PULLS,… "
            "[default: none; with planner: on].",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="What steps cost: a shipped profile, or a YAML file; unequal engines: '8 NAME + 8 NAME'."
        ),
    ] = DEFAULT_PROFILE,
    decode_profile: Annotated[
        str | None, typer.Option(help="With --roles: of instances that only decode [default: --profile].")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block [default: the profile's].")
    ] = None,
    speed: Speed = 1.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, with seeds 0 to N - 1.")] = 1,
    signals: Annotated[
        Signals, typer.Option(help="What policies see of the engines, and when.")
    ] = Signals.exact,
    admission: Annotated[Admission, typer.Option(help="How engines admit requests.")] = Admission.reserve,
    local_order: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help="Order inside an engine (docs/local_orders.md), settings in parentheses: "
            "uniboost(gamma=0.2) [default: fcfs].",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B",
            help="Where requests are cut: none, libra, apart [default: none; with planner: apart].",
        ),
    ] = None,
    reschedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,…",
            help=f"How running requests move: {', '.join(get_args(Reschedule))} [default: none].",
        ),
    ] = None,
    order_slo: Annotated[
        float | None, typer.Option(help="Seconds a step with decodes may take under slo [default: 0.1].")
    ] = None,
    order_think_slo: Annotated[
        float | None, typer.Option(help="The same where only thoughts are made [default: --order-slo].")
    ] = None,
    think_slo: Annotated[
        float | None, typer.Option(help="Seconds before a thought that count as good [default: 0.1].")
    ] = None,
    split_settings: Annotated[
        str | None,
        typer.Option(metavar="NAME=N,…", help="Of --split libra or apart, e.g. parts=3,lengths_given=1."),
    ] = None,
    preempt: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="What becomes of the KV of requests that go back: recompute, or swap:GB/S[,host=GB] "
            "[default: recompute].",
        ),
    ] = None,
    priority: Annotated[
        Priority | None,
        typer.Option(help="What --local-order priority goes by: the router's numbers [default: none]."),
    ] = None,
    index: Annotated[
        Index, typer.Option(help="KV index: fed by the engines' events, or by what was sent.")
    ] = Index.exact,
    guard: Annotated[
        bool | None,
        typer.Option("--guard/--no-guard", help="Hot-spot guard [default: as the policy declares]."),
    ] = None,
    guard_window: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Guard: window that it takes shares over [default: 60]."),
    ] = None,
    guard_period: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Guard: time between two looks [default: 1].")
    ] = None,
    guard_classes: Annotated[
        int | None, typer.Option(metavar="N", help="Guard: prefixes counted at a time [default: 64].")
    ] = None,
    guard_min_requests: Annotated[
        int | None, typer.Option(metavar="N", help="Guard: fewest requests of a suspect [default: 16].")
    ] = None,
    guard_phase2_factor: Annotated[
        float | None,
        typer.Option(metavar="F", help="Guard: requests a holder before it filters [default: 2]."),
    ] = None,
    guard_release_factor: Annotated[
        float | None, typer.Option(metavar="F", help="Guard: fraction at which alarms end [default: 0.8].")
    ] = None,
    report_period: Annotated[
        float | None, typer.Option(help="With delayed signals: seconds between load reports.")
    ] = None,
    event_delay: Annotated[
        float | None, typer.Option(help="With delayed signals: seconds until a cache event arrives.")
    ] = None,
    token_stride: Annotated[
        int | None, typer.Option(min=1, help="Steps after which the router hears of tokens [default: 1].")
    ] = None,
    routers: Annotated[
        int | None,
        typer.Option(min=1, help="Routers side by side; each request comes to one [default: 1]."),
    ] = None,
    sharing: Annotated[
        float | None,
        typer.Option(
            help="Seconds between two times that they tell each other of their load [default: never]."
        ),
    ] = None,
    predictor: Annotated[
        str | None, typer.Option(help="Profile behind predicted TTFTs [default: the engines' own].")
    ] = None,
    measure: Annotated[
        str, typer.Option(metavar="A:B", help="Share of the requests that counts, e.g. 0.1:0.9.")
    ] = "0:1",
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    start: Start = 0.0,
    duration: Annotated[float | None, typer.Option(help="Take this many trace seconds.")] = None,
    requests: Requests = None,
    max_input_tokens: MaxInputTokens = None,
    format: Format = None,
    closed_loop: ClosedLoop = None,
    prefixes: Annotated[
        bool, typer.Option("--prefixes/--no-prefixes", help="Whether requests share prefixes.")
    ] = True,
    skip_bad_lines: SkipBadLines = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once [default: cores].")] = None,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write figures as JSON; -: to stdout.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a report, one HTML file.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report's figures as PNGs.")
    ] = None,
) -> None:
    """Play a trace over simulated engines under several policies; print latencies, hits, goodput, imbalance.

    The router and its policies are those of the server; time is simulated, so an hour takes a second. The
    same command gives the same figures. Ctrl-C ends without any, with exit code 130.
    """
    from lmetric.cli.show import note, warn_unscored
    from lmetric.options import split_names
    from lmetric.queueing import Swap
    from lmetric.sim.pools import Roles, Transfer
    from lmetric.sim.pulls import Pull
    from lmetric.sim.run import resolve_fleet
    from lmetric.sim.setups import Setup, TraceChoice, trace_label
    from lmetric.sim.summary import Slo, parse_share

    pools = None if roles is None else Roles.of(roles)
    orders = _orders(local_order)
    if "priority" in orders and priority in (None, "none"):
        raise typer.BadParameter("priority needs --priority uniboost or vtc", param_hint="--local-order")
    splits = _each("--split", split, split_names())
    moves = _each("--reschedule", reschedule, get_args(Reschedule))
    pooled = pools is not None and bool(pools.decode)
    choices = _choices(policy or ["vllm", "lmetric"])
    planned = not pooled and any(choice.base == PLANNER for choice in choices)
    cut = {name for name in splits or (["apart"] if planned else []) if name != "none"}
    if split_settings is not None and len(cut) != 1:
        raise typer.BadParameter("needs --split libra or apart, and one alone", param_hint="--split-settings")
    cutting = {} if split_settings is None else {"split_settings": split_settings}
    if decode_profile is not None and not pooled:
        raise typer.BadParameter("needs --roles with a decode pool", param_hint="--decode-profile")
    planned &= not splits
    if not (pooled or planned or any(map(_several_segments, _ways([], splits, moves)))):
        told = {
            "--decode-policy": decode_policy, "--binding": binding, "--prefill": prefill,
            "--transfer": None if pull else transfer,
        }  # fmt: skip
        for name, given in told.items():
            if given is not None:
                raise typer.BadParameter(
                    "needs --roles with a decode pool, e.g. 16P64D, or --split, --reschedule or --pull",
                    param_hint=name,
                )
    Transfer.of(transfer)
    Pull.of(pull)
    Swap.of(preempt)
    for name, value in (("--speed", speed), ("--duration", duration), ("--report-period", report_period)):
        if value is not None and not value > 0:
            raise typer.BadParameter(f"{value:g} is not above 0", param_hint=name)
    to_stdout = json_ is not None and str(json_) == "-"
    check_file("--json", None if to_stdout else json_)
    check_file("--report", report)
    if report is not None or figures is not None:
        from lmetric.sim.figures import require_matplotlib

        require_matplotlib()
    seconds = _choices(decode_policy or ["least_requests"])
    settings: dict[str, Any] = {"signals": str(signals), "admission": str(admission), "index": str(index)}
    optional = {
        "guard": guard, "guard_window_seconds": guard_window, "guard_period_seconds": guard_period,
        "guard_classes": guard_classes, "guard_min_requests": guard_min_requests,
        "guard_phase2_factor": guard_phase2_factor, "guard_release_factor": guard_release_factor,
        "report_period_seconds": report_period, "event_delay_seconds": event_delay,
        "token_stride": token_stride, "order_slo": order_slo, "routers": routers, "sharing_seconds": sharing,
        "order_think_slo": order_think_slo, "think_slo_seconds": think_slo,
        "preempt": preempt, "priority": priority,
        "predictor": predictor, "binding": binding and str(binding), "prefill": prefill and str(prefill),
        "transfer": transfer, "pull": pull, "decode_profile": decode_profile,
    }  # fmt: skip
    settings |= {name: value for name, value in optional.items() if value is not None}
    taken = TraceChoice(
        path=str(trace), label=trace_label(str(trace)), start=start, format=format, closed_loop=closed_loop,
        duration=duration, requests=requests, max_input_tokens=max_input_tokens, prefixes=prefixes,
        skip_bad_lines=skip_bad_lines,
    )  # fmt: skip

    def cuts(choice: PolicyChoice, ways: dict[str, str]) -> bool:
        return ways.get("split", "none" if pooled else default_split(choice.base)) != "none"

    setups = [
        Setup(
            trace=taken, policy=choice, decode_policy=second, profile=profile, speed=speed, seed=seed,
            instances=len(resolve_fleet(profile, instances)) if pools is None else pools.instances,
            roles=None if pools is None else str(pools),
            block_tokens=block_tokens,
            settings=settings | ways | (cutting if cuts(choice, ways) else {}),
            measure=parse_share(measure), slo=Slo(slo_ttft, slo_tpot),
        )
        for choice in choices
        for ways in _ways(orders, splits, moves)
        for second in (seconds if pooled or _several_segments(ways) or cuts(choice, ways) else [None])
        for seed in range(seeds)
    ]  # fmt: skip
    results = _run(setups, jobs)
    warn_unscored(results)
    if to_stdout or json_ is not None:
        _write_json(results, None if to_stdout else json_)
    if not to_stdout:
        _print(results)
    if report is not None or figures is not None:
        from lmetric.cli.show import write_report

        write_report(results, f"{taken.label}: {len(setups) // seeds} policies", report, figures)
    for path in (report, figures):
        if path is not None:
            note(f"wrote {path}")


def _choices(texts: list[str]) -> list[PolicyChoice]:
    """The policies that these texts name, each once."""
    from lmetric.sim.setups import PolicyChoice, split_policies

    parsed = (PolicyChoice.parse(text) for text in split_policies(texts))
    choices = list({choice.label: choice for each in parsed for choice in each}.values())
    for choice in choices:
        choice.build()
    return choices


def _orders(texts: list[str] | None) -> list[str]:
    """The local orders that these texts name, each once; none: nothing was given."""
    from lmetric.queueing import checked_order
    from lmetric.sim.setups import split_policies

    try:
        return list(dict.fromkeys(map(checked_order, split_policies(texts or []))))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--local-order") from None


def _each(option: str, texts: list[str] | None, allowed: Sequence[str]) -> list[str]:
    """The names that these texts give, each once; none: nothing was given."""
    names = [name.strip() for text in texts or [] for name in text.split(",")]
    if wrong := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"{wrong[0]!r} is not one of {', '.join(allowed)}", param_hint=option)
    return list(dict.fromkeys(names))


def _ways(orders: list[str], splits: list[str], moves: list[str]) -> list[dict[str, str]]:
    """As settings, each combination of what was given."""
    given = {"local_order": orders, "split": splits, "reschedule": moves}
    named = {name: values for name, values in given.items() if values}
    return [dict(zip(named, each, strict=True)) for each in product(*named.values())]


def _several_segments(ways: dict[str, str]) -> bool:
    """Whether requests may go on elsewhere than they begin, without pools."""
    return any(ways.get(name, "none") != "none" for name in ("split", "reschedule"))


def _run(setups: list[Setup], jobs: int | None) -> list[Result]:
    """Every run, in the order of `setups`."""
    from lmetric.cli.show import note, progress
    from lmetric.cli.trace import report_bad_lines
    from lmetric.sim.backends import Threads
    from lmetric.sim.setups import run
    from lmetric.sim.study import Library

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
    for name in ("local_order", "split", "split_settings", "reschedule"):
        setup["settings"].pop(name, None)  # each run has its own
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
    from lmetric.sim.study import cells

    first = results[0]
    wall = sum(result.figures.wall_seconds for result in results)
    seeds = 1 + max(result.setup.seed for result in results)
    spread = f"mean over {seeds} seeds ± half their range; " if seeds > 1 else ""
    print(
        f"{first.figures.requests} requests measured, {first.arrivals_per_second:.2f} arriving a second, "
        f"{first.setup.roles or first.setup.instances} instances of {first.setup.profile}; {spread}"
        f"{len(results)} runs in {wall:.2f} s of computing"
    )
    print_tables(cells(results))


def print_tables(cells: list[Cell]) -> None:
    """The figures of one load, a table for each kind."""
    from lmetric.cli.show import print_table
    from lmetric.sim.table import rows, table_of

    table = table_of(result for cell in cells for result in cell.results)
    values = rows(cells, table)
    slo = str(cells[0].results[0].setup.slo)
    figures = [cell.results[0].figures for cell in cells]
    columns_by_name = {
        name: [str(getattr(each, name)) for each in figures]
        for name in ("local_order", "split", "reschedule")
    }
    told = [names for names in columns_by_name.values() if len(set(names)) > 1]
    labels = [", ".join([cell.policy, *each]) for cell, *each in zip(cells, *told, strict=True)]
    position = 0
    merged = []
    for head, columns in table:
        part = [row[position : position + len(columns)] for row in values]
        position += len(columns)
        if len(columns) > 3:
            body = [[label, *_cells(row)] for label, row in zip(labels, part, strict=True)]
            print_table([head, *(column.title for column in columns)], body)
        else:
            merged.append((head, columns, part))
    titles = [f"{head} {column.title}" for head, columns, _ in merged for column in columns]
    body = [
        [label, *(text for _, _, part in merged for text in _cells(part[index]))]
        for index, label in enumerate(labels)
    ]
    print_table([f"goodput: {slo or 'no SLO given'}", *titles], body)


def _cells(row: list[Any]) -> list[str]:
    return ["–" if value is None else str(value) for value in row]
