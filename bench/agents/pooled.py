"""Counts what a single cache with the memory of all engines computes again of recorded sessions.

    python bench/agents/pooled.py sessions.jsonl.xz [--rate 0.035] [--seeds 1,2,3,4,5]

The requests come and end as on engines that evict nothing. A context is in the pooled cache from
the arrival of its request, and the next request of its session needs it. If the cache is full,
`least recently used` evicts the context whose request ended first, as engines do. `foresight`
evicts the context that is needed last, and at once what nobody needs again. No placement makes
caches of their own hold more than the pooled cache.

Each cell has two counts: the prompt tokens computed though endless caches had them, as a share of
all, and the requests that lack more than 20,000 of them. `default` is the default policy on engines
with caches of their own.
"""

from __future__ import annotations

import argparse
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from recorded import BLOCK_TOKENS, FLEETS, INSTANCES, PROFILE, RIVALS, numbers, run, sessions, trace_of

from lmetric_lab.sim.result import Run
from lmetric_lab.sim.workload import prepare

COLD_TOKENS = 20_000
DEFAULT = RIVALS["total_delay, auto"]


def missing(endless: Run, previous: NDArray[np.int64], foresight: bool) -> NDArray[np.float64]:
    """Prompt tokens that each request lacks in a pooled cache; `previous`: see `Trace`."""
    arrived, ended = endless.arrival_seconds, endless.finished_seconds
    tokens = endless.input_tokens + endless.output_tokens
    needed_by = np.full(len(tokens), -1)  # the first request that continues a context
    for each in np.argsort(-arrived, kind="stable"):
        if previous[each] >= 0:
            needed_by[previous[each]] = each
    capacity, used = INSTANCES * PROFILE.cache_blocks * BLOCK_TOKENS, 0
    kept: dict[int, int] = {}  # tokens, by the request that ended
    first_out: list[tuple[float, int]] = []
    lacks = np.zeros(len(tokens))
    moments = [(at, True, i) for i, at in enumerate(arrived)] + [(at, False, i) for i, at in enumerate(ended)]
    for _, arrives, each in sorted(moments):
        if arrives:
            before = int(previous[each])
            if before >= 0 and needed_by[before] == each:
                found = kept.pop(before, 0)
                used -= found
                lacks[each] = max(0, endless.hit_tokens[each] - found)
            used += tokens[each]
        elif foresight and needed_by[each] < 0:
            used -= tokens[each]
        else:
            kept[each] = tokens[each]
            heappush(first_out, (-arrived[needed_by[each]] if foresight else ended[each], each))
        while used > capacity and first_out:
            evicted = min(kept.get(first_out[0][1], 0), used - capacity)
            used -= evicted
            kept[first_out[0][1]] = kept.get(first_out[0][1], 0) - evicted
            if kept[first_out[0][1]] == 0:
                del kept[heappop(first_out)[1]]
    return lacks


def main() -> None:
    """Prints a row per seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rate", type=float, default=0.035, help="sessions per second")
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3, 4, 5])
    options = parser.parse_args()
    lines = sessions(options.file)
    print("| seed | default | least recently used | foresight |")
    print("| --- | --- | --- | --- |")
    for seed in map(int, options.seeds):
        trace = trace_of(lines, seed, options.rate)
        workload = prepare(trace, PROFILE)
        endless, default = (run(workload, seed, DEFAULT | FLEETS[fleet]) for fleet in ("endless", "equal"))
        assert trace.previous is not None
        found = [endless.hit_tokens - default.hit_tokens]
        found += [missing(endless, trace.previous, foresight) for foresight in (False, True)]
        cells = [
            f"{lacks.sum() / endless.input_tokens.sum():.2%}, {np.sum(lacks > COLD_TOKENS)}"
            for lacks in found
        ]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
