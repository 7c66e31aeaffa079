"""Summarizes agent programs: busy times, job completion times, turns, recomputed tokens, holds,
stretch, and the memory that live programs need.

A program is a tree of requests (`Trace.programs`): an agent's session with all its subagents. Its
busy time is the time in which at least one of its requests is in flight: from the client's send to
the last token, holds included. So it has no think times of users and tools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lmetric._core import BadValueError

if TYPE_CHECKING:
    from lmetric_lab.sim.columns import Columns
    from lmetric_lab.sim.traces import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Part of the programs to summarize, by order of arrival: a run begins with empty caches.
PROGRAM_SHARE = (0.1, 1.0)


@dataclass(frozen=True, slots=True)
class ProgramFigures:
    """The figures of a run's programs, over the measured programs only.

    Times are of programs whose requests all finish; None: no such program.
    """

    programs: int  # measured
    failed: int  # measured programs with a request that never finishes
    # Time in which a request of the program is in flight, holds included. Think times do not count,
    # and parallel subagents count once.
    busy_mean_seconds: float | None
    busy_p50_seconds: float | None
    busy_p95_seconds: float | None
    # Busy time of a user turn (`Columns.user_turns`) of the measured programs; None: no user turn
    # is known and finishes.
    user_turn_busy_mean_seconds: float | None
    user_turn_busy_p95_seconds: float | None
    # Busy time over that of the program alone on the fastest engine under a cache without an end
    # (`Columns.ideal_finished_seconds`).
    stretch_mean: float | None
    stretch_max: float | None
    jct_mean_seconds: float | None  # job completion time, with think times: first arrival to last end
    jct_p50_seconds: float | None
    jct_p95_seconds: float | None
    # Turns of all programs that end between the first and the last measured arrival of a program.
    turns_per_minute: float | None
    recomputed_tokens: int  # prefill tokens beyond those that any cache must compute
    recomputed_share: float  # of the input tokens
    max_hold_seconds: float  # longest time that a request was held before its placement


def has_programs(trace: Trace) -> bool:
    """Whether a program of the trace has several requests."""
    programs = trace.program_of
    if programs is None:
        return False
    _, counts = np.unique(programs[programs >= 0], return_counts=True)
    return bool((counts > 1).any())


def program_figures(run: Columns, share: tuple[float, float] = PROGRAM_SHARE) -> ProgramFigures | None:
    """The figures of a `share` of a run's programs, in order of arrival; None if no program has
    several requests.

    Raises:
        BadValueError: a `share` that is not two fractions, the first below the second.
    """
    if (
        run.programs is None
        or run.min_computed_tokens is None
        or run.ideal_arrival_seconds is None
        or run.ideal_finished_seconds is None
    ):
        return None
    if not 0 <= share[0] < share[1] <= 1:
        raise BadValueError(f"share of programs {share} is not valid; expected 0 <= first < second <= 1")
    of_program = np.flatnonzero(run.programs >= 0)
    _, which = np.unique(run.programs[of_program], return_inverse=True)
    count = int(which.max()) + 1
    arrivals, ends = run.arrival_seconds[of_program], run.finished_seconds[of_program]
    begin, end = np.full(count, np.inf), np.full(count, -np.inf)
    # An unfinished request has no end, and its followers have no arrival.
    np.fmin.at(begin, which, arrivals)
    np.maximum.at(end, which, np.nan_to_num(ends, nan=np.inf))
    order = np.argsort(begin, kind="stable")
    measured = np.zeros(count, np.bool_)
    measured[order[round(share[0] * count) : round(share[1] * count)]] = True
    done = measured & np.isfinite(end)
    jct = (end - begin)[done]
    busy = busy_seconds(which, arrivals, ends)[done]
    alone = run.ideal_arrival_seconds[of_program], run.ideal_finished_seconds[of_program]
    stretch = busy / busy_seconds(which, *alone)[done]
    requests = of_program[measured[which]]
    user_turns = _user_turn_busy_seconds(run, requests)
    recomputed = run.computed_tokens[requests].sum() - run.min_computed_tokens[requests].sum()
    tokens = int(run.input_tokens[requests].sum())
    return ProgramFigures(
        programs=int(measured.sum()),
        failed=int(measured.sum() - done.sum()),
        busy_mean_seconds=_mean(busy),
        busy_p50_seconds=_percentile(busy, 50),
        busy_p95_seconds=_percentile(busy, 95),
        user_turn_busy_mean_seconds=_mean(user_turns),
        user_turn_busy_p95_seconds=_percentile(user_turns, 95),
        stretch_mean=_mean(stretch),
        stretch_max=_percentile(stretch, 100),
        jct_mean_seconds=_mean(jct),
        jct_p50_seconds=_percentile(jct, 50),
        jct_p95_seconds=_percentile(jct, 95),
        turns_per_minute=_turns_per_minute(ends, begin[measured]),
        recomputed_tokens=max(0, int(recomputed)),
        recomputed_share=max(0, int(recomputed)) / tokens if tokens else 0.0,
        max_hold_seconds=float(run.hold_seconds[requests].max()) if len(requests) else 0.0,
    )


def busy_seconds(group: Ints, begin: Floats, end: Floats) -> Floats:
    """Seconds in which at least one request of each group is in flight, shape (groups,).

    Args:
        group: the group of each request, shape (n,): from 0 to groups - 1, and none without a
            request.
        begin: when each request was sent, shape (n,).
        end: when each request ended, shape (n,). NaN: it never ends, and its group's time is NaN.
    """
    order = np.lexsort((begin, group))
    group, begin, end = group[order], begin[order], end[order]
    by_end = np.argsort(end, kind="stable")
    rank = np.empty(len(end), np.int64)
    rank[by_end] = np.arange(len(end))
    # A running maximum per group: each group's keys are above those of the groups before it. Ranks
    # in place of times keep it exact.
    base = group * len(end)
    latest = end[by_end[np.maximum.accumulate(base + rank) - base]]
    covered = np.concatenate(([-np.inf], latest))[:-1]
    covered[np.diff(group, prepend=-1) > 0] = -np.inf
    own = np.maximum(end - np.maximum(begin, covered), 0.0)
    return np.bincount(group, own).astype(np.float64)


def ideal_arrival_seconds(trace: Trace, ideal_finished_seconds: Floats) -> Floats:
    """When each request arrives if all requests end at `ideal_finished_seconds`, shape (n,)."""
    after = np.full(len(trace), -np.inf)
    if trace.previous is not None:
        waits = trace.previous >= 0
        after[waits] = ideal_finished_seconds[trace.previous[waits]]
    if trace.joins is not None:
        np.maximum.at(after, trace.joins[:, 0], ideal_finished_seconds[trace.joins[:, 1]])
    think = 0.0 if trace.think_seconds is None else trace.think_seconds
    return np.maximum(trace.arrival_seconds, after + think)


def _user_turn_busy_seconds(run: Columns, requests: Ints) -> Floats:
    """The busy time of each known user turn of these requests, if it finishes, shape (turns,)."""
    if run.user_turns is None:
        return np.empty(0)
    requests = requests[run.user_turns[requests] >= 0]
    _, turn = np.unique(run.user_turns[requests], return_inverse=True)
    busy = busy_seconds(turn, run.arrival_seconds[requests], run.finished_seconds[requests])
    return busy[~np.isnan(busy)]


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _percentile(values: Floats, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _turns_per_minute(ends: Floats, arrivals: Floats) -> float | None:
    """Ends per minute between the first and the last of `arrivals`; None: no time between them."""
    if len(arrivals) < 2 or arrivals.max() <= arrivals.min():
        return None
    inside = (ends >= arrivals.min()) & (ends < arrivals.max())
    return float(inside.sum() / (arrivals.max() - arrivals.min()) * 60)


def working_set_tokens(trace: Trace, run: Columns, share: tuple[float, float] = PROGRAM_SHARE) -> float:
    """The tokens of all live programs, mean over the time in which a share of the programs arrives.

    A program needs a block from the first start to the last end of its prompts with this block. So
    a subagent's own blocks count until the subagent ends. Partial blocks do not count. A prefix
    that several programs share counts for each of them. A run under a cache without an end gives
    the memory that the programs need. Divided by the capacity of all caches, it is the pressure.

    Raises:
        BadValueError: the trace has no programs, or all arrive at once.
    """
    programs = trace.program_of
    if programs is None or not (programs >= 0).any():
        raise BadValueError("working_set_tokens: the trace has no programs")
    of_program = np.flatnonzero(programs >= 0)
    _, which = np.unique(programs[of_program], return_inverse=True)
    count = int(which.max()) + 1
    begin = np.full(count, np.inf)
    np.fmin.at(begin, which, run.arrival_seconds[of_program])
    arrivals = np.sort(begin)
    first, last = arrivals[round(share[0] * count)], arrivals[min(round(share[1] * count), count) - 1]
    if not last > first:
        raise BadValueError("working_set_tokens: all programs arrive at once")
    starts = trace.hash_offsets[of_program]
    whole = trace.input_tokens[of_program] // trace.block_tokens
    whole = np.minimum(whole, trace.hash_offsets[of_program + 1] - starts)
    entry = np.repeat(np.arange(len(of_program)), whole)
    position = np.arange(len(entry)) - np.repeat(np.cumsum(whole) - whole, whole)
    _, block = np.unique(trace.hash_ids[starts[entry] + position], return_inverse=True)
    _, held = np.unique(which[entry] * (int(block.max()) + 1) + block, return_inverse=True)
    since, until = np.full(int(held.max()) + 1, np.inf), np.full(int(held.max()) + 1, -np.inf)
    np.fmin.at(since, held, run.scheduled_seconds[of_program][entry])
    np.fmax.at(until, held, run.finished_seconds[of_program][entry])
    seconds = np.minimum(until, last) - np.maximum(since, first)
    return float(np.maximum(seconds, 0.0).sum()) * trace.block_tokens / float(last - first)
