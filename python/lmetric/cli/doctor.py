"""``lmetric-router doctor``: tests the engine features that the router uses, with real requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmetric.cli.usage import above_zero

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lmetric.doctor import Examination, Level, Target, Verdict

_MARKS = {"pass": "pass", "fail": "FAIL", "not offered": "–"}
_NAMED = 4  # most engines named in a line of the summary
_START = "start the engine with "


def command(
    url: Annotated[
        list[str] | None, typer.Argument(help="Engine URLs.", show_default="engines of the configuration")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file (YAML), as for serve.", show_default="none")
    ] = None,
    require: Annotated[
        Literal["exact", "approximate", "load"], typer.Option(help="Level that every engine must reach.")
    ] = "exact",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Tokenizer folder or Hub repository.",
            show_default="as configured, else the engine's model",
        ),
    ] = None,
    token_slo_ms: Annotated[
        float | None,
        typer.Option(
            help="Also compare the times between tokens (P99) with this goal, in milliseconds.",
            callback=above_zero,
            show_default="none",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Profile of calibrate, for the budget to recommend with --token-slo-ms.",
            show_default="as configured",
        ),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough",
            help="Also test the order of the queue: up to 64 concurrent requests of the lowest priority.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also show the findings of checks that passed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Test engine features with real requests.

    Features: load reports, cache events, tokens, cancellation. Each engine gets a few dozen short
    requests and a long request, which is canceled. Exit code 1: an engine does not reach the
    level of --require. The report gives the causes and the flags to set.
    """
    import asyncio

    from lmetric.cli.show import note, print_json
    from lmetric.doctor import Level, examine

    level = Level(require)
    targets = _targets(url or [], config, {"tokenizer": tokenizer, "profile": profile})
    if token_slo_ms is not None:
        targets = [_with_goal(target, token_slo_ms / 1e3) for target in targets]
    note(f"examining {len(targets)} engine{'s' * (len(targets) > 1)}")
    found = asyncio.run(examine(targets, thorough=thorough))
    good = not any(examination.wanting(level) for examination in found)
    if as_json:
        engines = [_data(examination, level) for examination in found]
        print_json({"require": level, "good": good, "engines": engines})
    else:
        _show(found, level, verbose)
    for line in _shortfalls(found, level):
        note(line)
    if not good:
        raise typer.Exit(1)


def _shortfalls(found: list[Examination], level: Level) -> list[str]:
    """The level of the engines that miss the required one. Equal engines share a line."""
    engines: dict[tuple[str, Level | None], list[str]] = {}
    for examination in found:
        if wanting := examination.wanting(level):
            engines.setdefault((", ".join(wanting), examination.level), []).append(examination.engine)
    return [
        f"{', '.join(names)}: good for {best or 'nothing'}; {level} required, missing: {wanting}"
        + (f" (or pass --require {best})" if best else "")
        for (wanting, best), names in engines.items()
    ]


def _with_goal(target: Target, token_seconds: float) -> Target:
    """The target with a goal. Raises ProfileError if its profile cannot be read."""
    from dataclasses import replace

    from lmetric.profiles import load_profile

    if target.settings.profile is not None:
        load_profile(target.settings.profile)
    return replace(target, token_seconds=token_seconds)


def _targets(urls: list[str], file: Path | None, overrides: dict[str, Any]) -> list[Target]:
    """The engines to examine. Raises ConfigError."""
    from lmetric.config import ConfigError, load_config
    from lmetric.doctor import Target

    # URLs pass through the configuration: it checks them and adds the other settings of the engine.
    config = load_config(file, overrides)
    health = config.health.path
    targets = [
        Target(engine, model.name if model else config.model, config.pool_settings(model), health_path=health)
        for model in (*config.models, None)
        for engine in (model.engines if model else config.engines)
    ]
    if urls:
        named = load_config(overrides={"engines": [{"url": url} for url in dict.fromkeys(urls)]}, environ={})
        return [
            target
            for engine in named.engines
            # An engine has several targets if its data-parallel ranks are separate entries.
            for target in [target for target in targets if target.engine.url == engine.url]
            or [Target(engine, config.model, config.pool_settings(), health_path=health)]
        ]
    if not targets:
        raise ConfigError("no engines: pass engine URLs, or --config with a file that lists engines")
    return targets


def _data(examination: Examination, level: Level) -> dict[str, Any]:
    return {
        "engine": examination.engine,
        "url": examination.url,
        "model": examination.model,
        "good_for": examination.level,
        "wanting": examination.wanting(level),
        "verdicts": list(examination.verdicts.values()),
    }


def _show(found: list[Examination], level: Level, verbose: bool) -> None:
    from rich.text import Text

    from lmetric.cli.show import stdout, table
    from lmetric.doctor import CHECKS

    console = stdout()
    for line in _summary(found, console.width):
        console.print(line, soft_wrap=True)
    for group in _side_by_side(found, console.width):
        rows = table(["check", *(examination.engine for examination in group)], [])
        for name in CHECKS:
            cells = []
            for examination in group:
                verdict = examination.verdicts.get(name)
                wanted = name in examination.wanting(level)
                cells.append(Text(_MARKS[verdict.outcome] if verdict else "", "bold red" if wanted else ""))
            rows.add_row(name, *cells)
        rows.add_row("good for", *(examination.level or "nothing" for examination in group))
        console.print(rows)
    # Engines that hand nothing over need no connector, so its absence is no finding there.
    plain = all(each.role == "both" and not each.has_connector for each in found)
    for examination in found:
        shown = [
            v
            for v in examination.verdicts.values()
            if verbose or not (v.outcome == "pass" or (plain and v.check == "handover"))
        ]
        if shown:
            console.print(Text(examination.engine, style="bold"))
        for verdict in shown:
            wanted = verdict.check in examination.wanting(level)
            console.print(_told(verdict, wanted, console.width), soft_wrap=True)


def _summary(found: list[Examination], width: int) -> Iterator[str]:
    """Yields the level that engines reach, and the fixes for the best level."""
    from lmetric.cli.show import wrapped
    from lmetric.doctor import Level

    groups: dict[tuple[Level | None, tuple[str, ...]], list[str]] = {}
    for examination in found:
        groups.setdefault((examination.level, _steps(examination)), []).append(examination.engine)
    for (level, steps), names in groups.items():
        named = ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)
        now = "load only" if level is Level.LOAD else level
        yield wrapped(f"usable now: {now} ({named})" if level else f"not usable ({named})", width)
        for step in steps:
            yield wrapped(step, width, head="  for exact: " if level else "  cause: ")


def _steps(examination: Examination) -> tuple[str, ...]:
    """The fixes for the best level, or the cause why an engine is not usable."""
    from lmetric.doctor import Level

    wanting = examination.wanting(Level.EXACT if examination.level else Level.LOAD)
    verdicts = [each for name in wanting if (each := examination.verdicts.get(name))]
    if examination.level is None:
        return tuple(f"{each.check}: {each.seen}" for each in verdicts[:1])
    steps = []
    for verdict in verdicts:
        fix = (verdict.remedy or "").removeprefix(_START)
        steps.append(f"add {fix}" if fix.startswith("--") else fix or f"{verdict.check}: {verdict.seen}")
    return tuple(dict.fromkeys(steps))


def _side_by_side(found: list[Examination], width: int) -> list[list[Examination]]:
    """Groups of engines whose columns fit beside the column of checks."""
    from lmetric.cli.show import EDGES, GAP
    from lmetric.doctor import CHECKS

    groups: list[list[Examination]] = []
    left = 0
    for examination in found:
        needed = max(len(examination.engine), len("approximate")) + GAP
        if not groups or needed > left:
            groups.append([])
            left = width - max(map(len, CHECKS)) - EDGES
        groups[-1].append(examination)
        left -= needed
    return groups


def _told(verdict: Verdict, wanted: bool, width: int) -> Any:
    from rich.text import Text

    from lmetric.cli.show import wrapped

    mark = f"  {_MARKS[verdict.outcome]:<4} "
    shown = wrapped(f"{verdict.check}: {verdict.seen}", width, head=mark)
    if verdict.remedy:
        shown += "\n" + wrapped(f"fix: {verdict.remedy}", width, head=" " * len(mark))
    text = Text(shown)
    if wanted:
        text.stylize("bold red", 0, len(mark))
    return text
