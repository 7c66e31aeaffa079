"""The rerun of the SIBYL paper's simulations: its driver, its page, and what its figures rest on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from studies import importable

ROOT = Path(__file__).parent.parent
DRIVER = ROOT / "bench" / "sibyl" / "run.py"


@pytest.fixture
def study() -> Iterator[None]:
    yield from importable(DRIVER)


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


@pytest.mark.usefixtures("study")
def test_limits_and_lives_by_hand() -> None:
    from world import life, life_tokens, limit, profile_of, sample

    from lmetric.profiles import load_profile

    trace = sample("sharegpt-like")
    mean = trace.output_tokens.mean()
    held, steps = load_profile("sibyl-eq15-held"), load_profile("independent-pd")
    assert limit(held, "sharegpt-like") == pytest.approx(1176.64 / mean, rel=1e-4)
    # The answer that a token belongs to: long ones hold more of them.
    of_a_token = (mean**2 + trace.output_tokens.var()) / mean
    assert life_tokens("sharegpt-like") == pytest.approx(of_a_token)
    # A fifth of the peak, 235.3 tokens/s, is made by 5.741 sequences: 24.4 ms a token.
    assert life(held, "sharegpt-like", 0.2) == pytest.approx(of_a_token * 5.741 / 235.33, rel=2e-3)
    # Half of the time goes into the fixed part of a step: a step takes twice that.
    assert life(steps, "sharegpt-like", 0.5) == pytest.approx(of_a_token * 0.054)
    context = trace.input_tokens.mean() + (trace.output_tokens**2).mean() / (2 * mean)
    assert limit(steps, "sharegpt-like") == pytest.approx(1 / (mean * (7e-5 + 8.2e-8 * context)))
    few = profile_of("256 sequences")
    assert few.max_sequences == 256
    step = 0.027 + 256 * (7e-5 + 8.2e-8 * context)
    assert limit(few, "sharegpt-like", 256) == pytest.approx(256 / step / mean)


@pytest.mark.usefixtures("study")
def test_bounds_of_a_ratio_by_hand() -> None:
    from rerun import bounds

    ratio, low, high = bounds([1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 9.0])
    assert ratio == pytest.approx(2.0)
    # Logarithms 0, 0.693, 1.386: deviation 0.693, over the root of 3, times 4.303.
    assert (low, high) == (pytest.approx(2 / 5.594, rel=1e-3), pytest.approx(2 * 5.594, rel=1e-3))


@pytest.mark.usefixtures("study")
def test_a_curve_that_is_right_has_no_error() -> None:
    from survival import STEP, held_against

    answers = np.arange(1, 16385)
    true = 1 - np.minimum(STEP * np.arange(513) / 16384, 1)
    assert held_against(true, answers)["largest"] < 1e-3
    wrong = held_against(np.ones(513), answers)
    assert wrong["largest"] > 0.9
    assert 0.3 < wrong["mean"] < 0.8
