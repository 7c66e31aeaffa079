"""Files of counts that survive a restart, in the folder `state_folder`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from lmetric._core import Budgets, LmetricError
from lmetric.config import ConfigError
from lmetric.server.fleet.periodic import periodic
from lmetric.server.observe.usage import UsageTable

WRITE_SECONDS = 0.5  # time between two writes: a crash loses less than a second

log = structlog.get_logger("lmetric.state")


class StateFile:
    """A file with counts, written off the event loop when they have changed.

    ``save`` returns the content; ``restore`` adds a content, and raises LmetricError for a broken
    one.
    """

    def __init__(self, path: Path, save: Callable[[], bytes], restore: Callable[[bytes], None]) -> None:
        self._path = path
        self._save = save
        self._restore = restore
        self._written: bytes | None = None
        self._failed = False
        self._task: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Restores the counts. A broken file is renamed, and the counts begin at 0.

        Raises ConfigError if the folder is not usable.
        """
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else None
            self._write(b"" if content is None else content)
        except OSError as error:
            raise ConfigError(
                f"state_folder: cannot use {path}: {error.strerror}; expected a folder in which the router "
                "may write"
            ) from None
        if not content:
            return
        try:
            self._restore(content)
        except LmetricError as error:
            broken = path.with_suffix(".broken")
            path.replace(broken)
            log.error(
                "a state file is broken; its counts begin at 0 (to count on, restore a copy and restart)",
                reason=str(error),
                renamed_to=str(broken),
            )

    def start(self) -> None:
        """Starts to write the file."""
        self._task = periodic(f"state file {self._path.name}", WRITE_SECONDS, self.write)

    async def write(self) -> None:
        """Writes the counts, unless the file has them."""
        content = self._save()
        if content == self._written:
            return
        try:
            await asyncio.to_thread(self._write, content)
        except OSError as error:
            if not self._failed:
                log.error("cannot write a state file", path=str(self._path), reason=error.strerror)
            self._failed = True
        else:
            self._written, self._failed = content, False

    def _write(self, content: bytes) -> None:
        """Replaces the file. A reader finds the old content or the new one."""
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    async def stop(self) -> None:
        """Writes the file for the last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.write()


def state_files(folder: Path | None, budgets: Budgets, usage: UsageTable) -> Sequence[StateFile]:
    """Returns the files of a folder, read; None: no files. Raises ConfigError."""
    if folder is None:
        return ()
    files = (
        StateFile(folder / "budgets.bin", budgets.save, budgets.restore),
        StateFile(folder / "usage.json", usage.save, usage.restore),
    )
    for file in files:
        file.read()
    return files
