"""A routing strategy for LiteLLM: this router's core chooses the deployment of each request.

In a LiteLLM proxy, put an object into a Python file next to the configuration, and name it among
the callbacks:

    # lmetric_routing.py
    from lmetric.gateways.litellm import LmetricStrategy

    strategy = LmetricStrategy()

    # config.yaml
    litellm_settings: {callbacks: lmetric_routing.strategy}

With LiteLLM as a library, call ``strategy.install(router)`` with a `litellm.Router`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import litellm
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.router import CustomRoutingStrategyBase

from lmetric._core import NoInstanceError, Router
from lmetric.defaults import DEFAULT_POLICY
from lmetric.gateways.placements import Placement
from lmetric.gateways.pools import Deployment, Pool
from lmetric.gateways.record_file import RecordFile
from lmetric.options import Failure
from lmetric.tokens.prompt import PromptTokenizer

_log = logging.getLogger("lmetric")
_EXPLAINED = 10_000  # decisions that `explain` finds by the call's id
# A call without a report for so long has ended. Outside the proxy, LiteLLM reports no parts of a
# stream. A call's `timeout` does not limit its streams: it limits the time between two parts.
SILENT_SECONDS = 3600.0
# Fields of a body that change its prompt, or that the core uses. Clients of LiteLLM as a library
# put fields that OpenAI's API does not have into `extra_body`.
_BODY_FIELDS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "user", "cache_salt", "suffix"),
    *("tools", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "truncate_prompt_tokens"),
)
# Further fields of the prompt, by API.
_API_FIELDS: Mapping[str, tuple[str, ...]] = {
    "messages": ("system", "thinking", "output_config"),
    "responses": ("instructions", "reasoning", "previous_response_id", "truncation"),
}


class _Call(Placement):
    """A request between its decision and its end, and the deployment that it runs on.

    Attributes:
        latest: time of LiteLLM's latest report, on the monotonic clock.
        seconds: time without a report after which the request has ended.
        unwatch: stops watching the task that made the request.
    """

    __slots__ = ("deployment", "latest", "pool", "seconds", "unwatch")

    def __init__(self, pool: Pool, fields: Mapping[str, Any], timeout: Any) -> None:
        super().__init__(pool.router, fields)
        self.pool, self.deployment = pool, pool.id_of(self.decision.instance)
        self.latest = time.monotonic()
        self.seconds = max(SILENT_SECONDS, timeout if isinstance(timeout, int | float) else 0.0)
        self.unwatch: Callable[[], object] = lambda: None


class LmetricStrategy(CustomLogger, CustomRoutingStrategyBase):
    """Chooses deployments by a policy of this router, and follows each request to its end.

    LiteLLM keeps its own work: aliases, cooldowns, retries, fallbacks, limits. The strategy chooses
    among the deployments that LiteLLM reports as healthy. Each `model_name` has its own router.

    Args:
        policy: name, expression or `Policy`, as for `lmetric.Router`.
        `knobs`: parameters of the policy.
        tokenizer: folder of the model's tokenizer. With it, the strategy uses the KV events of
            engines that publish them. None: it estimates caches from the requests that it sent.
        records_file: file that gets a decision record as a line of JSON for each request; None: no
            file.
        options: further options of `lmetric.Router`.

    Raises:
        LmetricError: an unknown policy or parameter, or an unreadable tokenizer.
        OSError: `records_file` cannot be opened.
    """

    def __init__(
        self,
        policy: Any = DEFAULT_POLICY,
        *,
        knobs: Mapping[str, float] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        records_file: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._options = {"policy": policy, "knobs": knobs, **options}
        self._options.setdefault("offers", "experimental")
        Router(**self._options)  # reports a wrong option at the start, not at the first request
        self._tokenizer = None if tokenizer is None else PromptTokenizer.load(tokenizer)
        self._records = None if records_file is None else RecordFile(Path(records_file))
        self._pools: dict[str, Pool] = {}
        self._calls: dict[str, _Call] = {}
        self._failed: OrderedDict[str, set[str]] = OrderedDict()  # deployments, by call
        self._past: OrderedDict[str, tuple[Pool, int]] = OrderedDict()
        self._router: Any = None
        self.decision_seconds = 0.0
        self.decisions = 0

    # -- choosing a deployment

    def install(self, router: Any) -> None:
        """Makes a `litellm.Router` use this strategy."""
        if hasattr(router, "register_plugin"):
            router.register_plugin(self)
        else:  # LiteLLM before 1.109
            router.set_custom_routing_strategy(self)
        self._router = router
        if self not in litellm.callbacks:
            litellm.callbacks.append(self)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """Installs the strategy in the proxy, before its first request and after a reload."""
        from litellm.proxy import proxy_server

        router: Any = proxy_server.llm_router
        if router is None:
            return
        current = router.__dict__.get("async_get_available_deployment")
        if getattr(current, "__self__", None) is not self:
            self.install(router)

    async def async_get_available_deployment(
        self,
        model: str,
        messages: list[dict[str, str]] | None = None,
        input: str | list[Any] | None = None,
        specific_deployment: bool | None = False,
        request_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Chooses among the deployments that LiteLLM reports as healthy. LiteLLM calls it."""
        kwargs = {} if request_kwargs is None else request_kwargs
        healthy = await self._router.async_get_healthy_deployments(
            model=model,
            request_kwargs=kwargs,
            messages=messages,
            input=input,
            specific_deployment=specific_deployment,
        )
        if isinstance(healthy, dict):
            return healthy  # the caller named the deployment
        begun = time.perf_counter()
        group = _group(model, healthy)
        pool = self._pool(group)
        by_id = {_deployment(each).id: each for each in healthy}
        failed = self._failed.get(str(kwargs.get("litellm_call_id")), set())
        # A repeated call goes to a deployment that has not failed it, if there is one.
        left = [each for each in healthy if _deployment(each).id not in failed] or healthy
        pool.use([_deployment(each) for each in left])
        chosen = by_id[self._choose(pool, model, messages, input, kwargs, is_wildcard="*" in group)]
        self.decision_seconds += time.perf_counter() - begun
        self.decisions += 1
        return chosen

    def get_available_deployment(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: only LiteLLM's asynchronous calls are supported."""
        raise NotImplementedError(
            "LmetricStrategy routes asynchronous calls only; use acompletion instead of completion"
        )

    def _choose(
        self,
        pool: Pool,
        model: str,
        messages: Any,
        text: Any,
        kwargs: dict[str, Any],
        *,
        is_wildcard: bool = False,
    ) -> str:
        call_id = str(kwargs.setdefault("litellm_call_id", str(uuid.uuid4())))
        if (old := self._calls.get(call_id)) is not None:  # LiteLLM tries again
            self._close(call_id, old, "reset")
        timeout = kwargs.get("timeout")
        # A client may choose the ID, also one with half of an emoji.
        own = {"request_id": call_id[:256].encode(errors="replace").decode(), "allow_split": False}
        try:
            fields = self._fields(pool, model, messages, text, kwargs, is_wildcard=is_wildcard)
            call = _Call(pool, {**fields, **own}, timeout)
        except NoInstanceError:
            raise
        except Exception as error:
            # A malformed request may fail a reader in any way. Its engine judges it.
            _log.debug("cannot read a request: %s", type(error).__name__)
            call = _Call(pool, {"prompt_tokens": 1, **own}, timeout)
        self._calls[call_id] = call
        call.send()
        self._past[call_id] = (pool, call.decision.id)
        while len(self._past) > _EXPLAINED:
            self._past.popitem(last=False)
        if (task := asyncio.current_task()) is not None:
            self._watch(task, call_id, call)
        pool.keep()
        return call.deployment

    def _fields(
        self,
        pool: Pool,
        model: str,
        messages: Any,
        text: Any,
        kwargs: Mapping[str, Any],
        *,
        is_wildcard: bool,
    ) -> dict[str, Any]:
        """Returns the fields of `lmetric.Request`. A malformed request may raise any error."""
        given = {**kwargs, **(kwargs.get("extra_body") or {})}
        body = {"model": model} | {name: given[name] for name in _BODY_FIELDS if given.get(name) is not None}
        # A request of Anthropic's API has a `metadata` of its own.
        both = kwargs.get("metadata"), kwargs.get("litellm_metadata")
        metadata = {name: value for each in both if isinstance(each, dict) for name, value in each.items()}
        session = metadata.get("session_id") or kwargs.get("litellm_session_id")
        more = {"session": str(session)} if session else {}
        if is_wildcard and self._tokenizer is None:  # models of one wildcard share no cache
            more["lora_name"] = model[:256]
        route = str(metadata.get("user_api_key_request_route") or "")
        if messages and route.endswith("/completions") and "chat" not in route:
            # LiteLLM passes the prompt of a text completion as the only message.
            path, body["prompt"] = "completion", messages[0]["content"]
        elif messages is not None:
            is_anthropic = route.endswith("/v1/messages") or given.get("system") is not None
            path, body["messages"] = "messages" if is_anthropic else "chat", messages
        else:
            is_response = route.endswith("/responses") or given.get("instructions") is not None
            # Some versions of LiteLLM pass the input of a response only among `kwargs`.
            path, body["input"] = "responses" if is_response else "input", text or given.get("input") or ""
        more_names = (name for name in _API_FIELDS.get(path, ()) if given.get(name) is not None)
        body |= {name: given[name] for name in more_names}
        return pool.fields(path, body, **more)

    def _pool(self, group: str) -> Pool:
        if group not in self._pools:
            router = Router(**self._options, domain=[group])
            self._pools[group] = Pool(router, self._tokenizer, each_second=self._end_silent)
        return self._pools[group]

    # -- the end of a request

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> None:
        """Closes the request when LiteLLM frees the call's log, as of an abandoned stream."""
        call_id = str(kwargs.get("litellm_call_id"))
        call, log = self._calls.get(call_id), kwargs.get("litellm_logging_obj")
        if call is not None and log is not None:
            loop = asyncio.get_running_loop()
            # Any thread may free it, also in the middle of a call of the core.
            weakref.finalize(log, _soon, loop, self._close, call_id, call, "cancelled").atexit = False

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        """Closes a request whose whole answer arrived. A stream begins here."""
        call_id = str(request_data.get("litellm_call_id"))
        call = self._calls.get(call_id)
        if call is None or hasattr(response, "__anext__"):
            return
        self._finish(call_id, call, getattr(response, "usage", None), _finish_reason(response))

    async def async_post_call_failure_deployment_hook(
        self,
        request_data: Mapping[str, Any],
        exception: Exception,
        call_type: Any,
        fallback_depth: int | None = None,
    ) -> None:
        """Closes a request that its deployment failed. LiteLLM decides whether to try again."""
        call_id = str(request_data.get("litellm_call_id"))
        if (call := self._calls.get(call_id)) is not None:
            self._close(call_id, call, _failure(exception))

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Counts the tokens of a stream. A client that leaves closes it."""
        call_id = str(request_data.get("litellm_call_id"))
        call = self._calls.get(call_id)
        if call is None:
            async for chunk in response:
                yield chunk
            return
        usage = reason = None
        try:
            async for chunk in response:
                call.latest = time.monotonic()
                if _has_token(chunk):
                    call.add_token()
                usage = getattr(chunk, "usage", None) or usage
                reason = _finish_reason(chunk) or reason
                yield chunk
            self._finish(call_id, call, usage, reason)
        except Exception as error:
            self._close(call_id, call, _failure(error))
            raise
        finally:  # a client that left ends the generator here
            self._close(call_id, call, "cancelled")

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Closes a request that no other hook closed, such as a stream outside the proxy."""
        call_id = str(kwargs.get("litellm_call_id"))
        if (call := self._calls.get(call_id)) is not None:
            self._finish(call_id, call, getattr(response_obj, "usage", None), _finish_reason(response_obj))

    async def async_log_failure_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Closes a failed request that no other hook closed."""
        call_id = str(kwargs.get("litellm_call_id"))
        if (call := self._calls.get(call_id)) is not None:
            self._close(call_id, call, _failure(kwargs.get("exception")))

    def _watch(self, task: asyncio.Task[Any], call_id: str, call: _Call) -> None:
        """Closes the request if the task that made it is canceled."""

        def ended(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                self._close(call_id, call, "cancelled")

        task.add_done_callback(ended)
        call.unwatch = lambda: task.remove_done_callback(ended)

    def _end_silent(self) -> None:
        now = time.monotonic()
        for call_id, call in list(self._calls.items()):
            if now - call.latest > call.seconds:
                self._close(call_id, call, "cancelled")

    def _finish(self, call_id: str, call: _Call, usage: Any, reason: str | None) -> None:
        if not call.open:
            return
        details = getattr(usage, "prompt_tokens_details", None)
        call.done(
            prompt_tokens=_count(usage, "prompt_tokens") or None,
            cached_tokens=_count(details, "cached_tokens"),
            output_tokens=_count(usage, "completion_tokens") or None,
            finish_reason=reason,
        )
        self._closed(call_id, call)

    def _close(self, call_id: str, call: _Call, failure: Failure) -> None:
        if call.open:
            call.fail(failure)
            if failure != "cancelled":
                self._failed.setdefault(call_id, set()).add(call.deployment)
                while len(self._failed) > _EXPLAINED:
                    self._failed.popitem(last=False)
        self._closed(call_id, call)

    def _closed(self, call_id: str, call: _Call) -> None:
        if self._calls.get(call_id) is not call:
            return
        del self._calls[call_id]
        call.unwatch()
        if self._records is not None and (record := call.pool.router.explain(call.decision.id)) is not None:
            self._records.add(record)

    # -- what it knows

    def in_flight(self) -> int:
        """Number of requests between their decision and their end, over all models."""
        return sum(pool.router.in_flight() for pool in self._pools.values())

    def router(self, model: str) -> Router:
        """The router of a `model_name` of LiteLLM. Raises KeyError before its first request."""
        return self._pools[model].router

    def modes(self, model: str) -> dict[str, str]:
        """The mode of each engine (exact, approximate, ...) that answered so far."""
        return dict(self._pools[model].modes)

    def explain(self, call_id: str) -> Any:
        """The decision record of a call (header x-litellm-call-id); None if it is unknown."""
        if call_id not in self._past:
            return None
        pool, number = self._past[call_id]
        return pool.router.explain(number)

    async def close(self) -> None:
        """Ends tasks and subscriptions."""
        for pool in self._pools.values():
            await pool.close()


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def _deployment(entry: Mapping[str, Any]) -> Deployment:
    params = entry.get("litellm_params") or {}
    base = params.get("api_base")
    url = None if base is None else str(base).rstrip("/").removesuffix("/v1")
    key = params.get("api_key")
    return Deployment(str((entry.get("model_info") or {}).get("id")), url, None if key is None else str(key))


def _group(model: str, entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of a group of deployments in LiteLLM's configuration.

    Clients may call it by an alias, or by any name that its wildcard matches. If the deployments
    have several names, as in a routing group, the configuration has ``model`` itself.
    """
    names = {
        str((each.get("model_info") or {}).get("team_public_model_name") or each.get("model_name"))
        for each in entries
    }
    return names.pop() if len(names) == 1 else model


def _count(usage: Any, name: str) -> int | None:
    """Returns a number of tokens; None: the engine reports none, or no valid one."""
    value = getattr(usage, name, None)
    return value if isinstance(value, int) and 0 <= value < 1 << 32 else None


def _finish_reason(answer: Any) -> str | None:
    """Returns why the engine ended the first choice of an answer or a chunk; None: unknown."""
    for choice in getattr(answer, "choices", None) or ():
        reason = getattr(choice, "finish_reason", None)
        return reason if isinstance(reason, str) else None
    return None


def _has_token(chunk: Any) -> bool:
    for choice in getattr(chunk, "choices", None) or ():
        delta = getattr(choice, "delta", None)
        if (
            getattr(delta, "content", None)
            or getattr(delta, "tool_calls", None)
            or getattr(choice, "text", None)
        ):
            return True
        if getattr(delta, "reasoning_content", None):
            return True
    return False


def _failure(error: Any) -> Failure:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, litellm.exceptions.Timeout):
        return "timeout"
    if isinstance(error, litellm.exceptions.APIConnectionError):
        return "unreachable"
    return "status"
