"""Settings of the schedulers (the key `lmetric` of `--additional-config`) and of the connector
(`kv_connector_extra_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmetric.engines.xargs import MOST_SLO_MS, number_in, shown
from lmetric.validation import expected

KEY = "lmetric"


class SettingsError(ValueError):
    """A setting is unknown or out of its range. The message has the name and what was expected."""


class SloSettings(BaseModel):
    """Settings of `SloScheduler`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    token_slo_ms: float = Field(
        gt=0, le=MOST_SLO_MS, description="Longest time between two tokens of an answer, in milliseconds."
    )
    profile: str | None = Field(
        default=None,
        description="The engine's step times: a file of `lmetric-router calibrate`, or a profile's name. "
        "Default: learned from the first steps, which are then as long as vLLM's own.",
    )


class BoostSettings(BaseModel):
    """Settings of `UniBoostScheduler`; all have defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gamma: float | None = Field(
        default=None,
        ge=1e-6,
        le=1e6,
        description="Decay of the boost, 1/s, until it is learned from latencies.",
    )
    adaptive: bool | None = Field(default=None, description="Whether gamma is learned.")
    bin_tokens: int | None = Field(
        default=None, ge=1, description="First bin of work: ranks change when the work doubles from there."
    )
    hysteresis_seconds: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        description="Lead in boosted arrival with which a waiting request replaces a running request.",
    )


class HiddenStatesSettings(BaseModel):
    """Settings of `HiddenStatesConnector`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    share: float = Field(ge=0, le=1, description="Share of the requests whose states are written.")
    shared_storage_path: str = Field(min_length=1, description="Folder of the files, one per engine.")
    max_bytes: int = Field(
        default=1 << 30,
        ge=1,
        description="Most bytes of all files in the folder. At the limit, none is added.",
    )


Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(kind: type[Settings], additional: Mapping[str, Any] | None) -> Settings:
    """The scheduler's settings in `--additional-config`.

    Raises:
        SettingsError: a missing, unknown or impossible setting.
    """
    return _read(kind, (additional or {}).get(KEY, {}), ("--additional-config", KEY))


def read_connector_settings(extra: Mapping[str, Any]) -> HiddenStatesSettings:
    """The connector's settings in `kv_connector_extra_config`.

    Raises:
        SettingsError: a missing, unknown or impossible setting.
    """
    return _read(HiddenStatesSettings, dict(extra), ("--kv-transfer-config", "kv_connector_extra_config"))


def _read(kind: type[Settings], given: Any, place: tuple[str, str]) -> Settings:
    flag, key = place
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        names = ", ".join(kind.model_fields)
        example = '{"' + key + '": {"' + next(iter(kind.model_fields)) + '": ...}}'
        problems = "; ".join(
            f"{'.'.join(map(str, (key, *problem['loc'])))}: {_expected(problem)}, got {problem['input']!r}"
            for problem in error.errors()
        )
        raise SettingsError(
            f"{flag}: {problems}; the settings are: {names}, as in {flag} '{example}'"
        ) from error


def number_of(extra: Mapping[str, Any] | None, name: str, least: float, most: float) -> float | None:
    """A number in a request's `vllm_xargs`; None if there is none.

    Raises:
        SettingsError: it is no number from `least` to `most`. An engine cannot refuse a request in
            its scheduler, so callers log this.
    """
    number = number_in(extra, name)
    if number is None or least <= number <= most:
        return number
    given = shown((extra or {})[name])
    raise SettingsError(f"vllm_xargs.{name} is {given}, not a number from {least:g} to {most:g}")


def _expected(problem: Any) -> str:
    return "unknown setting" if problem["type"] == "extra_forbidden" else expected(problem)
