"""Writes records to rotating files on its own thread. A slow or full disk delays no request."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import structlog

from lmetric.config import RecordsConfig

log = structlog.get_logger("lmetric.records")

PREFIX, SUFFIX = "records-", ".jsonl"
RETRY_SECONDS = 5.0  # pause after a failed write; records that come meanwhile are lost
FLUSH_SECONDS = 0.5
CLOSE_SECONDS = 5.0  # for the last records at the end of the router
BATCH = 64  # records written at once
OPEN_SHARE = 0.25  # of the total size, for the open files; most

# A line of a file, as an object for JSON.
Line = dict[str, Any]


_ELSEWHERE = "or set records.path to another folder"
_FIXES = {
    errno.ENOSPC: "free space there, or set a lower records.total_bytes",
    errno.EDQUOT: "raise the disk quota of the router's user, or set a lower records.total_bytes",
    errno.EACCES: f"give the router's user write permission there, {_ELSEWHERE}",
    errno.EPERM: f"give the router's user write permission there, {_ELSEWHERE}",
    errno.EROFS: f"mount it for writing, {_ELSEWHERE}",
    errno.EEXIST: f"a file has the name of the folder: move it, {_ELSEWHERE}",
    errno.ENOTDIR: f"a part of the path is a file: move it, {_ELSEWHERE}",
    errno.ENOENT: f"create the folder, {_ELSEWHERE}",
    errno.EMFILE: "raise the limit of open files (ulimit -n, systemd: LimitNOFILE)",
    errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
    errno.EIO: f"check the disk, {_ELSEWHERE}",
}


class WriteFailure(NamedTuple):
    """Why records cannot be written now. ``since``: Unix time in seconds."""

    folder: str
    reason: str
    fix: str
    since: float


class RecordWriter:
    """A bounded queue of records, and the thread that writes them.

    ``head`` returns the first lines of each file, and ``line`` makes the line of an item of the
    queue; the thread calls both. ``workers``: that write to the folder, each to files of its own.
    Lines are lost, and counted in `outcomes`, if the queue is full or the disk refuses them.
    """

    def __init__(
        self,
        config: RecordsConfig,
        folder: Path,
        head: Callable[[], list[Line]],
        line: Callable[[Any], Line],
        workers: int = 1,
    ) -> None:
        self._config, self._folder = config, folder.absolute()
        # Open files of all workers; a rolling restart has two processes for each of them.
        files = 1 if workers == 1 else 2 * workers
        self._file_bytes = min(config.file_bytes, int(OPEN_SHARE * config.total_bytes) // files)
        # All files before a worker opens another one.
        self._bytes_before_open = config.total_bytes - files * self._file_bytes
        self._head, self._line = head, line
        self.outcomes = Counter({"written": 0, "queue_full": 0, "disk": 0, "error": 0})
        self.written_bytes = 0
        # Bytes of prompts that came and went: each is written by one thread alone.
        self._put_bytes = self._taken_bytes = 0
        self._items: deque[tuple[Any, int]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._file: BinaryIO | None = None
        self._size = 0
        self._number = 0
        self._retry_at = 0.0
        self.failure: WriteFailure | None = None  # of the last write
        self._thread = threading.Thread(target=self._run, name="lmetric-records", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of waiting records."""
        return len(self._items)

    @property
    def waiting_bytes(self) -> int:
        """Memory of the prompts of waiting records."""
        return self._put_bytes - self._taken_bytes

    def put(self, item: Any, size: int) -> None:
        """Adds an item; ``size``: bytes of its prompt. Never waits: a full queue loses the item."""
        config = self._config
        if len(self._items) >= config.queue_records or self.waiting_bytes + size > config.queue_bytes:
            self.outcomes["queue_full"] += 1
            return
        self._put_bytes += size
        self._items.append((item, size))
        if len(self._items) >= BATCH:  # otherwise the thread looks by itself
            self._wake.set()

    def count_error(self) -> None:
        """Counts a record that an exception prevented, and logs the first one."""
        self.outcomes["error"] += 1
        if self.outcomes["error"] == 1:
            log.exception("a record could not be made; further ones are only counted")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Writes the waiting records and ends the thread, in at most these seconds."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        if left := len(self._items):
            log.warning("records were lost at the end", records=left)

    # -- on the thread

    def _run(self) -> None:
        self._write_lines([])  # the head of the first file
        while True:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            closing = self._closing
            while self._items:
                self._write_batch()
            if closing and not self._items:
                break
        self._close_file()

    def _write_batch(self) -> None:
        lines: list[bytes] = []
        taken = 0
        while self._items and len(lines) < BATCH:
            item, size = self._items.popleft()
            taken += size
            if time.monotonic() < self._retry_at:
                self.outcomes["disk"] += 1
                continue
            try:
                lines.append(orjson.dumps(self._line(item)) + b"\n")
            except Exception:
                self.count_error()
        self._taken_bytes += taken
        if lines:
            self._write_lines(lines)

    def _write_lines(self, lines: list[bytes]) -> None:
        try:
            self._append(lines)
        except OSError as error:
            self._fail(error, len(lines))
        except Exception:  # a defect here must not end the thread
            self._close_file()
            self.count_error()
            self.outcomes["error"] += max(len(lines) - 1, 0)
        else:
            self.outcomes["written"] += len(lines)
            if self.failure is not None:
                self.failure = None
                log.info("records are written again", folder=str(self._folder), lost=self.outcomes["disk"])

    def _append(self, lines: list[bytes]) -> None:
        if self._is_deleted:
            self._close_file()
        for line in lines or [b""]:  # without lines: the head alone
            if self._file is not None and self._size + len(line) > self._file_bytes:
                self._file.flush()  # may fail; closing hides that
                self._close_file()
            file = self._file or self._open()
            self._write(file, line)
        file.flush()

    @property
    def _is_deleted(self) -> bool:
        """Whether somebody, or another worker that needed room, has deleted the open file."""
        return self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0

    def _write(self, file: BinaryIO, data: bytes) -> None:
        file.write(data)
        self._size += len(data)
        self.written_bytes += len(data)

    def _open(self) -> BinaryIO:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._number += 1
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = self._folder / f"{PREFIX}{stamp}-{os.getpid()}-{self._number:06}{SUFFIX}"
        self._delete_oldest()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = file = os.fdopen(descriptor, "wb", buffering=1 << 18)
        self._size = 0
        try:
            self._write(file, b"".join(orjson.dumps(line) + b"\n" for line in self._head()))
            file.flush()
        except BaseException:
            self._close_file()
            path.unlink(missing_ok=True)  # else each try on a full disk would leave a file
            raise
        return file

    def _delete_oldest(self) -> None:
        """Deletes the files with the oldest last record until all open files fit into the total.

        Other workers may open a file at the same moment, and the present ones grow. A file that
        another worker still writes is among the newest, even if it was opened long ago.
        """
        found: list[tuple[int, Path, int]] = []
        for path in self._folder.glob(f"{PREFIX}*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another worker has deleted it
                status = path.stat()
                found.append((status.st_mtime_ns, path, status.st_size))
        total = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if total <= self._bytes_before_open:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # Closing writes the buffer again, which a full disk refuses again.
            with contextlib.suppress(OSError):
                file.close()

    def _fail(self, error: OSError, lost: int) -> None:
        """Counts lost lines. The next write begins a new file, after a pause."""
        self.outcomes["disk"] += lost
        self._close_file()
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self.failure is None:
            reason = error.strerror or str(error)
            fix = _FIXES.get(error.errno or 0, f"check the folder and its disk, {_ELSEWHERE}")
            folder = str(self._folder)
            self.failure = WriteFailure(folder, reason, fix, time.time())
            log.error("records cannot be written; traffic continues", folder=folder, reason=reason, fix=fix)
