"""The command line.

Data goes to stdout, everything else to stderr. docs/reference/cli.md lists the exit codes.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

from lmetric.lean_imports import uncollected
from lmetric.printable import printable

OK, FAILED, USAGE, PORT_IN_USE, INTERRUPTED = 0, 1, 2, 3, 130


def main() -> None:
    """Run ``lmetric-router`` and exit. Errors that users can cause end in one line, not a
    traceback."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from lmetric.standard_streams import open_closed

        open_closed()
    if os.getpid() == 1:  # the kernel ignores SIGTERM to a container's first process without a handler
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        completing = os.environ.get("COMP_WORDS", "") + os.environ.get("_TYPER_COMPLETE_ARGS", "")
        with uncollected():
            from lmetric.cli.app import build

            app = build([*sys.argv[1:], *completing.split()])
        code = app(prog_name="lmetric-router", standalone_mode=False)
        sys.stdout.flush()  # a failure at the exit of Python has no message
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Without this, Python reports it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Exception as error:
        from lmetric.cli.usage import UsageError, usage_line

        if isinstance(error, UsageError) and type(error).__name__ != "NoArgsIsHelpError":
            print(printable(usage_line(error)), file=sys.stderr)
            sys.exit(USAGE)
        if hasattr(error, "show"):  # the help, or another message of the library
            error.show()
            sys.exit(USAGE)
        code = exit_code(error)
        if code is None:
            raise
        print(printable(f"lmetric-router: {describe(error)}", "\n\t"), file=sys.stderr)
        sys.exit(code)


def exit_code(error: Exception) -> int | None:
    """The exit code of an error that a user can cause; None for a defect of the program."""
    from lmetric._core import BadValueError, ExpressionError, LmetricError, UnknownNameError
    from lmetric.config import ConfigError
    from lmetric.engines.errors import EngineStartError
    from lmetric.profiles import ProfileError

    if isinstance(error, BadValueError | ConfigError | ExpressionError | ProfileError | UnknownNameError):
        return USAGE
    if isinstance(error, EngineStartError) and isinstance(error.__cause__, Exception):
        return exit_code(error.__cause__) or FAILED
    if isinstance(error, LmetricError | EngineStartError):
        return FAILED
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # a full disk is no wrong usage
            return FAILED
        if error.filename is not None:
            return USAGE
        unavailable = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES)
        return PORT_IN_USE if error.errno in unavailable else FAILED
    return None


def describe(error: Exception) -> str:
    """The message of an error, one line for each problem."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error).strip() or type(error).__name__
