"""Traces prepared for simulated engines: the hashes of their prompt blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmetric import _core
from lmetric_lab.defaults import DEFAULT_PROFILE
from lmetric_lab.sim.fleet import ProfileLike, resolve_profile
from lmetric_lab.sim.traces import Trace


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
