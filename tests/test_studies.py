"""What the drivers of all studies do alike: every figure, the page, mistakes, and the commit that ran."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies import Study

# A number of each: figure, and where it stands in the figure's file.
NUMBERS: dict[str, tuple[str, list[str | int]]] = {
    "reproduce": ("7", ["claims", 0, "ours", 0, "values", 0]),
    "libra": ("9", ["rows", 0, "rate", 0]),
    "sibyl": ("independent", ["rows", 0, "p99", 0]),
    "star": ("10", ["rows", 0, "p99", 0]),
    "planner": ("hot", ["rows", 0, "ttft", 0]),
    "uniboost": ("t2", ["rows", 0, "e2e p99", 0]),
}
every = pytest.mark.parametrize("study", [Study(name) for name in NUMBERS], ids=lambda study: study.name)


@pytest.mark.nightly
@every
def test_every_figure(study: Study, tmp_path: Path) -> None:
    assert {path.stem for path in study.results.glob("*.json")} <= set(study.made(tmp_path, "--quick"))


@every
def test_the_page_shows_the_results_as_they_are(study: Study, tmp_path: Path) -> None:
    assert study.run("--check").returncode == 0
    shutil.copytree(study.results, tmp_path, dirs_exist_ok=True)
    figure, where = NUMBERS[study.name]
    part = told = json.loads((tmp_path / f"{figure}.json").read_text())
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] += 50
    (tmp_path / f"{figure}.json").write_text(json.dumps(told))
    stale = study.run("--check", "--results", tmp_path)
    assert stale.returncode == 1
    assert "--render" in stale.stderr


@every
def test_mistakes_are_named(study: Study) -> None:
    unknown = study.run("--figure", "99")
    assert unknown.returncode == 2
    assert "no figure 99" in unknown.stderr


@pytest.fixture
def common() -> Iterator[None]:
    yield from Study("star").importable()


@pytest.mark.usefixtures("common")
def test_a_commit_names_the_code_that_ran_or_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import common

    def git(*argv: str) -> None:
        told = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", *told, *argv], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(common, "ROOT", tmp_path)
    bench, code = tmp_path / "bench", tmp_path / "rust" / "lib.rs"
    results = [bench / "star" / "results" / "3.json", bench / "results" / "core.json"]
    for path in (*results, code):
        path.parent.mkdir(parents=True)
        path.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = common.commit()
    assert len(clean) >= 7
    for result in results:  # earlier figures of the same run
        result.write_text("2")
    (bench / "results" / "new.json").write_text("1")
    assert common.commit() == clean
    (new := tmp_path / "rust" / "new.rs").write_text("")
    assert common.commit() == f"{clean}-dirty"
    new.unlink()
    code.write_text("2")
    assert common.commit() == f"{clean}-dirty"
