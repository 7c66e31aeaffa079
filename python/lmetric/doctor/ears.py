"""The KV index that the doctor fills from engine events, connected as in the server."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from typing import Any
from urllib.parse import urlsplit

from lmetric._core import EventFeed, LmetricError, Request, Router
from lmetric.config import KvEvents
from lmetric.connection_errors import reason_of
from lmetric.doctor.subject import Subject
from lmetric.server.fleet.kv_choice import Subscription, choose, mismatch
from lmetric.server.fleet.kv_mode import Mode, ModelFacts

BLOCK_SIZE = 16  # if neither configuration nor engine gives it


class Ear:
    """The KV index of one model's engines, and its event feed."""

    def __init__(self, model: str, block_size: int, block_size_from: str) -> None:
        self.pool = ModelFacts(block_size, block_size_from, knows_tokens=True)
        self._router = Router(
            block_size=block_size, domain=[model], kv_source="exact", decay_queued_prefill=False
        )
        self._feed = EventFeed(self._router)

    def subscribe(self, name: str, sources: tuple[Subscription, ...], cache_blocks: int | None) -> None:
        """Subscribes to the events of an engine's ranks. Raises LmetricError."""
        self._router.add_instance(name, cache_blocks=cache_blocks)
        for source in sources:
            source.open(self._feed, name)

    def predict(self, name: str, prompt: list[int]) -> int:
        """Leading tokens of a prompt in the engine's cache, according to its events."""
        hits = self._router.cached_tokens(Request(token_ids=array("I", prompt)))
        return int(hits[self._router.instances().index(name)])

    def connected(self, name: str, rank: int) -> bool:
        """Whether the feed is connected to a rank."""
        return bool(self._feed.status(name)[rank]["connected"])

    def messages(self, name: str, rank: int) -> int:
        """Number of live batches from a rank, without replayed batches."""
        return int(self._feed.status(name)[rank]["messages"])

    def min_delay(self, name: str, rank: int) -> float | None:
        """Shortest delay of a batch, seconds: from its creation (rank's clock) to its arrival (our
        clock)."""
        seconds: float | None = self._feed.status(name)[rank]["min_delay_seconds"]
        return seconds

    def mismatch(self, name: str) -> Mode | None:
        """The mode by the block size in the engine's events; None if it matches the index."""
        seen = next((size for rank in self._ranks(name) if (size := rank["block_size"])), None)
        return mismatch(seen, self.pool) if seen and seen != self.pool.block_size else None

    def describe(self, name: str) -> str:
        """The number of batches and their endpoints."""
        ranks = self._ranks(name)
        where = ", ".join(rank["endpoint"] for rank in ranks)
        replays = all(rank["replay_endpoint"] for rank in ranks)
        blind = "" if replays else "; no replay_endpoint: after a lost batch, the index starts empty"
        return f"{sum(rank['messages'] for rank in ranks)} batches from {where}{blind}"

    async def why_silent(self, subject: Subject, rank: int) -> tuple[str, str | None]:
        """The reason for missing events of a new prompt, and the remedy."""
        if not subject.has("prefix_cache"):
            return "an engine without prefix caching publishes no events", subject.flag("prefix_cache")
        flag = subject.flag("kv_events")
        heard = self._feed.status(subject.name)[rank]
        endpoint, topic, other = heard["endpoint"], heard["topic"], heard["other_topic"]
        if heard["bind"] and not heard["connected"]:
            return f"no engine connected to {endpoint}, where the router listens", (
                f"set its endpoint to this machine's address and this port, or let the engine listen: {flag}"
            )
        if not heard["connected"]:
            why = await _closed(endpoint) or "no ZMQ publisher answers there"
            return f"no connection to {endpoint}: {why}", (
                f"let the engine listen there, and allow the router's connections in the network: {flag}"
            )
        if other is not None:
            return f"its events have topic {other!r}, not {topic!r}", (
                "remove kv_events.topic from the configuration to use the topic that the engine reports"
            )
        return f"connected to {endpoint}, but a new prompt caused no event", (
            "is that the port of this engine's --kv-events-config?"
        )

    def close(self) -> None:
        """Stops the thread of the feed."""
        self._feed.close()

    def _ranks(self, name: str) -> list[dict[str, Any]]:
        return list(self._feed.status(name).values())


class Ears:
    """One `Ear` per model: as in the server, the engines of a model share an index and a block
    size."""

    def __init__(self) -> None:
        self._ears: dict[str, Ear] = {}

    def listen(self, subject: Subject) -> Ear | None:
        """Subscribes to an engine; None, with a verdict, if the engine has no events."""
        capabilities, settings = subject.capabilities, subject.target.settings
        setting = subject.events_setting
        host = urlsplit(subject.client.url).hostname or "127.0.0.1"  # a unix socket
        # Block size and tokenizer have separate verdicts.
        pool = ModelFacts(capabilities.block_size or BLOCK_SIZE, "the engine", knows_tokens=True)
        mode, subscriptions = choose(capabilities, host, setting, pool, flags=subject.flags)
        if not subscriptions:
            told = capabilities.event_sources or (isinstance(setting, KvEvents) and setting.endpoint)
            say = subject.failed if told and setting != "off" else subject.not_offered
            say("kv_events", mode.reason, mode.fix)
            return None
        if subject.model not in self._ears:
            size = settings.block_size or capabilities.block_size or BLOCK_SIZE
            self._ears[subject.model] = Ear(
                subject.model,
                size,
                "the configuration" if settings.block_size else "another engine of the model",
            )
        ear = self._ears[subject.model]
        try:
            ear.subscribe(subject.name, subscriptions, capabilities.cache_blocks)
        except LmetricError as error:
            subject.failed(
                "kv_events", str(error), "a running serve uses this address; see its /debug/engines"
            )
            return None
        return ear

    def close(self) -> None:
        """Stops all feeds."""
        for ear in self._ears.values():
            ear.close()


async def _closed(endpoint: str) -> str | None:
    """The reason why a TCP connection to an endpoint fails; None if it succeeds."""
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(3):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return "no answer within 3 s"
    except OSError as error:
        return reason_of(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None
