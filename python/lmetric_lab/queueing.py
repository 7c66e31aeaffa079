"""Queue settings of an engine: its local order, and the KV cache of preempted requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from lmetric._core import BadValueError, check_local_order
from lmetric.profiles import Profile

Copies = TypeVar("Copies")


def checked_order(text: str) -> str:
    """Returns the name of a local order, with optional settings: ``uniboost(gamma=0.2)``.

    Raises:
        ValueError: the text is not a local order; the message lists valid ones.
    """
    try:
        check_local_order(text)
    except BadValueError as error:
        raise ValueError(str(error)) from None
    return text


@dataclass(frozen=True, slots=True)
class Swap:
    """Swaps the KV cache of preempted requests to host memory, if it fits. Otherwise it is
    recomputed.

    The defaults are estimates. They follow a PCIe 4.0 x16 link (32 GB/s nominal), and an eighth of
    the 248 GB of UniBoost's host with 8 GPUs (section 4).
    """

    gigabytes_per_second: float = 25.0  # in each direction
    host_gigabytes: float = 31.0  # per engine

    def __post_init__(self) -> None:
        if not (0 < self.gigabytes_per_second <= 1e6 and 0 <= self.host_gigabytes <= 1e9):
            raise BadValueError(
                f"preempt: swap at {self.gigabytes_per_second:g} GB/s, {self.host_gigabytes:g} GB in the "
                "host is not valid; expected more than 0 GB/s and at least 0 GB"
            )

    @classmethod
    def of(cls, value: str | Mapping[str, float] | Self | None) -> Self | None:
        """Reads ``swap``, ``swap:25`` (GB/s), ``swap:25,host=64`` (GB), or a mapping of the fields.

        Returns None for ``recompute`` and None: the KV cache is dropped and recomputed.

        Raises:
            BadValueError: another value.
        """
        expected = 'recompute, swap, or swap with GB/s and the host\'s GB, e.g. "swap:25,host=64"'
        return _read(cls, "preempt", value, "recompute", _swap_fields, expected)

    def constants(self, profile: Profile) -> tuple[float, int]:
        """Seconds per token in each direction, and the host's capacity in tokens.

        Raises:
            BadValueError: the profile has no `kv_bytes_per_token`.
        """
        size = _bytes_per_token("preempt", profile, "recompute")
        return size / (self.gigabytes_per_second * 1e9), int(self.host_gigabytes * 1e9 / size)


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory that keeps a copy of an engine's KV blocks, as vLLM's OffloadingConnector does.

    Every block is copied to the host when it is computed. A request whose prompt has more leading
    blocks in the host than on the GPU loads them before its prefill. The host drops the least
    recently used blocks. The default bandwidth is an assumption: a PCIe 5.0 x16 link (64 GB/s
    nominal).
    """

    capacity: float = 2.0  # blocks, relative to the GPU's
    gigabytes_per_second: float = 50.0  # to the GPU
    step_ratio: float = 0.0  # seconds that the next step takes longer, per second of a load

    def __post_init__(self) -> None:
        if not (
            1e-6 <= self.capacity <= 1e6
            and 0 < self.gigabytes_per_second <= 1e6
            and 0 <= self.step_ratio <= 1
        ):
            raise BadValueError(
                f"host_tier: capacity {self.capacity:g}, {self.gigabytes_per_second:g} GB/s, step_ratio "
                f"{self.step_ratio:g} is not valid; expected a capacity and GB/s above 0, and a step_ratio "
                "from 0 to 1"
            )

    @classmethod
    def of(cls, value: str | Mapping[str, float] | Self | None) -> Self | None:
        """Reads ``2`` (twice the GPU's blocks), ``2,50`` (GB/s), or a mapping of the fields.

        Returns None for ``none`` and None.

        Raises:
            BadValueError: another value.
        """
        expected = 'none, or the capacity relative to the GPU\'s and GB/s, e.g. "2,50"'
        return _read(cls, "host_tier", value, "none", _tier_fields, expected)

    def constants(self, profile: Profile) -> tuple[float, float, float]:
        """Relative capacity, seconds to load a token, and step ratio.

        Raises:
            BadValueError: the profile has no `kv_bytes_per_token`.
        """
        size = _bytes_per_token("host_tier", profile, "none")
        return self.capacity, size / (self.gigabytes_per_second * 1e9), self.step_ratio


def _read(
    cls: type[Copies],
    option: str,
    value: object,
    off: str,
    fields: Callable[[str], dict[str, object]],
    expected: str,
) -> Copies | None:
    """Reads an option from a text by ``fields``, or from a mapping. None and ``off`` are None.

    Raises:
        BadValueError: another value.
    """
    if value is None or isinstance(value, cls):
        return value
    if isinstance(value, str) and value.strip() == off:
        return None
    try:
        return cls(**(fields(value.strip()) if isinstance(value, str) else dict(value)))  # type: ignore[call-overload]
    except TypeError:
        raise BadValueError(f"{option} {value!r} is not valid; expected {expected}") from None


def _swap_fields(text: str) -> dict[str, object]:
    name, _, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",")] if rest else []
    fields: dict[str, object] = {}
    for part in parts:
        key = "host_gigabytes" if part.startswith("host=") else "gigabytes_per_second"
        fields[key] = _number(part.removeprefix("host=").removesuffix("GB/s"))
    return fields if name == "swap" and len(fields) == len(parts) else {"": None}


def _tier_fields(text: str) -> dict[str, object]:
    parts = [_number(part.strip().removesuffix("GB/s")) for part in text.split(",")]
    names = ("capacity", "gigabytes_per_second")
    return dict(zip(names, parts, strict=False)) if len(parts) <= len(names) else {"": None}


def _bytes_per_token(option: str, profile: Profile, off: str) -> float:
    """Bytes of KV cache per token.

    Raises:
        BadValueError: the profile has no `kv_bytes_per_token`.
    """
    if profile.kv_bytes_per_token is None:
        raise BadValueError(
            f"{option}: the profile has no kv_bytes_per_token; add it, or set {option} to {off}"
        )
    return profile.kv_bytes_per_token


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
