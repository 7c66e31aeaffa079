"""Prefix fetches in the simulator's form."""

from __future__ import annotations

from typing import Any, TypeVar

from lmetric.options import PrefixFetch, SimulatedFetch, WarmChanges
from lmetric.profiles import Profile
from lmetric_lab.sim.pools import Transfer

Costs = TypeVar("Costs", PrefixFetch, WarmChanges)


def with_costs(option: Costs, profile: Profile, transfer: Transfer | None) -> Costs:
    """The option with the costs of `transfer` for missing ones.

    Raises:
        BadValueError: the profile has no `kv_bytes_per_token`.
    """
    costs = {}
    if option.seconds_per_token is None:
        costs["seconds_per_token"] = 0.0 if transfer is None else transfer.seconds_per_token(profile)
    if option.fixed_seconds is None:
        costs["fixed_seconds"] = 0.0 if transfer is None else transfer.fixed_seconds
    return option.model_copy(update=costs)


def constants(fetch: PrefixFetch, profile: Profile, transfer: Transfer | None) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate`. Missing costs of the option are the costs of
    `transfer`.

    Raises:
        BadValueError: the profile has no `kv_bytes_per_token`.
    """
    simulated = fetch if isinstance(fetch, SimulatedFetch) else SimulatedFetch()
    return {
        "fetch": with_costs(fetch, profile, transfer).model_dump(include=set(PrefixFetch.model_fields)),
        "fetch_holder_seconds": simulated.holder_seconds,
        "fetch_waits": simulated.waits,
        "fetch_pinned": simulated.pinned,
    }
