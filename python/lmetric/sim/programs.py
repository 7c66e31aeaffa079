"""Summarizes agent programs: job completion times, turns, recomputed tokens, holds, stretch, and
the memory that live programs need.

A program is a tree of requests (`Trace.programs`): an agent's session with all its subagents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lmetric._core import BadValueError

if TYPE_CHECKING:
    from lmetric.sim.run import Run
    from lmetric.sim.traces import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Part of the programs to summarize, by order of arrival: a run begins with empty caches.
PROGRAM_SHARE = (0.1, 1.0)


@dataclass(frozen=True, slots=True)
class ProgramFigures:
    """The figures of a run's programs, over the measured programs only."""

    programs: int  # measured
    failed: int  # measured programs with a request that never finishes
    jct_mean_seconds: float | None  # job completion time: first arrival to last end; None: none finished
    jct_p50_seconds: float | None
    jct_p95_seconds: float | None
    # Turns of all programs that end between the first and the last measured arrival of a program.
    turns_per_minute: float | None
    recomputed_tokens: int  # prefill tokens beyond those that any cache must compute
    recomputed_share: float  # of the input tokens
    max_hold_seconds: float  # longest time that a request was held before its placement
    # Job completion time over that of the program alone under a cache without an end: a lower bound
    # (`Run.ideal_finished_seconds`).
    stretch_mean: float | None
    stretch_max: float | None


def has_programs(trace: Trace) -> bool:
    """Whether a program of the trace has several requests."""
    programs = trace.program_of
    if programs is None:
        return False
    _, counts = np.unique(programs[programs >= 0], return_counts=True)
    return bool((counts > 1).any())


def program_figures(run: Run, share: tuple[float, float] = PROGRAM_SHARE) -> ProgramFigures | None:
    """The figures of a `share` of a run's programs, in order of arrival; None if no program has
    several requests."""
    if run.programs is None or run.ideal_finished_seconds is None or run.min_computed_tokens is None:
        return None
    if not 0 <= share[0] < share[1] <= 1:
        raise BadValueError(f"share of programs {share} is not valid; expected 0 <= first < second <= 1")
    of_program = np.flatnonzero(run.programs >= 0)
    _, which = np.unique(run.programs[of_program], return_inverse=True)
    count = int(which.max()) + 1
    begin, end, ideal = np.full(count, np.inf), np.full(count, -np.inf), np.full(count, -np.inf)
    # An unfinished request has no end, and its followers have no arrival.
    np.fmin.at(begin, which, run.arrival_seconds[of_program])
    np.maximum.at(end, which, np.nan_to_num(run.finished_seconds[of_program], nan=np.inf))
    np.maximum.at(ideal, which, run.ideal_finished_seconds[of_program])
    order = np.argsort(begin, kind="stable")
    measured = np.zeros(count, np.bool_)
    measured[order[round(share[0] * count) : round(share[1] * count)]] = True
    done = measured & np.isfinite(end)
    jct = (end - begin)[done]
    stretch = jct / (ideal - begin)[done]
    requests = of_program[measured[which]]
    recomputed = run.computed_tokens[requests].sum() - run.min_computed_tokens[requests].sum()
    tokens = int(run.input_tokens[requests].sum())
    return ProgramFigures(
        programs=int(measured.sum()),
        failed=int(measured.sum() - done.sum()),
        jct_mean_seconds=float(jct.mean()) if len(jct) else None,
        jct_p50_seconds=float(np.percentile(jct, 50)) if len(jct) else None,
        jct_p95_seconds=float(np.percentile(jct, 95)) if len(jct) else None,
        turns_per_minute=_turns_per_minute(run.finished_seconds[of_program], begin[measured]),
        recomputed_tokens=max(0, int(recomputed)),
        recomputed_share=max(0, int(recomputed)) / tokens if tokens else 0.0,
        max_hold_seconds=float(run.hold_seconds[requests].max()) if len(requests) else 0.0,
        stretch_mean=float(stretch.mean()) if len(jct) else None,
        stretch_max=float(stretch.max()) if len(jct) else None,
    )


def _turns_per_minute(ends: Floats, arrivals: Floats) -> float | None:
    """Ends per minute between the first and the last of `arrivals`; None: no time between them."""
    if len(arrivals) < 2 or arrivals.max() <= arrivals.min():
        return None
    inside = (ends >= arrivals.min()) & (ends < arrivals.max())
    return float(inside.sum() / (arrivals.max() - arrivals.min()) * 60)


def working_set_tokens(trace: Trace, run: Run, share: tuple[float, float] = PROGRAM_SHARE) -> float:
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
