"""The folder `state_folder`: its lock, and its files of counts that survive a restart."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import structlog

from lmetric._core import Budgets, LmetricError
from lmetric.config import ConfigError
from lmetric.server.fleet.periodic import periodic
from lmetric.server.fleet.problem import Problem
from lmetric.server.observe.usage import UsageTable

LOCK = "lock"  # the name of the file that a router locks
WRITE_SECONDS = 0.5  # time between two writes: a crash loses less than a second

log = structlog.get_logger("lmetric.state")


class StateFiles:
    """Files with counts, written off the event loop when the counts have changed.

    ``pattern``: of the files' names in the folder. ``save`` returns the contents to write by name;
    None: the file is removed. ``threaded``: another thread may call it. ``restore`` adds a content,
    and raises LmetricError for a broken one.
    """

    def __init__(
        self,
        folder: Path,
        pattern: str,
        save: Callable[[], Mapping[str, bytes | None]],
        restore: Callable[[bytes], None],
        *,
        threaded: bool = False,
    ) -> None:
        self._threaded = threaded
        self._folder = folder
        self._pattern = pattern
        self._save = save
        self._restore = restore
        self._written: Mapping[str, bytes | None] = {}  # by the last write
        self._pending: dict[str, bytes | None] = {}
        self.problem: Problem | None = None  # of the last write
        self.on_problem: Callable[[], object] = lambda: None  # called when it changes
        self._write_lock = asyncio.Lock()  # held by the one write that is in progress
        self._task: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Restores the contents. A broken file is renamed, and the router starts without it.

        Raises ConfigError if the folder is not usable.
        """
        place = self._folder
        try:
            contents = {}
            for place in sorted(self._folder.glob(self._pattern)):
                contents[place] = place.read_bytes()
        except OSError as error:
            raise _unusable(place, error) from None
        for path, content in contents.items():
            self._read(path, content)

    def _read(self, path: Path, content: bytes) -> None:
        try:
            self._restore(content)
        except LmetricError as error:
            broken = path.with_suffix(".broken")
            path.replace(broken)
            log.error(
                "a state file is broken; the router starts without it (restore a copy and restart)",
                reason=str(error),
                renamed_to=str(broken),
            )

    def start(self) -> None:
        """Starts to write the files."""
        self._task = periodic(f"state files {self._pattern}", WRITE_SECONDS, self.write)

    async def write(self) -> None:
        """Writes the counts that the files do not have, after a write that is in progress."""
        # The caller may be canceled (`stop`), but a write goes on in its thread.
        await asyncio.shield(asyncio.create_task(self._write_changed(), name="state files"))

    async def _write_changed(self) -> None:
        async with self._write_lock:
            saved = await asyncio.to_thread(self._save) if self._threaded else self._save()
            self._pending |= {name: new for name, new in saved.items() if self._written.get(name, b"") != new}
            if not self._pending:
                return
            try:
                await asyncio.to_thread(self._write, self._pending)
            except OSError as error:
                self._failed(error.strerror or str(error))
            else:
                self._written, self._pending = saved, {}
                if self.problem is not None:
                    self.problem = None
                    log.info("state files are written again", folder=str(self._folder))
                    self.on_problem()

    def _failed(self, reason: str) -> None:
        before, shown = self.problem, f"{self._folder}: {reason}"
        if before is not None and before.reason == shown:
            return
        log.error("cannot write a state file", folder=str(self._folder), reason=reason)
        cause = "state files cannot be written: a restart would lose usage and counts of budgets"
        fix = "free space or correct the permissions there; traffic continues"
        since = time.time() if before is None else before.since
        self.problem = Problem("state", cause, shown, fix, since=since)
        self.on_problem()

    def _write(self, contents: Mapping[str, bytes | None]) -> None:
        """Replaces files. A reader finds the old content or the new one."""
        for name, content in contents.items():
            path = self._folder / name
            if content is None:
                path.unlink(missing_ok=True)
                continue
            replace_file(path, content)

    async def stop(self) -> None:
        """Writes the files for the last time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self.write()


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file. The content is on disk when this returns. Raises OSError.

    Only the router's user may read the file: it may name tenants and hold hashes of keys.
    """
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # an old file of a killed router may have another mode
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # for the new name of the file
    finally:
        os.close(folder)


class StateFolder:
    """The state folder of a router, and its files of counts.

    No other router may use the folder until `stop`, or until the process ends. ``on_problem`` is
    called when `problem` changes. Raises ConfigError if the folder is in use, or is not usable.
    """

    def __init__(
        self,
        folder: Path,
        budgets: Budgets,
        usage: UsageTable,
        on_problem: Callable[[], object] = lambda: None,
    ) -> None:
        self._lock = _locked(folder)

        def save() -> dict[str, bytes]:
            return {"budgets.bin": budgets.save((time.monotonic(), time.time()))}

        def restore(saved: bytes) -> None:
            budgets.restore(saved, (time.monotonic(), time.time()))

        self._files = (
            StateFiles(folder, "budgets.bin", save, restore=restore, threaded=True),
            StateFiles(folder, "usage-*.json", usage.save, restore=usage.restore),
        )
        for each in self._files:
            each.read()
            each.on_problem = on_problem

    @property
    def problem(self) -> Problem | None:
        """Why a file cannot be written now; None: all can."""
        return next((each.problem for each in self._files if each.problem is not None), None)

    def start(self) -> None:
        """Starts to write the files."""
        for each in self._files:
            each.start()

    async def stop(self) -> None:
        """Writes the files for the last time, and frees the folder."""
        for each in self._files:
            await each.stop()
        self._lock.close()


def _locked(folder: Path) -> TextIO:
    """Locks a folder, which it makes if needed. Returns the open file that holds the lock.

    The kernel frees the lock when the process ends, also after SIGKILL. Child processes do not
    inherit it. Raises ConfigError.
    """
    place = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "writable").touch()
        (folder / "writable").unlink()
        place = folder / LOCK
        file = place.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip()
            raise ConfigError(
                f"state_folder: another router uses {folder}"
                + (f" (process {holder})" if holder else "")
                + ", and two would overwrite each other's files; stop that router, or set another folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except OSError as error:
        raise _unusable(place, error) from None
    return file


def _unusable(place: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"state_folder: cannot use {place}: {error.strerror}; expected a folder in which the router may "
        "write and lock files"
    )
