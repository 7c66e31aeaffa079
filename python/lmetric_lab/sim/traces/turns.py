"""Finds conversations in a trace that names none, by the prefixes of its prompts, and user turns,
by the reasons why answers end."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from lmetric_lab.sim.traces.trace import FINISH, Trace

_STOP = FINISH.index("stop")
SHARED_AFTER = 8
"""A prefix with as many different continuations is a system prompt, and links no requests."""


def chained_by_prefix(trace: Trace) -> Trace:
    """The same requests, each of which waits for its previous turn (`previous_by_prefix`)."""
    previous = previous_by_prefix(trace)
    sessions = np.empty(len(trace), np.int64)
    begun = 0
    for index, before in enumerate(previous.tolist()):
        sessions[index] = begun if before < 0 else sessions[before]
        begun += before < 0
    return replace(trace, previous=previous, sessions=sessions, think_seconds=np.zeros(len(trace)))


def previous_by_prefix(trace: Trace) -> NDArray[np.int64]:
    """The previous turn of each request, shape (n,); -1: a first turn.

    It is the latest request whose whole blocks are the longest of the prompt's prefixes. Prefixes
    with `SHARED_AFTER` or more continuations so far are left out. Only earlier requests count, as
    in a router. A prompt's last block may be partial, and links nothing.
    """
    prefixes = _Prefixes()
    turns = (
        prefixes.add(trace.blocks(index), int(tokens) // trace.block_tokens)
        for index, tokens in enumerate(trace.input_tokens)
    )
    return np.fromiter(turns, np.int64, len(trace))


class _Prefixes:
    """The prefixes of all prompts so far, as a tree of chains.

    A prompt shares the chains of earlier prompts, and its other blocks are a chain of its own.
    Arrays are compared instead of blocks, because a prompt has hundreds of blocks and few chains. A
    prefix is its chain and the place of its last block in the prompt.
    """

    def __init__(self) -> None:
        self._prompts: list[NDArray[np.uint64]] = []  # of each chain, from the prompt's first block
        # Of each chain, the latest prompt through it and its parts, mostly of the turn before.
        self._through: list[tuple[NDArray[np.uint64], list[tuple[int, int]]]] = []
        self._branches: dict[tuple[int, int, int], int] = {}  # (prefix, next block): another chain
        self._branched: Counter[tuple[int, int]] = Counter()  # chains that begin behind a prefix
        # Of each chain, the places at which prompts end, ascending, and the latest such request.
        self._ends: list[list[int]] = []
        self._latest: dict[tuple[int, int], int] = {}
        self._requests = 0

    def add(self, blocks: NDArray[np.uint64], whole: int) -> int:
        """Adds the prompt of the next request, of which ``whole`` blocks count.

        Returns its previous turn; -1: none.
        """
        parts = self._place(blocks)
        last = min(whole, len(blocks)) - 1
        found = next((self._latest[prefix] for prefix in self._shared(parts, last)), -1)
        if last >= 0:
            chain = parts[bisect_left(parts, last, key=itemgetter(1))][0]
            if (chain, last) not in self._latest:
                insort(self._ends[chain], last)
            self._latest[chain, last] = self._requests
        self._requests += 1
        return found

    def _place(self, blocks: NDArray[np.uint64]) -> list[tuple[int, int]]:
        """The chains of a prompt, each with the place of its last block there. Adds a missing
        chain."""
        parts: list[tuple[int, int]] = []
        chain, end = -1, -1
        while end + 1 < len(blocks):
            branch = chain, end, int(blocks[end + 1])
            if branch in self._branches:
                other, others = self._through[self._branches[branch]]
            elif parts and np.array_equal(self._prompts[chain][end + 1 : end + 2], blocks[end + 1 : end + 2]):
                parts.pop()  # the other prompt left this chain, and this one does not
                other = self._prompts[chain]
                others = [*parts, (chain, len(other) - 1)]
            else:
                self._branches[branch] = len(self._prompts)
                self._branched[chain, end] += 1
                parts.append((len(self._prompts), len(blocks) - 1))
                self._prompts.append(blocks)
                self._through.append((blocks, parts))
                self._ends.append([])
                break
            length = min(len(blocks), len(other))
            differs = blocks[end + 2 : length] != other[end + 2 : length]
            end = end + 1 + int(differs.argmax()) if differs.any() else length - 1
            at = bisect_left(others, end, lo=len(parts), key=itemgetter(1))  # equal up to parts
            chain = others[at][0]
            parts += [*others[len(parts) : at], (chain, end)]
        for chain, _ in parts:
            self._through[chain] = blocks, parts
        return parts

    def _shared(self, parts: list[tuple[int, int]], last: int) -> Iterator[tuple[int, int]]:
        """The prefixes up to this place at which an earlier prompt ends, the longest first, without
        system prompts."""
        for chain, end in reversed(parts):
            places = self._ends[chain]
            for place in reversed(places[: bisect_right(places, min(end, last))]):
                continuations = self._branched[chain, place] + (place + 1 < len(self._prompts[chain]))
                if continuations < SHARED_AFTER:
                    yield chain, place


def user_turns(trace: Trace) -> NDArray[np.int64] | None:
    """The user turn of each request, shape (n,), numbered from 0.

    A user turn lasts from a user's message to the agent's final answer. A request begins one if it
    waits for no answer, or for a single answer that ended with ``stop``. Every other request
    continues the user turn of the request that it waits for. A request that waits for several
    answers waits for subagents.

    -1: the user turn has no final answer (its last request did not end with ``stop``), or the
    reason of one of its answers is unknown. None: the trace has no reasons, or no request waits.
    """
    if trace.finish is None or (trace.previous is None and trace.joins is None):
        return None
    n = len(trace)
    joins = np.empty((0, 2), np.int64) if trace.joins is None else trace.joins
    before = np.full(n, -1, np.int64) if trace.previous is None else trace.previous.copy()
    awaited = (before >= 0) + np.bincount(joins[:, 0], minlength=n)
    joined = joins[before[joins[:, 0]] < 0]
    np.maximum.at(before, joined[:, 0], joined[:, 1])
    begins = (awaited == 0) | ((awaited == 1) & (trace.finish[before] == _STOP))
    first = np.where(begins, np.arange(n), before)
    while (first[first] != first).any():
        first = first[first]
    _, turn = np.unique(first, return_inverse=True)
    last = np.full(int(turn.max(initial=-1)) + 1, -1, np.int64)
    np.maximum.at(last, turn, np.arange(n))
    known = trace.finish[last] == _STOP
    known[turn[trace.finish < 0]] = False
    return np.where(known[turn], np.cumsum(known)[turn] - 1, -1).astype(np.int64)
