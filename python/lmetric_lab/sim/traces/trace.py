"""The columns of a trace, and its slices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Reasons why an answer ends: the model has finished, it calls tools, or it has reached its limit.
FINISH = ("stop", "tool_calls", "length")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A skipped line of a trace, with the reason."""

    path: str
    line: int  # counted from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, one column per quantity.

    Request ``i`` arrives at ``arrival_seconds[i]`` (from the trace's start) with
    ``input_tokens[i]`` prompt tokens, asks for ``output_tokens[i]``, and its prompt blocks are
    ``blocks(i)``. A prompt with fewer IDs than blocks shares nothing beyond them.

    A request with ``previous[i] >= 0`` waits for an answer: it arrives at ``max(arrival_seconds[i],
    end of request previous[i] + think_seconds[i])``. `joins` names further requests to wait for:
    then the end is the last one. Raises `ValueError` for inconsistent columns.
    """

    name: str
    arrival_seconds: NDArray[np.float64]  # shape (n,), not decreasing
    input_tokens: NDArray[np.int64]  # shape (n,), at least 1
    output_tokens: NDArray[np.int64]  # shape (n,), at least 0
    hash_offsets: NDArray[np.int64]  # (n + 1,): request i has hash_ids[o[i]:o[i + 1]]
    hash_ids: NDArray[np.uint64]
    block_tokens: int
    bad_lines: tuple[BadLine, ...] = ()  # lines skipped on request
    sessions: NDArray[np.int64] | None = None  # shape (n,): conversation of each request, -1: none
    previous: NDArray[np.int64] | None = (
        None  # shape (n,): index, below the request's own; -1: waits for none
    )
    think_seconds: NDArray[np.float64] | None = None  # shape (n,), at least 0; None: 0 for all
    # Shape (n,): number of first output tokens that are reasoning tokens; None: 0 for all.
    think_tokens: NDArray[np.int64] | None = None
    # Shape (m, 2), rows (request, earlier request): the request also waits for the end of the
    # earlier one, as an agent waits for all its subagents.
    joins: NDArray[np.int64] | None = None
    # Shape (n,): the program of each request, -1: none. A program is a tree of requests: an agent's
    # session with all its subagents. None: each session is a program.
    programs: NDArray[np.int64] | None = None
    finish: NDArray[np.int64] | None = None  # shape (n,): index in `FINISH`, -1: unknown

    def __post_init__(self) -> None:
        n = len(self.arrival_seconds)
        columns = {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "sessions": self.sessions,
            "previous": self.previous,
            "think_seconds": self.think_seconds,
            "think_tokens": self.think_tokens,
            "programs": self.programs,
            "finish": self.finish,
        }
        for name, column in columns.items():
            if column is not None and column.shape != (n,):
                raise ValueError(f"{name} must have the shape ({n},) of arrival_seconds, got {column.shape}")
        if self.hash_offsets.shape != (n + 1,):
            raise ValueError(f"hash_offsets must have the shape ({n + 1},), got {self.hash_offsets.shape}")
        joins = np.empty((0, 2), np.int64) if self.joins is None else self.joins
        if joins.ndim != 2 or joins.shape[1] != 2:
            raise ValueError(f"joins must have the shape (m, 2), got {joins.shape}")
        arrivals, think, previous = self.arrival_seconds, self.think_seconds, self.previous
        demands = {
            "block_tokens must be at least 1": self.block_tokens >= 1,
            "arrival_seconds must be finite and not decrease": np.isfinite(arrivals).all()
            and (np.diff(arrivals) >= 0).all(),
            "input_tokens must be at least 1": (self.input_tokens >= 1).all(),
            "output_tokens must be at least 0": (self.output_tokens >= 0).all(),
            "hash_offsets must rise from 0 to the number of hash_ids": self.hash_offsets[0] == 0
            and (np.diff(self.hash_offsets) >= 0).all()
            and self.hash_offsets[-1] == len(self.hash_ids),
            "previous must be -1 or the index of an earlier request": previous is None
            or ((previous >= -1) & (previous < np.arange(n))).all(),
            "joins must be pairs of a request and an earlier request": (
                (joins[:, 1] >= 0) & (joins[:, 1] < joins[:, 0]) & (joins[:, 0] < n)
            ).all(),
            "finish must be -1 or an index in FINISH": self.finish is None
            or ((self.finish >= -1) & (self.finish < len(FINISH))).all(),
            "think_seconds must be finite and at least 0": think is None
            or (np.isfinite(think) & (think >= 0)).all(),
            "think_tokens must be at least 0 and at most output_tokens": self.think_tokens is None
            or ((self.think_tokens >= 0) & (self.think_tokens <= self.output_tokens)).all(),
        }
        for demand, met in demands.items():
            if not met:
                raise ValueError(f"trace {self.name}: {demand}")

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    @property
    def duration_seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_seconds[-1] - self.arrival_seconds[0]) if len(self) else 0.0

    @property
    def program_of(self) -> NDArray[np.int64] | None:
        """The program of each request, shape (n,), -1: none; None: the trace has no programs and no
        sessions."""
        return self.sessions if self.programs is None else self.programs

    def awaited(self) -> dict[int, list[int]]:
        """The requests that wait for others, each with the requests that it waits for."""
        found: dict[int, list[int]] = {}
        if self.previous is not None:
            waits = np.flatnonzero(self.previous >= 0)
            found = {i: [j] for i, j in zip(waits.tolist(), self.previous[waits].tolist(), strict=True)}
        for request, earlier in [] if self.joins is None else self.joins.tolist():
            found.setdefault(request, []).append(earlier)
        return found

    def blocks(self, index: int) -> NDArray[np.uint64]:
        """The block ids of request `index`'s prompt, first block first."""
        return self.hash_ids[self.hash_offsets[index] : self.hash_offsets[index + 1]]

    def where(self, keep: NDArray[np.bool_]) -> Trace:
        """The requests with a true `keep` (shape (n,)), with unchanged arrival times.

        A request that waits for a removed request waits for the nearest earlier kept request of its
        chain. A removed request's own joins are lost.
        """
        return self.take(np.flatnonzero(keep))

    def take(self, indices: NDArray[np.int64], arrival_seconds: NDArray[np.float64] | None = None) -> Trace:
        """The requests at `indices` (none twice), ordered by arrival and then as `indices` has
        them.

        ``arrival_seconds``: new arrivals of all requests, shape (n,); None: unchanged.
        """
        arrivals = self.arrival_seconds if arrival_seconds is None else arrival_seconds
        indices = indices[np.argsort(arrivals[indices], kind="stable")]
        offsets, ids = gather(self.hash_offsets, self.hash_ids, indices)
        return replace(
            self,
            arrival_seconds=arrivals[indices],
            input_tokens=self.input_tokens[indices],
            output_tokens=self.output_tokens[indices],
            hash_offsets=offsets,
            hash_ids=ids,
            sessions=_at(self.sessions, indices),
            previous=None if self.previous is None else renumbered(self.previous, indices),
            think_seconds=_at(self.think_seconds, indices),
            think_tokens=_at(self.think_tokens, indices),
            joins=None if self.joins is None else _kept_joins(self.joins, self.previous, indices, len(self)),
            programs=_at(self.programs, indices),
            finish=_at(self.finish, indices),
        )

    def first(self, requests: int) -> Trace:
        """The first `requests` requests, or all if there are fewer."""
        return self.where(np.arange(len(self)) < requests)

    def share(self, start: float, end: float) -> Trace:
        """The requests from share `start` to share `end` of their number, counted from `start`'s
        arrival.

        ``share(0.1, 0.9)`` excludes the first and the last tenth.
        """
        if not 0 <= start < end <= 1:
            raise ValueError(f"shares must satisfy 0 <= start < end <= 1, got {start:g} and {end:g}")
        position = np.arange(len(self))
        kept = self.where((position >= round(start * len(self))) & (position < round(end * len(self))))
        return kept if not len(kept) else kept._at(kept.arrival_seconds - kept.arrival_seconds[0])

    def at_most(self, input_tokens: int) -> Trace:
        """Without the requests whose prompt is longer than `input_tokens`."""
        return self.where(self.input_tokens <= input_tokens)

    def between(self, start_seconds: float, end_seconds: float) -> Trace:
        """The requests that arrive in ``[start_seconds, end_seconds)``, counted from
        `start_seconds`."""
        kept = self.where((self.arrival_seconds >= start_seconds) & (self.arrival_seconds < end_seconds))
        return kept._at(kept.arrival_seconds - start_seconds)

    def faster(self, speed: float) -> Trace:
        """The same requests arriving `speed` times as fast; think times shrink alike."""
        if not speed > 0:
            raise ValueError(f"speed must be above 0, got {speed:g}")
        think = None if self.think_seconds is None else self.think_seconds / speed
        return replace(self._at(self.arrival_seconds / speed), think_seconds=think)

    def without_prefixes(self) -> Trace:
        """The same requests with no block ids: no two prompts share anything."""
        return replace(
            self, hash_ids=np.empty(0, np.uint64), hash_offsets=np.zeros(len(self) + 1, dtype=np.int64)
        )

    def open_loop(self) -> Trace:
        """The same requests waiting for no answer: each arrives at its `arrival_seconds`."""
        return replace(self, previous=None, joins=None, think_seconds=None)

    def _at(self, arrival_seconds: NDArray[np.float64]) -> Trace:
        return replace(self, arrival_seconds=arrival_seconds)


def _at(column: NDArray[Any] | None, indices: NDArray[np.int64]) -> NDArray[Any] | None:
    return None if column is None else column[indices]


def gather(
    offsets: NDArray[np.int64], ids: NDArray[np.uint64], indices: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Offsets and ids of the requests at `indices`, in that order."""
    counts = np.diff(offsets)[indices]
    new = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    begins, ends = offsets[indices].tolist(), offsets[indices + 1].tolist()
    return new, np.concatenate([ids[:0], *(ids[at:to] for at, to in zip(begins, ends, strict=True))])


def renumbered(previous: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """`previous` of the requests at `indices`, renumbered.

    A request that waits for a removed request waits for the nearest earlier kept request of its
    chain.
    """
    return _nearest_kept(previous[indices], previous, indices)


def _nearest_kept(
    wanted: NDArray[np.int64], previous: NDArray[np.int64], indices: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The new numbers of the requests `wanted`, or of the nearest earlier kept requests of their
    chains; -1: none."""
    new = np.full(len(previous) + 1, -1, dtype=np.int64)  # last entry: for -1 (no wait)
    new[indices] = np.arange(len(indices))
    wanted = wanted.copy()
    while len(lost := np.flatnonzero((wanted >= 0) & (new[wanted] < 0))):
        wanted[lost] = previous[wanted[lost]]
    return new[wanted]


def _kept_joins(
    joins: NDArray[np.int64], previous: NDArray[np.int64] | None, indices: NDArray[np.int64], n: int
) -> NDArray[np.int64]:
    """`joins` of the requests at `indices`, renumbered as in `renumbered`, without pairs that
    `previous` has, and without equal pairs."""
    chain = np.full(n, -1, dtype=np.int64) if previous is None else previous
    new = np.full(n, -1, dtype=np.int64)
    new[indices] = np.arange(len(indices))
    pairs = np.column_stack((new[joins[:, 0]], _nearest_kept(joins[:, 1], chain, indices)))
    kept = pairs[(pairs >= 0).all(axis=1)]
    kept = kept[renumbered(chain, indices)[kept[:, 0]] != kept[:, 1]]
    return np.unique(kept, axis=0).astype(np.int64).reshape(-1, 2)
