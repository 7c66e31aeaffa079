"""The tables of bench/figures.md are what the raw files make."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = "bench/figures.md"
OBSERVE, DEPLOYMENT = ["bench/observe/report.py"], ["bench/deployment.py", "--report"]


def check(root: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *command, "--check"]
    return subprocess.run(argv, cwd=root, capture_output=True, text=True)


@pytest.mark.parametrize("command", [OBSERVE, DEPLOYMENT])
def test_the_tables_have_the_figures_of_the_raw_files(command: list[str]) -> None:
    done = check(ROOT, command)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("command", "shown"), [(OBSERVE, "| nothing | "), (DEPLOYMENT, "| 256 | 6")])
def test_a_figure_that_differs_is_found(command: list[str], shown: str, tmp_path: Path) -> None:
    for folder in ("bench/results", "bench/http", "bench/observe"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in (*ROOT.glob("bench/*.py"), ROOT / PAGE):
        shutil.copy(file, tmp_path / "bench")
    page = tmp_path / PAGE
    text = page.read_text()
    assert text.count(shown) == 1
    page.write_text(text.replace(shown, f"{shown}9"))
    done = check(tmp_path, command)
    assert done.returncode == 1
    assert PAGE in done.stderr
