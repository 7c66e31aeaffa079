"""The common behavior of all study drivers: every figure, the page, mistakes, and the commit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies import ROOT, Study, add, result_files

TRACES = ROOT.parent / "shared" / "traces"  # what drivers read if nothing else is said

# A figure of each driver; its page shows the first number.
FIGURES = {
    Study("reproduce"): "7", Study("libra"): "9", Study("sibyl"): "independent", Study("star"): "10",
    Study("planner"): "hot", Study("planner", "goal.py"): "goal_hour", Study("uniboost"): "t2",
    Study("capacity"): "closed_loop",
}  # fmt: skip
RECORDED = {Study("planner", "goal.py"), Study("uniboost"), Study("capacity")}  # those that read TRACES
every = pytest.mark.parametrize("study", FIGURES, ids=lambda study: f"{study.name}-{study.script}")


@pytest.mark.nightly
@every
def test_every_figure(study: Study, tmp_path: Path) -> None:
    if study in RECORDED and not TRACES.exists():
        pytest.skip(f"needs the recorded traces in {TRACES}")
    stored = result_files.read_index(study.results)
    own = {name for name in stored if name.startswith("goal_") == (study.script == "goal.py")}
    assert set(study.made(tmp_path, "--quick")) == own


@every
def test_the_page_shows_the_results_as_they_are(study: Study, tmp_path: Path) -> None:
    assert study.check()[0] == 0
    shutil.copytree(study.results, tmp_path, dirs_exist_ok=True)
    add(tmp_path, FIGURES[study], 50)
    code, said = study.check("--results", tmp_path)
    assert code == 1
    assert "--render" in said


@pytest.mark.nightly
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
    results = [bench / "star" / "results" / "3.csv", bench / "results" / "core.json"]
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
