"""Serves Ray Serve LLM with emulated engines and the request router.

Prints ``ready PORT``, and serves until the end of the input. Ray LLM creates `EmulatedEngine`
because RAYLLM_VLLM_ENGINE_CLS names it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionResponse, CompletionResponse
from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig, build_openai_app

from lmetric.engines.emulated.options import EngineOptions
from lmetric.engines.emulated.server import EngineServer

LMETRIC = "lmetric.gateways.ray_serve.LmetricRequestRouter"
REPLICAS = 2


class EmulatedEngine(LLMEngine):  # type: ignore[misc]
    """An engine of Ray LLM that answers by an emulated engine."""

    def __init__(self, llm_config: LLMConfig) -> None:
        super().__init__(llm_config)
        self._engine = EngineServer(EngineOptions(port=0, model=llm_config.model_id))

    async def start(self) -> None:
        await self._engine.start()
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def check_health(self) -> None:
        pass

    async def _answers(self, path: str, request: Any, whole: type) -> AsyncIterator[Any]:
        body = request.model_dump(mode="json", exclude_unset=True)
        async with self._session.post(f"{self._engine.url}/v1/{path}", json=body) as answer:
            answer.raise_for_status()
            if not request.stream:
                yield whole(**await answer.json())
                return
            async for line in answer.content:
                if line.startswith(b"data: "):
                    yield f"{line.decode().strip()}\n\n"

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        async for part in self._answers("completions", request, CompletionResponse):
            yield part

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        async for part in self._answers("chat/completions", request, ChatCompletionResponse):
            yield part

    async def _absent(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the emulated engine answers completions and chats only")

    resolve_lora = embeddings = transcriptions = score = tokenize = detokenize = _absent
    reset_prefix_cache = sleep = wakeup = is_sleeping = pause = resume = is_paused = _absent
    collective_rpc = build_asgi_app = _absent


def main() -> None:
    """Serves until the end of the input."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["RAYLLM_VLLM_ENGINE_CLS"] = "ray_llm_world.EmulatedEngine"
    ray.init(
        num_cpus=16, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
        _metrics_export_port=int(sys.argv[1]),
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    router = RequestRouterConfig(request_router_class=LMETRIC, request_router_kwargs={"cache_blocks": 20_000})
    config = LLMConfig(
        model_loading_config={"model_id": "emulated", "model_source": "/nowhere"},
        deployment_config={"num_replicas": REPLICAS, "request_router_config": router},
        placement_group_config={"bundles": [{"CPU": 1}]},
        runtime_env={"env_vars": {"RAYLLM_VLLM_ENGINE_CLS": os.environ["RAYLLM_VLLM_ENGINE_CLS"]}},
        log_engine_metrics=False,
    )
    serve.run(build_openai_app({"llm_configs": [config]}))
    print("ready", port, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
