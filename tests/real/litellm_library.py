"""Checks of our strategy in LiteLLM as a library. It runs in LiteLLM's environment, as a program of
`test_real_litellm.py`, and prints one JSON object."""

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import litellm

from lmetric import Request
from lmetric.gateways import litellm as gateway
from lmetric.gateways.pools import Deployment
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated.options import EngineOptions

TOKENIZER = Path(sys.modules[EngineOptions.__module__].__file__ or "").parent
MESSAGES = [{"role": "system", "content": "Be brief. " * 60}, {"role": "user", "content": "Hello"}]


async def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether the condition holds in time."""
    for _ in range(int(20 * seconds)):
        if condition():
            return True
        await asyncio.sleep(0.05)
    return False


def read_fields(strategy: gateway.LmetricStrategy, messages: Any = MESSAGES, **fields: Any) -> Any:
    """The fields of a request for the core, from these fields of its body."""
    pool = strategy._pool("fields")
    pool.use([Deployment("one")])
    strategy._choose(pool, "fields", messages, None, {"litellm_call_id": "fields", **fields})
    call = strategy._calls["fields"]
    strategy._close("fields", call, "cancelled")
    return call._fields


def ids(fields: Any) -> list[int]:
    """The tokens of a prompt; empty: they are not known."""
    return [int(token) for token in fields.get("token_ids", ())]


async def pools_of_names() -> dict[str, list[str]]:
    """The pools after requests for the names of one group, and for names that a client invents."""
    strategy = gateway.LmetricStrategy("lmetric")
    params = {"model": "hosted_vllm/emulated", "api_base": "http://127.0.0.1:9/v1", "api_key": "none"}
    router = litellm.Router(
        model_list=[
            {"model_name": name, "litellm_params": params | {"model": model}}
            for name, model in (("llama", "hosted_vllm/emulated"), ("vllm/*", "hosted_vllm/*"))
            for _ in range(2)
        ],
        model_group_alias={"nick": "llama"},
    )
    strategy.install(router)
    found, models = {}, {}
    for names in (["llama", "nick"], [f"vllm/{number}" for number in range(50)]):
        for name in names:
            chosen = await strategy.async_get_available_deployment(name, MESSAGES, request_kwargs={})
            models[name] = chosen["litellm_params"]["model"]
        found[names[0]] = sorted(strategy._pools)
    assert models["vllm/7"] == "hosted_vllm/7"
    asked = Request(lora_name="vllm/7", **strategy._pools["vllm/*"].fields("chat", {"messages": MESSAGES}))
    other = Request(lora_name="vllm/x", **strategy._pools["vllm/*"].fields("chat", {"messages": MESSAGES}))
    cached = [max(strategy.router("vllm/*").cached_tokens(each)) > 0 for each in (asked, other)]
    assert cached == [True, False], "models of a wildcard share no cache"
    await strategy.close()
    return found


async def main() -> None:
    found: dict[str, Any] = {}
    strategy = gateway.LmetricStrategy("lmetric", tokenizer=TOKENIZER)
    options = EngineOptions(port=0, max_model_len=200_000, cache_blocks=20_000)
    async with EmbeddedEngines(1, options) as engines:
        params = {"model": "hosted_vllm/emulated", "api_base": f"{engines.urls[0]}/v1", "api_key": "none"}
        router = litellm.Router(model_list=[{"model_name": "emulated", "litellm_params": params}])
        strategy.install(router)
        ask = partial(router.acompletion, model="emulated", messages=MESSAGES)
        task: Any = asyncio.current_task()

        async def read(begun: asyncio.Event | None = None, **fields: Any) -> None:
            async for _ in await ask(stream=True, **fields):
                if begun is not None:
                    begun.set()

        await ask(max_tokens=4, extra_body={"cache_salt": "pepper"})
        await read(max_tokens=4)
        found["after_answers"] = await until(lambda: strategy.in_flight() == 0)
        found["callbacks"] = sum("LmetricStrategy" in repr(each) for each in task._callbacks)
        core, fields = strategy.router("emulated"), strategy._pools["emulated"].fields
        for salt in ("pepper", "salt"):
            asked = Request(**fields("chat", {"messages": MESSAGES, "cache_salt": salt}))
            found[salt] = int(max(core.cached_tokens(asked)))

        begun = asyncio.Event()
        reading = asyncio.create_task(read(begun, max_tokens=4_000))
        await begun.wait()
        found["while_streaming"] = strategy.in_flight()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        found["after_cancel"] = await until(lambda: strategy.in_flight() == 0, 2.0)

        async def drop() -> None:
            await anext(await ask(stream=True, max_tokens=4_000))

        await drop()
        gc.collect()
        found["after_drop"] = await until(lambda: strategy.in_flight() == 0, 2.0)

        gateway.SILENT_SECONDS = 3.0
        stream = await ask(stream=True, max_tokens=4_000)
        await anext(stream)
        found["abandoned"] = strategy.in_flight()
        found["within_limit"] = await until(lambda: strategy.in_flight() == 0, 1.0)
        found["after_limit"] = await until(lambda: strategy.in_flight() == 0, 6.0)
        late = gateway._Call(strategy._pools["emulated"], {"prompt_tokens": 1}, 9_000)
        found["own_limit"] = late.seconds
        late.fail("cancelled")

        found["plain"] = len(read_fields(strategy)["token_ids"])
        found["no_turn"] = len(read_fields(strategy, add_generation_prompt=False)["token_ids"])
        found["limited"] = read_fields(strategy, extra_body={"max_output_tokens": 7})["max_tokens"]
        found["session"] = read_fields(strategy, user="u")["session"]
        system, question = MESSAGES
        tool = {"name": "look", "description": "Looks."}
        schema = {"type": "object", "properties": {}}
        found["agents"] = {
            "chat": ids(read_fields(strategy)),
            "messages": ids(read_fields(strategy, [question], system=system["content"])),
            "responses": ids(
                read_fields(strategy, None, input=question["content"], instructions=system["content"])
            ),
            "tools": ids(
                read_fields(strategy, tools=[{"type": "function", "function": tool | {"parameters": schema}}])
            ),
            "messages_tools": ids(
                read_fields(
                    strategy,
                    [question],
                    system=[{"type": "text", "text": system["content"]}],
                    tools=[tool | {"input_schema": schema}],
                    metadata={"user_id": "u"},  # as Claude Code sends it
                    litellm_metadata={"user_api_key_request_route": "/v1/messages"},
                )
            ),
        }
        await strategy.close()
    found["pools"] = await pools_of_names()
    print(json.dumps(found))


asyncio.run(main())
