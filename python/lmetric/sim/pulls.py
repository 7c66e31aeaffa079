"""Prefixes that engines pull from each other: when, and what it costs the one that sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from lmetric._core import BadValueError
from lmetric.profiles import Profile
from lmetric.sim.pools import Transfer

_KEYS = {"least": "least_tokens", "most": "most_pulls", "holder": "holder_seconds"}


@dataclass(frozen=True, slots=True)
class Pull:
    """A chosen instance fetches the cached part of a prompt that another holds, where that takes less time
    than computing it. How fast, `Transfer` says.

    The defaults of the first two are guesses.
    """

    least_tokens: int = 256  # worth a pull
    most_pulls: int = 4  # that one holder serves at once
    holder_seconds: float = 0.0  # that a pull takes of the holder's next step, where it is not idle
    # It waits for the holder's present step, as what is asked of an engine does; else the holder's memory is
    # read at once, as a store of KV would that engines share.
    waits: bool = True
    pinned: bool = True  # what is sent stays in the holder's cache until it is
    # What the router takes a pull to cost until it has seen some; None: what the transfer takes.
    seconds_per_token: float | None = None
    fixed_seconds: float | None = None

    @classmethod
    def of(cls, value: str | Mapping[str, Any] | Self | None) -> Self | None:
        """From ``on``, ``least=512, most=2``, ``holder=0.005, unpinned``, ``at_once``, or a mapping of the
        fields; ``none`` and None: nothing is pulled.

        Raises:
            BadValueError: anything else. (What is out of range, the core refuses.)
        """
        if value is None or isinstance(value, cls):
            return value
        fields: dict[str, Any] = {}
        if isinstance(value, Mapping):
            fields = dict(value)
        elif isinstance(value, str):
            if value.strip() == "none":
                return None
            for part in (part.strip() for part in value.split(",")):
                name, _, number = (each.strip() for each in part.partition("="))
                if part == "unpinned":
                    fields["pinned"] = False
                elif part == "at_once":
                    fields["waits"] = False
                elif part != "on":
                    fields[_KEYS.get(name, name)] = number
        try:
            return cls(**{name: _checked(name, each) for name, each in fields.items()})
        except (TypeError, ValueError):
            raise BadValueError(
                f"pull {value!r} is not valid; expected none, on, or least=TOKENS, most=PULLS, "
                'holder=SECONDS, at_once and unpinned, e.g. "least=512, most=2"'
            ) from None

    def constants(self, profile: Profile, transfer: Transfer | None) -> dict[str, Any]:
        """As `_core.simulate` takes it. Raises `BadValueError` where the profile has no size of a token."""
        per_token, fixed = self.seconds_per_token, self.fixed_seconds
        if per_token is None:
            per_token = 0.0 if transfer is None else transfer.seconds_per_token(profile)
        if fixed is None:
            fixed = 0.0 if transfer is None else transfer.fixed_seconds
        pull = {
            "seconds_per_token": per_token, "fixed_seconds": fixed,
            "least_tokens": self.least_tokens, "most_pulls": self.most_pulls,
        }  # fmt: skip
        return {
            "pull": pull, "pull_holder_seconds": self.holder_seconds, "pull_waits": self.waits,
            "pull_pinned": self.pinned,
        }  # fmt: skip


def _checked(name: str, value: Any) -> Any:
    if name in ("least_tokens", "most_pulls"):
        return int(value)
    return value if isinstance(value, bool | None) else float(value)
