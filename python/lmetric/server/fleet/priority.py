"""Request priorities: converts the router's priority to the header or field of each engine."""

from __future__ import annotations

import time

from lmetric._core import Router
from lmetric.config import PoolSettings
from lmetric.engines.handover import with_fields
from lmetric.options import UniBoost
from lmetric.server.api.request import ParsedRequest
from lmetric.server.fleet.engine import Engine


def follow_clock(router: Router, settings: PoolSettings) -> None:
    """Sets the offset from the router's clock to the wall clock, unless the settings have one.

    The router's clock has an arbitrary start, and all routers of a fleet must compute the same
    priorities. Call this repeatedly: the wall clock may be stepped.
    """
    if isinstance(settings.priority, UniBoost) and settings.priority.clock_offset_seconds is None:
        router.set_clock_offset(time.time() - time.monotonic())


def how(engine: Engine) -> str:
    """Describes how an engine gets a request's priority, and whether its queue uses it."""
    capability = engine.capabilities.priority
    if capability is None:
        return "not sent: the engine is not known to accept a priority"
    if capability.honoured is False:
        return "not sent: its queue is not ordered by priority"
    heed = (
        "its queue is ordered by priority"
        if capability.honoured
        else "it does not report whether its queue is ordered by priority"
    )
    return f"sent as {'a header' if capability.header else 'a field'}; {heed}"


def header(engine: Engine, priority: int | None) -> int | None:
    """Returns the value of the engine's priority header; None: it gets no header."""
    capability = engine.capabilities.priority
    if priority is None or capability is None or not capability.header or capability.honoured is False:
        return None
    return capability.field(-priority)


def remove(call: ParsedRequest) -> None:
    """Removes the client's own `priority` from a request."""
    call.change(("priority",))


def body(engine: Engine, priority: int | None, sent: bytes) -> bytes:
    """Returns the body, with the engine's priority field if it accepts a field and not a header.

    ``sent``: a body without the client's own `priority` (see `remove`).
    """
    capability = engine.capabilities.priority
    if priority is None or capability is None or capability.header:
        return sent
    value = capability.field(-priority)
    return sent if value is None else with_fields(sent, {"priority": value})
