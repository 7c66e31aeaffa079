"""Finds conversations in a trace that names none, by the prefixes of its prompts, and user turns,
by the reasons why answers end."""

from __future__ import annotations

from dataclasses import replace

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
    previous = np.full(len(trace), -1, np.int64)
    ends: dict[int, int] = {}  # a prefix's number: the latest request whose whole blocks are it
    numbers: dict[tuple[int, int], int] = {}  # (prefix, next block): longer prefix
    continuations: dict[int, int] = {}
    for index in range(len(trace)):
        whole = int(trace.input_tokens[index]) // trace.block_tokens
        ids = trace.blocks(index).tolist()
        node = -1
        path: list[int] = []
        for position, block in enumerate(ids):
            longer = numbers.get((node, block))
            if longer is None:
                longer = numbers[node, block] = len(numbers)
                continuations[node] = continuations.get(node, 0) + 1
            node = longer
            if position < whole:
                path.append(node)
        for prefix in reversed(path):
            if prefix in ends and continuations.get(prefix, 0) < SHARED_AFTER:
                previous[index] = ends[prefix]
                break
        if path:
            ends[path[-1]] = index
    return previous


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
