"""Summarizes the agent programs of a replayed trace: job completion times and recomputed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.replay.client import Record
from lmetric_lab.sim.traces import Trace


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """The figures of agent programs, as their client measures them.

    Attributes:
        programs: programs whose requests all ended well. The times are theirs.
        failed: all other programs.
        jct_mean_seconds: job completion time on the engines' clock; None: no program. It lasts from
            the due time of a program's first request to the last token of its last answer.
        recomputed_share: prompt tokens computed beyond the fewest possible, over all prompt tokens
            of complete requests; None: the server reports no cached tokens.
        longest_hold_seconds: longest time for which the router held a request, on the engines'
            clock.
    """

    programs: int
    failed: int
    jct_mean_seconds: float | None
    jct_p95_seconds: float | None
    recomputed_share: float | None
    longest_hold_seconds: float


def summarize_programs(
    trace: Trace,
    records: Sequence[Record],
    min_computed_tokens: NDArray[np.int64],
    *,
    clock_speed: float = 1.0,
    longest_hold_seconds: float = 0.0,
) -> ProgramReport:
    """The figures of the programs of `trace` in the requests that were sent.

    Args:
        min_computed_tokens: prompt tokens of each request that any cache must compute, shape
            (len(trace),), as in `lmetric_lab.sim.run.Run`.
        clock_speed: speed of the engines' clock relative to real time.
        longest_hold_seconds: longest hold in real time.

    Raises:
        ValueError: the trace has no programs.
    """
    of = trace.program_of
    if of is None:
        raise ValueError(f"trace {trace.name} has no programs")
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    left = dict(zip(*(part.tolist() for part in np.unique(of[of >= 0], return_counts=True)), strict=True))
    computed = fewest = tokens = 0
    for record in records:
        program = int(of[record.index])
        if program < 0 or not record.completed or record.last_token is None:
            continue
        left[program] -= 1
        begin[program] = min(begin.get(program, np.inf), record.due)
        end[program] = max(end.get(program, -np.inf), record.last_token)
        if record.prompt_tokens is not None and record.cached_tokens is not None:
            tokens += record.prompt_tokens
            computed += record.prompt_tokens - record.cached_tokens
            fewest += int(min_computed_tokens[record.index])
    done = [program for program, missing in left.items() if not missing]
    jct = np.array([end[program] - begin[program] for program in done]) * clock_speed
    return ProgramReport(
        programs=len(done),
        failed=len(left) - len(done),
        jct_mean_seconds=float(jct.mean()) if len(jct) else None,
        jct_p95_seconds=float(np.percentile(jct, 95)) if len(jct) else None,
        recomputed_share=max(0, computed - fewest) / tokens if tokens else None,
        longest_hold_seconds=longest_hold_seconds * clock_speed,
    )
