"""KV index modes: the source of an engine's entries in the KV index, with the reason."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Literal

from lmetric._core import EventFeed
from lmetric.config import KvEvents
from lmetric.engines.adapter import Capabilities, EventSource
from lmetric.engines.endpoints import EndpointError, at_rank, reachable

MODES = ("exact", "approximate", "load_only")


@dataclass(frozen=True, slots=True)
class Mode:
    """The source of an engine's entries in the KV index, and the reason.

    exact: its KV events. approximate: the requests sent to it. load_only: none, as it caches
    nothing. The reason contains no changing figures, so that equal modes compare equal.
    """

    name: Literal["exact", "approximate", "load_only"]
    reason: str


UNASKED = Mode("approximate", "it is not identified yet")


@dataclass(frozen=True, slots=True)
class Subscription:
    """The endpoints for the events of one data-parallel rank."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool = False
    rank: int = 0

    def open(self, feed: EventFeed, instance: str, block_size: int | None = None) -> None:
        """Subscribes the feed to the events, for an instance. Raises LmetricError."""
        feed.subscribe(
            instance,
            self.endpoint,
            replay_endpoint=self.replay_endpoint,
            topic=self.topic,
            bind=self.bind,
            rank=self.rank,
            block_size=block_size,
        )


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The properties of a pool that affect its engines' modes."""

    block_size: int
    block_size_from: str = field(compare=False)  # an engine, the configuration, or default
    knows_tokens: bool  # text prompts become token ids


def choose(
    capabilities: Capabilities,
    host: str,
    setting: KvEvents | Literal["auto", "off"],
    pool: PoolFacts,
    tokens_differ: str | None = None,
) -> tuple[Mode, tuple[Subscription, ...]]:
    """Returns the best mode that an engine at `host` allows, and the subscriptions it needs.

    ``tokens_differ``: a prompt that the engine tokenizes differently from the router, or None.
    """
    if capabilities.prefix_caching is False:
        return Mode("load_only", "its prefix cache is off"), ()
    if setting == "off":
        return Mode("approximate", "kv_events is off in the configuration"), ()
    given = setting if isinstance(setting, KvEvents) else KvEvents()
    sources = _sources(capabilities, given)
    if not sources:
        return Mode("approximate", capabilities.no_events or "it reports no KV events"), ()
    if not pool.knows_tokens and not given.without_tokenizer:
        reason = (
            "its events hold token ids, prompts are text, and the model's tokenizer is not known: "
            "set tokenizer, or kv_events.without_tokenizer if clients send token ids"
        )
        return Mode("approximate", reason), ()
    if pool.knows_tokens and tokens_differ is not None:
        return Mode("approximate", f"it tokenizes prompts differently from the router: {tokens_differ}"), ()
    size = capabilities.block_size
    if size is not None and size != pool.block_size:
        return Mode("approximate", mismatch(size, pool)), ()
    try:
        subscriptions = tuple(_subscription(source, host, given) for source in sources)
    except EndpointError as error:
        return Mode("approximate", str(error)), ()
    reason = (
        "KV events"
        if pool.knows_tokens
        else "KV events, for prompts of token ids; text prompts count as not cached"
    )
    return Mode("exact", reason), subscriptions


def mismatch(size: int, pool: PoolFacts) -> str:
    """Returns the reason why an engine with blocks of `size` tokens cannot be exact."""
    return (
        f"its blocks have {size} tokens, its model's index {pool.block_size} (by {pool.block_size_from}); "
        "set one block size on all engines of a model, and the same as block_size"
    )


def _sources(capabilities: Capabilities, given: KvEvents) -> tuple[EventSource, ...]:
    """Returns the engine's event sources, with the configured endpoint if there is one."""
    told = capabilities.event_sources
    if given.endpoint is None:
        return told
    return tuple(
        EventSource(
            source.rank,
            at_rank(given.endpoint, source.rank),  # also if the ranks connect to the router
            source.topic,
            source.replay_endpoint,
            connects=given.bind,
        )
        for source in told or (EventSource(capabilities.data_parallel_rank or 0, given.endpoint),)
    )


def _subscription(source: EventSource, host: str, given: KvEvents) -> Subscription:
    topic = source.topic if given.topic is None else given.topic
    replay = source.replay_endpoint
    if given.replay_endpoint is not None:
        replay = at_rank(given.replay_endpoint, source.rank)
    if replay is not None:
        # Replay is optional: without it, a gap only costs the blocks known so far.
        with contextlib.suppress(EndpointError):
            replay = reachable(replay, host)
    if not source.connects:
        return Subscription(reachable(source.endpoint, host), replay, topic, rank=source.rank)
    if not given.bind:
        raise EndpointError(
            f"it connects to {source.endpoint} to send its KV events: set an endpoint with * on the engine "
            "so that it listens, or kv_events.endpoint and kv_events.bind so that the router listens"
        )
    return Subscription(source.endpoint, replay, topic, bind=True, rank=source.rank)
