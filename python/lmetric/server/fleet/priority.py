"""What goes first in an engine's queue: the number that the router gives a request, in the engine's terms."""

from __future__ import annotations

import time

import orjson

from lmetric._core import Router
from lmetric.config import PoolSettings
from lmetric.engines.handover import with_fields
from lmetric.options import UniBoost
from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.engine import Engine


def follow_clock(router: Router, settings: PoolSettings) -> None:
    """Sets the offset from the router's clock to the wall clock, unless the settings name one.

    The router's clock counts from anywhere, and several routers before one engine must agree. Call this
    repeatedly: the wall clock may be stepped.
    """
    if isinstance(settings.priority, UniBoost) and settings.priority.clock_offset_seconds is None:
        router.set_clock_offset(time.time() - time.monotonic())


def how(engine: Engine) -> str:
    """How an engine is told a request's priority, and what is known of what it does with it."""
    told = engine.capabilities.priority
    if told is None:
        return "not sent: the engine is not known to take one"
    if told.honoured is False:
        return "not sent: its queue is not ordered by it"
    heed = "its queue is ordered by it" if told.honoured else "it does not tell whether its queue heeds it"
    return f"sent as {'a header' if told.header else 'a field'}; {heed}"


def header(engine: Engine, priority: int | None) -> int | None:
    """The value of the header that an engine takes for it; None: none."""
    told = engine.capabilities.priority
    if priority is None or told is None or not told.header or told.honoured is False:
        return None
    return told.field(-priority)


def remove(call: ParsedRequest) -> None:
    """Removes the client's own `priority` from a request."""
    fields = {name: value for name, value in call.request.items() if name != "priority"}
    call.replace(orjson.dumps(fields), fields)


def body(engine: Engine, priority: int | None, sent: bytes) -> bytes:
    """The body with the field that an engine takes for it, where it takes no header. The body has no
    `priority` of the client's (`remove`)."""
    told = engine.capabilities.priority
    if priority is None or told is None or told.header:
        return sent
    value = told.field(-priority)
    return sent if value is None else with_fields(sent, {"priority": value})
