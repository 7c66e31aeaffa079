"""Errors about routing options. They load with the first error."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from lmetric._core import BadValueError
from lmetric.validation import expected

if TYPE_CHECKING:
    from pydantic import ValidationError

# The classes of each option.
_CLASSES = {
    "split": "LibraSplit DecodePlacement SplitAt SplitBy",
    "prefix_fetch": "PrefixFetch",
    "priority": "UniBoost FairShares",
    "rebalance": "Star Llumnix",
    "programs": "ProgramObservation ProgramAuto ProgramAdmission ThunderAgent",
    "fleet_changes": "WarmChanges",
    "guard": "Guard",
}


def instances_of(what: str) -> str:
    """The classes of an option, as in Python code."""
    return ", ".join(f"lmetric.{name}(...)" for name in _CLASSES[what].split())


def bad(what: str, got: object, expected: str) -> BadValueError:
    """An error about the whole value of an option."""
    return BadValueError(f"{what}: {got!r} is not valid; expected {expected}")


def refusal(cls: Any, error: ValidationError, what: str, known: list[str]) -> BadValueError:
    """Returns the first error of pydantic as a BadValueError.

    ``what``: the option in the message. ``known``: its settings.
    """
    problem = error.errors(include_url=False)[0]
    path = tuple(map(str, problem["loc"][-1:]))
    if problem["type"] == "missing":
        return refused(path, None, f"missing; {cls.core_kind or cls.__name__!r} needs it", what)
    if problem["type"] == "extra_forbidden":
        return refused(path, problem["input"], "unknown setting", what, known)
    return refused(path, problem["input"], expected(problem), what)


def refused(
    path: tuple[str, ...],
    value: Any,
    problem: str,
    what: str,
    known: list[str] | None = None,
) -> BadValueError:
    if known is not None:
        near = next(iter(difflib.get_close_matches(str(path[-1] if path else value), known, 1, 0.5)), None)
        listed = f"known here: {', '.join(known) or 'nothing'}"
        problem += f"; did you mean {near!r}?" if near else "" if not path else f"; {listed}"
    where = ".".join((what, *path))
    said = problem if problem.startswith("missing") else f"{value!r} is not valid; {problem}"
    error = BadValueError(f"{where}: {said}")
    error.path, error.value, error.problem = path, value, problem  # type: ignore[attr-defined]
    return error
