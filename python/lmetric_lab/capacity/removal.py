"""Names the engine whose cache is worth least: the first to remove."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lmetric_lab.whatif.recording import Recording


@dataclass(frozen=True, slots=True)
class Removal:
    """An engine, and the worth of its cache.

    ``only_here_tokens``: prompt tokens of the recorded requests that this engine had computed
    before, and no other. Without the engine, they would be computed again. ``reused_tokens``: all
    prompt tokens that it had computed before. ``saved_seconds``: prefill time that
    ``only_here_tokens`` saved.
    """

    engine: str
    only_here_tokens: int
    reused_tokens: int
    saved_seconds: float
    requests: int


def removals(
    recording: Recording, seconds_per_token: float = 0.0, engines: tuple[str, ...] | None = None
) -> list[Removal]:
    """The engines in the order of their removal: the least worth first, then the fewest requests.

    A block counts as held by the engines that recorded requests brought it to. Blocks that no
    request reused are worth nothing, however many there are.

    Args:
        recording: the last minutes of requests.
        seconds_per_token: prefill time per token.
        engines: names of the engines that may leave; None: all.
    """
    trace = recording.trace
    holders: dict[int, int] = {}  # bit set of engines by hash of a block
    only = np.zeros(len(recording.engines), np.int64)
    reused = np.zeros(len(recording.engines), np.int64)
    for index, engine in enumerate(recording.instance.tolist()):
        bit, alone, found, run = 1 << engine, 0, 0, True
        for block in trace.blocks(index).tolist():
            held = holders.get(block, 0)
            run = run and bool(held & bit)  # a hit is a prefix
            if run:
                found += 1
                alone += held == bit
            holders[block] = held | bit
        only[engine] += alone * trace.block_tokens
        reused[engine] += found * trace.block_tokens
    requests = np.bincount(recording.instance, minlength=len(recording.engines))
    made = [
        Removal(name, int(only[k]), int(reused[k]), float(only[k]) * seconds_per_token, int(requests[k]))
        for k, name in enumerate(recording.engines)
        if engines is None or name in engines
    ]
    return sorted(made, key=lambda each: (each.only_here_tokens, each.requests, each.engine))
