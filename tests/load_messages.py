"""Load messages between routers, byte by byte: an encoder that is independent of the core's."""

import struct
from collections.abc import Mapping

# By engine: the numbers by their bit (0: coming, 1: queued, 2: scheduled, 3: decoding, ...).
Loads = Mapping[str, Mapping[int, float]]
NO_PROGRAMS = bytes(48) + b"\0\0\0"  # measured; homes, programs, and those that ended


def number(value: int) -> bytes:
    """Returns an integer as LEB128."""
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def text(value: str) -> bytes:
    """Returns a text with its length."""
    return number(len(value.encode())) + value.encode()


def message(
    models: Mapping[str, Loads] | None = None,
    *,
    sender: str = "ab",
    version: int = 0,
    base: int | None = None,
    form: int = 4,
    budgets: bytes = b"",
    programs: bytes = NO_PROGRAMS,
) -> bytes:
    """Returns a message; without ``base``, of the whole load.

    ``budgets``: of `Budgets.encode`. ``programs``: of each model.
    """
    out = b"lmload" + bytes([form]) + text(sender)
    out += number(version) + number(0 if base is None else base + 1) + number(len(models or {}))
    for model, loads in (models or {}).items():
        out += text(model) + number(len(loads))
        for engine, numbers in loads.items():
            out += text(engine) + number(sum(1 << bit for bit in numbers))
            out += b"".join(struct.pack("<f", numbers[bit]) for bit in sorted(numbers))
        out += programs
    return out + number(len(budgets)) + budgets
