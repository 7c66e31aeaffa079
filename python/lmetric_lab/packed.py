"""Compressed trace files, by the extension of their names."""

from __future__ import annotations

import gzip
import lzma
import sys
import zlib
from io import BufferedIOBase, BufferedReader
from pathlib import Path

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SUFFIXES = (".gz", ".xz", ".zst")
# Lines of agent traces have megabytes: reading them takes half the time of buffers of 8 KiB.
_BUFFER_BYTES = 1 << 20
# Errors of damaged files.
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstd.ZstdError)


def open_packed(path: Path) -> BufferedIOBase:
    """Opens a file for reading; ``.gz``, ``.xz`` and ``.zst`` are decompressed.

    Reading raises one of `DAMAGED`, or OSError.
    """
    match path.suffix:
        case ".gz":
            return gzip.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            return zstd.open(path, "rb")
        case _:
            return BufferedReader(path.open("rb", buffering=0), _BUFFER_BYTES)


def packed(content: bytes, path: Path) -> bytes:
    """Returns the bytes of a file with this content, compressed as its name asks for."""
    match path.suffix:
        case ".gz":
            return gzip.compress(content, mtime=0)
        case ".xz":
            return lzma.compress(content)
        case ".zst":
            return zstd.compress(content)
        case _:
            return content
