"""Study files in YAML: a grid of policies, parameters, loads, seeds, traces, fleets and settings.

A scalar can replace a list with one value. `examples/study.yaml` shows every key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import orjson
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from lmetric import plugins
from lmetric._core import LmetricError
from lmetric.config import ConfigError, Strict, read_yaml_lines
from lmetric.config.kinds import OptionError
from lmetric.config.problems import explain
from lmetric.option_values import canonical, sweep
from lmetric.profiles import fleet_profiles, load_profile, shipped_profiles
from lmetric_lab.defaults import DEFAULT_PROFILE, SLICE, trace_path
from lmetric_lab.sim.max_load import Rule
from lmetric_lab.sim.pools import Roles
from lmetric_lab.sim.scenario import Scenario
from lmetric_lab.sim.setting import Count, NotNegative, Positive, option_of, setting_of, type_in_files
from lmetric_lab.sim.setups import PolicyChoice, Setup, TraceChoice, Value, trace_label
from lmetric_lab.sim.summary import Slo, parse_share
from lmetric_lab.sim.synthetic import check_synthetic


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _counted(value: Any) -> Any:
    if type(value) is not int:
        return value
    if value < 1:
        raise ValueError("expected a number of at least 1, or a list of seeds")
    return list(range(value))


def _under(key: str) -> BeforeValidator:
    """Reads lists. Plain entries abbreviate a mapping with only this key."""
    return BeforeValidator(
        lambda value: [each if isinstance(each, Mapping) else {key: each} for each in _listed(value)]
    )


Listed = BeforeValidator(_listed)


def _traces(value: Any) -> Any:
    """Expands paths to entries. All keys of a synthetic trace except the label are its
    description."""
    return [
        {"label": each.get("label"), "synthetic": {k: v for k, v in each.items() if k != "label"}}
        if isinstance(each, Mapping) and "synthetic" in each
        else each
        if isinstance(each, Mapping)
        else {"path": each}
        for each in _listed(value)
    ]


class TraceEntry(Strict):
    """A trace file, a part of a trace file, or a synthetic trace with its description."""

    path: str | None = Field(None, description="path of the file, relative to the study file")
    label: str | None = Field(None, description="name in tables; default: the file name")
    synthetic: dict[str, Any] | None = Field(
        None, description="sessions or requests; see docs/research/traces.md"
    )
    format: str | None = Field(None, description="mooncake, ...; default: detected")
    block_tokens: Count | None = Field(None, description="tokens per hash ID; default: from the file")
    closed_loop: bool | None = Field(None, description="turns wait for answers; default: as in the file")
    session_rate: Positive | None = Field(
        None, description="sessions per second, if the file has no start times; default: all at 0"
    )
    start: NotNegative = Field(0.0, description="trace seconds to skip at the front")
    duration: Positive | None = Field(None, description="trace seconds to use from there; default: all")
    requests: Count | None = Field(None, description="number of first requests to use; default: all")
    max_input_tokens: Count | None = Field(None, description="skip requests with longer prompts")
    prefixes: bool = Field(True, description="false: no request shares a prefix")
    skip_bad_lines: bool = Field(False, description="skip invalid lines")

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.path is None and self.synthetic is None:
            raise ValueError("set either path, or synthetic with its description")
        return self


class PolicyEntry(Strict):
    """A policy, with values of its parameters."""

    policy: str | dict[str, Any] = Field(
        description="a name, all, linear(lam=0.7), a score expression, or a mapping with filter, score, ..."
    )
    knobs: dict[str, Annotated[list[float], Listed]] = Field(
        default_factory=dict, description="one or several values by name"
    )
    label: str | None = Field(None, description="name in tables; default: policy and parameters")

    def choices(self) -> Iterator[PolicyChoice]:
        """One choice per combination of parameters."""
        bases = (
            PolicyChoice.parse(self.policy)
            if isinstance(self.policy, str)
            else [PolicyChoice(self.policy).labelled()]
        )
        for base in bases:
            for values in itertools.product(*self.knobs.values()):
                knobs = dict(zip(self.knobs, values, strict=True))
                swept = ", ".join(f"{name}={value:g}" for name, value in knobs.items())
                choice = replace(base, knobs={**base.knobs, **knobs})
                if self.label is None:
                    yield choice.labelled() if knobs else choice
                else:
                    yield choice.labelled(f"{self.label}({swept})" if swept else self.label)


class LoadEntry(Strict):
    """The arrival rate. A plain number is a speed."""

    speed: Positive | None = Field(None, description="arrival rate relative to the trace")
    fraction_of_max: Positive | None = Field(
        None, description="fraction of the maximum load, which max_load finds"
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.speed is None) == (self.fraction_of_max is None):
            raise ValueError("set exactly one of speed and fraction_of_max")
        return self


class SloEntry(Strict):
    """Bounds of answers that count as goodput."""

    ttft_seconds: Positive | None = Field(None, description="maximum time to first token")
    tpot_seconds: Positive | None = Field(None, description="maximum time per output token after it")


class MaxLoadEntry(Strict):
    """The search for the highest load that a fleet sustains, by bisection of the speed."""

    reference: str = Field("lmetric", description="policy whose maximum load is the basis of fractions")
    each_policy: bool = Field(False, description="also find the maximum load of every policy, for the report")
    keep_up: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="condition: share of requests with their first token when the last one arrives"
    )
    good_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="condition: share of measured requests that meet the slo; default: none"
    )
    tolerance: Annotated[float, Field(ge=1e-4, le=1)] = Field(
        0.02, description="relative tolerance of the speed"
    )

    def rule(self) -> Rule:
        """The conditions and tolerance of the search."""
        return Rule(self.keep_up, self.good_share, self.tolerance)


class _Grid(Strict):
    """Settings of the simulator, each with one or several values; default: as in the simulator."""

    def combinations(self) -> Iterator[dict[str, Value]]:
        """All combinations of the given values."""
        given = {name: values for name, values in iter(self) if values}
        for values in itertools.product(*given.values()):
            plain = (
                value.model_dump(exclude_none=True, exclude_unset=True)
                if isinstance(value, BaseModel)
                else value
                for value in values
            )
            yield dict(zip(given, plain, strict=True))


def _entry(field: FieldInfo) -> tuple[Any, Any]:
    """The annotation and the default of a setting: one or several values of a field."""
    setting, what = setting_of(field), option_of(field)
    assert setting is not None
    if what is not None:
        annotation: Any = Annotated[list[Any], BeforeValidator(partial(_options, what))]
    elif setting.model is not None:
        annotation = Annotated[list[type_in_files(field) | None], BeforeValidator(_mappings)]  # type: ignore[misc]
    else:
        annotation = Annotated[list[type_in_files(field)], Listed]  # type: ignore[misc]
    return annotation | None, Field(None, description=setting.about)


def _options(what: str, value: Any) -> list[Any]:
    """Reads lists of an option, each in its shortest form. Settings in a mapping can be lists,
    too."""
    try:
        return [canonical(what, one) for each in _listed(value) for one in sweep(each)]
    except LmetricError as error:
        raise OptionError(error) from None


def _mappings(value: Any) -> list[Any]:
    """Reads a list of mappings; `none` switches the setting off. A value can be a list, too."""
    return [None if one == "none" else one for each in _listed(value) for one in sweep(each)]


if TYPE_CHECKING:
    SettingsEntry = _Grid
else:
    SettingsEntry = create_model(
        "SettingsEntry",
        __base__=_Grid,
        __doc__=_Grid.__doc__,
        **{
            name: _entry(field)
            for name, field in Scenario.model_fields.items()
            if (setting := setting_of(field)) and setting.in_study
        },
    )


class StudyFile(Strict):
    """All keys of a study."""

    name: str | None = Field(None, description="title; default: the file name")
    traces: Annotated[list[TraceEntry], BeforeValidator(_traces)] = Field(min_length=1, description="traces")
    policies: Annotated[list[PolicyEntry], _under("policy")] = Field(min_length=1, description="policies")
    decode_policies: Annotated[list[PolicyEntry], _under("policy")] | None = Field(
        None,
        min_length=1,
        description="policies of the decode pools, combined with each of policies; needs roles",
    )
    instances: Annotated[list[Count], Listed] = Field([16], min_length=1, description="number of instances")
    roles: Annotated[list[str], Listed] | None = Field(
        None,
        min_length=1,
        description="pools instead of instances: 16P64D has 16 prefill and 64 decode instances",
    )
    profiles: Annotated[list[str], Listed] = Field(
        [DEFAULT_PROFILE],
        min_length=1,
        description='engine profiles, shipped names or files; mixed fleets: "8 NAME + 8 NAME"',
    )
    block_tokens: Annotated[list[Count], Listed] | None = Field(
        None, description="tokens per KV block, with unchanged memory; default: from the profile"
    )
    loads: Annotated[list[LoadEntry], _under("speed")] = Field(
        [LoadEntry(speed=1.0, fraction_of_max=None)], min_length=1, description="loads"
    )
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_counted)] = Field(
        [0], min_length=1, description="a number of seeds, or a list of seeds"
    )
    measure: str = Field("0:1", description="part of the requests to measure, by order of arrival")
    slo: SloEntry = Field(
        default_factory=lambda: SloEntry.model_validate({}), description="bounds for goodput"
    )
    settings: SettingsEntry = Field(
        default_factory=lambda: SettingsEntry.model_validate({}), description="settings of the simulator"
    )
    max_load: MaxLoadEntry | None = Field(None, description="search for maximum loads; default: none")


@dataclass(frozen=True, slots=True)
class Study:
    """A valid, expanded study. Setups with a fraction of the maximum load still have speed 1."""

    name: str
    setups: list[Setup]
    rule: Rule
    searches: list[Setup]  # setups to search the maximum load of
    reference: tuple[PolicyChoice, PolicyChoice | None]  # policy, and decode policy with pools


# The study without a file: examples/study.yaml, at three loads.
COMPARISON: dict[str, Any] = {
    "traces": [str(SLICE)],
    "instances": 16,
    "block_tokens": 64,
    "seeds": 3,
    "measure": "0.1:0.9",
    "loads": [{"fraction_of_max": fraction} for fraction in (0.25, 0.5, 0.85)],
    "max_load": {"reference": "lmetric"},
}


def load_study(
    path: Path | None,
    traces: list[Path] | None = None,
    policies: list[str] | None = None,
    *,
    allow_code: bool = False,
) -> Study:
    """Reads and checks a study file. ``traces`` and ``policies`` replace the file's.

    Without a file, the other settings are those of `COMPARISON`. ``allow_code``: whether the file
    may name Python objects, whose code runs. ``policies`` always may.

    Raises:
        ConfigError: an invalid file, policy, parameter or profile. The message has the file, the
            key, the value and the nearest valid key.
    """
    content, lines = (dict(COMPARISON), {}) if path is None else read_yaml_lines(path)
    path = path or Path("comparison")
    if policies:
        content["policies"] = policies
    if traces:
        content["traces"] = [str(trace_path(trace).resolve()) for trace in traces]
    try:
        with plugins.code_only_in(None if allow_code else policies or ()):
            file = StudyFile.model_validate(content)
            return _expand(file, path)
    except ValidationError as error:
        origin: dict[tuple[str, ...], str] = {(str(key),): str(path) for key in content} | {(): str(path)}
        raise ConfigError("\n".join(explain(error, origin, StudyFile, {str(path): lines}))) from None
    except (LmetricError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _expand(file: StudyFile, path: Path) -> Study:
    share = parse_share(file.measure)
    slo = Slo(file.slo.ttft_seconds, file.slo.tpot_seconds)
    policies: list[PolicyChoice] = []
    for each in file.policies:
        policies += [choice for choice in each.choices() if choice not in policies]
    entry = file.max_load or MaxLoadEntry.model_validate({})
    references = PolicyChoice.parse(entry.reference)
    if len(references) != 1:
        raise ConfigError(f"max_load.reference: {entry.reference!r} is not a single policy")
    reference = references[0]
    seconds: list[PolicyChoice | None] = [None]
    if file.decode_policies is not None:
        seconds = []
        for each in file.decode_policies:
            seconds += [choice for choice in each.choices() if choice not in seconds]
    pools = [Roles.of(each) for each in file.roles or []]
    if (file.decode_policies is not None) != bool(pools and all(each.decode for each in pools)):
        raise ConfigError("set decode_policies and roles with a decode pool (16P64D) together")
    for choice in [*policies, reference, *filter(None, seconds)]:
        choice.build()
    profiles = [_profile(name, path.parent) for name in file.profiles]
    given = file.settings
    set_ = {key: values for key, values in given if values is not None}
    for key in set_.keys() & {"predictor", "decode_profile"}:
        given = given.model_copy(update={key: [_profile(name, path.parent) for name in set_[key]]})
    if "decode_profile" in set_ and not (pools and all(each.decode for each in pools)):
        raise ConfigError("settings.decode_profile needs roles with a decode pool, e.g. 16P64D")
    chosen = [_trace(trace, path.parent) for trace in file.traces]
    for what, labels in (
        ("policies", [p.label for p in policies]),
        ("decode_policies", [p.label for p in filter(None, seconds)]),
        ("traces", [t.label for t in chosen]),
    ):
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ConfigError(f"{what}: two are named {twice!r}; set a label for one")
    blocks: Sequence[int | None] = file.block_tokens or [None]
    sizes: list[tuple[int, str | None]] = [(each.instances, str(each)) for each in pools]
    fleets = [
        Setup(
            trace=trace, policy=reference, decode_policy=seconds[0], instances=instances,
            roles=roles, profile=profile, block_tokens=block_tokens,
            settings=settings, seed=file.seeds[0], measure=share, slo=slo,
        )
        for trace in chosen
        for profile in profiles
        for block_tokens in blocks
        for instances, roles in sizes or [(instances, None) for instances in _instances(file, profile)]
        for settings in given.combinations()
    ]  # fmt: skip
    setups = [
        replace(
            fleet, policy=policy, decode_policy=second, seed=seed, speed=load.speed or 1.0,
            fraction_of_max=load.fraction_of_max,
        )
        for fleet in fleets
        for load in file.loads
        for policy in policies
        for second in seconds
        for seed in file.seeds
    ]  # fmt: skip
    searches = []
    if file.max_load is not None or any(load.fraction_of_max is not None for load in file.loads):
        pairs = [(reference, seconds[0])]
        if entry.each_policy:
            pairs += [pair for pair in itertools.product(policies, seconds) if pair != pairs[0]]
        searches = [replace(fleet, policy=p, decode_policy=second) for fleet in fleets for p, second in pairs]
    return Study(file.name or path.stem, setups, entry.rule(), searches, (reference, seconds[0]))


def _instances(file: StudyFile, profile: str) -> list[int]:
    """The sizes of the fleets. A profile of a mixed fleet contains its size."""
    pairs = fleet_profiles(profile)
    return [sum(instances for instances, _ in pairs)] if pairs else file.instances


def _profile(name: str, directory: Path) -> str:
    """A shipped profile's name, a path relative to `directory`, or several with numbers of
    instances.

    Raises:
        ProfileError: an unknown or invalid profile.
    """
    if pairs := fleet_profiles(name):
        return " + ".join(f"{instances} {_profile(each, directory)}" for instances, each in pairs)
    found = name if name in shipped_profiles() else str(directory / name)
    load_profile(found)
    return found


def _trace(entry: TraceEntry, directory: Path) -> TraceChoice:
    if entry.synthetic is not None:
        check_synthetic(entry.synthetic, f"trace {entry.label or 'synthetic'}")
        told = orjson.dumps(entry.synthetic, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()
        return TraceChoice("", entry.label or "synthetic", told)
    assert entry.path is not None
    return TraceChoice(
        path=str(trace_path(entry.path, directory)),
        label=entry.label or trace_label(entry.path),
        **entry.model_dump(exclude={"path", "label", "synthetic"}),
    )
