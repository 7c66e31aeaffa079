"""A study as a YAML file: a grid of policies, knobs, loads, seeds, traces, fleets and settings.

A scalar stands for a list of one wherever a list is swept. `examples/study.yaml` shows every key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from lmetric import _deprecated, options
from lmetric._core import LmetricError
from lmetric.config import ConfigError, Strict, explain, read_yaml_mapping
from lmetric.config.kinds import OptionError
from lmetric.defaults import DEFAULT_PROFILE, SLICE, trace_path
from lmetric.profiles import fleet_profiles, load_profile, shipped_profiles
from lmetric.queueing import Swap, checked_order
from lmetric.sim.max_load import Rule
from lmetric.sim.pools import Roles, Transfer
from lmetric.sim.setups import PolicyChoice, Setup, TraceChoice, Value, trace_label
from lmetric.sim.summary import Slo, parse_share
from lmetric.sim.synthetic import check_synthetic


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _counted(value: Any) -> Any:
    if type(value) is not int:
        return value
    if value < 1:
        raise ValueError("a count of at least 1, or a list of seeds")
    return list(range(value))


def _under(key: str) -> BeforeValidator:
    """Lists whose plain entries stand for a mapping with this key alone."""
    return BeforeValidator(
        lambda value: [each if isinstance(each, Mapping) else {key: each} for each in _listed(value)]
    )


def _transfer(value: Any) -> Any:
    told = f"{value:g}" if isinstance(value, int | float) else value
    if isinstance(told, str):
        Transfer.of(told)
    return told


def _option(what: str) -> BeforeValidator:
    """Lists of an option, each in its shortest form; a mapping's settings may be lists, too."""

    def checked(value: Any) -> list[Any]:
        try:
            return [options.canonical(what, one) for each in _listed(value) for one in options.sweep(each)]
        except LmetricError as error:
            raise OptionError(error) from None

    return BeforeValidator(checked)


def _swap(value: str) -> str:
    Swap.of(value)
    return value


Listed = BeforeValidator(_listed)
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _traces(value: Any) -> Any:
    """Paths stand for entries; all keys of a synthetic trace but the label are its description."""
    return [
        {"label": each.get("label"), "synthetic": {k: v for k, v in each.items() if k != "label"}}
        if isinstance(each, Mapping) and "synthetic" in each
        else each
        if isinstance(each, Mapping)
        else {"path": each}
        for each in _listed(value)
    ]


class TraceEntry(Strict):
    """A trace file or a slice of one; or a synthetic trace, described by the keys beside `synthetic`."""

    path: str | None = Field(None, description="the file, seen from the study file")
    label: str | None = Field(None, description="its name in tables; default: the file's")
    synthetic: dict[str, Any] | None = Field(None, description="sessions or requests; see docs/traces.md")
    format: str | None = Field(None, description="mooncake, ...; default: told by the file")
    block_tokens: Count | None = Field(None, description="tokens under one hash id; default: the file's")
    closed_loop: bool | None = Field(None, description="turns wait for answers; default: as the file says")
    start: NotNegative = Field(0.0, description="trace seconds left out at the front")
    duration: Positive | None = Field(None, description="trace seconds taken from there; default: all")
    requests: Count | None = Field(None, description="only the first so many")
    max_input_tokens: Count | None = Field(None, description="requests with longer prompts are left out")
    prefixes: bool = Field(True, description="false: no request shares a prefix")
    skip_bad_lines: bool = Field(False, description="leave out lines that cannot be read")

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.path is None and self.synthetic is None:
            raise ValueError("give the path of a file, or synthetic with its description")
        return self


class PolicyEntry(Strict):
    """A policy, with its knobs swept."""

    policy: str | dict[str, Any] = Field(
        description="a name, all, linear(lam=0.7), a score expression, or a mapping with filter, score, ..."
    )
    knobs: dict[str, Annotated[list[float], Listed]] = Field(
        default_factory=dict, description="by name, one value or several"
    )
    label: str | None = Field(None, description="its name in tables; default: made of policy and knobs")

    def choices(self) -> Iterator[PolicyChoice]:
        """One for each combination of knobs."""
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
    """How fast requests arrive; a plain number is a speed."""

    speed: Positive | None = Field(None, description="arrivals this many times as fast as in the trace")
    fraction_of_max: Positive | None = Field(None, description="of the maximum load found, see max_load")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.speed is None) == (self.fraction_of_max is None):
            raise ValueError("give speed or fraction_of_max, one of the two")
        return self


class SloEntry(Strict):
    """What goodput counts."""

    ttft_seconds: Positive | None = Field(None, description="largest time to first token")
    tpot_seconds: Positive | None = Field(None, description="largest time per output token after it")


class MaxLoadEntry(Strict):
    """The highest load a fleet sustains, found by bisection of the speed."""

    reference: str = Field("lmetric", description="policy whose maximum the fractions are taken of")
    each_policy: bool = Field(False, description="find every policy's maximum, for the report")
    keep_up: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="sustained: this share of requests has its first token when the last arrives"
    )
    good_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="and this share of the measured ones keeps the slo; default: not asked for"
    )
    tolerance: Annotated[float, Field(ge=1e-4, le=1)] = Field(0.02, description="relative, of the speed")

    def rule(self) -> Rule:
        """What the search goes by."""
        return Rule(self.keep_up, self.good_share, self.tolerance)


class SettingsEntry(Strict):
    """The simulator's settings, each one value or several; left out: the simulator's default."""

    signals: Annotated[list[Literal["exact", "step_end", "delayed"]], Listed] | None = Field(
        None, description="what policies see of the engines, and when"
    )
    admission: Annotated[list[Literal["reserve", "vllm"]], Listed] | None = Field(
        None, description="how engines admit requests"
    )
    local_order: Annotated[list[Annotated[str, AfterValidator(checked_order)]], Listed] | None = Field(
        None, description="in which engines take requests: fcfs, sjf, srpt, ...; see docs/simulator.md"
    )
    preempt: Annotated[list[Annotated[str, AfterValidator(_swap)]], Listed] | None = Field(
        None, description="of requests that go back into a queue: recompute, or swap:GB/S"
    )
    priority: Annotated[list[Any], _option("priority")] | None = Field(
        None, description="what local order priority goes by: the router's numbers, as a server gives them"
    )
    order_slo: Annotated[list[Positive], Listed] | None = Field(
        None, description="under local_order slo: seconds that a step with decodes may take"
    )
    order_think_slo: Annotated[list[Positive], Listed] | None = Field(
        None, description="the same for steps that make reasoning tokens alone; default: order_slo"
    )
    token_slo_seconds: Annotated[list[Positive], Listed] | None = Field(
        None, description="the longest gap between two tokens that counts as good; default: 0.1"
    )
    think_slo_seconds: Annotated[list[Positive], Listed] | None = Field(
        None,
        description="the longest gap before a reasoning token that counts as good; default: "
        "token_slo_seconds",
    )
    silent_segments: Annotated[list[bool], Listed] | None = Field(
        None,
        description="a segment that another one follows sends no token until its end, as on stock engines",
    )
    index: Annotated[list[Literal["exact", "approximate"]], Listed] | None = Field(
        None, description="the router's KV index: fed by engines' events, or by what it sent"
    )
    index_bytes: Annotated[list[Count], Listed] | None = Field(
        None, description="bound on the router's KV index, bytes"
    )
    guard: Annotated[list[Any], _option("guard")] | None = Field(
        None,
        description="the hot-spot guard, see docs/guard.md: true, false, or {window_seconds: [15, 60]}; "
        "default: as the policy declares",
    )
    migration_by: Annotated[list[Literal["kv", "recompute"]], Listed] | None = Field(
        None,
        description="how running requests move: their KV is sent, or the target computes it ahead, as the "
        "server's default; default: kv",
    )
    migration_max_concurrent: Annotated[list[Count], Listed] | None = Field(
        None, description="with recompute: most moves in progress at a time; default: 4"
    )
    migration_max_gap_seconds: Annotated[list[NotNegative], Listed] | None = Field(
        None, description="with recompute: no move makes a longer gap between two tokens; default: 1"
    )
    report_period_seconds: Annotated[list[Positive], Listed] | None = Field(
        None, description="with delayed signals: between two load reports of an engine"
    )
    event_delay_seconds: Annotated[list[NotNegative], Listed] | None = Field(
        None, description="with delayed signals: until a cache event arrives"
    )
    token_stride: Annotated[list[Count], Listed] | None = Field(
        None, description="steps after which the router hears of an engine's tokens; 1: of each"
    )
    routers: Annotated[list[Count], Listed] | None = Field(
        None, description="so many side by side, of which each request comes to one; default: 1"
    )
    sharing_seconds: Annotated[list[Positive], Listed] | None = Field(
        None, description="between two times that they tell each other of their load; default: never"
    )
    predictor: Annotated[list[str], Listed] | None = Field(
        None, description="profile behind predicted_ttft_seconds; default: the engines' own"
    )
    output_known: Annotated[list[bool], Listed] | None = Field(
        None, description="whether the router knows how long each answer will be"
    )
    binding: Annotated[list[Literal["early", "late"]], Listed] | None = Field(
        None, description="with pools: where a request decodes is chosen on arrival, or after its prefill"
    )
    prefill: Annotated[list[Literal["queues", "unlimited"]], Listed] | None = Field(
        None, description="with pools: prompts queue, or each takes its own time and waits for none"
    )
    prefix_fetch: Annotated[list[Any], _option("prefix_fetch")] | None = Field(
        None,
        description="instances fetch cached prefixes from each other: none, on, or {min_tokens: [256, 512]}; "
        "default: on if the policy is planner",
    )
    split: Annotated[list[Any], _option("split")] | None = Field(
        None,
        description="how requests are split that no roles split: none, libra, {kind: libra, probes: [4, 8]}; "
        "default: apart if the policy is planner",
    )
    rebalance: Annotated[list[Any], _option("rebalance")] | None = Field(
        None,
        description="how running requests move: none, star, {kind: star, threshold: [0.1, 0.2], forecast: "
        "bins_4}, llumnix",
    )
    decode_profile: Annotated[list[str], Listed] | None = Field(
        None, description="with roles: profile of instances that only decode; default: as the others"
    )
    transfer: Annotated[list[Annotated[str, BeforeValidator(_transfer)]], Listed] | None = Field(
        None,
        description="where KV moves: GB/s, end or layers, fixed=SECONDS; or none; see docs/simulator.md",
    )

    def combinations(self) -> Iterator[dict[str, Value]]:
        """Every combination of what is given."""
        given = {name: getattr(self, name) for name in type(self).model_fields if getattr(self, name)}
        for values in itertools.product(*given.values()):
            yield dict(zip(given, values, strict=True))


class StudyFile(Strict):
    """All keys of a study."""

    name: str | None = Field(None, description="its title; default: the file's name")
    traces: Annotated[list[TraceEntry], BeforeValidator(_traces)] = Field(min_length=1, description="traces")
    policies: Annotated[list[PolicyEntry], _under("policy")] = Field(min_length=1, description="policies")
    decode_policies: Annotated[list[PolicyEntry], _under("policy")] | None = Field(
        None, min_length=1, description="of the decode pools, each paired with each of policies; needs roles"
    )
    instances: Annotated[list[Count], Listed] = Field([16], min_length=1, description="instances of a fleet")
    roles: Annotated[list[str], Listed] | None = Field(
        None, min_length=1, description="pools in place of instances: 16P64D prefills on 16, decodes on 64"
    )
    profiles: Annotated[list[str], Listed] = Field(
        [DEFAULT_PROFILE],
        min_length=1,
        description='engine profiles, shipped names or files; unequal engines: "8 NAME + 8 NAME"',
    )
    block_tokens: Annotated[list[Count], Listed] | None = Field(
        None, description="tokens of a KV block, the memory staying as large; default: the profile's"
    )
    loads: Annotated[list[LoadEntry], _under("speed")] = Field(
        [LoadEntry(speed=1.0, fraction_of_max=None)], min_length=1, description="loads"
    )
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_counted)] = Field(
        [0], min_length=1, description="a count, or a list of seeds"
    )
    measure: str = Field("0:1", description="share of the requests that counts, by order of arrival")
    slo: SloEntry = Field(default_factory=lambda: SloEntry.model_validate({}), description="for goodput")
    settings: SettingsEntry = Field(
        default_factory=lambda: SettingsEntry.model_validate({}), description="of the simulator"
    )
    max_load: MaxLoadEntry | None = Field(None, description="given: find maximum loads")


@dataclass(frozen=True, slots=True)
class Study:
    """A checked study, expanded. Setups whose load is a fraction still carry speed 1."""

    name: str
    setups: list[Setup]
    rule: Rule
    searches: list[Setup]  # whose maximum load is to be found
    reference: tuple[PolicyChoice, PolicyChoice | None]  # the second of decode pools
    deprecated: tuple[str, ...] = ()  # warnings about keys under old names, with the present spelling


# What policies are compared on without a file: examples/study.yaml, at three loads.
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
    path: Path | None, traces: list[Path] | None = None, policies: list[str] | None = None
) -> Study:
    """Reads and checks a study file; ``traces`` and ``policies`` replace those that it names. Without a file,
    `COMPARISON` is the rest.

    Raises `ConfigError`, naming the file, the key, the value and the nearest right key; for a policy, knob or
    profile that cannot be used, too.
    """
    content = dict(COMPARISON) if path is None else read_yaml_mapping(path)
    path = path or Path("comparison")
    if policies:
        content["policies"] = policies
    if traces:
        content["traces"] = [str(trace_path(trace).resolve()) for trace in traces]
    messages: list[str] = []
    try:
        if isinstance(settings := content.get("settings"), Mapping):
            content["settings"], old = _deprecated.settings(settings)
            messages = [
                f"{path}: settings: " + _deprecated.settings_message(names, key, content["settings"].get(key))
                for key, names in old.items()
            ]
        file = StudyFile.model_validate(content)
        return replace(_expand(file, path), deprecated=tuple(messages))
    except ValidationError as error:
        origin: dict[tuple[str, ...], str] = {(str(key),): str(path) for key in content}
        raise ConfigError("\n".join(explain(error, origin, StudyFile))) from None
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
        raise ConfigError(f"max_load.reference: {entry.reference!r} is not one policy")
    reference = references[0]
    seconds: list[PolicyChoice | None] = [None]
    if file.decode_policies is not None:
        seconds = []
        for each in file.decode_policies:
            seconds += [choice for choice in each.choices() if choice not in seconds]
    pools = [Roles.of(each) for each in file.roles or []]
    if (file.decode_policies is not None) != bool(pools and all(each.decode for each in pools)):
        raise ConfigError("decode_policies and roles with a decode pool (16P64D) need each other")
    for choice in [*policies, reference, *filter(None, seconds)]:
        choice.build()
    profiles = [_profile(name, path.parent) for name in file.profiles]
    given = file.settings
    for key in ("predictor", "decode_profile"):
        if (names := getattr(given, key)) is not None:
            given = given.model_copy(update={key: [_profile(name, path.parent) for name in names]})
    if given.decode_profile is not None and not (pools and all(each.decode for each in pools)):
        raise ConfigError("settings.decode_profile needs roles with a decode pool, e.g. 16P64D")
    chosen = [_trace(trace, path.parent) for trace in file.traces]
    for what, labels in (
        ("policies", [p.label for p in policies]),
        ("decode_policies", [p.label for p in filter(None, seconds)]),
        ("traces", [t.label for t in chosen]),
    ):
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ConfigError(f"{what}: two are called {twice!r}; give one a label")
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
    """The fleets' sizes; unequal engines say themselves how many there are."""
    pairs = fleet_profiles(profile)
    return [sum(instances for instances, _ in pairs)] if pairs else file.instances


def _profile(name: str, directory: Path) -> str:
    """A shipped profile's name, or a path seen from `directory`, or several with numbers of instances; raises
    `ProfileError`."""
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
