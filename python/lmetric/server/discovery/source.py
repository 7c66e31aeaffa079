"""The interface of a source of engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmetric._core import LmetricError
from lmetric.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Found:
    """An engine that a source reports.

    ``model``: its model; None: the router asks the engine. ``ready``: whether it may get requests.
    An engine without an API key of its own gets the key of its section (`follow.py`).
    """

    config: EngineConfig
    model: str | None = None
    ready: bool = True

    def is_also(self, other: "Found") -> bool:
        """Returns whether both may be one engine, by URL, data-parallel rank and model.

        A server of two models is two engines. An entry without a rank is all ranks.
        """
        models = (self.model, other.model)
        ranks = (self.config.data_parallel_rank, other.config.data_parallel_rank)
        same = all(None in pair or pair[0] == pair[1] for pair in (models, ranks))
        return self.config.url == other.config.url and same


class SourceError(LmetricError):
    """A source cannot be followed now. The message names the failed part and the reason."""


class Sink(Protocol):
    """Receiver of a source's reports."""

    def found(self, engines: Sequence[Found], problem: str | None = None) -> None:
        """Receives all present engines of the source.

        ``problem``: the fault of entries left out.
        """

    def problem(self, reason: str) -> None:
        """Receives the reason why the source cannot be read now. Its last engines stay."""


class Source(Protocol):
    """A place that lists engines."""

    async def follow(self, sink: Sink) -> None:
        """Reports the engines to ``sink`` at once and after each change, until canceled.

        Raises SourceError if the source fails; the caller calls `follow` again after a pause.
        """
