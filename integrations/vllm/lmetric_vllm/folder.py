"""Files of hidden states: which requests, under which names, and how many bytes. Needs no vLLM."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from lmetric_vllm.settings import SettingsError

EVERY = 20
"""Generated tokens between two states of a request (STAR, section 4.4)."""

SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_COUNTED_PER_WRITE = 100  # files, on average, in a folder that stays full


def name_of(request_id: str) -> str:
    """A file name for a request, 32 hexadecimal digits: a client chooses a part of the ID, so the
    ID itself is no safe name."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:32]


def is_collected(request_id: str, share: float) -> bool:
    """Whether a request is in the share, from 0 to 1: by its name, so each process agrees."""
    return int(name_of(request_id)[:13], 16) < share * (1 << 52)


class StatesFolder:
    """A folder of files that together have at most `max_bytes`. Only one engine may write to it.

    Raises:
        SettingsError: the engine cannot write to the folder.
    """

    def __init__(self, path: str | Path, max_bytes: int) -> None:
        self._path, self._max_bytes = Path(path), max_bytes
        if not self._path.is_dir() or not os.access(self._path, os.W_OK | os.X_OK):
            raise SettingsError(
                "--kv-transfer-config: kv_connector_extra_config.shared_storage_path: expected a folder "
                f"that the engine can write to, got {str(path)!r}"
            )
        for partial in self._path.glob(f"*{_PARTIAL}"):  # of an engine that ended while it wrote
            partial.unlink(missing_ok=True)
        self._held_bytes = max_bytes  # at most this many are there; the first write counts
        self._refusals = 0  # writes to refuse before files are counted again

    def write(self, name: str, data: bytes) -> bool:
        """Adds a whole file, readable by its owner alone; False if it would exceed the limit.

        Raises `OSError` if the disk refuses it.
        """
        if self._held_bytes + len(data) > self._max_bytes and not self._has_room(len(data)):
            return False
        partial = self._path / f"{name}{_PARTIAL}"
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            partial.rename(self._path / f"{name}{SUFFIX}")
        finally:
            partial.unlink(missing_ok=True)
        self._held_bytes += len(data)
        return True

    def _has_room(self, size: int) -> bool:
        """Counts the files, as some may have been read and deleted."""
        if self._refusals:
            self._refusals -= 1
            return False
        files = held = 0
        with os.scandir(self._path) as entries:
            for entry in entries:
                files += 1
                try:
                    held += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:  # read and deleted just now
                    continue
        self._held_bytes = held
        if held + size <= self._max_bytes:
            return True
        self._refusals = files // _COUNTED_PER_WRITE
        return False
