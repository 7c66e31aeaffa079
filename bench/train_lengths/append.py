"""Adds rows to a samples file without reading it into memory."""

from __future__ import annotations

import fcntl
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lmetric.lengths.files import names_in
from lmetric.lengths.predictor import LengthsError
from train_lengths.samples import MAX_SAMPLE_BYTES, Samples

_COLUMNS = {"features": np.float32, "remaining": np.float32, "request_ids": np.int64}


class SamplesFile:
    """A file for `load_samples` that grows; it need not exist. Use `locked_samples`.

    Raises `LengthsError` if neither `save_samples` nor this class wrote the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = 0
        self.requests: set[int] = set()
        self.feature_names: tuple[str, ...] = ()  # of an empty file, none
        if path.exists():
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    ids = arrays["request_ids"]
                    self.feature_names = names_in(path, arrays)
                self._rows, self.requests = len(ids), set(ids.tolist())
                with zipfile.ZipFile(path) as old:
                    for name in _COLUMNS:
                        self._body(old, name).close()
            except (zipfile.BadZipFile, ValueError, EOFError, KeyError, TypeError) as error:
                raise LengthsError(f"{path}: not a samples file: {error}") from None

    def append(self, parts: Sequence[Samples]) -> None:
        """Adds the samples, all with the same features: on return, they are on the disk.

        Raises `LengthsError` if they have other features than the file, or it would become too
        large for `load_samples`.
        """
        names = self.feature_names or parts[0].feature_names
        if any(part.feature_names != names for part in parts):
            raise LengthsError(f"{self._path}: the new samples have other features than those in the file")
        rows = self._rows + sum(map(len, parts))
        if rows * (4 * len(names) + 12) > MAX_SAMPLE_BYTES // 2:
            raise LengthsError(f"{self._path}: full ({self._rows:,} samples); name another file")
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            with beside.open("wb") as file:
                with zipfile.ZipFile(file, "w") as new:
                    for name in _COLUMNS:
                        self._write(new, name, parts, rows)
                    for name, text in (("feature_names", names), ("source", parts[0].source)):
                        with new.open(f"{name}.npy", "w") as member:
                            npy.write_array(member, np.array(text), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._path)
        finally:
            beside.unlink(missing_ok=True)
        self._rows, self.feature_names = rows, names
        for part in parts:
            self.requests.update(part.request_ids.tolist())

    def _write(self, new: zipfile.ZipFile, name: str, parts: Sequence[Samples], rows: int) -> None:
        columns: list[NDArray[Any]] = [getattr(part, name) for part in parts]
        header = npy.header_data_from_array_1_0(columns[0]) | {
            "shape": (rows, *columns[0].shape[1:]),
            "fortran_order": False,
        }
        with new.open(f"{name}.npy", "w", force_zip64=True) as member:
            npy.write_array_header_1_0(member, header)
            if self._rows:
                with zipfile.ZipFile(self._path) as old, self._body(old, name) as body:
                    shutil.copyfileobj(body, member)
            for column in columns:
                member.write(np.ascontiguousarray(column).tobytes())

    def _body(self, old: zipfile.ZipFile, name: str) -> IO[bytes]:
        """The old rows of an array, after its header."""
        member = old.open(f"{name}.npy")
        if npy.read_magic(member) != (1, 0):
            raise ValueError(f"{name} has another version")
        shape, is_fortran, kind = npy.read_array_header_1_0(member)
        wanted = (self._rows, len(self.feature_names)) if name == "features" else (self._rows,)
        if shape != wanted or kind != _COLUMNS[name] or (is_fortran and len(shape) > 1):
            raise ValueError(f"{name} has the shape {shape} and the type {kind}")
        return member


@contextmanager
def locked_samples(path: Path) -> Iterator[SamplesFile]:
    """The samples file, while no other process adds to a file in its folder. Waits for them.

    Raises `OSError` if there is no such folder.
    """
    folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield SamplesFile(path)
    finally:
        os.close(folder)
