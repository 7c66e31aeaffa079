"""Replicas with emulated engines behind Ray Serve; lmetric-router's core chooses the replica.

``serve run app:app`` serves `/v1/completions` and `/v1/models`. With Ray Serve LLM, set the same
`request_router_config` in the `deployment_config` of your `LLMConfig`: see the page on Ray Serve.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from lmetric.engines.emulated import EngineOptions, EngineServer

MODEL = "emulated"
LMETRIC = "lmetric.gateways.ray_serve.LmetricRequestRouter"


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion request. Routers of Ray read its prompt from an attribute."""

    prompt: str | list[int]
    max_tokens: int | None
    body: dict[str, Any]  # for the engine


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.1})
class Replica:
    """An emulated engine, in the process of the replica."""

    async def __init__(self) -> None:
        self._engine = EngineServer(EngineOptions(port=0, model=MODEL))
        await self._engine.start()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))

    async def generate(self, completion: Completion) -> AsyncIterator[bytes]:
        """The engine's answer, in the parts in which it came."""
        url = f"{self._engine.url}/v1/completions"
        async with self._session.post(url, json=completion.body) as answer:
            async for part in answer.content.iter_any():
                yield part


api = FastAPI()


@serve.deployment(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Gateway:
    """The HTTP API. Its handle of the replicas has the router."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True, method_name="generate")

    @api.post("/v1/completions")
    async def completions(self, request: Request) -> StreamingResponse:
        """Streams an answer."""
        body = await request.json()
        answer = self._replicas.remote(Completion(body["prompt"], body.get("max_tokens"), body))
        kind = "text/event-stream" if body.get("stream") else "application/json"
        return StreamingResponse(answer, media_type=kind)

    @api.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        """The model."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


class Arguments(BaseModel):
    """Of `build`, as in ``serve run app:build replicas=8 policy=vllm``."""

    router: str = LMETRIC  # path of a class
    replicas: int = 4
    policy: str | None = None  # of lmetric's router
    cache_blocks: int | None = None  # of a replica, for lmetric's router


def build(arguments: Arguments) -> serve.Application:
    """The application: a gateway with a handle of the replicas."""
    settings = arguments.model_dump(include={"policy", "cache_blocks"}, exclude_none=True)
    chosen = RequestRouterConfig(request_router_class=arguments.router, request_router_kwargs=settings)
    replicas = Replica.options(num_replicas=arguments.replicas, request_router_config=chosen)  # type: ignore[attr-defined]
    return Gateway.bind(replicas.bind())  # type: ignore[attr-defined,no-any-return]


app = build(Arguments())
