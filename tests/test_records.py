"""`lmetric.records` says what the router's dictionaries hold."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import pytest

import lmetric as lm
from lmetric import options, records


def check(value: Any, hint: Any, place: str) -> None:
    """Raises AssertionError where a value is not of its type."""
    origin, inner = get_origin(hint), get_args(hint)
    if is_typeddict(hint):
        hints = get_type_hints(hint)
        assert list(value) == list(hints), place
        for name, each in hints.items():
            check(value[name], each, f"{place}.{name}")
    elif origin in (Union, types.UnionType):
        (some,) = [each for each in inner if each is not type(None)]
        if value is not None:
            check(value, some, place)
    elif origin is dict:
        for name, each in value.items():
            assert type(name) is inner[0], place
            check(each, inner[1], f"{place}[{name!r}]")
    elif origin is list:
        assert type(value) is list, place
        for each in value:
            check(each, inner[0], f"{place}[]")
    elif origin is tuple:
        assert (type(value), len(value)) == (tuple, len(inner)), place
        for each, expected in zip(value, inner, strict=True):
            check(each, expected, place)
    elif origin is Literal:
        assert value in inner, place
    elif origin is np.ndarray:
        assert value.dtype == np.float64, place
    else:
        assert type(value) is hint, f"{place}: {value!r} is not {hint}"


def whole() -> tuple[lm.Router, int]:
    """A request that one instance answered, after another failed."""
    router = lm.Router("lmetric", priority=options.UniBoost())
    for name in ("a", "b"):
        router.add_instance(name)
    decision, ticket = router.route(lm.Request(range(40), request_id="r", tenant="t"))
    router.report_load(decision.instance, waiting=1, running=2, kv_usage=0.5)
    ticket.failed("reset", retry=True)
    ticket.first_token()
    ticket.done(output_tokens=3, cached_tokens=16)
    return router, decision.id


def divided() -> tuple[lm.Router, int]:
    """A request whose prompt and answer are on two instances."""
    router = lm.Router("lmetric", prefix_fetch=options.PrefixFetch())
    router.add_instance("p", role="prefill")
    router.add_instance("d", role="decode")
    decision, ticket = router.route(lm.Request(range(400), max_tokens=10))
    ticket.segment_done()
    ticket.first_token()
    ticket.done(output_tokens=3)
    return router, decision.id


def absent() -> tuple[lm.Router, int]:
    """A policy that scores nobody, and a request that still runs."""
    router = lm.Router("p_token / bs", guard=True)
    router.add_instance("a")
    decision, ticket = router.route(lm.Request(prompt_tokens=3))
    open_tickets.append(ticket)
    return router, decision.id


open_tickets: list[lm.Ticket] = []


@pytest.mark.parametrize("made", [whole, divided, absent])
def test_the_dictionaries_are_of_their_types(made: Any) -> None:
    router, number = made()
    check(router.explain(number), records.DecisionRecord, "explain")
    check(router.stats(), records.RouterStats, "stats")
    check(router.learned(), records.LearnedValues, "learned")


def test_the_records_of_these_requests_are_not_alike() -> None:
    shown = [router.explain(number) for router, number in (whole(), divided(), absent())]
    assert [record["outcome"] for record in shown] == ["finished", "finished", "running"]
    assert [len(record["tried"]) for record in shown] == [2, 1, 1]
    assert [record["unscored"] for record in shown] == [False, False, True]
    assert shown[0]["priority"] is not None
    assert shown[1]["decode_instance"] == "d"


def test_the_indicators_of_an_instance_are_those_of_the_table() -> None:
    table = {row["name"]: row for row in lm.indicator_table() if row["scope"] == "instance"}
    hints = get_type_hints(records.InstanceStats)
    own = {"healthy", "draining", "role", "in_flight", "decisions", "predicted_ttft_source"}
    assert [name for name in hints if name not in own] == [
        name for name, row in table.items() if row["owner"] != "declared"
    ]
    with_none = {name for name in hints if name not in own and hints[name] != float}  # noqa: E721
    known = "never: a request of unknown output length counts 0"
    assert with_none == {name for name in hints.keys() - own if table[name]["absent"] not in ("never", known)}
