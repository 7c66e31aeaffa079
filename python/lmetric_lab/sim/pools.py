"""Prefill and decode pools, and the cost of KV transfers between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from lmetric._core import BadValueError
from lmetric.profiles import Profile
from lmetric.roles import Role

_LETTERS = {"P": "prefill", "D": "decode", "B": "both"}


@dataclass(frozen=True, slots=True)
class Roles:
    """Number of instances for prefill, decode, and both. ``16P64D``: 16 prefill, 64 decode."""

    prefill: int
    decode: int
    both: int = 0

    def __post_init__(self) -> None:
        counts = (self.prefill, self.decode, self.both)
        if min(counts) < 0 or (self.prefill > 0) != (self.decode > 0) or not any(counts):
            raise BadValueError(
                f"roles: {self.prefill} prefill, {self.decode} decode, {self.both} both is not valid; "
                "expected at least one prefill and one decode instance, e.g. 16P64D"
            )

    @classmethod
    def of(cls, value: str | Mapping[str, int] | Self) -> Self:
        """Reads ``16P64D`` (``B``: instances for both), or ``{"prefill": 16, "decode": 64}``.

        Raises:
            BadValueError: another value, or a pool without its counterpart.
        """
        if isinstance(value, cls):
            return value
        counts: dict[str, int] = {}
        if isinstance(value, str):
            parts = re.findall(r"(\d+)([PDB])", value.upper())
            letters = [letter for _, letter in parts]
            if "".join(map("".join, parts)) != value.upper().strip() or len(set(letters)) < len(letters):
                raise BadValueError(
                    f"roles {value!r} is not valid; expected counts of P, D and B, e.g. 16P64D"
                )
            counts = {_LETTERS[letter]: int(count) for count, letter in parts}
        elif isinstance(value, Mapping):
            counts = dict(value)
        wrong = sorted(set(counts) - set(_LETTERS.values()))
        if wrong or not all(type(count) is int for count in counts.values()) or not counts:
            raise BadValueError(
                f"roles {value!r} is not valid; expected whole numbers of prefill, decode and both, e.g. "
                '{"prefill": 16, "decode": 64}'
            )
        return cls(counts.get("prefill", 0), counts.get("decode", 0), counts.get("both", 0))

    @property
    def instances(self) -> int:
        """Number of all instances."""
        return self.prefill + self.decode + self.both

    def each(self) -> list[Role]:
        """The role of each instance, in the order of their numbers: prefill, decode, both."""
        roles: list[Role] = ["prefill"] * self.prefill
        return roles + ["decode"] * self.decode + ["both"] * self.both

    def __str__(self) -> str:
        counts = {letter: getattr(self, name) for letter, name in _LETTERS.items()}
        return "".join(f"{count}{letter}" for letter, count in counts.items() if count)


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV transfers from prefill to decode instances.

    Each instance sends one prompt at a time and receives one at a time. The default bandwidth is
    one 400 Gb/s port per GPU (ConnectX-7, as in HGX servers with H20, H100 and H200). The default
    of one millisecond for request and answer is an estimate, not a measurement of a connector.
    """

    gigabytes_per_second: float = 50.0
    fixed_seconds: float = 0.001
    # "end": starts at the end of prefill, like vLLM's NIXL connector. "layers": overlaps with
    # prefill if the decode instance is known (early binding); only the time beyond the prefill
    # counts. "chunks": overlaps chunk by chunk, also for tokens of a split answer (Libra, section
    # 4.3).
    overlap: Literal["end", "layers", "chunks"] = "end"
    # Tokens per chunk: an estimate; the paper gives no number.
    chunk_tokens: int = 256
    # Whether each transfer has the full bandwidth; otherwise an instance sends and receives one at
    # a time.
    unshared: bool = False

    def __post_init__(self) -> None:
        speed, fixed = self.gigabytes_per_second, self.fixed_seconds
        fits = speed > 0 and 0 <= fixed < 1e6 and 0 < self.chunk_tokens < 2**31
        fits = fits and self.chunk_tokens == int(self.chunk_tokens)
        fits = fits and not (self.unshared and self.overlap == "chunks")
        if not fits or self.overlap not in ("end", "layers", "chunks"):
            raise BadValueError(
                f"transfer at {speed:g} GB/s, {fixed:g} s fixed, overlap {self.overlap!r}, chunks of "
                f"{self.chunk_tokens} tokens is not valid; expected more than 0 GB/s, 0 s or more, overlap "
                "end, layers or chunks (not unshared), whole chunks of 1 token or more"
            )

    @classmethod
    def of(cls, value: str | Mapping[str, float | str] | Self | None) -> Self | None:
        """Reads ``50``, ``50 GB/s, layers``, ``25, chunk=256``, ``25, fixed=0.005``, ``25,
        unshared``, or a mapping.

        Returns None for ``none`` and None: transfers take no time (as in SIBYL's Algorithm 2).

        Raises:
            BadValueError: another value.
        """
        fields: dict[str, object] = {}
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            fields = dict(value)
        elif isinstance(value, str) and value.strip().lower() == "none":
            return None
        elif isinstance(value, str):
            for part in (part.strip() for part in value.split(",")):
                if part in ("end", "layers", "chunks"):
                    fields["overlap"] = part
                elif part == "unshared":
                    fields["unshared"] = True
                elif part.startswith("chunk="):
                    tokens = part.removeprefix("chunk=")
                    fields["overlap"] = "chunks"
                    fields["chunk_tokens"] = int(tokens) if tokens.isdecimal() else None
                elif part.startswith("fixed="):
                    fields["fixed_seconds"] = _number(part.removeprefix("fixed="))
                else:
                    fields["gigabytes_per_second"] = _number(part.removesuffix("GB/s"))
        try:
            return cls(**fields)  # type: ignore[arg-type]
        except TypeError:
            raise BadValueError(
                f"transfer {value!r} is not valid; expected none, or GB/s with end, layers, chunks, "
                'unshared or chunk=TOKENS, and fixed=SECONDS, e.g. "50, layers"'
            ) from None

    def seconds_per_token(self, profile: Profile) -> float:
        """Transfer time per token on a free link, seconds.

        Raises:
            BadValueError: the profile has no `kv_bytes_per_token`.
        """
        if profile.kv_bytes_per_token is None:
            raise BadValueError(
                "transfer: the profile has no kv_bytes_per_token; add it, or set transfer to none"
            )
        return profile.kv_bytes_per_token / (self.gigabytes_per_second * 1e9)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
