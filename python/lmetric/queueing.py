"""What an engine is told of its queue: its local order, and what becomes of requests that go back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from lmetric._core import BadValueError, check_local_order
from lmetric.profiles import Profile


def checked_order(text: str) -> str:
    """The text, where it names a local order, maybe with settings: ``uniboost(gamma=0.2)``.

    Raises:
        ValueError: it does not, saying what would have been right.
    """
    try:
        check_local_order(text)
    except BadValueError as error:
        raise ValueError(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class Swap:
    """It is copied to the host's memory, and in again; what does not fit there is computed again.

    The defaults are guesses: what a PCIe 4.0 x16 link carries of its 32 GB/s, and an eighth of the 248 GB
    that UniBoost's host of 8 GPUs has (section 4).
    """

    gigabytes_per_second: float = 25.0  # either way
    host_gigabytes: float = 31.0  # of one engine

    def __post_init__(self) -> None:
        if not (0 < self.gigabytes_per_second <= 1e6 and 0 <= self.host_gigabytes <= 1e9):
            raise BadValueError(
                f"preempt: swap at {self.gigabytes_per_second:g} GB/s, {self.host_gigabytes:g} GB in the "
                "host is not valid; expected more than 0 GB/s, 0 GB or more"
            )

    @classmethod
    def of(cls, value: str | Mapping[str, float] | Self | None) -> Self | None:
        """From ``swap``, ``swap:25`` (GB/s), ``swap:25,host=64`` (GB), or a mapping of the fields;
        ``recompute`` and None: it is dropped, and computed again.

        Raises:
            BadValueError: anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str) and value.strip() == "recompute":
            return None
        fields: dict[str, object] = {}
        if isinstance(value, Mapping):
            fields = dict(value)
        elif isinstance(value, str):
            name, _, rest = value.strip().partition(":")
            parts = [part.strip() for part in rest.split(",")] if rest else []
            for part in parts:
                key = "host_gigabytes" if part.startswith("host=") else "gigabytes_per_second"
                fields[key] = _number(part.removeprefix("host=").removesuffix("GB/s"))
            if name != "swap" or len(fields) < len(parts):
                fields["swap"] = None
        try:
            return cls(**fields)  # type: ignore[arg-type]
        except TypeError:
            raise BadValueError(
                f"preempt {value!r} is not valid; expected recompute, swap, or swap with GB/s and the host's "
                'GB, e.g. "swap:25,host=64"'
            ) from None

    def constants(self, profile: Profile) -> tuple[float, int]:
        """Seconds a token each way, and tokens that the host holds, as the core takes them. Raises
        `BadValueError` where the profile does not say a token's size."""
        if profile.kv_bytes_per_token is None:
            raise BadValueError(
                "preempt: the profile has no kv_bytes_per_token; add it, or say preempt recompute"
            )
        size = profile.kv_bytes_per_token
        return size / (self.gigabytes_per_second * 1e9), int(self.host_gigabytes * 1e9 / size)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
