"""KV index modes by an engine's capabilities, and the backfill of an incomplete index."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from lmetric.config import KvEvents
from lmetric.engines.adapter import Capabilities, EventSource
from lmetric.engines.endpoints import EndpointError
from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.engines.identify import adapters
from lmetric.server.fleet.kv_backfill import MAX_BODY_BYTES, REFILL_REQUESTS, REFILL_SECONDS, KvBackfill
from lmetric.server.fleet.kv_choice import Subscription, choose
from lmetric.server.fleet.kv_mode import ModelFacts, flags_for

TOLD = Capabilities(
    "vllm",
    "0.32.0",
    block_size=16,
    event_sources=(
        EventSource(0, "tcp://*:5557", "kv", "tcp://*:6557"),
        EventSource(1, "tcp://*:5558", "kv", "tcp://*:6558"),
    ),
)
POOL = ModelFacts(16, "e0", knows_tokens=True)
HOST = "10.0.0.4"


@pytest.mark.parametrize(
    ("given", "events", "replay"),
    [
        ({}, "tcp://*:5557", "tcp://*:5558"),
        ({"endpoint": "tcp://*:5559"}, "tcp://*:5559", "tcp://*:5560"),
        ({"endpoint": "tcp://10.0.0.4:5558"}, "tcp://*:5558", "tcp://*:5559"),
        ({"endpoint": "tcp://a:1", "replay_endpoint": "tcp://[::1]:5557"}, "tcp://*:1", "tcp://*:5557"),
        ({"replay_endpoint": "tcp://*:7"}, "tcp://*:5557", "tcp://*:7"),
        # The router listens there. The flag is for an engine that listens.
        ({"endpoint": "tcp://*:9", "bind": True}, "tcp://*:5557", "tcp://*:5558"),
    ],
)
def test_flags_name_the_configured_ports(given: dict[str, Any], events: str, replay: str) -> None:
    for adapter in adapters():
        flag = flags_for(adapter.flags, KvEvents(**given))["kv_events"]
        assert f'"endpoint": "{events}", "replay_endpoint": "{replay}"' in flag
        assert flags_for(adapter.flags, "auto") == adapter.flags


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
    change: dict[str, Any], setting: Any, pool: ModelFacts, name: str, why: str, fix: str
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


def test_a_replay_endpoint_that_is_out_of_reach_is_not_used() -> None:
    """security F9: such an endpoint was kept as the engine had reported it."""
    for replay in ("tcp://127.0.0.1:5558", "ipc:///run/kv", "tcp://[::ffff:127.0.0.1]:5558", "tcp://*:kv"):
        source = EventSource(0, "tcp://*:5557", replay_endpoint=replay)
        mode, heard = choose(replace(TOLD, event_sources=(source,)), HOST, "auto", POOL)
        assert (mode.name, heard) == ("exact", (Subscription("tcp://10.0.0.4:5557", None),))

    def admit(endpoint: str) -> str:
        if endpoint == "tcp://10.0.0.4:5557":
            return endpoint
        raise EndpointError("not allowed", "allow it")

    source = EventSource(0, "tcp://*:5557", replay_endpoint="tcp://*:5558")
    _, heard = choose(replace(TOLD, event_sources=(source,)), HOST, "auto", POOL, admit=admit)
    assert heard == (Subscription("tcp://10.0.0.4:5557", None),)
    source = EventSource(0, "tcp://10.0.0.9:5557")
    mode, heard = choose(replace(TOLD, event_sources=(source,)), HOST, "auto", POOL, admit=admit)
    assert (mode.name, mode.detail, mode.fix, heard) == ("approximate", "not allowed", "allow it", ())


def test_the_number_of_an_engines_sources_is_bounded() -> None:
    """security F5: each source takes two sockets and a share of the feed's memory."""
    for ranks in (range(257), [-1], [65_536]):
        sources = tuple(EventSource(rank, "tcp://*:5557") for rank in ranks)
        mode, heard = choose(replace(TOLD, event_sources=sources), HOST, "auto", POOL)
        assert (mode.name, mode.cause, heard) == (
            *("approximate", "it reports too many or wrong KV event sources"),
            (),
        )
    sources = tuple(EventSource(rank, "tcp://*:5557") for rank in range(256))
    assert len(choose(replace(TOLD, event_sources=sources), HOST, "auto", POOL)[1]) == 256


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
    # The engine would report it in a message that the feed refuses (security F5).
    long = body + b" " * MAX_BODY_BYTES
    assert refill.body(CHAT, long, 9999) is long
    refill.left = 0
    assert refill.over(100.0)
    assert refill.body(CHAT, body, 9999) is body
