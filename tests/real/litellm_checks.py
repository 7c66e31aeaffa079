"""Checks of our strategy in a running LiteLLM proxy. It runs in LiteLLM's environment, as a program
of `test_real_litellm.py`, and prints one JSON object."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from proxy import Proxy

from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated.options import EngineOptions

TOKENIZER = Path(sys.modules[EngineOptions.__module__].__file__ or "").parent
PROBE = Path(__file__).parent / "litellm_probe.py"


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Be brief. " * 60}, {"role": "user", "content": text}]
    return {"model": "emulated", "messages": messages, "max_tokens": 8, **fields}


class Checks:
    def __init__(self, proxy: Proxy, http: aiohttp.ClientSession, folder: Path) -> None:
        self.proxy, self.http, self.folder = proxy, http, folder
        self.chat_url = f"{proxy.url}/v1/chat/completions"

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "probe.json").read_text())
        return state

    async def settled(self) -> dict[str, Any]:
        """The state when nothing is in flight any more, or after 20 s."""
        await asyncio.sleep(0.3)
        for _ in range(200):
            if not self.state()["in_flight"]:
                break
            await asyncio.sleep(0.1)
        return self.state()

    async def answer(self, **fields: Any) -> dict[str, Any]:
        async with self.http.post(self.chat_url, json=chat(**fields)) as answer:
            body = await answer.json()
            if answer.status != 200:
                return {"status": answer.status, "body": body}
            details = body["usage"].get("prompt_tokens_details") or {}
            engine = self.proxy.engine_of(answer)
            return {"status": 200, "engine": engine, "cached": details.get("cached_tokens") or 0}

    async def leave(self, *, stream: bool) -> int:
        """Sends a long request, leaves it, and returns the number in flight before.

        LiteLLM cancels streams only. Other requests run on, and count until their answer ends.
        """
        fields = {"max_tokens": 4_000 if stream else 400, "stream": stream}
        request = asyncio.create_task(self._long(fields))
        for _ in range(400):
            if self.state()["in_flight"]:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        before = int(self.state()["in_flight"])
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        return before

    async def _long(self, fields: dict[str, Any]) -> None:
        async with self.http.post(self.chat_url, json=chat("a long one", **fields)) as answer:
            async for _ in answer.content:
                pass


async def main() -> None:
    found: dict[str, Any] = {}
    options = EngineOptions(port=0, clock_speed=5, max_model_len=200_000, cache_blocks=20_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = {
            "LMETRIC_TOKENIZER": str(TOKENIZER),
            "LMETRIC_RECORDS": str(folder / "records.jsonl"),
            "LMETRIC_PROBE": str(folder / "probe.json"),
        }
        async with (
            EmbeddedEngines(2, options, kv_events=True) as engines,
            Proxy(engines.urls, folder, callback=PROBE, env=env) as proxy,
            aiohttp.ClientSession(headers=proxy.headers) as http,
        ):
            checks = Checks(proxy, http, folder)
            found["first"] = await checks.answer(text="one")
            for _ in range(100):  # until the engines have answered which events they publish
                if len(checks.state()["modes"]) == 2:
                    break
                await asyncio.sleep(0.2)
            found["modes"] = checks.state()["modes"]
            found["again"] = [await checks.answer(text="one") for _ in range(3)]
            await asyncio.gather(*(checks.answer(text=f"{n} " * 300) for n in range(12)))
            found["after_answers"] = await checks.settled()
            async with http.post(checks.chat_url, json=chat("s", stream=True)) as answer:
                found["stream_events"] = (await answer.text()).count("data: ")
            body = {"model": "emulated", "prompt": "Be brief. " * 60, "max_tokens": 4}
            async with http.post(f"{proxy.url}/v1/completions", json=body) as answer:
                found["completion"] = answer.status
            found["after_stream"] = await checks.settled()
            for stream in (True, False):
                found[f"left_{stream}"] = [await checks.leave(stream=stream), await checks.settled()]
            engines.engines[0].process.kill()
            await engines.engines[0].process.wait()
            found["one_engine"] = [await checks.answer(text=f"after {n}") for n in range(4)]
            found["after_failure"] = await checks.settled()
            engines.engines[1].process.kill()
            await engines.engines[1].process.wait()
            found["no_engine"] = (await checks.answer(text="none"))["status"]
            found["after_all"] = await checks.settled()
            found["records"] = [
                json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()
            ]
    print(json.dumps(found))


asyncio.run(main())
