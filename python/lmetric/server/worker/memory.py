"""The memory that workers share: a file without a name, which ends with the last process."""

from __future__ import annotations

import mmap
import os
import tempfile

from lmetric._core import Board


def make() -> int:
    """Returns the descriptor of new shared memory."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("lmetric-workers", os.MFD_CLOEXEC)
    else:  # macOS
        file, path = tempfile.mkstemp(prefix="lmetric-")
        os.unlink(path)
        descriptor = file
    os.ftruncate(descriptor, Board.SIZE)
    return descriptor


def board(descriptor: int, writer: int) -> Board:
    """Maps the memory. Returns the board of a worker, or of the supervisor.

    Raises LmetricError.
    """
    return Board(mmap.mmap(descriptor, Board.SIZE), writer)
