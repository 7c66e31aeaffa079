"""``lmetric-router demo``: three policies, one trace, engines that need no GPU."""

from __future__ import annotations


def command() -> None:
    """Play a slice of a real trace under three policies over emulated engines."""
    raise NotImplementedError
