"""The synthetic workload in the package, against the recorded sessions that it is fitted to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmetric_lab.defaults import CODING_AGENTS, trace_path
from lmetric_lab.sim.agents import AgentsTrace, People, Rewrites, SessionKind
from lmetric_lab.sim.distributions import SyntheticError
from lmetric_lab.sim.setups import TraceChoice, trace_label
from lmetric_lab.sim.synthetic import check_synthetic, read_synthetic
from lmetric_lab.sim.traces import FINISH, Trace, TraceError, load_trace

STOP, TOOL_CALLS = FINISH.index("stop"), FINISH.index("tool_calls")
BASE = {"synthetic": "agents", "rate": 1, "chat_rate": 0}


def described(**changes: Any) -> AgentsTrace:
    """The shipped description with other fields."""
    found = read_synthetic("coding-agents")
    assert isinstance(found, AgentsTrace)
    return found.model_copy(update=changes)


@cache
def workload() -> Trace:
    """150 sessions: enough for the tolerances."""
    return described(sessions=150, block_tokens=4096).make()


def gaps(trace: Trace, reason: int) -> np.ndarray:
    assert trace.previous is not None
    assert trace.finish is not None
    assert trace.think_seconds is not None
    later = np.flatnonzero(trace.previous >= 0)
    found: np.ndarray = trace.think_seconds[later[trace.finish[trace.previous[later]] == reason]]
    return found


def first_prompts(trace: Trace) -> np.ndarray:
    assert trace.sessions is not None
    return trace.input_tokens[np.unique(trace.sessions, return_index=True)[1]]


def turns(trace: Trace) -> np.ndarray:
    assert trace.sessions is not None
    return np.bincount(trace.sessions)


# Recorded quantiles, as in docs/research/agent_workload.md, and the factor that is allowed.
@pytest.mark.parametrize(
    ("values", "share", "recorded", "factor"),
    [
        (turns, 0.5, 48, 1.3),
        (turns, 0.9, 153, 1.4),
        (first_prompts, 0.5, 24_242, 1.5),
        (first_prompts, 0.9, 277_328, 1.6),
        (lambda trace: trace.output_tokens, 0.5, 217, 1.1),
        (lambda trace: trace.output_tokens, 0.99, 3_782, 1.3),
        (lambda trace: trace.input_tokens, 0.5, 100_802, 1.3),
        (lambda trace: gaps(trace, TOOL_CALLS), 0.5, 8.59, 1.25),
        (lambda trace: gaps(trace, TOOL_CALLS), 0.9, 70.1, 1.4),
        (lambda trace: gaps(trace, TOOL_CALLS), 0.99, 608, 1.5),
        (lambda trace: gaps(trace, STOP), 0.5, 182, 1.7),
        (lambda trace: gaps(trace, STOP), 0.9, 2_647, 2.5),
    ],
)
def test_the_statistics_are_the_recorded_ones(
    values: Callable[[Trace], np.ndarray], share: float, recorded: float, factor: float
) -> None:
    made = float(np.quantile(values(workload()), share))
    assert recorded / factor < made < recorded * factor


def test_the_workload_has_a_name_everywhere() -> None:
    assert trace_path("coding-agents", Path("elsewhere")) == CODING_AGENTS
    assert trace_label(str(CODING_AGENTS)) == trace_label("coding_agents") == "coding_agents"
    choice = TraceChoice(str(CODING_AGENTS), "agents", session_rate=0.1, block_tokens=8192, requests=500)
    trace = choice.load()
    assert (len(trace), trace.block_tokens) == (500, 8192)
    assert choice.digest() == TraceChoice(str(CODING_AGENTS), "other").digest()


def test_a_session_rate_moves_only_the_starts(tmp_path: Path) -> None:
    file = tmp_path / "few.yaml"
    file.write_text("{synthetic: agents, sessions: 40, instances: 4, rate: 0.1, chat_rate: 0, turns: 3}")
    slow, fast = load_trace(file), load_trace(file, session_rate=4.0)
    assert slow.sessions is not None
    assert slow.previous is not None
    assert fast.previous is not None
    assert len(np.unique(slow.sessions)) == 40
    assert len(slow) == len(fast)
    # 0.4 sessions per second in the file: ten times as fast.
    starts = fast.arrival_seconds[fast.previous < 0]
    np.testing.assert_allclose(slow.arrival_seconds[slow.previous < 0], starts * 10)
    assert sorted(slow.input_tokens.tolist()) == sorted(fast.input_tokens.tolist())
    assert load_trace(file, closed_loop=False).previous is None


def test_seeds_give_other_sessions() -> None:
    one, same, other = (described(seed=seed, sessions=5).make() for seed in (1, 1, 2))
    assert np.array_equal(one.hash_ids, same.hash_ids)
    assert np.array_equal(one.arrival_seconds, same.arrival_seconds)
    assert not np.array_equal(one.input_tokens[:20], other.input_tokens[:20])


def test_optional_parts_leave_the_other_draws_unchanged() -> None:
    plain = AgentsTrace(seed=4, duration_seconds=300, fork_share=0)
    people = plain.model_copy(update={"people": People(share=0.5, gap_seconds=1000)})
    a, b = plain.make(), people.make()
    assert sorted(a.input_tokens.tolist()) == sorted(b.input_tokens.tolist())
    waits = gaps(b, STOP)
    assert (waits == 1000).mean() > 0.5  # finish_accuracy is below 1, and chats have their own gaps


def test_a_rewritten_prompt_keeps_its_beginning() -> None:
    trace = AgentsTrace.model_validate(
        BASE
        | {"sessions": 1, "system_prompts": [0], "first_tokens": 1000, "turns": 4, "input_tokens": 100}
        | {"output_tokens": 60, "fork_share": 0, "block_tokens": 10}
        | {"rewrites": {"share": 1, "kept_tokens": 55, "ratio": 0.5}}
    ).make()
    assert trace.input_tokens.tolist() == [1000, 500, 250, 125]
    blocks = [trace.hash_ids[a:b].tolist() for a, b in pairwise(trace.hash_offsets.tolist())]
    for before, after in pairwise(blocks):
        assert before[:5] == after[:5]
        assert not set(before) & set(after[5:])


def test_a_session_is_compacted_at_its_size_unless_it_begins_above() -> None:
    shape = BASE | {"sessions": 1, "system_prompts": [0], "turns": 5, "input_tokens": 100}
    shape |= {"output_tokens": 100, "fork_share": 0, "block_tokens": 10}
    compact = {"kept_tokens": 100, "ratio": 1, "compact_at_tokens": 1350, "compact_ratio": 0.25}
    small = AgentsTrace.model_validate(shape | {"first_tokens": 1000, "rewrites": compact}).make()
    assert small.input_tokens.tolist() == [1000, 1200, 300, 500, 700]
    large = AgentsTrace.model_validate(shape | {"first_tokens": 1400, "rewrites": compact}).make()
    assert large.input_tokens.tolist() == [1400, 1600, 1800, 2000, 2200]


def test_subagents_may_begin_with_their_own_prompt() -> None:
    trace = AgentsTrace.model_validate(
        BASE
        | {"sessions": 3, "turns": 2, "fork_share": 1, "subagents": 1, "subagent_turns": 2}
        | {"subagent_first_tokens": 9000, "subagent_input_tokens": 70, "output_tokens": 30}
    ).make()
    assert trace.previous is not None
    first = np.flatnonzero((trace.input_tokens == 9000) & (trace.previous >= 0))
    assert len(first) == 3
    for row in first.tolist():
        assert (trace.input_tokens[trace.previous == row] == 9100).all()
        before = trace.previous[row]
        own = trace.hash_ids[trace.hash_offsets[row] : trace.hash_offsets[row + 1]]
        parent = trace.hash_ids[trace.hash_offsets[before] : trace.hash_offsets[before + 1]]
        assert not set(own.tolist()) & set(parent.tolist())


def test_kinds_of_sessions_have_their_own_first_prompts_and_turns() -> None:
    kinds = (SessionKind(share=0.5, first_tokens=50_000, turns=2),)
    trace = AgentsTrace(
        sessions=40, kinds=kinds, first_tokens=1, turns=5, chat_rate=0, fork_share=0, system_prompts=(0,)
    ).make()
    large = first_prompts(trace) == 50_000
    assert 8 < large.sum() < 32
    assert np.array_equal(turns(trace), np.where(large, 2, 5))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sessions", 0, "sessions"),
        ("kinds", [{"share": 0.7, "first_tokens": 1, "turns": 1}] * 2, "kinds must sum to 1"),
        ("kinds", [{"share": 0.7, "turns": 1}], "kinds.0.first_tokens"),
        ("input_sigma", -1, "input_sigma"),
        ("people", {"share": 0.1}, "people.gap_seconds"),
        ("people", {"share": 0.1, "gap_seconds": 1, "rewrite_share": 2}, "people.rewrite_share"),
        ("people", {"share": 1.5, "gap_seconds": 1}, "share must be 1 at most, got 1.5"),
        ("rewrites", {"share": 2, "kept_tokens": 1, "ratio": 1}, "rewrites.share"),
        ("rewrites", {"ratio": 1}, "rewrites.kept_tokens"),
        ("subagent_first_tokens", -5, "subagent_first_tokens"),
    ],
)
def test_invalid_fields_are_named(field: str, value: object, message: str) -> None:
    with pytest.raises(SyntheticError, match=message):
        check_synthetic(BASE | {field: value}, "x")


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no format, got 'weka'"):
        load_trace("coding-agents", format="weka")
    file = tmp_path / "flat.yml"
    file.write_text("{synthetic: requests, rate: 5, duration_seconds: 9, input_tokens: 9, output_tokens: 2}")
    with pytest.raises(SyntheticError, match="session_rate needs sessions or agents, got requests"):
        load_trace(file, session_rate=1)
    with pytest.raises(TraceError, match="has no sessions"):
        load_trace(file, closed_loop=True)
    with pytest.raises(SyntheticError, match="rate"):
        load_trace("coding-agents", session_rate=-1)


def test_compaction_needs_a_kept_part() -> None:
    with pytest.raises(ValueError, match="kept_tokens"):
        Rewrites.model_validate({"ratio": 1.0, "compact_at_tokens": 1000})
