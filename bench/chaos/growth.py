"""Whether the memory of a router grows during a storm of faults."""

from __future__ import annotations

from collections.abc import Sequence

WARM_SHARE, MOST_MIB = 0.4, 8.0
WARM_REQUESTS = 18_000  # these fill the ring of decision records


def growth_of(memory: Sequence[float], requests: int) -> float | None:
    """The growth of memory after the warm-up, MiB; None: the requests do not suffice for one.

    ``memory``: samples in order of time, MiB.
    """
    if WARM_SHARE * requests < WARM_REQUESTS:
        return None
    warm = round(WARM_SHARE * len(memory))
    return max(memory[warm:]) - max(memory[:warm])


def leaks(growth: float | None) -> bool:
    """Whether memory grew too much."""
    return growth is not None and growth > MOST_MIB
