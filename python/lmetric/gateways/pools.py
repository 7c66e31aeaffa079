"""The router of a model inside a gateway. Its instances are the gateway's deployments."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from lmetric._core import EventFeed, LmetricError, Router, read_request
from lmetric.engines.adapter import Adapter
from lmetric.engines.http import EngineClient, NoConnection, Unanswered
from lmetric.engines.identify import identify
from lmetric.engines.replaced import BALANCED, Starts, start_of
from lmetric.server.fleet.kv_choice import Subscription, choose
from lmetric.server.fleet.kv_mode import ModelFacts
from lmetric.tokens.prompt import PromptTokenizer

_log = logging.getLogger("lmetric")
TICK_SECONDS = 1.0
AGAIN_SECONDS = 10.0
# A deployment that is unused for longer has left. Gateways pause failing deployments for seconds or
# minutes; until then, the core keeps what their caches hold.
UNUSED_SECONDS = 900.0
# After so long without a request, a pool removes its deployments, and asks its engines for nothing.
IDLE_SECONDS = 900.0
# After such a pause, another engine may have the address. Engines take longer to load a model.
REPLACED_SECONDS = 5.0


@dataclass(frozen=True)
class Deployment:
    """An engine as the gateway knows it.

    Attributes:
        id: the gateway's own identifier.
        url: base URL without /v1; None: a provider's model, which the pool asks for nothing.
        api_key: bearer token of the engine.
    """

    id: str
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Name of the instance: host:port, or the gateway's identifier."""
        return self.id if self.url is None else urlsplit(self.url).netloc.rpartition("@")[2]


class Pool:
    """The router of one model, and the features and load of its engines.

    Args:
        router: the router. The pool owns its instances.
        tokenizer: turns prompts into tokens as the engines do; None: prompts are matched as text,
            and KV events are not used.
        each_second: called about once a second while the task of `keep` runs.
    """

    def __init__(
        self,
        router: Router,
        tokenizer: PromptTokenizer | None,
        *,
        each_second: Callable[[], None] = lambda: None,
    ) -> None:
        self.router = router
        self.modes: dict[str, str] = {}
        self._tokenizer = tokenizer
        self._names: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._usable: frozenset[str] = frozenset()
        self._unused: dict[str, float] = {}  # since when, on the monotonic clock
        self._each_second = each_second
        self._feed: EventFeed | None = None
        self._deployments: dict[str, Deployment] = {}
        self._adapters: dict[str, Adapter] = {}
        self._subscribed: dict[str, Sequence[Subscription]] = {}
        self._starts: dict[str, Starts] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._used_at = time.monotonic()

    def fields(self, path: str, body: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Returns the fields of `lmetric.Request` for a body. Prompts match as in `serve`.

        Args:
            path: "chat", "completion", "messages", "responses" or "input" (embeddings).
            more: further fields.
        """
        _, _, _, session, _, salt, most, text, ids, more_bytes, more_tokens, _ = read_request(
            path, orjson.dumps(body, default=str, option=orjson.OPT_NON_STR_KEYS)
        )
        extra = more_tokens + more_bytes // 4
        if (tokens := self._tokens(path, body)) is not None:
            ids = tokens
        if ids is not None:
            prompt: dict[str, Any] = {"token_ids": ids, "cache_salt": salt, "extra_tokens": extra}
        elif text:
            prompt = {"text": text, "cache_salt": salt, "extra_tokens": extra}
        else:
            prompt = {"prompt_tokens": max(1, extra)}
        return {"max_tokens": most, "session": session, **prompt, **more}

    def _tokens(self, path: str, body: Mapping[str, Any]) -> Any:
        """Returns the prompt's tokens; None if no tokenizer can predict them."""
        if self._tokenizer is None:
            return None
        # A malformed request may fail a reader or a template in any way. Its engine judges it.
        with contextlib.suppress(Exception):
            if path == "chat":
                return self._tokenizer.chat(body)
            if path == "messages":
                return self._tokenizer.messages(body)
            if path == "responses":
                return self._tokenizer.responses(body)
            if path == "completion" and isinstance(prompt := body.get("prompt"), str):
                return self._tokenizer.encode(self._tokenizer.completion_text(body, prompt))
        return None

    def use(self, deployments: Sequence[Deployment]) -> None:
        """Makes exactly these deployments eligible for the next decision."""
        self._used_at = time.monotonic()
        usable = frozenset(each.id for each in deployments)
        if usable == self._usable:
            return
        for each in deployments:
            if each.id not in self._names:
                self._add(each)
            elif each.id not in self._usable:
                name, since = self._names[each.id], self._unused.pop(each.id)
                self.router.update_instance(name, healthy=True)
                if self._used_at - since >= REPLACED_SECONDS:
                    self._adapters.pop(name, None)  # another engine may have the address
        for gone in self._usable - usable:
            self.router.update_instance(self._names[gone], healthy=False)
            self._unused[gone] = time.monotonic()
        self._usable = usable

    def id_of(self, instance: str) -> str:
        """Returns the gateway's identifier of an instance."""
        return self._ids[instance]

    def keep(self) -> None:
        """Starts the task that asks engines for their features and load, once per event loop."""
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._run(), name="lmetric engines")

    async def close(self) -> None:
        """Ends the subscriptions and the task."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._feed is not None:
            self._feed.close()

    def _add(self, deployment: Deployment) -> None:
        name = deployment.name
        if name in self._ids:
            name = f"{name} {deployment.id}"
        self.router.add_instance(name)
        self._names[deployment.id], self._ids[name] = name, deployment.id
        self._deployments[name] = deployment

    def _remove(self, deployment_id: str) -> None:
        name = self._names.pop(deployment_id)
        del self._ids[name], self._deployments[name], self._unused[deployment_id]
        for known in (self._adapters, self.modes, self._subscribed, self._starts):
            known.pop(name, None)
        if self._feed is not None:
            self._feed.unsubscribe(name)
        self.router.remove_instance(name)

    def _remove_all(self) -> None:
        self._unused.update(dict.fromkeys(self._usable, 0.0))
        self._usable = frozenset()
        for each in list(self._unused):
            self._remove(each)

    async def _run(self) -> None:
        tasks: dict[str, asyncio.Task[None]] = {}
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            while True:
                now = time.monotonic()
                if now - self._used_at > IDLE_SECONDS and not self.router.in_flight():
                    self._remove_all()
                    for task in tasks.values():
                        task.cancel()
                    return
                for each in [each for each, since in self._unused.items() if now - since > UNUSED_SECONDS]:
                    self._remove(each)
                tasks = {name: task for name, task in tasks.items() if not task.done()}
                for name, deployment in self._deployments.items():
                    if deployment.url is not None and deployment.id in self._usable and name not in tasks:
                        client = EngineClient(http, deployment.url, deployment.api_key)
                        tasks[name] = group.create_task(self._follow(name, deployment.id, client))
                self.router.tick()
                self._each_second()
                await asyncio.sleep(TICK_SECONDS)

    async def _follow(self, name: str, deployment_id: str, client: EngineClient) -> None:
        """Reads an engine's features, then its load once a second, until the engine is unused.

        After a failed connection, another engine may have the address: its features are read again.
        """
        while deployment_id in self._usable:
            try:
                if name in self._adapters:
                    await self._read_load(name, client)
                else:
                    await self._identify(name, client)
            except (Unanswered, ValueError, LmetricError) as error:
                _log.debug("%s: %s", name, error)
                if isinstance(error, NoConnection) and self._adapters.pop(name, None) is not None:
                    self._starts.pop(name, None)
                    self._forget_cache(name)
            await asyncio.sleep(TICK_SECONDS if name in self._adapters else AGAIN_SECONDS)

    async def _identify(self, name: str, client: EngineClient) -> None:
        adapter, found = await identify(client.page)
        size, is_first = found.block_size, not self._adapters and self._tokenizer is not None
        if is_first and size is not None and size != self.router.block_size:
            self.router.configure(block_size=size)
        self.router.update_instance(name, cache_blocks=found.cache_blocks)
        knows = self._tokenizer is not None
        facts = ModelFacts(self.router.block_size, "an engine", knows)
        host = urlsplit(client.url).hostname or ""
        mode, subscriptions = choose(found, host, "auto", facts, flags=adapter.flags)
        self._subscribe(name, subscriptions)
        self.modes[name] = mode.name
        self._adapters[name] = adapter
        _log.info("%s: mode %s: %s", name, mode.name, mode.cause)

    def _subscribe(self, name: str, subscriptions: Sequence[Subscription]) -> None:
        """Makes these the subscriptions to an engine's events. Empty: its cache is estimated."""
        if self._subscribed.get(name, ()) == subscriptions:
            return
        if self._subscribed.pop(name, None) is not None and self._feed is not None:
            self._feed.unsubscribe(name)
        self.router.update_instance(name, kv_source="exact" if subscriptions else "approximate")
        if subscriptions:
            if self._feed is None:
                self._feed = EventFeed(self.router)
            for each in subscriptions:
                each.open(self._feed, name, self.router.block_size)
            self._subscribed[name] = subscriptions

    def _forget_cache(self, name: str) -> None:
        """Handles the end of an engine's process. Events themselves report what a new one has."""
        if name not in self._subscribed:
            self.router.blocks_cleared(name)

    async def _read_load(self, name: str, client: EngineClient) -> None:
        adapter = self._adapters[name]
        answer = await client.get("/metrics", 2.0)
        starts = self._starts.setdefault(name, Starts())
        is_replaced = starts.replaced(start_of(answer.body))
        if starts.show_balanced():
            _log.warning("%s: %s", name, BALANCED)
        if is_replaced:
            self._forget_cache(name)
            self._adapters.pop(name, None)
            return
        if answer.status == 200 and (load := adapter.load(answer.body)):
            self.router.report_load(name, waiting=load.waiting, running=load.running, kv_usage=load.kv_usage)
