"""Simulates whole clusters: a model of the engines, with the router core of the server.

`simulate` runs a trace once. If you run a trace several times, prepare it once with `prepare`. All
runs, also in several threads, then share its block hashes::

    workload = prepare(trace, profile)
    runs = [simulate(workload, policy=p, instances=16, profile=profile) for p in ("lmetric",
    "vllm")]
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lmetric import _core
from lmetric.defaults import DEFAULT_POLICY
from lmetric.expr import Expr
from lmetric.options import (
    OPTIONS,
    Guard,
    PrefixFetch,
    PriorityOption,
    ProgramOption,
    RebalanceOption,
    Routing,
    SplitOption,
    WarmChanges,
    core_settings,
    kind_of,
    parse,
)
from lmetric.policies import Policy, PolicyFunction, PolicyLike, policy_function
from lmetric.profiles import Profile, fleet_profiles, load_profile
from lmetric_lab.defaults import DEFAULT_PROFILE, ORDER_SLO
from lmetric_lab.queueing import HostTier, Swap
from lmetric_lab.sim.churn import ChangeResult, FleetChange, fleet_change_constants, listed
from lmetric_lab.sim.pools import Roles, Transfer
from lmetric_lab.sim.programs import PROGRAM_SHARE, has_programs, ideal_arrival_seconds
from lmetric_lab.sim.pulls import constants
from lmetric_lab.sim.summary import RunFigures, Slo, figures, optimal_assignment_ratio
from lmetric_lab.sim.traces import Trace, load_trace
from lmetric_lab.sim.traces.turns import user_turns

if TYPE_CHECKING:
    import pandas

Signals = Literal["exact", "step_end", "delayed"]
Admission = Literal["reserve", "vllm"]
Index = Literal["exact", "approximate"]
Binding = Literal["early", "late"]
Prefill = Literal["queues", "unlimited"]
MoveBy = Literal["fetch", "recompute"]
RolesLike = str | Mapping[str, int] | Roles
TransferLike = str | Mapping[str, float | str] | Transfer
SwapLike = str | Mapping[str, float] | Swap | None
HostTierLike = str | Mapping[str, float] | HostTier | None
Tiers = Literal["auto", "all", "off"]
ProfileLike = str | Profile | Mapping[str, Any]


# Arrays of a run that do not have one entry per request.
_NOT_PER_REQUEST = ("gap_edges_seconds", "gap_counts")

# Defaults of the decode policy and the KV transfer.
DECODE_POLICY = "least_requests"
DEFAULT_TRANSFER = Transfer()
DEFAULT_INSTANCES = 16  # of a fleet with one profile


@dataclass(frozen=True, slots=True)
class Timeline:
    """Load over time. The arrays have the shape (instances, buckets), with buckets of
    `bucket_seconds`."""

    bucket_seconds: float
    running: NDArray[np.float64]  # mean batch size
    queued: NDArray[np.float64]  # mean length of the engine's queue
    prefill_tokens: NDArray[np.float64]  # prompt tokens computed


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """The result of a run: columns with one entry per request in trace order, times on the trace's
    clock."""

    policy: str
    decode_policy: str | None  # None: requests decode on their prefill instance
    roles: Roles | None
    local_order: str  # of the engines
    split: str  # method of splits without roles
    reschedule: str  # method of migrations
    seed: int
    arrival_seconds: NDArray[np.float64]  # closed loop: after the previous answer
    hold_seconds: NDArray[np.float64]  # from the arrival to the placement; 0: not held
    refused_seconds: NDArray[np.float64]  # when admission by load refused it; NaN: it did not
    instance: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]  # at least 1, from the prefill
    hit_tokens: NDArray[np.int64]  # prompt tokens found in the cache when first admitted
    loaded_tokens: NDArray[np.int64]  # part of hit_tokens that came from the host tier
    computed_tokens: NDArray[np.int64]  # prefill tokens, again after preemptions
    hit_blocks: NDArray[np.int64]
    prompt_blocks: NDArray[np.int64]
    predicted_hit_tokens: NDArray[np.int64]  # prediction of the router
    scheduled_seconds: NDArray[np.float64]  # when it first left the engine's queue
    first_token_seconds: NDArray[np.float64]  # with pools: from the engine that decodes
    finished_seconds: NDArray[np.float64]  # NaN: on a stalled engine (`stalled`)
    preemptions: NDArray[np.int64]  # returns to the queue, for lack of memory or for another
    decode_instance: NDArray[np.int64]  # -1: the prefill instance
    handoff_seconds: NDArray[np.float64]  # end of prefill before a KV transfer
    decode_start_seconds: NDArray[np.float64]  # when it first left the queue of its decode instance
    # 1: its decode instance had the fewest context tokens at the end of prefill; 0: another had
    # fewer; -1: no KV transfer.
    handoff_least_loaded: NDArray[np.int64]
    cut_tokens: NDArray[np.int64]  # split position, prompt and output tokens; -1: none, or by roles
    answer_cut_tokens: NDArray[np.int64]  # position of the second split; -1: none
    moves: NDArray[np.int64]  # number of migrations
    pull_instance: NDArray[np.int64]  # source of a prefix fetch; -1: none
    pulled_tokens: NDArray[np.int64]  # fetched tokens when first admitted
    pull_seconds: NDArray[np.float64]  # time of the fetch with all waits; NaN: no fetch
    slow_tokens: NDArray[np.int64]  # number of token gaps above the SLO
    worst_gap_seconds: NDArray[np.float64]  # longest token gap; 0: none
    token_slo_seconds: float
    think_slo_seconds: float
    # Histogram of all gaps between two tokens of a request (TBT), measured or not: number of gaps
    # up to each edge and above the previous edge.
    gap_edges_seconds: NDArray[np.float64]
    gap_counts: NDArray[np.uint64]
    timeline: Timeline
    guard_alarms: int  # prefixes with an alarm of the hot-spot guard
    guard_filters: int  # alarms after which it excluded instances
    unscored: int  # decisions without a score, in which the fewest requests decided
    steps: int  # of all engines
    step_variance: float  # of decode step times over decode instances, mean over the run, s^2
    gamma: float | None  # of UniBoost at the end, 1/s; None: no boost
    oom: int  # preemptions because an engine ran out of memory
    stalled: int  # engines that stopped forever, above the profile's decode_throughput
    wall_seconds: float
    changes: tuple[ChangeResult, ...]  # in order of time
    # The program of each request, -1: none; None: no program has several requests, and the columns
    # below are missing, too.
    programs: NDArray[np.int64] | None = None
    min_computed_tokens: NDArray[np.int64] | None = None  # even if no cache ever drops a block
    # Earliest end of each request if its program were alone, under a cache without an end: a lower
    # bound. And the arrival that belongs to it.
    ideal_finished_seconds: NDArray[np.float64] | None = None
    ideal_arrival_seconds: NDArray[np.float64] | None = None
    # The user turn of each request, from a user's message to the agent's final answer; -1: unknown.
    # None: the trace does not have the reasons why answers end.
    user_turns: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    @property
    def instances(self) -> int:
        """Number of engines."""
        return len(self.timeline.running)

    @property
    def ttft_seconds(self) -> NDArray[np.float64]:
        """Time from arrival to the first output token."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> NDArray[np.float64]:
        """Mean time between output tokens; NaN for answers of one token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return np.asarray((self.finished_seconds - self.first_token_seconds) / gaps)

    @property
    def decode_tpot_seconds(self) -> NDArray[np.float64]:
        """Time per token from the start of decode on another instance to the last token; NaN
        without a transfer.

        All tokens count, because the decode instance also produces the first one.
        """
        return np.asarray((self.finished_seconds - self.decode_start_seconds) / self.output_tokens)

    def gap_seconds(self, quantile: float) -> float | None:
        """A quantile of the time between tokens (TBT), to 1%; None if no request has two tokens."""
        total = int(self.gap_counts.sum())
        if total == 0:
            return None
        place = int(np.searchsorted(np.cumsum(self.gap_counts), quantile * total))
        return float(self.gap_edges_seconds[min(place, len(self.gap_edges_seconds) - 1)])

    @property
    def optimal_assignment_ratio(self) -> float | None:
        """The share of KV transfers to the instance with the fewest context tokens at the end of
        prefill.

        Ties count. None: no transfer. Source: SIBYL, Table 1.
        """
        return optimal_assignment_ratio(self.handoff_least_loaded)

    @property
    def e2e_seconds(self) -> NDArray[np.float64]:
        """Time from arrival to the last output token."""
        return self.finished_seconds - self.arrival_seconds

    def summary(
        self,
        *,
        slo_ttft_seconds: float | None = None,
        slo_tpot_seconds: float | None = None,
        share: tuple[float, float] = (0.0, 1.0),
        program_share: tuple[float, float] = PROGRAM_SHARE,
    ) -> RunFigures:
        """Latency percentiles, hit rates, rates, goodput and load imbalance of the run, and the
        figures of programs if a program has several requests.

        Args:
            slo_ttft_seconds: maximum TTFT of answers that count as goodput; None: no bound.
            slo_tpot_seconds: maximum TPOT of answers that count as goodput; None: no bound.
            share: the requests to summarize, as fractions in order of arrival: ``(0.1, 0.9)``
                excludes the first and the last tenth.
            program_share: the programs to summarize, as fractions in order of arrival; default:
                without the first tenth.
        """
        return figures(self, Slo(slo_ttft_seconds, slo_tpot_seconds), share, program_share)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with one row per request, in trace order.

        It has every column of the run, and ``ttft_seconds``, ``tpot_seconds`` and ``e2e_seconds``.
        Seconds are on the simulated clock.

        Raises:
            ImportError: pandas is not installed; the extra ``pandas`` installs it.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "Run.to_pandas needs pandas, which is not installed; "
                "run: pip install 'lmetric-router[pandas]'"
            ) from None
        columns = {
            each.name: column
            for each in fields(self)
            if each.name not in _NOT_PER_REQUEST
            and isinstance(column := getattr(self, each.name), np.ndarray)
        }
        for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds"):
            columns[name] = getattr(self, name)
        return pandas.DataFrame(columns)

    def _rows(self) -> list[tuple[str, str]]:
        shown = self.summary()
        rows = [("requests", f"{shown.requests:,}" + (f", {shown.failed:,} failed" if shown.failed else ""))]
        for name, spread in (
            ("TTFT", shown.ttft_seconds), ("TPOT", shown.tpot_seconds), ("end to end", shown.e2e_seconds)
        ):  # fmt: skip
            if spread is not None:
                rows.append((name, f"mean {spread.mean:.3g} s, p99 {spread.p99:.3g} s"))
        if shown.hit_ratio is not None:
            rows.append(("cached prompt tokens", f"{shown.hit_ratio:.1%}"))
        rows.append(("throughput", f"{shown.requests_per_second:.3g} requests/s"))
        if (programs := shown.programs) is not None and programs.busy_mean_seconds is not None:
            for name, mean, p95 in (
                ("program busy", programs.busy_mean_seconds, programs.busy_p95_seconds),
                ("user turn busy", programs.user_turn_busy_mean_seconds, programs.user_turn_busy_p95_seconds),
            ):
                if mean is not None:
                    rows.append((name, f"mean {mean:.4g} s, p95 {p95:.4g} s"))
            rows.append(("stretch", f"mean {programs.stretch_mean:.3g}"))
            rows.append(("recomputed tokens", f"{programs.recomputed_share:.1%}"))
            rows.append(("longest hold", f"{programs.max_hold_seconds:.3g} s"))
        return rows

    def __repr__(self) -> str:
        rows = "; ".join(f"{name} {value}" for name, value in self._rows())
        return f"Run(policy={self.policy!r}, instances={self.instances}, seed={self.seed}; {rows})"

    def _repr_html_(self) -> str:
        rows = [("policy", self.policy), ("instances", str(self.instances)), *self._rows()]
        cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        return f"<table>{''.join(cells)}</table>"


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace prepared for engines with one block size."""

    trace: Trace
    core: _core.Workload

    @property
    def block_tokens(self) -> int:
        """Tokens per engine block."""
        return self.core.block_tokens

    def __len__(self) -> int:
        return len(self.trace)

    def faster(self, speed: float) -> Workload:
        """Like `Trace.faster`; shares the block hashes."""
        return Workload(self.trace.faster(speed), self.core.faster(speed))


def resolve_profile(profile: ProfileLike) -> Profile:
    """A profile from a shipped name, the path of a YAML file, a mapping of its fields, or a
    `Profile`."""
    if isinstance(profile, Profile):
        return profile
    return load_profile(profile) if isinstance(profile, str) else Profile.model_validate(dict(profile))


def resolve_fleet(
    profile: ProfileLike | Sequence[ProfileLike], instances: int | None = None
) -> list[Profile]:
    """The profile of each instance of a fleet; `instances` is 16 if only one profile is given.

    Raises:
        BadValueError: the number of instances differs from the number of profiles, or profiles of
            several models.
        ProfileError: an unknown or invalid profile.
    """
    each: list[Profile] = []
    if isinstance(profile, str) and (pairs := fleet_profiles(profile)):
        for number, name in pairs:
            each += [load_profile(name)] * number
    elif isinstance(profile, str | Profile | Mapping):
        number = DEFAULT_INSTANCES if instances is None else instances
        if number < 1:
            raise _core.BadValueError(f"instances: {number} is not valid; expected at least 1")
        return [resolve_profile(profile)] * number
    else:
        each = [resolve_profile(one) for one in profile]
    if instances not in (None, len(each)) or not each:
        raise _core.BadValueError(
            f"instances: {instances} is not valid; expected {len(each)}, as many as there are profiles"
        )
    for what in ("block_tokens", "kv_bytes_per_token"):
        if len(values := {getattr(one, what) for one in each}) > 1:
            found = ", ".join(map(str, sorted(values, key=str)))
            raise _core.BadValueError(
                f"{what} of the profiles: {found} is not valid; expected one value, because the engines of a "
                "fleet serve one model"
            )
    return each


def prepare(trace: Trace, profile: ProfileLike = DEFAULT_PROFILE) -> Workload:
    """Compute the chained hashes of a trace's prompt blocks for engines with the profile's block
    size.

    Raises:
        BadValueError: an invalid column, with the request; or block sizes that are not multiples.
    """
    block_tokens = resolve_profile(profile).block_tokens
    columns = {
        name: np.ascontiguousarray(column)
        for name in ("think_tokens", "previous", "think_seconds", "sessions", "finish")
        if (column := getattr(trace, name, None)) is not None
    }
    if trace.joins is not None:
        columns["joins"] = np.ascontiguousarray(trace.joins, np.int64).ravel()
    core = _core.Workload(
        np.ascontiguousarray(trace.arrival_seconds, np.float64),
        np.ascontiguousarray(trace.input_tokens, np.int64),
        np.ascontiguousarray(trace.output_tokens, np.int64),
        np.ascontiguousarray(trace.hash_offsets, np.int64),
        np.ascontiguousarray(trace.hash_ids, np.uint64),
        trace_block_tokens=trace.block_tokens,
        block_tokens=block_tokens,
        **columns,
    )
    return Workload(trace, core)


def simulate(
    trace: str | Path | Trace | Workload,
    *,
    policy: PolicyLike | None = DEFAULT_POLICY,
    knobs: Mapping[str, float] | None = None,
    instances: int | None = None,
    profile: ProfileLike | Sequence[ProfileLike] = DEFAULT_PROFILE,
    decode_profile: ProfileLike | None = None,
    seed: int = 0,
    signals: Signals = "exact",
    admission: Admission = "reserve",
    index: Index = "exact",
    index_bytes: int = 512 * 1024 * 1024,
    guard: bool | str | Mapping[str, Any] | Guard | None = None,
    event_delay_seconds: float = 0.02,
    report_period_seconds: float = 1.0,
    token_stride: int = 1,
    predictor: ProfileLike | None = None,
    output_known: bool = True,
    timeline_seconds: float = 10.0,
    roles: RolesLike | None = None,
    decode_policy: PolicyLike | None = None,
    decode_knobs: Mapping[str, float] | None = None,
    binding: Binding = "early",
    transfer: TransferLike | None = DEFAULT_TRANSFER,
    prefill: Prefill = "queues",
    local_order: str = "fcfs",
    order_slo: float = ORDER_SLO,
    order_think_slo: float | None = None,
    preempt: SwapLike = "recompute",
    split: str | Mapping[str, Any] | SplitOption | None = "auto",
    prefix_fetch: bool | str | Mapping[str, Any] | PrefixFetch | None = "auto",
    rebalance: str | Mapping[str, Any] | RebalanceOption | None = "none",
    programs: str | Mapping[str, Any] | ProgramOption | None = "auto",
    changes: str | Sequence[FleetChange | str] = (),
    fleet_changes: str | Mapping[str, Any] | WarmChanges | None = "none",
    migration_by: MoveBy = "fetch",
    migration_max_concurrent: int = 4,
    migration_max_gap_seconds: float = 1.0,
    priority: str | Mapping[str, Any] | PriorityOption | None = "none",
    silent_segments: bool = False,
    token_slo_seconds: float = 0.1,
    think_slo_seconds: float | None = None,
    routers: int = 1,
    sharing_seconds: float | None = None,
    cached_answers: bool = False,
    session_final: bool = False,
    reported_cache_ratio: float = 1.0,
    host_tier: HostTierLike = None,
    tiers: Tiers = "auto",
    tier_load_ratio: float = 0.02,
    load_admission: Mapping[str, Any] | None = None,
) -> Run:
    """Simulate a trace on a fleet. Equal arguments give equal columns.

    The options `split`, `prefix_fetch`, `rebalance`, `priority` and `guard` accept a kind, a text
    with settings (``"libra(probes=8)"``), a mapping (``{"kind": "libra", "probes": 8}``), or an
    option of `lmetric.options`, which documents the settings.

    Args:
        trace: the path of a trace file (read with `load_trace`), a `Trace`, or the result of
            `prepare`, which saves time if you run a trace more than once.
        policy: a policy as for `lmetric.Router`: name, expression, `Policy`, `policy_function`, or
            a function whose parameters are indicators.
        `knobs`: parameters of the policy by name.
        instances: number of engines; None: 16, or the number of profiles.
        profile: a shipped name, a path, a mapping, or a `Profile`. For a mixed fleet: a sequence
            with one profile per instance, or ``"8 NAME + 8 NAME"``. `Profile.slower` makes slower
            engines. All profiles need the same block size and `kv_bytes_per_token`.
        decode_profile: profile of decode instances, for example with more GPUs; None: as the
            others. Model and block size must be the same.
        seed: seed of all random choices (ties, random policies).
        signals: ``"exact"``: the router sees every event at once. ``"step_end"``: it sees every
            engine in the state at the end of its current step. ``"delayed"``: like a live server,
            with cache events `event_delay_seconds` late, load reports every
            `report_period_seconds`, and the responses of its own requests.
        token_stride: number of engine steps between token reports to the router. Simulations with 8
            are faster for policies that read tokens; the router is then up to 7 tokens behind.
        admission: ``"reserve"``: a request is admitted if its prompt and all running requests fit,
            and is never preempted. ``"vllm"``: engines allocate blocks as tokens are produced, and
            preempt the last request if no block is free.
        index: source of the KV index: ``"exact"``: cache events of the engines; ``"approximate"``:
            placed requests.
        guard: the hot-spot guard (docs/explanation/default_policy.md): True, False, or
            ``{"window_seconds": 30}``; None: off, unless the policy turns it on.
        predictor: profile for `predicted_ttft_seconds`; None: the engines' own.
        output_known: whether the router knows the length of each answer.
        timeline_seconds: length of the timeline's buckets.
        roles: prefill and decode pools instead of `instances`: ``"16P64D"``, or ``{"prefill": 16,
            "decode": 64}``. `policy` chooses the prefill instance.
        decode_policy: policy that chooses the decode instance; None: `least_requests`.
        decode_knobs: values of its parameters, by name.
        binding: ``"early"`` chooses the decode instance at arrival. ``"late"`` chooses it after
            prefill.
        transfer: KV transfers, as `lmetric_lab.sim.pools.Transfer`: ``"50, layers"``, or a mapping.
            None or ``"none"``: no time. The profile gives the size of the KV cache.
        prefill: ``"queues"``: prompts queue as on engines. ``"unlimited"``: every prompt takes only
            its own time (SIBYL, Algorithm 2), so the number of prefill instances has no effect.
        local_order: order of requests inside engines. Without preemption: ``"fcfs"``, ``"sjf"``
            (shortest answer), ``"spf"`` (shortest uncached prompt). With preemption: ``"srpt"``
            (least remaining work, lengths known), ``"srpt_noisy"`` (lengths predicted with errors
            from `seed`), ``"las"`` (least attained service). ``"slo"``: by arrival, in steps within
            `order_slo`. ``"priority"``: by the numbers from `priority`. ``"distboost"``,
            ``"uniboost"`` and others can have settings: ``"uniboost(gamma=0.2, bin_tokens=64)"``.
            Documentation: docs/research/simulator.md.
        order_slo: for ``"slo"``: maximum seconds of a step with decodes.
        order_think_slo: for ``"slo"``: maximum seconds of a step with only reasoning tokens; None:
            as `order_slo`.
        preempt: KV cache of preempted requests, with admission ``"vllm"``: ``"recompute"``, or
            ``"swap:25, host=64"``: swapped to host memory (`lmetric_lab.queueing.Swap`), here with
            25 GB/s and 64 GB.
        split: splits of requests without `roles`. ``"none"``: no splits. ``"apart"``: after the
            prompt, if that reduces the total delay of all requests. ``"libra"``: between the
            instances of the policy and of `decode_policy`, if this balances them and saves time.
            With ``parts=3``, requests with reasoning have three parts: prompt, reasoning and
            answer. ``"force"``: at ``fraction``. `transfer` gives the time of KV transfers.
            ``"auto"`` or None: ``"apart"`` if the policy is planner and there are no `roles`,
            else ``"none"``.
        prefix_fetch: whether the chosen instance fetches a cached prefix from another instance, if
            that is faster than computing it: ``"on"``, ``"none"``, or settings, also as text:
            ``"min_tokens=512, max_fetches=2"``. `transfer` gives the time. The policies
            ``lmetric_pull`` and ``planner`` include fetches in their scores. ``"auto"`` or None:
            ``"on"`` if the policy is planner, else ``"none"``.
        rebalance: migration of running requests between decode engines: ``"none"``; ``"star"`` (by
            predicted load), ``"star_current"`` (by current load), ``"star_oracle"`` (lengths
            known), or ``"llumnix"``.
        programs: how agent programs are followed: ``"none"``, ``"observe"``, ``"admit"``
            (hold requests of programs that do not fit into the caches) or ``"auto"`` (the same,
            while recomputed contexts are most of the prefill work).
        changes: instances that join and leave during the run: `FleetChange`, or a text:
            ``"600 join 8, 1200 leave 3"`` (at 600 s, instance 8 joins). An instance whose first
            change is a join is absent before.
        fleet_changes: how they do so: ``"none"`` (with cold caches), or ``"warm"``: prefixes are
            fetched before a newcomer takes requests, and before an instance leaves; its running
            requests move.
        migration_by: method of migrations, with the default of `serve`. ``"fetch"``: the KV cache
            is sent in the time of `transfer`, and the request pauses as long, as in the paper. A
            server's target fetches ahead, so its pause is shorter. ``"recompute"``: the target
            computes prompt and answer so far while the request continues. `serve` refuses it with
            `rebalance`.
        migration_max_concurrent: for ``"recompute"``: maximum number of concurrent migrations.
        migration_max_gap_seconds: for ``"recompute"``: maximum gap between two tokens during a
            migration; otherwise the migration is canceled.
        priority: numbers for the local order ``"priority"``: ``"uniboost"`` or ``"vtc"`` (a session
            is a tenant). As in a server, a request gets its number once, at submission.
        silent_segments: whether all segments but the last send no tokens until their end, as on
            unmodified engines.
        token_slo_seconds: longest good gap between two tokens, for `slow_tokens`.
        think_slo_seconds: longest good gap before a reasoning token; None: as `token_slo_seconds`.
        routers: number of routers. Each request arrives at a random one (by `seed`). All routers
            see the engines, but not each other's requests.
        sharing_seconds: seconds between load messages among the routers; None: no messages.
        cached_answers: whether the next turn's prompt finds the blocks of an answer in the cache,
            as on vLLM; needs admission ``"vllm"``. False: it finds the blocks of prompts alone.
        session_final: whether the last request of a conversation says so (`x-session-final`).
        reported_cache_ratio: cache size that routers receive, divided by the engines' own.
        host_tier: host memory of each engine that keeps a copy of its KV blocks
            (`lmetric_lab.queueing.HostTier`), with admission ``"vllm"``. ``"2"``: twice the blocks
            of the GPU; ``"2, 50"``: loaded with 50 GB/s; or a mapping. None or ``"none"``: no host
            tier.
        tiers: as for `lmetric.Router`: the tiers below the GPU whose blocks count in scores.
        tier_load_ratio: as for `lmetric.Router`: seconds to load one token from such a tier,
            divided by the seconds to compute it.
        load_admission: settings of admission by load, as for `lmetric.Router.set_admission`. A
            session is a tenant, and a refused request is lost. None: every request goes to an
            engine at once.

    Raises:
        LmetricError: an unknown policy, a setting out of range, or a request that fits no engine.
        ProfileError: an unknown or invalid profile.
        TraceError: the file is not a trace, or has an invalid line.
        FileNotFoundError: the trace file does not exist.
    """
    pools = None if roles is None else Roles.of(roles)
    fleet = resolve_fleet(profile, instances if pools is None else pools.instances)
    chosen, instances = fleet[0], len(fleet)
    if isinstance(trace, str | Path):
        trace = load_trace(trace)
    workload = trace if isinstance(trace, Workload) else prepare(trace, chosen)
    if decode_profile is not None and (pools is None or not pools.decode):
        raise _core.BadValueError("decode_profile: there are no decode instances; set roles, e.g. 16P64D")
    decodes = None if decode_profile is None else resolve_profile(decode_profile)
    each = [
        (one if decodes is None or role != "decode" else decodes).constants()
        for one, role in zip(fleet, ["both"] * instances if pools is None else pools.each(), strict=True)
    ]
    name = policy_name(policy)
    given = {
        "split": split, "prefix_fetch": prefix_fetch, "priority": priority, "rebalance": rebalance,
        "programs": programs, "fleet_changes": fleet_changes, "guard": guard,
    }  # fmt: skip
    pooled = pools is not None and bool(pools.decode)
    routing = Routing(
        policy=policy,
        knobs=knobs,
        decode_policy=DECODE_POLICY if decode_policy is None else decode_policy,
        decode_knobs=decode_knobs,
        binding=binding,
        **{what: parse(what, given[what], policy=name) for what in OPTIONS},
    ).resolved(name, pools=pooled)
    shared = {
        what: core_settings(what, getattr(routing, what))
        for what in ("split", "priority", "rebalance", "programs")
    }
    events = listed(changes)
    moves = bool(events) and routing.fleet_changes is not None
    continued = pooled or routing.split is not None or routing.rebalance is not None or moves
    if decode_policy is not None and not continued:
        raise _core.BadValueError(
            "decode_policy: requests decode on their prefill instance; set roles, e.g. 16P64D"
        )
    started = time.perf_counter()
    columns = _core.simulate(
        workload.core,
        policy=policy,
        knobs=knobs,
        profiles=each,
        seed=seed,
        signals=signals,
        admission=admission,
        index=index,
        index_bytes=index_bytes,
        guard=routing.guard,
        event_delay_seconds=event_delay_seconds,
        report_period_seconds=report_period_seconds,
        token_stride=token_stride,
        step_times=each if predictor is None else [resolve_profile(predictor).constants()] * instances,
        output_known=output_known,
        timeline_seconds=timeline_seconds,
        local_order=local_order,
        order_slo_seconds=order_slo,
        order_think_slo_seconds=order_think_slo,
        swap=None if (swap := Swap.of(preempt)) is None else swap.constants(chosen),
        priority=shared["priority"][0],
        priority_settings=shared["priority"][1],
        split=shared["split"][0],
        split_settings=shared["split"][1],
        reschedule=shared["rebalance"][0],
        reschedule_settings=shared["rebalance"][1],
        programs=shared["programs"][0],
        program_settings=shared["programs"][1],
        migration_by=migration_by,
        migration_max_concurrent=migration_max_concurrent,
        migration_max_gap_seconds=migration_max_gap_seconds,
        silent_segments=silent_segments,
        token_slo_seconds=token_slo_seconds,
        think_slo_seconds=think_slo_seconds,
        routers=routers,
        sharing_seconds=sharing_seconds,
        cached_answers=cached_answers,
        session_final=session_final,
        reported_cache_ratio=reported_cache_ratio,
        host_tier=None if (tier := HostTier.of(host_tier)) is None else tier.constants(chosen),
        tiers=tiers,
        tier_load_ratio=tier_load_ratio,
        load_admission=None if load_admission is None else dict(load_admission),
        changes=[(each.at_seconds, each.instance, each.joins) for each in events],
        **fleet_change_constants(routing.fleet_changes, chosen, Transfer.of(transfer)),
        roles=None if pools is None else pools.each(),
        **(_continued(routing, prefill) if continued else {}),
        **_transferred(routing.prefix_fetch, Transfer.of(transfer), chosen, continued),
    )
    wall_seconds = time.perf_counter() - started
    if has_programs(workload.trace):
        columns["programs"] = workload.trace.program_of
        columns["min_computed_tokens"], columns["ideal_finished_seconds"] = workload.core.ideal(
            each, admission=admission, cached_answers=cached_answers
        )
        columns["ideal_arrival_seconds"] = ideal_arrival_seconds(
            workload.trace, columns["ideal_finished_seconds"]
        )
        columns["user_turns"] = user_turns(workload.trace)
    done = columns.pop("changes")
    block = chosen.block_tokens
    timeline = Timeline(
        timeline_seconds,
        **{name: columns.pop(f"timeline_{name}") for name in ("running", "queued", "prefill_tokens")},
    )
    return Run(
        policy=name,
        decode_policy=policy_name(routing.decode_policy) if continued else None,
        roles=pools,
        local_order=local_order,
        split=kind_of(routing.split),
        reschedule=kind_of(routing.rebalance),
        token_slo_seconds=token_slo_seconds,
        think_slo_seconds=token_slo_seconds if think_slo_seconds is None else think_slo_seconds,
        seed=seed,
        input_tokens=workload.trace.input_tokens,
        output_tokens=np.maximum(workload.trace.output_tokens, 1),
        hit_blocks=-(-columns["hit_tokens"] // block),
        prompt_blocks=-(-workload.trace.input_tokens // block),
        timeline=timeline,
        wall_seconds=wall_seconds,
        changes=tuple(ChangeResult(each, *of) for each, of in zip(events, done, strict=True)),
        **columns,
    )


def _continued(routing: Routing, prefill: Prefill) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate` for plans with several segments."""
    if prefill not in ("queues", "unlimited"):
        raise _core.BadValueError(f"prefill: {prefill!r} is not valid; expected queues or unlimited")
    return {
        "decode_policy": routing.decode_policy,
        "decode_knobs": routing.decode_knobs,
        "binding": routing.binding,
        "unlimited_prefill": prefill == "unlimited",
    }


def _transferred(fetch: Any, transfer: Transfer | None, profile: Profile, continued: bool) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate` for KV transfers of prefix fetches and segments."""
    if fetch is None:
        return _moved(transfer, profile) if continued else {}
    return _moved(transfer, profile) | constants(fetch, profile, transfer)


def _moved(transfer: Transfer | None, profile: Profile) -> dict[str, Any]:
    if transfer is None:
        return {}
    return {
        "transfer_seconds_per_token": transfer.seconds_per_token(profile),
        "transfer_fixed_seconds": transfer.fixed_seconds,
        "transfer_overlap": transfer.overlap,
        "transfer_chunk_tokens": int(transfer.chunk_tokens),
        "transfer_unshared": transfer.unshared,
    }


def policy_name(policy: PolicyLike | None) -> str:
    """The name of a policy in results: its name, or the text of its expression."""
    if policy is None:
        return DEFAULT_POLICY
    if isinstance(policy, str | Expr):
        return str(policy)
    if isinstance(policy, Policy):
        return policy.name or policy.score
    if isinstance(policy, PolicyFunction):
        return policy.name
    return policy_function(policy).name


__all__ = [
    "Run",
    "Timeline",
    "Workload",
    "policy_name",
    "prepare",
    "resolve_profile",
    "simulate",
]
