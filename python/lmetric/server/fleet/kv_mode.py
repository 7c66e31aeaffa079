"""KV index modes: the source of an engine's entries in the KV index, with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from lmetric._core import EventFeed
from lmetric.config import KvEvents, KvEventsSetting
from lmetric.engines.adapter import Capabilities, EventSource
from lmetric.engines.endpoints import (
    DEFAULT_EVENTS,
    DEFAULT_REPLAY,
    EndpointError,
    at_rank,
    listening,
    reachable,
)

MODES = ("exact", "approximate", "load_only")

# Most event sources of an engine, which has one per data-parallel rank. Each takes two sockets.
MAX_SOURCES = 256
MAX_RANK = 65_535


@dataclass(frozen=True, slots=True)
class Mode:
    """The source of an engine's entries in the KV index, the reason, and the way to `exact`.

    name: exact: its KV events. approximate: the requests sent to it. load_only: none, as it caches
    nothing. cause: the reason without addresses, names and texts, for clients without credentials.
    detail: the rest of the reason, without changing figures, so that equal modes compare equal.
    fix: the setting of the engine or of the router that allows `exact`; None: `exact` already, or
    the router does not know a fix.
    """

    name: Literal["exact", "approximate", "load_only"]
    cause: str
    detail: str | None = None
    fix: str | None = None

    @property
    def reason(self) -> str:
        """Cause and detail."""
        return self.cause if self.detail is None else f"{self.cause}: {self.detail}"


ENCODES = Mode("load_only", "it only encodes, and caches no prompt")
UNASKED = Mode("approximate", "it is not identified yet")

FIX_TOKENIZER = (
    "set tokenizer (doctor: --tokenizer) to a Hub repository (OWNER/NAME), or to a folder with the model's "
    "tokenizer.json and chat template"
)
_FIX_TOKENS = f"{FIX_TOKENIZER}, or kv_events.without_tokenizer: true if clients send token ids"
_FIX_BLOCK_SIZE = "set the same block size on all engines of a model and in block_size"
_FIX_ENDPOINT = "set kv_events.endpoint in the configuration"
_FIX_EVENTS = "turn on KV events on the engine"


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
class ModelFacts:
    """The properties of a model that affect its engines' modes."""

    block_size: int
    block_size_from: str = field(compare=False)  # an engine, the configuration, or default
    knows_tokens: bool  # text prompts become token ids
    tokenizer_note: str | None = field(default=None, compare=False)  # why they do not


def choose(
    capabilities: Capabilities,
    host: str,
    setting: KvEvents | Literal["auto", "off"],
    model: ModelFacts,
    tokens_differ: str | None = None,
    flags: Mapping[str, str] = MappingProxyType({}),
    admit: Callable[[str], str] = str,
) -> tuple[Mode, tuple[Subscription, ...]]:
    """Returns the best mode that an engine at `host` allows, and the subscriptions it needs.

    ``tokens_differ``: a prompt that the engine tokenizes differently from the router, or None.
    ``flags``: the flags of this kind of engine by feature (`Adapter.flags`), for the fix.
    ``admit``: returns the endpoint to connect to for an endpoint, or raises EndpointError.
    """
    flags = flags_for(flags, setting)
    if capabilities.prefix_caching is False:
        return Mode("load_only", "its prefix cache is off", fix=flag_fix(flags, "prefix_cache")), ()
    if setting == "off":
        fix = "remove kv_events: off from the configuration"
        return Mode("approximate", "kv_events is off in the configuration", fix=fix), ()
    given = setting if isinstance(setting, KvEvents) else KvEvents()
    sources = _sources(capabilities, given)
    if not sources:
        fix = capabilities.events_fix or flag_fix(flags, "kv_events") or _FIX_EVENTS
        return Mode("approximate", "it reports no KV events", capabilities.no_events, fix), ()
    if len(sources) > MAX_SOURCES or any(not 0 <= source.rank <= MAX_RANK for source in sources):
        detail = f"{len(sources)} sources; at most {MAX_SOURCES} ranks, from 0 to {MAX_RANK}"
        return Mode("approximate", "it reports too many or wrong KV event sources", detail, _FIX_ENDPOINT), ()
    if not model.knows_tokens and not given.without_tokenizer:
        cause = "its events hold token ids, prompts are text, and the model's tokenizer is not known"
        return Mode("approximate", cause, model.tokenizer_note, _FIX_TOKENS), ()
    if model.knows_tokens and tokens_differ is not None:
        cause = "it tokenizes prompts differently from the router"
        return Mode("approximate", cause, tokens_differ, FIX_TOKENIZER), ()
    size = capabilities.block_size
    if size is not None and size != model.block_size:
        return mismatch(size, model), ()
    try:
        subscriptions = tuple(_subscription(source, host, given, admit=admit) for source in sources)
    except EndpointError as error:
        return Mode("approximate", "the router cannot reach its KV events", str(error), error.fix), ()
    reason = (
        "KV events"
        if model.knows_tokens
        else "KV events, for prompts of token ids; text prompts count as not cached"
    )
    return Mode("exact", reason), subscriptions


def endpoints(capabilities: Capabilities, setting: KvEvents | Literal["auto", "off"]) -> Iterator[str]:
    """Yields the endpoints that the router may connect to, as reported or configured."""
    given = setting if isinstance(setting, KvEvents) else KvEvents()
    for source in _sources(capabilities, given)[:MAX_SOURCES]:
        yield source.endpoint
        yield from () if source.replay_endpoint is None else (source.replay_endpoint,)
    yield from () if given.replay_endpoint is None else (given.replay_endpoint,)
    yield from capabilities.load_feeds


def flags_for(flags: Mapping[str, str], setting: KvEventsSetting) -> Mapping[str, str]:
    """Returns the flags of an engine, with the endpoints that the configuration has for its events.

    Without a `replay_endpoint` in the configuration, the flag names the port after that of the
    events, so that engines on one host do not share one.
    """
    if "kv_events" not in flags or not isinstance(setting, KvEvents):
        return flags
    endpoints = {}
    if setting.endpoint is not None and not setting.bind:
        endpoints[DEFAULT_EVENTS] = listening(setting.endpoint)
        endpoints[DEFAULT_REPLAY] = at_rank(endpoints[DEFAULT_EVENTS], 1)
    if setting.replay_endpoint is not None:
        endpoints[DEFAULT_REPLAY] = listening(setting.replay_endpoint)
    pattern = "|".join(map(re.escape, (DEFAULT_EVENTS, DEFAULT_REPLAY)))
    flag = re.sub(pattern, lambda found: endpoints.get(found[0], found[0]), flags["kv_events"])
    return {**flags, "kv_events": flag}


def flag_fix(flags: Mapping[str, str], feature: str) -> str | None:
    """Returns the fix that sets an engine's flag for a feature."""
    flag = flags.get(feature)
    return f"start the engine with {flag}" if flag and flag.startswith("--") else flag


def mismatch(size: int, model: ModelFacts) -> Mode:
    """Returns the mode of an engine with blocks of `size` tokens in a model of another size."""
    detail = (
        f"its blocks have {size} tokens, its model's index {model.block_size} (by {model.block_size_from})"
    )
    return Mode("approximate", "its block size differs from its model's index", detail, _FIX_BLOCK_SIZE)


def _sources(capabilities: Capabilities, given: KvEvents) -> tuple[EventSource, ...]:
    """Returns the engine's event sources, with the configured endpoint if there is one."""
    reported = capabilities.event_sources
    if given.endpoint is None:
        return reported
    return tuple(
        EventSource(
            source.rank,
            at_rank(given.endpoint, source.rank),  # also if the ranks connect to the router
            source.topic,
            source.replay_endpoint,
            connects=given.bind,
        )
        for source in reported or (EventSource(capabilities.data_parallel_rank or 0, given.endpoint),)
    )


def _subscription(
    source: EventSource, host: str, given: KvEvents, admit: Callable[[str], str]
) -> Subscription:
    topic = source.topic if given.topic is None else given.topic
    replay = source.replay_endpoint
    if given.replay_endpoint is not None:
        replay = at_rank(given.replay_endpoint, source.rank)
    if replay is not None:
        # Replay is optional: without it, a gap only costs the blocks known so far.
        try:
            replay = admit(reachable(replay, _host(host, given.replay_endpoint)))
        except EndpointError:
            replay = None
    if not source.connects:
        endpoint = admit(reachable(source.endpoint, _host(host, given.endpoint)))
        return Subscription(endpoint, replay, topic, rank=source.rank)
    if not given.bind:
        raise EndpointError(
            f"it connects to {source.endpoint} to send its KV events",
            "set an endpoint with * on the engine so that it listens, "
            "or kv_events.endpoint and kv_events.bind so that the router listens",
        )
    return Subscription(source.endpoint, replay, topic, bind=True, rank=source.rank)


def _host(host: str, configured: str | None) -> str:
    """The engine's host. A socket of this machine in the configuration is this machine's."""
    return "localhost" if configured is not None and configured.startswith("ipc:") else host
