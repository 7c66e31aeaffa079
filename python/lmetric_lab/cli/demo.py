"""``lmetric-router demo``: several policies on one trace, with emulated engines (no GPU)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from lmetric.cli.help import BASIC, ENGINES, EXPERIMENTAL, TRACE
from lmetric.cli.usage import above_zero
from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.defaults import AGENTS_PROFILE, DEFAULT_PROFILE, TOUR_ENGINES

REQUESTS, SPEED, CLOCK_SPEED = 160, 0.8, 8.0
PLAY_SECONDS = 20.0
AGENTS_CLOCK_SPEED = 10.0

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from lmetric_lab.demo import EngineState, LiveRun, Moment, Setting, Simulated
    from lmetric_lab.replay import ProgramReport, Report
    from lmetric_lab.sim.result import Run


def command(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies to compare, separated by commas; repeatable.",
            show_default=f"round_robin, vllm, {DEFAULT_POLICY}",
            rich_help_panel=BASIC,
        ),
    ] = None,
    priority: Annotated[
        list[str] | None,
        typer.Option(
            help="Request order: none, uniboost or vtc; repeatable.",
            show_default="none",
            rich_help_panel=EXPERIMENTAL,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Trace file or name, or '{synthetic: …}'.",
            show_default="the shipped slice",
            rich_help_panel=BASIC,
        ),
    ] = None,
    engines: Annotated[
        int, typer.Option(min=1, max=64, help="Number of emulated engines.", rich_help_panel=BASIC)
    ] = TOUR_ENGINES,
    requests: Annotated[
        int,
        typer.Option(
            min=1,
            max=100_000,
            help="Send the first N requests; the shipped slice has 1,000.",
            rich_help_panel=BASIC,
        ),
    ] = REQUESTS,
    speed: Annotated[
        float,
        typer.Option(
            help="Arrival rate relative to the trace, on the engines' clock.",
            callback=above_zero,
            rich_help_panel=BASIC,
        ),
    ] = SPEED,
    clock_speed: Annotated[
        float | None,
        typer.Option(
            max=1000,
            help="Speed of the engines' clock relative to real time.",
            callback=above_zero,
            show_default=f"{CLOCK_SPEED:g}; with --agents: {AGENTS_CLOCK_SPEED:g}",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    max_input_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Skip requests with longer prompts.", show_default="no limit", rich_help_panel=TRACE
        ),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests in an engine's batch.",
            show_default="as in the profile",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    routers: Annotated[
        int,
        typer.Option(
            min=1, max=16, help="Number of routers; they exchange their load.", rich_help_panel=ENGINES
        ),
    ] = 1,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Engine profile: a shipped name or a YAML file.",
            show_default=f"{DEFAULT_PROFILE}; with --agents: {AGENTS_PROFILE}",
            rich_help_panel=ENGINES,
        ),
    ] = None,
    agents: Annotated[
        bool,
        typer.Option(
            "--agents",
            help="Play agent programs on engines with small caches; compare lmetric, sticky sessions and "
            "lmetric with admission.",
            rich_help_panel=BASIC,
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the reports as JSON.", rich_help_panel=BASIC)
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Play each policy in real time, one after another; other options do, too.",
            rich_help_panel=BASIC,
        ),
    ] = False,
    play: Annotated[
        float,
        typer.Option(min=0, help="Seconds of the live part; 0: only the simulation.", rich_help_panel=BASIC),
    ] = PLAY_SECONDS,
) -> None:
    """Compare policies, without a GPU.

    First, simulated engines get recorded chat and agent programs; the table is always the same.
    Then agents play on emulated engines behind a router, whose live page you can open.

    With --live, --policy, --agents or another option, each policy plays in real time. Each run
    gets the same arrivals and new engines with empty caches. The engines model the step times of a
    GPU on a clock that runs faster than real time. TTFT and TPOT are in seconds of that clock.

    With --agents, the requests belong to agent programs. All live programs together need 10% more
    than the caches hold.
    """
    from lmetric import LmetricError, Policy, Router
    from lmetric.cli.show import note, print_json, print_text, stdout
    from lmetric.option_values import served
    from lmetric_lab.demo import Setting
    from lmetric_lab.sim.setups import split_policies

    chosen = (policy, priority, trace, clock_speed, max_input_tokens, max_sequences, profile)
    plain = chosen == (None,) * len(chosen) and (requests, speed, routers) == (REQUESTS, SPEED, 1)
    if plain and not (live or agents or as_json or engines != TOUR_ENGINES):
        _tour(play)
        return
    if clock_speed is None:
        clock_speed = AGENTS_CLOCK_SPEED if agents else CLOCK_SPEED
    if agents:
        for name, given in (
            ("--policy", policy is not None),
            ("--priority", priority is not None),
            ("--trace", trace is not None),
            ("--requests", requests != REQUESTS),
            ("--speed", speed != SPEED),
            ("--max-input-tokens", max_input_tokens is not None),
            ("--routers", routers != 1),
        ):
            if given:
                raise typer.BadParameter(
                    "--agents has its own requests and policies; remove one of the two", param_hint=name
                )
    policies = list(split_policies(policy or [])) or ["round_robin", "vllm", DEFAULT_POLICY]
    try:
        for each in policies:
            Router(Policy.from_config(each), offers="experimental")
    except LmetricError as refused:
        raise typer.BadParameter(str(refused), param_hint="--policy") from None
    known = ["none", *served("priority")]
    if wrong := [each for each in priority or () if each not in known]:
        raise typer.BadParameter(f"{wrong[0]!r} is not one of {', '.join(known)}", param_hint="--priority")
    setting = Setting(
        policies=policies,
        engines=engines,
        profile=profile or (AGENTS_PROFILE if agents else DEFAULT_PROFILE),
        clock_speed=clock_speed,
        speed=speed,
        requests=requests,
        max_input_tokens=max_input_tokens,
        priorities=priority or ["none"],
        source=trace,
        max_sequences=max_sequences,
        routers=routers,
        agents=agents,
    )
    reports = _watch(setting)
    if as_json:
        print_json({"setting": setting, "reports": reports})
        note(_verdict(reports))
    else:
        console = stdout()
        console.print(_summary(setting, reports, console.width))
        print_text(_verdict(reports))
    from lmetric_lab.cli.replay import lag_warning

    for name, report in reports.items():
        if warning := lag_warning(report):
            note(f"warning: {name}: {warning}")
        for kind, error in report.errors.items():
            note(f"{name}: {error.count} requests failed ({kind}: {error.example})")
    if any(report.interrupted for report in reports.values()):
        raise typer.Exit(130)
    if any(report.failed for report in reports.values()):
        raise typer.Exit(1)


def _tour(seconds: float) -> None:
    """The simulated comparison, then agents in real time with the live page."""
    from lmetric.cli.show import print_table, print_text
    from lmetric_lab.demo import simulated

    policies = ["round_robin", "vllm", DEFAULT_POLICY]
    found = simulated(policies)
    heads = [head for each in found for head in (f"{each.workload}: first token", "from cache")]
    rows = [[name, *(text for each in found for text in _plain(each.comparison[name]))] for name in policies]
    print_table(["policy", *heads], rows)
    print_text(_simulated_verdict(found))
    if seconds <= 0:
        return
    import uvloop

    uvloop.run(_live_part(seconds))


def _plain(run: Run) -> list[str]:
    shown = run.summary()
    ttft, hit = shown.ttft_seconds, shown.hit_ratio
    return ["–" if ttft is None else f"{ttft.mean:.2f} s", "–" if hit is None else f"{hit:.0%}"]


def _simulated_verdict(found: Sequence[Simulated]) -> str:
    parts = []
    for each in found:
        own, other = (
            each.comparison[name].summary().ttft_seconds for name in (DEFAULT_POLICY, "round_robin")
        )
        assert own is not None
        assert other is not None
        parts.append(f"{each.workload} {1 - own.mean / other.mean:.0%}")
    return (
        f"With {DEFAULT_POLICY}, the default, first tokens come sooner than with round robin: "
        f"{', '.join(parts)}. These are simulated engines, so every machine gets these figures."
    )


async def _live_part(seconds: float) -> None:
    """Plays agents at the fastest clock with which this machine keeps up."""
    import asyncio
    import sys

    from lmetric.cli.show import note, print_text
    from lmetric_lab.demo import CLOCK_SPEEDS, live_agents
    from lmetric_lab.ports import free_ports

    (port,) = free_ports(1)
    for clock_speed in CLOCK_SPEEDS:
        note(f"Starting {TOUR_ENGINES} emulated engines; their clock runs at {clock_speed:g}x real time.")
        async with live_agents(DEFAULT_POLICY, clock_speed, port, seconds=seconds) as live:
            print_text(f"Agents play for {seconds:g} s; Ctrl-C ends the demo. Live page:")
            print_text(f"{live.url}/ui")
            run = await live.play(seconds)
            if live.interrupted:
                raise typer.Exit(130)
            if not run.keeps_up and clock_speed != CLOCK_SPEEDS[-1]:
                note("This machine cannot keep up with that clock, so a slower one follows.")
                continue
            print_text(live_sentence(run))
            if sys.stdin.isatty():
                print_text(f"The page stays at {live.url}/ui until Ctrl-C.")
                await asyncio.Event().wait()
            return


def live_sentence(run: LiveRun) -> str:
    """The figures of the live part, or the reason for none."""
    report = run.report
    if not run.keeps_up or report.ttft_seconds is None:
        share = "" if run.machine_share is None else f" (its delays are {run.machine_share:.0%} of the times)"
        return (
            f"No figures of the live part: this machine cannot keep up with an engines' clock of "
            f"{run.clock_speed:g}x{share}. Stop other programs. The simulated table is not affected."
        )
    hit = "" if report.hit_rate is None else f", {report.hit_rate:.0%} of the prompt tokens from caches"
    return (
        f"Live, {DEFAULT_POLICY}: {report.completed} requests, mean time to first token "
        f"{report.ttft_seconds.mean:.2f} s on the engines' clock{hit}."
    )


def _watch(setting: Setting) -> dict[str, Report]:
    import uvloop
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from lmetric.cli.show import note, stderr
    from lmetric_lab import demo

    reports: dict[str, Report] = {}
    console = stderr()
    trace = setting.trace()
    count = len(setting.runs)
    seconds = 5 * math.ceil(setting.expected_seconds(trace) / 5)
    note(f"The demo plays about {seconds} s: {count} run{'s' * (count > 1)} of {len(trace)} requests.")

    async def play(live: Live) -> None:
        def show(moment: Moment) -> None:
            live.update(Group(_summary(setting, reports, console.width), _view(moment)), refresh=True)

        async for policy, report in demo.run(setting, trace, show):
            reports[policy] = report
            if not console.is_terminal:
                first = _ttft(report) if report.programs is None else _jct(report.programs)
                note(f"{policy}: {report.completed} of {report.requests} requests, {first}")

    with Live(
        Text("starting engines and router"), console=console, transient=True, auto_refresh=False
    ) as live:
        if not console.is_terminal:
            note(describe(setting))
        uvloop.run(play(live))
    return reports


def describe(setting: Setting) -> str:
    """The setting in words, so that readers do not take the figures for measurements of a GPU."""
    from lmetric_lab.demo import PRESSURE

    if setting.agents:
        return (
            f"Agent programs on {setting.engines} emulated engines ({setting.profile}, no GPU).\n"
            f"All live programs need {PRESSURE:g}x the engines' KV caches.\n"
            f"Times are on the engines' clock, which runs at {setting.clock_speed:g}x real time."
        )
    source = setting.source or "Mooncake's conversation trace"
    return (
        f"First {setting.requests} requests of {source} at {setting.speed:g}x speed\n"
        f"on {setting.engines} emulated engines ({setting.profile}, no GPU).\n"
        f"Times are on the engines' clock, which runs at {setting.clock_speed:g}x real time."
    )


def _view(moment: Moment) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from lmetric.cli.show import table

    player = moment.player
    first = [r.first_token - (r.sent or 0.0) for r in player.records if r.first_token is not None]
    scale = moment.clock_speed
    mean = f"mean TTFT {sum(first) / len(first) * scale:.2f} s" if first else "no token yet"
    sent = f"sent {len(player.records)} of {len(player.trace)}, {player.in_flight} in flight"
    rows = [_row(index, state) for index, state in enumerate(moment.engines)]
    columns = ["engine", "running", "waiting", "KV used", "hit rate"]
    return Group(Text(f"{moment.policy}: {sent}, {mean}"), table(columns, rows))


def _row(index: int, state: EngineState | None) -> list[str]:
    if state is None:
        return [f"engine {index}", "–", "–", "–", "–"]
    hit = "–" if state.hit_rate is None else f"{state.hit_rate:.0%}"
    return [f"engine {index}", str(state.running), str(state.waiting), f"{state.kv_usage:.0%}", hit]


def _summary(setting: Setting, reports: dict[str, Report], width: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from lmetric.cli.show import tables

    columns = ["policy", "TTFT, s", "p50", "p90", "p99", "TPOT, ms", "p99", "E2E, s", "hit %"]
    if setting.agents:
        columns = ["policy", "job completion, s", "p95", "recomputed %", "longest hold, s"]
    rows = [_figures(name, report) for name, report in reports.items()]
    return Group(Text(describe(setting)), *(tables(columns, rows, width) if rows else ()))


def _figures(name: str, report: Report) -> list[str]:
    name += " (interrupted)" if report.interrupted else ""
    if (programs := report.programs) is not None:
        times = (programs.jct_mean_seconds, programs.jct_p95_seconds)
        jct = ["–" if seconds is None else f"{seconds:.1f}" for seconds in times]
        share = "–" if programs.recomputed_share is None else f"{programs.recomputed_share * 100:.1f}"
        return [name, *jct, share, f"{programs.longest_hold_seconds:.1f}"]
    first, each = report.ttft_seconds, report.tpot_seconds
    ttft = [f"{value:.2f}" for value in (first.mean, first.p50, first.p90, first.p99)] if first else ["–"] * 4
    tpot = [f"{value * 1e3:.1f}" for value in (each.mean, each.p99)] if each else ["–"] * 2
    whole = report.e2e_seconds
    e2e = f"{whole.mean:.2f}" if whole else "–"
    hit = "–" if report.hit_rate is None else f"{report.hit_rate * 100:.1f}"
    return [name, *ttft, *tpot, e2e, hit]


def _verdict(reports: dict[str, Report]) -> str:
    from lmetric_lab.cli.replay import entry
    from lmetric_lab.cli.verdict import of_programs, sentence

    programs = {label: report.programs for label, report in reports.items() if report.programs is not None}
    if programs:
        return of_programs(programs)
    if (reason := _no_verdict(reports)) is not None:
        return reason
    return sentence([entry(label, report) for label, report in reports.items()])


def _no_verdict(reports: dict[str, Report]) -> str | None:
    """The reason for no verdict: the machine adds more than the policies differ; None: none."""
    added = [each.added_ttft_seconds for each in reports.values() if each.added_ttft_seconds is not None]
    means = sorted(each.ttft_seconds.mean for each in reports.values() if each.ttft_seconds is not None)
    if len(means) < 2 or not added or max(added) < means[1] - means[0]:
        return None
    return (
        f"No verdict: this machine added up to {max(added):.2f} s to the mean TTFT, and the two best "
        f"policies differ by {means[1] - means[0]:.2f} s. Stop other programs, or lower --clock-speed. "
        "`lmetric-router simulate --trace slice` compares the policies without this error."
    )


def _jct(programs: ProgramReport) -> str:
    mean = programs.jct_mean_seconds
    return "no complete program" if mean is None else f"mean job completion time {mean:.1f} s"


def _ttft(report: Report) -> str:
    return "no token" if report.ttft_seconds is None else f"mean TTFT {report.ttft_seconds.mean:.2f} s"
