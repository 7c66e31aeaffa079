"""The load of an engine, published with its KV cache events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import KVCacheEvent, KVEventBatch, NullEventPublisher

from lmetric_vllm.steps import cached_tokens, fetched_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class LmetricLoad(KVCacheEvent):
    """The load after a step. The class gives the event its type."""

    running: int
    waiting: int
    kv_usage: float
    prefill_tokens: int  # prompt tokens to compute, without cached ones


class LoadPublisher:
    """Publishes the load of a scheduler after each step that changes it.

    Each load has a batch of its own: consumers that cannot read it lose no other event. It needs
    vLLM's publisher of KV cache events, and does nothing without it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.is_on = not isinstance(scheduler.kv_event_publisher, NullEventPublisher)
        self._uncached: dict[str, int] = {}  # tokens to compute of waiting requests
        self._last: tuple[int, int, float, int] | None = None

    def waits(self, request: Request) -> None:
        """Notes a request that entered the queue."""
        if self.is_on:
            hit = cached_tokens(self._scheduler, request)
            hit += fetched_tokens(self._scheduler, request, hit)
            self._uncached[request.request_id] = request.num_tokens - hit

    def publish(self) -> None:
        """Publishes the load if it has changed."""
        if not self.is_on:
            return
        scheduler = self._scheduler
        running, waiting = scheduler.get_request_counts()
        load = running, waiting, scheduler.kv_cache_manager.usage, self._tokens(waiting)
        if load != self._last:
            self._last = load
            event = LmetricLoad(*load)
            scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=[event]))

    def _tokens(self, waiting: int) -> int:
        """Prompt tokens to compute, of waiting and running requests."""
        uncached = self._uncached
        tokens = 0
        for request in self._scheduler.running:
            uncached.pop(request.request_id, None)
            if request.is_prefill_chunk:
                tokens += request.num_tokens - request.num_computed_tokens
        for request in self._scheduler.kv_holding_waiting:  # their KV comes from another engine
            uncached.pop(request.request_id, None)
            tokens += request.num_tokens - request.num_computed_tokens
        if not waiting:
            uncached.clear()  # of requests that were aborted, too
        return tokens + sum(uncached.values())

    def leaves(self, request: Request) -> None:
        """Forgets a request that ended."""
        self._uncached.pop(request.request_id, None)
