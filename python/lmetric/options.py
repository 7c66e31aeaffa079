"""Typed routing options of router, simulator, studies and server.

Each option is a frozen pydantic model with the defaults of the router. Units are in the names. A
model raises `lmetric.BadValueError` for unknown settings and types, and the router for values out
of range. `Routing` groups the options.

Files, command lines and `lmetric.simulate` also accept options as text or mappings:
`lmetric.option_values` reads them.

A setting is a constant of servers unless `Served` or `Study` annotates it: studies chose its
default, and no operator needs another value. Servers refuse constants and settings for studies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, TypeGuard, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from lmetric.defaults import DEFAULT_POLICY, PLANNER

if TYPE_CHECKING:
    from lmetric.lengths import LengthPredictor

Forecast = Literal[
    "curve", "given", "bins_2", "bins_4", "bins_6", "llm_native", "pia", "mu_serve", "tetri_infer"
]
"""Predictor of an answer's remaining length. All but ``curve`` need the true length
(simulations)."""

if TYPE_CHECKING:
    ForecastLike: TypeAlias = Forecast | str | LengthPredictor | Callable[..., Any]
else:
    ForecastLike = Any  # for pydantic; the core checks the value
"""`Forecast`, a predictor file (.npz, .onnx), a reference to a Python object, a predictor, or a
function.

Documentation: docs/how-to/deploying.md.
"""

KvSource = Literal["approximate", "exact"]
"""The source of the KV index: placed requests, or the engines' KV events."""

CountedTiers = Literal["auto", "all", "off"]
"""The tiers below the GPU whose cached blocks count in scores."""

Handoff = Literal["nowhere", "prompt_end", "output", "anywhere"]
"""The token at which an engine can transfer a request to another engine, or receive one."""

Maturity: TypeAlias = Literal["stable", "experimental", "study"]
"""The maturity of a policy or a planner. Documentation: docs/reference/policies.md."""
Binding = Literal["early", "late"]
"""The time at which a decode instance is chosen: with the prefill instance, or after prefill."""

Auto = Literal["auto"]
"""The default of the policy: splits and prefix fetches are on with ``planner``, else off."""

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
"""The reason why a request failed. Only after the first seven the router tries another instance."""


@dataclass(frozen=True, slots=True)
class Served:
    """Annotates a setting that servers accept."""

    when: str = ""
    """The reason to change it."""


@dataclass(frozen=True, slots=True)
class Study:
    """Annotates a setting for simulations only."""

    because: str
    """The reason why servers refuse it."""
    values: tuple[str, ...] | None = None
    """The values for simulations only; None: all."""


@dataclass(frozen=True, slots=True)
class ServerDefault:
    """Annotates a setting with a different default in servers."""

    value: Any


_LENGTHS = Study("it needs the true length of each answer")
_FORECASTS = Study("it needs the true length of each answer", get_args(Forecast)[1:])
_REASONING = Study("requests do not contain the length of their reasoning")
_SEED = Study("it is the seed of simulated forecasts")
_GAPS = Study("it makes the learned gaps wrong")
_PLACES = Study("below its limit, an instance has nothing to lose")
_ENGINE = Study("it is a fact of the engines")


class _Option(BaseModel):
    """A routing option."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    what: ClassVar[str]  # the option's name
    core_kind: ClassVar[str] = ""  # the kind; "": in the fields
    # Settings that the server reads, and the core does not have.
    of_servers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, /, **given: Any) -> None:
        """Checks names and types.

        Raises:
            BadValueError: with the attributes `path`, `value` and `problem`.
        """
        try:
            super().__init__(**given)
        except ValidationError as error:
            from lmetric.option_errors import refusal

            cls = type(self)
            raise refusal(cls, error, cls.__name__, list(cls.model_fields)) from None


class LibraSplit(_Option):
    """Split a request between two instances at the token that balances their load, if that saves
    time.

    Source: Libra, Algorithm 1.
    """

    what: ClassVar[str] = "split"
    core_kind: ClassVar[str] = "libra"

    parts: Annotated[int, _REASONING] = 2
    """Most parts. 3: also split off the reasoning of requests with `reasoning_tokens`
    (simulations)."""
    probes: int = 6
    """Most split points to try per request; 1 to 32."""
    epsilon: float = 0.05
    """Load difference that counts as balanced, as a fraction of the request's own time."""
    min_gain: float = 0.05
    """Minimum gain of a split, as a fraction of the request's own time; below 0: any."""
    min_tokens: int = 32
    """Fewest tokens of each part."""
    transfer_seconds_per_token: float = 0.0
    """Time of a KV transfer that does not overlap with computation, per token."""
    transfer_fixed_seconds: float = 0.0
    """Fixed time of each KV transfer."""
    quantile: float = 0.5
    """Expected length as a quantile of similar answers, 0 to 1."""
    margin_tokens: int = 20
    """Tokens to add to the expected length."""
    bounded_batch: bool = False
    """Predictions bound a batch by the engine's sequence slots and memory (the paper's N_max)."""
    lengths_given: Annotated[bool, _LENGTHS] = False
    """Whether `max_tokens` of a request is the exact length of its answer (simulations)."""


class DecodePlacement(_Option):
    """Decode a request on its prefill instance or on another: the choice with the least total
    delay.

    Use it with the policy ``planner`` (docs/research/planner.md).
    """

    what: ClassVar[str] = "split"
    core_kind: ClassVar[str] = "apart"

    recent_seconds: float = 30.0
    """Time constant of the average share of time that an instance spends on prefills."""
    min_gain_seconds: float = 0.3
    """Minimum delay that another instance must save, summed over all requests."""
    transfer_seconds_per_token: float = 4e-6
    """Time of a KV transfer per token; learned if prefix fetches are on."""
    transfer_fixed_seconds: float = 0.005
    """Fixed time of each KV transfer."""
    max_stall_seconds: float = 0.1
    """The client gets the first token from the prefill instance if the transfer takes at most this
    long."""
    prior_tokens: int = 300
    """Expected length of an answer until enough similar answers have ended."""
    lengths_given: Annotated[bool, _LENGTHS] = False
    """Whether `max_tokens` of a request is the exact length of its answer (simulations)."""


class SplitAt(_Option):
    """Split every request at a fraction of its prompt and `max_tokens`; for tests of engines."""

    what: ClassVar[str] = "split"
    core_kind: ClassVar[str] = "force"

    fraction: Annotated[float, Served()]
    """Split point, 0 to 1."""


class PrefixFetch(_Option):
    """Fetch the part of a prompt's KV that another instance holds, if that is faster than computing
    it."""

    what: ClassVar[str] = "prefix_fetch"
    core_kind: ClassVar[str] = "on"

    seconds_per_token: float | None = None
    """Time per fetched token until it is learned; None: 4e-6, in simulations the time in
    `transfer`."""
    fixed_seconds: float | None = None
    """Further time per fetch until it is learned; None: 0.005, in simulations as in `transfer`."""
    min_tokens: int = 256
    """Fewest tokens per fetch."""
    max_fetches: int = 4
    """Most concurrent fetches from one holder."""
    # vLLM keeps the blocks of a fetching request for another lease after its end. They could fill
    # the cache.
    max_kv_usage: Annotated[float, ServerDefault(0.8)] = 1.0
    """Instances at or above this KV cache usage (fraction) fetch nothing."""


class SimulatedFetch(PrefixFetch):
    """A prefix fetch of the simulator, with its cost for the holder. Routers do not accept it."""

    holder_seconds: Annotated[float, _ENGINE] = 0.0
    """Time that a fetch adds to the next step of a busy holder."""
    waits: Annotated[bool, _ENGINE] = True
    """Whether a fetch waits for the holder's current step. False: it reads the memory at once."""
    pinned: Annotated[bool, _ENGINE] = True
    """Whether the holder keeps the fetched blocks in its cache until the end of the transfer."""


class UniBoost(_Option):
    """Order the engines' queues by arrival minus a boost, which is larger if less is to compute.

    Source: UniBoost, section 3. Documentation: docs/how-to/overload.md.
    """

    what: ClassVar[str] = "priority"
    core_kind: ClassVar[str] = "uniboost"

    gamma: float = 0.1
    """Decay of the boost, 1/s. If `adaptive`: the value until enough requests have ended."""
    adaptive: bool = True
    """Whether gamma is learned from latencies. If not, the next six settings have no effect."""
    window: int = 1024
    """Number of recent requests from which gamma is learned."""
    min_requests: int | None = None
    """Completed requests before gamma is learned; None: the whole window."""
    every: int = 64
    """Requests between two estimates."""
    smoothing: float = 0.2
    """Weight of a new estimate, 0 to 1."""
    min_gamma: float = 1e-3
    """Lowest gamma, 1/s."""
    max_gamma: float = 10.0
    """Highest gamma, 1/s."""
    bin_tokens: int = 256
    """Bin size, tokens: prompts with their work in the same bin get the same boost."""
    max_boost_seconds: float = 60.0
    """Longest boost of one request over another."""
    clock_offset_seconds: float | None = None
    """Seconds added to the router's clock, so that all routers of the same engines agree.

    None: servers use the wall clock, others add nothing.
    """


class FairShares(_Option):
    """Order the engines' queues by tenants' shares of service (virtual token counters, OSDI
    2024)."""

    what: ClassVar[str] = "priority"
    core_kind: ClassVar[str] = "vtc"


class _Rebalancing(_Option):
    """The settings of all methods that move requests by their predicted lengths."""

    what: ClassVar[str] = "rebalance"

    forecast: Annotated[ForecastLike, _FORECASTS, Served("you have trained a predictor of lengths")] = "curve"
    """Predictor of remaining lengths: `curve` (learned from past answers), a predictor file or a
    Python function (docs/how-to/deploying.md); other names are for simulations."""
    forecast_seed: Annotated[int, _SEED] = 0
    """Seed of forecasts with random errors (simulations)."""
    repredict_tokens: int = 20
    """Output tokens between two length predictions of a request."""
    period_seconds: float = 0.5
    """Time between two rounds of migrations."""
    max_moves: int = 1
    """Most migrations per round."""


class Star(_Rebalancing):
    """Move running requests from loaded to less loaded instances by predicted load.

    Source: STAR, Algorithm 1.
    """

    core_kind: ClassVar[str] = "star"

    prediction: bool = True
    """Whether to predict loads; False: use the current load."""
    horizon_steps: int = 2048
    """Decode steps that the prediction looks ahead."""
    points: int = 32
    """Points on the horizon at which loads are compared."""
    half_life_steps: float = 512.0
    """Steps after which the weight of a point halves; 0: equal weights."""
    threshold: float = 0.1
    """Imbalance above which requests migrate, as a fraction of the mean load."""
    migration_seconds: float = 0.1
    """Fixed time of a migration."""
    migration_seconds_per_token: float = 2e-5
    """Further time of a migration per token of context."""
    caution: float = 0.0
    """Standard deviations of the forecast to subtract from the gain of a migration."""


class Llumnix(_Rebalancing):
    """Move running requests from instances with little free memory to instances with much.

    Source: Llumnix.
    """

    core_kind: ClassVar[str] = "llumnix"

    source_below_steps: float = 48.0
    """Instances with free memory for fewer decode steps are sources of migrations."""
    target_above_steps: float = 48.0
    """Instances with free memory for more decode steps are targets of migrations."""


class Guard(_Option):
    """The hot-spot guard. Documentation: docs/explanation/default_policy.md."""

    what: ClassVar[str] = "guard"
    core_kind: ClassVar[str] = "guard"

    enabled: Annotated[bool, Served()] = True
    """Whether the guard is on."""
    window_seconds: float = 15.0
    """Sliding window for the shares of prefixes in prompt tokens."""
    period_seconds: float = 1.0
    """Time between two checks."""
    classes: int = 64
    """Number of prefixes to count."""
    min_requests: int = 16
    """Fewest requests in the window for an alarm about a prefix."""
    phase2_factor: float = 2.0
    """The guard filters after more than this many consecutive requests per holder of the prefix."""
    release_factor: float = 0.05
    """An alarm ends at this fraction of the ratio that raised it."""


class SplitBy(_Option):
    """Split requests with a planner of the core, by name: for planners without a class."""

    what: ClassVar[str] = "split"

    planner: Annotated[str, Served()]
    """The planner's name."""
    settings: Annotated[Mapping[str, float], Served()] = {}
    """Settings of the planner by name."""


class ProgramObservation(_Option):
    """Follow agent programs and measure the working set of the caches. Hold nothing.

    A program is a chain of requests that share a growing context. Documentation:
    docs/how-to/agents.md.
    """

    what: ClassVar[str] = "programs"
    core_kind: ClassVar[str] = "observe"

    theta: Annotated[float, Served("programs fill the caches too much, or too little")] = 1.0
    """Share of an instance's cache that its programs may be expected to use."""
    resume: float = 0.85
    """Share of `theta` up to which programs are admitted."""
    growth: float = 0.2
    """Fewest tokens counted for a program, as a share of the mean context: room to grow."""
    shortest_first: bool = True
    """Whether held programs with the fewest tokens are admitted first, not the oldest programs."""
    backfill_seconds: float = 600.0
    """How long smaller programs may pass a held program that does not fit."""
    forget_seconds: float = 300.0
    """Length of a gap between two requests after which a program counts as ended until it
    returns."""
    others_seconds: float = 15.0
    """How long tokens of requests outside programs count after their end."""
    min_tokens: int = 2048
    """Requests that continue no program and have fewer tokens of their own, apart from a shared
    prefix such as a system prompt, belong to no program: they are never held."""
    max_hold_seconds: Annotated[float, Served("clients wait longer, or give up earlier")] = 300.0
    """Longest hold. A new program with a longer predicted hold and a program held for longer are
    refused (429)."""
    max_held: int = 4096
    """Most held programs. A tenant with less than its share of them may hold more."""
    sessions: bool = True
    """Whether the session that a request names identifies its program."""
    finish_reason: bool = True
    """Whether gaps after tool calls and after other answers are learned apart."""
    free: Annotated[float, _PLACES] = 1.0
    """Share of `theta` below which the policy places the requests of an instance's programs, while
    no program waits; 0: never."""
    gap_error: Annotated[float, _GAPS] = 1.0
    """Learned gaps are taken as this many times as long."""


class ProgramAdmission(ProgramObservation):
    """Hold requests of agent programs whose working set does not fit into the caches."""

    core_kind: ClassVar[str] = "admit"

    of_servers: ClassVar[tuple[str, ...]] = ("keep_alive_seconds",)

    keep_alive_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """Time between two SSE comments to the client of a held stream, in servers; 0: none. With the
    first comment, the client gets the head of its answer."""


class ProgramAuto(ProgramAdmission):
    """Hold requests of agent programs if most prefill work is recomputed and holds pay."""

    core_kind: ClassVar[str] = "auto"


class ThunderAgent(_Option):
    """Hold requests of agent programs by the rules of ThunderAgent, to compare with them.

    A program counts with all its tokens; between two requests, with a share that halves at a fixed
    rate. Crowded engines lose the programs with the fewest tokens first; returning programs go
    before new ones, those with the fewest tokens first. Clients should send ``x-session-final``.
    Source: Kang et al. 2026, arXiv 2602.13692.
    """

    what: ClassVar[str] = "programs"
    core_kind: ClassVar[str] = "thunder_agent"

    theta: float = 1.0
    """Share of an instance's cache above which programs are paused."""
    pause_to: float = 1.0
    """Share of `theta` down to which programs are paused."""
    resume: float = 1.0
    """Share of `theta` up to which programs are admitted."""
    half_life_seconds: float = 30.0
    """Time after an answer until half of its program's tokens count; 0: all count."""
    shared_roots: bool = True
    """Whether a prefix that several programs share counts once."""
    max_wait_seconds: float = 1e9
    """Hold after which a program is admitted above the limit."""
    forget_seconds: float = 600.0
    """Length of a gap between two requests after which a program counts as ended."""
    others_seconds: float = 0.0
    """How long tokens of requests outside programs count after their end."""
    min_tokens: int = 2048
    """Requests that continue no program and have fewer tokens of their own belong to no program."""
    max_held: int = 4096
    """Most held programs."""
    sessions: bool = True
    """Whether the session that a request names identifies its program."""


class WarmChanges(_Option):
    """Let instances join and leave with warm caches.

    An instance that joins first fetches the prefixes that it will need, then takes requests. Before
    an instance leaves, other instances fetch its prefixes, and its running requests move. A change
    considers the 4,096 most used prompts.
    """

    what: ClassVar[str] = "fleet_changes"
    core_kind: ClassVar[str] = "warm"

    max_seconds: float = 30.0
    """Longest time that an instance fetches before it takes requests, or before it may leave."""
    max_fetches: int = 2
    """Most concurrent fetches from one instance, and to one instance."""
    link_share: float = 0.5
    """Share of the time that these fetches may use a source's link."""
    cache_share: float = 0.5
    """Share of an instance's cache that these fetches may fill."""
    min_tokens: int = 256
    """Fewest tokens per fetch."""
    seconds_per_token: float | None = None
    """Time per fetched token, if prefix fetches have not learned it; None: 4e-6, in simulations the
    time in `transfer`."""
    fixed_seconds: float | None = None
    """Further time per fetch, likewise; None: 0.005, in simulations as in `transfer`."""
    half_life_seconds: float = 120.0
    """Time after which a recent prompt counts half. Prompts older than ten times this do not
    count."""
    max_blocks: int = 1048576
    """Most blocks of recent prompts to remember; 8 bytes each."""


SplitOption: TypeAlias = LibraSplit | DecodePlacement | SplitAt | SplitBy
PriorityOption: TypeAlias = UniBoost | FairShares
RebalanceOption: TypeAlias = Star | Llumnix
ProgramOption: TypeAlias = ProgramObservation | ProgramAdmission | ThunderAgent
Option: TypeAlias = ProgramOption | SplitOption | PrefixFetch | PriorityOption | RebalanceOption | WarmChanges


class Routing(BaseModel):
    """Policies and options together, for router, simulator, studies and server."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    policy: Any = DEFAULT_POLICY
    """Name, expression, `Policy` or `policy_function`."""
    knobs: Mapping[str, float] | None = None
    """Parameters of the policy by name."""
    decode_policy: Any = "least_requests"
    """Policy that chooses the decode instance."""
    decode_knobs: Mapping[str, float] | None = None
    """Parameters of the decode policy by name."""
    binding: Binding = "early"
    """Time at which the decode instance is chosen."""
    split: SplitOption | Auto | None = "auto"
    """Method of splits; None: no splits."""
    prefix_fetch: PrefixFetch | Auto | None = "auto"
    """Whether instances fetch cached prefixes from each other; None: no."""
    priority: PriorityOption | None = None
    """Order of the engines' queues; None: by arrival."""
    rebalance: RebalanceOption | None = None
    """How running requests move between instances; None: they stay."""
    programs: ProgramOption | None = None
    """How agent programs are followed and admitted; None: not at all."""
    fleet_changes: WarmChanges | None = None
    """How instances join and leave; None: with cold caches."""
    guard: Guard | None = None
    """The hot-spot guard; None: off, unless the policy turns it on."""

    def resolved(self, policy: str, *, pools: bool = False, server: bool = False) -> Routing:
        """The settings with ``auto`` replaced by the defaults of a policy.

        Args:
            pools: instances have the roles prefill and decode, so ``auto`` means no other splits.
            server: apply the defaults of servers.
        """
        split: Any = self.split
        fetch: Any = self.prefix_fetch
        if split == "auto":
            split = None if pools else default_of("split", policy)
        if fetch == "auto":
            fetch = default_of("prefix_fetch", policy)
            fetch = with_server_defaults(fetch) if server and fetch is not None else fetch
        return self.model_copy(update={"split": split, "prefix_fetch": fetch})

    @property
    def options(self) -> dict[str, Any]:
        """Split, prefix fetch, priority, rebalancing, programs, fleet changes and guard, as keyword
        arguments of `lmetric.Router`."""
        return {what: getattr(self, what) for what in OPTIONS}


OPTIONS = ("split", "prefix_fetch", "priority", "rebalance", "programs", "fleet_changes", "guard")
"""Names of the options: keywords of `lmetric.Router` and `lmetric.simulate`, keys of files."""
# By option: the key that a plain value sets.
SELECTORS = {what: "enabled" if what in ("prefix_fetch", "guard") else "kind" for what in OPTIONS}
_ADAPTIVE = ("window", "min_requests", "every", "smoothing", "min_gamma", "max_gamma")


def default_of(what: str, policy: str) -> Any:
    """The default of an option for a policy: None, except for the policy ``planner``."""
    if policy != PLANNER:
        return None
    return {"split": DecodePlacement(), "prefix_fetch": PrefixFetch()}.get(what)


def server_default(field: FieldInfo) -> Any:
    """The default of a setting in servers."""
    return next((each.value for each in field.metadata if isinstance(each, ServerDefault)), field.default)


def with_server_defaults(option: Any, given: tuple[str, ...] = ()) -> Any:
    """An option with the defaults of servers. ``given``: settings that keep their value."""
    for name, field in type(option).model_fields.items():
        if name not in given and getattr(option, name) == field.default != server_default(field):
            option = option.model_copy(update={name: server_default(field)})
    return option


def is_option(value: object, what: str) -> TypeGuard[_Option]:
    """Whether a value is an instance of a class of option ``what``."""
    return isinstance(value, _Option) and value.what == what


def core_settings(what: str, option: object) -> tuple[str, dict[str, Any]]:
    """An option in the core's form: its kind (``"none"`` for None) and its settings.

    Args:
        what: ``split``, ``prefix_fetch``, ``priority``, ``rebalance``, ``programs`` or
            ``fleet_changes``.

    Raises:
        BadValueError: the option is of another kind.
    """
    if option is None:
        return "none", {}
    if not is_option(option, what):
        from lmetric.option_errors import bad, instances_of

        raise bad(what, option, f"{instances_of(what)} or None")
    if isinstance(option, SplitBy):
        return option.planner, dict(option.settings)
    values = dict(option)
    kind = option.core_kind
    if "forecast" in values and values["forecast"] not in get_args(Forecast):
        from lmetric.lengths.forecast import resolve_forecast

        values["forecast"] = resolve_forecast(values["forecast"])
    if isinstance(option, Star):
        kind = "star" if values.pop("prediction") else "star_current"
    dropped = _ADAPTIVE if isinstance(option, UniBoost) and not option.adaptive else ()
    if isinstance(option, SimulatedFetch):
        from lmetric.option_errors import bad

        raise bad(what, option, "lmetric.PrefixFetch(...) or None; SimulatedFetch is for simulations only")
    return kind, {
        name: float(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None and name not in (*dropped, *option.of_servers)
    }
