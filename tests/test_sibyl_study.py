"""The rerun of the SIBYL paper's simulations: its driver, its page, and what its figures rest on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DRIVER = ROOT / "bench" / "sibyl" / "run.py"


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, DRIVER, *argv], capture_output=True, text=True, cwd=ROOT)


def test_a_quick_figure(tmp_path: Path) -> None:
    done = run("--quick", "--figure", "8,light", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "8.json").read_text())
    assert (told["quick"], told["seeds"]) == (True, 1)
    by_label = {(row["stage"], row["policy"]): row for row in told["rows"]}
    (stage,) = {stage for stage, _ in by_label if "step time" in stage}
    sibyl, level = by_label[stage, "SIBYL"], by_label[stage, "least requests, bound ones too (REQLEVEL)"]
    # What the page says: instances slowed by a big batch look light in tokens, so counting requests wins.
    assert sibyl["p99"][0] > 1.05 * level["p99"][0]
    assert sibyl["least_loaded"][0] > 0.8 > 0.3 > level["least_loaded"][0]
    assert all(row["without_end"] == [0.0] for row in told["rows"])
    light = json.loads((tmp_path / "light.json").read_text())["rows"]
    assert min(row["least_loaded"][0] for row in light) > 0.4  # most instances are idle, and ties count
    assert max(row["batch"][0] for row in light) < 1


@pytest.mark.nightly
def test_every_figure(tmp_path: Path) -> None:
    done = run("--quick", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    shipped = {path.name for path in (DRIVER.parent / "results").glob("*.json")}
    assert shipped <= {path.name for path in tmp_path.glob("*.json")}


def test_the_page_shows_the_results_as_they_are(tmp_path: Path) -> None:
    assert run("--check").returncode == 0
    for path in (DRIVER.parent / "results").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    told = json.loads((tmp_path / "independent.json").read_text())
    told["rows"][0]["p99"][0] += 50
    (tmp_path / "independent.json").write_text(json.dumps(told))
    stale = run("--check", "--results", tmp_path)
    assert stale.returncode == 1
    assert "--render" in stale.stderr


def test_mistakes_are_named(tmp_path: Path) -> None:
    unknown = run("--figure", "99")
    assert unknown.returncode == 2
    assert "no figure 99" in unknown.stderr


def test_limits_and_lives_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DRIVER.parent))
    monkeypatch.delitem(sys.modules, "world", raising=False)
    from world import life, limit, sample

    from lmetric.profiles import load_profile

    trace = sample("sharegpt-like")
    mean = trace.output_tokens.mean()
    held, steps = load_profile("sibyl-eq15-held"), load_profile("independent-pd")
    assert limit(held, "sharegpt-like") == pytest.approx(1176.64 / mean, rel=1e-4)
    # A fifth of the peak, 235.3 tokens/s, is made by 5.741 sequences: 24.4 ms a token.
    assert life(held, "sharegpt-like", 0.2) == pytest.approx(mean * 5.741 / 235.33, rel=2e-3)
    # Half of the time goes into the fixed part of a step: a step takes twice that.
    assert life(steps, "sharegpt-like", 0.5) == pytest.approx(mean * 0.054)
    context = trace.input_tokens.mean() + (trace.output_tokens**2).mean() / (2 * mean)
    assert limit(steps, "sharegpt-like") == pytest.approx(1 / (mean * (7e-5 + 8.2e-8 * context)))
    monkeypatch.delitem(sys.modules, "world", raising=False)
