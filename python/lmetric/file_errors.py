"""Errors of files name the file, also if the disk is full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file to an OSError of the block that names none.

    Python names a file only if it cannot be opened.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise type(error)(error.errno, os.strerror(error.errno), str(path)) from None


def write_file(path: Path, content: bytes) -> None:
    """Writes a file. An OSError names it."""
    with naming(path):
        path.write_bytes(content)
