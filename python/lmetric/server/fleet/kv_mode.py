"""What the router can know of an engine's prefix cache, and why not more."""

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
    """How the KV index learns of an engine: by its events (exact), by what was sent to it (approximate), or
    not at all, because it caches nothing (load_only). The reason has no figures that change by themselves."""

    name: Literal["exact", "approximate", "load_only"]
    reason: str


UNASKED = Mode("approximate", "it was not asked yet")


@dataclass(frozen=True, slots=True)
class Subscription:
    """Where the events of one data-parallel rank are heard."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    bind: bool = False
    rank: int = 0

    def open(self, feed: EventFeed, instance: str, block_size: int | None = None) -> None:
        """Has the feed hear them for an instance. Raises LmetricError."""
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
    """What of its pool matters for an engine's mode."""

    block_size: int
    block_size_from: str = field(compare=False)  # who said so
    knows_tokens: bool  # prompts given as text become token ids


def choose(
    capabilities: Capabilities,
    host: str,
    setting: KvEvents | Literal["auto", "off"],
    pool: PoolFacts,
    tokens_differ: str | None = None,
) -> tuple[Mode, tuple[Subscription, ...]]:
    """The best mode that an engine at `host` allows, and what to subscribe to for it. ``tokens_differ``: of
    which prompt it makes other tokens than the router, as far as known."""
    if capabilities.prefix_caching is False:
        return Mode("load_only", "its prefix cache is off"), ()
    if setting == "off":
        return Mode("approximate", "kv_events is off in the configuration"), ()
    given = setting if isinstance(setting, KvEvents) else KvEvents()
    sources = _sources(capabilities, given)
    if not sources:
        return Mode("approximate", capabilities.no_events or "it tells of no KV events"), ()
    if not pool.knows_tokens and not given.without_tokenizer:
        reason = (
            "events name token ids, and prompts come as text: no tokenizer of the model is known here; "
            "set tokenizer, or kv_events.without_tokenizer where clients send token ids"
        )
        return Mode("approximate", reason), ()
    if pool.knows_tokens and tokens_differ is not None:
        return Mode("approximate", f"it makes other tokens of prompts than the router: {tokens_differ}"), ()
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
        else "KV events, for prompts given as token ids; text counts as not cached"
    )
    return Mode("exact", reason), subscriptions


def mismatch(size: int, pool: PoolFacts) -> str:
    """Why an engine with blocks of `size` tokens cannot be exact."""
    return (
        f"its blocks have {size} tokens, its model's index {pool.block_size} (by {pool.block_size_from}); "
        "give all engines of a model one block size, or block_size the engines'"
    )


def _sources(capabilities: Capabilities, given: KvEvents) -> tuple[EventSource, ...]:
    """The engine's own word, where the configuration has no other."""
    told = capabilities.event_sources
    if given.endpoint is None:
        return told
    return tuple(
        EventSource(
            source.rank,
            at_rank(given.endpoint, source.rank),  # also where the ranks connect to the router
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
        # Without it a gap costs the blocks known so far, no more.
        with contextlib.suppress(EndpointError):
            replay = reachable(replay, host)
    if not source.connects:
        return Subscription(reachable(source.endpoint, host), replay, topic, rank=source.rank)
    if not given.bind:
        raise EndpointError(
            f"it sends its KV events to {source.endpoint} instead of listening: let it bind (an endpoint "
            "with *), or set kv_events.endpoint and kv_events.bind for the router to listen"
        )
    return Subscription(source.endpoint, replay, topic, bind=True, rank=source.rank)
