"""Prefix fetch from Python: the fields of decisions and tickets; prefix fetch in simulations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import lmetric as lm
from cli_world import call
from lmetric.option_values import parse
from lmetric.options import SimulatedFetch
from lmetric.profiles import load_profile
from lmetric_lab.defaults import SLICE
from lmetric_lab.sim.result import Run
from lmetric_lab.sim.run import simulate
from lmetric_lab.sim.synthetic import check_synthetic
from lmetric_lab.sim.workload import Workload, prepare

PROMPT = np.arange(1601, dtype=np.uint32)  # 100 blocks of 16 tokens, and one more
PULL = {"seconds_per_token": 1e-5, "fixed_seconds": 0.002, "min_tokens": 64, "max_fetches": 2}


def fleet(policy: object = "least_requests", **pull: float) -> lm.Router:
    """`e0` holds the prompt, computed at 10,000 tokens/s, and takes no more requests."""
    router = lm.Router(policy)  # type: ignore[arg-type]
    router.configure(prefix_fetch=lm.PrefixFetch(**PULL | pull))  # type: ignore[arg-type]
    router.add_instance("e0")
    _, ticket = router.route(lm.Request(token_ids=PROMPT), now=0.0)
    ticket.first_token(now=0.1601)
    ticket.segment_done(now=0.2)
    router.add_instance("e1")
    router.update_instance("e0", draining=True)
    return router


def test_nothing_is_pulled_for_a_request_that_must_not_be() -> None:
    router = fleet()
    decision, ticket = router.route(
        lm.Request(token_ids=PROMPT, allow_fetch=False, fetch_reason="it says why"), now=1.0
    )
    assert (decision.instance, decision.fetch, ticket.fetch) == ("e1", None, None)
    record = router.explain(decision.id)
    assert record is not None
    assert (record["fetch_reason"], record["fetch_instance"]) == ("it says why", None)
    router.add_instance("e2")  # nor where it goes when that fails
    assert ticket.failed("refused", now=1.1) == "e2"
    assert (ticket.fetch, router.stats()["fetches"]) == (None, 0)
    router.configure(prefix_fetch=None)
    decision, _ = router.route(
        lm.Request(token_ids=PROMPT, allow_fetch=False, fetch_reason="it says why"), now=2.0
    )
    record = router.explain(decision.id)
    assert record is not None
    assert record["fetch_reason"] is None


def test_a_decision_names_what_to_pull_and_the_ticket_tells_of_it() -> None:
    router = fleet()
    decision, ticket = router.route(lm.Request(token_ids=PROMPT), now=1.0)
    assert decision.instance == "e1"
    assert decision.fetch == ticket.fetch == ("e0", 0, 1600)
    assert router.indicators(now=1.0)["fetches"].tolist() == [1, 0]
    ticket.sent(now=1.0)
    ticket.fetched(1600, 0.02, now=1.02)
    assert ticket.fetch is None
    assert router.indicators(now=1.02)["fetches"].tolist() == [0, 0]
    record = router.explain(decision.id)
    assert record is not None
    told = {name: record[name] for name in record if "fetch" in name}
    assert told.pop("expected_fetch_seconds") == pytest.approx(0.018)
    assert told == {
        "fetch_instance": "e0", "fetch_from_token": 0, "fetch_to_token": 1600, "fetched_tokens": 1600,
        "fetch_seconds": 0.02, "fetch_reason": None,
    }  # fmt: skip
    stats = router.stats()
    assert (stats["fetches"], stats["fetched_tokens"]) == (1, 1600)
    learned = router.learned(now=1.02)
    assert learned["fetches"] == 1
    assert learned["fetch_fixed_seconds"] + 1600 * learned["fetch_seconds_per_token"] > 0.018
    with pytest.raises(lm.TicketError, match="fetches no prefix"):
        router.route(lm.Request(token_ids=np.arange(9000, 9100, dtype=np.uint32)))[1].fetched(1, 0.1)


def test_any_score_may_read_it() -> None:
    router = fleet(lm.P_TOKEN - lm.FETCH_TOKENS + lm.FETCH_COST_TOKENS)
    decision, _ticket = router.route(lm.Request(token_ids=PROMPT), now=1.0)
    assert decision.scores()[1] == pytest.approx(1 + 0.018 * 10_000)
    record = router.explain(decision.id)
    assert record is not None
    terms = record["best"][0]["terms"]
    assert terms["fetch_tokens"] == 1600
    assert terms["fetch_cost_tokens"] == pytest.approx(180)


def test_switched_off_it_pulls_nothing() -> None:
    router = fleet("lmetric_pull")
    router.configure(prefix_fetch=None)
    decision, _ticket = router.route(lm.Request(token_ids=PROMPT), now=1.0)
    assert decision.fetch is None
    assert router.learned()["fetches"] is None
    assert decision.scores()[1] == 1601


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"quickness": 1.0}, "known here: .*max_fetches, max_kv_usage"),
        ({"max_fetches": 0.0}, "at least 1"),
        ({"min_tokens": 1.5}, "min_tokens: 1.5 .*an integer"),
        ({"fixed_seconds": -1.0}, "fixed_seconds"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, float], part: str) -> None:
    with pytest.raises(lm.BadValueError, match=part):
        lm.Router().configure(prefix_fetch=parse("prefix_fetch", settings))


SHARED = {
    "synthetic": "requests", "rate": 20, "duration_seconds": 60, "block_tokens": 64,
    "input_tokens": {"p50": 60, "mean": 80, "max": 1000},
    "output_tokens": {"p50": 100, "mean": 150, "max": 500},
    "prefixes": {"count": 20, "zipf": 0.8, "tokens": {"p50": 2000, "mean": 3000, "max": 8000}},
}  # fmt: skip


@pytest.fixture(scope="module")
def workload() -> Workload:
    profile = load_profile("independent-sim").in_blocks_of(64)
    return prepare(check_synthetic({**SHARED, "seed": 1}, "shared").make(), profile)


def played(workload: Workload, **settings: object) -> Run:
    profile = load_profile("independent-sim").in_blocks_of(64)
    given = {"instances": 4, "policy": "lmetric_pull", "guard": False, "profile": profile, **settings}
    return simulate(workload, **given)  # type: ignore[arg-type]


def test_prefixes_move_in_the_simulator(workload: Workload) -> None:
    """Fetched tokens are not computed, and arrive sooner over a faster link."""
    run = played(workload, prefix_fetch="on", transfer="25")
    pulls = run.fetch_instance >= 0
    assert pulls.any()
    assert (run.fetch_instance[pulls] != run.instance[pulls]).all()
    assert (run.fetch_seconds[pulls] > 0).all()
    assert np.isnan(run.fetch_seconds[~pulls]).all()
    assert (run.hit_tokens + run.fetched_tokens < run.input_tokens).all()
    computed = run.timeline.prefill_tokens.sum()
    assert computed == pytest.approx((run.input_tokens - run.hit_tokens - run.fetched_tokens).sum())
    plain = played(workload, policy="lmetric")
    assert (plain.fetch_instance < 0).all()
    assert computed < plain.timeline.prefill_tokens.sum()
    waiting = np.nanmean(run.fetch_seconds)
    assert np.nanmean(played(workload, prefix_fetch="waits=false", transfer="25").fetch_seconds) < waiting
    assert np.nanmean(played(workload, prefix_fetch="on", transfer="2").fetch_seconds) > waiting


def test_without_pulls_the_score_is_lmetric(workload: Workload) -> None:
    assert (played(workload).instance == played(workload, policy="lmetric").instance).all()


def test_nothing_is_pulled_that_does_not_pay(workload: Workload) -> None:
    # The transfer takes 197 us a token; computing takes 100 us.
    run = played(workload, prefix_fetch="on", transfer="0.5")
    assert (run.fetch_instance < 0).all()
    assert (played(workload, prefix_fetch="min_tokens=100000").fetch_instance < 0).all()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        ("on", lm.PrefixFetch()),
        ("min_tokens=512, max_fetches=2", lm.PrefixFetch(min_tokens=512, max_fetches=2)),
        (
            "holder_seconds=0.005, waits=false, pinned=false",
            SimulatedFetch(holder_seconds=0.005, waits=False, pinned=False),
        ),
        ("seconds_per_token=1e-5", lm.PrefixFetch(seconds_per_token=1e-5)),
    ],
)
def test_how_is_text(text: str, expected: lm.PrefixFetch | None) -> None:
    assert parse("prefix_fetch", text) == expected


@pytest.mark.parametrize("text", ["of", "min_tokens", "min_tokens=x", "min_tokens=1.5", "speed=3"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(lm.BadValueError, match=r"prefix_fetch.*is not valid"):
        parse("prefix_fetch", text)


def test_the_command_line_pulls_too(tmp_path: Path) -> None:
    slice_of = SLICE
    out = tmp_path / "out.json"
    arguments = ["--trace", slice_of, "--policy", "lmetric,lmetric_pull", "--speed", "3", "--json", out]
    command = ["simulate", *map(str, arguments)]
    done = call(*command, "--prefix-fetch", "waits=false", "--transfer", "20")
    assert done.returncode == 0, done.stderr
    plain, pulling = json.loads(out.read_text())["runs"]
    assert 0 < plain["fetches"] < pulling["fetches"]
    assert 0 < plain["fetched_ratio"] < pulling["fetched_ratio"] < 1
    done = call(*command, "--prefix-fetch", "fast")
    assert done.returncode == 2
    assert "expected on, off, auto, or settings" in done.stderr
