"""The question to a capacity twin: the SLO, the engine types with prices, and the limits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmetric._core import BadValueError
from lmetric.profiles import Profile, load_profile
from lmetric_lab.sim.pools import Roles, Transfer
from lmetric_lab.sim.setups import PolicyChoice
from lmetric_lab.slo import Goal

DEFAULT_TYPE = "default"
MOST_HEADROOM = 0.5
MOST_TYPES = 16
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class EngineType:
    """A type of engines with its price.

    ``profile``: name or path of its engine profile. ``speed``: relative to the recorded engines.
    The recorded type has neither: its profile is fitted.
    """

    name: str
    price_per_hour: float | None = None
    profile: str | None = None
    speed: float | None = None

    def __post_init__(self) -> None:
        if _TYPE.fullmatch(self.name) is None:
            raise BadValueError(
                f"engine type {self.name!r} is not valid; expected letters, digits, '-', '_' and '.', at "
                "most 63 of them"
            )
        price = self.price_per_hour
        if price is not None and not 0 < price < 1e9:
            raise BadValueError(
                f"price of {self.name}: {price:g} is not valid; expected more than 0 per hour"
            )
        if self.speed is not None and not 0.01 <= self.speed <= 100:
            raise BadValueError(f"speed of {self.name}: {self.speed:g} is not valid; expected 0.01 to 100")

    def of(self, fitted: Profile) -> Profile:
        """The profile of this type. Raises ProfileError for an unknown or invalid profile."""
        if self.profile is not None:
            return load_profile(self.profile).in_blocks_of(fitted.block_tokens)
        return fitted if self.speed is None else fitted.slower(1 / self.speed)


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the twin.

    ``types``: the first is the type of the recorded engines. ``startup_seconds``: from the order of
    an engine to its first request. ``every_seconds``: time between two decisions. ``headroom``: the
    wanted fleet serves the forecast demand times 1 + ``headroom``. A `Twin` starts with this value
    and then steers it by the error budget.
    """

    goal: Goal
    types: tuple[EngineType, ...] = (EngineType(DEFAULT_TYPE),)
    startup_seconds: float = 120.0
    every_seconds: float = 60.0
    headroom: float = 0.1
    min_engines: int = 1
    max_engines: int = 256
    policies: Sequence[PolicyChoice] = field(default_factory=tuple)  # besides the recorded one
    roles: Sequence[Roles] = field(default_factory=tuple)  # pools to play
    transfer: str | None = None  # KV transfers of pools, as `lmetric_lab.sim.pools.Transfer` reads them
    seeds: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.min_engines <= self.max_engines:
            raise BadValueError(
                f"{self.min_engines} to {self.max_engines} engines is not valid; expected at least 1, and no "
                "more than the maximum"
            )
        if not (0 <= self.startup_seconds <= 86_400 and 0 < self.every_seconds <= 86_400):
            raise BadValueError(
                f"start-up of {self.startup_seconds:g} s, decisions every {self.every_seconds:g} s is not "
                "valid; expected 0 to 86400 s, and more than 0 s between decisions"
            )
        if not 0 <= self.headroom <= MOST_HEADROOM:
            raise BadValueError(
                f"headroom {self.headroom:g} is not valid; expected 0 to {MOST_HEADROOM:g}, as a share of "
                "the forecast demand"
            )
        Transfer.of(self.transfer or "none")  # raises for a text that it cannot read
        names = [each.name for each in self.types]
        if not names or len(set(names)) < len(names) or len(names) > MOST_TYPES:
            raise BadValueError(
                f"engine types {', '.join(names) or 'none'}: expected 1 to {MOST_TYPES} types, each once"
            )

    @property
    def horizon_seconds(self) -> float:
        """How far ahead the demand counts: until engines of the next decision could be ready."""
        return self.startup_seconds + self.every_seconds


def read_types(prices: Sequence[str], kinds: Sequence[str]) -> tuple[EngineType, ...]:
    """Engine types from texts with commas. The first named type is that of the recorded engines.

    Args:
        prices: ``H100=4.2,L40S=1.1``: price of an engine per hour, in any currency.
        kinds: ``L40S=profile.yaml``, or ``L40S=x0.4``: relative to the speed of recorded engines.

    Raises:
        BadValueError: an invalid text, or a type without price, profile or speed.
    """
    cost: dict[str, float] = {}
    for name, value in _pairs("price", prices, "H100=4.2"):
        try:
            cost[name] = float(value)
        except ValueError:
            raise BadValueError(
                f"price {name}={value} is not valid; expected a type and a number, as in H100=4.2"
            ) from None
    shapes = dict(_pairs("type", kinds, "L40S=profile.yaml or L40S=x0.4"))
    own = next((name for name in cost if name not in shapes), DEFAULT_TYPE)
    made = [EngineType(own, cost.get(own))]
    if missing := [name for name in cost if name not in shapes and name != own]:
        raise BadValueError(
            f"type {missing[0]!r} has a price and no profile; the recorded engines count as {own!r}. Set a "
            f"profile or a relative speed: {missing[0]}=profile.yaml or {missing[0]}=x0.4"
        )
    for name, value in shapes.items():
        speed = re.fullmatch(r"x(\d+(?:\.\d*)?|\.\d+)", value)
        made.append(
            EngineType(
                name, cost.get(name), None if speed else value, float(speed[1]) if speed is not None else None
            )
        )
    return tuple(made)


def _pairs(what: str, texts: Sequence[str], example: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for part in (each.strip() for text in texts for each in text.split(",")):
        name, sign, value = (each.strip() for each in part.partition("="))
        if not part:
            continue
        if not (name and sign and value):
            raise BadValueError(f"{what} {part!r} is not valid; expected {example}")
        if any(name == other for other, _ in found):
            raise BadValueError(f"{what} of {name!r} is given twice; keep one of them")
        found.append((name, value))
    return found
