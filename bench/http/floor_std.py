"""A bare aiohttp proxy, as Python gateways are usually made: aiohttp server, aiohttp client, round
robin.

python bench/http/floor_std.py PORT ENGINE_URL...
"""

from __future__ import annotations

import sys
from itertools import cycle

import aiohttp
import uvloop
from aiohttp import web

HOP = {"transfer-encoding", "connection", "keep-alive"}


def app(engines: list[str]) -> web.Application:
    """Returns the proxy over these engines."""
    turn = cycle(engines)

    async def session(app: web.Application) -> None:
        app["session"] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        client = request.app["session"]
        async with client.request(
            request.method, next(turn) + request.path, data=body, headers=headers
        ) as upstream:
            kept = {k: v for k, v in upstream.headers.items() if k.lower() not in HOP}
            if "content-length" in upstream.headers:
                return web.Response(status=upstream.status, headers=kept, body=await upstream.read())
            answer = web.StreamResponse(status=upstream.status, headers=kept)
            await answer.prepare(request)
            async for chunk in upstream.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    proxy = web.Application(client_max_size=1 << 30)
    proxy.on_startup.append(session)
    proxy.router.add_route("*", "/{path:.*}", handle)
    return proxy


if __name__ == "__main__":
    uvloop.install()
    web.run_app(
        app(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=lambda *_: None
    )
