"""The trace to which a request belongs. `observe/tracing` reads and writes its header fields."""

from __future__ import annotations

from typing import NamedTuple


class TraceContext(NamedTuple):
    """The trace to which a request belongs."""

    trace_id: int
    parent_id: int  # the client's span; 0: the router starts the trace
    sampled: bool
    state: bytes  # the client's `tracestate`

    @property
    def hex_id(self) -> str:
        """The trace id as logs and exemplars show it."""
        return f"{self.trace_id:032x}"
