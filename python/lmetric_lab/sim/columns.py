"""The columns of a simulated run, from which figures are computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.sim.churn import ChangeResult
from lmetric_lab.sim.pools import Roles


@dataclass(frozen=True, slots=True)
class Timeline:
    """Load over time. The arrays have the shape (instances, buckets), with buckets of
    `bucket_seconds`."""

    bucket_seconds: float
    running: NDArray[np.float64]  # mean batch size
    queued: NDArray[np.float64]  # mean length of the engine's queue
    prefill_tokens: NDArray[np.float64]  # prompt tokens computed


@dataclass(frozen=True, slots=True, repr=False)
class Columns:
    """Columns of a run with one entry per request in trace order, times on the trace's clock."""

    policy: str
    decode_policy: str | None  # None: requests decode on their prefill instance
    roles: Roles | None
    local_order: str  # of the engines
    split: str  # method of splits without roles
    rebalance: str  # method of migrations
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
    fetch_instance: NDArray[np.int64]  # source of a prefix fetch; -1: none
    fetched_tokens: NDArray[np.int64]  # fetched tokens when first admitted
    fetch_seconds: NDArray[np.float64]  # time of the fetch with all waits; NaN: no fetch
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
        without a transfer, or if another instance has made a part of the answer.

        All tokens count, because the decode instance also produces the first one.
        """
        each = np.asarray((self.finished_seconds - self.decode_start_seconds) / self.output_tokens)
        cut = np.maximum(self.cut_tokens, self.answer_cut_tokens)
        return np.where((self.moves > 0) | (cut > self.input_tokens), np.nan, each)

    def gap_seconds(self, quantile: float) -> float | None:
        """A quantile of the time between tokens (TBT), to 1%; None if no request has two tokens."""
        total = int(self.gap_counts.sum())
        if total == 0:
            return None
        place = int(np.searchsorted(np.cumsum(self.gap_counts), quantile * total))
        return float(self.gap_edges_seconds[min(place, len(self.gap_edges_seconds) - 1)])

    @property
    def e2e_seconds(self) -> NDArray[np.float64]:
        """Time from arrival to the last output token."""
        return self.finished_seconds - self.arrival_seconds
