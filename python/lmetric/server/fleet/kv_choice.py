"""The KV index mode of an engine that reports KV events, and the subscriptions to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lmetric._core import EventFeed
from lmetric.config import KvEvents
from lmetric.engines.adapter import Capabilities, EventSource
from lmetric.engines.endpoints import EndpointError, at_rank, reachable
from lmetric.server.fleet.kv_mode import Mode, ModelFacts, sources_of, without_events

# Most event sources of an engine, which has one per data-parallel rank. Each takes two sockets.
MAX_SOURCES = 256
MAX_RANK = 65_535

FIX_TOKENIZER = (
    "set tokenizer (doctor: --tokenizer) to a Hub repository (OWNER/NAME), or to a folder with the model's "
    "tokenizer.json and chat template"
)
_FIX_TOKENS = f"{FIX_TOKENIZER}, or kv_events.without_tokenizer: true if clients send token ids"
_FIX_BLOCK_SIZE = "set the same block size on all engines of a model and in block_size"
_FIX_ENDPOINT = "set kv_events.endpoint in the configuration"


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
    if (mode := without_events(capabilities, setting, flags)) is not None:
        return mode, ()
    given = setting if isinstance(setting, KvEvents) else KvEvents()
    sources = sources_of(capabilities, given)
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
    for source in sources_of(capabilities, given)[:MAX_SOURCES]:
        yield source.endpoint
        yield from () if source.replay_endpoint is None else (source.replay_endpoint,)
    yield from () if given.replay_endpoint is None else (given.replay_endpoint,)
    yield from capabilities.load_feeds


def mismatch(size: int, model: ModelFacts) -> Mode:
    """Returns the mode of an engine with blocks of `size` tokens in a model of another size."""
    detail = (
        f"its blocks have {size} tokens, its model's index {model.block_size} (by {model.block_size_from})"
    )
    return Mode("approximate", "its block size differs from its model's index", detail, _FIX_BLOCK_SIZE)


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
