"""The trace of a request. `observe/tracing` makes it, and reads and writes its header fields."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from lmetric.server.execution.plan import Attempt


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


class AttemptTrace(Protocol):
    """The trace of an attempt at an engine."""

    line: bytes  # head line for the engine: the parent of its spans

    def head(self, head: bytes, own: bytes) -> bytes:
        """Returns the head for the engine without the client's context.

        ``own``: the lines of the router at its start, with `line`.
        """

    def answered(self, attempt: Attempt) -> None:
        """Records that the engine's answer is whole."""

    def failed(self, attempt: Attempt, reason: str) -> None:
        """Records that the attempt has failed or was canceled."""


class RequestTrace(Protocol):
    """The trace of a request that the router sends to engines."""

    def sent(self, attempt: Attempt, now: float) -> AttemptTrace:
        """Returns the trace of an attempt that begins. ``now``: seconds on the monotonic clock."""
