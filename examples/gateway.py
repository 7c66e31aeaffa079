"""A gateway in 20 lines, with aiohttp and lmetric.Relay.

It starts two emulated engines, sends four requests through the gateway, and prints the engine of
each answer.

Run: python examples/gateway.py
"""

import asyncio
import contextlib

import aiohttp
from aiohttp import web

import lmetric as lm
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer

PATH = "/v1/completions"


class Gateway:
    def __init__(self, http: aiohttp.ClientSession, engines: dict[str, str]) -> None:
        self.http, self.engines = http, engines
        self.router = lm.Router()
        for name in engines:
            self.router.add_instance(name)

    async def completions(self, asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        request = lm.Request(body["prompt"], max_tokens=body["max_tokens"])
        async with lm.Relay(self.router, request, self.http, self.engines, body, path=PATH) as answer:
            response = web.StreamResponse(
                status=answer.status,
                headers={"content-type": answer.content_type, "x-instance": answer.instance},
            )
            await response.prepare(asked)
            async for piece in answer:
                await response.write(piece)
        return response


async def main() -> None:
    async with contextlib.AsyncExitStack() as stack:
        options = EngineOptions(port=0, model="tiny", clock_speed=50)
        engines = {
            name: (await stack.enter_async_context(EngineServer(options))).url for name in ("gpu-0", "gpu-1")
        }
        http = await stack.enter_async_context(aiohttp.ClientSession())
        gateway = Gateway(http, engines)
        app = web.Application()
        app.router.add_post(PATH, gateway.completions)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{PATH}"

        shared = list(range(1, 201))
        for turn in range(4):
            body = {"model": "tiny", "prompt": [*shared, 1000 + turn], "max_tokens": 8, "stream": True}
            async with http.post(url, json=body) as answer:
                events = (await answer.text()).count("data: ")
                print(f"turn {turn}: {answer.headers['x-instance']}, {events} events")
        print(gateway.router)


asyncio.run(main())
