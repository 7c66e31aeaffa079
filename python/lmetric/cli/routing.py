"""The flags of routing options for ``serve``, ``config`` and ``simulate``, made from
`lmetric.options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Annotated, Any, get_type_hints

import typer
from pydantic.fields import FieldInfo

from lmetric import option_values, options
from lmetric.cli.help import DISAGGREGATION, EXPERIMENTAL, POLICY
from lmetric.defaults import PLANNER

# The help of each option's flag, and its group.
_HELP = {
    "split": ("Whether requests are split between instances", DISAGGREGATION),
    "prefix_fetch": ("Whether instances fetch cached prefixes from each other", DISAGGREGATION),
    "rebalance": ("Whether running requests move between instances", EXPERIMENTAL),
    "priority": ("How requests are ordered in the engines' queues", POLICY),
    "programs": ("How agent programs are followed and admitted", POLICY),
    "fleet_changes": ("How instances join and leave the fleet", DISAGGREGATION),
    "guard": ("Hot-spot guard", POLICY),
}
# Options that accept several values in simulations; each value gets its own runs.
SWEPT = ("split", "rebalance")


def _settings_of(what: str, *, server: bool) -> str:
    """The settings of each kind with their defaults, for the help text."""
    described = []
    classes = option_values.served(what) if server else option_values.classes(what)
    for cls in dict.fromkeys(classes.values()):
        own = option_values.offered(cls, server=server).items()
        if shown := [_setting(name, field, server=server) for name, field in own if name != "enabled"]:
            described.append(f"{cls.core_kind}: {', '.join(shown)}" if len(classes) > 1 else ", ".join(shown))
    return "; ".join(described)


def _setting(name: str, field: FieldInfo, *, server: bool) -> str:
    """A setting as NAME=DEFAULT, or its name if it has no plain default."""
    value = options.server_default(field) if server else field.default
    if field.is_required() or value is None:
        return name
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _default(what: str, *, server: bool) -> str:
    """The default of an option in words, with the default under `planner` if it differs."""
    if what == "guard":
        return "off, unless the policy turns it on"
    if what == "programs":
        return option_values.kind_of(options.ProgramAuto())
    usual, planned = (option_values.kind_of(options.default_of(what, policy)) for policy in ("", PLANNER))
    return usual if usual == planned else f"{usual}; with {PLANNER}: {planned}"


def parameters(*, server: bool) -> list[inspect.Parameter]:
    """The flags as parameters of a typer command: one for the kind of each option, one for its
    settings.

    Args:
        server: for servers, which accept one kind of each option and no simulation settings.
    """
    made = []
    for what in options.OPTIONS:
        flag = "--" + what.replace("_", "-")
        kinds = ["none", *(option_values.served(what) if server else option_values.classes(what))]
        text, panel = _HELP[what]
        option = partial(typer.Option, rich_help_panel=panel, show_default=_default(what, server=server))
        if what == "guard":
            kind: Any = Annotated[bool | None, option("--guard/--no-guard", help=f"{text}.")]
        elif what in SWEPT and not server:
            help_ = f"{text}: {', '.join(kinds)}; settings in parentheses."
            kind = Annotated[list[str] | None, option(flag, metavar="A,B,…", help=help_)]
        else:
            kind = Annotated[str | None, option(flag, metavar="|".join(kinds), help=f"{text}.")]
        flags = {what: kind}
        if described := _settings_of(what, server=server):
            help_ = f"Settings of {flag}, with defaults. {described}."
            option = partial(typer.Option, rich_help_panel=panel)
            flags[f"{what}_settings"] = Annotated[
                str | None, option(f"{flag}-settings", metavar="NAME=VALUE,…", help=help_)
            ]
        for name, annotation in flags.items():
            made.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    return made


def overrides(given: dict[str, Any]) -> dict[str, Any]:
    """Removes the flags of `parameters` from `given` and returns them as dotted configuration keys.

    Raises:
        BadValueError: a setting is not NAME=VALUE.
    """
    found: dict[str, Any] = {}
    for what in options.OPTIONS:
        found[what] = given.pop(what)
        for name, value in option_values.parse_settings(given.pop(f"{what}_settings", None) or "").items():
            found[f"{what}.{name}"] = value
    return found


def command(run: Callable[..., None], more: list[inspect.Parameter]) -> Callable[..., None]:
    """A typer command with the parameters of `run` and of `more`. `run` gets `more` as keywords."""

    @wraps(run)
    def called(**given: Any) -> None:
        run(**given)

    hints = get_type_hints(run, include_extras=True)
    *own, _ = inspect.signature(run).parameters.values()
    parameters = [
        *(each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY) for each in own),
        *more,
    ]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called
