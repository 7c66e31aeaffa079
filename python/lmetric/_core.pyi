"""The compiled core.

Times are seconds on the caller's monotonic clock (``time.monotonic()``); ``now=None`` reads it.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer, disjoint_base

from lmetric.options import (
    Binding,
    CountedTiers,
    Failure,
    Guard,
    Handoff,
    KvSource,
    Maturity,
    PrefixFetch,
    PriorityOption,
    ProgramOption,
    RebalanceOption,
    SplitOption,
    WarmChanges,
)
from lmetric.policies import PolicyLike
from lmetric.records import DecisionRecord, LearnedValues, RouterStats, TierStats
from lmetric.roles import PlacedRole

__all__ = [
    "END",
    "ENGINE_ERROR",
    "FAST_TOKENIZER",
    "FULL_READ",
    "INCOMPLETE",
    "INTERNAL_FIELDS",
    "MAX_EXPRESSION_LENGTH",
    "MAX_REQUEST_FIELDS",
    "MAX_TOKENS",
    "OUT",
    "PASS",
    "READY",
    "UNSEEN",
    "Arrival",
    "BadRequestError",
    "BadValueError",
    "Board",
    "Buckets",
    "BudgetRefusal",
    "BudgetReservation",
    "Budgets",
    "ChunkedBody",
    "Decision",
    "DecisionLabels",
    "Engine",
    "EngineBoost",
    "EventFeed",
    "ExpressionError",
    "HeadTooLargeError",
    "LmetricError",
    "LoadFormatError",
    "LoadMessage",
    "NoInstanceError",
    "Peer",
    "PolicyError",
    "PolicyTimeout",
    "Program",
    "Request",
    "RequestHead",
    "RequestReader",
    "ResponseReader",
    "Router",
    "StepTable",
    "Ticket",
    "TicketError",
    "TokenEncoder",
    "TokenizeError",
    "UnknownNameError",
    "Warming",
    "WireError",
    "Workload",
    "__version__",
    "bench_decision",
    "chained_hashes",
    "check_expression",
    "check_local_order",
    "check_object",
    "check_policy",
    "declare_indicator",
    "edit_object",
    "encode_load",
    "generate",
    "indicator_table",
    "join_parts",
    "local_orders",
    "nearest_name",
    "outline",
    "parsed_option",
    "planners",
    "policy_table",
    "read_hash_ids",
    "read_request",
    "short_members",
    "simulate",
]

__version__: str

# Integers: list, tuple, range, numpy array of any integer dtype, array.array, memoryview; bytes are
# packed integers of 32 bits (token IDs) or 64 bits (hashes). A contiguous numpy array of the right
# width is not copied.
_Integers: TypeAlias = Sequence[int] | NDArray[np.integer[Any]] | array[int] | bytes | bytearray | memoryview

class LmetricError(Exception): ...

class ExpressionError(LmetricError):
    text: str  # the expression
    start: int  # start of the offending part, in characters
    end: int  # end of the offending part, in characters
    part: str  # score, filter, then[0], ...; set by lmetric.Policy

class UnknownNameError(LmetricError): ...
class BadValueError(LmetricError): ...
class LoadFormatError(BadValueError): ...  # a load message of another version
class NoInstanceError(LmetricError): ...

@final
class Arrival:
    @property
    def id(self) -> int: ...
    @property
    def verdict(self) -> str: ...  # "free", "run", "held" or "refused"
    @property
    def reason(self) -> str | None: ...
    @property
    def retry_after_seconds(self) -> float | None: ...
    @property
    def expected_seconds(self) -> float | None: ...
    @property
    def needed_tokens(self) -> float | None: ...
    @property
    def working_set_ratio(self) -> float | None: ...
    @property
    def held_programs(self) -> int | None: ...
    def drop(self) -> None: ...

class TicketError(LmetricError): ...
class PolicyError(LmetricError): ...
class PolicyTimeout(BaseException): ...  # raised inside a policy that exceeds its time limit

@final
class Request:
    def __new__(
        cls,
        token_ids: _Integers | None = None,
        text: str | bytes | None = None,
        block_hashes: _Integers | None = None,  # 64-bit, one per block; the router chains them
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        session: str | None = None,
        request_id: str | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_tokens: int = 0,
        tenant: str | None = None,
        tenant_weight: float = 1.0,
        handicap_seconds: float = 0.0,
        length_class: str | None = None,
        reasoning_tokens: int | None = None,
        allow_split: bool = True,
        split_reason: str | None = None,
        allow_fetch: bool = True,
        fetch_reason: str | None = None,
        priority: float | None = None,
        instances: Sequence[str] | None = None,  # the only instances that may take the request
        session_final: bool = False,  # the last request of its session
        ttft_slo_seconds: float | None = None,
        whole_answer: bool = False,
        images: Sequence[tuple[str, int, int]] | None = None,  # identity, position and length of each image
    ) -> Request: ...
    @property
    def token_ids(self) -> NDArray[np.uint32] | None: ...
    @property
    def images(self) -> list[tuple[str, int, int]]: ...
    @property
    def text(self) -> str | bytes | None: ...
    @property
    def block_hashes(self) -> NDArray[np.uint64] | None: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def extra_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def reasoning_tokens(self) -> int | None: ...
    @property
    def length_class(self) -> str | None: ...
    @property
    def session(self) -> str | None: ...
    @property
    def lora_name(self) -> str | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def request_id(self) -> str | None: ...
    @property
    def allow_split(self) -> bool: ...
    @property
    def split_reason(self) -> str | None: ...
    @property
    def allow_fetch(self) -> bool: ...
    @property
    def fetch_reason(self) -> str | None: ...
    @property
    def tenant(self) -> str | None: ...
    @property
    def instances(self) -> list[str] | None: ...
    @property
    def tenant_weight(self) -> float: ...
    @property
    def handicap_seconds(self) -> float: ...
    @property
    def priority(self) -> float | None: ...
    @property
    def session_final(self) -> bool: ...
    @property
    def ttft_slo_seconds(self) -> float | None: ...
    @property
    def whole_answer(self) -> bool: ...

@final
class Warming:
    # Number, `Ticket.prompt_key`, tokens, source and target of the next fetch.
    def begin(self, now: float) -> tuple[int, int, int, str, str] | None: ...
    def ended(self, number: int, tokens: int, now: float) -> None: ...
    def is_over(self, now: float) -> bool: ...
    def wakes(self, now: float) -> float | None: ...
    @property
    def until(self) -> float: ...
    @property
    def planned(self) -> int: ...
    @property
    def fetched(self) -> tuple[int, int]: ...  # fetches, tokens

@final
class Board:
    SIZE: int
    WRITERS: int
    def __new__(cls, memory: Buffer, writer: int) -> Self: ...
    def clear(self, writer: int) -> None: ...
    def note(self, key: str, text: str | None) -> None: ...
    def noted(self, key: str) -> int | None: ...
    def number_of(self, name: str) -> int | None: ...
    @staticmethod
    def hash(text: str) -> int: ...

@final
class Budgets:
    """The windows of all tenants, and what they have used of them (rust/py/src/budget.rs).

    ``clock_start``: Unix time minus the monotonic clock, seconds. ``times``: seconds on the
    monotonic clock, and Unix time. ``board``: no other budgets of this process use it. Methods
    raise BadValueError.
    """

    def __new__(cls, clock_start: float, board: Board | None = None) -> Self: ...
    def set(self, tenants: dict[str, list[dict[str, Any]]]) -> None: ...
    def reserve(
        self,
        tenant: str,
        scope: tuple[str, str, str],  # model, ID of the API key, and SLO class
        tokens: tuple[int, int],  # input and output
        times: tuple[float, float],
    ) -> BudgetReservation | BudgetRefusal | None: ...  # None: the tenant has no windows
    # Why this worker counts some windows alone.
    def tidy(self, times: tuple[float, float]) -> Literal["full", "locked"] | None: ...
    MOST_SKEW_SECONDS: float  # between the clocks of two routers that share counts
    def share(self, router: str) -> None: ...  # ID of this start of the router
    def enter(self) -> int: ...  # the present counts as a new version
    def encode(self, base: int | None, times: tuple[float, float]) -> bytes: ...
    def merge(
        self, message: bytes, times: tuple[float, float]
    ) -> tuple[bool, float]: ...  # whether its version counts now, and seconds that its clock is ahead
    def save(self, times: tuple[float, float]) -> bytes: ...
    def restore(self, saved: bytes, times: tuple[float, float]) -> None: ...

@final
class BudgetReservation:
    @property
    def lines(self) -> bytes: ...  # lines of an HTTP head
    @property
    def exceeded(self) -> list[str]: ...  # names of shadow windows
    def settle(
        self,
        tokens: tuple[int, int, int],  # input, the cached part of it, and output
        times: tuple[float, float],
    ) -> None: ...
    def keep(self) -> None: ...  # what was reserved counts as used
    def release(self) -> None: ...

@final
class BudgetRefusal:
    @property
    def window(self) -> str: ...
    @property
    def counts(self) -> str: ...
    @property
    def per(self) -> str: ...
    @property
    def limit(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def asked(self) -> int: ...
    @property
    def retry_after_seconds(self) -> float | None: ...  # None: more than the limit
    @property
    def fields(self) -> list[tuple[str, str]]: ...  # of an HTTP head

@final
class StepTable:
    def __new__(cls, profile: Mapping[str, float] | None = None) -> Self: ...
    @property
    def recorded(self) -> int: ...
    def record(
        self,
        seconds: float,
        *,
        decodes: int,
        context_tokens: int,
        prefill_tokens: int,
        prefill_pairs: float,
    ) -> None: ...
    def seconds(
        self, *, decodes: int, context_tokens: int, prefill_tokens: int = 0, prefill_pairs: float = 0.0
    ) -> float | None: ...
    def prefill_within(
        self, seconds: float, *, decodes: int, context_tokens: int, before: int, most: int
    ) -> int | None: ...

@final
class EngineBoost:
    def __new__(cls, settings: Mapping[str, float] | None = None, *, token_seconds: float = 1e-4) -> Self: ...
    @property
    def gamma(self) -> float: ...
    @property
    def token_seconds(self) -> float: ...
    @property
    def hysteresis_seconds(self) -> float: ...
    def stepped(self, seconds: float, tokens: int) -> None: ...
    def ended(self, seconds: float) -> None: ...
    def give(self, gamma: float) -> None: ...  # a router's, for the next update
    def look(self) -> bool: ...
    def rank(self, arrival: float, *, prompt_tokens: int, hit_tokens: int, attained_tokens: int) -> float: ...
    def next_change(self, *, prompt_tokens: int, hit_tokens: int, attained_tokens: int) -> int: ...

@final
class LoadMessage:
    FORMAT: int
    def __new__(cls, body: bytes) -> Self: ...
    @property
    def sender(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def base(self) -> int | None: ...
    @property
    def budgets(self) -> bytes: ...  # for Budgets.merge
    def __len__(self) -> int: ...

def encode_load(
    sender: str,
    version: int,
    base: int | None,
    routers: Sequence[tuple[str, Router]],
    *,
    budgets: bytes | None = None,
    now: float | None = None,
) -> bytes: ...

@final
class Router:
    def __new__(
        cls,
        policy: PolicyLike | None = None,  # None: the default policy
        *,
        knobs: Mapping[str, float] | None = None,
        block_size: int = 16,
        text_block_bytes: int = 256,
        domain: Sequence[str | None] | None = None,
        kv_source: KvSource = "approximate",
        index_bytes: int = 536870912,
        record_bytes: int = 16777216,
        guard: bool | Guard | None = None,  # None: off, unless the policy turns it on
        step_time: Mapping[str, float] | None = None,  # a profile's constants
        decay_queued_prefill: bool = True,
        seed: int = 0,
        decode_policy: PolicyLike | None = None,  # "least_requests"
        decode_knobs: Mapping[str, float] | None = None,
        binding: Binding = "early",
        colocate: bool = True,
        split: SplitOption | None = None,
        prefix_fetch: PrefixFetch | None = None,
        priority: PriorityOption | None = None,
        rebalance: RebalanceOption | None = None,
        programs: ProgramOption | None = None,
        fleet_changes: WarmChanges | None = None,
        offers: Maturity = "study",
        tiers: CountedTiers = "auto",  # tiers below the GPU that count in scores
        tier_load_ratio: float = 0.02,  # seconds to load a token / seconds to prefill it
    ) -> Router: ...
    def configure(
        self,
        *,
        split: SplitOption | None = ...,
        prefix_fetch: PrefixFetch | None = ...,
        priority: PriorityOption | None = ...,
        rebalance: RebalanceOption | None = ...,
        programs: ProgramOption | None = ...,
        fleet_changes: WarmChanges | None = ...,
        guard: bool = ...,
        binding: Binding = ...,
        block_size: int = ...,
    ) -> None: ...
    def add_instance(
        self,
        name: str,
        *,
        cache_blocks: int | None = None,
        role: PlacedRole = "both",
        group: str | None = None,
    ) -> int: ...
    def update_instance(
        self,
        name: str,
        *,
        role: PlacedRole = ...,
        healthy: bool = ...,
        draining: bool = ...,
        cache_blocks: int | None = ...,
        handoff: Handoff = ...,
        step_time: Mapping[str, float] | None = ...,
        kv_source: KvSource = ...,
        max_loras: int | None = ...,
    ) -> None: ...
    def remove_instance(self, name: str) -> None: ...
    def set_clock_offset(
        self, seconds: float
    ) -> None: ...  # of UniBoost: wall clock minus the router's clock
    def begin_join(self, name: str, *, now: float | None = None) -> Warming: ...
    def begin_leave(self, name: str, *, now: float | None = None) -> Warming: ...
    def end_warming(self, name: str) -> None: ...
    def moves_from(self, name: str) -> list[tuple[int, str]]: ...  # Ticket.id, instance
    def rebalance(
        self, now: float | None = None
    ) -> tuple[list[dict[str, Any]], str]: ...  # moves, and why there are no more
    def learned(self, now: float | None = None) -> LearnedValues: ...
    @property
    def block_size(self) -> int: ...
    def instances(self) -> list[str]: ...
    def in_flight(self) -> int: ...
    def route(
        self,
        request: Request,
        *,
        now: float | None = None,
        arrival: Arrival | None = None,
        canary: bool = False,  # the policy of `set_canary` decides
        shadow: bool = False,  # the policy of `set_shadow` scores the request, too
    ) -> tuple[Decision, Ticket]: ...
    def route_many(
        self,
        requests: Iterable[Request],
        *,
        now: float | None = None,
        arrivals: Sequence[Arrival | None] | None = None,  # one per request
        canary: bool = False,
        shadow: bool = False,
    ) -> list[tuple[Decision, Ticket] | LmetricError]: ...
    def arrive(
        self, request: Request, *, now: float | None = None, level: int = 0, sheddable: bool = False
    ) -> Arrival | None: ...
    def finish_session(self, session: str, *, now: float | None = None) -> int | None: ...
    def release_held(  # id and seconds held; id, reason and seconds to try again after
        self, *, now: float | None = None
    ) -> tuple[list[tuple[int, float]], list[tuple[int, str, float]]]: ...
    @property
    def waiting(self) -> int: ...
    def set_admission(self, settings: dict[str, Any] | None) -> None: ...
    def set_levels(self, levels: dict[int, int]) -> None: ...  # by the id of the arrival
    def admission(self, *, now: float | None = None) -> dict[str, Any] | None: ...
    def programs(self) -> dict[str, Any] | None: ...
    def cached_tokens(self, request: Request) -> NDArray[np.uint32]: ...
    def score(self, request: Request, *, now: float | None = None) -> NDArray[np.float64]: ...
    def score_batch(  # (requests, instances)
        self, requests: Sequence[Request], *, now: float | None = None
    ) -> NDArray[np.float64]: ...
    def report_load(
        self,
        name: str,
        *,
        waiting: float | None = None,
        running: float | None = None,
        kv_usage: float | None = None,
        extra: Mapping[str, float | None] | None = None,
        now: float | None = None,
    ) -> None: ...
    def enter_load(self, version: int, oldest: int, *, now: float | None = None) -> None: ...
    def import_load(self, message: LoadMessage, model: str, *, now: float | None = None) -> bool: ...
    def expire_peers(self, seconds: float, *, now: float | None = None) -> list[str]: ...
    def join(self, board: Board, model: str) -> None: ...
    def leave(self) -> None: ...
    def publish_load(self, *, now: float | None = None) -> bool: ...
    @property
    def has_programs_of_workers(self) -> bool: ...
    def blocks_stored(
        self,
        name: str,
        block_hashes: _Integers,
        token_ids: _Integers,
        *,
        parent: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        rank: int = 0,
        medium: str = "GPU",  # or "CPU" or "STORAGE", in any case
    ) -> int: ...  # number of blocks that were not placed
    def blocks_removed(
        self, name: str, block_hashes: _Integers, *, rank: int = 0, medium: str = "GPU"
    ) -> None: ...
    def blocks_cleared(
        self, name: str, *, rank: int | None = None
    ) -> None: ...  # None: all ranks, and the guessed blocks
    def tiers(self, name: str) -> dict[str, TierStats]: ...  # below the GPU, by medium
    def tick(self, now: float | None = None) -> tuple[list[dict[str, Any]], float]: ...
    @property
    def guard_reason(self) -> str: ...  # why the guard is on or off under the policy
    def set_policy(self, policy: PolicyLike, *, knobs: Mapping[str, float] | None = None) -> None: ...
    def set_decode_policy(self, policy: PolicyLike, *, knobs: Mapping[str, float] | None = None) -> None: ...
    def set_canary(
        self,
        policy: PolicyLike | None,
        *,
        knobs: Mapping[str, float] | None = None,
    ) -> None: ...
    def set_shadow(
        self,
        policy: PolicyLike | None,
        *,
        knobs: Mapping[str, float] | None = None,
    ) -> None: ...
    def policy_fallbacks(self) -> dict[str, Any]: ...  # errors, overruns, paused, problem
    @property
    def unscored(self) -> int: ...  # choices in which a policy scored no candidate
    def policy_warnings(self) -> list[str]: ...
    def indicators(
        self, now: float | None = None, *, names: Sequence[str] | None = None
    ) -> dict[str, NDArray[np.float64]]: ...
    def indicators_of(
        self, instance: str, names: Sequence[str], now: float | None = None
    ) -> dict[str, float]: ...
    def prefill_rate(
        self, instance: str
    ) -> float | None: ...  # tokens/s, learned from first tokens; None: no prefill yet
    def explain(self, decision: Decision | int) -> DecisionRecord | None: ...
    def stats(self, *, instances: bool = True, indicators: Sequence[str] | None = None) -> RouterStats: ...

@final
class EventFeed:
    """Subscribes to engines' KV cache events over ZMQ and applies them to a router's index.

    Runs on a thread of its own (`rust/feed`). Only instances with `kv_source="exact"` learn. In a
    forked process, calls fail: start a feed after the fork.
    """

    MAX_SOURCE_BYTES: ClassVar[int]  # most bytes of received events that wait for one subscription
    MAX_MESSAGE_BYTES: ClassVar[int]  # a larger message ends its connection

    def __new__(cls, router: Router) -> EventFeed: ...
    @property
    def router(self) -> Router: ...
    @property
    def problem(self) -> str | None: ...  # of the feed's thread
    def subscribe(
        self,
        instance: str,
        endpoint: str,  # of this rank; with bind: the router's address for engines to connect to
        *,
        replay_endpoint: str | None = None,
        topic: str = "",  # "": any topic
        bind: bool = False,
        rank: int = 0,
        block_size: int | None = None,  # the engine's; must equal the router's
    ) -> None: ...
    def subscribe_load(
        self, instance: str, endpoint: str, *, topic: str = ""
    ) -> None: ...  # load reports of SGLang (LoadStat)
    def unsubscribe(self, instance: str) -> bool: ...  # drops the blocks learned from its events
    def begin_new_weights(
        self, instances: Sequence[str]
    ) -> None: ...  # drops their blocks, and ignores events made before now
    def instances(self) -> list[str]: ...
    def status(self, instance: str) -> dict[int, dict[str, Any]]: ...
    # By rank. `state` is "connecting", "live" or "incomplete". `skipped` is {reason: count},
    # `tiers` {medium: blocks}, `groups` the number of KV cache groups apart from full attention,
    # `group_blocks` their blocks. `min_delay_seconds` is from the engine's timestamp of a batch.
    # The others: `connected`, `batches`, `replayed`, `events`, `blocks_stored`, `blocks_removed`,
    # `cleared`, `gaps`, `resyncs`, `restarts`, `unanswered`, `unknown_parent`, `unknown_removed`,
    # `last_sequence`, `last_batch_age_seconds`, `block_size`, `reported_rank`, `other_topic`,
    # `last_error`, and more.
    def load_status(self, instance: str) -> dict[str, Any] | None: ...  # the keys of status()
    def close(self) -> None: ...
    def __enter__(self) -> EventFeed: ...
    def __exit__(self, *args: object) -> None: ...
    @staticmethod
    def rank_endpoint(endpoint: str, rank: int) -> str: ...  # adds the rank to the port

@final
class Decision:
    @property
    def id(self) -> int: ...
    @property
    def instance(self) -> str: ...  # name of the chosen instance
    @property
    def decode_instance(self) -> str | None: ...  # None: not chosen yet, or the same instance
    @property
    def fetch(self) -> tuple[str, int, int] | None: ...  # holder, first token, one past the last
    @property
    def slot(self) -> int: ...
    @property
    def predicted_cached_tokens(self) -> int: ...
    @property
    def predicted_tier_tokens(self) -> int: ...  # part of them in a tier below the GPU
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def priority(self) -> int | None: ...  # in the engine's queue, lower first
    @property
    def shadow(self) -> tuple[str | None, int, float, float] | None: ...
    # Choice of the shadow: instance (None: it failed), predicted cached tokens, predicted seconds
    # to the first token, and the same seconds on `instance`. None: no shadow scored the request.
    def scores(self) -> NDArray[np.float32]: ...
    def ranking(self) -> list[str]: ...  # names, best first

@final
class Ticket:
    @property
    def instance(self) -> str: ...  # instance of the open segment
    @property
    def from_token(self) -> int: ...  # first token of the open segment
    @property
    def id(self) -> int: ...  # unique among open tickets
    def begin_migration(self, target: str, *, recompute: bool = True, now: float | None = None) -> None: ...
    def choose_failover(self, now: float | None = None) -> str: ...  # after its instance failed
    def cancel_migration(self, now: float | None = None) -> None: ...
    def migrated(self, now: float | None = None) -> str: ...  # name of its new instance
    @property
    def to_token(self) -> int | None: ...  # one past the last token of the segment; None: no limit
    @property
    def has_next(self) -> bool: ...  # whether another segment follows
    @property
    def next_instance(self) -> str | None: ...  # of the next segment; None: not bound yet
    @property
    def prompt_key(self) -> int | None: ...  # names its prompt in `Warming.begin`
    @property
    def fetch(self) -> tuple[str, int, int] | None: ...  # as Decision.fetch; None after its end
    def fetched(
        self, tokens: int, seconds: float, now: float | None = None, *, late: bool = False
    ) -> None: ...  # 0 tokens: none arrived; late: given up, it took too long
    def sent(self, now: float | None = None) -> None: ...
    def scheduled(self, now: float | None = None) -> None: ...  # optional: it left the queue
    def prefilled(
        self, tokens: int, now: float | None = None
    ) -> None: ...  # optional: exact prefill progress
    def first_token(self, now: float | None = None) -> None: ...
    def tokens(self, n: int, now: float | None = None) -> None: ...  # n further output tokens
    def segment_done(
        self,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        finish_reason: str | None = None,
        now: float | None = None,
    ) -> str | None: ...  # instance of the next segment; None: the request ended
    def done(
        self,
        *,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
        finish_reason: str | None = None,
        now: float | None = None,
    ) -> None: ...  # the request ended, even if another segment was to follow; finish_reason
    # "length": it reached its limit; else its length counts as its own
    def failed(self, kind: Failure | str, now: float | None = None, *, retry: bool = True) -> str | None: ...
    # "refused" | "dns" | "tls" | "unreachable" | "reset" | "timeout" | "status": before the first
    # token, moves the ticket to the next instance of the ranking and returns its name (call sent()
    # again). Closes the ticket and returns None if the ranking is used up or a token was seen.
    # `cancelled` | `engine_error` | `resources`: always closes the ticket and returns None.
    @property
    def open(self) -> bool: ...
    def __enter__(self) -> Ticket: ...
    def __exit__(self, *args: object) -> None: ...  # an open ticket counts as an abort

FAST_TOKENIZER: bool  # built with the cargo feature fast-tokenizer
MAX_EXPRESSION_LENGTH: int

@final
class Program:
    def __new__(cls, text: str, kind: str = "any", knobs: dict[str, float] | None = None) -> Program: ...
    @property
    def reads(self) -> list[str]: ...
    def evaluate(
        self,
        columns: dict[str, NDArray[np.float64]],
        eligible: NDArray[np.bool_] | None = None,
        groups: Sequence[int] | None = None,
    ) -> NDArray[np.float64] | NDArray[np.bool_]: ...

def indicator_table() -> list[dict[str, str]]: ...
def planners(offers: Maturity = "study") -> list[str]: ...
def check_policy(policy: PolicyLike, knobs: dict[str, float], offers: Maturity) -> None: ...
def declare_indicator(
    name: str, unit: str = "", default: float | None = None, max_age_seconds: float | None = None
) -> None: ...
def policy_table() -> list[dict[str, Any]]: ...
def check_expression(
    text: str, kind: str = "score", knobs: dict[str, float] | None = None
) -> list[str]: ...  # names of the indicators read; raises ExpressionError
def parsed_option(what: str, kind: str, settings: dict[str, Any]) -> str: ...
def chained_hashes(key: bytes, first: bytes, data: bytes, block: int) -> bytes: ...
def nearest_name(name: str, known: list[str]) -> str | None: ...
def bench_decision(
    *,
    policies: Sequence[str],
    instances: Sequence[int],
    prompt_tokens: Sequence[int],
    iterations: int = 1000,
    block_size: int = 16,
    stored_pairs: int = 200_000,
    index: str = "approximate",
) -> list[dict[str, Any]]: ...

class WireError(LmetricError): ...
class HeadTooLargeError(WireError): ...  # its message names a field and no value

READY: int  # commit() may be called
END: int  # the message ended
MAX_REQUEST_FIELDS: int  # most header fields of a client's request
MAX_TOKENS: int  # largest token count in a usage; a higher count is an engine error
PASS: int  # the client receives the bytes unchanged
OUT: int  # take() has bytes for the client
ENGINE_ERROR: int  # the engine reported an error inside the body
INCOMPLETE: int  # a stream ended without finish_reason; its end is withheld
UNSEEN: int  # the stream is no longer observed; it passes on

@final
class Peer:
    """The sender of requests: a client, or a trusted proxy that describes its client.

    ``address``: IP address; empty for clients of a unix socket. ``secure``: the connection uses
    TLS. ``trusted``: its forwarding fields are true.
    """

    def __new__(cls, address: str, secure: bool, trusted: bool) -> Peer: ...
    @property
    def address(self) -> str: ...
    @property
    def trusted(self) -> bool: ...

@final
class RequestHead:
    """The head of a client's request. If a field occurs twice, the first one counts."""

    @property
    def plain(
        self,
    ) -> bool: ...  # a POST over HTTP/1.1 with one content-length and no other expectations
    @property
    def framed(self) -> bool: ...  # the length is known; true if plain
    @property
    def chunked(self) -> bool: ...  # HTTP/1.1 with a chunked body
    @property
    def start(self) -> int: ...  # bytes of the head
    @property
    def length(self) -> int: ...  # bytes of the body
    @property
    def keep_alive(self) -> bool: ...  # the client did not ask to close the connection
    @property
    def target(self) -> bytes: ...
    @property
    def path(self) -> str: ...  # the target without its query
    @property
    def relayed(self) -> Any: ...  # the value of `path` in the reader's `paths`; None: it has none
    @property
    def request_id(self) -> str: ...  # at most 256 bytes, latin-1; a new id if the client sent none
    @property
    def session(self) -> str | None: ...  # x-session-id, as latin-1
    @property
    def session_final(self) -> bool: ...  # x-session-final is "true" or "1"
    @property
    def authorization(self) -> bytes | None: ...
    @property
    def x_api_key(self) -> bytes | None: ...
    @property
    def api_key(self) -> bytes | None: ...
    @property
    def tenant(self) -> str | None: ...  # x-tenant
    @property
    def priority(self) -> float | None: ...  # x-vllm-priority; NaN: not a whole number
    @property
    def forwarded_for(self) -> bytes | None: ...  # all x-forwarded-for fields, as one list
    def field(self, name: bytes) -> bytes | None: ...  # the first field for engines with this name
    def for_engine(
        self,
        first: bytes,
        length: int,
        priority: int | None = None,
        own_key: bool = False,
        own_priority: bool = False,
        peer: Peer | None = None,
    ) -> bytes: ...
    # The whole head for an engine: `first` (request line and fields of the router's own), the
    # client's fields except those of its connection, x-request-id, content-length. `own_key`:
    # `first` has an authorization, so the client's is left out. `own_priority`: the client's
    # x-vllm-priority is left out, with or without a `priority`. `peer`: the request's sender, which
    # forwarding fields describe; None: the head has no such fields.

@disjoint_base
class Buckets:
    """Counts of values in buckets, and the sum of all values.

    ``bounds``: the upper bounds of the buckets, inclusive and ascending. A further bucket has the
    values above the last bound.
    """

    def __new__(cls, bounds: Sequence[float]) -> Self: ...
    def observe(self, value: float) -> None: ...  # adds a value
    @property
    def counts(self) -> list[int]: ...  # the number of values in each bucket
    @property
    def sum(self) -> float: ...

@final
class DecisionLabels:
    """Labels of decisions: the prefix, the id, and a tag that cannot be guessed.

    The tag is SipHash-2-4 of id and tenant, 16 hex digits, so a label is valid for its tenant
    alone. ``key``: 16 bytes, else a ValueError.
    """

    def __new__(cls, prefix: str, key: bytes) -> DecisionLabels: ...
    def label(self, id: int, tenant: str) -> str: ...
    def answer_lines(
        self, head: RequestHead, id: int, tenant: str, engine: str | None = None, prefill: str | None = None
    ) -> bytes: ...
    # The router's lines in the head of an answer. ``engine``: the engine that answers. ``prefill``:
    # the engine that computed the prompt.

INTERNAL_FIELDS: frozenset[str]  # fields that only routers and engines may send

class BadRequestError(LmetricError):
    """A request body that the API does not accept.

    Its arguments: a message for the client, and the wrong field (None: the body).
    """

def read_request(
    reader: str, body: bytes
) -> tuple[
    bytes,
    str | None,
    bool,
    str | None,
    str | None,
    str | None,
    int | None,
    bytes | None,
    NDArray[np.uint32] | None,
    int,
    int,
    float | None,
]:
    """Reads the fields of a request. ``reader``: a `PromptReader` of `server/api/paths.py`.

    Returns the fields of `ParsedRequest` in their order, from the second:

    - the body in UTF-8, without a byte order mark
    - model, whether it streams, session by other fields, ``session_id``, cache salt, largest number
      of answer tokens
    - its prompt as UTF-8 text or as token IDs, bytes and tokens of its further prompts
    - its ``priority`` (NaN: not a number; None: no such field)

    Raises BadRequestError, or ValueError for an unknown reader.
    """

def edit_object(body: bytes, remove: Sequence[str], front: bytes) -> bytes:
    """Returns an object's JSON without the members of the names ``remove``.

    ``front``: members (JSON without braces) that come first. ``body``: a body that `read_request`
    returned. Other threads run while it copies more than 64 KiB.
    """

def outline(body: bytes, longest: int) -> bytes:
    """Returns an object's JSON with short stand-ins for values longer than ``longest`` bytes.

    A stand-in has the kind of the value. A list keeps the kinds of its first two items. ``body``: a
    body that `read_request` returned.
    """

def short_members(body: bytes, longest: int) -> bytes:
    """Returns an object's JSON without the members whose values are longer than ``longest`` bytes.

    ``body``: a body that `read_request` returned.
    """

def join_parts(parts: Sequence[bytes | bytearray], skip: int) -> bytes:
    """Joins pieces of a body, without its first ``skip`` bytes. Nobody may change them meanwhile.

    Other threads run while it copies more than 64 KiB.
    """

def check_object(body: bytes) -> None:
    """Checks that a body is a JSON object within the bounds.

    They limit depth, containers, members and values. Raises BadRequestError.
    """

@final
class ChunkedBody:
    """The chunked body of a client's request."""

    def __new__(cls) -> ChunkedBody: ...
    def read(self, data: bytes) -> tuple[bytes, int]:
        """Returns the payload in ``data``, and the number of bytes read: fewer at the end.

        Raises WireError.
        """
    @property
    def done(self) -> bool: ...  # the body has ended

@final
class RequestReader:
    """Reads heads of requests (see `rust/wire`).

    ``own_keys``: credentials are for the router and do not go to engines. ``id_prefix``: prefix of
    the ids of requests that have no id. ``limit``: most bytes of a head. ``paths``: values by
    path, for `RequestHead.relayed`.
    """

    def __new__(
        cls, own_keys: bool, id_prefix: str, limit: int, paths: Mapping[str, Any]
    ) -> RequestReader: ...
    @property
    def limit(self) -> int: ...
    def read(self, data: bytes) -> RequestHead | None: ...  # None: incomplete; raises WireError
    def sort(
        self, target: bytes, fields: Sequence[tuple[bytes, bytes]]
    ) -> RequestHead: ...  # of fields read by another parser

FULL_READ: int  # bytes of a read that may not have been the last one of its turn of the event loop

@disjoint_base
class ResponseReader:
    """Reads an engine's HTTP/1.1 responses and frames them for the client (see `rust/wire`).

    Base class of an asyncio protocol. The reader reports output tokens to the ticket when the
    client gets them. It withholds an answer until it can be committed: plain JSON or an error until
    it is whole, an event stream until its first token or error. After ``commit`` the client
    gets whole events only. Pieces that pass unchanged or in a new frame go to ``write`` at once.
    All other pieces go to the sink: ``received(flags, data)``, or ``failed(error)`` if the answer
    is malformed (a WireError) or could not be written.

    With ``observe``, the reader records every event of a stream of status 200 on its way to the
    client (one choice, with ``token_ids``), and ``kv_transfer_params`` become null. With
    ``hide_ids``, ``prompt_token_ids`` and ``token_ids`` become null, too. If the reader can no
    longer observe the stream, the sink receives UNSEEN, and the stream passes on unobserved. It
    also receives UNSEEN at the first reasoning or tool call. If the engine reports its failure
    after a token, the event is withheld, and the sink receives INCOMPLETE.
    """

    def __new__(cls, *_args: Any) -> Self: ...  # the arguments are the subclass's
    def begin(
        self,
        sink: Any,
        ticket: Ticket | None = None,
        http11: bool = True,
        require_finish: bool = False,
        observe: bool = False,
        hide_ids: bool = False,
    ) -> None: ...
    def withhold_abort(self) -> None: ...
    # After begin(): the end of a message that its engine aborted is withheld, too. The engine must
    # send no `message_delta` without a reason before the end.
    def rename(self, served: str, shown: str) -> None: ...
    # After begin(): the model's name `served` becomes `shown` in the answer, unless it has a
    # content-encoding.
    def data_received(
        self, data: bytes
    ) -> None: ...  # called by the event loop; without a sink it calls `unasked()`
    def large_read(self, data: bytes) -> None: ...  # called with large data; calls process()
    def process(self, data: bytes) -> None: ...  # reads data now
    @property
    def attached(self) -> bool: ...  # whether a sink gets the data
    def eof(
        self,
    ) -> int: ...  # flags; raises WireError if the message is incomplete
    def commit(
        self, extra: bytes, close: bool, write: Callable[[bytes], None] | None = None
    ) -> bytes: ...  # the head with extra lines, and the withheld bytes
    def continue_stream(
        self, write: Callable[[bytes], None]
    ) -> bytes: ...  # instead of commit(), for a client that has the head of a stream: the withheld bytes
    @property
    def held(self) -> bytes: ...
    def payload(self) -> bytes: ...  # instead of commit(): the body so far, for the router itself
    def take_comments(
        self,
    ) -> bytes: ...  # texts of comments dropped before the commit, each as a line
    def commit_events(self) -> list[bytes]: ...
    # Instead of commit() if there is no client: nothing is written, no piece is PASS. Returns
    # events(). Right after begin() it does not commit yet, but then no event is cut, and an event
    # of more than 8 MiB is an error. Otherwise, events above 256 KiB are cut.
    def events(self) -> list[bytes]: ...
    # Instead of take(), after commit_events(): the data of each event except [DONE], and each
    # comment line, which begins with a colon.
    def observed(self) -> tuple[NDArray[np.uint32] | None, NDArray[np.uint32], str, dict[str, Any]]: ...
    # Token IDs of the prompt (if reported), token IDs and text of the answer, and `id`, `created`
    # and `model` of its first event (empty before it). Copies.
    def observed_pieces(self) -> list[int]: ...  # number of token IDs in each event with some
    def observed_parsed(self) -> tuple[str, list[str]] | None: ...
    # The reasoning of the answer, and the `tool_calls` of its events as JSON; None: it has neither.
    @property
    def observed_prompt(self) -> NDArray[np.uint32] | None: ...  # copy; None: not reported
    @property
    def observed_tokens(self) -> int: ...  # number of token IDs of the answer
    @property
    def observed_over(self) -> bool: ...  # whether a finish_reason was seen
    @property
    def observed_usage(self) -> bool: ...  # whether the usage followed the finish_reason
    @property
    def observed_done(self) -> bool: ...  # whether the event [DONE] was observed
    @property
    def withheld(self) -> bytes: ...  # data of the event with which the engine failed, or empty
    @property
    def progress(self) -> int: ...  # grows with each part of the answer; comments do not count
    @property
    def unseen(self) -> str | None: ...  # why the stream is no longer observed
    def detach(self) -> Any: ...  # removes the sink and returns it
    def finish_ticket(self) -> None: ...  # closes the ticket with the answer's usage
    def take(self) -> bytes: ...
    def end_with(
        self, events: bytes
    ) -> bytes: ...  # ends a committed stream with these SSE events; empty if not possible
    @property
    def pieces(self) -> int: ...  # number of pieces received of this answer
    @property
    def status(self) -> int: ...  # 0 before the head
    @property
    def keep_alive(self) -> bool: ...  # the connection may serve another request
    @property
    def event_stream(self) -> bool: ...
    @property
    def closes_client(self) -> bool: ...  # only closing the client's connection ends this answer
    @property
    def load(self) -> str | None: ...  # endpoint-load-metrics header (ORCA)
    @property
    def head_lines(self) -> bytes: ...  # status line and end-to-end fields, each with its line end
    @property
    def coding(self) -> str | None: ...  # content-encoding: the answer is not read; None: it has none
    @property
    def aborted(self) -> bool: ...  # the engine's last finish_reason was abort or error
    @property
    def error_code(self) -> int | None: ...
    @property
    def tokens(self) -> int: ...  # output tokens counted from events
    @property
    def first_token_at(self) -> float | None: ...  # seconds on the monotonic clock
    @property
    def prompt_tokens(self) -> int | None: ...  # from the usage in the answer
    @property
    def cached_tokens(self) -> int | None: ...  # from the usage in the answer
    @property
    def output_tokens(self) -> int: ...  # from the usage in the answer, else counted from events
    @property
    def usage(self) -> tuple[int | None, int | None, int, float | None, bool]: ...
    # The tokens of the prompt, of its cached part and of the output, the time of the first one, and
    # whether a count was impossible and was dropped.

# -- engine model (rust/py/src/lab/engine.rs) ------------------------------------------------------

@final
class Engine:
    """One emulated engine: queue, batch, KV cache and steps. It has no clock: callers give seconds.

    ``profile``: the constants of `lmetric.profiles.Profile`. ``words``: token IDs (u32) of answers,
    below ``vocabulary``. Raises BadValueError for constants that no engine can have.
    """

    def __new__(
        cls,
        profile: Mapping[str, Any],
        words: _Integers,
        vocabulary: int,
        *,
        admission: str = "vllm",  # or "reserve"
        order: str = "fcfs",  # docs/research/simulator.md, local orders
        order_slo_seconds: float = 0.1,  # for the order slo
        swap: tuple[float, int] | None = None,  # seconds per token each way, tokens in the host
        # Capacity relative to the GPU's, seconds to load a token, step seconds per load second.
        host_tier: tuple[float, float, float] | None = None,
        kv_events: bool = False,
    ) -> Engine: ...
    def submit(
        self,
        prompt: _Integers,
        output_tokens: int,
        now: float,
        *,
        priority: int = 0,
        salt: str | None = None,
        report_cached: bool = False,  # report cached blocks of the prompt as stored again
        fetched_tokens: int = 0,  # leading prompt tokens whose KV comes from another engine
        token_slo_seconds: float | None = None,  # its own SLO of a token, for the order slo
    ) -> int: ...  # the request's key; BadValueError if the engine could never serve it
    def abort(self, id: int) -> bool: ...  # False: unknown request
    def next_load(self) -> float | None: ...  # end of the first load from the host tier under way
    def start_step(self, now: float) -> float | None: ...  # end of the step; None: nothing to do
    def finish_step(
        self,
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, bool]], list[int], int]: ...
    # tokens (key, token id, flags: 1 = last token, 2 = out of a prefill), admitted (key, cached
    # tokens, whether for the first time), preempted (keys), prompt tokens computed
    def take_kv_events(self) -> list[tuple[Any, ...]]: ...
    # ("stored", medium, parent | None, block hashes, token ids, salt | None), ("removed", medium,
    # block hash), ("cleared",)
    def reset_cache(self) -> bool: ...  # False: a request uses a block
    def load(self) -> dict[str, Any]: ...  # waiting, running, kv_usage (0 to 1), counters

def generate(
    words: _Integers, vocabulary: int, prompt: _Integers, n: int
) -> list[int]: ...  # an engine's answer, `n` tokens

# -- tokens (rust/py/src/tokens.rs) ----------------------------------------------------------------

class TokenizeError(LmetricError): ...

@final
class TokenEncoder:
    """Encodes texts as token IDs.

    Parts of a text between special tokens are tokenized once and cached.

    ``tokenizer_json``: the file's bytes. ``added_tokens``: additional tokens, a JSON list of
    objects as in that file. ``around``: names of the tokens before and after a text, instead of the
    tokenizer's own. ``cache_bytes``: hard bound of the cache. Threads may share an encoder. Raises
    BadValueError.
    """

    def __new__(
        cls,
        tokenizer_json: bytes,
        *,
        added_tokens: bytes | None = None,
        around: tuple[Sequence[str], Sequence[str]] | None = None,
        cache_bytes: int = ...,
    ) -> Self: ...
    @property
    def whole_because(self) -> str | None:
        """Why texts are tokenized whole; None: they are cut at special tokens."""

    @property
    def fast(self) -> bool:
        """Whether the faster library is in use.

        It is compiled in (``FAST_TOKENIZER``) and returned the same IDs as the engines' library in
        all trials.
        """

    def encode(
        self, text: str, *, add_special_tokens: bool = False, at_most: int | None = None, scope: int = 0
    ) -> NDArray[np.uint32] | None:
        """Returns the token IDs of a text.

        ``at_most``: returns None if more than this many bytes of the text (UTF-8) are not in the
        cache, and keeps the interpreter lock. Without ``at_most``, the lock is released: call it in
        a thread. ``scope``: texts of different scopes share no entry of the cache. Raises
        TokenizeError.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token IDs, with U+FFFD for incomplete characters.

        Raises TokenizeError.
        """

    def id_of(self, token: str) -> int | None:
        """Returns the ID of a token by its name, or None."""

    def stats(self) -> dict[str, int]:
        """Returns the cache's counts: segments, bytes, evicted, found_bytes, new_bytes."""

# -- simulator (rust/py/src/lab/simulate.rs) -------------------------------------------------------

@final
class Workload:
    """A trace prepared for engines with blocks of ``block_tokens`` tokens.

    Block hashes of prompts are chained once and shared by all runs over the trace. Raises
    BadValueError, which names column and request.
    """

    def __new__(
        cls,
        arrival_seconds: NDArray[np.float64],
        input_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
        hash_offsets: NDArray[np.int64],
        hash_ids: NDArray[np.uint64],
        *,
        trace_block_tokens: int,
        block_tokens: int,
        think_tokens: NDArray[np.int64] | None = None,  # reasoning tokens among output_tokens
        previous: NDArray[np.int64] | None = None,
        think_seconds: NDArray[np.float64] | None = None,
        sessions: NDArray[np.int64] | None = None,
        joins: NDArray[np.int64] | None = None,  # pairs of a request and a request it waits for, too
        finish: NDArray[np.int64] | None = None,  # why each answer ends
    ) -> Workload: ...
    def ideal(
        self,
        profiles: Sequence[Mapping[str, Any]],
        *,
        admission: str = "reserve",
        cached_answers: bool = False,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]: ...  # computed tokens, and earliest ends
    def faster(self, speed: float) -> Workload: ...
    @property
    def block_tokens(self) -> int: ...
    def __len__(self) -> int: ...

# Returns the JSON value, all hash IDs, and the end of each list. In the value, the number of a list
# takes the place of the list. None: a JSON parser must read them.
def read_hash_ids(json: bytes) -> tuple[bytes, NDArray[np.uint64], list[int]] | None: ...
def check_local_order(text: str) -> str: ...  # its name; raises BadValueError
def local_orders() -> list[str]: ...
def simulate(
    workload: Workload,
    *,
    policy: PolicyLike | None = None,
    knobs: Mapping[str, float] | None = None,
    profiles: Sequence[Mapping[str, Any]],  # one for each instance
    seed: int = 0,
    signals: str,
    admission: str,
    index: str,
    index_bytes: int,
    guard: bool | Guard | None = None,
    event_delay_seconds: float,
    report_period_seconds: float,
    token_stride: int,
    step_times: Sequence[Mapping[str, float]] | None = None,  # step-time model of each instance
    output_known: bool,
    timeline_seconds: float,
    roles: Sequence[str] | None = None,  # of each instance; None: all "both"
    decode_policy: PolicyLike | None = None,
    decode_knobs: Mapping[str, float] | None = None,
    binding: str = "early",
    unlimited_prefill: bool = False,
    transfer_seconds_per_token: float = 0.0,
    transfer_fixed_seconds: float = 0.0,
    transfer_overlap: str = "end",
    transfer_chunk_tokens: int = 256,
    transfer_unshared: bool = False,
    fetch: Mapping[str, float] | None = None,
    fetch_holder_seconds: float = 0.0,
    fetch_waits: bool = True,
    fetch_pinned: bool = True,
    local_order: str,
    order_slo_seconds: float,
    order_think_slo_seconds: float | None,
    swap: tuple[float, int] | None = None,  # seconds per token each way, tokens that the host holds
    priority: str = "none",
    priority_settings: Mapping[str, float] | None = None,
    split: str = "none",
    split_settings: Mapping[str, float] | None = None,
    rebalance: str = "none",
    rebalance_settings: Mapping[str, float | str] | None = None,
    migration_by: str,
    migration_max_concurrent: int,
    migration_max_gap_seconds: float,
    silent_segments: bool,
    token_slo_seconds: float,
    think_slo_seconds: float | None,
    routers: int,
    sharing_seconds: float | None,
    cached_answers: bool,
    session_final: bool,
    reported_cache_ratio: float,
    host_tier: tuple[float, float, float] | None = None,  # capacity, seconds per token, step ratio
    tiers: str,
    tier_load_ratio: float,
    programs: str = "none",
    program_settings: Mapping[str, float] | None = None,
    load_admission: Mapping[str, Any] | None,
    fleet_changes: str = "none",
    fleet_change_settings: Mapping[str, float] | None = None,
    changes: Sequence[tuple[float, int, bool]] | None = None,  # seconds, instance, whether it joins
) -> dict[str, Any]: ...  # see `lmetric_lab.sim.run.simulate`; releases the interpreter lock
