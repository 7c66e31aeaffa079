"""Structured logs on stderr. Tracebacks omit local variables: these may hold keys and prompts.

Lines that cannot be written are dropped and counted: a full disk must not fail requests.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

import structlog
from prometheus_client.core import CounterMetricFamily, Metric

from lmetric.config import Log
from lmetric.printable import printable
from lmetric.server.observe.request_log import add_request_ids
from lmetric.server.observe.startup import LISTENING, startup_block

_MAX_FRAMES = 20
_QUOTED = frozenset(" \t=\r\n\"'")  # of structlog's ConsoleRenderer


class LogWriter:
    """Writes log lines to a stream, and drops the lines that it cannot write.

    The stream may be a file on a full disk, a file at its size limit, or a pipe without a reader.
    When a line can be written again, a warning has the number of dropped lines and the reason.
    """

    dropped_total = 0  # lines, over all writers of the process

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._dropped = 0
        self._reason = ""

    def msg(self, line: str) -> None:
        """Writes a line, or drops it."""
        with self._lock:
            try:
                self._stream.write(f"{line}\n")
                self._stream.flush()
            except OSError as error:
                self._dropped += 1
                self._reason = error.strerror or str(error)
                LogWriter.dropped_total += 1
                return
            dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("log lines were dropped", lines=dropped, reason=self._reason)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg

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
        structlog.contextvars.merge_contextvars,
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
    line = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)

    def text(logger: Any, name: str, event: structlog.typing.EventDict) -> str:
        return startup_block(event) if event["event"] == LISTENING else line(logger, name, event)

    return [*shared, text]


def _escape(logger: Any, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escapes control characters in texts that the renderer writes as they are.

    It writes texts with spaces, quotes, line ends or `=` as Python literals, which have escapes.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable() and not _QUOTED & set(value):
            event[key] = printable(value)
    return event


def configure_logging(config: Log, stream: TextIO | None = None) -> None:
    """Sets up structlog and the standard library's logging. `stream` is stderr by default."""
    stream = stream or sys.stderr
    level = logging.getLevelNamesMapping()[config.level.upper()]
    writer = LogWriter(stream)
    structlog.configure(
        processors=processors(config, stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,
    )
    # aiohttp logs clients' malformed requests here. They are not faults of the router.
    logging.basicConfig(
        level=max(level, logging.WARNING), stream=stream, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
