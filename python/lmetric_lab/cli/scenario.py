"""The flags of ``simulate`` for the fields of `Scenario`: name, type, help, default and checks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from lmetric._core import LmetricError
from lmetric.cli.help import BASIC, DISAGGREGATION, ENGINES, POLICY, RESULTS
from lmetric.option_values import parse_settings
from lmetric.validation import expected
from lmetric_lab.sim.scenario import Scenario
from lmetric_lab.sim.setting import Group, Setting, bounds, option_of, setting_of, type_in_files
from lmetric_lab.sim.setups import split_policies

_PANELS: dict[Group, str] = {
    "basic": BASIC,
    "policy": POLICY,
    "engines": ENGINES,
    "signals": "Load reports and routers",
    "disaggregation": DISAGGREGATION,
    "results": RESULTS,
}


def _settings() -> Iterator[tuple[str, FieldInfo, Setting]]:
    """The fields with a flag here; options have the flags of `lmetric.cli.routing`."""
    for name, field in Scenario.model_fields.items():
        if (setting := setting_of(field)) is not None and option_of(field) is None:
            yield name, field, setting


def parameters() -> list[inspect.Parameter]:
    """The flags as parameters of a typer command. They are None if not given."""
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(name, field, setting)
        )
        for name, field, setting in _settings()
    ]


def _annotation(name: str, field: FieldInfo, setting: Setting) -> Any:
    flag = setting.flag_of(name)
    kind, more = _click_type(field, setting)
    if kind is bool:  # a switch to the value that is not the default
        flag = f"{flag}/--no-{flag[2:]}" if field.default else flag
    option = typer.Option(
        flag,
        metavar=setting.metavar,
        help=setting.about,
        show_default=setting.default or _words(field.default, flag),
        rich_help_panel=_PANELS[setting.group],
        hidden=setting.hidden,
        **more,
    )
    return Annotated[(list[kind] if setting.several else kind) | None, option]  # type: ignore[valid-type]


def _click_type(field: FieldInfo, setting: Setting) -> tuple[Any, dict[str, Any]]:
    """The type of a flag's value, and further arguments of `typer.Option`."""
    if setting.model is not None:
        return str, {}
    kind = type_in_files(field)
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    least, _, _ = bounds(field)
    return kind, {"min": int(least)} if kind is int and least is not None else {}


def _words(default: Any, flag: str) -> str | bool:
    """A default in the help; a switch that is off has none."""
    if isinstance(default, bool):
        return flag.partition("/")[0].lstrip("-") if default else False
    return f"{default:g}" if isinstance(default, float) else str(default)


def values(flags: dict[str, Any]) -> dict[str, Any]:
    """Removes the flags of `parameters` from `flags`, and returns the given values, checked.

    A flag with several values has a list.

    Raises:
        BadParameter: an invalid value, with its flag.
    """
    found: dict[str, Any] = {}
    for name, field, setting in _settings():
        given = flags.pop(name)
        if given is None:
            continue
        try:
            if setting.several:
                found[name] = [
                    _checked(field, setting, each) for each in dict.fromkeys(split_policies(given))
                ]
            else:
                found[name] = _checked(field, setting, given)
        except ValidationError as error:
            raise typer.BadParameter(_problem(error), param_hint=setting.flag_of(name)) from None
        except LmetricError as error:
            raise typer.BadParameter(str(error), param_hint=setting.flag_of(name)) from None
    return found


def _checked(field: FieldInfo, setting: Setting, given: Any) -> Any:
    if setting.model is not None:
        given = parse_settings(given)
    value = TypeAdapter(type_in_files(field)).validate_python(given)
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value


def _problem(error: ValidationError) -> str:
    """The first problem of a value, with the name of its part."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    text = expected(problem)
    return f"{place}: {problem['input']!r} is not valid; {text}" if place else text
