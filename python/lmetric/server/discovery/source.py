"""What a source of engines is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmetric._core import LmetricError
from lmetric.config import DiscoverySource, EngineConfig


@dataclass(frozen=True, slots=True)
class Found:
    """An engine of a source: its ``model`` (None: to be asked), and whether it may get requests."""

    config: EngineConfig
    model: str | None = None
    ready: bool = True

    def is_also(self, other: "Found") -> bool:
        """Whether both may be one engine, by URL, data-parallel rank and model.

        A server of two models is two engines. An entry without a rank is all ranks.
        """
        models = (self.model, other.model)
        ranks = (self.config.data_parallel_rank, other.config.data_parallel_rank)
        same = all(None in pair or pair[0] == pair[1] for pair in (models, ranks))
        return self.config.url == other.config.url and same


class SourceError(LmetricError):
    """A source cannot be followed now; the message says which thing failed, and why."""


class Sink(Protocol):
    """Who is told of a source's engines."""

    def found(self, engines: Sequence[Found], problem: str | None = None) -> None:
        """These are all engines of the source now; ``problem``: what is wrong with others."""

    def problem(self, reason: str) -> None:
        """What the source knows cannot be read now; the engines it told of last stay."""


class Source(Protocol):
    """A place that knows engines. ``defaults``: its section of the configuration, with the API key of engines
    that name none."""

    defaults: DiscoverySource

    async def follow(self, sink: Sink) -> None:
        """Tells ``sink`` of the engines, at once and whenever they change, until cancelled.

        Raises SourceError where that ends; it is called again after a while.
        """
