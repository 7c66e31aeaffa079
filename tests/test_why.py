"""The sentence that says why a request went to its engine, for each family of policies."""

from __future__ import annotations

from typing import Any

import pytest

from lmetric import Policy, Request, Router
from lmetric._core import policy_table
from lmetric.why import because, number

POLICIES = [row["name"] for row in policy_table()]


def record_of(policy: Any, *, session: str | None = None, instances: int = 4) -> dict[str, Any]:
    """The sixth decision of a router whose first engine holds the prompt's start."""
    router = Router(policy=policy)
    for i in range(instances):
        router.add_instance(f"e{i}")
        router.report_load(f"e{i}", waiting=0, running=i, kv_usage=0.1 * i, now=0.0)
    for i in range(6):
        now = 1 + i / 100
        decision, ticket = router.route(Request(list(range(500 + i * 16)), session=session), now=now)
        KEPT.append(ticket)  # a dropped ticket would end its request
        ticket.sent(now=now + 0.001)
        if i % 2 == 0:
            ticket.first_token(now=now + 0.005)
    record = router.explain(decision.id)
    assert record is not None
    return dict(record)


KEPT: list[Any] = []


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_a_sentence_about_the_chosen_engine(policy: str) -> None:
    record = record_of(policy, session="s")
    text = because(record)
    assert text.startswith("because ")
    assert text.endswith(".")
    assert record["tried"][0] in text
    assert "_" not in text.replace(policy, ""), text  # names of indicators are words
    assert "None" not in text
    assert "nan" not in text


def test_lmetric_shows_both_factors_and_the_next_best() -> None:
    record = record_of("lmetric")
    chosen, following = record["best"][0], record["best"][1]
    work, batch = chosen["terms"]["p_token"], chosen["terms"]["bs"]
    text = because(record)
    assert f"{number(work)} x ({number(batch)} + 1) = {number(chosen['score'])}" in text
    assert f"next best {following['instance']}: {number(following['score'])}" in text
    assert work * (batch + 1) == chosen["score"]


def made(policy: str, scores: dict[str, float | None], **more: Any) -> dict[str, Any]:
    terms = more.pop("terms", {})
    kept = [name for name, score in scores.items() if score is not None]
    most = more.get("prefer") == "max"
    kept.sort(key=lambda name: scores[name] or 0.0, reverse=most)
    first = more.pop("first", kept[0] if kept else next(iter(scores)))
    return {
        "policy": policy,
        "instance": first,
        "tried": [first],
        "prefer": "min",
        "tied": (tied := sum(scores[name] == scores[first] for name in kept)),
        "drawn_from": tied,
        "prompt_tokens": 100,
        "best": [{"instance": name, "score": scores[name], "terms": terms.get(name, {})} for name in kept],
        **more,
    }


CASES = [
    (
        made(
            "lmetric",
            {"e3": 360.0, "e1": 900.0},
            terms={"e3": {"p_token": 120.0, "bs": 2.0}, "e1": {"p_token": 900.0, "bs": 0.0}},
        ),
        "because e3 had the least new prefill tokens x batch size: 120 x (2 + 1) = 360; next best e1: 900.",
    ),
    (
        made("least_requests", {"e0": 2.0, "e1": 2.0, "e2": 5.0}),
        "because e0 had the fewest requests: 2, as 1 other engine had; the tie was broken at random.",
    ),
    (
        made(
            "vllm",
            {"e0": 9.0, "e1": 11.0},
            terms={"e0": {"q_bs": 2.0, "r_bs": 1.0}, "e1": {"q_bs": 2.0, "r_bs": 3.0}},
        ),
        "because e0 had the least 4 x waiting + running requests: 4 x 2 + 1 = 9; next best e1: 11.",
    ),
    (
        made("power_of_two", {"e0": 2.0, "e7": 4.0}),
        "because e0 had the fewer requests: 2, of two drawn engines; the other, e7, had 4.",
    ),
    (made("round_robin", {"e0": 0.0, "e1": 1.0}), "because it was e0's turn."),
    (made("random", {"e0": 0.1, "e1": 0.7}), "because e0 was drawn at random."),
    (
        made("session_affinity", {"e0": 0.25, "e1": 0.75}, terms={"e0": {"bs": 4.0}}),
        "because its session belongs to e0, by the hash of both names.",
    ),
    (
        made("session_affinity", {"e0": 4.0, "e1": 5.0}, terms={"e0": {"bs": 4.0}}),
        "because it has no session, and e0 had the fewest requests: 4.",
    ),
    (
        made(
            "prefix_spill",
            {"e0": -0.5, "e1": 1.0},
            terms={"e0": {"kv_hit": 0.5, "bs": 3.0}, "e1": {"kv_hit": 0.0, "bs": 1.0}},
            holder={"instance": "e0", "cached_tokens": 50, "saved_tokens": 50.0, "bs": 3.0},
        ),
        "because e0 had the largest cached share of the prompt: 50%; next best e1: 0%.",
    ),
    (
        # Its prompt is in a lower tier: loading costs half.
        made(
            "prefix_spill",
            {"e0": -0.5, "e1": 1.0},
            terms={"e0": {"kv_hit": 0.5, "bs": 3.0}, "e1": {"kv_hit": 0.0, "bs": 1.0}},
            holder={"instance": "e0", "cached_tokens": 100, "saved_tokens": 50.0, "bs": 3.0},
        ),
        "because e0 had the largest cached share of the prompt: 50%; next best e1: 0%.",
    ),
    (
        made(
            "cache_aware",
            {"e1": 1.0, "e0": 70.0},
            terms={"e0": {"kv_hit": 0.9, "bs": 70.0}, "e1": {"kv_hit": 0.1, "bs": 1.0}},
            holder={"instance": "e0", "cached_tokens": 90, "saved_tokens": 90.0, "bs": 70.0},
        ),
        "because e1 had 1 request, and e0 with 90% of the prompt in its cache had too much load (70).",
    ),
    (
        # The fleet is in balance, and the score is the number of blocks in the cache.
        made(
            "cache_aware",
            {"e1": 12.0, "e0": 40.0},
            terms={"e0": {"kv_hit": 0.2, "bs": 4.0}, "e1": {"kv_hit": 0.1, "bs": 1.0}},
            holder={"instance": "e0", "cached_tokens": 20, "saved_tokens": 20.0, "bs": 4.0},
        ),
        "because no engine had enough of the prompt in its cache, and e1 had 1 request.",
    ),
    (
        # The holder was not drawn.
        made(
            "ray_prefix",
            {"e1": 5.0, "e2": 11.0},
            terms={"e1": {"kv_hit": 0.0, "bs": 5.0}, "e2": {"kv_hit": 0.0, "bs": 11.0}},
            holder={"instance": "e0", "cached_tokens": 99, "saved_tokens": 99.0, "bs": 2.0},
        ),
        "because e1 had 5 requests; e0 had the largest cached share of the prompt, 99%, and 2 requests.",
    ),
    (
        made(
            "preble",
            {"e1": 1.0, "e0": 1.0},
            first="e1",
            terms={"e1": {"hit_tokens": 0.0, "new_tokens": 100.0}},
            drawn_from=1,
            holder={"instance": "e0", "cached_tokens": 40, "saved_tokens": 40.0, "bs": 2.0},
        ),
        "because no engine had enough of the prompt in its cache, and e1 had the least load.",
    ),
    (
        made("mine", {"e0": 2.0, "e1": 2.0, "e2": 2.0}, drawn_from=2),
        "because e0 had the lowest score of mine: 2, as 2 other engines had; the policy's tie-breaks left 2 "
        "engines, and the choice was random.",
    ),
    (
        made(
            "filter",
            {"e1": 1.0, "e0": 2.0},
            terms={"e0": {"kv_hit": 0.0, "bs": 2.0}, "e1": {"kv_hit": 0.0, "bs": 1.0}},
        ),
        "because no engine had enough of the prompt in its cache, and e1 had 1 request.",
    ),
    (
        made("preble", {"e1": 0.0, "e0": 1.0}, terms={"e1": {"hit_tokens": 75.0, "new_tokens": 25.0}}),
        "because e1 had the largest cached share of the prompt: 75%; next best e0: 0%.",
    ),
    (
        made(
            "llmd_scorers",
            {"e1": 4.0, "e0": 3.0},
            prefer="max",
            terms={"e1": {"q_bs": 0.0, "kv_usage": 0.25, "kv_hit": None}},
        ),
        "because e1 had the highest score of llmd_scorers: 4 (waiting requests 0, KV cache in use 0.25); "
        "next best e0: 3.",
    ),
    (
        made("dynamo", {"e1": 36.5, "e0": 30.0}, first="e1"),
        "because e1 was drawn by its score of dynamo 36.5; the best engine e0 had 30.",
    ),
    (
        made("mine", {"e1": 4.0, "e0": None}),
        "because e1 was the only engine with a score.",
    ),
    (
        made("lmetric", {"e1": None, "e0": 3.0}, first="e1"),
        "because e1 was the only engine that may serve it.",
    ),
    (
        made("lmetric", {"e1": 9.0, "e0": 3.0}, first="e1", guard_balance_only=True),
        "because the hot-spot guard would have excluded every engine, and e1 had the least load.",
    ),
    (
        made("mine", {"e1": None, "e0": None}, first="e1", unscored=True, left_out=2),
        "because the policy scored no engine, and e1 had the fewest requests; 2 engines had no score.",
    ),
]


@pytest.mark.parametrize(
    ("record", "text"), CASES, ids=[f"{i}-{each['policy']}" for i, (each, _) in enumerate(CASES)]
)
def test_sentences(record: dict[str, Any], text: str) -> None:
    assert because(record) == text


@pytest.mark.parametrize(
    "policy", ["filter", "cache_aware", "aibrix_prefix", "prefix_spill", "dynamo_two_tier"]
)
def test_the_busy_holder_of_a_large_fleet_is_named(policy: str) -> None:
    """The scores of eleven idle engines are better, so the holder is not among the best eight."""
    router = Router(policy)
    router.add_instance("e00")
    tokens = list(range(1600))
    for _ in range(100):
        _, ticket = router.route(Request(tokens))
        KEPT.append(ticket)
        ticket.sent()
    for each in range(1, 12):
        router.add_instance(f"e{each:02}")
    decision, ticket = router.route(Request(tokens))
    KEPT.append(ticket)
    record = router.explain(decision)
    assert record is not None
    assert record["holder"] == {"instance": "e00", "cached_tokens": 1584, "saved_tokens": 1584.0, "bs": 100.0}
    assert "e00" not in [each["instance"] for each in record["best"]]
    assert because(record) == (
        f"because {decision.instance} had 0 requests, and e00 with 99% of the prompt in its cache had too "
        "much load (100)."
    )


def loaded(policy: Any, loads: list[int]) -> dict[str, Any]:
    """Returns the record of a decision between engines with these numbers of requests."""
    router = Router(policy)
    names = [f"e{number}" for number in range(len(loads))]
    for name in names:
        router.add_instance(name)
    for name, load in zip(names, loads, strict=True):
        for _ in range(load):
            KEPT.append(router.route(Request(prompt_tokens=10, instances=[name]))[1])
    before = router.stats()["left_out"]
    decision, ticket = router.route(Request(prompt_tokens=10))
    KEPT.append(ticket)
    record = router.explain(decision)
    assert record is not None
    assert router.stats()["left_out"] - before == record["left_out"]
    return dict(record)


def test_tie_breaks_decide_or_leave_the_choice_to_chance() -> None:
    policy = Policy("kv_hit", prefer="max", then=["bs"])
    record = loaded(policy, [5, 5, 0])
    assert (record["instance"], record["tied"], record["drawn_from"]) == ("e2", 3, 1)
    assert "as 2 other engines had; the policy's tie-breaks decided." in because(record)
    record = loaded(policy, [5, 0, 0])
    assert (record["tied"], record["drawn_from"]) == (3, 2)
    record = loaded(policy, [0, 0, 0])
    assert because(record).endswith("as 2 other engines had; the tie was broken at random.")
    # Nine others are idle, too; the busy engine has the same cached share, and is no equal.
    record = loaded("filter", [1] + [0] * 10)
    assert (record["tied"], record["drawn_from"]) == (11, 10)
    assert because(record).endswith("had 0 requests; 9 others had the same.")


def test_engines_that_the_filter_excluded_are_not_left_out() -> None:
    record = loaded(Policy("bs", filter="bs < 3"), [5, 5, 0, 0])
    assert (record["scored"], record["filtered"], record["left_out"]) == (2, 2, 0)
    assert because(record).endswith("; the policy's filter excluded 2 engines.")
    record = loaded(Policy("bs", filter="bs < 3"), [5, 5])
    assert (record["filter_waived"], record["filtered"], record["left_out"]) == (True, 0, 0)


def test_a_policy_that_scored_no_engine_left_out_all() -> None:
    for policy in (Policy("kv_usage"), Policy("kv_usage", filter="bs < 3")):
        record = loaded(policy, [4, 1, 2])
        assert (record["unscored"], record["left_out"], record["filtered"]) == (True, 3, 0)
        assert (record["instance"], record["scored"]) == ("e1", 3)


def test_expressions_show_their_formula_and_terms() -> None:
    text = because(record_of(Policy("p_token * (bs + 1)")), "p_token * (bs + 1)")
    assert "the lowest value of p_token * (bs + 1): " in text
    assert "new prefill tokens" in text
    named = because(record_of(Policy("kv_hit", prefer="max", name="mine")), "kv_hit")
    assert "the highest score of mine: " in named


def test_conditions_and_moves_are_clauses_of_the_same_sentence() -> None:
    record = made(
        "least_requests",
        {"e0": 1.0, "e1": 2.0, "e2": 3.0},
        tried=["e0", "e1"],
        instance="e1",
        guard_excluded=2,
        filter_waived=True,
        decode_instance="e5",
        fetch_instance="e7",
        fetch_from_token=16,
        fetch_to_token=1040,
    )
    assert because(record) == (
        "because e0 had the fewest requests: 1; next best e1: 2; the hot-spot guard excluded 2 engines; "
        "the policy's filter left no engine, so it was ignored; e0 did not serve it, so e1 was next; "
        "e5 continues after the handoff; its cached prefix is fetched from e7 (1,024 tokens)."
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (360.0, "360"),
        (12345.6, "12,346"),
        (0.012345, "0.0123"),
        (1e6, "1,000,000"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
