"""The studies in `bench`: runs their drivers and imports their modules, for tests of figures."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def _load(name: str) -> ModuleType:
    """A module of `bench`, without its folder on the path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


result_files = _load("result_files")
canary_bench = _load("canary/run")


def add(folder: Path, figure: str, number: float) -> None:
    """Adds to the first number of a figure."""
    path = result_files.path_of(folder, figure)
    rows = result_files.read_table(path)
    first = next(values for values in rows[0].values() if isinstance(values, list))
    first[0] += number
    result_files.write_table(path, rows)


@dataclass(frozen=True)
class Study:
    """A study by its folder in `bench`."""

    name: str
    script: str = "run.py"
    threads: bool = False  # of its simulations; others fork processes, which needs a process without threads

    @property
    def driver(self) -> Path:
        return ROOT / "bench" / self.name / self.script

    @property
    def results(self) -> Path:
        """The folder of the shipped results."""
        return self.driver.parent / "results"

    def run(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """The driver, to its end."""
        if self.threads:
            return self._here(*argv)
        return subprocess.run([sys.executable, self.driver, *argv], capture_output=True, text=True, cwd=ROOT)

    def _here(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """The driver, to its end, in this process: a new one takes a second for its imports."""
        words = [str(self.driver), *map(str, argv)]
        out, errors = io.StringIO(), io.StringIO()
        code: object = 0
        with (
            contextlib.contextmanager(self.importable)(),
            contextlib.chdir(ROOT),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(errors),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "argv", words)
            try:
                runpy.run_path(str(self.driver), run_name="__main__")
            except SystemExit as ended:
                code = ended.code or 0
        if not isinstance(code, int):  # Python prints it
            print(code, file=errors)
            code = 1
        return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())

    def check(self, *argv: str | Path) -> tuple[int, str]:
        """`--check` of the driver: its exit code, and what it prints as errors."""
        done = self._here("--check", *argv)
        return done.returncode, done.stderr

    def made(self, folder: Path, *argv: str) -> dict[str, Any]:
        """The figures that a successful run wrote to `folder`, by name."""
        done = self.run(*argv, "--results", folder)
        assert done.returncode == 0, done.stderr
        return {name: result_files.read_figure(folder, name) for name in result_files.read_index(folder)}

    def importable(self) -> Iterator[None]:
        """Makes modules beside the driver importable for a while: studies share module names."""
        before, path = set(sys.modules), list(sys.path)
        bench = self.driver.parents[1]
        sys.path[:0] = [str(self.driver.parent), str(bench)]
        yield
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(bench) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
