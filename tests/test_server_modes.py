"""KV index modes by an engine's capabilities, and the backfill of an incomplete index."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from lmetric.config import KvEvents
from lmetric.engines.adapter import Capabilities, EventSource
from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.server.fleet.kv_backfill import REFILL_REQUESTS, REFILL_SECONDS, KvBackfill
from lmetric.server.fleet.kv_mode import PoolFacts, Subscription, choose

TOLD = Capabilities(
    "vllm",
    "0.32.0",
    block_size=16,
    event_sources=(
        EventSource(0, "tcp://*:5557", "kv", "tcp://*:6557"),
        EventSource(1, "tcp://*:5558", "kv", "tcp://*:6558"),
    ),
)
POOL = PoolFacts(16, "e0", knows_tokens=True)
HOST = "10.0.0.4"


def test_exact_where_all_fits() -> None:
    mode, heard = choose(TOLD, HOST, "auto", POOL)
    assert mode.name == "exact"
    assert heard == (
        Subscription("tcp://10.0.0.4:5557", "tcp://10.0.0.4:6557", "kv", rank=0),
        Subscription("tcp://10.0.0.4:5558", "tcp://10.0.0.4:6558", "kv", rank=1),
    )


@pytest.mark.parametrize(
    ("change", "setting", "pool", "name", "why", "fix"),
    [
        ({"prefix_caching": False}, "auto", POOL, "load_only", "prefix cache is off", "--cache"),
        ({}, "off", POOL, "approximate", "off in the configuration", "remove kv_events"),
        ({"event_sources": (), "no_events": "are off"}, "auto", POOL, "approximate", "are off", "--events"),
        ({"event_sources": (), "events_fix": "set x"}, "auto", POOL, "approximate", "no KV events", "set x"),
        (
            *({}, "auto", replace(POOL, knows_tokens=False)),
            *("approximate", "tokenizer is not known", "set tokenizer (doctor: --tokenizer)"),
        ),
        (
            *({"block_size": 32}, "auto", POOL),
            *("approximate", "32 tokens, its model's index 16 (by e0)", "set the same block size"),
        ),
        (
            {"event_sources": (EventSource(0, "tcp://10.0.0.9:5557", connects=True),)},
            "auto",
            POOL,
            "approximate",
            "it connects to tcp://10.0.0.9:5557",
            "so that the router listens",
        ),
        (
            {"event_sources": (EventSource(0, "tcp://127.0.0.1:5557"),)},
            "auto",
            POOL,
            "approximate",
            "only its own machine",
            "tcp://*:5557",
        ),
    ],
)
def test_why_not_exact(
    change: dict[str, Any], setting: Any, pool: PoolFacts, name: str, why: str, fix: str
) -> None:
    flags = {"prefix_cache": "--cache", "kv_events": "--events"}
    mode, heard = choose(replace(TOLD, **change), HOST, setting, pool, flags=flags)
    assert (mode.name, heard) == (name, ())
    assert why in mode.reason
    assert fix in str(mode.fix)
    # Clients without credentials may see the cause: it has no address and no engine's name.
    assert not re.search(r"tcp://|[0-9]|e0", mode.cause)


def test_the_configuration_has_the_last_word_on_where_events_are() -> None:
    old = Capabilities("vllm", "0.9.2", block_size=16, no_events="does not tell")
    given = KvEvents(endpoint="tcp://*:7000", replay_endpoint="tcp://*:7100", topic="a")
    _, heard = choose(old, HOST, given, POOL)
    assert heard == (Subscription("tcp://10.0.0.4:7000", "tcp://10.0.0.4:7100", "a"),)
    _, heard = choose(TOLD, HOST, given, POOL)
    assert [one.endpoint for one in heard] == ["tcp://10.0.0.4:7000", "tcp://10.0.0.4:7001"]
    assert [one.replay_endpoint for one in heard] == ["tcp://10.0.0.4:7100", "tcp://10.0.0.4:7101"]
    bound = KvEvents(endpoint="tcp://*:7000", bind=True)
    _, heard = choose(TOLD, HOST, bound, POOL)
    assert [(one.endpoint, one.topic, one.bind) for one in heard] == [
        ("tcp://*:7000", "kv", True),
        ("tcp://*:7001", "kv", True),
    ]
    blind = replace(POOL, knows_tokens=False)
    mode, heard = choose(TOLD, HOST, KvEvents(without_tokenizer=True), blind)
    assert (mode.name, len(heard)) == ("exact", 2)
    assert "text prompts count as not cached" in mode.reason


def test_a_refill_asks_where_something_may_be_hidden_and_is_bounded() -> None:
    field = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    refill = KvBackfill(field, 16, now=100.0)
    body = b' {"prompt": [1, 2], "model": "m"}'
    assert json.loads(refill.body(COMPLETIONS, body, 32)) == {**json.loads(body), **field}
    assert json.loads(refill.body(CHAT, body, 9999)) == {**json.loads(body), **field}
    own = b'{"prompt": "a", "vllm_xargs": {"seed": 1}}'
    for path, sent, unknown in ((COMPLETIONS, body, 31), ("/v1/embeddings", body, 99), (CHAT, own, 99)):
        assert refill.body(path, sent, unknown) is sent
    assert refill.left == REFILL_REQUESTS - 2
    assert not refill.over(100.0 + REFILL_SECONDS - 1)
    assert refill.over(100.0 + REFILL_SECONDS)
    refill.left = 0
    assert refill.over(100.0)
    assert refill.body(CHAT, body, 9999) is body
