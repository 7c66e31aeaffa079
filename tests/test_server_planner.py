"""Policy planner through the server: it chooses the decode engine, unseen by clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmetric import BadValueError, Router
from lmetric.config import load_config
from lmetric.option_values import kind_of, parse
from split_world import CHAT, COMPLETIONS, alone, asked, body_of, both, equal, split


def bodies(count: int, path: str = COMPLETIONS) -> list[dict[str, Any]]:
    """Returns streams of 30 to 90 tokens after prompts of some hundred tokens."""
    return [
        body_of(
            path, f"{n} quiet rivers ran to the sea " * (20 + n % 30), max_tokens=30 + n % 60, stream=True
        )
        for n in range(count)
    ]


async def test_some_decode_elsewhere_and_all_answers_are_one_engines() -> None:
    # The clock runs twice as fast: KV transfers seem to take twice as long, and gains are half as
    # large. On a busy machine, a faster clock would leave the engines' speed unknown.
    free = {"transfer_fixed_seconds": 0, "transfer_seconds_per_token": 0}
    settings = {"kind": "apart", "min_gain_seconds": 0, **free}
    engines = [both(clock_speed=2.0)] * 3
    async with split(*engines, policy="planner", split=settings) as w:
        model = w.server.fleet.models[0]
        told = model.router.stats()
        assert (told["policy"], model.splits) == ("planner", True)
        first = await asked(w, COMPLETIONS, bodies(1)[0])
        unknown = "the speed of the instances is unknown"
        assert first["record"]["split_reason"] == unknown
        assert first["record"]["stay_seconds"] is None
        # Until its step times are known.
        before = [await asked(w, COMPLETIONS, each) for each in bodies(24)]
        while before[-1]["record"]["split_reason"] == unknown:  # a busy machine measures too little
            before += [await asked(w, COMPLETIONS, each) for each in bodies(8)]
        asking = [(path, body) for path in (CHAT, COMPLETIONS) for body in bodies(40, path)]
        heard = await asyncio.gather(*(asked(w, path, body) for path, body in asking))
        cut = [said for said in heard if said["record"]["cuts"]]
        # The speed can become unknown again, while a busy machine measures steps that do not fit.
        unmeasured = [said for said in heard if said["record"]["split_reason"] == unknown]
        assert all(said["record"]["stay_seconds"] is None for said in unmeasured)
        assert 0 < len(cut) < len(heard) - len(unmeasured)
        for said in heard:
            record = said["record"]
            stay, apart = record["stay_seconds"], record["decode_placement_seconds"]
            if said in unmeasured:
                continue
            if record["cuts"]:
                # The prefill produces the first token: these settings make a KV transfer free.
                assert record["cuts"] == [record["prompt_tokens"] + 1]
                assert record["decode_instance"] != record["instance"]
                assert (record["split_reason"], record["decode_score"]) == (None, apart)
                assert 0 < apart < stay
            else:
                assert record["split_reason"] == "a decode on another instance gains too little"
                assert 0 < stay <= apart
        for (path, body), said in list(zip(asking, heard, strict=True))[::4]:
            equal(said, await alone(w, path, body))
        all_cut = len(cut) + sum(bool(said["record"]["cuts"]) for said in before)
        pulled = model.fetch_outcomes["fetched"]
        assert model.fetch_outcomes.keys() <= {"fetched", "late"}  # the clock is fast, waits are not
        assert w.outcomes == {"transferred": all_cut + pulled}
        assert model.router.stats()["in_flight"] == 0


async def test_engines_that_hand_nothing_over_take_requests_whole() -> None:
    plain = both(kv_connector="none", kv_bidirectional=False)
    async with split(plain, plain, at=None, policy="planner") as w:
        for body in bodies(6):
            said = await asked(w, COMPLETIONS, body)
            equal(said, await alone(w, COMPLETIONS, body))
            record = said["record"]
            assert (record["cuts"], record["split_reason"]) == ([], "its instance cannot transfer KV")
        assert not w.outcomes


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((("libra", name)) for name in ("probes", "min_tokens", "margin_tokens")),
        ("apart", "prior_tokens"),
    ],
)
def test_settings_in_whole_numbers_are_whole(kind: str, name: str) -> None:
    for wrong in (2.5, -1.0, float("nan"), 2.0**32):
        with pytest.raises(BadValueError, match=f"split.{name}: .*(an integer|finite|whole number from)"):
            Router().configure(split=parse("split", {"kind": kind, name: wrong}))
    Router().configure(split=parse("split", {"kind": kind, name: 2.0}))


def test_libra_has_two_parts_or_three() -> None:
    for wrong in (1.0, 2.5, 4.0, float("nan")):
        with pytest.raises(BadValueError, match=r"split\.parts: .*(expected 2 or 3|an integer|finite)"):
            Router().configure(split=parse("split", {"kind": "libra", "parts": wrong}))
    for parts in (2.0, 3.0):
        Router().configure(split=parse("split", {"kind": "libra", "parts": parts}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": "planner"}, "apart"),
        ({"policy": {"name": "planner"}}, "apart"),
        ({"policy": "planner", "split": "none"}, "none"),
        ({"policy": "planner", "split": "libra"}, "libra"),
        ({"policy": "lmetric"}, "none"),
        ({"policy": "lmetric", "split": "apart"}, "apart"),
    ],
)
def test_what_cuts_goes_with_the_policy_unless_it_is_said(given: dict[str, Any], expected: str) -> None:
    config = load_config(None, {"embedded": 2, **given})
    chosen = config.pool_settings().routing.split
    assert (kind_of(chosen), config.splits) == (expected, expected != "none")
