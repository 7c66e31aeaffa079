"""Options of ``serve`` and ``config``. Flags override environment, file and defaults, in this
order."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lmetric.cli import routing
from lmetric.cli.help import BASIC, DISAGGREGATION, EXPERIMENTAL, POLICY, show_all

if TYPE_CHECKING:
    from lmetric.config import ServerConfig


_ACCESS = "Access and logs"
# The configuration key of each parameter of `_read`. The help shows the key's default.
_KEYS = {
    "host": "host",
    "port": "port",
    "workers": "workers",
    "engine": "engines",
    "embedded": "embedded",
    "model": "model",
    "experimental": "experimental",
    "policy": "policy",
    "knob": "knobs",
    "decode_policy": "decode_policy",
    "migration_by": "migration_by",
    "profile": "profile",
    "shadow": "shadow.policy",
    "api_keys": "auth.keys_file",
    "records": "records.path",
    "log_level": "log.level",
    "log_json": "log.json",
}
# The meaning of unset keys, as at the end of their descriptions.
_UNSET = {"model": "as the engines report", "profile": "learned from traffic"}


def _option(group: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=group, **more)


def _read(
    config: Annotated[
        Path | None, _option(BASIC, show_default="none", help="Configuration file (YAML).")
    ] = None,
    host: Annotated[str | None, _option(BASIC, help="Address to listen on.")] = None,
    port: Annotated[int | None, _option(BASIC, help="Port; 0: any free port.")] = None,
    workers: Annotated[
        str | None, _option(BASIC, metavar="N", help="Processes; auto: one less than processors.")
    ] = None,
    engine: Annotated[list[str] | None, _option(BASIC, metavar="URL", help="Engine URL; repeatable.")] = None,
    embedded: Annotated[
        str | None,
        _option(
            BASIC,
            metavar="N",
            help="Start N emulated engines, or e.g. 2P4D: 2 prefill and 4 decode engines. With a scheduler: "
            "2,slo=50 (ms between tokens), 2,uniboost.",
        ),
    ] = None,
    model: Annotated[str | None, _option(BASIC, help="Model of the engines.")] = None,
    experimental: Annotated[
        bool | None,
        _option(EXPERIMENTAL, "--experimental", help="Accept experimental policies and planners."),
    ] = None,
    policy: Annotated[
        str | None,
        _option(BASIC, metavar="NAME_OR_EXPRESSION", help="Policy name, or a score to minimize."),
    ] = None,
    knob: Annotated[
        list[str] | None,
        _option(POLICY, metavar="NAME=VALUE", help="Parameter of the policy; repeatable."),
    ] = None,
    decode_policy: Annotated[
        str | None,
        _option(
            DISAGGREGATION,
            metavar="NAME_OR_EXPRESSION",
            help="Policy for decode engines under prefill/decode disaggregation.",
        ),
    ] = None,
    migration_by: Annotated[
        str | None,
        _option(EXPERIMENTAL, metavar="recompute|fetch", help="How running requests migrate."),
    ] = None,
    profile: Annotated[
        str | None, _option(POLICY, help="Step times for predictions: a shipped profile or a YAML file.")
    ] = None,
    shadow: Annotated[
        str | None,
        _option(
            POLICY,
            metavar="NAME_OR_EXPRESSION",
            help="Second policy that scores each request and places none.",
        ),
    ] = None,
    api_keys: Annotated[Path | None, _option(_ACCESS, help="YAML file with API keys and tenants.")] = None,
    records: Annotated[
        Path | None, _option(_ACCESS, metavar="DIR", help="Folder for records of all requests.")
    ] = None,
    log_level: Annotated[str | None, _option(_ACCESS, help="debug, info, warning or error.")] = None,
    log_json: Annotated[
        bool | None, _option(_ACCESS, "--log-json/--log-text", help="Log JSON lines.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        _option(
            BASIC,
            "--set",
            metavar="KEY=VALUE",
            show_default="none",
            help="Any setting, e.g. timeouts.connect=1; repeatable. Other users of the machine see flags: "
            "set secrets in the file or the environment, e.g. LMETRIC__REPLICAS__TOKEN.",
        ),
    ] = None,
    **more: Any,
) -> "ServerConfig":
    from lmetric.config import load_config

    given = {
        "host": host, "port": port, "workers": workers, "embedded": embedded, "model": model,
        "experimental": experimental, "policy": policy, "decode_policy": decode_policy,
        "migration_by": migration_by, "profile": profile,
        "shadow": shadow, "api_keys": api_keys, "records": records, "log_level": log_level,
        "log_json": log_json,
        "engine": [{"url": url} for url in engine] if engine else None,
        "knob": dict(_pair("--knob", text) for text in knob) if knob else None,
    }  # fmt: skip
    flags: dict[str, Any] = {_KEYS[name]: value for name, value in given.items()}
    flags |= routing.overrides(more)
    return load_config(config, flags | dict(_pair("--set", text) for text in set_ or []))


def _pair(flag: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}", param_hint=flag)
    return key.strip(), value.strip()


def _default(key: str) -> str:
    """The default of a configuration key in words."""
    from lmetric.config import ServerConfig

    section: Any = ServerConfig
    for part in key.split("."):
        names = {field.alias or name: field for name, field in section.model_fields.items()}
        field = names[part]
        section = next(iter(get_args(field.annotation)), field.annotation)
    if field.is_required():  # of a section that is off
        return "none"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return "text" if key == "log.json" and not value else str(value).lower()
    if value not in (None, [], {}):
        return str(value)
    return _UNSET.get(key, "none")


def command_with_settings(
    run: Callable[..., None],
    doc: str | None,
    extra: Sequence[inspect.Parameter] = (),
) -> Callable[..., None]:
    """A typer command with the options of `_read`.

    It calls `run` with the valid configuration, a function that reads it again from its sources,
    and the `extra` parameters as keywords.
    """
    names = [each.name for each in extra]

    def command(help_all: bool, **given: Any) -> None:
        own = {name: given.pop(name) for name in names}
        run(_read(**given), partial(_read, **given), **own)

    *parameters, _ = inspect.signature(_read).parameters.values()
    for each in parameters:
        (option,) = each.annotation.__metadata__
        if each.name in _KEYS:
            option.show_default = _default(_KEYS[each.name])
    parameters += [*routing.parameters(server=True), *extra]
    everything = typer.Option(
        "--help-all", is_eager=True, callback=show_all, help="Show all options and exit."
    )
    parameters.append(
        inspect.Parameter(
            "help_all",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, everything],
        )
    )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command
