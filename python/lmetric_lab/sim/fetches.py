"""Prefix fetches in the simulator's form."""

from __future__ import annotations

from typing import Any

from lmetric.options import PrefixFetch, SimulatedFetch
from lmetric.profiles import Profile
from lmetric_lab.sim.pools import Transfer


def constants(fetch: PrefixFetch, profile: Profile, transfer: Transfer | None) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate`. Missing costs of the option are the costs of
    `transfer`.

    Raises:
        BadValueError: the profile has no `kv_bytes_per_token`.
    """
    per_token, fixed = fetch.seconds_per_token, fetch.fixed_seconds
    if per_token is None:
        per_token = 0.0 if transfer is None else transfer.seconds_per_token(profile)
    if fixed is None:
        fixed = 0.0 if transfer is None else transfer.fixed_seconds
    simulated = fetch if isinstance(fetch, SimulatedFetch) else SimulatedFetch()
    return {
        "fetch": {
            "seconds_per_token": per_token,
            "fixed_seconds": fixed,
            "min_tokens": fetch.min_tokens,
            "max_fetches": fetch.max_fetches,
            "max_kv_usage": fetch.max_kv_usage,
        },
        "fetch_holder_seconds": simulated.holder_seconds,
        "fetch_waits": simulated.waits,
        "fetch_pinned": simulated.pinned,
    }
