"""The Python API as programs see it: names, reprs, runs of the simulator."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from lmetric import _core, option_values
from lmetric_lab.defaults import SLICE


@pytest.fixture(scope="module")
def run() -> lm.Run:
    return lm.simulate(SLICE, policy="round_robin", instances=8)


def test_compare_ranks_policies_of_each_kind_and_plots_them() -> None:
    def short(bs: Any, p_token: Any) -> Any:
        return bs * 1000 + p_token

    found = lm.compare(["round_robin", lm.P_TOKEN * (lm.BS + 1), short], SLICE, instances=8)
    assert [run.policy for run in found.runs][-1] == "round_robin"
    assert found.latency[0] is not None
    assert sorted(found.latency) == list(found.latency)
    assert found["short"] in found.runs
    assert found.best is found.runs[0]
    same = lm.simulate(SLICE, policy="round_robin", instances=8)
    assert np.array_equal(found["round_robin"].finished_seconds, same.finished_seconds)
    lines = repr(found).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [run.policy.split()[0] for run in found.runs[1:]]
    assert max(map(len, lines)) <= 80
    assert found._repr_html_().count("<tr>") == 4
    for figure in (found.plot(), found.best.plot()):
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["TTFT", "TPOT"]
    with pytest.raises(KeyError, match="compared: "):
        found["vllm"]
    for wrong in ("lmetric", []):
        with pytest.raises(lm.BadValueError, match=r"policies = .*: expected"):
            lm.compare(wrong)
    with pytest.raises(TypeError, match="compare"):
        lm.compare(["lmetric"], SLICE, instance=8)


def test_type_checkers_see_the_public_names() -> None:
    stub = ast.parse(Path(lm.__file__).with_suffix(".pyi").read_text())
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom) and each.module != "typing"]
    seen = {name.asname: each.module for each in imports for name in each.names}
    assert seen == lm._HOME_OF | dict.fromkeys(lm._SHADOWS, "lmetric.expr")
    (listed,) = (ast.literal_eval(each.value) for each in stub.body if isinstance(each, ast.Assign))
    assert listed == lm.__all__


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
    decision, ticket = router.route(lm.Request(token_ids=np.arange(64, dtype=np.uint32)))
    shown = "'gpu-0', 'gpu-1', 'gpu-2', 'gpu-3', ... 2 more"
    assert repr(router) == f"Router(policy='lmetric', instances=[{shown}], in_flight=1)"
    assert (
        repr(decision)
        == f"Decision(id={decision.id}, instance='{decision.instance}', predicted_cached_tokens=0 of 64)"
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
    router.route(lm.Request(token_ids=np.arange(64, dtype=np.uint32)))
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
    with pytest.raises(ImportError, match=r"pip install 'pandas>="):
        run.to_pandas()


# -- requests --------------------------------------------------------------------------------------

TOKENS = list(range(64))


def one_instance(policy: str = "lmetric") -> lm.Router:
    router = lm.Router(policy)
    router.add_instance("gpu-0")
    return router


def test_a_request_has_its_fields_and_does_not_change() -> None:
    request = lm.Request(TOKENS, max_tokens=20, session="s", lora_name="sql", allow_fetch=False)
    assert request.token_ids is not None
    assert request.token_ids.tolist() == TOKENS
    assert (request.max_tokens, request.session, request.tenant_weight) == (20, "s", 1.0)
    assert (request.text, request.block_hashes) == (None, None)
    assert repr(request) == (
        "Request(64 token IDs, max_tokens=20, session='s', lora_name='sql', allow_fetch=False)"
    )
    with pytest.raises(AttributeError):
        request.session = "t"  # type: ignore[misc]


def test_a_list_is_copied_and_a_numpy_array_of_uint32_is_not() -> None:
    router, ids = one_instance(), list(TOKENS)
    request = lm.Request(ids)
    router.route(request)[1].done()
    ids[0] = 99
    assert router.cached_tokens(request).tolist() == [48]
    array = np.array(TOKENS, np.uint32)
    assert lm.Request(array).token_ids is array


@pytest.mark.parametrize("length", [2**40, 2**62])
def test_a_sequence_that_claims_any_length_is_refused(length: int) -> None:
    router = one_instance()
    with pytest.raises(
        lm.BadValueError, match=f"token_ids: {length} integers is not valid; expected at most"
    ):
        router.route(lm.Request(range(length)))
    with pytest.raises(lm.BadValueError, match=f"block_hashes: {length} integers"):
        router.blocks_removed("gpu-0", range(length))


def test_one_request_serves_all_calls() -> None:
    router = one_instance()
    request = lm.Request(TOKENS, max_tokens=20, request_id="r-1")
    decision, ticket = router.route(request)
    with ticket:
        record = router.explain(decision.id)
        assert record is not None
        assert (record["request_id"], record["prompt_tokens"]) == ("r-1", 64)
        assert router.cached_tokens(request).tolist() == [0]  # learned when the request is sent
        ticket.sent()
        assert router.cached_tokens(request).tolist() == [48]
        now = time.monotonic()
        score = router.score(request, now=now)
        batch = router.score_batch([request, lm.Request([1])], now=now)
        assert batch.shape == (2, 1)
        np.testing.assert_array_equal(batch[0], score)
        ticket.done(output_tokens=20)
    assert router.in_flight() == 0


def test_what_is_no_request_is_refused_by_name() -> None:
    router = one_instance()
    with pytest.raises(lm.BadValueError, match=r"Router.route: list is not valid; expected an lmetric.Req"):
        router.route([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Router.route\(\) missing .* 'request'"):
        router.route()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Router.route\(\) got an unexpected .* 'session'"):
        router.route(lm.Request(TOKENS), session="s")  # type: ignore[call-arg]
    with pytest.raises(lm.BadValueError, match=r"requests\[0\]: int is not valid"):
        router.score_batch([1])  # type: ignore[list-item]
    assert router.in_flight() == 0


def test_the_decision_record_says_why_a_request_is_not_split() -> None:
    router = one_instance()
    router.configure(split=lm.SplitAt(fraction=0.5))
    for fields, reason in (
        ({"split_reason": "it has a seed"}, "it has a seed"),
        ({}, "the caller does not allow it"),
    ):
        decision, _ticket = router.route(lm.Request(TOKENS, allow_split=False, **fields))
        record = router.explain(decision.id)
        assert record is not None
        assert record["split_reason"] == reason


# -- instances and options -------------------------------------------------------------------------


def test_an_instance_changes_in_one_call() -> None:
    router = one_instance()
    router.update_instance("gpu-0", role="prefill", healthy=False, draining=True, cache_blocks=10)
    stats = router.stats()["instances"]["gpu-0"]
    assert (stats["role"], stats["healthy"], stats["draining"]) == ("prefill", False, True)
    router.update_instance("gpu-0", healthy=True, cache_blocks=None, step_time=None, kv_source="exact")
    stats = router.stats()["instances"]["gpu-0"]
    assert (stats["role"], stats["healthy"], stats["draining"]) == ("prefill", True, True)
    with pytest.raises(lm.BadValueError, match='handoff of gpu-0: "here" is not valid; expected "nowhere"'):
        router.update_instance("gpu-0", role="both", handoff="here")  # type: ignore[arg-type]
    assert router.stats()["instances"]["gpu-0"]["role"] == "prefill"
    with pytest.raises(lm.UnknownNameError, match="gpu-1"):
        router.update_instance("gpu-1")
    with pytest.raises(TypeError, match=r"update_instance\(\) got an unexpected keyword argument 'roles'"):
        router.update_instance("gpu-0", roles="both")  # type: ignore[call-arg]


def test_rows_of_instances_have_the_indicators_asked_for() -> None:
    """rust 7.21: a caller that reads two indicators does not wait for all."""
    router = one_instance()
    whole = router.stats()["instances"]["gpu-0"]
    asked = router.stats(indicators=["q_bs", "window_prefill_tokens"])["instances"]["gpu-0"]
    state = {"healthy", "draining", "role", "in_flight", "decisions", "predicted_ttft_source"}
    assert asked.keys() == state | {"q_bs", "window_prefill_tokens"}
    assert asked.items() <= whole.items()
    assert router.stats(indicators=[])["instances"]["gpu-0"].keys() == state
    with pytest.raises(lm.UnknownNameError, match="q_bz"):
        router.stats(indicators=["q_bz"])


def test_options_are_set_at_construction_or_later() -> None:
    fetch = lm.PrefixFetch(seconds_per_token=1e-6, fixed_seconds=0.5)
    router = lm.Router(
        "planner", split=lm.DecodePlacement(), prefix_fetch=fetch, priority=lm.UniBoost(gamma=2.0)
    )
    learned = router.learned()
    assert (learned["fetch_seconds_per_token"], learned["fetch_fixed_seconds"]) == (1e-6, 0.5)
    assert (learned["gamma"], learned["gamma_estimates"], learned["length_survival"]) == (2.0, 0, None)
    router.configure(prefix_fetch=None, priority=None)
    learned = router.learned()
    assert (learned["fetches"], learned["gamma"]) == (None, None)
    router.configure(block_size=32, guard=False, binding="late", rebalance=None)
    assert router.block_size == 32
    assert router.stats()["guard_on"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "libra"}, r"split: 'libra' is not valid; expected lmetric.LibraSplit\(...\), lmetric.Dec"),
        ({"prefix_fetch": True}, r"prefix_fetch: True is not valid; expected lmetric.PrefixFetch\(...\) or"),
        ({"priority": lm.Star()}, r"priority: Star\(.*\) is not valid; expected lmetric.UniBoost"),
        ({"rebalance": lm.Star(threshold=2.0)}, "threshold"),
        ({"guard": lm.Guard()}, "guard: Guard is not valid; expected True or False"),
        ({"binding": "soon"}, 'binding: "soon" is not valid; expected "early" or "late"'),
    ],
)
def test_a_bad_option_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(lm.BadValueError, match=message):
        lm.Router().configure(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: lm.LibraSplit(probes="six"), "LibraSplit.probes: 'six' is not valid; expected an integer"),  # type: ignore[arg-type]
        (
            lambda: lm.LibraSplit(prob=6),
            "LibraSplit.prob: 6 is not valid; unknown setting; did you mean 'probes'",
        ),  # type: ignore[call-arg]
        (lambda: lm.SplitAt(), "SplitAt.fraction: missing; 'force' needs it"),  # type: ignore[call-arg]
        (lambda: lm.SplitBy(), "SplitBy.planner: missing; 'SplitBy' needs it"),  # type: ignore[call-arg]
    ],
)
def test_an_option_with_a_bad_setting_is_not_made(made: Callable[[], object], message: str) -> None:
    with pytest.raises(lm.BadValueError) as raised:
        made()
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("what", "option"),
    [
        ("split", lm.LibraSplit()),
        ("split", lm.DecodePlacement()),
        ("prefix_fetch", lm.PrefixFetch()),
        ("priority", lm.UniBoost()),
        ("priority", lm.UniBoost(adaptive=False)),
        ("rebalance", lm.Star()),
        ("rebalance", lm.Star(prediction=False)),
        ("rebalance", lm.Llumnix()),
    ],
    ids=lambda each: each if isinstance(each, str) else repr(each)[:24],
)
def test_options_have_the_defaults_of_the_core(what: str, option: lm.options.Option) -> None:
    kind, settings = lm.options.core_settings(what, option)
    plain = {"adaptive": 0.0} if option == lm.UniBoost(adaptive=False) else {}
    assert len(settings) >= 3
    assert _core.parsed_option(what, kind, settings) == _core.parsed_option(what, kind, plain)


def test_settings_of_configurations_become_options() -> None:
    of = option_values.parse
    assert of("split", "none") is None
    assert of("split", {"kind": "libra", "min_tokens": 64.0, "lengths_given": 1}) == lm.LibraSplit(
        min_tokens=64, lengths_given=True
    )
    current = of("rebalance", {"kind": "star_current", "max_moves": 2})
    assert current == lm.Star(prediction=False, max_moves=2)
    with pytest.raises(
        lm.BadValueError, match=r"split.speed: 1 is not valid; unknown setting; known here: parts"
    ):
        of("split", {"kind": "libra", "speed": 1})
    with pytest.raises(
        lm.BadValueError, match="priority: 'fast' is not valid; expected one of none, uniboost"
    ):
        of("priority", "fast")


def test_the_simulator_takes_options_too() -> None:
    trace = lm.load_trace(SLICE)
    by_option = lm.simulate(
        trace, instances=8, split=lm.LibraSplit(min_tokens=64), guard=lm.Guard(enabled=False, classes=8)
    )
    by_name = lm.simulate(
        trace,
        instances=8,
        split={"kind": "libra", "min_tokens": 64},
        guard={"enabled": False, "classes": 8},
    )
    assert (by_option.cut_tokens >= 0).any()
    np.testing.assert_array_equal(by_option.finished_seconds, by_name.finished_seconds)
    with pytest.raises(
        TypeError, match=r"simulate\(\) got .* keyword argument 'splits'; did you mean 'split'"
    ):
        lm.simulate(trace, splits="libra")


# -- the page --------------------------------------------------------------------------------------

PAGES = Path(__file__).parent.parent / "docs" / "reference"
PAGE = (PAGES / "python.md").read_text()


def test_a_planner_can_be_named() -> None:
    router = lm.Router("least_requests", split=lm.SplitBy(planner="force", settings={"fraction": 0.5}))
    router.configure(split=lm.SplitBy(planner="apart"))
    with pytest.raises(lm.UnknownNameError, match='did you mean "prior_tokens"'):
        router.configure(split=lm.SplitBy(planner="apart", settings={"prior_token": 3}))
    with pytest.raises(lm.BadValueError, match="expected none, libra, apart, force, libra_three"):
        router.configure(split=lm.SplitBy(planner="libre"))


def test_the_page_has_every_option_with_its_default() -> None:
    for name, option in vars(lm.options).items():
        if name.startswith("_") or getattr(option, "__module__", "") != "lmetric.options":
            continue
        if not hasattr(option, "model_fields"):
            continue
        shown = re.search(rf"^- `(?:options\.)?{name}\((.*?)\)`: .", PAGE, re.MULTILINE)
        assert shown, name
        assert shown[1] == ", ".join(
            field if each.is_required() else f"{field}={each.default!r}"
            for field, each in option.model_fields.items()
        ), name


def test_the_page_has_every_field_of_a_request() -> None:
    fields = [name for name in lm.Request.__dict__ if not name.startswith("_")]
    assert len(fields) == 25
    assert [name for name in fields if f"`{name}`" not in PAGE] == []
