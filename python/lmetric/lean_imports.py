"""Imports at the start of a process: without garbage collection, and without unused packages."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


def import_structlog() -> None:
    """Imports structlog without rich: 90 ms of CPU time at the start of each process.

    structlog prints tracebacks by rich if it finds rich; the router's log has a form of its own.
    For the router's own processes only: in a program that embeds the router, rich may be wanted.
    """
    if "structlog" in sys.modules or "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # its import fails, as if not installed
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Imports without garbage collection, which takes a tenth of their CPU time."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Imports the server in a process of the router's own: see both functions above."""
    with uncollected():
        import_structlog()
        yield
