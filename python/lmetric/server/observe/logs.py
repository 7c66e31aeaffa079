"""Structured logs on stderr. Tracebacks omit local variables: these may hold keys and prompts."""

import logging
import sys
from typing import Any, TextIO

import structlog

from lmetric.config import Log
from lmetric.server.observe.startup import LISTENING, startup_block

_MAX_FRAMES = 20


def processors(config: Log, colors: bool = False) -> list[structlog.typing.Processor]:
    """Returns the structlog processors that render an event as a line of JSON or text.

    Tracebacks name files and lines, never values. The text of the event `listening` is a block of
    several lines.
    """
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
    line = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)

    def text(logger: Any, name: str, event: structlog.typing.EventDict) -> str:
        return startup_block(event) if event["event"] == LISTENING else line(logger, name, event)

    return [*shared, text]


def configure_logging(config: Log, stream: TextIO | None = None) -> None:
    """Sets up structlog and the standard library's logging. `stream` is stderr by default."""
    stream = stream or sys.stderr
    level = logging.getLevelNamesMapping()[config.level.upper()]
    structlog.configure(
        processors=processors(config, stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    # aiohttp logs clients' malformed requests here. They are not faults of the router.
    logging.basicConfig(
        level=max(level, logging.WARNING), stream=stream, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
