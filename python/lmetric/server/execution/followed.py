"""A stream that is passed on to its client, and noted, so that it may go on at another engine."""

from __future__ import annotations

from typing import Any

from lmetric.server.execution.rest import Passed
from lmetric.server.execution.transcript import MergeError


class Followed(Passed):
    """The leg at one engine, asked for its token ids. Where they cannot be had, it stays where it is."""

    _noted = True

    def _told_of(self, event: dict[str, Any], choices: list[Any]) -> None:
        if self._differs(event):
            return
        if self._noted:
            try:
                self._chain.joined.note(event)
            except MergeError as error:
                self._noted = False
                self._chain.stays(self, str(error))
        super()._told_of(event, choices)
