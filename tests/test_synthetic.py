"""Synthetic traces: traces match their description; the same seed gives the same bits."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.replay import Client, Player
from lmetric_lab.sim.distributions import LENGTHS, LogNormal, Quantiles
from lmetric_lab.sim.prompts import PromptWriter
from lmetric_lab.sim.synthetic import SyntheticError, check_synthetic
from lmetric_lab.sim.traces import Trace, ideal_hit_tokens, load_trace, write_trace


def made(**description: Any) -> Trace:
    usual = {"synthetic": "requests", "rate": 20.0, "duration_seconds": 100, "input_tokens": 100}
    return check_synthetic(usual | {"output_tokens": 5} | description, "here").make()


def test_quantiles_are_met_and_lie_on_straight_lines() -> None:
    wanted = Quantiles(quantiles={0: 10, 0.5: 20, 0.9: 100, 1: 1000})
    values = wanted.draw(200_000, np.random.default_rng(1))
    assert values.min() >= 10
    assert values.max() <= 1000
    for share, value in ((0.25, 15), (0.5, 20), (0.7, 60), (0.9, 100), (0.95, 550)):
        assert np.quantile(values, share) == pytest.approx(value, rel=0.03)


@pytest.mark.parametrize("figure", [{"mean": 400.0}, {"p90": 900.0}, {"p99": 3000.0}])
def test_log_normal_meets_its_two_figures(figure: dict[str, float]) -> None:
    values = LogNormal(p50=200, **figure).draw(400_000, np.random.default_rng(1))
    assert np.median(values) == pytest.approx(200, rel=0.02)
    name, value = next(iter(figure.items()))
    got = values.mean() if name == "mean" else np.quantile(values, int(name[1:]) / 100)
    assert got == pytest.approx(value, rel=0.03)
    cut = LogNormal(p50=200, **figure, min=150, max=300).draw(1000, np.random.default_rng(1))
    assert (cut.min(), cut.max()) == (150, 300)


@pytest.mark.parametrize(
    ("name", "prompt", "longest_prompt", "answer", "deviation"),
    [
        ("sibyl-random", 256.5, 512, 4096.5, 8192 / math.sqrt(12)),
        ("sharegpt-like", 183, 1024, 5657, 3317),
        ("zeta-like", 345, 1700, 5000, 3492),
    ],
)
def test_named_lengths_have_the_papers_figures(
    name: str, prompt: float, longest_prompt: int, answer: float, deviation: float
) -> None:
    trace = check_synthetic(
        {
            "synthetic": "requests",
            "rate": 2000,
            "duration_seconds": 100,
            "lengths": name,
            "block_tokens": 512,
        },
        "here",
    ).make()
    assert trace.input_tokens.mean() == pytest.approx(prompt, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(answer, rel=0.01)
    assert trace.output_tokens.std() == pytest.approx(deviation, rel=0.01)
    assert (trace.input_tokens.max(), trace.output_tokens.max()) == (longest_prompt, 8192)
    assert min(trace.input_tokens.min(), trace.output_tokens.min()) >= 1


def test_named_lengths_stand_for_both_and_are_named_when_wrong() -> None:
    named = {"synthetic": "requests", "rate": 5.0, "duration_seconds": 100}
    spelled = LENGTHS["zeta-like"].model_dump()
    assert all(check_synthetic(named | {"lengths": name}, "here").make() for name in LENGTHS)
    trace, same = (
        check_synthetic(named | more, "here").make() for more in ({"lengths": "zeta-like"}, spelled)
    )
    assert trace.output_tokens.tolist() == same.output_tokens.tolist()
    for more, told in (
        ({"lengths": "zeta"}, "sibyl-random, sharegpt-like, zeta-like, .*, got 'zeta'"),
        ({"lengths": "zeta-like", "input_tokens": 5}, "lengths or input_tokens, not both"),
    ):
        with pytest.raises(SyntheticError, match=told):
            check_synthetic(named | more, "here")


@pytest.mark.parametrize("synthetic", ["requests", "sessions"])
def test_kinds_have_lengths_of_their_own(synthetic: str) -> None:
    told = {
        "synthetic": synthetic, "rate": 20.0, "duration_seconds": 500,
        "input_tokens": 10, "output_tokens": 20,
        "kinds": [
            {"share": 0.3, "input_tokens": 100, "output_tokens": 200},
            {"share": 0.2, "input_tokens": 1000, "output_tokens": 2000},
        ],
    }  # fmt: skip
    if synthetic == "sessions":
        told["turns"] = 1
    trace = check_synthetic(told, "here").make()
    pairs, counts = np.unique([trace.input_tokens, trace.output_tokens], axis=1, return_counts=True)
    assert pairs.T.tolist() == [[10, 20], [100, 200], [1000, 2000]]
    assert counts / len(trace) == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    told["kinds"] = [{"share": 0.6, "input_tokens": 1, "output_tokens": 1}] * 2
    with pytest.raises(SyntheticError, match=r"shares of kinds must sum to 1 at most, got 1\.2"):
        check_synthetic(told, "here")


def gaps(trace: Trace) -> Any:
    return np.diff(trace.arrival_seconds)


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("poisson", 1.0), ({"cv": 1.0}, 1.0), ({"cv": 3.0}, 3.0), ({"cv": 0.25}, 0.25)]
)
def test_gaps_have_the_rate_and_the_variation(arrivals: Any, cv: float) -> None:
    trace = made(arrivals=arrivals, rate=50, duration_seconds=2000)
    assert len(trace) / 2000 == pytest.approx(50, rel=0.04)
    assert gaps(trace).std() / gaps(trace).mean() == pytest.approx(cv, rel=0.05)
    assert trace.arrival_seconds[0] >= 0
    assert trace.arrival_seconds[-1] < 2000
    assert trace.previous is None


def test_on_off_keeps_the_mean_rate_and_both_rates() -> None:
    shape = {"on_seconds": 5, "off_seconds": 15}
    trace = made(arrivals=shape, rate=20, duration_seconds=20_000)
    assert len(trace) / 20_000 == pytest.approx(20, rel=0.06)
    # Busy times have 4 times the mean rate: within them gaps are 1 / 80 s.
    assert np.median(gaps(trace)) == pytest.approx(math.log(2) / 80, rel=0.05)
    counts = np.bincount((trace.arrival_seconds // 1).astype(int), minlength=20_000)
    assert np.mean(counts == 0) == pytest.approx(0.7, abs=0.05)  # silent seconds
    soft = made(arrivals=shape | {"off_share": 0.5}, rate=20, duration_seconds=5_000)
    assert len(soft) / 5_000 == pytest.approx(20, rel=0.06)
    assert np.mean(np.bincount((soft.arrival_seconds // 1).astype(int)) == 0) < 0.01


def first_blocks(trace: Trace) -> dict[int, list[int]]:
    """The requests by the first id of their prompts."""
    found: dict[int, list[int]] = defaultdict(list)
    for i in range(len(trace)):
        found[int(trace.blocks(i)[0])].append(i)
    return found


def test_families_have_zipfs_sizes_and_share_their_prefix_alone() -> None:
    trace = made(prefixes={"count": 3, "zipf": 1.0, "tokens": 90, "share": 0.8}, input_tokens=30, rate=50)
    assert trace.block_tokens == 16
    assert (np.diff(trace.hash_offsets)[trace.input_tokens == 120] == 8).all()  # 7.5 blocks
    sizes = sorted((len(each) for each in first_blocks(trace).values()), reverse=True)[:3]
    weights = np.array([1, 1 / 2, 1 / 3]) / (1 + 1 / 2 + 1 / 3) * 0.8
    np.testing.assert_allclose(np.array(sizes) / len(trace), weights, atol=0.03)
    alone = [i for each in first_blocks(trace).values() if len(each) == 1 for i in each]
    assert (trace.input_tokens[alone] == 30).all()
    assert len(alone) / len(trace) == pytest.approx(0.2, abs=0.03)
    family = next(each for each in first_blocks(trace).values() if len(each) > 1)
    one, other = (trace.blocks(i).tolist() for i in family[:2])
    assert one[:5] == other[:5]  # 5 whole blocks of 16 lie inside the 90 tokens
    assert not set(one[5:]) & set(other[5:])


descriptions = st.fixed_dictionaries(
    {
        "synthetic": st.just("sessions"),
        "seed": st.integers(0, 2**40),
        "rate": st.floats(0.2, 3),
        "duration_seconds": st.just(20),
        "arrivals": st.sampled_from(
            ["poisson", {"cv": 3}, {"on_seconds": 2, "off_seconds": 3, "off_share": 0.3}]
        ),
        "input_tokens": st.sampled_from([1, 40, {"p50": 30, "p99": 300}]),
        "output_tokens": st.sampled_from([1, 33, {"quantiles": {0: 1, 1: 90}}]),
        "turns": st.sampled_from([1, 4, {"quantiles": {0: 1, 1: 6}}]),
        "think_seconds": st.sampled_from([0, 2.5, {"p50": 5, "mean": 9}]),
        "prefixes": st.sampled_from([None, {"count": 3, "tokens": {"quantiles": {0: 0, 1: 100}}}]),
        "hot_spot": st.sampled_from([None, {"start_seconds": 5, "seconds": 9, "share": 0.5, "tokens": 70}]),
        "block_tokens": st.sampled_from([1, 16, 64]),
        "max_prompt_tokens": st.sampled_from([131_072, 200]),
    }
)


@settings(deadline=None, max_examples=60)
@given(descriptions)
def test_a_turn_continues_the_one_before(description: dict[str, Any]) -> None:
    try:
        trace = check_synthetic(description, "here").make()
    except SyntheticError as error:
        if "no arrival" not in str(error):
            raise
        return
    assert trace.sessions is not None
    assert trace.previous is not None
    assert trace.think_seconds is not None
    assert (trace.input_tokens <= description["max_prompt_tokens"]).all()
    last_of: dict[int, int] = {}
    for i in range(len(trace)):
        session, before = int(trace.sessions[i]), int(trace.previous[i])
        assert before == last_of.get(session, -1)  # a chain, no turn missing
        last_of[session] = i
        assert len(trace.blocks(i)) == -(-trace.input_tokens[i] // trace.block_tokens)
        if before < 0:
            assert trace.think_seconds[i] == 0
            assert trace.arrival_seconds[i] < 20
            continue
        old = int(trace.input_tokens[before])
        assert trace.input_tokens[i] > old + trace.output_tokens[before]
        whole = old // trace.block_tokens
        assert trace.blocks(i)[:whole].tolist() == trace.blocks(before)[:whole].tolist()
        wanted = trace.arrival_seconds[before] + trace.think_seconds[i]
        assert trace.arrival_seconds[i] == pytest.approx(wanted, abs=1e-6)
    # An id stands at one position only, behind the same ids: equal ids mean an equal prefix.
    behind: dict[int, int] = {}
    for i in range(len(trace)):
        ids = trace.blocks(i).tolist()
        for earlier, each in zip([-1, *ids], ids, strict=False):
            assert behind.setdefault(each, earlier) == earlier


@settings(deadline=None, max_examples=20)
@given(descriptions)
def test_the_same_seed_gives_the_same_bits(description: dict[str, Any]) -> None:
    description = description | {"rate": 3.0}
    one, two = (check_synthetic(description, "here").make() for _ in range(2))
    other = check_synthetic(description | {"seed": description["seed"] + 1}, "here").make()
    for name in ("arrival_seconds", "input_tokens", "output_tokens", "hash_ids", "previous", "think_seconds"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes()
    assert one.arrival_seconds.tobytes() != other.arrival_seconds.tobytes()


def test_a_hot_spot_changes_the_hot_requests_alone() -> None:
    spot = {"start_seconds": 30, "seconds": 20, "share": 0.6, "tokens": 320}
    prefixes = {"count": 5, "tokens": 160}
    cold, hot = made(prefixes=prefixes, seed=3), made(prefixes=prefixes, seed=3, hot_spot=spot)
    np.testing.assert_array_equal(cold.arrival_seconds, hot.arrival_seconds)
    np.testing.assert_array_equal(cold.output_tokens, hot.output_tokens)
    inside = (hot.arrival_seconds >= 30) & (hot.arrival_seconds < 50)
    struck = hot.input_tokens == 420
    assert not struck[~inside].any()
    assert struck[inside].mean() == pytest.approx(0.6, abs=0.07)
    np.testing.assert_array_equal(cold.input_tokens[~struck], hot.input_tokens[~struck])
    prefix = hot.blocks(int(np.flatnonzero(struck)[0]))[:20].tolist()
    assert all(hot.blocks(int(i))[:20].tolist() == prefix for i in np.flatnonzero(struck))
    assert not any(set(prefix) & set(hot.blocks(int(i)).tolist()) for i in np.flatnonzero(~struck))


def test_written_and_read_again(tmp_path: Path) -> None:
    trace = made(synthetic="sessions", rate=0.5, turns=3, hot_spot=None, prefixes={"count": 2, "tokens": 50})
    write_trace(trace, tmp_path / "s.jsonl.gz")
    read = load_trace(tmp_path / "s.jsonl.gz")
    assert read.block_tokens == 16
    assert read.previous is not None
    assert trace.previous is not None
    for name in ("input_tokens", "output_tokens", "hash_ids", "hash_offsets", "sessions", "previous"):
        np.testing.assert_array_equal(getattr(read, name), getattr(trace, name))
    np.testing.assert_allclose(read.arrival_seconds, trace.arrival_seconds, atol=1e-6)
    np.testing.assert_allclose(read.think_seconds, trace.think_seconds, atol=1e-6)


async def test_an_engine_finds_what_the_trace_shares(tmp_path: Path) -> None:
    write_trace(
        made(
            synthetic="sessions",
            rate=0.5,
            duration_seconds=40,
            turns=3,
            think_seconds={"p50": 4, "p90": 20},
            prefixes={"count": 3, "tokens": 250},
            hot_spot={"start_seconds": 20, "seconds": 10, "share": 0.5, "tokens": 400},
        ),
        tmp_path / "s.jsonl.gz",
    )
    trace = load_trace(tmp_path / "s.jsonl.gz").faster(40)
    assert trace.previous is not None
    async with (
        EmbeddedEngines(1, EngineOptions(clock_speed=100)) as engines,
        Client(engines.urls[0]) as client,
    ):
        player = Player(trace, client, PromptWriter().prompt)
        await player.run()
    assert all(record.completed for record in player.records)
    by_index = {record.index: record for record in player.records}
    for index, before in enumerate(trace.previous.tolist()):
        if before >= 0:
            ended, sent = by_index[before].last_token, by_index[index].sent
            assert ended is not None
            assert sent is not None
            assert trace.think_seconds is not None
            assert sent >= ended + trace.think_seconds[index]
    # One engine, room for all, turns in order: it holds all that requests share, as in the trace.
    # The exception is requests so close that the first of them has not finished its prefill.
    found = sum(record.cached_tokens or 0 for record in player.records)
    ideal = int(ideal_hit_tokens(trace).sum())
    assert 0.9 * ideal <= found <= ideal


def test_long_prompts_are_cut_and_sessions_end() -> None:
    trace = made(synthetic="sessions", rate=1, turns=50, max_prompt_tokens=500, think_seconds=0)
    assert trace.previous is not None
    assert trace.input_tokens.max() <= 500
    assert trace.input_tokens.max() + 105 > 500  # not a turn earlier than needed
    cut = made(input_tokens=900, max_prompt_tokens=500, prefixes={"count": 1, "tokens": 600})
    assert (cut.input_tokens == 500).all()
    assert (cut.blocks(0)[:31] == cut.blocks(1)[:31]).all()
    assert cut.blocks(0)[31] != cut.blocks(1)[31]  # 4 tokens of the 32nd block: an id of its own


BAD = [
    ("{synthetic: poisson}", "s.yaml: expected a mapping with synthetic: requests, sessions or agents"),
    ("[1]", "s.yaml: expected a mapping with synthetic: requests, sessions or agents"),
    ("{synthetic: requests, rate: 1, duration_seconds: 1, output_tokens: 1}", "input_tokens: missing"),
    ("{synthetic: requests, rat: 1}", "rat: Extra inputs are not permitted"),
    ("{synthetic: requests, rate: 0}", "rate: expected above 0"),
    ("{synthetic: requests, arrivals: fast}", "arrivals.poisson: expected 'poisson'"),
    ("{synthetic: requests, arrivals: {cv: 0}}", "arrivals.gamma.cv: expected above 0"),
    ("{synthetic: requests, arrivals: {on_seconds: 3}}", "arrivals.on-off.off_seconds: missing"),
    (
        "{synthetic: requests, input_tokens: {p50: 3}}",
        "input_tokens.log-normal: give exactly one",
    ),
    ("{synthetic: requests, input_tokens: {p50: 3, mean: 2}}", r"must be p50 \(3\) or more, got 2"),
    ("{synthetic: requests, input_tokens: {quantiles: {0: 1}}}", "quantiles must rise from 0 to 1, got"),
    ("{synthetic: requests, input_tokens: {quantiles: {0: 5, 1: 2}}}", "the values of quantiles must rise"),
    ("{synthetic: requests, turns: 3}", "turns: Extra inputs are not permitted"),
    (
        "{synthetic: requests, rate: 1.0e+6, duration_seconds: 10, input_tokens: 1, output_tokens: 1}",
        "rate x duration_seconds must be at most 5,000,000, got 10,000,000",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_descriptions_that_are_wrong_say_where(text: str, message: str) -> None:
    with pytest.raises(SyntheticError, match=message):
        check_synthetic(yaml.safe_load(text), "s.yaml")


def test_what_cannot_be_made_says_so() -> None:
    with pytest.raises(SyntheticError, match=r"no arrival in 0\.001 s with seed 0: increase rate"):
        made(rate=0.001, duration_seconds=0.001)
    with pytest.raises(SyntheticError, match="blocks, at most 200,000,000: increase block_tokens"):
        made(block_tokens=1, input_tokens=131_072, rate=100)


def test_sigma_by_hand() -> None:
    assert LogNormal(p50=100, mean=100 * math.exp(0.5)).sigma == pytest.approx(1)
    assert LogNormal(p50=100, p90=100 * math.exp(NormalDist().inv_cdf(0.9))).sigma == pytest.approx(1)
