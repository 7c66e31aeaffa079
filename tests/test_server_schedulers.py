"""Engines with the schedulers of lmetric-vllm: what the router knows, sends and receives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lmetric as lm
from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor import Target, examine
from lmetric.engines import xargs
from lmetric.engines.adapter import Scheduler
from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.engines.identify import identify
from lmetric.server.api.paths import AUDIO
from lmetric.server.fleet.parsing import GENERATE
from server_world import FakeEngine, World, world
from test_event_feed import load, publisher, stored
from test_server_audio import KIND, form, heard
from test_server_kv import IDS

VLLM = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="999"} 1\n'
SLO = b'lmetric_scheduler_info{scheduler="SloScheduler",version="0.1.0",token_slo_ms="20",profile=""} 1.0\n'
BOOST = b'lmetric_scheduler_info{scheduler="UniBoostScheduler",version="0.1.0",token_slo_ms=""} 1.0\n'


async def scheduler_of(page: bytes) -> Scheduler | None:
    async def ask(path: str) -> tuple[int, bytes]:
        pages = {"/metrics": page, "/v1/models": b'{"data": [{"id": "tiny", "parent": null}]}'}
        return (200, pages[path]) if path in pages else (404, b"{}")

    _, capabilities = await identify(ask)
    return capabilities.scheduler


async def test_a_scheduler_is_known_by_its_metric() -> None:
    known = await scheduler_of(VLLM + SLO)
    assert known == Scheduler("SloScheduler", "0.1.0", {"token_slo_ms": "20"})
    assert str(known) == "SloScheduler (lmetric-vllm 0.1.0, token_slo_ms 20)"
    assert await scheduler_of(VLLM) is None
    bad = [
        b"lmetric_scheduler_info 1\n",
        b'lmetric_scheduler_info{scheduler="",version="1"} 1\n',
        b'lmetric_scheduler_info{scheduler="x"} 1\n',
        b'lmetric_scheduler_info{scheduler="%b",version="1"} 1\n' % (b"x" * 5000),
        b"lmetric_scheduler_info{%b} 1\n" % b",".join(b'n%d="x"' % n for n in range(99)),
    ]
    for line in bad:
        assert await scheduler_of(VLLM + line) is None, line[:80]


def test_the_fields_of_requests_have_these_names() -> None:
    assert (xargs.HANDICAP, xargs.GAMMA) == ("boost_handicap_seconds", "boost_gamma")


async def engine_page(w: World) -> dict[str, Any]:
    async with w.client.get(f"{w.url}/debug/engines") as response:
        [engine] = await response.json()
        return dict(engine)


async def test_load_of_each_step_reaches_the_pages() -> None:
    with publisher() as events:
        fake = FakeEngine(metrics=VLLM + SLO)
        await fake.start()
        entry = {"url": fake.url, "name": "e0", "kv_events": {**IDS, "endpoint": events.endpoint}}
        async with world([], engines=[entry]) as w:
            w.engines.append(fake)  # stopped with the others
            await w.until(events.heard)
            events.publish(load(3, 5, kv_usage=0.25, prefill_tokens=900))
            events.publish(load(-1, 5))
            events.publish(stored([1], list(range(16))))
            [model] = w.server.fleet.models
            await w.until(lambda: model.router.indicators()["queued_prefill_tokens"][0] == 900)
            [engine] = w.server.fleet.engines()
            await w.until(lambda: engine.load_reports["kv_events"] == 2)
            shown = await engine_page(w)
            known = {"name": "SloScheduler", "version": "0.1.0", "settings": {"token_slo_ms": "20"}}
            assert shown["capabilities"]["scheduler"] == known
            assert shown["load"]["reports"] == {"kv_events": 2}
            assert shown["kv_events"]["ranks"]["0"]["skipped"] == {"malformed_load": 1}
            assert shown["mode"] == "exact"
            async with w.client.get(f"{w.url}/debug/live") as response:
                live = await response.text()
            assert "SloScheduler (lmetric-vllm 0.1.0, token_slo_ms 20)" in live


async def identified(w: World) -> None:
    await w.until(lambda: all(each.identified for each in w.server.fleet.engines()))


async def sent(
    w: World, fake: FakeEngine, body: dict[str, Any] | bytes, path: str = COMPLETIONS, **headers: str
) -> dict[str, Any]:
    """The body that the engine gets, without a priority header."""
    fake.requests.clear()
    raw = body if isinstance(body, bytes) else json.dumps({"model": "tiny", "prompt": "a", **body}).encode()
    async with w.client.post(w.url + path, data=raw, headers=headers) as response:
        await response.read()
    [request] = [each for each in fake.requests if each.path == path]
    assert "x-vllm-priority" not in request.headers
    return dict(json.loads(request.body))


async def test_a_scheduler_with_boosts_gets_handicap_and_gamma() -> None:
    fake = FakeEngine(metrics=VLLM + BOOST)
    tenants = {"bulk": {"handicap_seconds": 500.0}, "chat": {}}
    order = {"kind": "uniboost", "gamma": 0.25, "adaptive": False}
    async with world([fake], priority=order, tenants=tenants) as w:
        [model] = w.server.fleet.models
        await identified(w)
        model.priority.follow()  # as the router does each 10 s
        bulk = {"x-tenant": "bulk"}
        set_by_router = {"boost_handicap_seconds": 500.0, "boost_gamma": 0.25}
        assert (await sent(w, fake, {}, **bulk))["vllm_xargs"] == set_by_router
        client = {"vllm_xargs": {"boost_handicap_seconds": -1e6, "boost_gamma": 1e-6, "token_slo_ms": 20}}
        got = (await sent(w, fake, client, **bulk))["vllm_xargs"]
        assert got == {**set_by_router, "token_slo_ms": 20}
        hidden = rb'{"model": "tiny", "prompt": "a", "\u0076llm_xargs": {"boost_handicap_seconds": -1}}'
        assert (await sent(w, fake, hidden, **bulk))["vllm_xargs"] == set_by_router
        assert (await sent(w, fake, {"vllm_xargs": 7}, **bulk))["vllm_xargs"] == 7  # the engine refuses it
        others = (await sent(w, fake, {}))["vllm_xargs"]
        assert others == {"boost_handicap_seconds": 0.0, "boost_gamma": 0.25}
        shown = await engine_page(w)
        assert (
            shown["priority"] == "sent as the tenant's handicap and gamma; its scheduler computes the order"
        )


async def test_no_path_gives_an_engine_the_values_of_clients() -> None:
    fake = FakeEngine(metrics=VLLM + BOOST)
    cheat = {"boost_handicap_seconds": -1e6, "boost_gamma": 1e-6, "token_slo_ms": 20}
    set_by_router = {"boost_handicap_seconds": 500.0, "boost_gamma": 0.25}
    order = {"kind": "uniboost", "gamma": 0.25, "adaptive": False}
    async with world([fake], priority=order, tenants={"bulk": {"handicap_seconds": 500.0}}) as w:
        [model] = w.server.fleet.models
        await identified(w)
        model.priority.follow()
        bulk = {"x-tenant": "bulk"}
        chats = {"messages": [[{"role": "user", "content": "a"}]] * 2, "vllm_xargs": cheat}
        got = await sent(w, fake, chats, f"{CHAT}/batch", **bulk)
        assert got["vllm_xargs"] == {**set_by_router, "token_slo_ms": 20}

        sampling: dict[str, Any]
        long = {"extra_args": cheat, "x": "x" * 9000}
        for sampling in ({"seed": 3}, {"seed": 3, "extra_args": cheat}, long):
            got = await sent(w, fake, {"token_ids": [1, 2], "sampling_params": sampling}, GENERATE, **bulk)
            rest = {"token_slo_ms": 20} if "extra_args" in sampling else {}
            assert got["sampling_params"] == {**sampling, "extra_args": set_by_router | rest}
            assert got["token_ids"] == [1, 2]
        hidden = rb'{"token_ids": [1], "sampling_params": 1, "s\u0061mpling_params": {"extr\u0061_args": %b}}'
        raw = hidden.replace(b"%b", json.dumps(cheat).encode())
        got = await sent(w, fake, raw, GENERATE, **bulk)
        assert got["sampling_params"] == {"extra_args": {"token_slo_ms": 20, **set_by_router}}
        last = json.dumps(long).encode()  # engines take the last value
        twice = rb'{"token_ids": [1], "sampling_params": 1, "sampling_params": %b}' % last
        got = await sent(w, fake, twice, GENERATE, **bulk)
        assert got["sampling_params"]["extra_args"] == {"token_slo_ms": 20, **set_by_router}
        for refused in (7, {"extra_args": [1]}):  # by the engine
            got = await sent(w, fake, {"token_ids": [1], "sampling_params": refused}, GENERATE, **bulk)
            assert got["sampling_params"] == refused


@pytest.mark.parametrize("path", AUDIO)
@pytest.mark.parametrize("name", ["vllm_xargs", "vllm_xargs[a]"])
async def test_a_form_with_values_for_the_scheduler_is_refused(path: str, name: str, tmp_path: Path) -> None:
    own = form(("file", b"RIFF"), ("model", b"tiny"), (name, b'{"boost_handicap_seconds": -1e6}'))
    plain = form(("file", b"RIFF"), ("model", b"tiny"))
    keys = tmp_path / "keys.yaml"
    keys.write_text("a-key: chat\n")
    head = {"content-type": KIND.decode(), "authorization": "Bearer a-key"}
    checked = {"auth": {"keys_file": str(keys)}}
    cases: list[tuple[dict[str, Any], bytes, int]] = [
        ({"priority": {"kind": "uniboost"}}, VLLM + BOOST, 400),
        (checked, VLLM + BOOST, 400),
        (checked, VLLM, 200),  # a scheduler without boosts
        ({}, VLLM + BOOST, 200),  # clients may set their own order
    ]
    for config, metrics, status in cases:
        fake = FakeEngine(metrics=metrics, behave=heard)
        async with world([fake], **config) as w:
            await identified(w)
            got, _, body = await w.post(own, path=path, headers=head)
            assert got == status, (config, body)
            if status == 400:
                assert body["error"]["param"] == "vllm_xargs"
                assert "accepts it in JSON bodies only" in body["error"]["message"]
            assert (await w.post(plain, path=path, headers=head))[0] == 200


async def test_without_an_order_of_the_router_clients_keep_or_lose_their_own(tmp_path: Path) -> None:
    own = {"vllm_xargs": {"boost_handicap_seconds": 3.0}}
    fake = FakeEngine(metrics=VLLM + BOOST)
    async with world([fake]) as w:
        assert (await sent(w, fake, own))["vllm_xargs"] == own["vllm_xargs"]
        assert "vllm_xargs" not in await sent(w, fake, {})
    keys = tmp_path / "keys.yaml"
    keys.write_text("a-key: chat\n")
    async with world([fake], auth={"keys_file": str(keys)}) as w:
        headers = {"authorization": "Bearer a-key"}
        assert (await sent(w, fake, own, **headers))["vllm_xargs"] == {}


async def test_the_doctor_names_the_scheduler() -> None:
    fake = FakeEngine(metrics=VLLM + BOOST)
    await fake.start()
    try:
        [found] = await examine([Target(EngineConfig(url=fake.url), None, PoolSettings())])
    finally:
        await fake.stop()
    assert found.verdicts["model"].seen.endswith("with UniBoostScheduler (lmetric-vllm 0.1.0)")
    assert found.verdicts["priority"].seen == "UniBoostScheduler computes the order of its queue"


def test_a_routers_gamma_replaces_the_learned_one() -> None:
    boost = lm.EngineBoost({"gamma": 0.1})
    boost.give(0.5)
    assert boost.gamma == 0.1, "ranks change only at an update"
    for _ in range(16):
        boost.ended(1.0)
    assert boost.look()
    assert boost.gamma == 0.5
    for _ in range(16):
        boost.ended(1.0)
    assert boost.look()
    assert boost.gamma == 0.1, "without a router's, the engine's own"
    with pytest.raises(lm.BadValueError, match="gamma"):
        boost.give(0.0)
