"""The tables of bench/figures.md are what the raw files make."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

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


def test_the_price_of_uniboost_behind_a_router_is_on_the_page() -> None:
    """Changes of TTFT against FCFS at Azure's lengths, each the mean over the seeds."""
    runs: dict[tuple[str, str, str], dict[str, str]] = {}
    with (ROOT / "bench/uniboost/results/t9.csv").open() as file:
        for row in csv.DictReader(file):
            if ", azure, " in row["stage"]:
                runs[row["stage"].rpartition(" under ")[2], row["order"], row["seed"]] = row

    def change(router: str, name: str) -> int:
        ratios = [
            float(runs[router, "submit-time UniBoost", seed][name])
            / float(runs[router, "Sarathi", seed][name])
            for seed in ("0", "1")
        ]
        return round(100 * (fmean(ratios) - 1))

    blind = ("random", "round_robin", "least_requests")
    mean, p99 = ([change(router, name) for router in blind] for name in ("ttft mean", "ttft p99"))
    page = " ".join((ROOT / "docs/how-to/overload.md").read_text().split())
    assert f"mean TTFT is {-max(mean)} to {-min(mean)}% lower, " in page
    assert f"lower, and P99 TTFT {min(p99)} to {max(p99)}% higher" in page
    lower, higher = -change("lmetric", "ttft mean"), change("lmetric", "ttft p99")
    assert f"Behind `lmetric`, mean TTFT is {lower}% lower, and P99 TTFT {higher}% higher" in page


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
