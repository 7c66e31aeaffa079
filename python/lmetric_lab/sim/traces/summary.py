"""Figures of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.sim.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Lengths:
    """One column's figures, in tokens."""

    total: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, column: NDArray[np.int64]) -> Lengths:
        """The figures of a non-empty column, with linear interpolation of percentiles."""
        p50, p90, p99 = np.percentile(column, [50, 90, 99]).tolist()
        return cls(int(column.sum()), float(column.mean()), p50, p90, p99, int(column.max()))


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in figures."""

    name: str
    requests: int
    duration_seconds: float  # from the first arrival to the last
    requests_per_second: float | None  # None: all arrive at once
    simultaneous_requests: int  # with the same arrival as another: rounded times cause bursts
    input_tokens: Lengths
    output_tokens: Lengths
    block_tokens: int
    blocks: int  # named by the requests
    distinct_blocks: int
    ideal_hit_ratio: float  # of prompt tokens, in an unlimited cache with all earlier prompts
    sessions: int  # conversations that the trace names
    waiting_requests: int  # that wait for another's answer
    bad_lines: int


def summarize_trace(trace: Trace) -> TraceSummary:
    """The figures of `trace`. Raises `ValueError` if it is empty."""
    if not len(trace):
        raise ValueError(f"trace {trace.name} is empty")
    duration = trace.duration_seconds
    _, together = np.unique(trace.arrival_seconds, return_counts=True)
    sessions = 0 if trace.sessions is None else len(np.unique(trace.sessions[trace.sessions >= 0]))
    return TraceSummary(
        name=trace.name,
        requests=len(trace),
        duration_seconds=duration,
        requests_per_second=len(trace) / duration if duration > 0 else None,
        simultaneous_requests=int(together[together > 1].sum()),
        input_tokens=Lengths.of(trace.input_tokens),
        output_tokens=Lengths.of(trace.output_tokens),
        block_tokens=trace.block_tokens,
        blocks=len(trace.hash_ids),
        distinct_blocks=len(np.unique(trace.hash_ids)),
        ideal_hit_ratio=float(ideal_hit_tokens(trace).sum() / trace.input_tokens.sum()),
        sessions=sessions,
        waiting_requests=0 if trace.previous is None else int((trace.previous >= 0).sum()),
        bad_lines=len(trace.bad_lines),
    )


def ideal_hit_tokens(trace: Trace) -> NDArray[np.int64]:
    """For each request (shape (n,)) the leading prompt tokens whose blocks an earlier request
    named.

    At most the prompt without its last token, which an engine always computes.
    """
    _, first, which = np.unique(trace.hash_ids, return_index=True, return_inverse=True)
    counts = np.diff(trace.hash_offsets)
    starts = np.repeat(trace.hash_offsets[:-1], counts)
    position = np.arange(len(trace.hash_ids)) - starts
    new = first[which] >= starts  # no earlier request had the block
    leading = counts.copy()
    np.minimum.at(leading, np.repeat(np.arange(len(trace)), counts)[new], position[new])
    held: NDArray[np.int64] = leading * trace.block_tokens
    return np.minimum(held, trace.input_tokens - 1)
