"""Structured logs on stderr. They never hold local variables: those are requests, with keys and prompts."""

import logging
import sys
from typing import TextIO

import structlog

from lmetric.config import Log

_MAX_FRAMES = 20


def processors(config: Log, colors: bool = False) -> list[structlog.typing.Processor]:
    """What turns a log event into a line: JSON or text, with tracebacks that name places and no values."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
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
    return [
        *shared,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def configure_logging(config: Log, stream: TextIO | None = None) -> None:
    """Sets up structlog, and the standard library's logging with it; `stream` is stderr by default."""
    stream = stream or sys.stderr
    level = logging.getLevelNamesMapping()[config.level.upper()]
    structlog.configure(
        processors=processors(config, stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    # aiohttp reports clients' malformed requests here; they are not the router's faults.
    logging.basicConfig(
        level=max(level, logging.WARNING), stream=stream, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
