"""The reports beside the deployment pages are what the raw files make."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPORT = "docs/how-to/sizing_report.md"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/deployment.py", "--report", "--check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_the_reports_have_the_figures_of_the_raw_files() -> None:
    done = check(ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_figure_that_differs_is_found(tmp_path: Path) -> None:
    for folder in ("bench/results", "bench/http", "docs/how-to"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ROOT.glob("bench/*.py"):
        shutil.copy(file, tmp_path / "bench")
    page = tmp_path / REPORT
    shown = "| 256 |"
    assert shown in page.read_text()
    page.write_text(page.read_text().replace(shown, "| 257 |"))
    done = check(tmp_path)
    assert done.returncode == 1
    assert f"{REPORT} differs from the raw files" in done.stderr
