"""Fleet changes in simulations: instances that join and leave while requests arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from lmetric._core import BadValueError
from lmetric.options import WarmChanges, core_settings
from lmetric.profiles import Profile
from lmetric_lab.sim.fetches import with_costs
from lmetric_lab.sim.pools import Transfer

_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?)\s+(join|leave)\s+(\d+)\s*")


@dataclass(frozen=True, slots=True)
class FleetChange:
    """An instance joins or leaves.

    `at_seconds`: time on the trace's clock. `instance`: its number, from 0. An instance that leaves
    ends its requests, takes no new ones, and can join again with an empty cache. A join waits until
    the instance is gone; later changes of the instance wait for the join.
    """

    at_seconds: float
    kind: Literal["join", "leave"]
    instance: int

    def __post_init__(self) -> None:
        whole = type(self.instance) is int and 0 <= self.instance < 2**31
        if self.kind not in ("join", "leave") or not whole:
            raise BadValueError(
                f"fleet change {self.kind!r} of instance {self.instance!r} is not valid; expected join or "
                "leave, and the number of an instance"
            )

    @classmethod
    def of(cls, value: str | Self) -> Self:
        """Reads ``600 join 8``: at 600 s, instance 8 joins.

        Raises:
            BadValueError: another value.
        """
        if isinstance(value, cls):
            return value
        found = _TEXT.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            raise BadValueError(
                f"fleet change {value!r} is not valid; expected seconds, join or leave, and the number of an "
                "instance, as in 600 join 8"
            )
        kind: Any = found[2]
        return cls(float(found[1]), kind, int(found[3]))

    @property
    def joins(self) -> bool:
        """Whether the instance joins."""
        return self.kind == "join"


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """The outcome of a change of a simulated fleet."""

    change: FleetChange
    # When the instance took requests, or was gone; NaN: not before the end of the run.
    done_seconds: float
    fetches: int  # of prefixes, for this change
    fetched_tokens: int  # including tokens that the target held before
    moves: int  # running requests whose move the change began


def listed(changes: str | Sequence[FleetChange | str]) -> list[FleetChange]:
    """The changes in order of time. A text has commas between them.

    Raises:
        BadValueError: an invalid change.
    """
    if isinstance(changes, str):
        changes = [each for each in changes.split(",") if each.strip()]
    return sorted(map(FleetChange.of, changes), key=lambda each: each.at_seconds)


def fleet_change_constants(
    option: WarmChanges | None, profile: Profile, transfer: Transfer | None
) -> dict[str, Any]:
    """Keyword arguments of `_core.simulate`. Missing costs of the option are `transfer`'s."""
    if option is not None:
        option = with_costs(option, profile, transfer)
    kind, settings = core_settings("fleet_changes", option)
    return {"fleet_changes": kind, "fleet_change_settings": settings}
