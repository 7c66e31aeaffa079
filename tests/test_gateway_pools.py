"""The routers inside other gateways, over real emulated engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lmetric import Request, Router
from lmetric.gateways.placements import Placement
from lmetric.gateways.pools import Deployment, Pool
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated import options as emulated
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer

TOKENIZER = Path(emulated.__file__).parent
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello there. " * 50}], "max_tokens": 5}


def route(pool: Pool) -> str:
    placement = Placement(pool.router, pool.fields("chat", CHAT))
    placement.send()
    placement.done(output_tokens=1)
    return pool.id_of(placement.decision.instance)


def test_only_usable_deployments_get_requests() -> None:
    pool = Pool(Router("round_robin"), None)
    all_three = [Deployment(each, f"http://{each}:1") for each in ("a", "b", "c")]
    pool.use(all_three)
    assert {route(pool) for _ in range(6)} == {"a", "b", "c"}
    pool.use(all_three[:2])
    assert {route(pool) for _ in range(6)} == {"a", "b"}
    pool.use([all_three[2]])
    assert {route(pool) for _ in range(3)} == {"c"}
    pool.use([*all_three, Deployment("provider")])
    assert {route(pool) for _ in range(8)} == {"a", "b", "c", "provider"}
    assert pool.router.in_flight() == 0


def test_two_deployments_of_one_engine_keep_their_identifiers() -> None:
    pool = Pool(Router("round_robin"), None)
    pool.use([Deployment("x", "http://e:1"), Deployment("y", "http://e:1")])
    assert {route(pool) for _ in range(4)} == {"x", "y"}


def test_a_repeated_prompt_goes_to_the_same_deployment() -> None:
    pool = Pool(Router("lmetric"), None)
    pool.use([Deployment(str(number)) for number in range(4)])
    first = route(pool)
    assert {route(pool) for _ in range(4)} == {first}
    longer = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Yes?"}]}
    cached = pool.router.cached_tokens(Request(**pool.fields("chat", longer)))
    assert max(cached) > 100


def test_prompts_of_all_kinds() -> None:
    pool = Pool(Router("lmetric"), PromptTokenizer.load(TOKENIZER))
    chat = pool.fields("chat", CHAT, session="s")
    assert len(chat["token_ids"]) > 100
    assert (chat["max_tokens"], chat["session"]) == (5, "s")
    assert len(pool.fields("completion", {"prompt": "Hello there"})["token_ids"]) > 0
    ids = pool.fields("completion", {"prompt": [1, 2, 3], "cache_salt": "pepper"})
    assert list(ids["token_ids"]) == [1, 2, 3]
    assert ids["cache_salt"] == "pepper"
    assert "token_ids" not in pool.fields("input", {"input": "An embedding"})
    without = Pool(Router("lmetric"), None).fields("chat", CHAT)
    assert b"Hello there" in bytes(without["text"])
    for each in (chat, ids, without):
        Request(**each)


async def test_engines_report_their_features_and_load(tmp_path: Path) -> None:
    events = f"ipc://{tmp_path}/events"
    options = EngineOptions(
        port=0,
        block_tokens=32,
        cache_blocks=777,
        kv_events_endpoint=events,
        kv_events_replay_endpoint=f"{events}-r",
    )
    async with EngineServer(options) as engine:
        pool = Pool(Router("lmetric"), PromptTokenizer.load(TOKENIZER))
        pool.use([Deployment("one", engine.url), Deployment("gone", "http://127.0.0.1:9")])
        pool.keep()
        for _ in range(200):
            if pool.modes:
                break
            await asyncio.sleep(0.05)
        assert list(pool.modes.values()) == ["exact"]
        assert pool.router.block_size == 32
        route(pool)
        await pool.close()
        assert pool.router.in_flight() == 0
