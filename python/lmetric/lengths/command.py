"""How this package's modules run as commands: what a user can cause ends in one line, as in `lmetric.cli`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from lmetric._core import LmetricError

FAILED, USAGE = 1, 2


def run_command(command: Callable[..., None]) -> None:
    """Run `command` as a program, and exit: 0, or 2 after bad input, or 1 after other failures."""
    # Not lmetric.cli's own: a training environment need not have what a router needs.
    try:
        typer.run(command)
    except LmetricError as error:
        _end(str(error), USAGE)
    except OSError as error:
        named = error.filename is not None
        _end(f"{error.filename}: {error.strerror}" if named else str(error), USAGE if named else FAILED)


def _end(text: str, code: int) -> None:
    print(f"lmetric.lengths: {text}", file=sys.stderr)
    sys.exit(code)
