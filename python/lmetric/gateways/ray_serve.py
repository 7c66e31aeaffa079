"""A request router for Ray Serve: the core chooses the replica.

Ray makes one router per deployment handle, so each proxy or ingress replica decides alone. Routers
see each other's load in the queue lengths that Ray collects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from ray.serve.metrics import Counter, Gauge
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lmetric._core import NoInstanceError, Router
from lmetric.defaults import DEFAULT_POLICY
from lmetric.gateways.placements import Key, Placements

__all__ = ["LmetricRequestRouter"]

_log = logging.getLogger("lmetric")


class _Metrics:
    """Metrics of a router in Ray's own export."""

    def __init__(self, application: str, deployment: str) -> None:
        # Ray adds the tags application and deployment: those of the process that has the router.
        tags = {"target_application": application, "target_deployment": deployment}
        names = tuple(tags)
        self.requests = Gauge(
            "lmetric_requests_in_flight", "Requests between their decision and their end.", names
        )
        self.prompt_tokens = Counter("lmetric_prompt_tokens", "Prompt tokens of sent requests.", names)
        self.cached_tokens = Counter(
            "lmetric_predicted_cached_tokens", "Prompt tokens that the router expects in caches.", names
        )
        for metric in (self.requests, self.prompt_tokens, self.cached_tokens):
            metric.set_default_tags(dict(tags))  # Ray adds to it


class LmetricRequestRouter(RequestRouter):  # type: ignore[misc]
    """A request router that chooses replicas by a policy of lmetric-router.

    Set it as ``request_router_class`` of a `RequestRouterConfig`. The prompt is ``prompt`` or
    ``messages`` of the call's first argument, which is an object or a mapping, as in Ray's own LLM
    servers. ``request_router_kwargs`` are the arguments of `initialize_state`.
    """

    def initialize_state(
        self,
        policy: str = DEFAULT_POLICY,
        knobs: Mapping[str, float] | None = None,
        guard: bool | None = None,
        cache_blocks: int | None = None,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        """Creates the core. Ray calls it once.

        Args:
            policy: a built-in policy or an expression.
            `knobs`: parameters of the policy.
            guard: the hot-spot guard; None: off, unless the policy turns it on.
            cache_blocks: KV blocks of a replica; None: unknown, so the index forgets no prefix.
            block_size: tokens per block.
            seed: of random choices.

        Raises:
            LmetricError: an unknown policy or parameter.
        """
        self._router = Router(policy, knobs=knobs, guard=guard, block_size=block_size, seed=seed)
        self._placements = Placements(self._router)
        self._cache_blocks = cache_blocks
        self._names: dict[str, RunningReplica] = {}
        self._was_unreadable = False  # the log has one warning
        self._metrics = _Metrics(self._deployment_id.app_name, self._deployment_id.name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep: asyncio.TimerHandle | None = None  # ends placements whose time is over
        for replica in self.curr_replicas.values():
            self._add(replica)

    @property
    def core(self) -> Router:
        """Core of the router, for `explain`, `stats` and `indicators`."""
        return self._router

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Adds new replicas to the core, and removes replicas that left, with their requests."""
        super().update_replicas(replicas)
        if not hasattr(self, "_router"):  # before initialize_state
            return
        now = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in self._names.keys() - now.keys():
            self._remove(name)
        for name, replica in now.items():
            if name in self._names:
                self._names[name] = replica
            else:
                self._add(replica)

    def _add(self, replica: RunningReplica) -> None:
        name = replica.replica_id.unique_id
        self._router.add_instance(name, cache_blocks=self._cache_blocks)
        self._names[name] = replica

    def _remove(self, name: str) -> None:
        self._placements.drop_instance(name)
        self._router.remove_instance(name)
        del self._names[name]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Removes a replica that died, with its requests."""
        super().on_replica_actor_died(replica_id)
        if replica_id.unique_id in self._names:
            self._remove(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Returns the replicas, best first, each as a group of its own.

        Replicas with ``max_ongoing_requests`` requests come last: they would reject the request.
        """
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray asks full replicas in a loop
        self._loop = asyncio.get_running_loop()
        free = {each.replica_id.unique_id for each in self.select_available_replicas(candidate_replicas)}
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        key = _key(pending_request)
        try:
            ranking = self._placements.place(key, _fields_of(pending_request))
        except NoInstanceError:
            return [candidate_replicas]
        except Exception as error:
            # A malformed request may fail a reader in any way. Its engine judges it: an error here
            # would end Ray's routing task, and the client would wait for ever.
            if not self._was_unreadable:
                self._was_unreadable = True
                _log.warning(
                    "cannot read a request (%s); Ray chooses the replica of such requests, whose engine "
                    "reports what is wrong",
                    type(error).__name__,
                )
            return [candidate_replicas]
        self._swept()
        pending_request.future.add_done_callback(self._dropper(key))
        known = [name for name in ranking if name in by_name]
        others = by_name.keys() - set(known)
        order = sorted(known, key=lambda name: name not in free) + sorted(others)
        return [[by_name[name]] for name in order]

    def _dropper(self, key: Key) -> Callable[[Any], None]:
        """Returns a callback that ends the placement if Ray gives up before it sends it."""

        def drop(future: Any) -> None:
            if future.cancelled() or future.exception() is not None:
                self._placements.drop(key)

        return drop

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Counts a request as sent to the replica that accepted it."""
        key = _key(pending_request)
        cached, prompt = self._placements.send(key, replica_id.unique_id)
        for counter, tokens in ((self._metrics.prompt_tokens, prompt), (self._metrics.cached_tokens, cached)):
            if tokens:  # Ray raises an error for 0
                counter.inc(tokens)
        if getattr(result, "_is_streaming", False):
            _at_first_part(result, lambda: self._placements.first_token(key))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ends a request that a replica completed or rejected. Ray calls it from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended, replica_id.unique_id, internal_request_id)

    def _ended(self, name: str, internal_request_id: str) -> None:
        self._placements.done(internal_request_id, name)
        self._swept()

    def _swept(self) -> None:
        """Ends the placements whose time is over, and sets the timer for the next ones."""
        seconds = self._placements.sweep()
        self._metrics.requests.set(len(self._placements))
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._loop is not None and seconds is not None:
            self._sweep = self._loop.call_later(seconds + 0.1, self._swept)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Records a replica's number of requests, which includes requests of other routers."""
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if replica_id.unique_id in self._names:
            self._router.report_load(replica_id.unique_id, running=num_ongoing_requests)


def _key(pending: PendingRequest) -> Key:
    """Identifies a call of a handle: calls for one request share its internal id."""
    return pending.metadata.internal_request_id, id(pending)


def _at_first_part(result: Any, first: Callable[[], None]) -> None:
    """Calls ``first`` at the first part of a streamed answer.

    Ray has no hook for it, but handles look up ``__anext__`` on the result itself.
    """
    following = result.__anext__

    @wraps(following)
    async def anext_() -> Any:
        part = await following()
        result.__anext__ = following
        first()
        return part

    result.__anext__ = anext_


def _fields_of(pending: PendingRequest) -> dict[str, Any]:
    """Returns the fields of `lmetric.Request`."""
    body = pending.args[0] if pending.args else None
    prompt = _field(body, "prompt")
    if prompt is None:
        prompt = _field(body, "messages")
    tokens = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else None
    session = getattr(pending.metadata, "session_id", None)
    return {
        "token_ids": tokens,
        "text": "".join(_texts(prompt)) if tokens is None else None,
        "max_tokens": _field(body, "max_completion_tokens") or _field(body, "max_tokens"),
        "request_id": pending.metadata.request_id,
        "session": session if isinstance(session, str) and session else None,
        "lora_name": pending.metadata.multiplexed_model_id or None,
        "cache_salt": _field(body, "cache_salt"),
    }


def _field(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, Mapping) else getattr(body, name, None)


def _texts(value: Any) -> Iterable[str]:
    """Yields the texts and roles of a prompt or of messages, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        for name in ("role", "content", "text"):
            yield from _texts(_field(value, name))
