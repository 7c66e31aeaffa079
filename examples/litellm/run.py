"""A LiteLLM proxy with this router's strategy over emulated engines, in the environment of `run`.

It starts the engines and the proxy, plays three conversations, and prints the engine and the cached
tokens of each answer.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from proxy import Proxy

from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated.options import EngineOptions

HERE = Path(__file__).parent
TOKENIZER = Path(sys.modules[EngineOptions.__module__].__file__ or "").parent


@asynccontextmanager
async def gateway(folder: Path, engines: int = 2) -> AsyncIterator[tuple[Proxy, aiohttp.ClientSession]]:
    options = EngineOptions(port=0, clock_speed=50)
    async with EmbeddedEngines(engines, options, kv_events=True) as embedded:
        records = folder / "decisions.jsonl"
        settings = {"LMETRIC_RECORDS": str(records), "LMETRIC_TOKENIZER": str(TOKENIZER)}
        async with (
            Proxy(embedded.urls, folder, callback=HERE / "lmetric_routing.py", env=settings) as proxy,
            aiohttp.ClientSession(headers=proxy.headers) as http,
        ):
            yield proxy, http


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with gateway(folder) as (proxy, http):
            system = {"role": "system", "content": "You are a patient assistant. " * 40}
            talks = [[system, {"role": "user", "content": f"Conversation {n}. " * 20}] for n in range(3)]
            for turn in range(3):
                for number, talk in enumerate(talks):
                    body = {"model": "emulated", "messages": talk, "max_tokens": 16}
                    async with http.post(f"{proxy.url}/v1/chat/completions", json=body) as answer:
                        got = await answer.json()
                        engine = proxy.engine_of(answer)
                    details = got["usage"].get("prompt_tokens_details") or {}
                    cached, whole = details.get("cached_tokens") or 0, got["usage"]["prompt_tokens"]
                    print(f"turn {turn}, conversation {number}: {engine}, {cached} of {whole} tokens cached")
                    talk.append(got["choices"][0]["message"] | {"role": "assistant"})
                    talk.append({"role": "user", "content": f"And then, {turn}? " * 20})
        lines = (folder / "decisions.jsonl").read_text().splitlines()
        first = json.loads(lines[0])
        print(f"{len(lines)} decision records, the first by policy {first['policy']}: {first['instance']}")


if __name__ == "__main__":
    asyncio.run(main())
