"""The tables of docs/how-to/monitoring.md are what the raw files make."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = "docs/how-to/monitoring.md"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/observe/report.py", "--check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_the_tables_have_the_figures_of_the_raw_files() -> None:
    done = check(ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_figure_that_differs_is_found(tmp_path: Path) -> None:
    for folder in ("bench/results", "bench/observe", "docs/how-to"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "bench" / "common.py", tmp_path / "bench")
    page = tmp_path / PAGE
    text, count = re.subn(r"\| nothing \| \d", "| nothing | 9", page.read_text())
    assert count == 1
    page.write_text(text)
    done = check(tmp_path)
    assert done.returncode == 1
    assert f"{PAGE} is stale" in done.stderr
