"""The index that the doctor fills from engines' events, wired as the server's is."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from urllib.parse import urlsplit

from lmetric._core import EventFeed, LmetricError, Router
from lmetric.config import KvEvents
from lmetric.doctor.subject import Subject
from lmetric.server.modes import Pooled, Subscription, choose, mismatch

BLOCK_SIZE = 16  # where neither configuration nor engine tells


class Ear:
    """The index of one model's engines, and the feed that fills it."""

    def __init__(self, model: str, block_size: int, block_size_from: str) -> None:
        self.pool = Pooled(block_size, block_size_from, knows_tokens=True)
        self._router = Router(block_size=block_size, domain=[model], index="exact", drain=False)
        self._feed = EventFeed(self._router)
        self._sources: dict[str, tuple[Subscription, ...]] = {}

    def subscribe(self, name: str, sources: tuple[Subscription, ...], cache_blocks: int | None) -> None:
        """Listens to an engine's ranks. Raises LmetricError."""
        self._router.add_instance(name, cache_blocks=cache_blocks)
        self._sources[name] = sources
        for source in sources:
            self._feed.subscribe(
                name,
                source.endpoint,
                replay_endpoint=source.replay_endpoint,
                topic=source.topic,
                bind=source.bind,
                rank=source.rank,
            )

    def predict(self, name: str, prompt: list[int]) -> int:
        """Leading tokens of a prompt that the engine holds, by its events."""
        hits = self._router.hit_tokens(tokens=array("I", prompt))
        return int(hits[self._router.instances().index(name)])

    def events(self, name: str) -> int:
        """Events that came from it."""
        return sum(int(rank["events"]) for rank in self._ranks(name))

    def mismatch(self, name: str) -> str | None:
        """What is wrong with the size of the blocks that it tells of, where they are not the index's."""
        seen = next((size for rank in self._ranks(name) if (size := rank.get("block_size"))), None)
        return mismatch(seen, self.pool) if seen and seen != self.pool.block_size else None

    def describe(self, name: str) -> str:
        """What came, and from where."""
        sources = self._sources[name]
        replay = (
            ""
            if all(source.replay_endpoint for source in sources)
            else "; no replay_endpoint: a lost batch costs the index"
        )
        where = ", ".join(source.endpoint for source in sources)
        return f"{self.events(name)} events from {where}{replay}"

    async def why_silent(self, subject: Subject) -> tuple[str, str | None]:
        """Why no events came from an engine that has just computed a new prompt, and what to set."""
        sources = self._sources[subject.name]
        source, flag = sources[0], subject.flag("kv_events")
        if not subject.has("prefix_cache"):
            return "nothing came: an engine that caches no prefixes publishes no blocks", subject.flag(
                "prefix_cache"
            )
        if source.bind:
            return f"nothing connected to {source.endpoint}, where the router listens", (
                f"let its endpoint be this machine's address and that port, or let it listen: {flag}"
            )
        if source.endpoint.startswith("tcp://") and (why := await _closed(source.endpoint)):
            return f"nobody listens at {source.endpoint} ({why})", (
                f"let the engine listen there, and its network let the router through: {flag}"
            )
        told = {s.topic for s in subject.capabilities.event_sources}
        if told and source.topic not in told and not any(topic.startswith(source.topic) for topic in told):
            topics = ", ".join(map(repr, sorted(told)))
            return f"nothing came under topic {source.topic!r}: the engine publishes under {topics}", (
                "kv_events.topic in the configuration: leave it out, and the engine is asked"
            )
        return f"connected to {source.endpoint}, and nothing came of a new prompt", (
            "is that port this engine's? Its --kv-events-config tells the endpoint"
        )

    def close(self) -> None:
        """Ends the feed's thread."""
        self._feed.close()

    def _ranks(self, name: str) -> list[dict[str, object]]:
        return list(self._feed.status(name)["ranks"].values())


class Ears:
    """One for each model: as in the server, its engines share an index, and so a block size."""

    def __init__(self) -> None:
        self._ears: dict[str, Ear] = {}

    def listen(self, subject: Subject) -> Ear | None:
        """Subscribes to an engine; None, with the verdict, where there is nothing to subscribe to."""
        capabilities, settings = subject.capabilities, subject.target.settings
        own = subject.target.engine.kv_events
        setting = settings.kv_events if own is None else own
        host = urlsplit(subject.client.url).hostname or ""
        # Block size and tokenizer have verdicts of their own.
        pool = Pooled(capabilities.block_size or BLOCK_SIZE, "the engine", knows_tokens=True)
        mode, subscriptions = choose(capabilities, host, setting, pool)
        flag = subject.flag("kv_events")
        if not subscriptions:
            told = capabilities.event_sources or (isinstance(setting, KvEvents) and setting.endpoint)
            say = subject.failed if told and setting != "off" else subject.not_offered
            say("kv_events", mode.reason, None if "--kv-events-config" in mode.reason else flag)
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
                "kv_events", str(error), "while serve runs, it has the address; see its /debug/engines"
            )
            return None
        return ear

    def close(self) -> None:
        """Ends all."""
        for ear in self._ears.values():
            ear.close()


async def _closed(endpoint: str) -> str | None:
    """Why no TCP connection can be made there; None where one can."""
    parts = urlsplit(endpoint)
    try:
        async with asyncio.timeout(3):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return "no answer within 3 s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None
