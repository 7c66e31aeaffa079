"""The studies in `bench`: running their drivers, and their modules, for tests of what figures rest on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Study:
    """A study by its folder in `bench`."""

    name: str

    @property
    def driver(self) -> Path:
        return ROOT / "bench" / self.name / "run.py"

    @property
    def results(self) -> Path:
        """What is shipped."""
        return self.driver.parent / "results"

    def run(self, *argv: str | Path) -> subprocess.CompletedProcess[str]:
        """The driver, to its end."""
        return subprocess.run([sys.executable, self.driver, *argv], capture_output=True, text=True, cwd=ROOT)

    def made(self, folder: Path, *argv: str) -> dict[str, Any]:
        """What a run that succeeds wrote to `folder`, by figure."""
        done = self.run(*argv, "--results", folder)
        assert done.returncode == 0, done.stderr
        return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}

    def importable(self) -> Iterator[None]:
        """What lies beside the driver can be imported for a while: studies have modules of the same names."""
        before, path = set(sys.modules), list(sys.path)
        bench = self.driver.parents[1]
        sys.path[:0] = [str(self.driver.parent), str(bench)]
        yield
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(bench) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
