"""Whether the memory of a router grows during a storm of faults.

In an hour of 54,000 requests, `MOST_MIB` hides a leak of less than about 250 bytes per request.
`soak.py` sends more requests and allows less growth, but has no faults.
"""

from __future__ import annotations

from collections.abc import Sequence

WARM_SHARE, MOST_MIB = 0.4, 8.0
WARM_REQUESTS = 18_000  # these fill the ring of decision records


def growth_after(memory: Sequence[float], warm_share: float) -> float:
    """The growth of memory after a warm-up, MiB.

    ``memory``: samples in equal steps, MiB. ``warm_share``: the share of these that is warm-up.
    """
    warm = round(warm_share * len(memory))
    return max(memory[warm:]) - max(memory[:warm])


def growth_of(memory: Sequence[float], requests: int) -> float | None:
    """The growth of memory in a storm, MiB; None: the requests do not suffice for a warm-up."""
    return growth_after(memory, WARM_SHARE) if WARM_SHARE * requests >= WARM_REQUESTS else None


def leaks(growth: float | None) -> bool:
    """Whether memory grew too much."""
    return growth is not None and growth > MOST_MIB
