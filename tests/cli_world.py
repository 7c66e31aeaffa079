"""The command line in tests: in a process of its own, or faster, in the tests' process."""

import contextlib
import io
import os
import subprocess
import sys

import pytest

from lmetric.cli import main

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
