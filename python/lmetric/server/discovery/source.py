"""The interface of a source of engines."""

from collections.abc import Sequence
from typing import Protocol

from lmetric._core import LmetricError
from lmetric.server.discovery.members import Found


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
