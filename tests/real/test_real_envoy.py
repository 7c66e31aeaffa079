"""A real Envoy with the endpoint picker in front of two real vLLM engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from epp_world import envoy, example, needs_envoy
from lmetric_lab.ports import free_ports
from vllm_process import MODEL, VllmEngine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Start = Callable[..., list[VllmEngine]]
LONG = "The river runs through the garden and under the bridge to the market. " * 20


async def test_turns_of_a_chat_go_to_the_engine_with_their_prefix(vllm_engines: Start) -> None:
    needs_envoy()
    engines = vllm_engines(2)
    pages, picker = free_ports(2)
    with ExitStack() as stack:
        urls = [engine.url for engine in engines]
        await asyncio.to_thread(
            example.start_router, stack, "epp", urls, (pages, picker), "--policy", "lmetric"
        )
        places = [url.removeprefix("http://") for url in urls]
        async with envoy([f"127.0.0.1:{picker}"], places) as url, aiohttp.ClientSession() as client:

            async def page(path: str) -> Any:
                async with client.get(f"http://127.0.0.1:{pages}{path}") as answer:
                    return await answer.json()

            async with asyncio.timeout(60):
                while not all(each["mode"] == "exact" for each in await page("/debug/engines")):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)

            async def record(decision: str) -> dict[str, Any]:
                async with asyncio.timeout(30):
                    while not (found := await page(f"/debug/decisions/{decision}?full=1")).get("outcome"):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                return found  # type: ignore[no-any-return]

            messages = [{"role": "user", "content": LONG}]
            names = []
            for turn in range(3):
                body = {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True}
                async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    names.append(answer.headers["x-lmetric-instance"])
                    said = (await answer.json())["choices"][0]["message"]["content"]
                    seen = await record(answer.headers["x-lmetric-decision"])
                assert seen["predicted_cached_tokens"] == seen["cached_tokens"]
                assert (seen["cached_tokens"] > 0) == (turn > 0)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
                await asyncio.sleep(1)  # events of the blocks
            # The usage has the exact count: a token inside a character makes no event of its own.
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert (await answer.text()).rstrip().endswith("data: [DONE]")
                seen = await record(answer.headers["x-lmetric-decision"])
                assert seen["output_tokens"] == 8
            assert len(set(names)) == 1, "the turns follow their prefix"
            async with client.get(f"http://127.0.0.1:{pages}/metrics") as answer:
                assert 'lmetric_epp_requests_total{outcome="picked"} 4.0' in await answer.text()
