"""The engines of a simulated fleet, from names of profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lmetric._core import BadValueError
from lmetric.profiles import Profile, fleet_profiles, load_profile

ProfileLike = str | Profile | Mapping[str, Any]

DEFAULT_INSTANCES = 16  # of a fleet with one profile


def resolve_profile(profile: ProfileLike) -> Profile:
    """A profile from a shipped name, the path of a YAML file, a mapping of its fields, or a
    `Profile`."""
    if isinstance(profile, Profile):
        return profile
    return load_profile(profile) if isinstance(profile, str) else Profile.model_validate(dict(profile))


def resolve_fleet(
    profile: ProfileLike | Sequence[ProfileLike], instances: int | None = None
) -> list[Profile]:
    """The profile of each instance of a fleet; `instances` is 16 if only one profile is given.

    Raises:
        BadValueError: the number of instances differs from the number of profiles, or profiles of
            several models.
        ProfileError: an unknown or invalid profile.
    """
    each: list[Profile] = []
    if isinstance(profile, str) and (pairs := fleet_profiles(profile)):
        for number, name in pairs:
            each += [load_profile(name)] * number
    elif isinstance(profile, str | Profile | Mapping):
        number = DEFAULT_INSTANCES if instances is None else instances
        if number < 1:
            raise BadValueError(f"instances: {number} is not valid; expected at least 1")
        return [resolve_profile(profile)] * number
    else:
        each = [resolve_profile(one) for one in profile]
    if instances not in (None, len(each)) or not each:
        raise BadValueError(
            f"instances: {instances} is not valid; expected {len(each)}, as many as there are profiles"
        )
    for what in ("block_tokens", "kv_bytes_per_token"):
        if len(values := {getattr(one, what) for one in each}) > 1:
            found = ", ".join(map(str, sorted(values, key=str)))
            raise BadValueError(
                f"{what} of the profiles: {found} is not valid; expected one value, because the engines of a "
                "fleet serve one model"
            )
    return each
