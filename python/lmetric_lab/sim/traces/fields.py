"""A line's request (`Row`), and checks of its fields. Errors have the field, the value, and what
was expected."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One request."""

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    blocks: array[int] | NDArray[np.uint64] | None  # None: the line has no hash_ids
    key: Hashable = None  # what a later line's parent names; None: its number among the requests
    parent: Hashable = None  # None: the first of its conversation
    session: int | None = None  # None: from the chain of parents, if any
    think_seconds: float = 0.0
    think_tokens: int = 0  # of output_tokens
    waits: bool = False  # the file sets that it waits for its parent's answer
    joins: tuple[Hashable, ...] = ()  # keys of further lines to wait for
    program: int = -1  # -1: none
    finish: int = -1  # index in `FINISH`; -1: unknown
    # think_seconds is the time since the last end of the requests that it waits for. In a closed
    # loop it may arrive before arrival_seconds.
    gap_known: bool = False
    from_start: bool = False  # arrival_seconds counts from the start of its session
    line: int | None = None  # its line in the file; None: the line in hand
    exact: bool = False  # no arrival of the file is rounded


class Parser:
    """Reads the lines of one file: the requests of each line, and at the end of the file the
    requests that need all lines.

    A `ValueError` with the problem is raised, which refuses the line, or stands in place of a
    refused request.
    """

    def __init__(self, block_tokens: int) -> None:
        """`block_tokens`: prompt tokens under one hash ID."""
        self.block_tokens = block_tokens

    def read(self, line_number: int, line: bytes) -> Iterable[Row | ValueError]:
        """The requests of a line; none for a header."""
        raise NotImplementedError

    def end(self) -> Iterable[Row | ValueError]:
        """The requests that need all lines."""
        return ()


def json_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        row = orjson.loads(line.removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    return row


def number(row: dict[str, Any], key: str, at: str = "") -> float:
    """A number of at least 0. `at`: the place of `row`, for the error."""
    value = row.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{at}{key} must be a number of at least 0, got {value!r}")
    return value


def whole(row: dict[str, Any], key: str, least: int, at: str = "") -> int:
    """A whole number of at least `least`."""
    value = row.get(key)
    if type(value) is not int or not least <= value < 2**31:
        raise ValueError(f"{at}{key} must be a whole number of at least {least}, got {value!r}")
    return value


def blocks(ids: Any, input_tokens: int, block_tokens: int, at: str = "", below: int = 2**64) -> array[int]:
    """The hash IDs of a prompt."""
    try:
        if not isinstance(ids, list):
            raise TypeError
        found = array("Q", ids)
    except (TypeError, OverflowError):
        raise ValueError(
            f"{at}hash_ids must be a list of whole numbers of at least 0, got {str(ids)[:60]}"
        ) from None
    check_number(len(found), input_tokens, block_tokens, at)
    if (greatest := greatest_id(found)) >= below:
        raise ValueError(f"{at}hash_ids must be below {below}, got {greatest}")
    return found


def check_number(ids: int, input_tokens: int, block_tokens: int, at: str = "") -> None:
    """Raises `ValueError` if a prompt cannot have this number of hash IDs."""
    most = -(-input_tokens // block_tokens)
    if ids > most:
        raise ValueError(
            f"{at}{ids} hash_ids for {input_tokens} tokens: at most {most} of {block_tokens} fit"
        )


def greatest_id(ids: array[int] | NDArray[np.uint64]) -> int:
    """The greatest of the hash IDs; -1: none."""
    return int(np.frombuffer(ids, np.uint64).max()) if len(ids) else -1
