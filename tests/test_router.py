"""The embedded router: ``lmetric.Router`` without a server."""

import array
import contextlib
import gc
import inspect
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from lmetric import _core
from lmetric.profiles import load_profile


def fleet(policy: object = "lmetric", n: int = 4, **settings: object) -> _core.Router:
    router = _core.Router(policy, **settings)  # type: ignore[arg-type]
    for i in range(n):
        router.add_instance(f"e{i}")
    return router


TOKENS = np.arange(8192, dtype=np.uint32)


def placed(router: _core.Router, **prompt: object) -> _core.Decision:
    """Routes a request and finishes it at once, so that load never outweighs the cache.

    Without a first token, no engine is expected to hold its prompt.
    """
    decision, ticket = router.route(lm.Request(**prompt))  # type: ignore[arg-type]
    ticket.segment_done()
    return decision


def test_a_request_goes_back_to_its_cache_and_the_record_says_why() -> None:
    router = fleet()
    first, ticket = router.route(lm.Request(token_ids=TOKENS, request_id="r-1"))
    assert first.predicted_cached_tokens == 0
    ticket.sent()
    ticket.first_token()
    ticket.tokens(3)
    ticket.segment_done(prompt_tokens=8192, cached_tokens=0, output_tokens=4)
    second, _held = router.route(lm.Request(token_ids=TOKENS))
    assert second.instance == first.instance
    assert second.predicted_cached_tokens == 8176  # whole blocks, never the last token
    assert second.ranking()[0] == second.instance
    record = router.explain(first.id)
    assert record is not None
    assert record["request_id"] == "r-1"
    assert record["outcome"] == "finished"
    assert record["cached_tokens"] == 0
    assert set(record["best"][0]["terms"]) == {"p_token", "bs"}
    assert (record["scored"], len(record["best"])) == (4, 4)
    assert router.explain(10**9) is None


def misaligned(values: np.ndarray) -> np.ndarray:
    """Returns the values at an odd address, as a view into a message or a file may be."""
    found = np.frombuffer(b"\0" + values.tobytes(), dtype=values.dtype, offset=1)
    assert not found.flags.aligned
    return found


def test_a_record_keeps_the_best_eight_with_counts() -> None:
    router = lm.Router("p_token * (bs + 1) / 7")
    for number in range(10):
        router.add_instance(f"e{number}")
    tokens = list(range(100_000))
    decision, _ticket = router.route(lm.Request(token_ids=tokens))
    record = router.explain(decision)
    assert record is not None
    assert (record["scored"], record["tied"], len(record["best"])) == (10, 10, 8)
    scores = decision.scores()
    assert np.isfinite(scores).sum() == 8
    names = router.instances()
    for best in record["best"]:
        assert scores[names.index(best["instance"])] == np.float32(best["score"])
    assert decision.ranking()[0] == decision.instance
    assert set(decision.ranking()) == {best["instance"] for best in record["best"]}
    decision, _other = router.route(lm.Request(token_ids=tokens))  # the first one is busy
    record = router.explain(decision)
    assert record is not None
    assert (record["scored"], record["tied"]) == (10, 9)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        TOKENS.astype(np.int32),
        TOKENS.astype(np.int64),
        array.array("I", TOKENS.tolist()),
        TOKENS.tobytes(),
        memoryview(TOKENS),
        TOKENS.tolist(),
        tuple(TOKENS.tolist()),
        list(TOKENS),
        np.repeat(TOKENS, 2)[::2],
        TOKENS.astype(np.uint64),
        array.array("q", TOKENS.tolist()),
        misaligned(TOKENS),
        misaligned(TOKENS.astype(np.uint64)),
    ],
    ids=[
        "u32",
        "i32",
        "i64",
        "array",
        "bytes",
        "memoryview",
        "list",
        "tuple",
        "list of numpy",
        "strided",
        "u64",
        "array q",
        "misaligned",
        "misaligned u64",
    ],
)
def test_every_sequence_of_the_same_tokens_is_the_same_prompt(tokens: object) -> None:
    router = fleet()
    first, again = placed(router, token_ids=TOKENS), placed(router, token_ids=tokens)
    assert (again.instance, again.predicted_cached_tokens) == (first.instance, 8176)


def test_an_empty_prompt_goes_somewhere() -> None:
    router = fleet()
    for empty in (TOKENS[:0], b"", array.array("I"), [], np.array([])):
        assert placed(router, token_ids=empty).predicted_cached_tokens == 0
    assert placed(router, text="").prompt_tokens == 0


def test_text_and_block_hashes_match_too_and_salts_never() -> None:
    router = fleet()
    text = "the quick brown fox " * 500
    first, again = placed(router, text=text), placed(router, text=text.encode())
    assert again.instance == first.instance
    assert again.predicted_cached_tokens > 2000
    assert placed(router, text=text, cache_salt="tenant").predicted_cached_tokens == 0
    hashes = np.arange(100, dtype=np.uint64)
    placed(router, block_hashes=hashes)
    longer = placed(router, block_hashes=np.arange(101, dtype=np.uint64))
    assert longer.predicted_cached_tokens == 1600
    assert placed(router, block_hashes=misaligned(hashes)).predicted_cached_tokens == 1600 - 16
    assert placed(router, token_ids=hashes).predicted_cached_tokens == 0, (
        "tokens and hashes are different domains"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_ids": "abc"}, "str is not valid; expected a sequence of integers"),
        ({"token_ids": {1, 2}}, "set is not valid; expected a sequence of integers"),
        ({"token_ids": 7}, "int is not valid; expected a sequence of integers"),
        (
            {"token_ids": [1, 2, -3]},
            r"token_ids\[2\]: -3 is not valid; expected an integer from 0 to 4294967295",
        ),
        ({"token_ids": (1, 2**32)}, r"token_ids\[1\]: 4294967296 is not valid"),
        ({"token_ids": [0, True]}, r"token_ids\[1\]: True is not valid"),
        ({"token_ids": [1.5]}, r"token_ids\[0\]: 1.5 is not valid"),
        ({"token_ids": np.zeros(3)}, r"token_ids\[0\]: .*0\.0.* is not valid"),
        ({"token_ids": np.array([5, -1], dtype=np.int64)}, r"token_ids\[1\]: -1 is not valid"),
        ({"token_ids": np.array([5, -1], dtype=np.int8)}, r"token_ids\[1\]: .*-1.* is not valid"),
        ({"token_ids": np.array([0, 2**32], dtype=np.uint64)}, r"token_ids\[1\]: 4294967296 is not valid"),
        ({"token_ids": np.zeros((2, 2), dtype=np.uint32)}, r"token_ids\[0\]: array\(\[0, 0\]"),
        ({"token_ids": b"abc"}, "multiple of 4"),
        ({"block_hashes": [2**64]}, r"block_hashes\[0\]: 18446744073709551616 is not valid"),
        ({"text": 7}, "int is not valid; expected str or bytes"),
        ({}, "exactly one"),
        ({"token_ids": TOKENS, "text": "x"}, "exactly one"),
        ({"text": "x", "split_reason": "why"}, "expected None unless allow_split is False"),
    ],
)
def test_prompts_of_the_wrong_kind_are_refused(arguments: dict[str, object], message: str) -> None:
    router = fleet()
    with pytest.raises(lm.BadValueError, match=message):
        router.route(lm.Request(**arguments))  # type: ignore[arg-type]
    assert router.in_flight() == 0


def test_wrong_names_offer_the_nearest() -> None:
    with pytest.raises(lm.UnknownNameError, match="lmetric"):
        _core.Router("lmetrik")
    with pytest.raises(lm.ExpressionError, match="p_token"):
        _core.Router("p_tokn * (bs + 1)")
    router = fleet()
    with pytest.raises(lm.UnknownNameError, match="e3"):
        router.update_instance("e_3", healthy=False)
    with pytest.raises(lm.UnknownNameError, match="refused"):
        router.route(lm.Request(token_ids=TOKENS))[1].failed("refussed")
    with pytest.raises(lm.BadValueError, match="approximate"):
        _core.Router(kv_source="fuzzy")
    with pytest.raises(lm.BadValueError, match="not in use"):
        router.add_instance("e0")


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(lm.NoInstanceError, match="no instances"):
        _core.Router().route(lm.Request(token_ids=TOKENS))
    router = fleet(n=2)
    router.update_instance("e0", healthy=False)
    router.update_instance("e1", draining=True)
    with pytest.raises(lm.NoInstanceError, match="none of the 2"):
        router.route(lm.Request(token_ids=TOKENS))


def test_a_refused_request_moves_on_and_a_closed_ticket_says_so() -> None:
    router = fleet(n=2)
    decision, ticket = router.route(lm.Request(token_ids=TOKENS))
    other = ticket.failed("refused")
    assert other is not None
    assert other != decision.instance
    assert ticket.instance == other
    assert ticket.failed("timeout") is None
    assert not ticket.open
    with pytest.raises(lm.TicketError, match="closed"):
        ticket.first_token()


def test_with_and_del_close_the_ticket() -> None:
    router = fleet()
    with router.route(lm.Request(token_ids=TOKENS))[1]:
        assert router.in_flight() == 1
    assert router.in_flight() == 0
    held = router.route(lm.Request(token_ids=TOKENS))
    del held
    gc.collect()
    assert router.in_flight() == 0
    assert router.stats()["dropped"] == 2


def test_load_reports_and_indicators() -> None:
    router = fleet("4 * q_bs + r_bs", n=2)
    router.report_load("e0", waiting=3, running=1, kv_usage=0.5)
    columns = router.indicators()
    np.testing.assert_array_equal(columns["bs"], [4, 0])
    assert columns["kv_usage"][0] == 0.5
    assert np.isnan(columns["kv_usage"][1])
    np.testing.assert_array_equal(router.score(lm.Request(token_ids=TOKENS)), [13, 0])
    with pytest.raises(lm.BadValueError, match="waiting"):
        router.report_load("e0", waiting=-1)


def test_batch_scores_equal_single_ones() -> None:
    router = fleet(n=3)
    placed(router, token_ids=TOKENS)
    prompts = [TOKENS[:100], TOKENS[:0], TOKENS]
    batch = router.score_batch([lm.Request(prompt) for prompt in prompts])
    assert batch.shape == (3, 3)
    for row, prompt in zip(batch, prompts, strict=True):
        np.testing.assert_array_equal(row, router.score(lm.Request(token_ids=prompt)))


def test_hit_tokens_of_every_live_instance() -> None:
    router = fleet(n=3)
    held = placed(router, token_ids=TOKENS).instance
    router.remove_instance(next(name for name in router.instances() if name != held))
    hits = dict(
        zip(router.instances(), router.cached_tokens(lm.Request(token_ids=TOKENS)).tolist(), strict=True)
    )
    assert hits == {name: 8176 if name == held else 0 for name in router.instances()}
    assert router.in_flight() == 0


def test_exact_feed_by_engine_hashes() -> None:
    router = fleet(kv_source="exact", block_size=16)
    tokens = TOKENS[:64]
    assert placed(router, token_ids=tokens).predicted_cached_tokens == 0
    hashes = np.array([11, 22, 33], dtype=np.uint64)
    assert router.blocks_stored("e2", hashes, tokens[:48]) == 0
    decision = placed(router, token_ids=tokens)
    assert (decision.instance, decision.predicted_cached_tokens) == ("e2", 48)
    router.blocks_removed("e2", hashes[2:])
    assert placed(router, token_ids=tokens).predicted_cached_tokens == 32
    assert router.blocks_stored("e2", np.array([44], dtype=np.uint64), tokens[48:], parent=99) == 1
    router.blocks_cleared("e2")
    assert placed(router, token_ids=tokens).predicted_cached_tokens == 0
    with pytest.raises(lm.BadValueError, match="16 a block"):
        router.blocks_stored("e2", hashes, tokens[:40])


def test_engines_may_send_signed_hashes() -> None:
    router = fleet(kv_source="exact", block_size=16)
    assert router.blocks_stored("e2", [-5], TOKENS[:16]) == 0
    assert router.blocks_stored("e2", [-6], TOKENS[16:32], parent=-5) == 0
    assert router.blocks_stored("e2", [2**64 - 7], TOKENS[32:48], parent=2**64 - 6) == 0
    assert placed(router, token_ids=TOKENS[:64]).predicted_cached_tokens == 48
    router.blocks_removed("e2", [-7])
    assert placed(router, token_ids=TOKENS[:64]).predicted_cached_tokens == 32
    for parent in ("5", 2**64, -(2**63) - 1, True, 1.0):
        with pytest.raises(lm.BadValueError, match=r"parent: .* is not valid; expected an integer"):
            router.blocks_stored("e2", [1], TOKENS[:16], parent=parent)  # type: ignore[arg-type]


def test_a_cache_has_blocks() -> None:
    """The rebalancer divides by their number."""
    router = fleet(n=2, rebalance=lm.Star())
    message = "cache_blocks of {}: 0 is not valid; expected 1 or more"
    with pytest.raises(lm.BadValueError, match=message.format("e0")):
        router.update_instance("e0", draining=True, cache_blocks=0)
    with pytest.raises(lm.BadValueError, match=message.format("e9")):
        router.add_instance("e9", cache_blocks=0)
    assert router.instances() == ["e0", "e1"]
    router.update_instance("e1", draining=True)
    assert placed(router, token_ids=TOKENS[:16]).instance == "e0", "the invalid call has changed nothing"
    router.update_instance("e0", cache_blocks=1)
    router.rebalance()


def test_tiers_below_the_gpu() -> None:
    router = fleet("tier_hit_tokens * 0 + p_token", kv_source="exact", block_size=16, tier_load_ratio=0.25)
    tokens, hashes = TOKENS[:65], np.array([11, 22, 33, 44], dtype=np.uint64)
    assert router.blocks_stored("e2", hashes, tokens[:64]) == 0
    assert router.blocks_stored("e2", hashes, [], medium="cpu") == 0  # by name alone
    assert router.blocks_stored("e1", hashes, [], medium="CPU") == 4  # e1 has not named these blocks
    assert router.blocks_stored("e1", hashes[:2], tokens[:32], medium="Storage") == 0
    router.blocks_removed("e2", hashes[1:])
    decision, ticket = router.route(lm.Request(token_ids=tokens))
    assert (decision.instance, decision.predicted_cached_tokens, decision.predicted_tier_tokens) == (
        ("e2", 64, 48)
    )
    record = router.explain(decision.id)
    assert record is not None
    assert (record["predicted_cached_tokens"], record["predicted_tier_tokens"]) == (64, 48)
    assert record["best"][0]["terms"] == {"tier_hit_tokens": 48.0, "p_token": 65 - 16 - 0.75 * 48}
    ticket.segment_done(cached_tokens=64)
    assert router.stats()["predicted_cached_tokens"] == router.stats()["cached_tokens"] == 64
    assert router.cached_tokens(lm.Request(token_ids=tokens)).tolist() == [0, 0, 16, 0], "on the GPU"
    tier = {"blocks": 4, "hint": True, "load_ratio": 0.25, "loads": 0, "hit_tokens": 48}
    assert router.tiers("e2") == {"CPU": tier}  # no first token was seen, so no load was measured
    assert router.tiers("e0") == {}
    router.blocks_removed("e2", hashes[3:], medium="CPU")
    assert placed(router, token_ids=tokens).predicted_tier_tokens == 32
    router.blocks_cleared("e2")
    assert placed(router, token_ids=tokens).predicted_cached_tokens == 0
    router.blocks_removed("e1", hashes[1:2], medium="STORAGE")  # from here on, it is no hint
    assert placed(router, token_ids=tokens).predicted_tier_tokens == 16
    with pytest.raises(lm.BadValueError, match=r'medium: "tape" is not valid; expected GPU, CPU, STORAGE'):
        router.blocks_removed("e1", hashes, medium="tape")
    with pytest.raises(lm.BadValueError, match="tier_load_ratio: 2 is not valid; expected a number from 0"):
        fleet(tier_load_ratio=2.0)
    with pytest.raises(lm.BadValueError, match='tiers: "some" is not valid; expected "off", "auto" or "all"'):
        fleet(tiers="some")  # type: ignore[arg-type]


def test_a_python_function_decides_and_its_faults_are_told() -> None:
    calls: list[set[str]] = []

    def last(columns: dict[str, np.ndarray]) -> np.ndarray:
        calls.append(set(columns))
        return -np.arange(len(columns["bs"]), dtype=float)

    router = fleet(lm.policy_function(last, reads=[lm.BS, lm.P_TOKEN]), n=3)
    assert router.route(lm.Request(token_ids=TOKENS))[0].instance == "e2"
    assert calls == [{"bs", "p_token"}]

    wrong = fleet(lm.policy_function(lambda columns: np.zeros(7), reads=[lm.BS]), n=3)
    with pytest.raises(lm.LmetricError, match="7 scores for 3"):
        wrong.route(lm.Request(token_ids=TOKENS))
    broken = fleet(lm.policy_function(lambda columns: columns["nope"], reads=[lm.BS]), n=3)
    with pytest.raises(lm.LmetricError, match="nope"):
        broken.route(lm.Request(token_ids=TOKENS))
    assert broken.in_flight() == 0


def test_the_papers_expressions_run_as_written() -> None:
    lam = 0.7
    for score in (
        lm.P_TOKEN * (lm.BS + 1),
        4 * lm.Q_BS + lm.R_BS,
        lam * (1 - lm.KV_HIT) + (1 - lam) * lm.norm(lm.BS),
        lm.Policy(lm.KV_HIT, prefer="max", filter=lm.BS - lm.min(lm.BS) <= 8, then=[lm.BS]),
    ):
        router = lm.Router(score)
        router.add_instance("a")
        assert router.route(lm.Request(token_ids=TOKENS))[0].instance == "a"
    with pytest.raises(AttributeError, match="did you mean 'P_TOKEN'"):
        _ = lm.P_TOKN  # type: ignore[attr-defined]


def nothing(columns: Mapping[str, Any]) -> np.ndarray:
    return np.full(len(columns["bs"]), np.nan)


@pytest.mark.parametrize("policy", ["p_token / bs", lm.policy_function(nothing, reads=[lm.BS])], ids=str)
def test_a_policy_that_scores_nobody_falls_back_to_least_requests(policy: Any) -> None:
    """UX scores absent: the request goes by least requests, is counted, and shown in its record."""
    router = fleet(policy)
    decision, ticket = router.route(lm.Request(token_ids=TOKENS))
    record = router.explain(decision.id)
    assert record is not None
    assert record["unscored"]
    assert {each["score"] for each in record["best"]} == {0.0}
    assert (router.unscored, router.stats()["unscored"], router.stats()["no_instance"]) == (1, 1, 0)
    if policy != "p_token / bs":  # the expression chooses the busy instance from now on
        idle = {*router.instances()} - {decision.instance}
        assert {router.route(lm.Request(token_ids=TOKENS))[0].instance for _ in range(50)} == idle
    ticket.failed("refused")
    assert not np.isfinite(
        fleet(policy).score(lm.Request(token_ids=TOKENS))
    ).any()  # what the policy itself says
    for name in router.instances():
        router.update_instance(name, healthy=False)
    with pytest.raises(lm.NoInstanceError, match="healthy"):
        router.route(lm.Request(token_ids=TOKENS))


def test_a_policy_says_beforehand_what_it_cannot_score() -> None:
    """UX scores absent: the policies are tried on an idle fleet, before the first request."""
    assert lm.Router("p_token * (bs + 1)").policy_warnings() == []
    assert lm.Router("kv_usage").policy_warnings() == []  # engines report it
    (warning,) = lm.Router("p_token / bs").policy_warnings()
    assert "p_token / bs) scores no instance of an idle fleet: its score is not a finite number" in warning
    assert "fewest requests" in warning
    (warning,) = lm.Router("step_seconds + kv_hit").policy_warnings()
    assert "step_seconds is absent until about 100 decode steps" in warning
    (warning,) = lm.Router(decode_policy="tokens / bs").policy_warnings()
    assert "tokens / bs" in warning
    (warning,) = lm.Router(lm.policy_function(nothing, reads=[lm.BS], name="mine")).policy_warnings()
    assert warning.startswith("policy mine ")
    for row in lm.policy_table():
        assert lm.Router(row["name"], decode_policy=row["name"]).policy_warnings() == [], row["name"]


def test_a_policy_function_may_not_call_its_router() -> None:
    routers: list[_core.Router] = []

    def nosy(columns: dict[str, np.ndarray]) -> np.ndarray:
        return columns["bs"] + routers[0].in_flight()

    routers.append(fleet(lm.policy_function(nosy, reads=[lm.BS])))
    with pytest.raises(lm.PolicyError, match="its own router"):
        routers[0].route(lm.Request(token_ids=TOKENS))
    assert routers[0].in_flight() == 0


def test_ctrl_c_in_a_policy_function_reaches_the_caller() -> None:
    """Its error of the policy may be caught: a loop over policies could not be stopped."""

    def interrupted(bs: np.ndarray) -> np.ndarray:
        signal.raise_signal(signal.SIGINT)
        return bs

    router = fleet(interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), contextlib.suppress(lm.PolicyError):
            router.route(lm.Request(token_ids=TOKENS))
    finally:
        signal.signal(signal.SIGINT, before)
    assert router.in_flight() == 0


def test_an_interrupt_that_a_policy_function_raises_itself_is_an_error() -> None:
    """Python raises Ctrl-C in the main thread only; an interrupt would stop a server."""

    def interrupted(bs: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    router = fleet(interrupted)
    before = signal.signal(signal.SIGINT, lambda *_: pytest.fail("interrupted"))
    try:
        with pytest.raises(lm.PolicyError, match="KeyboardInterrupt"):
            router.route(lm.Request(token_ids=TOKENS))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ThreadPoolExecutor(1) as pool, pytest.raises(lm.PolicyError, match="KeyboardInterrupt"):
            pool.submit(router.route, lm.Request(token_ids=TOKENS)).result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert router.in_flight() == 0


def test_a_profile_predicts_the_first_token() -> None:
    constants = {
        "fixed_seconds": 0.01,
        "decode_seconds_per_sequence": 0.0,
        "decode_seconds_per_context_token": 0.0,
        "prefill_seconds_per_token": 1e-4,
        "prefill_seconds_per_attention_pair": 0.0,
        "max_batch_tokens": 4096,
    }
    router = fleet("simulation", step_time=constants)
    np.testing.assert_allclose(router.score(lm.Request(token_ids=TOKENS)), 2 * 0.01 + 8192e-4)
    # One of them has more GPUs, until it has not.
    first = router.instances()[0]
    router.update_instance(first, step_time={**constants, "prefill_seconds_per_token": 2.5e-5})
    scores = router.score(lm.Request(token_ids=TOKENS))
    np.testing.assert_allclose(scores[0], 2 * 0.01 + 8192 * 2.5e-5)
    np.testing.assert_allclose(scores[1:], 2 * 0.01 + 8192e-4)
    router.update_instance(first, step_time=None)
    np.testing.assert_allclose(router.score(lm.Request(token_ids=TOKENS)), 2 * 0.01 + 8192e-4)
    with pytest.raises(lm.UnknownNameError):
        router.update_instance("nobody", step_time=None)
    with pytest.raises(lm.BadValueError, match="fixed_seconds"):
        fleet(step_time={**constants, "fixed_seconds": -1})
    with pytest.raises(lm.BadValueError, match="now"):
        router.route(lm.Request(token_ids=TOKENS), now=float("inf"))


def test_a_request_may_move_to_an_instance_newer_than_its_decision() -> None:
    router = fleet(n=1)
    decision, ticket = router.route(lm.Request(token_ids=TOKENS))
    router.add_instance("new")
    assert ticket.failed("refused") == "new"
    record = router.explain(decision.id)
    assert record is not None
    assert record["tried"] == ["e0", "new"]
    assert ticket.failed("status", retry=False) is None
    assert router.explain(decision.id)["outcome"] == "status"  # type: ignore[index]


def test_equal_instances_share_idle_traffic() -> None:
    router = fleet(n=4)
    counts = Counter(router.route(lm.Request(token_ids=TOKENS[:10]))[0].instance for _ in range(400))
    assert set(counts) == {"e0", "e1", "e2", "e3"}
    assert min(counts.values()) > 50


def test_what_is_left_of_prefills_never_falls_below_zero() -> None:
    """Parts and their sum are rounded apart, at times and rates that are no round numbers."""
    rng = random.Random(7)
    router = fleet(n=2)
    now = 0.0
    tickets: list[_core.Ticket] = []
    for _ in range(20_000):
        now += rng.random() * 0.01
        if len(tickets) < 6 or rng.random() < 0.4:
            _, ticket = router.route(lm.Request(text="x", prompt_tokens=rng.randrange(1, 3000)), now=now)
            ticket.sent(now)
            tickets.append(ticket)
        else:
            ticket = tickets.pop(rng.randrange(len(tickets)))
            if rng.random() < 0.5:
                ticket.first_token(now)
                ticket.segment_done(now=now)
            else:
                ticket.failed("cancelled", now)


def test_threads_share_a_router() -> None:
    router = fleet("p_token * (bs + 1)", n=8)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            prompt = rng.integers(0, 1000, 256, dtype=np.uint32)
            _, ticket = router.route(lm.Request(token_ids=prompt))
            ticket.first_token()
            if rng.random() < 0.5:
                ticket.segment_done()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    gc.collect()
    assert router.in_flight() == 0
    assert router.stats()["decisions"] == 1200
    assert all(row["bs"] == 0 for row in router.stats()["instances"].values())


def public_things() -> list[tuple[str, object]]:
    things: list[tuple[str, object]] = []
    for name in lm.__all__:
        thing = getattr(lm, name)
        if isinstance(thing, lm.Expr):
            continue  # the symbols are instances; the table documents them
        things.append((name, thing))
        if isinstance(thing, type):
            things += [
                (f"{name}.{member}", value)
                for member, value in sorted(vars(thing).items(), key=lambda item: item[0])
                if not member.startswith("_") and not inspect.ismemberdescriptor(value)
            ]
    return things


def test_every_public_name_is_documented() -> None:
    things = public_things()
    assert len(things) > 250
    assert [name for name, thing in things if len((thing.__doc__ or "").strip()) <= 15] == []


def test_step_times_are_learned_from_streams_and_predictions_say_what_they_rest_on() -> None:
    router = _core.Router("lmetric")
    router.add_instance("a")
    row = router.stats()["instances"]["a"]
    assert row["predicted_ttft_source"] == "prior"
    assert row["step_seconds"] is None
    assert row["step_relative_error"] is None
    assert row["prefill_relative_error"] is None
    now = 0.0
    for number in range(30):
        # 10 ms a step, 0.1 ms a prompt token.
        prompt = 100 + 50 * (number % 7)
        decision, ticket = router.route(lm.Request(prompt_tokens=prompt), now=now)
        ticket.sent(now=now)
        now += 0.01 + 1e-4 * prompt
        ticket.first_token(now=now)
        for _ in range(40):
            now += 0.01
            ticket.tokens(1, now=now)
        ticket.segment_done(now=now)
        if number == 0:
            assert router.stats()["instances"]["a"]["predicted_ttft_source"] == "learned_rate"
        now += 1.0
        assert decision.instance == "a"
    row = router.stats()["instances"]["a"]
    assert row["predicted_ttft_source"] == "learned_step_time"
    assert row["step_relative_error"] < 0.05
    assert row["prefill_relative_error"] < 0.5
    router.add_instance("b")
    assert router.stats()["instances"]["b"]["predicted_ttft_source"] == "pool_rate"
    indicators = router.indicators(now)
    assert indicators["step_seconds"][0] == pytest.approx(0.01, rel=0.1)
    assert np.isnan(indicators["step_seconds"][1])

    profile = load_profile("llama-3.1-8b-a100").constants()
    told = _core.Router("lmetric", step_time=profile)
    told.add_instance("a")
    assert told.stats()["instances"]["a"]["predicted_ttft_source"] == "profile"
    # One request with 1,000 tokens of context joins an empty batch.
    tpot = _core.Router("predicted_tpot_seconds", step_time=profile)
    tpot.add_instance("a")
    wanted = sum(
        profile[name] * times
        for name, times in (
            ("fixed_seconds", 1),
            ("decode_seconds_per_sequence", 1),
            ("decode_seconds_per_context_token", 1000),
        )
    )
    assert tpot.score(lm.Request(prompt_tokens=1000))[0] == pytest.approx(wanted)


def test_the_length_curve_of_sibyl_has_settings() -> None:
    """Fidelity gap 13: alpha and the width of its buckets are parameters of the policy."""
    (sibyl,) = [row for row in lm.policy_table() if row["name"] == "sibyl"]
    knobs = {knob["name"]: knob for knob in sibyl["knobs"]}
    assert (knobs["alpha"]["default"], knobs["bucket_tokens"]["default"]) == (0.999, 64)
    for width, points in ((None, 513), (16, 2049), (256, 129)):
        chosen = {} if width is None else {"bucket_tokens": width}
        curve = lm.Router(decode_policy="sibyl", decode_knobs=chosen).learned()["length_survival"]
        assert curve is not None
        assert len(curve) == points  # up to 32,768 tokens
    for wrong in ({"alpha": 1.5}, {"bucket_tokens": 4}, {"bucket_tokens": 64.5}):
        with pytest.raises(lm.BadValueError, match=f"parameter {next(iter(wrong))} of policy sibyl"):
            lm.Router(decode_policy="sibyl", decode_knobs=wrong)
    with pytest.raises(lm.BadValueError, match=r"bucket_tokens: 16 beside .* decode_pressure"):
        lm.Router("sibyl_plus", decode_policy="sibyl", decode_knobs={"bucket_tokens": 16})


def answers(router: _core.Router, lengths: list[int]) -> None:
    for length in lengths:
        _, ticket = router.route(lm.Request(prompt_tokens=100))
        ticket.first_token()
        ticket.tokens(length - 1)
        ticket.segment_done(output_tokens=length)


@pytest.mark.parametrize(("alpha", "left"), [(0.5, 0.5**10), (0.999, 0.5)])
def test_alpha_is_what_the_curve_keeps_of_former_answers(alpha: float, left: float) -> None:
    """Fidelity gap 13: long answers, then as many short ones."""
    router = lm.Router(decode_policy="sibyl", decode_knobs={"alpha": alpha, "bucket_tokens": 32})
    router.add_instance("a")
    answers(router, [320] * 10 + [32] * 10)
    curve = router.learned()["length_survival"]
    assert curve is not None
    assert curve[:3] == pytest.approx([1.0, left, left])  # at 0, 32 and 64 tokens


def test_indicators_of_one_instance_are_those_of_all() -> None:
    router = fleet("lmetric", 3)
    for i in range(5):
        earlier = lm.Request(token_ids=np.arange(512, dtype=np.uint32) + 10_000 * i)
        _decision, ticket = router.route(earlier, now=0.0)
        ticket.first_token(0.0)
        del ticket
    request = lm.Request(token_ids=np.arange(512, dtype=np.uint32))
    kept = [router.route(request, now=0.0) for _ in range(3)]
    columns = router.indicators(now=1.0)
    owners = {row["name"]: row["owner"] for row in _core.indicator_table()}
    built_in = [name for name in columns if owners[name] != "declared"]  # other tests declare some
    for slot, name in enumerate(router.instances()):
        found = router.indicators_of(name, built_in, now=1.0)
        assert list(found) == built_in
        for indicator in built_in:
            column = columns[indicator]
            assert found[indicator] == pytest.approx(column[slot], nan_ok=True), indicator
    assert sum(router.indicators_of(name, ["bs"])["bs"] for name in router.instances()) == len(kept)
    with pytest.raises(lm.UnknownNameError, match='"q_bss"; did you mean "q_bs"'):
        router.indicators_of("e0", ["q_bss"])
    with pytest.raises(lm.UnknownNameError, match="nobody"):
        router.indicators_of("nobody", ["bs"])
    _core.declare_indicator("test_alone", unit="W")
    with pytest.raises(lm.BadValueError, match="expected a built-in indicator"):
        router.indicators_of("e0", ["test_alone"])
    with pytest.raises(lm.BadValueError, match="this one belongs to the request"):
        router.indicators_of("e0", ["prompt_tokens"])


def test_prefill_work_in_seconds_is_learned_on_each_instance() -> None:
    router = fleet("lmetric_seconds", 3)
    prompts = [np.arange(1024, dtype=np.uint32) + 10_000 * i for i in range(3)]
    before = router.score(lm.Request(token_ids=prompts[2]), now=0.0)
    assert before == pytest.approx([1024 / 8000] * 3), "nothing is known of any: the assumed rate"
    chosen, tickets = [], []
    for prompt, seconds in zip(prompts, (0.5, 2.0), strict=False):
        decision, ticket = router.route(lm.Request(token_ids=prompt), now=0.0)
        ticket.first_token(now=seconds)
        chosen.append(decision.instance)
        tickets.append(ticket)  # a ticket that is dropped ends its request
    assert len(set(chosen)) == 2
    scores = dict(
        zip(router.instances(), router.score(lm.Request(token_ids=prompts[2]), now=2.0), strict=True)
    )
    # Each of the two has a request; of the third nothing is known: the mean of their rates.
    rates = [router.prefill_rate(name) or 0.0 for name in chosen]
    (unseen,) = set(scores) - set(chosen)
    assert rates[0] == pytest.approx(2048)
    assert rates[1] < 0.5 * rates[0]
    assert [scores[name] for name in chosen] == pytest.approx([2 * 1024 / rate for rate in rates])
    assert scores[unseen] == pytest.approx(1024 / np.mean(rates))


@pytest.mark.parametrize("source", ["e0", "other"])
def test_a_warm_fetch_asks_no_successor_of_its_source(source: str) -> None:
    """The new engine would compute the prefix that was planned for the engine before it."""
    settings = {"seconds_per_token": 0.0, "fixed_seconds": 0.0, "max_fetches": 1}
    router = fleet(n=1, fleet_changes=lm.WarmChanges(**settings))
    for first in (0, 8192):
        placed(router, token_ids=np.arange(first, first + 8192, dtype=np.uint32))
    router.add_instance("new")
    warming = router.begin_join("new", now=time.monotonic())
    assert warming.planned == 1, "the newcomer takes one of two prompts"
    router.remove_instance("e0")
    router.add_instance(source)
    assert warming.begin(time.monotonic()) is None
    assert (warming.planned, warming.fetched) == (0, (0, 0))
