"""The declaration of a simulation: each setting of the simulator is a field of `Scenario`.

The fields are the keywords of `lmetric.simulate`, the flags of ``lmetric-router simulate`` and the
settings of study files. For a further setting, add a field here and a keyword to the core.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from lmetric._core import BadValueError
from lmetric.defaults import DEFAULT_POLICY
from lmetric.validation import expected
from lmetric_lab.defaults import DEFAULT_PROFILE, ORDER_SLO
from lmetric_lab.sim.pools import Transfer
from lmetric_lab.sim.setting import (
    Count,
    NotNegative,
    Positive,
    RoutingOption,
    Setting,
    Text,
    bounds,
    off_is_a_word,
    read_changes,
    read_host_tier,
    read_order,
    read_preempt,
    read_roles,
    read_transfer,
)

if TYPE_CHECKING:
    from lmetric.config import LoadAdmission

Migration = Literal["fetch", "recompute"]
"""The method of migrations."""


def _load_admission() -> type[LoadAdmission]:
    from lmetric.config import LoadAdmission

    return LoadAdmission


class Scenario(BaseModel):
    """All settings of a simulation but its trace.

    An invalid value is an `lmetric.BadValueError`, an unknown name a TypeError. The options
    `split`, `prefix_fetch`, `rebalance`, `programs`, `fleet_changes`, `priority` and `guard` accept
    a kind, a text with settings (``"libra(probes=8)"``), a mapping (``{"kind": "libra", "probes":
    8}``), or an option of `lmetric.options`, which documents the settings.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    policy: Any = DEFAULT_POLICY
    """A policy as for `lmetric.Router`: name, expression, `Policy`, `policy_function`, or a
    function whose parameters are indicators."""
    knobs: Mapping[str, float] | None = None
    """Parameters of the policy by name."""
    decode_policy: Any = None
    """Policy that chooses the decode instance; None: `least_requests`."""
    decode_knobs: Mapping[str, float] | None = None
    """Parameters of the decode policy by name."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all random choices (ties, random policies)."""

    # -- the fleet
    instances: Annotated[
        Count | None,
        Setting(
            "Number of engines.", "basic", default="16, or as --profile gives", in_study=False, convert=True
        ),
    ] = None
    """Number of engines; None: 16, or the number of profiles."""
    profile: Annotated[
        Any,
        Text(),
        Setting(
            "Step times: a shipped profile or a YAML file; mixed fleets: '8 NAME + 8 NAME'.",
            "basic",
            in_study=False,
            convert=True,
        ),
    ] = DEFAULT_PROFILE
    """A shipped name, a path, a mapping, or a `Profile`. For a mixed fleet: a sequence with one
    profile per instance, or ``"8 NAME + 8 NAME"``. `Profile.slower` makes slower engines. All
    profiles need the same block size and `kv_bytes_per_token`."""
    changes: Annotated[
        Any,
        Text(read_changes),
        Setting(
            "Instances that join and leave: '600 join 8, 1200 leave 3'.",
            "basic",
            default="none",
            metavar="CHANGES",
            convert=True,
        ),
    ] = ()
    """Instances that join and leave during the run: a sequence of `FleetChange`, or a text: ``"600
    join 8, 1200 leave 3"`` (at 600 s, instance 8 joins). An instance whose first change is a join
    is absent before."""
    fleet_changes: Annotated[
        Any, RoutingOption("fleet_changes"), Setting("How instances join and leave.", "disaggregation")
    ] = "none"
    """How instances join and leave: ``"none"`` (with cold caches), or ``"warm"``: prefixes are
    fetched before a newcomer takes requests, and before an instance leaves; its running requests
    move."""
    roles: Annotated[
        Any,
        Text(read_roles),
        Setting(
            "Prefill and decode pools, instead of --instances.",
            "disaggregation",
            default="none",
            metavar="16P64D",
            in_study=False,
            convert=True,
        ),
    ] = None
    """Prefill and decode pools instead of `instances`: ``"16P64D"``, or ``{"prefill": 16, "decode":
    64}``. `policy` chooses the prefill instance."""
    decode_profile: Annotated[
        Any,
        Text(),
        Setting(
            "With --roles: profile of decode instances.",
            "disaggregation",
            default="--profile",
            convert=True,
        ),
    ] = None
    """Profile of decode instances, for example with more GPUs; None: as the others. Model and block
    size must be the same."""
    binding: Annotated[
        Literal["early", "late"],
        Setting(
            "With --roles: choose the decode engine on arrival or after prefill.",
            "disaggregation",
            convert=True,
        ),
    ] = "early"
    """``"early"`` chooses the decode instance at arrival. ``"late"`` chooses it after prefill."""
    prefill: Annotated[
        Literal["queues", "unlimited"],
        Setting(
            "With --roles: prompts queue, or each takes only its own time.", "disaggregation", convert=True
        ),
    ] = "queues"
    """``"queues"``: prompts queue as on engines. ``"unlimited"``: every prompt takes only its own
    time (SIBYL, Algorithm 2), so the number of prefill instances has no effect."""
    transfer: Annotated[
        Any,
        Text(read_transfer),
        Setting(
            "Bandwidth of KV transfers, also with fixed=SECONDS per transfer; or none.",
            "disaggregation",
            default="50",
            metavar="GB/S[,layers]",
            convert=True,
        ),
    ] = Transfer()
    """KV transfers, as `lmetric_lab.sim.pools.Transfer`: ``"50, layers"``, or a mapping. None or
    ``"none"``: no time. The profile gives the size of the KV cache."""
    split: Annotated[
        Any, RoutingOption("split"), Setting("Splits of requests without roles.", "disaggregation")
    ] = "auto"
    """Splits of requests without `roles`. ``"none"``: no splits. ``"apart"``: after the prompt, if
    that reduces the total delay of all requests. ``"libra"``: between the instances of the policy
    and of `decode_policy`, if this balances them and saves time. With ``parts=3``, requests with
    reasoning have three parts: prompt, reasoning and answer. ``"force"``: at ``fraction``.
    `transfer` gives the time of KV transfers. ``"auto"`` or None: ``"apart"`` if the policy is
    planner and there are no `roles`, else ``"none"``."""
    prefix_fetch: Annotated[
        Any,
        RoutingOption("prefix_fetch"),
        Setting("Fetches of cached prefixes from other instances.", "disaggregation"),
    ] = "auto"
    """Whether the chosen instance fetches a cached prefix from another instance, if that is faster
    than computing it: ``"on"``, ``"none"``, or settings, also as text: ``"min_tokens=512,
    max_fetches=2"``. `transfer` gives the time. The policies ``lmetric_pull`` and ``planner``
    include fetches in their scores. ``"auto"`` or None: ``"on"`` if the policy is planner, else
    ``"none"``."""
    rebalance: Annotated[
        Any, RoutingOption("rebalance"), Setting("Migration of running requests.", "disaggregation")
    ] = "none"
    """Migration of running requests between decode engines: ``"none"``; ``"star"`` (by predicted
    load), ``"star_current"`` (by current load), ``"star_oracle"`` (lengths known), or
    ``"llumnix"``."""
    migration_by: Annotated[
        Migration,
        Setting(
            "With --rebalance: the KV cache is sent, or the target computes it again.",
            "disaggregation",
            default="fetch, as in serve",
        ),
    ] = "fetch"
    """Method of migrations, with the default of `serve`. ``"fetch"``: the KV cache is sent in the
    time of `transfer`, and the request pauses as long, as in the paper. A server's target fetches
    ahead, so its pause is shorter. ``"recompute"``: the target computes prompt and answer so far
    while the request continues. `serve` refuses it with `rebalance`."""
    migration_max_concurrent: Annotated[
        Count, Setting("With recompute: maximum number of concurrent migrations.", "disaggregation")
    ] = 4
    """For ``"recompute"``: maximum number of concurrent migrations."""
    migration_max_gap_seconds: Annotated[
        NotNegative,
        Setting(
            "With recompute: maximum gap between two tokens; a longer one cancels the migration.",
            "disaggregation",
        ),
    ] = 1.0
    """For ``"recompute"``: maximum gap between two tokens during a migration; otherwise the
    migration is canceled."""
    silent_segments: Annotated[
        bool,
        Setting("All segments but the last send no token until their end.", "disaggregation"),
    ] = False
    """Whether all segments but the last send no tokens until their end, as on unmodified
    engines."""

    # -- the engines
    admission: Annotated[Literal["reserve", "vllm"], Setting("How engines admit requests.", "engines")] = (
        "reserve"
    )
    """``"reserve"``: a request is admitted if its prompt and all running requests fit, and is never
    preempted. ``"vllm"``: engines allocate blocks as tokens are produced, and preempt the last
    request if no block is free."""
    local_order: Annotated[
        str,
        Text(read_order),
        Setting(
            "Order inside an engine (docs/research/local_orders.md); settings in parentheses: "
            "uniboost(gamma=0.2).",
            "engines",
            metavar="A,B,…",
            several=True,
        ),
    ] = "fcfs"
    """Order of requests inside engines. Without preemption: ``"fcfs"``, ``"sjf"`` (shortest
    answer), ``"spf"`` (shortest uncached prompt). With preemption: ``"srpt"`` (least remaining
    work, lengths known), ``"srpt_noisy"`` (lengths predicted with errors from `seed`), ``"las"``
    (least attained service). ``"slo"``: by arrival, in steps within `order_slo_seconds`.
    ``"priority"``: by the numbers from `priority`. ``"distboost"``, ``"uniboost"`` and others can
    have settings: ``"uniboost(gamma=0.2, bin_tokens=64)"``. Documentation:
    docs/research/simulator.md."""
    order_slo_seconds: Annotated[
        Positive,
        Setting("Order slo: maximum seconds of a step with decodes.", "engines"),
    ] = ORDER_SLO
    """For the order ``"slo"``: maximum seconds of a step with decodes."""
    order_think_slo_seconds: Annotated[
        Positive | None,
        Setting(
            "Order slo: maximum seconds of a step with only reasoning tokens.",
            "engines",
            default="--order-slo",
        ),
    ] = None
    """For the order ``"slo"``: maximum seconds of a step with only reasoning tokens; None: as
    `order_slo_seconds`."""
    priority: Annotated[
        Any,
        RoutingOption("priority"),
        Setting("Numbers for the local order priority, from the router as in a server.", "policy"),
    ] = "none"
    """Numbers for the local order ``"priority"``: ``"uniboost"`` or ``"vtc"`` (a session is a
    tenant). As in a server, a request gets its number once, at submission."""
    preempt: Annotated[
        Any,
        Text(read_preempt),
        Setting(
            "How preempted requests get their KV back: recompute, or swap:GB/S[,host=GB].",
            "engines",
            metavar="HOW",
            convert=True,
        ),
    ] = "recompute"
    """KV cache of preempted requests, with admission ``"vllm"``: ``"recompute"``, or ``"swap:25,
    host=64"``: swapped to host memory (`lmetric_lab.queueing.Swap`), here with 25 GB/s and 64
    GB."""
    cached_answers: Annotated[
        bool,
        Setting("The next turn's prompt finds the blocks of an answer; needs --admission vllm.", "engines"),
    ] = False
    """Whether the next turn's prompt finds the blocks of an answer in the cache, as on vLLM; needs
    admission ``"vllm"``. False: it finds the blocks of prompts alone."""
    host_tier: Annotated[
        Any,
        Text(read_host_tier),
        Setting(
            "Host memory with a copy of the KV blocks: capacity relative to the GPU's, and bandwidth.",
            "engines",
            default="none",
            metavar="TIMES[,GB/S]",
            convert=True,
        ),
    ] = None
    """Host memory of each engine that keeps a copy of its KV blocks
    (`lmetric_lab.queueing.HostTier`), with admission ``"vllm"``. ``"2"``: twice the blocks of the
    GPU; ``"2, 50"``: loaded with 50 GB/s; or a mapping. None or ``"none"``: no host tier."""

    # -- what the router knows
    signals: Annotated[
        Literal["exact", "step_end", "delayed", "published"],
        Setting("How current the engine state is that policies read.", "signals"),
    ] = "exact"
    """``"exact"``: the router sees every event at once. ``"step_end"``: it sees every engine in the
    state at the end of its current step. ``"delayed"``: like a live server, with cache events
    `event_delay_seconds` late, load reports every `report_period_seconds`, and the responses of its
    own requests. ``"published"``: the same, and load reports include the prompt tokens to compute,
    as those of lmetric-vllm."""
    report_period_seconds: Annotated[
        Positive, Setting("Delayed signals: seconds between load reports.", "signals")
    ] = 1.0
    """For delayed signals: seconds between two load reports of an engine."""
    event_delay_seconds: Annotated[
        NotNegative, Setting("Delayed signals: seconds until a cache event arrives.", "signals")
    ] = 0.02
    """For delayed signals: seconds until a cache event arrives."""
    token_stride: Annotated[
        Count, Setting("Engine steps between token reports to the router.", "signals")
    ] = 1
    """Number of engine steps between token reports to the router. Simulations with 8 are faster for
    policies that read tokens; the router is then up to 7 tokens behind."""
    index: Annotated[
        Literal["exact", "approximate"],
        Setting("Source of the KV index: the engines' events, or the sent prompts.", "signals"),
    ] = "exact"
    """Source of the KV index: ``"exact"``: cache events of the engines; ``"approximate"``: placed
    requests."""
    index_bytes: Annotated[
        Count, Setting("Maximum memory of the router's KV index, bytes.", "signals", default="512 MiB")
    ] = 512 * 1024 * 1024
    """Maximum memory of the router's KV index, bytes."""
    tiers: Annotated[
        Literal["auto", "all", "off"],
        BeforeValidator(off_is_a_word),
        Setting("Tiers below the GPU whose blocks count in scores.", "signals"),
    ] = "auto"
    """As for `lmetric.Router`: the tiers below the GPU whose blocks count in scores."""
    tier_load_ratio: Annotated[
        NotNegative,
        Setting("Seconds to load a token from such a tier over seconds to compute it.", "signals"),
    ] = 0.02
    """As for `lmetric.Router`: seconds to load one token from such a tier, divided by the seconds
    to compute it."""
    reported_cache_ratio: Annotated[
        Positive, Setting("Cache size that routers receive, divided by the engines' own.", "signals")
    ] = 1.0
    """Cache size that routers receive, divided by the engines' own."""
    session_final: Annotated[
        bool, Setting("The last request of a conversation carries x-session-final.", "signals")
    ] = False
    """Whether the last request of a conversation says so (`x-session-final`)."""
    output_known: Annotated[
        bool, Setting("Whether the router knows the length of each answer.", "signals")
    ] = True
    """Whether the router knows the length of each answer."""
    routers: Annotated[
        int,
        Field(ge=1, le=1024),
        Setting("Number of routers; each request arrives at one of them.", "signals"),
    ] = 1
    """Number of routers. Each request arrives at a random one (by `seed`). All routers see the
    engines, but not each other's requests."""
    sharing_seconds: Annotated[
        Annotated[float, Field(ge=0.001, le=1e6)] | None,
        Setting("Seconds between load messages among the routers.", "signals", default="never"),
    ] = None
    """Seconds between load messages among the routers; None: no messages."""

    # -- policy
    guard: Annotated[Any, RoutingOption("guard"), Setting("Hot-spot guard.", "policy")] = None
    """The hot-spot guard (docs/explanation/default_policy.md): True, False, or
    ``{"window_seconds": 30}``; None: off, unless the policy turns it on."""
    programs: Annotated[
        Any, RoutingOption("programs"), Setting("How agent programs are followed and admitted.", "policy")
    ] = "auto"
    """How agent programs are followed: ``"none"``, ``"observe"``, ``"admit"`` (hold requests of
    programs that do not fit into the caches) or ``"auto"`` (the same, while recomputed contexts are
    most of the prefill work)."""
    load_admission: Annotated[
        Mapping[str, Any] | None,
        Setting(
            "Admission by load (docs/how-to/overload.md): ttft_seconds=5,max_waiting=1000.",
            "policy",
            default="none",
            metavar="NAME=VALUE,…",
            model=_load_admission,
        ),
    ] = None
    """Settings of admission by load, as for `lmetric.Router.set_admission`. A session is a tenant,
    and a refused request is lost. None: every request goes to an engine at once."""
    predictor: Annotated[
        Any,
        Text(),
        Setting("Profile for TTFT predictions.", "policy", default="the engines' own", convert=True),
    ] = None
    """Profile for `predicted_ttft_seconds`; None: the engines' own."""

    # -- results
    token_slo_seconds: Annotated[
        Positive, Setting("Goodput: maximum seconds between two tokens.", "results")
    ] = 0.1
    """Longest good gap between two tokens, for `slow_tokens`."""
    think_slo_seconds: Annotated[
        Positive | None,
        Setting("Goodput: maximum seconds before a reasoning token.", "results", default="--token-slo"),
    ] = None
    """Longest good gap before a reasoning token; None: as `token_slo_seconds`."""
    timeline_seconds: Annotated[
        Positive, Setting("Length of the timeline's buckets, seconds.", "results", hidden=True)
    ] = 10.0
    """Length of the timeline's buckets."""

    def __init__(self, **fields: Any) -> None:
        check_names(fields, "Scenario")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _refused(error) from None

    def replace(self, **fields: Any) -> Self:
        """A copy with other values of some fields."""
        return type(self)(**{**self.given, **fields})

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were set, by name."""
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }


def check_names(names: Mapping[str, Any] | Sequence[str], function: str) -> None:
    """Raises TypeError for a name that is no field of `Scenario`, with the nearest one."""
    for name in names:
        if name not in Scenario.model_fields:
            near = difflib.get_close_matches(name, Scenario.model_fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name == "seeds":
                hint = (
                    f"; a run has one seed: [{function}(..., seed=each) for each in range(3)], or "
                    "lmetric-router simulate --seeds 3"
                )
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def _refused(error: ValidationError) -> BadValueError:
    """The first invalid value, with the expected one."""
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    low, high, excluded = bounds(Scenario.model_fields[name])
    if problem["type"] == "literal_error":
        words = str(problem["ctx"]["expected"]).replace("'", "")
    elif "than" in problem["type"] and low is not None:
        least = f"more than {_number(low)}" if excluded else f"at least {_number(low)}"
        words = least if high is None else f"{_number(low)} to {_number(high)}"
    else:
        words = expected(problem).removeprefix("expected ")
    path = ".".join(str(part) for part in problem["loc"])
    return BadValueError(f"{path}: {problem['input']!r} is not valid; expected {words}")


def _number(value: float) -> str:
    return f"{value:g}".replace("e+0", "e")
