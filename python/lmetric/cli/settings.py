"""The options that ``serve`` and ``config`` share: flags over environment over file over default."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli import routing

if TYPE_CHECKING:
    from lmetric.config import ServerConfig


# Flags under old names: the old key of the configuration, the flag and its type.
_OLD = {
    "split_force_at": ("--split-force-at", float),
    "pull": ("--pull", str),
    "reschedule": ("--reschedule", str),
    "reschedule_by": ("--reschedule-by", str),
}


def _read(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")] = None,
    engine: Annotated[list[str] | None, typer.Option(metavar="URL", help="An engine; repeatable.")] = None,
    embedded: Annotated[
        str | None,
        typer.Option(metavar="N", help="Start N emulated engines as child processes, or those of e.g. 2P4D."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The engines' model [default: they are asked].")] = None,
    experimental: Annotated[
        bool | None,
        typer.Option("--experimental", help="Accept experimental policies and planners."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME_OR_EXPRESSION", help="Policy, or a score to minimise.")
    ] = None,
    knob: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Repeatable.")] = None,
    decode_policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_EXPRESSION",
            help="Where requests decode whose prompt another engine computed.",
        ),
    ] = None,
    migration_by: Annotated[
        str | None,
        typer.Option(metavar="recompute|pull|legs", help="How running requests move [default: recompute]."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="What engines' steps cost: a shipped profile, or a YAML file.")
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help="YAML file of API keys and tenants.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_json: Annotated[
        bool | None, typer.Option("--log-json/--log-text", help="Logs as JSON lines.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key, e.g. timeouts.connect=1; repeatable. Other users of the machine see flags: set "
            "secrets in the file or the environment, e.g. LMETRIC_REPLICAS__TOKEN.",
        ),
    ] = None,
    **more: Any,
) -> "ServerConfig":
    from lmetric.config import load_config

    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "engines": [{"url": url} for url in engine] if engine else None,
        "embedded": embedded,
        "model": model,
        "experimental": experimental,
        "policy": policy,
        "knobs": dict(_pair("--knob", text) for text in knob) if knob else None,
        "decode_policy": decode_policy,
        "migration_by": migration_by,
        "profile": profile,
        "auth.keys_file": api_keys,
        "log.level": log_level,
        "log.json": log_json,
    }
    flags |= routing.overrides(more) | more
    return load_config(config, flags | dict(_pair("--set", text) for text in set_ or []))


def _pair(flag: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint=flag)
    return key.strip(), value.strip()


def command_with_settings(
    run: "Callable[[ServerConfig, Callable[[], ServerConfig]], None]", doc: str
) -> Callable[..., None]:
    """A typer command with the options above that hands `run` the checked configuration, and a function that
    reads it anew from the same sources."""

    def command(**given: Any) -> None:
        run(_read(**given), partial(_read, **given))

    *parameters, _ = inspect.signature(_read).parameters.values()
    parameters += [*routing.parameters(server=True), *routing.old_parameters(_OLD)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command
