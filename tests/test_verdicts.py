"""The verdicts of reproduction.md: numbers from the results, words that leave nothing out."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from studies import Study, result_files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "research"
PAGE = Path("reproduction.md")
STUDIES = ("reproduce", "sibyl", "libra", "star", "uniboost")
# A figure of each study and a column that a verdict quotes.
QUOTED = {
    "reproduce": ("21", "LMETRIC against vLLM, mean TTFT (abstract, 6)"), "sibyl": ("9", "p99"),
    "libra": ("9", "rate"), "star": ("10", "p99"), "uniboost": ("t3", "short e2e p99"),
}  # fmt: skip


def part(study: str, text: str) -> str:
    """The verdicts of a study on the page."""
    (found,) = re.findall(rf"<!-- verdicts {study} -->\n(.*?)\n<!-- /verdicts -->", text, re.DOTALL)
    return str(found)


def row(study: str, claim: str) -> str:
    """The row with a claim, without the claim."""
    text = (DOCS / PAGE).read_text()
    (found,) = [line for line in part(study, text).splitlines() if line.startswith(f"| {claim}")]
    return found.split(" | ", 1)[1]


@pytest.fixture
def verdicts() -> Iterator[ModuleType]:
    """`bench/verdicts.py`, importable for a while."""
    importing = Study("star").importable()
    next(importing)
    yield import_module("verdicts")
    next(importing, None)


def test_the_file_is_a_command(verdicts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["verdicts.py", "--unknown"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(verdicts.__file__), run_name="__main__")


def check(verdicts: ModuleType, *argv: str | Path) -> str | None:
    """Returns the error about a page that would change; None if no page would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["verdicts.py", "--check", *map(str, argv)])
        try:
            verdicts.main()
        except SystemExit as ended:
            return str(ended.code)
    return None


def test_rendering_again_changes_nothing(verdicts: ModuleType) -> None:
    """Fidelity gap 8: all numbers of the verdicts are those of the raw files."""
    assert check(verdicts) is None


def test_a_number_changed_on_the_page_is_found(verdicts: ModuleType) -> None:
    """Fidelity 8: nobody can change a number of a verdict by hand."""
    pages = verdicts.pages_in(DOCS)
    changed = pages[PAGE]
    for study in STUDIES:
        table = part(study, changed)
        lines = table.splitlines()
        at = next(i for i, line in enumerate(lines[3:], 3) if re.search(r"\d\.\d", line.split(" | ", 1)[1]))
        claim, outcome = lines[at].split(" | ", 1)
        lines[at] = f"{claim} | " + re.sub(r"(\d\.)(\d)", lambda m: m[1] + str((int(m[2]) + 1) % 10), outcome)
        before, changed = changed, changed.replace(table, "\n".join(lines))
        assert changed != before
    assert verdicts.render_pages(pages | {PAGE: changed}) == pages


@pytest.mark.parametrize("study", STUDIES)
def test_a_number_changed_in_a_raw_file_is_found(study: str, tmp_path: Path, verdicts: ModuleType) -> None:
    """Fidelity 8: a rerun that changes a quoted figure makes the page stale."""
    shutil.copytree(Study(study).results, tmp_path / study)
    figure, column = QUOTED[study]
    path = result_files.path_of(tmp_path / study, figure)
    rows = result_files.read_table(path)
    rows[0][column][0] += 50
    result_files.write_table(path, rows)
    changed = verdicts.render(study, lambda study: tmp_path / study)
    shown = part(study, (DOCS / PAGE).read_text()).strip()
    assert changed[None] != shown
    assert verdicts.render(study)[None] == shown


def test_a_stale_page_fails_the_check(tmp_path: Path, verdicts: ModuleType) -> None:
    """Fidelity 8: the command that the gate runs says which line differs."""
    shutil.copytree(DOCS, tmp_path, dirs_exist_ok=True)
    text = (DOCS / PAGE).read_text()
    (tmp_path / PAGE).write_text(stale := text.replace("| 1.10 to 1.95 times |", "| 1.20 to 1.95 times |"))
    assert stale != text
    said = check(verdicts, "--docs", tmp_path)
    assert said is not None
    assert "stale" in said
    assert "1.20" in said


def test_a_number_typed_into_an_outcome_is_refused(verdicts: ModuleType) -> None:
    """Fidelity 8: the renderer copies numbers, not a person."""
    refuse_written_numbers = verdicts.refuse_written_numbers
    source = ROOT / "bench" / "star" / "verdicts.md"
    for good in ("| takes 3 s | 3 s | {seconds:.1f} s at P99 |", "{share:.0%} ([page](a.md#part-2)) at P99"):
        refuse_written_numbers(good, ("P99",), source)
    for bad, number in (
        ("| takes 3 s | 3 s | 2.5 s |", "2.5"),
        ("P99 is {x} or 1,040", "1,040"),
        ("P999 {x}", "999"),
    ):
        with pytest.raises(SystemExit, match=re.escape(number)):
            refuse_written_numbers(bad, ("P99",), source)


@pytest.mark.parametrize(
    ("study", "claim", "said", "unsaid"),
    [
        pytest.param("reproduce", "LMETRIC is ahead", r"11\.9 to .*\+94% on `agent`", "13 to", id="row 2"),
        pytest.param("sibyl", "a decision takes 5.07 ms", "not compared", r"\d us|µs", id="row 9"),
        pytest.param("libra", "1,024 + 1,024", "no test of the claim", r"\*\*holds", id="row 11, Figure 5"),
        pytest.param("libra", "Table 1, 1P1D", "half is no test", "reproduced", id="row 11, Table 1"),
        pytest.param("star", "balance lasts", "not on 64 to 256", r"\| \*\*holds\*\*;", id="row 16"),
        pytest.param("uniboost", "rho 0.99, one long in ten: U", r"\| \*\*fails", r"\*\*holds", id="row 18"),
        pytest.param("sibyl", "ours: `sibyl_plus`", "level with REQLEVEL", "$^", id="row 20"),
    ],
)  # fmt: skip
def test_an_outcome_is_not_selective(study: str, claim: str, said: str, unsaid: str) -> None:
    """Fidelity 6: circular, selective and forbidden comparisons are said to be that."""
    outcome = row(study, claim)
    assert re.search(said, outcome)
    assert not re.search(unsaid, outcome)


def test_timings_are_those_of_the_newest_raw_file() -> None:
    """Fidelity 6, rows 12 and 15: what a cut and a round take."""
    plans = json.loads(sorted((ROOT / "bench" / "results").glob("*-plans.json"))[-1].read_text())
    cut = plans["cuts"]["route, split libra, 256 instances"]
    assert f"{cut['p50_us']:.1f} and {cut['p99_us']:.1f} on 256" in row("libra", "scheduling takes")
    (rule,) = [each for each in plans["rounds"] if (each["what"], each["instances"]) == ("star", 256)]
    told = f"the rule alone {rule['p50_us'] / 1e3:.2f} and {rule['p99_us'] / 1e3:.2f} ms"
    assert told in row("star", "a round takes")


def test_the_performance_page_is_what_the_raw_files_make() -> None:
    """Fidelity 8: timings are rendered, too."""
    command = [sys.executable, ROOT / "bench" / "report.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_guide_says_what_a_predictor_can_decide() -> None:
    """Fidelity 1: a trained predictor decides moves, and the page does not promise that it pays."""
    text = (ROOT / "docs" / "how-to" / "deploying.md").read_text()
    assert "forecast: predictor.npz" in text
    assert "[trained network](../research/lengths.md) is no better" in " ".join(text.split())


@pytest.mark.parametrize(
    ("page", "figures"),
    [
        ("lmetric", ("public traces", "Figure 3b")),
        ("sibyl", ("Figures 3 and 10", "12", "Figure 13")),
        ("libra", ("Figure 1:", "Figure 3:", "Figure 6:", "Table 1: compute")),
        ("star", ("Table 1 and Figure 7", "Figure 8")),
        ("uniboost", ("Figure 1:", "Figure 2:", "Figure 9:")),
    ],
)
def test_a_study_lists_what_was_not_attempted(page: str, figures: tuple[str, ...]) -> None:
    """Fidelity gaps 7 and 15: figures without a run are listed."""
    text = (DOCS / f"{page}.md").read_text()
    listed = text.partition("## Not attempted")[2]
    rows = [line for line in listed.splitlines() if line.startswith("| ")]
    for figure in figures:
        assert any(figure in line for line in rows), figure


def test_uniboosts_page_names_the_deviation_of_the_engine_model() -> None:
    """Fidelity 15: the paper's heap orders decodes too, ours does not."""
    text = (DOCS / "uniboost.md").read_text()
    assert "decodes included" in text.partition("## Table 2")[0]


@pytest.mark.parametrize("study", STUDIES)
def test_every_claim_has_a_row_with_a_command_that_exists(study: str) -> None:
    """Requirement 8: claim, paper, ours, verdict, command."""
    head, _, *rows = part(study, (DOCS / PAGE).read_text()).strip().splitlines()
    assert head == "| claim | paper | ours | verdict | command |"
    figures = result_files.read_index(Study(study).results)
    for line in rows:
        *_, command = cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 5, line
        assert all(cells), line
        _, script, *argv = command.strip("`").split()
        assert (ROOT / script).exists(), line
        if argv[0] == "--figure":
            assert set(argv[1].split(",")) <= set(figures), line
