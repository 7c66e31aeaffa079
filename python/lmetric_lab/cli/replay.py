"""``lmetric-router replay``: sends a trace to an OpenAI-compatible server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lmetric.cli.help import BASIC, ENGINES
from lmetric.cli.usage import above_zero
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
)
from lmetric_lab.defaults import SLICE

if TYPE_CHECKING:
    from lmetric_lab.cli.verdict import Entry
    from lmetric_lab.replay import Player, Report
    from lmetric_lab.sim.summary import Goodput, Spread
    from lmetric_lab.sim.traces import Trace

_CLIENT = "Client"


def command(
    target: Annotated[
        str,
        typer.Option(metavar="URL", help="Server URL, e.g. http://127.0.0.1:8080.", rich_help_panel=BASIC),
    ],
    trace: TraceFile = SLICE,
    speed: Speed = 1.0,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name to request.", show_default="the only served model", rich_help_panel=BASIC
        ),
    ] = None,
    requests: Requests = None,
    max_input_tokens: MaxInputTokens = None,
    format: Format = None,
    closed_loop: ClosedLoop = None,
    session_rate: SessionRate = None,
    start: Start = 0.0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    clock_speed: Annotated[
        float,
        typer.Option(
            help="Emulated engines: their clock runs N times as fast; report times on it.",
            callback=above_zero,
            rich_help_panel=ENGINES,
        ),
    ] = 1.0,
    chat: Annotated[
        bool,
        typer.Option(help="Use /v1/chat/completions instead of /v1/completions.", rich_help_panel=_CLIENT),
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Request exactly the output length of the trace (vLLM's ignore_eos).",
            rich_help_panel=_CLIENT,
        ),
    ] = True,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Bearer token.", show_default="none", rich_help_panel=_CLIENT
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            help="Abort a request after S seconds without data.",
            callback=above_zero,
            rich_help_panel=_CLIENT,
        ),
    ] = 300.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompt texts.", rich_help_panel=_CLIENT)] = 0,
    skip_bad_lines: SkipBadLines = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=BASIC)
    ] = False,
) -> None:
    """Send a trace to a server, timed as recorded.

    The report has latencies, hit rate, goodput and errors.
    Requests are sent at their trace times, even if earlier requests failed or still run (open
    loop). In a closed-loop trace, a turn is sent after the previous answer. Prompts are built from
    the trace's block
    IDs: equal IDs give equal text. Ctrl-C prints the results so far and exits with 130.
    """
    from lmetric.cli.show import note, print_json, print_text
    from lmetric_lab.cli.trace import load_noting
    from lmetric_lab.cli.verdict import sentence
    from lmetric_lab.replay import Client, Slo, summarize

    loaded = load_noting(
        trace, skip_bad_lines, format=format, closed_loop=closed_loop, session_rate=session_rate
    )
    chosen = loaded.between(start, float("inf"))
    if max_input_tokens is not None:
        chosen = chosen.at_most(max_input_tokens)
    if requests is not None:
        chosen = chosen.first(requests)
    if not len(chosen):
        raise typer.BadParameter(f"the filters exclude all {len(loaded)} requests of {trace}")
    client = Client(
        target, model=model, chat=chat, api_key=api_key, ignore_eos=ignore_eos, timeout_seconds=timeout
    )
    player = _play(chosen.faster(speed), client, seed)
    report = summarize(
        player.records,
        player.seconds,
        slo=Slo(slo_ttft, slo_tpot),
        clock_speed=clock_speed,
        interrupted=player.interrupted,
    )
    setting = {
        "trace": str(trace),
        "target": client.base_url,
        "model": client.model,
        "speed": speed,
        "trace_requests": len(loaded),
        "chosen_requests": len(chosen),
        "bad_lines": len(loaded.bad_lines),
    }
    if as_json:
        print_json({**setting, "report": report})
        note(sentence([entry(client.base_url, report)]))
    else:
        _print(report, setting)
        print_text(sentence([entry(client.base_url, report)]))
    if warning := lag_warning(report):
        note(f"warning: {warning}")
    if player.interrupted:
        raise typer.Exit(130)
    if not report.completed:
        raise typer.Exit(1)


def _play(trace: Trace, client: object, seed: int) -> Player:
    import asyncio
    import signal

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lmetric.cli.show import stderr
    from lmetric_lab.replay import Client, Player
    from lmetric_lab.sim.prompts import PromptWriter

    assert isinstance(client, Client)

    async def play() -> Player:
        async with client:
            player = Player(trace, client, PromptWriter(seed=seed).prompt)
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, player.stop)
            columns = (TextColumn("sent"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, TextColumn("{task.fields[state]}"), console=stderr()) as progress:
                bar = progress.add_task("", total=len(trace), state="")
                running = asyncio.create_task(player.run())
                while not running.done():
                    await asyncio.wait([running], timeout=0.2)
                    failed = sum(record.error is not None for record in player.records)
                    progress.update(
                        bar,
                        completed=len(player.records),
                        state=f"{player.in_flight} in flight, {failed} failed",
                    )
                await running
            return player

    import uvloop

    return uvloop.run(play())


def entry(label: str, report: Report) -> Entry:
    """The report for the verdict."""
    from lmetric_lab.cli.verdict import Entry

    def span(spread: Spread | None) -> tuple[float, float, float] | None:
        return None if spread is None else (spread.mean, spread.mean, spread.mean)

    return Entry(
        label,
        span(report.ttft_seconds),
        span(report.tpot_seconds),
        requests=report.requests,
        unfinished=report.requests - report.completed,
        first_token_share=report.first_token_share,
    )


def lag_warning(report: Report) -> str | None:
    """A warning if the load generator was late: the load then differs from the trace."""
    from lmetric_lab.replay.report import LATE_SECONDS

    if not report.late_requests or report.lag_seconds is None:
        return None
    return (
        f"{report.late_requests} of {report.requests} requests were sent over {LATE_SECONDS * 1e3:g} ms late "
        f"(at most {report.lag_seconds.max:.3f} s): this machine could not send the trace at this speed"
    )


def _print(report: Report, setting: dict[str, object]) -> None:
    from lmetric.cli.show import print_table

    clock = (
        f", seconds on the engines' clock ({report.clock_speed:g}x real time)"
        if report.clock_speed != 1
        else ""
    )
    spreads = {"TTFT": report.ttft_seconds, "TPOT": report.tpot_seconds, "end to end": report.e2e_seconds}
    rows = [
        [name, *(f"{value:.4f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max))]
        for name, spread in spreads.items()
        if spread is not None
    ]
    title = f"{report.completed} of {report.requests} requests done in {report.duration_seconds:.1f} s{clock}"
    print_table(["seconds", "mean", "p50", "p90", "p99", "max"], rows, title=title)
    hit = (
        "not reported by the server" if report.hit_rate is None else f"{report.hit_rate:.1%} of prompt tokens"
    )
    facts = [
        ["hit rate", hit],
        [
            "throughput",
            f"{report.requests_per_second:.2f} requests/s, {report.tokens_per_second:.0f} tokens/s",
        ],
        *_goodput(report.goodput),
        ["failed", str(report.failed)],
        *([f"  {kind}", f"{error.count}: {error.example}"] for kind, error in report.errors.items()),
    ]
    if report.unfinished:
        facts.append(["unfinished when interrupted", str(report.unfinished)])
    if report.lag_seconds is not None:
        lag = report.lag_seconds
        facts.append(["sent late by (wall time)", f"p50 {lag.p50 * 1e3:.1f} ms, max {lag.max * 1e3:.1f} ms"])
    print_table(["", ""], facts)


def _goodput(good: Goodput) -> list[list[str]]:
    """The row of the goodput; none without an SLO."""
    bounds = [
        f"{name} <= {bound:g} s"
        for name, bound in (("TTFT", good.slo_ttft_seconds), ("TPOT", good.slo_tpot_seconds))
        if bound is not None
    ]
    rates = f"{good.requests_per_second:.2f} requests/s, {good.tokens_per_second:.0f} tokens/s"
    return [[f"goodput ({', '.join(bounds)})", f"{rates}, {good.share:.1%}"]] if bounds else []
