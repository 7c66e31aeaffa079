"""The chart and the table of the README are what the stored results make."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "bench/headline.py", "--check"]


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(COMMAND, cwd=root, capture_output=True, text=True)


def test_the_readme_has_the_figures_of_the_results() -> None:
    done = check(ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_figure_that_differs_is_found(tmp_path: Path) -> None:
    results = "bench/reproduce/results"
    shutil.copytree(ROOT / results, tmp_path / results)
    for file in (*ROOT.glob("bench/*.py"), ROOT / "README.md"):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("| **2.14 / 21** |", "| **1.16 / 21** |"))
    done = check(tmp_path)
    assert done.returncode == 1
    assert "README.md differs from 21.runs.csv" in done.stderr
