"""Typed options of router, simulator and server: how requests are split, fetched, ordered and moved.

Each option is a frozen dataclass whose defaults are the router's own. Units are in the names. The router
raises `lmetric.BadValueError` for an option with a value out of range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias, get_args

Forecast = Literal[
    "curve", "given", "bins_2", "bins_4", "bins_6", "llm_native", "pia", "mu_serve", "tetri_infer"
]
"""How the remaining length of an answer is predicted; all but ``curve`` need the true one (simulations)."""

Role = Literal["both", "prefill", "decode"]
"""What an instance does: whole requests, only prefills, or only decodes."""

KvSource = Literal["approximate", "exact"]
"""What the KV index learns from: placed requests, or the engines' KV events."""

Handoff = Literal["nowhere", "prompt_end", "output", "anywhere"]
"""At which token an engine can hand a request over, and take one."""

Binding = Literal["early", "late"]
"""When the decode instance of a request is chosen: with the prefill instance, or after the prefill."""

Failure = Literal[
    "refused",
    "dns",
    "tls",
    "unreachable",
    "reset",
    "timeout",
    "status",
    "cancelled",
    "engine_error",
    "resources",
]
"""Why a request failed. Only the first seven let the router try another instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraSplit:
    """Split a request between two instances at the token that balances their load, if that pays.

    Source: Libra, Algorithm 1.
    """

    core_kind: ClassVar[str] = "libra"

    parts: int = 2
    """Most parts. 3: also split off the reasoning of requests that give `reasoning_tokens` (simulations)."""
    probes: int = 6
    """Most split points that are tried for a request; 1 to 32."""
    epsilon: float = 0.05
    """Difference between both instances that counts as balance, as a fraction of the request's own time."""
    min_gain: float = 0.05
    """Gain that a split must bring, as a fraction of the request's own time; below 0: any."""
    min_tokens: int = 32
    """Fewest tokens of each part."""
    transfer_seconds_per_token: float = 0.0
    """Time of a KV transfer that does not overlap with computation, per token."""
    transfer_fixed_seconds: float = 0.0
    """Time that each KV transfer takes besides."""
    quantile: float = 0.5
    """Quantile of similar answers that is taken as the expected length, 0 to 1."""
    margin_tokens: int = 20
    """Tokens that are added to the expected length."""
    bounded_batch: bool = False
    """Predictions bound a batch by the engine's sequence slots and memory (the paper's N_max)."""
    lengths_given: bool = False
    """`max_tokens` of a request is the exact length of its answer; for simulations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlacement:
    """Decode a request where it was prefilled or on another instance, whichever adds the least total delay.

    Policy ``planner`` is made for it; see docs/planner.md.
    """

    core_kind: ClassVar[str] = "apart"

    recent_seconds: float = 30.0
    """Time constant of each instance's share of time spent on prefills."""
    min_gain_seconds: float = 0.3
    """Delay that another instance must save, summed over all requests."""
    transfer_seconds_per_token: float = 4e-6
    """Time of a KV transfer per token; with prefix fetches, it is learned from them."""
    transfer_fixed_seconds: float = 0.005
    """Time that each KV transfer takes besides."""
    max_stall_seconds: float = 0.1
    """The client gets the first token from the prefill instance if the transfer takes at most this long."""
    prior_tokens: int = 300
    """Expected length of an answer until enough similar ones have ended."""
    lengths_given: bool = False
    """`max_tokens` of a request is the exact length of its answer; for simulations."""


@dataclass(frozen=True, slots=True)
class SplitAt:
    """Split every request at this fraction (0 to 1) of its prompt and `max_tokens`: for tests of engines."""

    core_kind: ClassVar[str] = "force"

    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFetch:
    """Fetch the part of a prompt's KV that another instance holds, if that is faster than computing it."""

    core_kind: ClassVar[str] = "on"

    seconds_per_token: float = 4e-6
    """Time of a fetched token until it is learned from fetches."""
    fixed_seconds: float = 0.005
    """Time that a fetch takes besides, until it is learned."""
    min_tokens: int = 256
    """Fewest tokens that are worth a fetch."""
    max_fetches: int = 4
    """Most fetches that one holder serves at a time."""
    max_kv_usage: float = 1.0
    """An instance whose KV cache usage is at least this fraction fetches nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniBoost:
    """Order the engines' queues by arrival, less a boost that is larger for prompts with less to compute.

    Source: UniBoost, section 3; see docs/priorities.md.
    """

    core_kind: ClassVar[str] = "uniboost"

    gamma: float = 0.1
    """Decay of the boost, 1/s; if `adaptive`, the value until enough requests have ended."""
    adaptive: bool = True
    """Whether gamma is learned from latencies. If not, the next six settings have no effect."""
    window: int = 1024
    """Requests that gamma is learned from."""
    min_requests: int | None = None
    """Requests that must have ended before gamma is learned; None: the whole window."""
    every: int = 64
    """Requests between two estimates."""
    smoothing: float = 0.2
    """Weight of a new estimate, 0 to 1."""
    min_gamma: float = 1e-3
    """Lowest gamma, 1/s."""
    max_gamma: float = 10.0
    """Highest gamma, 1/s."""
    bin_tokens: int = 256
    """Prompts whose work falls into the same bin of this many tokens get the same boost."""
    max_boost_seconds: float = 60.0
    """Longest boost of one request over another."""
    clock_offset_seconds: float = 0.0
    """Added to the router's clock, so that all routers before the same engines agree."""


@dataclass(frozen=True, slots=True)
class FairShares:
    """Order the engines' queues by tenants' shares of service (virtual token counters, OSDI 2024)."""

    core_kind: ClassVar[str] = "vtc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """Move running requests from loaded to less loaded instances by predicted load.

    Source: STAR, Algorithm 1.
    """

    core_kind: ClassVar[str] = "star"

    prediction: bool = True
    """False: by the present load alone."""
    forecast: Forecast = "curve"
    forecast_seed: int = 0
    """Seed of forecasts that err at random; for simulations."""
    repredict_tokens: int = 20
    """Output tokens of a request after which its length is predicted again."""
    period_seconds: float = 0.5
    """Time between two rounds."""
    max_moves: int = 1
    """Most moves of one round."""
    horizon_steps: int = 2048
    """Decode steps that the prediction looks ahead."""
    points: int = 32
    """Points on the horizon at which loads are compared."""
    half_life_steps: float = 512.0
    """Steps after which a point counts half; 0: all count the same."""
    threshold: float = 0.1
    """Imbalance above which requests move, as a fraction of the mean load."""
    migration_seconds: float = 0.1
    """Time that a move takes."""
    migration_seconds_per_token: float = 2e-5
    """And per token of context."""
    caution: float = 0.0
    """Standard deviations of the forecast that count against a move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llumnix:
    """Move running requests from instances with little free memory to those with much. Source: Llumnix."""

    core_kind: ClassVar[str] = "llumnix"

    forecast: Forecast = "curve"
    forecast_seed: int = 0
    repredict_tokens: int = 20
    period_seconds: float = 0.5
    max_moves: int = 1
    source_below_steps: float = 48.0
    """An instance with free memory for fewer decode steps gives requests away."""
    target_above_steps: float = 48.0
    """An instance with free memory for more decode steps takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The hot-spot guard; see docs/guard.md."""

    core_kind: ClassVar[str] = "guard"

    enabled: bool | None = None
    """None: as the policy declares."""
    window_seconds: float = 60.0
    """Sliding window over which shares of prefixes are taken."""
    period_seconds: float = 1.0
    """Time between two checks."""
    classes: int = 64
    """Prefixes that are counted at a time."""
    min_requests: int = 16
    """Fewest requests in the window that make a prefix suspect."""
    phase2_factor: float = 2.0
    """The guard filters after more than this many consecutive requests per holder of the prefix."""
    release_factor: float = 0.8
    """An alarm ends at this fraction of the ratio that raised it."""


@dataclass(frozen=True, slots=True)
class SplitBy:
    """Split requests by a planner of the core, by its name: for planners without a class here."""

    planner: str
    settings: Mapping[str, float] = field(default_factory=dict)
    """By name; docs/splits.md lists them."""

    @property
    def core_kind(self) -> str:
        """The planner's name."""
        return self.planner


SplitOption: TypeAlias = LibraSplit | DecodePlacement | SplitAt | SplitBy
PriorityOption: TypeAlias = UniBoost | FairShares
RebalanceOption: TypeAlias = Star | Llumnix
Option: TypeAlias = SplitOption | PrefixFetch | PriorityOption | RebalanceOption

_CHOICES: dict[str, Any] = {
    "split": SplitOption,
    "prefix_fetch": PrefixFetch,
    "priority": PriorityOption,
    "rebalance": RebalanceOption,
}
# Fields whose names in the core do not follow the rule that `min_x` is `least_x` there, and `max_x` `most_x`.
_CORE_NAMES = {"fraction": "at", "max_fetches": "most_pulls", "min_requests": "least"}
_ADAPTIVE = ("window", "min_requests", "every", "smoothing", "min_gamma", "max_gamma")


def _core_name(name: str) -> str:
    for ours, cores in (("min_", "least_"), ("max_", "most_")):
        if name.startswith(ours) and name not in _CORE_NAMES:
            return cores + name.removeprefix(ours)
    return _CORE_NAMES.get(name, name)


def split_names() -> list[str]:
    """What configurations may say of `split`: ``none`` or a planner; ``force`` is for tests of engines."""
    from lmetric._core import planners

    return ["none", *(name for name in planners() if name != SplitAt.core_kind)]


def core_settings(what: str, option: object) -> tuple[str, dict[str, Any]]:
    """An option as the core takes it: its kind (``"none"`` for None) and its settings by the core's names.

    Args:
        what: ``split``, ``prefix_fetch``, ``priority`` or ``rebalance``.

    Raises:
        BadValueError: the option is of another kind.
    """
    if option is None:
        return "none", {}
    kinds = get_args(_CHOICES[what]) or (_CHOICES[what],)
    if not isinstance(option, kinds):
        names = ", ".join(f"lmetric.{kind.__name__}(...)" for kind in kinds)
        raise _bad(what, option, f"{names} or None")
    if isinstance(option, SplitBy):
        return option.core_kind, dict(option.settings)
    values = {each.name: getattr(option, each.name) for each in fields(option)}
    for name, value in values.items():
        if name != "forecast" and value is not None and not isinstance(value, Real):
            raise _bad(f"{what}: {name} of {type(option).__name__}", value, "a number")
    kind = option.core_kind
    if isinstance(option, Star):
        kind = "star" if values.pop("prediction") else "star_current"
    dropped = _ADAPTIVE if isinstance(option, UniBoost) and not option.adaptive else ()
    return kind, {
        _core_name(name): float(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None and name not in dropped
    }


def _bad(what: str, got: object, expected: str) -> Exception:
    from lmetric._core import BadValueError

    return BadValueError(f"{what}: {got!r} is not valid; expected {expected}")


def from_settings(what: str, kind: str, settings: Mapping[str, Any]) -> Any:
    """The option of a kind as configurations name it (``libra``, ``uniboost``, ...), with settings under the
    option's names or the core's.

    Returns None for the kind ``none``.

    Raises:
        BadValueError: an unknown kind or setting, with those that exist.
    """
    from lmetric._core import planners

    kinds = {
        each.core_kind: each for each in get_args(_CHOICES[what]) or (_CHOICES[what],) if each is not SplitBy
    }
    if what == "split" and kind not in kinds and kind in planners():
        return SplitBy(kind, dict(settings))
    presets: dict[str, Any] = {}
    if what == "rebalance" and kind in ("star_current", "star_oracle"):
        presets = {"prediction": False} if kind == "star_current" else {"forecast": "given"}
        kind = "star"
    option = None if kind == "none" else kinds.get(kind)
    if option is None and kind != "none":
        known = ", ".join(repr(name) for name in ("none", *kinds))
        raise _bad(what, kind, f"one of {known}")
    names = {} if option is None else {each.name: each for each in fields(option)}
    cores = {_core_name(name): name for name in names}
    given = dict(presets)
    for name, value in settings.items():
        own = name if name in names else cores.get(name)
        if own is None or own == "prediction":
            known = ", ".join(name for name in names if name != "prediction") or "nothing"
            raise _bad(f"{what}: setting of {kind!r}", name, known)
        given[own] = _as_declared(f"{what}: {name}", str(names[own].type), value)
    return None if option is None else option(**given)


def _as_declared(what: str, declared: str, value: Any) -> Any:
    """A number of a configuration as the field is declared: ``0`` and ``1`` are flags of a field of bool."""
    if declared == "bool":
        if value in (0, 1):
            return bool(value)
        raise _bad(what, value, "0 or 1")
    if declared.startswith("int") and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


__all__ = [
    "Binding",
    "DecodePlacement",
    "Failure",
    "FairShares",
    "Forecast",
    "Guard",
    "Handoff",
    "KvSource",
    "LibraSplit",
    "Llumnix",
    "Option",
    "PrefixFetch",
    "PriorityOption",
    "RebalanceOption",
    "Role",
    "SplitAt",
    "SplitBy",
    "SplitOption",
    "Star",
    "UniBoost",
    "core_settings",
    "from_settings",
    "split_names",
]
