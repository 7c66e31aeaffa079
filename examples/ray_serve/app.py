"""Replicas with emulated engines in Ray Serve. The core of lmetric-router chooses the replica.

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

from lmetric.defaults import DEFAULT_POLICY
from lmetric_lab.emulated import EngineOptions, EngineServer

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
    """An emulated engine in the process of the replica."""

    async def __init__(self) -> None:
        self._engine = EngineServer(self.options())
        await self._engine.start()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))

    def options(self) -> EngineOptions:
        """Returns the settings of the engine."""
        return EngineOptions(port=0, model=MODEL)

    async def generate(self, completion: Completion) -> AsyncIterator[bytes]:
        """Yields the engine's answer in the parts in which it came."""
        url = f"{self._engine.url}/v1/completions"
        async with self._session.post(url, json=completion.body) as answer:
            async for part in answer.content.iter_any():
                yield part


api = FastAPI()


@serve.deployment(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Gateway:
    """The HTTP API. Its handle of the replicas owns the request router."""

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
        """Lists the model."""
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}


class Arguments(BaseModel):
    """Arguments of `build`, as in ``serve run app:build replicas=8 policy=vllm``."""

    replicas: int = 4
    policy: str = DEFAULT_POLICY
    cache_blocks: int | None = None  # KV blocks of a replica


def build(arguments: Arguments) -> serve.Application:
    """Returns the application: a gateway with a handle of the replicas."""
    settings = arguments.model_dump(include={"policy", "cache_blocks"})
    router = RequestRouterConfig(request_router_class=LMETRIC, request_router_kwargs=settings)
    replicas = Replica.options(num_replicas=arguments.replicas, request_router_config=router)  # type: ignore[attr-defined]
    return Gateway.bind(replicas.bind())  # type: ignore[attr-defined,no-any-return]


app = build(Arguments())
