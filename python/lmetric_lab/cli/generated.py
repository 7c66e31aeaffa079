"""Options from a pydantic model: its fields define the flags, their help, defaults and checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmetric.validation import expected

if TYPE_CHECKING:
    from pydantic import ValidationError

    from lmetric_lab.emulated import EngineOptions


def command_for(
    model: type[EngineOptions], run: Callable[[EngineOptions], None], doc: str | None
) -> Callable[..., None]:
    """A typer command with one option for each field of `model`, in the groups of `help_of`.

    It calls `run` with the valid model.
    """
    from pydantic import ValidationError

    def command(**given: Any) -> None:
        try:
            options = model.model_validate(given)
        except ValidationError as error:
            raise typer.BadParameter(problems(error)) from None
        run(options)

    parameters = []
    for name, field in model.model_fields.items():
        group, text, default = model.help_of(name)
        words = default if field.default in (None, "") else True
        option = typer.Option(help=text, rich_help_panel=group, show_default=words)
        annotation = Annotated[field.annotation, option]  # type: ignore[name-defined]
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.get_default(call_default_factory=True),
                annotation=annotation,
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = doc
    return command


def problems(error: ValidationError) -> str:
    """The problems of a model's values, each with its flag."""
    found = []
    for problem in error.errors(include_url=False):
        flag = (
            "--" + "-".join(str(part).replace("_", "-") for part in problem["loc"]) if problem["loc"] else ""
        )
        found.append(f"{flag} {problem['input']!r}: {expected(problem)}" if flag else expected(problem))
    return "; ".join(found)
