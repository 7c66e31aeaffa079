"""Files of hidden states, as `lmetric_vllm.HiddenStatesConnector` writes them.

A file is a safetensors file: 8 bytes with the length of a header, the header in JSON, the numbers.
Others may be able to write to the folder. So reading a file runs no code from it, and is bounded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmetric.lengths.files import STATES_FORMAT
from lmetric.lengths.predictor import LengthsError

FILE_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
MAX_FILE_BYTES = 128 << 20
"""Of one request: 1,600 states (an answer of 32,000 tokens) of 16,384 numbers take 105 MB."""

_HEADER_BYTES = 1 << 14
_TYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
_MOST_TOKENS = 100_000_000


class States(NamedTuple):
    """The states of one request after 0, `every`, 2 x `every`, ... generated tokens."""

    states: NDArray[np.float32]  # shape (n, hidden_size), finite
    prompt_tokens: int
    answer_tokens: int
    every: int


def read_states(path: Path, hidden_size: int) -> States:
    """The states of a file, each of `hidden_size` numbers.

    Raises `LengthsError` if it is not whole or not of this kind, `OSError` if it cannot be read.
    """
    try:
        return _parsed(_bytes(path), hidden_size)
    except LengthsError as error:
        raise LengthsError(f"{path}: {error}") from None


def _bytes(path: Path) -> bytes:
    # A link could lead elsewhere, and opening a pipe could wait for ever.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise LengthsError("not a regular file")
        if about.st_size > MAX_FILE_BYTES:
            raise LengthsError(f"has {about.st_size:,} bytes, at most {MAX_FILE_BYTES:,} are read")
        return file.read(MAX_FILE_BYTES)


def _parsed(data: bytes, hidden_size: int) -> States:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 0 < length <= min(_HEADER_BYTES, len(data) - 8):
        raise LengthsError("not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length])
        about, tensor = header["__metadata__"], header["hidden_states"]
        kind, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        if about["format"] != STATES_FORMAT:
            raise LengthsError(f"format is not {STATES_FORMAT!r}")
        counts = [_count(about, name) for name in ("prompt_tokens", "answer_tokens", "every")]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LengthsError("a header without the fields of this format") from None
    prompt, answer, every = counts
    if not isinstance(kind, str) or kind not in _TYPES:
        raise LengthsError(f"the type is not one of {', '.join(_TYPES)}")
    rows, body = -(-answer // every), memoryview(data)[8 + length :]
    whole = rows * hidden_size * _TYPES[kind]
    if shape != [rows, hidden_size] or offsets != [0, whole] or whole != len(body):
        raise LengthsError(
            f"the states are not those of {answer:,} tokens, one in {every:,}, "
            f"with {hidden_size:,} numbers each"
        )
    states = _floats(body, kind).reshape(rows, hidden_size)
    if not np.isfinite(states).all():
        raise LengthsError("a state has a number that is not finite")
    return States(states, prompt, answer, every)


def _count(about: Any, name: str) -> int:
    text = about[name]
    if not (isinstance(text, str) and re.fullmatch("[0-9]{1,9}", text) and 0 < int(text) <= _MOST_TOKENS):
        raise LengthsError(f"{name} is not a number from 1 to {_MOST_TOKENS:,}")
    return int(text)


def _floats(body: memoryview, kind: str) -> NDArray[np.float32]:
    if kind == "BF16":  # the upper half of a 32-bit number
        return (np.frombuffer(body, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(body, "<f4" if kind == "F32" else "<f2").astype(np.float32)
