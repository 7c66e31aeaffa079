"""Options of ``serve`` and ``config``. Flags override environment, file and defaults, in this
order."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.cli import routing

if TYPE_CHECKING:
    from lmetric.config import ServerConfig


# Flags with deprecated names: the old configuration key, the flag and its type.
_OLD = {
    "split_force_at": ("--split-force-at", float),
    "pull": ("--pull", str),
    "reschedule": ("--reschedule", str),
    "reschedule_by": ("--reschedule-by", str),
}


def _read(
    config: Annotated[Path | None, typer.Option(help="Configuration file (YAML).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0: any free port [default: 8080].")] = None,
    engine: Annotated[list[str] | None, typer.Option(metavar="URL", help="Engine URL; repeatable.")] = None,
    embedded: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Start N emulated engines, or e.g. 2P4D: 2 prefill and 4 decode engines."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the engines [default: as they report].")] = None,
    experimental: Annotated[
        bool | None,
        typer.Option("--experimental", help="Accept experimental policies and planners."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_EXPRESSION", help="Policy name, or a score to minimize [default: lmetric]."
        ),
    ] = None,
    knob: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Parameter of the policy; repeatable.")
    ] = None,
    decode_policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_EXPRESSION",
            help="Policy for decode engines under prefill/decode disaggregation [default: least_requests].",
        ),
    ] = None,
    migration_by: Annotated[
        str | None,
        typer.Option(
            metavar="recompute|pull|legs", help="How running requests migrate [default: recompute]."
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Step times for predictions: a shipped profile or a YAML file.")
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help="YAML file with API keys and tenants.")] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error [default: info].")
    ] = None,
    log_json: Annotated[
        bool | None, typer.Option("--log-json/--log-text", help="Log JSON lines [default: text].")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting, e.g. timeouts.connect=1; repeatable. Other users of the machine see flags: "
            "set secrets in the file or the environment, e.g. LMETRIC_REPLICAS__TOKEN.",
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
    """A typer command with the options of `_read`.

    It calls `run` with the valid configuration and a function that reads it again from its sources.
    """

    def command(**given: Any) -> None:
        run(_read(**given), partial(_read, **given))

    *parameters, _ = inspect.signature(_read).parameters.values()
    parameters += [*routing.parameters(server=True), *routing.old_parameters(_OLD)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command
