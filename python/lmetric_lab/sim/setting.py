"""Kinds of the fields of `Scenario`, and their form in study files and on command lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from lmetric import option_values
from lmetric._core import LmetricError, check_local_order
from lmetric.policies import policy_name
from lmetric_lab.queueing import HostTier, Swap
from lmetric_lab.sim.churn import listed
from lmetric_lab.sim.pools import Roles, Transfer

Group = Literal["basic", "policy", "engines", "signals", "disaggregation", "results"]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Setting:
    """The form of a field in study files and on the command line of `simulate`."""

    about: str  # help of the flag, description of the key
    group: Group  # of the flag in the help
    default: str = ""  # the default in words, if the value does not state it
    metavar: str | None = None  # of the flag
    flag: str = ""  # "": from the name of the field
    hidden: bool = False  # whether the help omits the flag
    several: bool = False  # whether the flag accepts several values, each with runs of its own
    in_study: bool = True  # False: studies have another key for it
    convert: bool = False  # whether `run` converts it; other values go to the core unchanged
    model: Callable[[], type[BaseModel]] | None = None  # of a mapping in files

    def flag_of(self, name: str) -> str:
        """The flag of the field `name`."""
        return self.flag or "--" + name.removesuffix("_seconds").replace("_", "-")


class Text:
    """Annotates a field of any type that files and command lines write as text.

    `check` returns the value to keep, and raises LmetricError.
    """

    def __init__(self, check: Callable[[Any], Any] = lambda value: value) -> None:
        self.check = check

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Makes pydantic call `check` alone."""
        return core_schema.no_info_plain_validator_function(self.check)


class RoutingOption:
    """Annotates a field with an option of `lmetric.options`, which has flags of its own.

    The field has the option in its shortest form. Option objects stay as they are.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def _read(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        if isinstance(value, str | bool | Mapping | NoneType):
            return option_values.canonical(self.what, value, policy_name(info.data.get("policy")))
        option_values.parse(self.what, value)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Makes pydantic call `lmetric.option_values` alone."""
        return core_schema.with_info_plain_validator_function(self._read)


def read_order(value: Any) -> Any:
    """Checks a local order with optional settings. Raises BadValueError."""
    check_local_order(value)
    return value


def read_preempt(value: Any) -> Any:
    """Checks how preempted requests get their KV cache back. Raises BadValueError."""
    Swap.of(value)
    return value


def read_host_tier(value: Any) -> Any:
    """Checks a host tier. A number is its relative capacity. Raises BadValueError."""
    value = _number_as_text(value)
    HostTier.of(value)
    return value


def read_transfer(value: Any) -> Any:
    """Checks KV transfers. A number is their bandwidth. Raises BadValueError."""
    value = _number_as_text(value)
    Transfer.of(value)
    return value


def read_roles(value: Any) -> Any:
    """Checks pools of instances. Raises BadValueError."""
    if value is not None:
        Roles.of(value)
    return value


def read_changes(value: Any) -> Any:
    """Checks instances that join and leave. Raises BadValueError."""
    listed(value)
    return value


def off_is_a_word(value: Any) -> Any:
    """Returns "off" for False: YAML reads `off` as false."""
    return "off" if value is False else value


def _number_as_text(value: Any) -> Any:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:g}" if plain else value


def setting_of(field: FieldInfo) -> Setting | None:
    """The form of a field in files and on command lines; None: it is no setting there."""
    return next((each for each in field.metadata if isinstance(each, Setting)), None)


def option_of(field: FieldInfo) -> str | None:
    """The name of the option of `lmetric.options` in a field; None: another kind."""
    return next((each.what for each in field.metadata if isinstance(each, RoutingOption)), None)


def type_in_files(field: FieldInfo) -> Any:
    """The annotation of one value of a field in files and on command lines, which is never None."""
    for each in field.metadata:
        if isinstance(each, Setting) and each.model is not None:
            return each.model()
        if isinstance(each, Text):
            return Annotated[str, BeforeValidator(_explained(each.check))]
    own = tuple(each for each in field.metadata if not isinstance(each, Setting))
    annotation = _without_none(field.annotation)
    return Annotated[(annotation, *own)] if own else annotation


def bounds(field: FieldInfo) -> tuple[float | None, float | None, bool]:
    """The lowest and the highest value of a field, and whether the lowest is excluded."""
    low, high, excluded = None, None, False
    for each in (*field.metadata, *_constraints(field.annotation)):
        if isinstance(each, Ge):
            low = float(each.ge)  # type: ignore[arg-type]
        elif isinstance(each, Gt):
            low, excluded = float(each.gt), True  # type: ignore[arg-type]
        elif isinstance(each, Le):
            high = float(each.le)  # type: ignore[arg-type]
    return low, high, excluded


def _constraints(annotation: Any) -> list[Any]:
    """The constraints in an annotation such as ``Annotated[int, Field(ge=1)] | None``."""
    found: list[Any] = []
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        found += _constraints(inner)
        for each in metadata:
            found += each.metadata if isinstance(each, FieldInfo) else [each]
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            found += _constraints(each)
    return found


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    return reduce(or_, (each for each in get_args(annotation) if each is not NoneType))


def _explained(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The check with errors that pydantic collects."""

    def read(value: Any) -> Any:
        try:
            return check(value)
        except LmetricError as error:
            from lmetric.config.kinds import OptionError

            raise OptionError(error) from None

    return read
