"""Wrong usage in one line: the command, the option with its value, and what to do."""

from __future__ import annotations

import re
from typing import Any

import typer

# The library has its own copy of click, or click itself, by its version.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_MANY = 10  # most options named as possible


def above_zero(value: float | None) -> float | None:
    """The callback of an option whose value must be above 0.

    Raises BadParameter.
    """
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def usage_line(error: Any) -> str:
    """The message of a `UsageError`, with its command before it."""
    command = error.ctx.command_path if error.ctx is not None else "lmetric-router"
    text = _problem(error)
    known = any(words in text for words in ("did you mean", "expected", "`lmetric-router "))
    return f"{command}: {text}" if known else f"{command}: {text}; see: {command} -h"


def _problem(error: Any) -> str:
    kind, message = type(error).__name__, " ".join(str(error.message).split())
    if kind == "NoSuchOption":
        near = sorted(error.possibilities or ())[:_MANY]
        return f"{error.option_name}: no such option{_near(near)}"
    if kind == "MissingParameter":
        return f"{_name(error)}: missing; give a value"
    if kind == "BadParameter":
        if (choice := re.search(r"('.*?') is not one of (.*?)\.?$", message)) is not None:
            possible = choice[2].replace("'", "")
            of = "one of " * ("," in possible)
            return f"{_name(error)} = {choice[1]}: expected {of}{possible}"
        found = getattr(error.__cause__, "errors", None)
        if found is not None:
            from lmetric.validation import expected

            first = found(include_url=False)[0]
            return f"{_name(error)} = {first['input']!r}: {expected(first)}"
        name = _name(error)
        return f"{name}: {message}" if name else message
    if (extra := re.match(r"Got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)", message)) is not None:
        return f"{extra[1]!r}: not an argument of this command"
    if (given := re.match(r"No such command '(.*?)'\.?(.*)", message)) is not None:
        near = re.findall(r"'([\w-]+)'", given[2])
        return f"{given[1]!r} is not a command{_near(near)}"
    if (option := re.match(r"Option '(.*?)' requires an argument", message)) is not None:
        return f"{option[1]}: missing; give a value"
    return message


def _name(error: Any) -> str:
    """The option or argument of an error, as the user writes it."""
    hint = error.param_hint
    if hint is None and error.param is not None:
        options = [each for each in error.param.opts if each.startswith("-")]
        written = error.param.metavar or error.param.name.upper()
        hint = max(options, key=len) if options else written.strip("[].")
    return hint if isinstance(hint, str) else ", ".join(hint or ())


def _near(names: list[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""
