"""Runs this package's modules as commands. Errors that users can cause end in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from lmetric._core import LmetricError

FAILED, USAGE = 1, 2


def run_command(command: Callable[..., None]) -> None:
    """Run `command` as a program, and exit: 0, or 2 after bad input, or 1 after other failures."""
    # Independent of lmetric.cli, because a training environment can lack the router's dependencies.
    try:
        typer.run(command)
    except LmetricError as error:
        _end(str(error), USAGE)
    except OSError as error:
        named = error.filename is not None
        _end(f"{error.filename}: {error.strerror}" if named else str(error), USAGE if named else FAILED)


def _end(text: str, code: int) -> None:
    print(f"train_lengths: {text}", file=sys.stderr)
    sys.exit(code)
