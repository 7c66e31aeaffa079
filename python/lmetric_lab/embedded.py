"""Emulated engines as child processes, from their options."""

from __future__ import annotations

from collections.abc import Sequence

from lmetric.engines import embedded
from lmetric_lab.emulated import EngineOptions


class EmbeddedEngines(embedded.EmbeddedEngines):
    """``async with EmbeddedEngines(4) as engines: engines.urls``.

    Args:
        options: one for all engines (each gets a free port), with their number; or one for each.
        kv_events: engines publish KV events on local sockets, which /kv_event_sources lists.

    Raises:
        EngineStartError: an engine did not start; the message has its log. The others are stopped.
    """

    def __init__(
        self,
        count: int = 1,
        options: EngineOptions | Sequence[EngineOptions] | None = None,
        *,
        kv_events: bool = False,
    ) -> None:
        if options is None or isinstance(options, EngineOptions):
            options = [options or EngineOptions()] * count
        super().__init__([each.flags() for each in options], kv_events=kv_events)
