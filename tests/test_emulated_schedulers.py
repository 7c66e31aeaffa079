"""Emulated engines with the schedulers of docs/how-to/engine_schedulers.md, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
import pytest
from pydantic import ValidationError

from lmetric.config import ServerConfig
from lmetric.engines.embedded import EmbeddedEngines
from lmetric.engines.xargs import own_token_slo
from lmetric.server.embedded import embedded_flags
from test_server_process import router
from waiting import PATIENCE_SECONDS

LONG = [token % 500 for token in range(20_000)]  # steps of 4,096 tokens take 0.4 s without a limit
FOREVER = {"prompt": "Tell me of routers.", "max_tokens": 50_000, "ignore_eos": True, "stream": True}


async def samples(http: aiohttp.ClientSession, engine: str) -> dict[str, float]:
    """The engine's metrics: names with the label le, if any, and values."""
    async with http.get(f"{engine}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("vllm:")]
    found = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        bound = name.partition('le="')[2].partition('"')[0]
        found[f"{name.partition('{')[0].removeprefix('vllm:')} {bound}".strip()] = float(value)
    return found


async def gaps_beside_a_long_prompt(
    http: aiohttp.ClientSession, server: str, engine: str, **chat: Any
) -> dict[str, float]:
    """Gaps between tokens of a chat by upper bound (cumulative, on the engine's clock).

    A long prompt comes while the chat streams.
    """
    url = f"{server}/v1/completions"
    async with http.post(url, json={**FOREVER, **chat}) as streaming:
        await streaming.content.readline()
        async with http.post(url, json={"prompt": LONG, "max_tokens": 1}) as response:
            assert response.status == 200
        found = await samples(http, engine)
    start = "inter_token_latency_seconds_bucket "
    return {name.removeprefix(start): count for name, count in found.items() if name.startswith(start)}


def engine_flags(scheduler: str) -> list[str]:
    """The flags of an engine that `--embedded` starts."""
    return embedded_flags(ServerConfig.model_validate({"embedded": f"1{scheduler}"}))[0][1]


async def test_the_longest_gap_beside_a_long_prompt_is_within_the_slo() -> None:
    async with (
        router("--embedded", "1,slo=200") as r,
        EmbeddedEngines([engine_flags(""), engine_flags(",slo=50")]) as engines,
        aiohttp.ClientSession() as http,
    ):
        await r.listening()
        async with http.get(f"{r.url}/debug/engines") as response:
            (routed,) = orjson.loads(await response.read())
        stock, slo, own = await asyncio.gather(
            *(gaps_beside_a_long_prompt(http, url, url) for url in engines.urls),
            gaps_beside_a_long_prompt(http, r.url, routed["url"], vllm_xargs={"token_slo_ms": 50}),
        )
        r.process.terminate()
        assert await r.ended() == 0
    assert stock["0.3"] < stock["+Inf"]
    assert slo["0.05"] == slo["+Inf"] > 0
    assert slo["0.025"] < slo["+Inf"], "the prompt takes part of the steps"
    assert own["0.05"] == own["+Inf"] > 0, "the request's own time counts"


async def ends(scheduler: str) -> list[str]:
    """The order in which requests end: two long ones wait before a short one for a single slot."""
    flags = engine_flags(scheduler)
    ended: list[str] = []
    async with (
        EmbeddedEngines([[*flags, "--max-sequences", "1", "--clock-speed", "10"]]) as engines,
        aiohttp.ClientSession() as http,
    ):
        (engine,) = engines.urls

        async def ask(name: str, **body: Any) -> None:
            async with http.post(f"{engine}/v1/completions", json=body) as response:
                assert response.status == 200
            ended.append(name)

        async def submitted(count: int) -> None:
            """Waits until the engine has got this number of requests."""
            while True:
                found = await samples(http, engine)
                if found["num_requests_waiting"] + found["num_requests_running"] + len(ended) >= count:
                    return
                await asyncio.sleep(0.01)

        asks: list[asyncio.Task[None]] = []
        async with http.post(f"{engine}/v1/completions", json=FOREVER | {"max_tokens": 200_000}) as holder:
            await holder.content.readline()
            for name, prompt in (("long", LONG), ("longer", [7, *LONG]), ("short", LONG[7:50])):
                asks.append(asyncio.create_task(ask(name, prompt=prompt, max_tokens=20)))
                await asyncio.wait_for(submitted(1 + len(asks)), PATIENCE_SECONDS)
        await asyncio.gather(*asks)
    return ended


async def test_a_short_request_overtakes_long_ones() -> None:
    stock, uniboost = await asyncio.gather(ends(""), ends(",uniboost"))
    assert stock == ["long", "longer", "short"]
    assert uniboost == ["short", "long", "longer"]


async def test_an_impossible_time_is_refused_as_vllm_refuses_bodies(subtests: pytest.Subtests) -> None:
    async with EmbeddedEngines([["--order", "slo"], []]) as engines, aiohttp.ClientSession() as http:
        slo, stock = (f"{url}/v1/completions" for url in engines.urls)
        for millis in (0, -1, "soon", 60_001, [50]):
            body = {"prompt": "Hi", "max_tokens": 2, "vllm_xargs": {"token_slo_ms": millis}}
            with subtests.test(millis=millis):
                for stream in (False, True):
                    async with http.post(slo, json=body | {"stream": stream}) as response:
                        answer = orjson.loads(await response.read())
                    assert response.status == 400
                    error = answer["error"]
                    assert (error["type"], error["param"]) == ("BadRequestError", "vllm_xargs")
                    assert "token_slo_ms" in error["message"]
                async with http.post(stock, json=body) as response:
                    assert response.status == 200, "its scheduler does not read it"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        ({}, None),
        ({"token_slo_ms": "20"}, 0.02),
        ({"token_slo_ms": 70}, 0.07),
        ({"token_slo_ms": 12.6}, 0.0126),
        ({"token_slo_ms": 0.001}, 0.0125),  # a quarter of the engine's
    ],
)
def test_a_requests_own_time_is_read(given: Any, seconds: float | None) -> None:
    assert own_token_slo(given, 0.05) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["x" * 10_000, ["x" * 10_000], 10**4000], ids=["text", "list", "number"])
def test_a_long_value_is_cut_in_messages(given: Any) -> None:
    with pytest.raises(ValueError, match=r"token_slo_ms is .*\.\.\..*, not a number") as refused:
        own_token_slo({"token_slo_ms": given}, 0.05)
    assert len(str(refused.value)) < 200


def test_a_message_reads_few_elements_of_a_list() -> None:
    """The text of a million took 0.1 s of a step."""
    with pytest.raises(ValueError, match=r"token_slo_ms is \[1, 1, 1, 1, 1, 1, \.\.\.\], not a number"):
        own_token_slo({"token_slo_ms": [1] * 10**6}, 0.05)


@pytest.mark.parametrize(
    "wrong", ["2,slo", "2,slo=0", "2,slo=-5", "2,slo=70000", "2,slo=nan", "2,fast", ",slo=5"]
)
def test_schedulers_that_do_not_exist(wrong: str) -> None:
    with pytest.raises(ValidationError, match="expected"):
        ServerConfig.model_validate({"embedded": wrong})


def test_embedded_engines_get_the_flags_of_their_scheduler() -> None:
    def flags(embedded: Any, **more: Any) -> list[tuple[str, list[str]]]:
        return embedded_flags(ServerConfig.model_validate({"embedded": embedded, **more}))

    assert flags(2) == flags("2") == [("both", [])] * 2
    assert flags("2,slo=12.5") == [("both", ["--order", "slo", "--order-slo", "0.0125"])] * 2
    assert [(role, each[:2]) for role, each in flags("1p1d,uniboost")] == [
        ("prefill", ["--order", "uniboost"]),
        ("decode", ["--order", "uniboost"]),
    ]
    with pytest.raises(ValidationError, match="orders the engines' queues"):
        flags("1,slo=50", priority="vtc", experimental=True)
