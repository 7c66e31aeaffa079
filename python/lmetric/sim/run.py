"""Whole clusters played on a simulated clock: the engine model around the very router that serves.

`simulate` plays a trace once. A study that plays one trace many times makes it ready once with `prepare`,
whose block hashes all runs share, also across threads::

    workload = prepare(trace, profile)
    runs = [simulate(workload, policy=p, instances=16, profile=profile) for p in ("lmetric", "vllm")]
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

from lmetric import _core, _deprecated
from lmetric.defaults import DEFAULT_PROFILE, ORDER_SLO
from lmetric.expr import Expr
from lmetric.options import (
    OPTIONS,
    Guard,
    PrefixFetch,
    PriorityOption,
    RebalanceOption,
    Routing,
    SplitOption,
    core_settings,
    kind_of,
    parse,
)
from lmetric.policies import Policy, PolicyFunction
from lmetric.profiles import Profile, fleet_profiles, load_profile
from lmetric.queueing import Swap
from lmetric.sim.pools import Roles, Transfer
from lmetric.sim.pulls import constants
from lmetric.sim.summary import RunFigures, Slo, figures, optimal_assignment_ratio
from lmetric.sim.traces import Trace, load_trace

if TYPE_CHECKING:
    import pandas

Signals = Literal["exact", "step_end", "delayed"]
Admission = Literal["reserve", "vllm"]
Index = Literal["exact", "approximate"]
Binding = Literal["early", "late"]
Prefill = Literal["queues", "unlimited"]
MoveBy = Literal["kv", "recompute"]
RolesLike = str | Mapping[str, int] | Roles
TransferLike = str | Mapping[str, float | str] | Transfer
SwapLike = str | Mapping[str, float] | Swap | None
PolicyLike = str | Expr | Policy | PolicyFunction | None
ProfileLike = str | Profile | Mapping[str, Any]


# Arrays of a run that do not have one entry per request.
_NOT_PER_REQUEST = ("gap_edges_seconds", "gap_counts")

# What chooses where requests decode, and how their KV moves, where nothing else is said.
DECODE_POLICY = "least_requests"
DEFAULT_TRANSFER = Transfer()
DEFAULT_INSTANCES = 16  # of a fleet with one profile


@dataclass(frozen=True, slots=True)
class Timeline:
    """Load over time: each array has the shape (instances, buckets) of `bucket_seconds` each."""

    bucket_seconds: float
    running: NDArray[np.float64]  # mean batch size
    queued: NDArray[np.float64]  # mean length of the engine's queue
    prefill_tokens: NDArray[np.float64]  # prompt tokens computed


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """What came of one run: columns with one entry a request, in the trace's order; times on its clock."""

    policy: str
    decode_policy: str | None  # what chose where requests decode; None: where they were prefilled
    roles: Roles | None
    local_order: str  # of the engines
    split: str  # how requests were cut that no roles cut
    reschedule: str  # how running ones were moved
    seed: int
    arrival_seconds: NDArray[np.float64]  # later than the trace's where a request waited for its predecessor
    instance: NDArray[np.int64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]  # at least 1: the prefill makes one in any case
    hit_tokens: NDArray[np.int64]  # prompt tokens found in the cache when first admitted
    hit_blocks: NDArray[np.int64]
    prompt_blocks: NDArray[np.int64]
    predicted_hit_tokens: NDArray[np.int64]  # what the router believed when it decided
    scheduled_seconds: NDArray[np.float64]  # when it first left the engine's queue
    first_token_seconds: NDArray[np.float64]  # with pools: from the engine that decodes
    finished_seconds: NDArray[np.float64]  # NaN: on an engine that stands still, see `stalled`
    preemptions: NDArray[np.int64]  # times it went back into the queue: for want of memory, or for another
    decode_instance: NDArray[np.int64]  # -1: decoded where it was prefilled
    handoff_seconds: NDArray[np.float64]  # when its prefill ended, to decode elsewhere
    decode_start_seconds: NDArray[np.float64]  # when it first left the queue there
    # 1: no decode instance held fewer context tokens than its own when its prefill ended; 0: one did; -1: no
    # hand-over.
    handoff_least_loaded: NDArray[np.int64]
    cut_tokens: NDArray[np.int64]  # where it was cut, prompt and output counted through; -1: not, or by roles
    answer_cut_tokens: NDArray[np.int64]  # where it was cut again, to answer elsewhere; -1: nowhere
    moves: NDArray[np.int64]  # times that it moved while it ran
    pull_instance: NDArray[np.int64]  # where it pulled a prefix from before it queued; -1: nowhere
    pulled_tokens: NDArray[np.int64]  # that it had from there when first admitted
    pull_seconds: NDArray[np.float64]  # what that took, with all that it waited for; NaN: no pull
    slow_tokens: NDArray[np.int64]  # gaps between its tokens longer than the SLO of such a token
    worst_gap_seconds: NDArray[np.float64]  # the longest of them; 0: none
    token_slo_seconds: float
    think_slo_seconds: float
    # All gaps between two tokens of a request (TBT), measured or not: how many are at most
    # each edge and above the one before it.
    gap_edges_seconds: NDArray[np.float64]
    gap_counts: NDArray[np.uint64]
    timeline: Timeline
    guard_alarms: int  # prefixes that the hot-spot guard suspected
    guard_filters: int  # and for which it then took instances out
    unscored: int  # choices in which a policy scored no candidate, so that the fewest requests decided
    steps: int  # of all engines
    step_variance: float  # of decode steps' seconds over the instances that decode, mean over the run, in s^2
    gamma: float | None  # of the router's priorities at the end, 1/s; None: it boosts nobody
    oom: int  # times that an engine ran out of memory, and put a request back into its queue for it
    stalled: int  # engines that stand still for ever, beyond what their profile's decode_throughput carries
    wall_seconds: float

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    @property
    def instances(self) -> int:
        """How many engines there were."""
        return len(self.timeline.running)

    @property
    def ttft_seconds(self) -> NDArray[np.float64]:
        """From arrival to the first output token."""
        return self.first_token_seconds - self.arrival_seconds

    @property
    def tpot_seconds(self) -> NDArray[np.float64]:
        """Mean time between output tokens; NaN where there is but one."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return np.asarray((self.finished_seconds - self.first_token_seconds) / gaps)

    @property
    def decode_tpot_seconds(self) -> NDArray[np.float64]:
        """From the start of the decode elsewhere to the last token, by tokens; NaN without a hand-over. (The
        first of them comes from there, too, so none is left out.)"""
        return np.asarray((self.finished_seconds - self.decode_start_seconds) / self.output_tokens)

    def gap_seconds(self, quantile: float) -> float | None:
        """A quantile of the time between tokens (TBT), to 1%; None where no request made two."""
        total = int(self.gap_counts.sum())
        if total == 0:
            return None
        place = int(np.searchsorted(np.cumsum(self.gap_counts), quantile * total))
        return float(self.gap_edges_seconds[min(place, len(self.gap_edges_seconds) - 1)])

    @property
    def optimal_assignment_ratio(self) -> float | None:
        """The share of hand-overs whose instance held the least context tokens of all when the prefill ended
        (ties count): SIBYL, Table 1. None: no hand-over."""
        return optimal_assignment_ratio(self.handoff_least_loaded)

    @property
    def e2e_seconds(self) -> NDArray[np.float64]:
        """From arrival to the last output token."""
        return self.finished_seconds - self.arrival_seconds

    def summary(
        self,
        *,
        slo_ttft_seconds: float | None = None,
        slo_tpot_seconds: float | None = None,
        share: tuple[float, float] = (0.0, 1.0),
    ) -> RunFigures:
        """Latency percentiles, hit ratios, rates, goodput and load imbalance of the run.

        Args:
            slo_ttft_seconds, slo_tpot_seconds: bounds that an answer must keep to count as goodput; None: no
                bound.
            share: the requests to summarize, as fractions in order of arrival: ``(0.1, 0.9)`` leaves out the
                first and the last tenth.
        """
        return figures(self, Slo(slo_ttft_seconds, slo_tpot_seconds), share)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with one row per request, in the trace's order: every column of the run, and
        ``ttft_seconds``, ``tpot_seconds`` and ``e2e_seconds``. Seconds are on the simulated clock.

        Raises:
            ImportError: pandas is not installed; the extra ``pandas`` has it.
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
    """A trace made ready for engines of one block size."""

    trace: Trace
    core: _core.Workload

    @property
    def block_tokens(self) -> int:
        """Tokens of an engine's block."""
        return self.core.block_tokens

    def __len__(self) -> int:
        return len(self.trace)

    def faster(self, speed: float) -> Workload:
        """`Trace.faster`, the block hashes being shared."""
        return Workload(self.trace.faster(speed), self.core.faster(speed))


def resolve_profile(profile: ProfileLike) -> Profile:
    """A profile from its shipped name, the path of a YAML file, a mapping of its fields, or itself."""
    if isinstance(profile, Profile):
        return profile
    return load_profile(profile) if isinstance(profile, str) else Profile.model_validate(dict(profile))


def resolve_fleet(
    profile: ProfileLike | Sequence[ProfileLike], instances: int | None = None
) -> list[Profile]:
    """The profile of each instance of a fleet; `instances` is 16 if only one profile is given.

    Raises:
        BadValueError: another number of instances than profiles, or profiles of several models.
        ProfileError: an unknown or bad profile.
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
                f"{what} of the profiles: {found} is not valid; expected one value, the engines of a fleet "
                "serve one model"
            )
    return each


def prepare(trace: Trace, profile: ProfileLike = DEFAULT_PROFILE) -> Workload:
    """Chain the hashes of a trace's prompt blocks for engines with the profile's block size.

    Raises:
        BadValueError: a column that cannot be, with the request; block sizes of which none divides the other.
    """
    block_tokens = resolve_profile(profile).block_tokens
    columns = {
        name: np.ascontiguousarray(column)
        for name in ("think_tokens", "previous", "think_seconds", "sessions")
        if (column := getattr(trace, name, None)) is not None
    }
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
    policy: PolicyLike = "lmetric",
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
    decode_policy: PolicyLike = None,
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
    migration_by: MoveBy = "kv",
    migration_max_concurrent: int = 4,
    migration_max_gap_seconds: float = 1.0,
    priority: str | Mapping[str, Any] | PriorityOption | None = "none",
    silent_segments: bool = False,
    token_slo_seconds: float = 0.1,
    think_slo_seconds: float | None = None,
    routers: int = 1,
    sharing_seconds: float | None = None,
    **old: Any,
) -> Run:
    """Play `trace` over `instances` engines of `profile` under `policy`. Same arguments, same columns.

    Args:
        trace: the path of a trace file (read with `load_trace`), a `Trace`, or the result of `prepare`, which
            saves time if a trace is played more than once.
        policy: what `lmetric.Router` takes (name, expression, `Policy`, `policy_function`), with `knobs`.
        instances: engines of the fleet; None: 16, or as many as there are profiles.
        profile: a shipped name, a path, a mapping, or a `Profile`. For unequal engines, a sequence of these
            with one for each instance, or ``"8 NAME + 8 NAME"``; `Profile.slower` makes slower ones. Block
            size and `kv_bytes_per_token` are those of all.
        decode_profile: of the instances that only decode, where theirs is another: more GPUs each, say. The
            model, and so a token's KV, and the block size are the same.
        seed: of every random choice (ties, policies that draw).
        signals: ``"exact"``, the router learns of everything as it happens; ``"step_end"``, it sees every
            engine as at the end of the step that runs; ``"delayed"``, as a live server: cache events come
            `event_delay_seconds` late, loads are reported every `report_period_seconds`, and of its own
            requests it sees what their responses show.
        token_stride: the router hears of an engine's tokens once its batch has run so many more steps: 1,
            of each. Policies that read tokens cost less to play with 8, and are up to 7 tokens behind.
        admission: ``"reserve"``, a request enters where all that run and its prompt fit, and is never put
            back; ``"vllm"``, blocks are taken as tokens come, and where none is left the last goes back.
        index: ``"exact"``, fed by the engines' cache events; ``"approximate"``, by what was placed where.
        guard: the hot-spot guard, see docs/guard.md: True, False, or ``{"window_seconds": 30}``; None: as the
            policy declares.
        predictor: the profile that `predicted_ttft_seconds` is computed from (None: the engines' own).
        output_known: whether the router knows how long each answer will be.
        timeline_seconds: length of the timeline's buckets.
        roles: pools in place of `instances` that do all: ``"16P64D"``, or ``{"prefill": 16, "decode": 64}``.
            A request is prefilled where `policy` says and decodes where `decode_policy` (with `decode_knobs`)
            says, `least_requests` if nothing is said.
        binding: when that is chosen: ``"early"``, as the request arrives, or ``"late"``, after its prefill.
        transfer: what moving its KV takes, see `lmetric.sim.pools.Transfer`: ``"50, layers"``, a mapping, or
            None or ``"none"`` (it is there at once). Its size comes from the profile.
        prefill: ``"queues"``, as engines do; ``"unlimited"``, every prompt takes its own time and waits for
            none (SIBYL, Algorithm 2). Then any number of prefill instances does the same.
        local_order: in which order engines take requests from their queues and, from ``"srpt"`` on, which go
            back for another: ``"fcfs"``, ``"sjf"`` (shortest answer), ``"spf"`` (shortest uncached prompt),
            ``"srpt"`` (least remaining work, lengths known), ``"srpt_noisy"`` (predicted, by `seed`), and
            ``"las"`` (least attained service); ``"slo"``: arrival, in steps that keep `order_slo`;
            ``"priority"``: by the router's numbers, see `priority`; ``"distboost"``, ``"uniboost"`` and
            others, also with settings of their own: ``"uniboost(gamma=0.2, bin_tokens=64)"``; see
            docs/simulator.md.
        order_slo: under ``"slo"``, seconds that a step in which something decodes may take.
        order_think_slo: the same of steps in which nothing but thoughts are made; None: no other.
        preempt: what becomes of the KV of requests that go back: ``"recompute"``, or ``"swap:25, host=64"``,
            it is copied to the host's memory and in again, at so many GB/s (`lmetric.queueing.Swap`); only
            with admission vllm.
        split, prefix_fetch, rebalance, priority, guard: a kind, a text with settings
            (``"libra(probes=8)"``), a mapping (``{"kind": "libra", "probes": 8}``), or an option of
            `lmetric.options`, which documents the settings.
        split: how requests are split that no `roles` split: ``"none"``; ``"apart"``, after the prompt, if
            all requests together lose less time then; ``"libra"``, between the instance of the policy and
            that of `decode_policy`, if this balances them and pays (with ``parts=3`` a request with reasoning
            is split in three: prompt, reasoning and answer); or ``"force"``, at the fraction ``fraction``.
            What is split moves as `transfer` says. ``"auto"`` or None: ``"apart"`` if the policy is planner
            and there are no `roles`, else ``"none"``.
        prefix_fetch: whether the chosen instance fetches what another holds of the prompt, if that takes
            less time than computing it: ``"on"``, ``"none"``, or settings, also in short:
            ``"least=512, most=2"``. It moves as `transfer` says. ``lmetric_pull`` and ``planner`` are the
            scores that read it. ``"auto"`` or None: ``"on"`` if the policy is planner, else ``"none"``.
        rebalance: how running requests move between engines that decode: ``"none"``; ``"star"`` (by
            predicted load), ``"star_current"`` (by present load), ``"star_oracle"`` (lengths known), or
            ``"llumnix"``.
        migration_by: how they get there: ``"kv"``, their KV is sent while they pause, as `transfer` says
            (the paper's way); or ``"recompute"``, the server's default: the target computes prompt and answer
            so far while the request runs on, then it changes over.
        migration_max_concurrent, migration_max_gap_seconds: of ``"recompute"``: most moves on their way at a
            time, and the longest gap that a move may make between two tokens, else it is given up.
        priority: what gives requests the numbers that local order ``"priority"`` goes by: ``"uniboost"`` or
            ``"vtc"`` (a session is a tenant), as a server gives them to stock engines: once, at submission.
        silent_segments: whether a segment that another follows says nothing until its end, as on stock
            engines; else its tokens come as they are made.
        token_slo_seconds: the longest gap between two tokens that counts as good, for `slow_tokens`.
        think_slo_seconds: the same where the latter is a thought; None: no other.
        routers: so many side by side; each request comes to one, drawn by `seed`. All hear the engines, and
            none knows of another's requests.
        sharing_seconds: but by what each tells the others of its load on each instance every so many
            seconds; None: nothing.

    Raises:
        LmetricError: an unknown policy, a setting out of range, a request that no engine could ever hold.
        ProfileError: an unknown or bad profile.
        TraceError: a file that is not a trace, or a bad line in it. FileNotFoundError: no such file.
    """
    pools = None if roles is None else Roles.of(roles)
    fleet = resolve_fleet(profile, instances if pools is None else pools.instances)
    chosen, instances = fleet[0], len(fleet)
    if isinstance(trace, str | Path):
        trace = load_trace(trace)
    workload = trace if isinstance(trace, Workload) else prepare(trace, chosen)
    if decode_profile is not None and (pools is None or not pools.decode):
        raise _core.BadValueError("decode_profile: no instance decodes only; give roles, e.g. 16P64D")
    decodes = None if decode_profile is None else resolve_profile(decode_profile)
    each = [
        (one if decodes is None or role != "decode" else decodes).constants()
        for one, role in zip(fleet, ["both"] * instances if pools is None else pools.each(), strict=True)
    ]
    name = policy_name(policy)
    given = {
        "split": split, "prefix_fetch": prefix_fetch, "priority": priority, "rebalance": rebalance,
        "guard": guard,
    }  # fmt: skip
    if old:
        given = _deprecated.simulate_keywords(old, given)
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
        what: core_settings(what, getattr(routing, what)) for what in ("split", "priority", "rebalance")
    }
    continued = pooled or routing.split is not None or routing.rebalance is not None
    if decode_policy is not None and not continued:
        raise _core.BadValueError(
            "decode_policy: requests decode where they are prefilled; give roles, e.g. 16P64D"
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
        migration_by=migration_by,
        migration_max_concurrent=migration_max_concurrent,
        migration_max_gap_seconds=migration_max_gap_seconds,
        silent_segments=silent_segments,
        token_slo_seconds=token_slo_seconds,
        think_slo_seconds=think_slo_seconds,
        routers=routers,
        sharing_seconds=sharing_seconds,
        roles=None if pools is None else pools.each(),
        **(_continued(routing, prefill) if continued else {}),
        **_transferred(routing.prefix_fetch, Transfer.of(transfer), chosen, continued),
    )
    wall_seconds = time.perf_counter() - started
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
        **columns,
    )


def _continued(routing: Routing, prefill: Prefill) -> dict[str, Any]:
    """What `_core.simulate` takes if plans may have several segments."""
    if prefill not in ("queues", "unlimited"):
        raise _core.BadValueError(f"prefill: {prefill!r} is not valid; expected queues or unlimited")
    return {
        "decode_policy": routing.decode_policy,
        "decode_knobs": routing.decode_knobs,
        "binding": routing.binding,
        "unlimited_prefill": prefill == "unlimited",
    }


def _transferred(fetch: Any, transfer: Transfer | None, profile: Profile, continued: bool) -> dict[str, Any]:
    """What `_core.simulate` takes of transfers, which prefix fetches and segments of a plan make."""
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


def policy_name(policy: PolicyLike) -> str:
    """What a run calls its policy: the name, or the text of the expression."""
    if policy is None:
        return "lmetric"
    if isinstance(policy, str | Expr):
        return str(policy)
    return policy.name or getattr(policy, "score", None) or "policy"


__all__ = [
    "Run",
    "Timeline",
    "Workload",
    "policy_name",
    "prepare",
    "resolve_profile",
    "simulate",
]
