"""Typed routing options of router, simulator, studies and server.

Each option is a frozen dataclass with the defaults of the router. Units are in the names. The
router raises `lmetric.BadValueError` for values out of range. `Routing` groups the options.

Files, command lines and `lmetric.simulate` also accept options as text or mappings, which `parse`
reads: ``libra``, ``libra(probes=8)``, ``{"kind": "libra", "probes": 8}``.

Metadata of fields: ``maturity: study`` marks a field for simulations only, with the reason in
``because``. ``maturity: constant`` marks a field that is a constant of servers: studies chose its
default, and no operator needs another value. Servers refuse such fields.
``study_values`` marks single values in the same way. ``server`` is the default of servers, if it
differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from numbers import Real
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from lmetric.defaults import DEFAULT_POLICY, PLANNER
from lmetric.validation import expected

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

Role = Literal["both", "prefill", "decode"]
"""The work of an instance: whole requests, only prefills, or only decodes."""

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

# Pydantic settings of the option classes.
_CHECKS: dict[str, Any] = {"extra": "forbid", "use_attribute_docstrings": True}


# Metadata of the constants of servers: library, simulations and studies can set them.
_CONSTANT = {"maturity": "constant", "because": "it is a constant of servers"}
# Metadata of fields that only simulations can set, with the reason.
_LENGTHS = {"maturity": "study", "because": "it needs the true length of each answer"}
_FORECASTS = {"study_values": get_args(Forecast)[1:], "because": "it needs the true length of each answer"}
_REASONING = {"maturity": "study", "because": "requests do not contain the length of their reasoning"}
_SEED = {"maturity": "study", "because": "it is the seed of simulated forecasts"}
_GAPS = {"maturity": "study", "because": "it makes the learned gaps wrong"}
_PLACES = {"maturity": "study", "because": "below its limit, an instance has nothing to lose"}
_KEEP_ALIVE = {"server_range": (0.0, 3600.0), **_CONSTANT}  # the server reads it, the core does not have it
_ENGINE = {"maturity": "study", "because": "it is a fact of the engines"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraSplit:
    """Split a request between two instances at the token that balances their load, if that saves
    time.

    Source: Libra, Algorithm 1.
    """

    core_kind: ClassVar[str] = "libra"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    parts: int = field(default=2, metadata=_REASONING)
    """Most parts. 3: also split off the reasoning of requests with `reasoning_tokens`
    (simulations)."""
    probes: int = field(default=6, metadata=_CONSTANT)
    """Most split points to try per request; 1 to 32."""
    epsilon: float = field(default=0.05, metadata=_CONSTANT)
    """Load difference that counts as balanced, as a fraction of the request's own time."""
    min_gain: float = field(default=0.05, metadata=_CONSTANT)
    """Minimum gain of a split, as a fraction of the request's own time; below 0: any."""
    min_tokens: int = field(default=32, metadata=_CONSTANT)
    """Fewest tokens of each part."""
    transfer_seconds_per_token: float = field(default=0.0, metadata=_CONSTANT)
    """Time of a KV transfer that does not overlap with computation, per token."""
    transfer_fixed_seconds: float = field(default=0.0, metadata=_CONSTANT)
    """Fixed time of each KV transfer."""
    quantile: float = field(default=0.5, metadata=_CONSTANT)
    """Expected length as a quantile of similar answers, 0 to 1."""
    margin_tokens: int = field(default=20, metadata=_CONSTANT)
    """Tokens to add to the expected length."""
    bounded_batch: bool = field(default=False, metadata=_CONSTANT)
    """Predictions bound a batch by the engine's sequence slots and memory (the paper's N_max)."""
    lengths_given: bool = field(default=False, metadata=_LENGTHS)
    """Whether `max_tokens` of a request is the exact length of its answer (simulations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlacement:
    """Decode a request on its prefill instance or on another: the choice with the least total
    delay.

    Use it with the policy ``planner`` (docs/research/planner.md).
    """

    core_kind: ClassVar[str] = "apart"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    recent_seconds: float = field(default=30.0, metadata=_CONSTANT)
    """Time constant of the average share of time that an instance spends on prefills."""
    min_gain_seconds: float = field(default=0.3, metadata=_CONSTANT)
    """Minimum delay that another instance must save, summed over all requests."""
    transfer_seconds_per_token: float = field(default=4e-6, metadata=_CONSTANT)
    """Time of a KV transfer per token; learned if prefix fetches are on."""
    transfer_fixed_seconds: float = field(default=0.005, metadata=_CONSTANT)
    """Fixed time of each KV transfer."""
    max_stall_seconds: float = field(default=0.1, metadata=_CONSTANT)
    """The client gets the first token from the prefill instance if the transfer takes at most this
    long."""
    prior_tokens: int = field(default=300, metadata=_CONSTANT)
    """Expected length of an answer until enough similar answers have ended."""
    lengths_given: bool = field(default=False, metadata=_LENGTHS)
    """Whether `max_tokens` of a request is the exact length of its answer (simulations)."""


@dataclass(frozen=True, slots=True)
class SplitAt:
    """Split every request at a fraction of its prompt and `max_tokens`; for tests of engines."""

    core_kind: ClassVar[str] = "force"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    fraction: float
    """Split point, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFetch:
    """Fetch the part of a prompt's KV that another instance holds, if that is faster than computing
    it."""

    core_kind: ClassVar[str] = "on"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    seconds_per_token: float | None = field(default=None, metadata=_CONSTANT)
    """Time per fetched token until it is learned; None: 4e-6, in simulations the time in
    `transfer`."""
    fixed_seconds: float | None = field(default=None, metadata=_CONSTANT)
    """Further time per fetch until it is learned; None: 0.005, in simulations as in `transfer`."""
    min_tokens: int = field(default=256, metadata=_CONSTANT)
    """Fewest tokens per fetch."""
    max_fetches: int = field(default=4, metadata=_CONSTANT)
    """Most concurrent fetches from one holder."""
    # vLLM keeps the blocks of a fetching request for another lease after its end. They could fill
    # the cache.
    max_kv_usage: float = field(default=1.0, metadata={"server": 0.8, **_CONSTANT})
    """Instances at or above this KV cache usage (fraction) fetch nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFetch(PrefixFetch):
    """A prefix fetch of the simulator, with its cost for the holder. Routers do not accept it."""

    holder_seconds: float = field(default=0.0, metadata=_ENGINE)
    """Time that a fetch adds to the next step of a busy holder."""
    waits: bool = field(default=True, metadata=_ENGINE)
    """Whether a fetch waits for the holder's current step. False: it reads the memory at once."""
    pinned: bool = field(default=True, metadata=_ENGINE)
    """Whether the holder keeps the fetched blocks in its cache until the end of the transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniBoost:
    """Order the engines' queues by arrival minus a boost, which is larger if less is to compute.

    Source: UniBoost, section 3. Documentation: docs/how-to/overload.md.
    """

    core_kind: ClassVar[str] = "uniboost"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    gamma: float = field(default=0.1, metadata=_CONSTANT)
    """Decay of the boost, 1/s. If `adaptive`: the value until enough requests have ended."""
    adaptive: bool = field(default=True, metadata=_CONSTANT)
    """Whether gamma is learned from latencies. If not, the next six settings have no effect."""
    window: int = field(default=1024, metadata=_CONSTANT)
    """Number of recent requests from which gamma is learned."""
    min_requests: int | None = field(default=None, metadata=_CONSTANT)
    """Completed requests before gamma is learned; None: the whole window."""
    every: int = field(default=64, metadata=_CONSTANT)
    """Requests between two estimates."""
    smoothing: float = field(default=0.2, metadata=_CONSTANT)
    """Weight of a new estimate, 0 to 1."""
    min_gamma: float = field(default=1e-3, metadata=_CONSTANT)
    """Lowest gamma, 1/s."""
    max_gamma: float = field(default=10.0, metadata=_CONSTANT)
    """Highest gamma, 1/s."""
    bin_tokens: int = field(default=256, metadata=_CONSTANT)
    """Bin size, tokens: prompts with their work in the same bin get the same boost."""
    max_boost_seconds: float = field(default=60.0, metadata=_CONSTANT)
    """Longest boost of one request over another."""
    clock_offset_seconds: float | None = field(default=None, metadata=_CONSTANT)
    """Seconds added to the router's clock, so that all routers of the same engines agree.

    None: servers use the wall clock, others add nothing.
    """


@dataclass(frozen=True, slots=True)
class FairShares:
    """Order the engines' queues by tenants' shares of service (virtual token counters, OSDI
    2024)."""

    core_kind: ClassVar[str] = "vtc"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Star:
    """Move running requests from loaded to less loaded instances by predicted load.

    Source: STAR, Algorithm 1.
    """

    core_kind: ClassVar[str] = "star"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    prediction: bool = field(default=True, metadata=_CONSTANT)
    """Whether to predict loads; False: use the current load."""
    forecast: ForecastLike = field(
        default="curve", metadata={**_FORECASTS, "when": "you have trained a predictor of lengths"}
    )
    """Predictor of remaining lengths: `curve` (learned from past answers), a predictor file or a
    Python function (docs/how-to/deploying.md); other names are for simulations."""
    forecast_seed: int = field(default=0, metadata=_SEED)
    """Seed of forecasts with random errors (simulations)."""
    repredict_tokens: int = field(default=20, metadata=_CONSTANT)
    """Output tokens between two length predictions of a request."""
    period_seconds: float = field(default=0.5, metadata=_CONSTANT)
    """Time between two rounds of migrations."""
    max_moves: int = field(default=1, metadata=_CONSTANT)
    """Most migrations per round."""
    horizon_steps: int = field(default=2048, metadata=_CONSTANT)
    """Decode steps that the prediction looks ahead."""
    points: int = field(default=32, metadata=_CONSTANT)
    """Points on the horizon at which loads are compared."""
    half_life_steps: float = field(default=512.0, metadata=_CONSTANT)
    """Steps after which the weight of a point halves; 0: equal weights."""
    threshold: float = field(default=0.1, metadata=_CONSTANT)
    """Imbalance above which requests migrate, as a fraction of the mean load."""
    migration_seconds: float = field(default=0.1, metadata=_CONSTANT)
    """Fixed time of a migration."""
    migration_seconds_per_token: float = field(default=2e-5, metadata=_CONSTANT)
    """Further time of a migration per token of context."""
    caution: float = field(default=0.0, metadata=_CONSTANT)
    """Standard deviations of the forecast to subtract from the gain of a migration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llumnix:
    """Move running requests from instances with little free memory to instances with much.

    Source: Llumnix.
    """

    core_kind: ClassVar[str] = "llumnix"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    forecast: ForecastLike = field(default="curve", metadata=_FORECASTS)
    """Predictor of remaining lengths: `curve` (learned from past answers), a predictor file or a
    Python function (docs/how-to/deploying.md); other names are for simulations."""
    forecast_seed: int = field(default=0, metadata=_SEED)
    """Seed of forecasts with random errors (simulations)."""
    repredict_tokens: int = 20
    """Output tokens between two length predictions of a request."""
    period_seconds: float = 0.5
    """Time between two rounds of migrations."""
    max_moves: int = 1
    """Most migrations per round."""
    source_below_steps: float = 48.0
    """Instances with free memory for fewer decode steps are sources of migrations."""
    target_above_steps: float = 48.0
    """Instances with free memory for more decode steps are targets of migrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The hot-spot guard. Documentation: docs/explanation/default_policy.md."""

    core_kind: ClassVar[str] = "guard"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    enabled: bool = True
    """Whether the guard is on."""
    window_seconds: float = field(default=15.0, metadata=_CONSTANT)
    """Sliding window for the shares of prefixes in prompt tokens."""
    period_seconds: float = field(default=1.0, metadata=_CONSTANT)
    """Time between two checks."""
    classes: int = field(default=64, metadata=_CONSTANT)
    """Number of prefixes to count."""
    min_requests: int = field(default=16, metadata=_CONSTANT)
    """Fewest requests in the window for an alarm about a prefix."""
    phase2_factor: float = field(default=2.0, metadata=_CONSTANT)
    """The guard filters after more than this many consecutive requests per holder of the prefix."""
    release_factor: float = field(default=0.05, metadata=_CONSTANT)
    """An alarm ends at this fraction of the ratio that raised it."""


@dataclass(frozen=True, slots=True)
class SplitBy:
    """Split requests with a planner of the core, by name: for planners without a class."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    planner: str
    """The planner's name."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings of the planner by name."""

    @property
    def core_kind(self) -> str:
        """The planner's name."""
        return self.planner


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramObservation:
    """Follow agent programs and measure the working set of the caches. Hold nothing.

    A program is a chain of requests that share a growing context. Documentation:
    docs/how-to/agents.md.
    """

    core_kind: ClassVar[str] = "observe"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    theta: float = field(default=1.0, metadata={"when": "programs fill the caches too much, or too little"})
    """Share of an instance's cache that its programs may be expected to use."""
    resume: float = field(default=0.85, metadata=_CONSTANT)
    """Share of `theta` up to which programs are admitted."""
    growth: float = field(default=0.1, metadata=_CONSTANT)
    """Fewest tokens counted for a program, as a share of the mean context: room to grow."""
    shortest_first: bool = field(default=True, metadata=_CONSTANT)
    """Whether held programs with the fewest tokens are admitted first, not the oldest programs."""
    backfill_seconds: float = field(default=120.0, metadata=_CONSTANT)
    """How long smaller programs may pass a held program that does not fit."""
    forget_seconds: float = field(default=300.0, metadata=_CONSTANT)
    """Length of a gap between two requests after which a program counts as ended until it
    returns."""
    others_seconds: float = field(default=15.0, metadata=_CONSTANT)
    """How long tokens of requests outside programs count after their end."""
    min_tokens: int = field(default=2048, metadata=_CONSTANT)
    """Requests that continue no program and have fewer tokens of their own, apart from a shared
    prefix such as a system prompt, belong to no program: they are never held."""
    max_hold_seconds: float = field(
        default=300.0, metadata={"when": "clients wait longer, or give up earlier"}
    )
    """Longest hold. A new program with a longer predicted hold and a program held for longer are
    refused (429)."""
    max_held: int = field(default=4096, metadata=_CONSTANT)
    """Most held programs. A tenant with less than its share of them may hold more."""
    sessions: bool = field(default=True, metadata=_CONSTANT)
    """Whether the session that a request names identifies its program."""
    finish_reason: bool = field(default=True, metadata=_CONSTANT)
    """Whether gaps after tool calls and after other answers are learned apart."""
    free: float = field(default=1.0, metadata=_PLACES)
    """Share of `theta` below which the policy places the requests of an instance's programs, while
    no program waits; 0: never."""
    gap_error: float = field(default=1.0, metadata=_GAPS)
    """Learned gaps are taken as this many times as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAdmission(ProgramObservation):
    """Hold requests of agent programs whose working set does not fit into the caches."""

    core_kind: ClassVar[str] = "admit"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    keep_alive_seconds: float = field(default=10.0, metadata=_KEEP_ALIVE)
    """Time between two SSE comments to the client of a held stream, in servers; 0: none. With the
    first comment, the client gets the head of its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAuto(ProgramAdmission):
    """Hold requests of agent programs while most prefill work is recomputed contexts."""

    core_kind: ClassVar[str] = "auto"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS


@dataclass(frozen=True, slots=True, kw_only=True)
class ThunderAgent:
    """Hold requests of agent programs by the rules of ThunderAgent, to compare with them.

    A program counts with all its tokens; between two requests, with a share that halves at a fixed
    rate. Crowded engines lose the programs with the fewest tokens first; returning programs go
    before new ones, those with the fewest tokens first. Clients should send ``x-session-final``.
    Source: Kang et al. 2026, arXiv 2602.13692.
    """

    core_kind: ClassVar[str] = "thunder_agent"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmChanges:
    """Let instances join and leave with warm caches.

    An instance that joins first fetches the prefixes that it will need, then takes requests. Before
    an instance leaves, other instances fetch its prefixes, and its running requests move.
    """

    core_kind: ClassVar[str] = "warm"
    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

    max_seconds: float = field(default=30.0, metadata=_CONSTANT)
    """Longest time that an instance fetches before it takes requests, or before it may leave."""
    max_fetches: int = field(default=2, metadata=_CONSTANT)
    """Most concurrent fetches from one instance, and to one instance."""
    link_share: float = field(default=0.5, metadata=_CONSTANT)
    """Share of the time that these fetches may use a source's link."""
    cache_share: float = field(default=0.5, metadata=_CONSTANT)
    """Share of an instance's cache that these fetches may fill."""
    min_tokens: int = field(default=256, metadata=_CONSTANT)
    """Fewest tokens per fetch."""
    seconds_per_token: float | None = field(default=None, metadata=_CONSTANT)
    """Time per fetched token, if prefix fetches have not learned it; None: 4e-6, in simulations the
    time in `transfer`."""
    fixed_seconds: float | None = field(default=None, metadata=_CONSTANT)
    """Further time per fetch, likewise; None: 0.005, in simulations as in `transfer`."""
    half_life_seconds: float = field(default=120.0, metadata=_CONSTANT)
    """Time after which a recent prompt counts half. Prompts older than ten times this do not
    count."""
    max_blocks: int = field(default=1048576, metadata=_CONSTANT)
    """Most blocks of recent prompts to remember; 8 bytes each."""


SplitOption: TypeAlias = LibraSplit | DecodePlacement | SplitAt | SplitBy
PriorityOption: TypeAlias = UniBoost | FairShares
RebalanceOption: TypeAlias = Star | Llumnix
ProgramOption: TypeAlias = ProgramObservation | ProgramAdmission | ThunderAgent
Option: TypeAlias = ProgramOption | SplitOption | PrefixFetch | PriorityOption | RebalanceOption | WarmChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Policies and options together, for router, simulator, studies and server."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CHECKS

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
            fetch = _for_server("prefix_fetch", fetch, ()) if server and fetch is not None else fetch
        return replace(self, split=split, prefix_fetch=fetch)

    @property
    def options(self) -> dict[str, Any]:
        """Split, prefix fetch, priority, rebalancing, programs, fleet changes and guard, as keyword
        arguments of `lmetric.Router`."""
        return {what: getattr(self, what) for what in OPTIONS}


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
OPTIONS = tuple(_KINDS)
"""Names of the options: keywords of `lmetric.Router` and `lmetric.simulate`, keys of files."""
# By option: the key that a plain value sets.
SELECTORS = {what: "enabled" if what in ("prefix_fetch", "guard") else "kind" for what in OPTIONS}
# Kinds that configurations of servers refuse, with the reason. Tests of engines give `SplitAt`.
_STUDIED = {
    "force": "it splits without a gain",
    "star_current": "it is star without its prediction",
    "star_oracle": "it needs the true length of each answer",
    "llumnix": "it has the rules of a rival",
    "thunder_agent": "it has the rules of a rival",
}
# Constants of servers whose value is part of a kind.
_OF_KINDS = ("prediction",)
# Core names of fields, except the regular ones: `min_x` is `least_x` in the core, `max_x` is
# `most_x`.
_CORE_NAMES = {"fraction": "at", "max_fetches": "most_pulls", "min_requests": "least"}
_ADAPTIVE = ("window", "min_requests", "every", "smoothing", "min_gamma", "max_gamma")


def _core_name(name: str) -> str:
    for ours, cores in (("min_", "least_"), ("max_", "most_")):
        if name.startswith(ours) and name not in _CORE_NAMES:
            return cores + name.removeprefix(ours)
    return _CORE_NAMES.get(name, name)


def served(what: str) -> dict[str, Any]:
    """The classes of option `what` on servers, by kind."""
    return {name: cls for name, (cls, _) in _KINDS[what].items() if name not in _STUDIED}


def classes(what: str) -> dict[str, Any]:
    """The classes of option `what` in simulations, by kind."""
    own = {name: SimulatedFetch if cls is PrefixFetch else cls for name, (cls, _) in _KINDS[what].items()}
    return {name: cls for name, cls in own.items() if cls is not SplitAt}


def default_of(what: str, policy: str) -> Any:
    """The default of an option for a policy: None, except for the policy ``planner``."""
    if policy != PLANNER:
        return None
    return {"split": DecodePlacement(), "prefix_fetch": PrefixFetch()}.get(what)


def is_study(each: Field[Any]) -> bool:
    """Whether servers do not offer a field: it is for simulations only, or a constant."""
    return each.metadata.get("maturity") == "study" or is_constant(each)


def is_constant(each: Field[Any]) -> bool:
    """Whether a field is a constant of servers."""
    return each.metadata.get("maturity") == "constant"


def _is_studied(each: Field[Any], value: object) -> bool:
    """Whether a field has a value for simulations only."""
    if isinstance(value, str) and value in each.metadata.get("study_values", ()):
        return True
    if each.name in _OF_KINDS:
        return False
    return is_study(each) and value not in (each.default, each.metadata.get("server", each.default))


def field_docs(cls: type) -> dict[str, str]:
    """The description of each field of an option, from its declaration."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if "__dataclass_fields__" in base.__dict__:
            own = _schema_of(base).get("properties", {})
            found |= {name: each["description"] for name, each in own.items() if "description" in each}
    return {name: " ".join(text.split()) for name, text in found.items()}


def _schema_of(cls: type) -> dict[str, Any]:
    """The JSON schema of an option. The schema of fields for Python objects is empty."""
    from pydantic.json_schema import GenerateJsonSchema

    class Schema(GenerateJsonSchema):
        def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
            return {}

    schema: dict[str, Any] = _adapter(cls).json_schema(schema_generator=Schema)
    return schema


_ADAPTERS = Lock()  # pydantic parses source, and Python 3.11 cannot in two threads at once


@cache
def _adapter(cls: Any) -> Any:
    from pydantic import TypeAdapter

    with _ADAPTERS:
        return TypeAdapter(cls)


def kind_of(option: object) -> str:
    """The kind of an option in configurations; ``none`` for None, ``auto`` for ``"auto"``."""
    if option is None or isinstance(option, str):
        return option or "none"
    if isinstance(option, Star):
        if not option.prediction:
            return "star_current"
        return "star_oracle" if option.forecast == "given" else "star"
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
            raise _bad("settings", part, "NAME=VALUE, as probes=8")
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
    if isinstance(value, _classes(what)):
        _check_range(what, value, list(value.__dataclass_fields__))
        if not server:
            return value
        if not isinstance(value, SplitAt):
            _check_kind(what, kind_of(value))
        return _for_server(what, value, ())
    given = as_mapping(what, value)
    if not isinstance(given, dict):
        raise _refused((), value, f"expected a name, a mapping, or one of {_options(what)}", what)
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
            raise _refused(("kind",), None, f"missing beside settings; expected one of {known}", what)
    if what == "split" and selected not in (*_KINDS[what], "none") and selected in _planners():
        if server and selected not in _planners("experimental"):
            raise _refused((), selected, "it is for studies only: use it in simulate or study", what)
        option = SplitBy(str(selected), _checked(what, dict[str, float], given))
        _check_range(what, option, [])
        return option
    if selected == "none":
        name = next(iter(given))
        raise _refused((name,), given[name], "'none' takes no settings; remove it", what)
    if selected not in _KINDS[what]:
        raise _refused(
            (), selected, f"expected one of {', '.join(_known(what, server))}", what, _known(what, server)
        )
    return _made(what, selected, given, server)


def _switched(what: str, enabled: Any, given: dict[str, Any], server: bool) -> Any:
    """Reads a prefix fetch or a guard, which can be on or off."""
    try:
        on = _adapter(bool | None).validate_python(enabled)
    except ValueError:
        expected = "expected on, off, auto, or settings as NAME=VALUE"
        raise _refused((), enabled, expected, what) from None
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
    for each in fields(made) if server else ():
        if each.name in given and is_study(each):
            whose = "cannot be set" if is_constant(each) else "is for simulations only"
            problem = f"it {whose} ({each.metadata['because']}); remove it"
            raise _refused((each.name,), given[each.name], problem, what)
    option = _checked(what, made, {**presets, **given}, server)
    _check_range(what, option, list(given))
    if server:
        option = _for_server(what, option, tuple(given))
    return _plain(option) if isinstance(option, SimulatedFetch) else option


def _check_kind(what: str, kind: str) -> None:
    """Raises BadValueError for a kind that servers refuse."""
    if kind in _STUDIED:
        kinds = ", ".join(_known(what, server=True))
        problem = f"it is for simulations only ({_STUDIED[kind]}); expected one of {kinds}"
        raise _refused((), kind, problem, what)


def _for_server(what: str, option: Any, given: tuple[str, ...]) -> Any:
    """The option with the defaults of servers. Raises BadValueError for values for simulations
    only."""
    for each in fields(option):
        value = getattr(option, each.name)
        if _is_studied(each, value):
            told, expected = (v if isinstance(v, str) else f"{v!r}" for v in (value, each.default))
            because = each.metadata["because"]
            whose = "cannot be set" if is_constant(each) else "is for simulations only"
            problem = f"{told} {whose} ({because}); expected {expected}"
            raise _refused((each.name,), value, problem, what)
        if "server" in each.metadata and each.name not in given and value == each.default:
            option = replace(option, **{each.name: each.metadata["server"]})
    return option


def _plain(fetch: SimulatedFetch) -> PrefixFetch:
    """The fetch as a `PrefixFetch`, if it has no settings of the simulator."""
    own = {each.name: getattr(fetch, each.name) for each in fields(PrefixFetch)}
    return PrefixFetch(**own) if SimulatedFetch(**own) == fetch else fetch


def _known(what: str, server: bool = False) -> list[str]:
    named = _planners("experimental" if server else "study") if what == "split" else []
    extra = [name for name in named if name not in _KINDS[what]]
    return ["none", *(served(what) if server else classes(what)), *extra]


def _classes(what: str) -> tuple[Any, ...]:
    """The classes of an option."""
    own = tuple(dict.fromkeys(cls for cls, _ in _KINDS[what].values()))
    return (*own, SplitBy) if what == "split" else own


def _planners(offers: Maturity = "study") -> list[str]:
    from lmetric._core import planners

    return list(planners(offers))


def _options(what: str) -> str:
    return ", ".join(f"lmetric.{cls.__name__}(...)" for cls in _classes(what))


def _checked(what: str, cls: Any, given: Mapping[str, Any], server: bool = False) -> Any:
    """Checks the values and returns an instance of `cls`."""
    from pydantic import ValidationError

    try:
        return _adapter(cls).validate_python(dict(given))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0]) if problem["loc"] else ""
        if problem["type"] == "missing":
            raise _refused((name,), None, f"missing; {cls.core_kind!r} needs it", what) from None
        if problem["type"] != "unexpected_keyword_argument":
            raise _refused((name,), problem["input"], expected(problem), what) from None
        known = [each.name for each in fields(cls) if not (server and is_study(each))]
        raise _refused((name,), problem["input"], "unknown setting", what, known) from None


def _check_range(what: str, option: Any, given: list[str]) -> None:
    """Raises BadValueError if the core refuses a value, with the field if a single one is
    invalid."""
    from lmetric._core import LmetricError, Router, parsed_option

    def refused(settings: Any) -> LmetricError | None:
        try:
            if what == "guard":
                Router("lmetric", guard=settings)
            else:
                parsed_option(what, *settings)
        except LmetricError as error:
            return error
        return None

    if isinstance(option, SimulatedFetch):
        option = PrefixFetch(**{each.name: getattr(option, each.name) for each in fields(PrefixFetch)})
        given = [name for name in given if hasattr(option, name)]
    for name in _server_settings(option):
        low, high = option.__dataclass_fields__[name].metadata["server_range"]
        if not low <= (value := getattr(option, name)) <= high:
            raise _refused((name,), value, f"expected {low:g} to {high:g}", what)
    whole = refused(option if what == "guard" else core_settings(what, option))
    if whole is None:
        return
    for name in given if not isinstance(option, SplitBy) else ():
        value = getattr(option, name)
        if what == "guard":
            alone: Any = Guard(**{name: value})
        else:
            kind, settings = core_settings(what, option)
            core = _core_name(name)
            alone = kind, {core: settings[core]} if core in settings else {}
        if error := refused(alone):
            expected = str(error).rpartition("expected ")[2]
            raise _refused((name,), value, f"expected {expected}", what) from None
    raise whole


def _refused(
    path: tuple[str, ...],
    value: Any,
    problem: str,
    what: str,
    known: list[str] | None = None,
) -> Exception:
    import difflib

    from lmetric._core import BadValueError

    if known is not None:
        near = next(iter(difflib.get_close_matches(str(path[-1] if path else value), known, 1, 0.5)), None)
        listed = f"known here: {', '.join(known) or 'nothing'}"
        problem += f"; did you mean {near!r}?" if near else "" if not path else f"; {listed}"
    where = ".".join((what, *path))
    said = problem if problem.startswith("missing") else f"{value!r} is not valid; {problem}"
    error = BadValueError(f"{where}: {said}")
    error.path, error.value, error.problem = path, value, problem  # type: ignore[attr-defined]
    return error


def json_schema(what: str) -> dict[str, Any]:
    """The JSON schema of a server option: a word, or a mapping of settings."""
    selector = SELECTORS[what]
    words: list[Any] = ["none", *served(what)] if selector == "kind" else [True, False, "none", "on"]
    mappings = []
    for kind, cls in served(what).items():
        schema = _schema_of(cls)
        hidden = {each.name for each in fields(cls) if is_study(each)}
        own = {name: each for name, each in schema.get("properties", {}).items() if name not in hidden}
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
    values = {each.name: getattr(option, each.name) for each in fields(option)}
    shown = {
        each.name: values[each.name]
        for each in fields(option)
        if not (is_study(each) and not _is_studied(each, values[each.name]))
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


def core_settings(what: str, option: object) -> tuple[str, dict[str, Any]]:
    """An option in the core's form: its kind (``"none"`` for None) and its settings by core name.

    Args:
        what: ``split``, ``prefix_fetch``, ``priority`` or ``rebalance``.

    Raises:
        BadValueError: the option is of another kind.
    """
    if option is None:
        return "none", {}
    if not isinstance(option, _classes(what)):
        raise _bad(what, option, f"{_options(what)} or None")
    if isinstance(option, SplitBy):
        ours = option.planner in _KINDS[what]  # others use the core names
        return option.core_kind, {_core_name(k) if ours else k: v for k, v in option.settings.items()}
    values = {each.name: getattr(option, each.name) for each in fields(option)}
    for name, value in values.items():
        if name != "forecast" and value is not None and not isinstance(value, Real):
            raise _bad(f"{what}: {name} of {type(option).__name__}", value, "a number")
    kind = option.core_kind
    if "forecast" in values and values["forecast"] not in get_args(Forecast):
        from lmetric.lengths.forecast import resolve_forecast

        values["forecast"] = resolve_forecast(values["forecast"])
    if isinstance(option, Star):
        kind = "star" if values.pop("prediction") else "star_current"
    dropped = _ADAPTIVE if isinstance(option, UniBoost) and not option.adaptive else ()
    if isinstance(option, SimulatedFetch):
        raise _bad(what, option, "lmetric.PrefixFetch(...) or None; SimulatedFetch is for simulations only")
    return kind, {
        _core_name(name): float(value) if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None and name not in (*dropped, *_server_settings(option))
    }


def _server_settings(option: Any) -> list[str]:
    """The settings that the server reads, and the core does not have."""
    return [each.name for each in fields(option) if "server_range" in each.metadata]


def _bad(what: str, got: object, expected: str) -> Exception:
    from lmetric._core import BadValueError

    return BadValueError(f"{what}: {got!r} is not valid; expected {expected}")


__all__ = [
    "OPTIONS",
    "SELECTORS",
    "Auto",
    "Binding",
    "CountedTiers",
    "DecodePlacement",
    "Failure",
    "FairShares",
    "Forecast",
    "ForecastLike",
    "Guard",
    "Handoff",
    "KvSource",
    "LibraSplit",
    "Llumnix",
    "Maturity",
    "Option",
    "PrefixFetch",
    "PriorityOption",
    "RebalanceOption",
    "Role",
    "Routing",
    "SimulatedFetch",
    "SplitAt",
    "SplitBy",
    "SplitOption",
    "Star",
    "UniBoost",
    "WarmChanges",
    "as_mapping",
    "as_settings",
    "canonical",
    "classes",
    "core_settings",
    "default_of",
    "field_docs",
    "is_constant",
    "is_study",
    "json_schema",
    "kind_of",
    "parse",
    "parse_settings",
    "served",
    "shown",
    "sweep",
]
