"""Values of routing options: how files, command lines and servers read, check and show them.

`parse` reads ``libra``, ``libra(probes=8)`` and ``{"kind": "libra", "probes": 8}``. A server loads
this module with the first option that its configuration sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from lmetric.option_errors import bad, instances_of, refusal, refused
from lmetric.options import (
    SELECTORS,
    DecodePlacement,
    FairShares,
    Guard,
    LibraSplit,
    Llumnix,
    PrefixFetch,
    ProgramAdmission,
    ProgramAuto,
    ProgramObservation,
    Served,
    SimulatedFetch,
    SplitAt,
    SplitBy,
    Star,
    Study,
    ThunderAgent,
    UniBoost,
    WarmChanges,
    core_settings,
    default_of,
    is_option,
    server_default,
    with_server_defaults,
)

if TYPE_CHECKING:
    from lmetric.options import Maturity

_Mark = TypeVar("_Mark", Served, Study)
_CONSTANT = Study("it is a constant of servers")

# By option: the kinds in configurations, each with its class and the fields that the kind sets.
_KINDS: dict[str, dict[str, tuple[Any, dict[str, Any]]]] = {
    "split": {"libra": (LibraSplit, {}), "apart": (DecodePlacement, {}), "force": (SplitAt, {})},
    "prefix_fetch": {"on": (PrefixFetch, {})},
    "priority": {"uniboost": (UniBoost, {}), "vtc": (FairShares, {})},
    "rebalance": {
        "star": (Star, {}),
        "star_current": (Star, {"prediction": False}),
        "star_oracle": (Star, {"forecast": "given"}),
        "llumnix": (Llumnix, {}),
    },
    "programs": {
        "observe": (ProgramObservation, {}),
        "auto": (ProgramAuto, {}),
        "admit": (ProgramAdmission, {}),
        "thunder_agent": (ThunderAgent, {}),
    },
    "fleet_changes": {"warm": (WarmChanges, {})},
    "guard": {"on": (Guard, {})},
}
# Kinds that configurations of servers refuse, with the reason.
_STUDIED = {
    "force": "it splits without a gain",
    "star_current": "it is star without its prediction",
    "star_oracle": "it needs the true length of each answer",
    "llumnix": "it has the rules of a rival",
    "thunder_agent": "it has the rules of a rival",
}
_SWITCH: TypeAdapter[bool | None] = TypeAdapter(bool | None)


def served(what: str) -> dict[str, Any]:
    """The classes of option `what` on servers, by kind."""
    return {name: cls for name, (cls, _) in _KINDS[what].items() if name not in _STUDIED}


def classes(what: str) -> dict[str, Any]:
    """The classes of option `what` in simulations, by kind."""
    own = {name: SimulatedFetch if cls is PrefixFetch else cls for name, (cls, _) in _KINDS[what].items()}
    return {name: cls for name, cls in own.items() if cls is not SplitAt}


def _mark(field: FieldInfo, kind: type[_Mark]) -> _Mark | None:
    """The annotation of a kind; None: there is none."""
    return next((each for each in field.metadata if isinstance(each, kind)), None)


def _study(field: FieldInfo) -> Study:
    """The reason why servers refuse a setting, or some of its values."""
    return _mark(field, Study) or _CONSTANT


def is_study(field: FieldInfo) -> bool:
    """Whether servers do not offer a setting: it is for simulations only, or a constant."""
    return _mark(field, Served) is None


def is_simulated(field: FieldInfo) -> bool:
    """Whether a setting is for simulations only."""
    return _mark(field, Served) is None and _mark(field, Study) is not None


def is_constant(field: FieldInfo) -> bool:
    """Whether a setting is a constant of servers."""
    return _mark(field, Served) is None and _mark(field, Study) is None


def when(field: FieldInfo) -> str:
    """The reason to change a setting of servers."""
    served = _mark(field, Served)
    return "" if served is None else served.when


def offered(cls: type[BaseModel], *, server: bool) -> dict[str, FieldInfo]:
    """The settings of an option by name: all, or those of servers."""
    return {name: each for name, each in cls.model_fields.items() if not (server and is_study(each))}


def _is_studied(field: FieldInfo, value: object) -> bool:
    """Whether a setting has a value for simulations only."""
    if isinstance(value, str) and value in (_study(field).values or ()):
        return True
    return is_study(field) and value not in (field.default, server_default(field))


def kind_of(option: object) -> str:
    """The kind of an option in configurations; ``none`` for None, ``auto`` for ``"auto"``."""
    if option is None or isinstance(option, str):
        return option or "none"
    if isinstance(option, Star):
        if not option.prediction:
            return "star_current"
        return "star_oracle" if option.forecast == "given" else "star"
    if isinstance(option, SplitBy):
        return option.planner
    return str(option.core_kind)  # type: ignore[attr-defined]


def parse_settings(text: str) -> dict[str, str]:
    """Settings from ``"a=1, b=2"``.

    Raises:
        BadValueError: a part is not NAME=VALUE.
    """
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not name or not equals or not value:
            raise bad("settings", part, "NAME=VALUE, as probes=8")
        found[name] = value
    return found


def as_mapping(what: str, value: Any) -> Any:
    """Converts a plain value of an option to a mapping. Returns other values unchanged.

    ``libra(probes=8)`` becomes ``{"kind": "libra", "probes": "8"}``, and ``on`` becomes
    ``{"enabled": True}``.

    Raises:
        BadValueError: the text has no valid syntax.
    """
    selector = SELECTORS[what]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bool):
        return {selector: value if selector == "enabled" or value else "none"}
    if not isinstance(value, str):
        return {selector: None} if value is None else value
    text = value.strip()
    if selector == "enabled":
        if text in ("none", "auto"):
            return {selector: False if text == "none" else None}
        if "=" not in text:
            return {selector: text}
        return ({selector: True} if what == "prefix_fetch" else {}) | parse_settings(text)
    called = re.fullmatch(r"(\w+)\s*\((.*)\)", text, re.DOTALL)
    return {selector: text} if called is None else {selector: called[1], **parse_settings(called[2])}


def parse(what: str, value: Any, *, server: bool = False, policy: str = "") -> Any:
    """Reads an option from a configuration: a name, a text, a mapping, or the option itself.

    Args:
        what: one of `OPTIONS`.
        server: refuse settings for simulations only, and apply the defaults of servers.
        policy: policy whose default kind is used for a mapping without a kind.

    Returns:
        The option; None for ``none``; ``"auto"`` for None and ``auto`` of splits and prefix
        fetches; None for ``auto`` of the guard.

    Raises:
        BadValueError: with the attributes `path` (field names below `what`), `value` and `problem`.
    """
    if is_option(value, what):
        _check_range(what, value, list(dict(value)))
        if not server:
            return value
        _check_kind(what, kind_of(value))
        return _for_server(what, value, ())
    given = as_mapping(what, value)
    if not isinstance(given, dict):
        raise refused((), value, f"expected a name, a mapping, or one of {instances_of(what)}", what)
    off = None if what in ("priority", "rebalance", "programs", "fleet_changes") else "auto"
    selected = given.pop(SELECTORS[what], None)
    if SELECTORS[what] == "enabled":
        return _switched(what, selected, given, server)
    by_default = selected is None or (selected == "auto" and "auto" not in _KINDS[what])
    if (by_default or selected == "none") and not given:
        return None if selected == "none" else off
    if by_default:
        selected = kind_of(default_of(what, policy))
        if selected == "none":
            known = ", ".join(_known(what, server))
            raise refused(("kind",), None, f"missing beside settings; expected one of {known}", what)
    if what == "split" and selected not in (*_KINDS[what], "none") and selected in _planners():
        if server and selected not in _planners("experimental"):
            raise refused((), selected, "it is for studies only: use it in simulate or study", what)
        option = _checked(what, SplitBy, {"planner": str(selected), "settings": given})
        _check_range(what, option, [])
        return option
    if selected == "none":
        name = next(iter(given))
        raise refused((name,), given[name], "'none' takes no settings; remove it", what)
    if selected not in _KINDS[what]:
        raise refused(
            (), selected, f"expected one of {', '.join(_known(what, server))}", what, _known(what, server)
        )
    return _made(what, selected, given, server)


def _switched(what: str, enabled: Any, given: dict[str, Any], server: bool) -> Any:
    """Reads a prefix fetch or a guard, which can be on or off."""
    try:
        on = _SWITCH.validate_python(enabled)
    except ValueError:
        expected = "expected on, off, auto, or settings as NAME=VALUE"
        raise refused((), enabled, expected, what) from None
    if on is None and not given:
        return None if what == "guard" else "auto"
    if what == "guard":
        return _made(what, "on", given | {"enabled": on is not False}, server)
    made = _made(what, "on", given, server)
    return None if on is False else made


def _made(what: str, kind: str, given: Mapping[str, Any], server: bool) -> Any:
    cls, presets = _KINDS[what][kind]
    if server:
        _check_kind(what, kind)
    made = SimulatedFetch if cls is PrefixFetch else cls
    for name, field in made.model_fields.items() if server else ():
        if name in given and is_study(field):
            raise refused((name,), given[name], f"it {_unoffered(field)}; remove it", what)
    option = _checked(what, made, {**presets, **given}, server)
    _check_range(what, option, list(given))
    if server:
        option = _for_server(what, option, tuple(given))
    return _plain(option) if isinstance(option, SimulatedFetch) else option


def _unoffered(field: FieldInfo) -> str:
    whose = "cannot be set" if is_constant(field) else "is for simulations only"
    return f"{whose} ({_study(field).because})"


def _check_kind(what: str, kind: str) -> None:
    """Raises BadValueError for a kind that servers refuse."""
    if kind in _STUDIED:
        kinds = ", ".join(_known(what, server=True))
        problem = f"it is for simulations only ({_STUDIED[kind]}); expected one of {kinds}"
        raise refused((), kind, problem, what)


def _for_server(what: str, option: Any, given: tuple[str, ...]) -> Any:
    """The option with the defaults of servers. Raises BadValueError for values for simulations
    only."""
    for name, field in type(option).model_fields.items():
        value = getattr(option, name)
        if _is_studied(field, value):
            told, expected = (
                each if isinstance(each, str) else f"{each!r}" for each in (value, field.default)
            )
            raise refused((name,), value, f"{told} {_unoffered(field)}; expected {expected}", what)
    return with_server_defaults(option, given)


def _plain(fetch: SimulatedFetch) -> PrefixFetch:
    """The fetch as a `PrefixFetch`, if it has no settings of the simulator."""
    own = _shared(fetch)
    return own if SimulatedFetch(**dict(own)) == fetch else fetch


def _shared(fetch: PrefixFetch) -> PrefixFetch:
    """The settings that a fetch of the simulator has in common with others."""
    return PrefixFetch(**{name: getattr(fetch, name) for name in PrefixFetch.model_fields})


def _known(what: str, server: bool = False) -> list[str]:
    named = _planners("experimental" if server else "study") if what == "split" else []
    extra = [name for name in named if name not in _KINDS[what]]
    return ["none", *(served(what) if server else classes(what)), *extra]


def _planners(offers: Maturity = "study") -> list[str]:
    from lmetric._core import planners

    return list(planners(offers))


def _checked(what: str, cls: Any, given: Mapping[str, Any], server: bool = False) -> Any:
    """Checks the values and returns an instance of `cls`."""
    from lmetric._core import BadValueError

    try:
        return cls(**given)
    except BadValueError as error:
        cause: Any = error.__context__
    raise refusal(cls, cause, what, list(offered(cls, server=server)))


def _check_range(what: str, option: Any, given: list[str]) -> None:
    """Raises BadValueError if the core refuses a value, with the field if a single one is
    invalid."""
    from lmetric._core import LmetricError, Router, parsed_option

    def error_of(settings: Any) -> LmetricError | None:
        try:
            if what == "guard":
                Router("lmetric", guard=settings)
            else:
                parsed_option(what, *settings)
        except LmetricError as error:
            return error
        return None

    if isinstance(option, SimulatedFetch):
        option = _shared(option)
        given = [name for name in given if hasattr(option, name)]
    whole = error_of(option if what == "guard" else core_settings(what, option))
    if whole is None:
        return
    for name in given if not isinstance(option, SplitBy) else ():
        value = getattr(option, name)
        if what == "guard":
            alone: Any = Guard(**{name: value})
        else:
            kind, settings = core_settings(what, option)
            alone = kind, {name: settings[name]} if name in settings else {}
        if error := error_of(alone):
            expected = str(error).rpartition("expected ")[2]
            raise refused((name,), value, f"expected {expected}", what) from None
    raise whole


def json_schema(what: str) -> dict[str, Any]:
    """The JSON schema of a server option: a word, or a mapping of settings."""
    from lmetric.descriptions import DescribedSchema

    selector = SELECTORS[what]
    words: list[Any] = ["none", *served(what)] if selector == "kind" else [True, False, "none", "on"]
    mappings = []
    for kind, cls in served(what).items():
        schema = cls.model_json_schema(schema_generator=DescribedSchema)
        own = {
            name: each for name, each in schema["properties"].items() if not is_study(cls.model_fields[name])
        }
        switch = {"const": kind} if selector == "kind" else {"type": ["boolean", "null"]}
        required = [selector] if selector == "kind" else []
        mappings.append({**schema, "properties": {selector: switch, **own}, "required": required})
    return {"anyOf": [{"enum": [*words, "auto", None]}, *mappings]}


def as_settings(what: str, option: Any) -> Any:
    """An option in the form that `parse` reads: a word, or a mapping with all fields of servers."""
    if option is None or isinstance(option, str):
        return option or ("auto" if what == "guard" else "none")
    if isinstance(option, SplitBy):
        return {"kind": option.planner, **option.settings}
    shown = {
        name: getattr(option, name)
        for name, field in type(option).model_fields.items()
        if not is_study(field) or _is_studied(field, getattr(option, name))
    }
    if isinstance(option, PrefixFetch):
        return {"enabled": True, **shown}
    if isinstance(option, Guard):
        return shown
    if isinstance(option, Star) and (kind := kind_of(option)) == "star_current":
        del shown["prediction"]
        return {"kind": kind, **shown}
    return {"kind": option.core_kind, **shown}


def canonical(what: str, value: Any, policy: str = "") -> Any:
    """A checked value in its shortest form: a word if it has no settings, else a mapping.

    Raises:
        BadValueError: the value is invalid.
    """
    option = parse(what, value, policy=policy)
    given = as_mapping(what, value)
    selected = given.pop(SELECTORS[what], None)
    if not given:
        if what == "guard":
            return None if option is None else option.enabled
        return "on" if what == "prefix_fetch" and option not in (None, "auto") else kind_of(option)
    settings = option.settings if isinstance(option, SplitBy) else None
    kept = {name: settings[name] if settings else getattr(option, name) for name in given} if option else {}
    if what == "guard":
        return ({} if selected is None else {"enabled": option.enabled}) | kept
    if what == "prefix_fetch":
        return "none" if option is None else kept
    return {"kind": selected or kind_of(option), **kept}


def shown(value: Any) -> str:
    """A result of `canonical` as text: ``libra(probes=8)``."""
    if not isinstance(value, Mapping):
        return str(value)
    settings = {name: each for name, each in value.items() if name != "kind"}
    text = ", ".join(f"{name}={each:g}" if isinstance(each, float) else f"{name}={each}" for name, each in
                     settings.items())  # fmt: skip
    return f"{value['kind']}({text})" if "kind" in value else text


def sweep(value: Any) -> Iterator[Any]:
    """All combinations of a mapping's values, which can be lists. Yields other values unchanged."""
    from itertools import product

    if not isinstance(value, Mapping):
        yield value
        return
    lists = [each if isinstance(each, list) else [each] for each in value.values()]
    for values in product(*lists):
        yield dict(zip(value, values, strict=True))
