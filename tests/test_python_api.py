"""The Python API as programs see it: names, reprs, runs of the simulator."""

from __future__ import annotations

import builtins
import doctest
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lmetric as lm

SLICE = Path(lm.__file__).parent / "data" / "mooncake_conversation_slice.jsonl.gz"


@pytest.fixture(scope="module")
def run() -> lm.Run:
    return lm.simulate(SLICE, policy="round_robin", instances=8)


def test_every_public_name_exists_and_none_shadows_a_builtin() -> None:
    assert [name for name in lm.__all__ if not hasattr(lm, name)] == []
    assert not set(lm.__all__) & set(dir(builtins))
    names: dict[str, object] = {}
    exec("from lmetric import *", names)
    assert names["EventFeed"] is lm.EventFeed
    assert "min" not in names
    assert str(lm.min(lm.BS)) == "min(bs)"


def test_the_version_is_that_of_the_package() -> None:
    assert lm.__version__ == importlib.metadata.version("lmetric-router")


def test_the_example_at_the_top_of_the_module_runs() -> None:
    outcome = doctest.testmod(lm)
    assert outcome.attempted >= 5
    assert outcome.failed == 0


def test_importing_loads_neither_numpy_nor_pydantic() -> None:
    code = "import sys, lmetric; print([m for m in ('numpy', 'pydantic', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reprs_are_one_short_line() -> None:
    router = lm.Router("lmetric")
    for number in range(6):
        router.add_instance(f"gpu-{number}")
    decision, ticket = router.route(tokens=np.arange(64, dtype=np.uint32))
    shown = "'gpu-0', 'gpu-1', 'gpu-2', 'gpu-3', ... 2 more"
    assert repr(router) == f"Router(policy='lmetric', instances=[{shown}], in_flight=1)"
    assert (
        repr(decision)
        == f"Decision(id={decision.id}, instance='{decision.instance}', predicted_hit_tokens=0 of 64)"
    )
    assert repr(ticket) == f"Ticket(id={ticket.id}, instance='{ticket.instance}', open)"
    with ticket:
        pass
    assert repr(ticket).endswith("closed)")


def test_a_policy_function_may_print_its_own_router() -> None:
    seen = []

    def score(columns: lm.policies.Columns) -> object:
        seen.append(repr(router))
        return columns["bs"]

    router = lm.Router(lm.policy_function(score, reads=[lm.BS]))
    router.add_instance("gpu-0")
    router.route(tokens=np.arange(64, dtype=np.uint32))
    assert seen == ["Router(in use)"]


def test_a_run_is_shown_in_few_words(run: lm.Run) -> None:
    assert len(repr(run)) < 400
    assert "policy='round_robin'" in repr(run)
    assert "TTFT mean" in repr(run)
    assert run._repr_html_().startswith("<table><tr><th>policy</th><td>round_robin</td>")


def test_the_html_of_a_run_escapes_its_policy() -> None:
    run = lm.simulate(lm.load_trace(SLICE), policy="where(bs < 2, bs, 2 * bs)", instances=8)
    assert "<td>where(bs &lt; 2, bs, 2 * bs)</td>" in run._repr_html_()


def test_a_path_is_played_like_its_trace(run: lm.Run) -> None:
    trace = lm.load_trace(SLICE)
    again = lm.simulate(trace, policy="round_robin", instances=8)
    np.testing.assert_array_equal(again.finished_seconds, run.finished_seconds)
    np.testing.assert_array_equal(
        lm.simulate(str(SLICE), policy="round_robin", instances=8).finished_seconds, run.finished_seconds
    )
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        lm.simulate("missing.jsonl")


def test_the_summary_has_the_figures_of_the_columns(run: lm.Run) -> None:
    summary = run.summary(slo_ttft_seconds=1.0)
    assert summary.requests == len(run)
    assert summary.ttft_seconds is not None
    assert summary.ttft_seconds.mean == pytest.approx(run.ttft_seconds.mean())
    assert summary.goodput.share == pytest.approx((run.ttft_seconds <= 1.0).mean())
    assert run.summary(share=(0.1, 0.9)).requests == pytest.approx(0.8 * len(run), abs=1)


def test_a_run_as_a_data_frame_has_one_row_per_request(run: lm.Run) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    frame = run.to_pandas()
    assert len(frame) == len(run)
    assert frame["ttft_seconds"].mean() == pytest.approx(run.ttft_seconds.mean())
    assert {"arrival_seconds", "instance", "hit_tokens", "e2e_seconds"} <= set(frame.columns)
    assert "gap_counts" not in frame.columns


def test_without_pandas_the_error_says_what_to_install(run: lm.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'lmetric-router\[pandas\]'"):
        run.to_pandas()
