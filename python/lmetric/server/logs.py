"""Structured logs on stderr."""

import logging
import sys

import structlog

from lmetric.config import Log


def configure_logging(config: Log) -> None:
    """Sets up structlog, and the standard library's logging with it."""
    level = logging.getLevelNamesMapping()[config.level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if config.json_lines:
        ends: list[structlog.typing.Processor] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=str),
        ]
    else:
        ends = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    # aiohttp tells of clients' malformed requests here; they are no fault of ours.
    logging.basicConfig(
        level=max(level, logging.WARNING), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
