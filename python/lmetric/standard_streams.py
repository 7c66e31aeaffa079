"""Standard streams that are closed at the start of a process.

The next file or socket would get the descriptor, and messages would go into it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class _ClosedOutput(io.RawIOBase):
    """Standard output that is closed: data are not lost silently."""

    _failed = False

    def writable(self) -> bool:
        """Returns that the program may write."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor of standard output."""
        return 1

    def write(self, data: Any) -> int:
        """Raises OSError. Python writes the same data again at the exit: they are dropped."""
        if not self._failed:
            self._failed = True
            raise OSError("standard output is closed; open it, or redirect it to a file or /dev/null")
        return len(data)


def open_closed() -> None:
    """Opens the null device for closed standard streams, before any other file is opened.

    Standard input is empty, messages on standard error are dropped, and writes to standard output
    fail.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest descriptor that is free
        os.set_inheritable(descriptor, True)  # as standard streams are, for workers
    os.close(descriptor)
    # Python has no object for a closed stream; `print` takes None for standard output.
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(_ClosedOutput()), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
