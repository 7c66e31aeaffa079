"""Request routers of the Ray Serve benchmark, each with a clock, and replicas with KV events.

All of it runs in the environment that has Ray. The routers append a line per request to the file
RAY_ROUTER_TIMES: milliseconds inside `choose_replicas`, and from the call of the handle to the
chosen replica.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from pathlib import Path
from typing import Any

from app import MODEL, Replica
from ray.llm._internal.serve.routing_policies.kv_aware import kv_token_tracker
from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter

# ray.serve.llm.request_router exports this class and KVAwareRouter, but its import needs vLLM.
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from lmetric.gateways.ray_serve import LmetricRequestRouter
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated import options as emulated
from lmetric_lab.emulated.options import EngineOptions

TIMES = "RAY_ROUTER_TIMES"
PROFILE = "llama-3.1-8b-a100"
BLOCK_TOKENS, BATCH_TOKENS = 16, 2048
PowerOfTwoRouter = RequestRouterConfig().get_request_router_class()  # Ray's default


class _Timed:
    """Measures the time of decisions. The first base class of a router."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        begun = time.perf_counter()
        found = await super().choose_replicas(candidate_replicas, pending_request)  # type: ignore[misc]
        self._note("choose", begun)
        return found  # type: ignore[no-any-return]

    async def _choose_replica_for_request(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        replica = await super()._choose_replica_for_request(*args, **kwargs)  # type: ignore[misc]
        self._note("route", begun)
        return replica

    def _note(self, what: str, begun: float) -> None:
        milliseconds = 1000 * (time.perf_counter() - begun)
        with Path(os.environ[TIMES]).open("a") as file:
            file.write(f"{what} {milliseconds:.4f}\n")


class Lmetric(_Timed, LmetricRequestRouter):
    """The router of this project."""


class PowerOfTwo(_Timed, PowerOfTwoRouter):  # type: ignore[misc,valid-type]
    """Ray's default: the less loaded of two random replicas."""


class PrefixAware(_Timed, PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray's prefix-aware router."""


class _KvAware(KVAwareRouter):  # type: ignore[misc]
    """Ray's KV-aware router without its ingress.

    Ray's LLM ingress creates the tracker of Dynamo's selection service, tokenizes prompts before
    the decision, and receives each request's progress from the replicas. Here the router does it,
    in the same process.
    """

    def initialize_state(self) -> None:
        super().initialize_state()
        self._tokenizer = PromptTokenizer.load(Path(emulated.__file__).parent)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids: dict[str, str] = {}  # request id by internal request id

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        assert pending_request is not None
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._kv_token_tracker = kv_token_tracker.KVTokenTracker(
                serve_deployment_id=self._deployment_id, ingress_replica_rank=0
            )
        tracker = self._kv_token_tracker
        # New replicas are unknown to the tracker until they report their endpoint.
        known = [
            each
            for each in candidate_replicas
            if kv_token_tracker.get_worker_id(each.replica_id.unique_id) in tracker._replica_id_by_worker
        ]
        if not known:
            pending_request.routing_context.should_backoff = True
            return []
        metadata = pending_request.metadata
        self._ids[metadata.internal_request_id] = metadata.request_id
        return await super().choose_replicas(known, pending_request)  # type: ignore[no-any-return]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request_id = pending_request.metadata.request_id
        following = result.__anext__

        @functools.wraps(following)
        async def first_part() -> Any:
            part = await following()
            result.__anext__ = following
            self._report("on_prefill_complete", request_id)
            return part

        result.__anext__ = first_part

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if (request_id := self._ids.pop(internal_request_id, None)) is not None:
            self._report("on_request_completed", request_id)

    def _report(self, hook: str, request_id: str) -> None:
        events = self._kv_token_tracker.on_lifecycle_events([(hook, (request_id,))])
        asyncio.run_coroutine_threadsafe(events, self._loop)


class KvAware(_Timed, _KvAware):
    """Ray's KV-aware router, timed without the tokenizer."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *args: Any, **kwargs: Any
    ) -> Any:
        tokens = self._tokenizer.completion(pending_request.args[0].prompt)
        pending_request.kwargs["request_token_ids"] = tokens.tolist()
        try:
            return await super()._choose_replica_for_request(pending_request, *args, **kwargs)
        finally:
            del pending_request.kwargs["request_token_ids"]


class _Publishing(Replica.func_or_class):  # type: ignore[misc,name-defined]
    """The example's replica. Its engine publishes KV events; the replica names their address."""

    async def __init__(self, cache_blocks: int) -> None:
        self._cache_blocks = cache_blocks
        await super().__init__()

    def options(self) -> EngineOptions:
        any_port = "tcp://127.0.0.1:*"
        return EngineOptions(
            port=0, model=MODEL, profile=PROFILE, block_tokens=BLOCK_TOKENS, cache_blocks=self._cache_blocks,
            max_batch_tokens=BATCH_TOKENS, kv_events_endpoint=any_port, kv_events_replay_endpoint=any_port,
        )  # fmt: skip

    def record_routing_stats(self) -> dict[str, Any]:
        """Returns what `KVAwareRouter` reads of a replica."""
        engine = self._engine.description()
        return {
            "kv_event_metadata": {
                "endpoint": engine["kv_events_endpoint"],
                "replay_endpoint": engine["kv_events_replay_endpoint"],
                "block_size": BLOCK_TOKENS,
                "max_num_batched_tokens": BATCH_TOKENS,
                "dp_rank": 0,
            }
        }


PublishingReplica = Replica.options(func_or_class=_Publishing)
