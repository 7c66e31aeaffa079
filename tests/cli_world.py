"""The command line in tests: in a process of its own, or faster, in the tests' process."""

import asyncio
import contextlib
import io
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from lmetric._core import LmetricError
from lmetric.cli import describe, exit_code, main

TURN = threading.Lock()  # a command on a thread of this process has the standard streams for itself
COMMAND = [sys.executable, "-m", "lmetric.cli"]


def process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new process, which takes a second of CPU time for its imports."""
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=100,
        check=False,
    )


def call(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in this process, with the same outcome (`test_cli.py` compares both)."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", ["lmetric-router", *words])
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code or 0
    assert isinstance(code, int)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


async def beside(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`call` on a thread, beside the test's loop. A command that never ends fails only its test."""
    done: Future[subprocess.CompletedProcess[str]] = Future()

    def run() -> None:
        with TURN:
            try:
                done.set_result(call(*words, **environment))
            except BaseException as error:
                done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wait_for(asyncio.wrap_future(done), 90)


async def refused(*, picks: bool = False, file: str | None = None, **values: Any) -> tuple[int, str]:
    """Runs a server that ends before it serves, in the test's loop, beside its other servers.

    ``values``: settings, with `__` for the dot. Returns the exit code and the line of the command.
    """
    from lmetric.config import load_config
    from lmetric.server import serve
    from lmetric.server.epp.settings import for_gateway

    given = {name.replace("__", "."): value for name, value in values.items()}
    config = load_config(None if file is None else Path(file), given)
    with pytest.raises((LmetricError, OSError)) as raised:
        await serve(for_gateway(config) if picks else config, picks=picks)
    code = exit_code(raised.value)
    assert code is not None, "a traceback"
    return code, describe(raised.value)
