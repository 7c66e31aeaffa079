"""`bench/result_files.py`: figures as CSV tables, read as they were written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from studies import ROOT, result_files

TOLD: dict[str, Any] = {
    "figure": "9", "title": "A title, with a comma", "commit": "abc", "seeds": 2, "first_seed": 0,
    "quick": False,
    "columns": ["slope, s a request", "e2e p99"],
    "rows": [
        {"stage": "a, b", "policy": "x", "p99": [0.1 + 0.2, math.inf], "mean": [1.0, 2.0]},
        {"stage": "a, b", "policy": "y", "p99": [1e-17]},
    ],
    "claims": [{"text": 'say "less"', "paper": "-5%"}],
}  # fmt: skip


def test_a_figure_is_read_as_it_was_written(tmp_path: Path) -> None:
    result_files.write_figure(TOLD, tmp_path)
    assert result_files.read_figure(tmp_path, "9") == TOLD
    assert (tmp_path / "9.csv").read_text().splitlines()[:2] == [
        "stage,policy,seed,p99,mean",
        '"a, b",x,0,0.30000000000000004,1',
    ]


def test_writing_again_replaces_a_figure_and_keeps_the_others(tmp_path: Path) -> None:
    result_files.write_figure(TOLD, tmp_path)
    result_files.write_figure({**TOLD, "figure": "10"}, tmp_path)
    shorter = {name: value for name, value in TOLD.items() if name != "claims"} | {"seeds": 1}
    result_files.write_figure(shorter, tmp_path)
    assert result_files.read_figure(tmp_path, "9") == shorter
    assert result_files.read_figure(tmp_path, "10")["claims"] == TOLD["claims"]
    assert list(result_files.read_index(tmp_path)) == ["9", "10"]


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="p99 is 3, expected text or a list"):
        result_files.write_table(tmp_path / "t.csv", [{"policy": "x", "p99": 3}])
    result_files.write_figure(TOLD, tmp_path)
    with pytest.raises(KeyError, match="no figure '11'; it has 9"):
        result_files.read_figure(tmp_path, "11")
    path = tmp_path / "9.csv"
    path.write_text(path.read_text().replace('"a, b",x,1', '"a, b",x,2'))
    with pytest.raises(ValueError, match=r"9\.csv:3: seed 2"):
        result_files.read_table(path)


def test_a_missing_value_may_only_end_a_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("policy,seed,p99\nx,0,1\nx,1,\nx,2,3\n")
    with pytest.raises(
        ValueError, match=r"t\.csv:4: p99 has a value for seed 2, but none for an earlier seed"
    ):
        result_files.read_table(path)


def test_every_file_in_the_results_belongs_to_a_figure() -> None:
    for folder in ROOT.glob("bench/*/results"):
        files = {
            path for name in result_files.read_index(folder) for path in result_files.paths_of(folder, name)
        }
        assert set(folder.iterdir()) == files | {folder / result_files.INDEX}
