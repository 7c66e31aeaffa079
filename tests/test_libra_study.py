"""The rerun of the Libra paper's evaluation: its driver, its page, and what its figures rest on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from studies import Study

ROOT = Path(__file__).parent.parent
STUDY = Study("libra")


@pytest.fixture
def study() -> Iterator[None]:
    yield from STUDY.importable()


@pytest.mark.nightly
def test_figure_5_has_the_papers_rates(tmp_path: Path) -> None:
    told = STUDY.made(tmp_path, "--quick", "--figure", "5")["5"]
    assert (told["quick"], told["seeds"]) == (True, 1)
    beyond = told["rows"][0]["group"]
    served = {row["system"]: row["requests"][0] for row in told["rows"] if row["group"] == beyond}
    assert served["cut at 1,024"] == pytest.approx(1.7, abs=0.07)
    assert served["cut at 1,358"] == pytest.approx(2.5, abs=0.1)
    # Not in the figure: two instances that cut nothing serve as much.
    assert served["colocated, chunk 2048"] > 0.98 * served["cut at 1,358"]


@pytest.mark.usefixtures("study")
def test_profiles_are_what_the_papers_tables_come_to() -> None:
    import fit

    argv = [sys.executable, STUDY.driver.parent / "fit.py", "--check"]
    assert subprocess.run(argv, cwd=ROOT).returncode == 0
    got = fit.qwen_14b()
    # The three median gaps of Table 1, disaggregated.
    for prompt, answer, rate, gap, _ in (fit.PREFILL_HEAVY, fit.BALANCED, fit.DECODE_HEAVY):
        sequences, context = fit.decoding(prompt, answer, rate, gap)
        seconds = got["fixed_seconds"] + sequences * got["decode_seconds_per_sequence"]
        assert seconds + context * got["decode_seconds_per_context_token"] == pytest.approx(gap)
    # Its prefill GPU: a prompt of 8,192 in four steps, 0.83 a second.
    prompt = 4 * got["fixed_seconds"] + 8192 * got["prefill_seconds_per_token"]
    prompt += 8192**2 / 2 * got["prefill_seconds_per_attention_pair"]
    assert prompt == pytest.approx(1 / 0.83)


@pytest.mark.usefixtures("study")
def test_table_1_holds_where_the_profile_was_not_fitted() -> None:
    from world import DEFAULT, Fleet, play

    # Colocated: 8192/32 at 1.49 requests/s at most, median gap 310 ms; 219/1467 at 2.86 with 48 ms.
    found = play("8192/32", 2.5, DEFAULT, Fleet(), 0)
    assert found.requests == pytest.approx(1.49, rel=0.1)
    assert found.p50 == pytest.approx(0.310, rel=0.1)
    found = play("219/1467", 2.86, DEFAULT, Fleet(), 0)
    assert found.p50 == pytest.approx(0.048, rel=0.2)


@pytest.mark.usefixtures("study")
def test_the_same_requests_come_at_every_rate() -> None:
    from world import SECONDS, made

    slow, fast = made("azure-code", 1.0, 3), made("azure-code", 2.0, 3)
    n = len(slow)
    assert n == pytest.approx(SECONDS, rel=0.2)
    np.testing.assert_array_equal(slow.input_tokens, fast.input_tokens[:n])
    np.testing.assert_allclose(slow.arrival_seconds, 2 * fast.arrival_seconds[:n])
    spread = made("219/1467", 5.0, 0, ("normal", 100.0)).output_tokens
    assert spread.std() == pytest.approx(100, rel=0.1)
    assert made("219/1467", 5.0, 0, ("log-normal", 0.5)).output_tokens.mean() == pytest.approx(1467, rel=0.1)


@pytest.mark.usefixtures("study")
def test_a_backlog_is_not_kept_up_with() -> None:
    from world import COMPOSED, DEFAULT, Fleet, keeps_up, most, play

    fleet = Fleet()
    whole = most("8192/32", fleet)
    # By hand: 1.119 s of prefill, 32 decodes of 0.1 ms and 1.1 ms, 21.5 ms shared by 16 in memory.
    assert whole == pytest.approx(2 / (1.119 + 32 * (0.0001063 + 8208 * 1.336e-7 + 0.0215 / 16.6)), rel=0.01)
    light = play("8192/32", 0.5 * whole, COMPOSED, fleet, 0)
    assert keeps_up(light)
    for share in (1.1, 3.0):
        beyond = play("8192/32", share * whole, COMPOSED, fleet, 0)
        assert beyond.slow <= 0.01
        assert beyond.delay_growth > 0.03
        assert not keeps_up(beyond)
    # A steady fleet whose gaps are too long does not keep up either.
    slow = play("8192/32", 0.5 * whole, DEFAULT, fleet, 0)
    assert slow.delay_growth < 0.03
    assert not keeps_up(slow)
    assert keeps_up(replace(slow, slow=0.01))
