"""Constants of the settings, which tests may change."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

import pytest
from pydantic import BaseModel

from lmetric import option_values
from lmetric.config import ServerConfig
from lmetric.config.kinds import Strict

Section = TypeVar("Section", bound=BaseModel)


@contextlib.contextmanager
def constants(section: type[BaseModel], **values: Any) -> Iterator[None]:
    """Gives constants of a section other values, while in the block."""
    with pytest.MonkeyPatch.context() as patch:
        _set(patch, section, values)
        yield


def with_constants(section: type[Section], **values: Any) -> Section:
    """A section with settings and constants of its own."""
    constants = {name: value for name, value in values.items() if name in section.__class_vars__}
    with pytest.MonkeyPatch.context() as patch:
        _set(patch, section, constants)
        made = section(**{name: value for name, value in values.items() if name not in constants})
    vars(made).update(constants)
    return made


@contextlib.contextmanager
def configured(values: Mapping[str, Any], root: type[BaseModel] = ServerConfig) -> Iterator[Any]:
    """The configuration of a test that sets constants like settings, while in the block."""
    with pytest.MonkeyPatch.context() as patch:
        settings = _without(patch, root, values)
        with constant_options(), any_split():
            config = root.model_validate(settings)
        yield config


@contextlib.contextmanager
def constant_options() -> Iterator[None]:
    """Makes the constants of routing options settings of servers, while in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(option_values, "is_study", option_values.is_simulated)
        yield


@contextlib.contextmanager
def any_split() -> Iterator[None]:
    """Makes servers accept `SplitAt`, while in the block: requests split at the token of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(option_values._STUDIED, "force")
        yield


def _set(patch: pytest.MonkeyPatch, section: type[BaseModel], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        owner = next(each for each in section.__mro__ if name in vars(each))
        assert name in section.__class_vars__, f"{name} is a setting"
        patch.setattr(owner, name, value)


def _without(
    patch: pytest.MonkeyPatch, section: type[BaseModel], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings among values of a section. Sets the constants among them."""
    _set(patch, section, {name: each for name, each in values.items() if name in section.__class_vars__})
    settings = {}
    for name, value in values.items():
        field = section.model_fields.get(name)
        inner = _section(field.annotation) if field is not None else None
        if name in section.__class_vars__:
            continue
        if inner is not None and isinstance(value, Mapping) and not _is_mapping(field.annotation):
            value = _without(patch, inner, value)
        elif inner is not None and isinstance(value, list):
            value = [_without(patch, inner, each) if isinstance(each, Mapping) else each for each in value]
        settings[name] = value
    return settings


def _section(kind: Any) -> type[BaseModel] | None:
    if isinstance(kind, type) and issubclass(kind, Strict):
        return kind
    return next((found for each in get_args(kind) if (found := _section(each)) is not None), None)


def _is_mapping(kind: Any) -> bool:
    """Whether a setting is a mapping of sections with chosen names."""
    return getattr(kind, "__origin__", None) is dict
