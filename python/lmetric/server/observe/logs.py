"""Structured logs on stderr. Tracebacks omit local variables: these may hold keys and prompts.

Lines that cannot be written are dropped and counted: a full disk must not fail requests, and a pipe
whose reader is stuck must not stop them.
"""

import atexit
import fcntl
import logging
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import structlog
from prometheus_client.core import CounterMetricFamily, Metric

from lmetric.config import Log
from lmetric.printable import printable
from lmetric.server.execution.request_log import add_request_ids
from lmetric.server.observe.startup import LISTENING, startup_block

_MAX_FRAMES = 20
_QUOTED = frozenset(" \t=\r\n\"'")  # of structlog's ConsoleRenderer
QUEUE_BYTES = 1 << 20  # of lines that wait for the stream; further lines are dropped
GATHER_SECONDS = 0.005  # lines of this time are written at once
FLUSH_SECONDS = 1.0  # for the last lines at the end of the process
# Fields of all lines of the process: the worker, if there are several. Context variables would be
# missing in threads, and in tasks that other tasks have started.
process_fields: dict[str, Any] = {}


class LogWriter:
    """Writes log lines to a stream on a thread, and drops the lines that it cannot write.

    The stream may be a file on a full disk, a file at its size limit, a pipe without a reader, or a
    pipe whose reader is stuck. No line waits for the stream on the event loop. After a loss, a
    warning has the number of dropped lines and the reason.

    It is also the stream of the standard library's logging (`write`).
    """

    dropped_total = 0  # lines, over all writers of the process

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
            # If logrotate truncates the file (copytruncate), the next line is at its start.
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        except (OSError, ValueError, AttributeError):
            self._descriptor = None  # not a file of the system
        # Bytes of lines that came and went: each is written under `_lock` or by the thread alone.
        self._put_bytes = self._taken_bytes = 0
        self._queue: SimpleQueue[bytes | threading.Event | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._dropped = 0
        self._reason = ""
        self._cut = False  # the last byte written ended no line
        self._thread: threading.Thread | None = None  # starts with the first line

    def msg(self, line: str) -> None:
        """Adds a line to the queue, or drops it. Never waits for the stream."""
        data = f"{line}\n".encode(errors="backslashreplace")
        with self._lock:
            if self._put_bytes - self._taken_bytes + len(data) > QUEUE_BYTES:
                self._drop(1, "the reader of the log is too slow")
                return
            self._put_bytes += len(data)
            self._queue.put(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lmetric-log", daemon=True)
                self._thread.start()

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg

    def write(self, text: str) -> None:
        """Adds lines of the standard library's logging."""
        self.msg(text.rstrip("\n"))

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Waits until the lines so far are written, at most ``seconds``."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(seconds)

    def close(self) -> None:
        """Writes the lines so far, and ends the thread."""
        self.flush()
        with self._lock:
            if self._thread is not None:
                self._thread = None
                self._queue.put(None)

    def _drop(self, lines: int, reason: str) -> None:
        """Counts lines that are lost. The caller has the lock."""
        self._dropped += lines
        self._reason = reason
        LogWriter.dropped_total += lines

    # -- on the thread

    def _run(self) -> None:
        while True:
            lines: list[bytes] = []
            item = self._queue.get()
            if isinstance(item, bytes):
                time.sleep(GATHER_SECONDS)
            while isinstance(item, bytes):
                lines.append(item)
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    break
            if lines:
                self._write_lines(lines)
            if isinstance(item, threading.Event):
                item.set()
            elif item is None:
                return

    def _write_lines(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        reason = None
        try:
            self._write_all(data)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            reason = getattr(error, "strerror", None) or str(error)
        with self._lock:
            self._taken_bytes += len(data)
            if reason is not None:
                self._drop(len(lines), reason)
                return
            dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("log lines were dropped", lines=dropped, reason=self._reason)

    def _write_all(self, data: bytes) -> None:
        if self._descriptor is None:
            self.stream.write(data.decode())
            self.stream.flush()
            return
        # Not through the stream's buffer: its lock would be held at the end of the interpreter.
        if self._cut:  # on a line of its own: a full disk took only a part of the last one
            data = b"\n" + data
        while data:
            try:
                written = os.write(self._descriptor, data)
            except BlockingIOError:
                select.select((), (self._descriptor,), ())
                continue
            self._cut = not data[:written].endswith(b"\n")
            data = data[written:]

    @staticmethod
    def metrics() -> Iterator[Metric]:
        """Yields the metrics of the log."""
        yield CounterMetricFamily(
            "lmetric_log_lines_dropped",
            "Log lines that could not be written, for example because the disk was full",
            LogWriter.dropped_total,
        )


log = structlog.get_logger("lmetric.log")


def processors(config: Log, colors: bool = False) -> list[structlog.typing.Processor]:
    """Returns the structlog processors that render an event as a line of JSON or text.

    Tracebacks name files and lines, never values. The text of the event `listening` is a block of
    several lines.
    """
    shared: list[structlog.typing.Processor] = [
        _add_process_fields,
        add_request_ids,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if config.json_lines:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=_MAX_FRAMES)
        return [
            *shared,
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(default=str),
        ]
    shared.append(_escape)
    line = structlog.dev.ConsoleRenderer(
        colors=colors, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )

    def text(logger: Any, name: str, event: structlog.typing.EventDict) -> str:
        return startup_block(event) if event["event"] == LISTENING else line(logger, name, event)

    return [*shared, text]


def _add_process_fields(
    logger: Any, name: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key, value in process_fields.items():
        event.setdefault(key, value)
    return event


def _escape(logger: Any, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escapes control characters in texts that the renderer writes as they are. Paths become texts.

    It writes texts with spaces, quotes, line ends or `=` as Python literals, which have escapes.
    """
    for key, value in event.items():
        if isinstance(value, PurePath):
            value = event[key] = str(value)
        if isinstance(value, str) and not value.isprintable() and not _QUOTED & set(value):
            event[key] = printable(value)
    return event


def configure_logging(config: Log, stream: TextIO | None = None) -> None:
    """Sets up structlog and the standard library's logging. `stream` is stderr by default."""
    stream = stream or sys.stderr
    level = logging.getLevelNamesMapping()[config.level.upper()]
    writer = _writer(stream)
    structlog.configure(
        processors=processors(config, stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,
    )
    # aiohttp logs clients' malformed requests here. They are not faults of the router.
    logging.basicConfig(
        level=max(level, logging.WARNING), stream=writer, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


_current: LogWriter | None = None


def _writer(stream: TextIO) -> LogWriter:
    """Returns the process's writer. A reload of the configuration keeps it."""
    global _current
    if _current is None:
        atexit.register(flush_logs)
    elif _current.stream is stream:
        return _current
    else:
        _current.close()
    _current = LogWriter(stream)
    return _current


def flush_logs() -> None:
    """Waits until the log lines so far are written, at most `FLUSH_SECONDS`."""
    if _current is not None:
        _current.flush()
