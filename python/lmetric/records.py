"""Types of the dictionaries that `lmetric.Router` returns: `explain`, `stats` and `learned`.

Times are in seconds, lengths in tokens. None: unknown, or not applicable.
"""

from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from lmetric.roles import PlacedRole


class Candidate(TypedDict):
    """An instance in a decision, with the terms of its score."""

    instance: str
    score: float | None
    terms: dict[str, float | None]  # indicators that the policy reads, by name; texts are left out


class Holder(TypedDict):
    """The instance whose cached tokens of a prompt save most, at the decision."""

    instance: str
    cached_tokens: int  # those of lower tiers included
    saved_tokens: float  # of them, less what loading from lower tiers costs: what policies compare
    bs: float  # its requests


class ShadowChoice(TypedDict):
    """The choice of a shadow policy, which placed nothing."""

    policy: str
    instance: str | None  # None: the policy failed, or scored no instance
    predicted_cached_tokens: int | None
    predicted_ttft_seconds: float | None
    chosen_predicted_ttft_seconds: float | None  # on the instance that got the request


class DecisionRecord(TypedDict):
    """A decision and its result: `Router.explain`."""

    id: int
    at_seconds: float  # on the router's clock
    policy: str
    arm: Literal["stable", "canary"]  # canary: its policy decided
    request_id: str | None
    prompt_tokens: int
    instance: str  # the last one tried
    tried: list[str]
    prefer: Literal["min", "max"]  # whether the lowest or the highest score is best
    scored: int  # instances with a score
    tied: int  # instances with the best score, before the tie-breaks
    drawn_from: int  # instances still equal after the tie-breaks; above 1, chance decided
    best: list[Candidate]  # at most 8, best first
    holder: Holder | None  # None: no instance had any, or the policy does not read cached tokens
    margin_to_runner_up: float | None
    load_report_age_seconds: float | None  # of the instance
    left_out: int  # instances without a finite score, unless the filter excluded them
    filtered: int  # instances that the policy's filter excluded
    filter_waived: bool
    unscored: bool  # no instance had a score, so the fewest requests decided
    guard_excluded: int  # instances that the hot-spot guard excluded
    guard_balance_only: bool
    decode_instance: str | None  # of the second segment
    answer_instance: str | None  # of the third segment
    decode_score: float | None
    expected_handoff_seconds: float | None
    cuts: list[int]  # tokens at which segments end
    split_reason: str | None  # reason why the request was not split
    priority: int | None  # priority from the router, lower first
    boost_seconds: float | None
    fetch_reason: str | None  # reason why no prefix was fetched
    fetch_instance: str | None
    fetch_from_token: int | None
    fetch_to_token: int | None
    expected_fetch_seconds: float | None
    fetched_tokens: int | None
    fetch_seconds: float | None
    balance_first_seconds: float | None
    balance_second_seconds: float | None
    balance_third_seconds: float | None
    balance_cut_seconds: float | None
    balance_whole_seconds: float | None
    stay_seconds: float | None
    decode_placement_seconds: float | None
    migrations: list[tuple[int, str]]  # token and target instance of each migration
    program: int | None  # number of the agent program; None: the request belongs to none
    program_tokens: float | None  # its context at the decision
    held_seconds: float | None  # wait for a place in a cache; with levels, also in the queue
    level: int | None  # priority level in the queue; None: there are no levels
    aged_levels: int | None  # by how many levels aging had raised its level when it was its turn
    predicted_cached_tokens: int
    predicted_tier_tokens: int  # part of predicted_cached_tokens in a tier below the GPU
    shadow: ShadowChoice | None  # None: no shadow scored the request
    cached_tokens: int | None
    output_tokens: int | None
    handoff_seconds: float | None
    ttft_seconds: float | None
    e2e_seconds: float | None
    outcome: str  # running, finished, dropped, or the kind of failure


class InstanceStats(TypedDict):
    """An instance in `RouterStats`: its state, and its indicators by name.

    docs/reference/policies.md lists the indicators.
    """

    healthy: bool
    draining: bool
    role: PlacedRole
    in_flight: int
    decisions: int
    bs: float
    q_bs: float
    r_bs: float
    decode_bs: float
    bound_bs: float
    queued_prefill_tokens: float
    tokens: float
    decode_tokens: float
    bound_tokens: float
    remaining_tokens: float
    index_blocks: float
    fetches: float
    cache_free_tokens: float | None
    prefill_tokens_per_second: float | None
    prefill_relative_error: float | None
    step_seconds: float | None
    step_relative_error: float | None
    window_prefill_tokens: float
    window_output_tokens: float
    kv_usage: float | None
    reported_waiting: float | None
    reported_running: float | None
    report_age_seconds: float | None
    decode_tokens_per_second: float | None
    predicted_ttft_source: str


class TierStats(TypedDict):
    """A tier below the GPU of an instance: `Router.tiers`."""

    blocks: int
    hint: bool  # it has reported no removal: its blocks may be gone
    load_ratio: float  # seconds to load a token divided by the seconds to compute it
    loads: int  # requests that taught the ratio
    hit_tokens: int  # prompt tokens loaded


class RouterStats(TypedDict):
    """Counters since the router's creation, and its current state: `Router.stats`."""

    policy: str
    decode_policy: str
    decisions: int
    last_decision: int  # number of the latest decision; no record has it before the first decision
    no_instance: int
    retries: int
    left_out: int
    unscored: int
    filter_waived: int
    split: int
    migrated: int
    fetches: int
    fetched_tokens: int
    finished: int
    dropped: int
    prompt_tokens: int
    reported_prompt_tokens: int
    predicted_cached_tokens: int
    cached_tokens: int
    output_tokens: int
    index_bytes: int
    index_evicted_blocks: int
    in_flight: int
    failed: dict[str, int]  # by kind of failure
    guard_on: bool
    guard_suspected: int
    guard_filtering: int
    instances: dict[str, InstanceStats]


class LearnedValues(TypedDict):
    """Values that the router learned: `Router.learned`."""

    gamma: float | None  # tail rate of latencies, which sets the boost, 1/s
    gamma_estimates: int | None
    fetch_seconds_per_token: float | None
    fetch_fixed_seconds: float | None
    fetches: int | None  # number of fetches behind the two values
    length_survival: NDArray[np.float64] | None
    length_survival_product_limit: NDArray[np.float64] | None
    prefill_tokens_per_second: dict[str, float | None]  # by instance
