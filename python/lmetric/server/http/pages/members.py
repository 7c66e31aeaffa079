"""Engines that administrators and trainers add and remove: checks of addresses, and the changes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from lmetric.config import ADMIN, CONFIGURED, ConfigError, EngineConfig, KvEvents, unix_path
from lmetric.server.api.errors import ApiError, bad
from lmetric.server.discovery.members import Found
from lmetric.server.fleet.engine import Engine
from lmetric.server.http.frontend import Frontend
from lmetric.server.http.pages.call import Call
from lmetric.server.upstream.allowed import AllowedEngines
from lmetric.server.worker.repeats import ADDED, REMOVED


async def add(call: Call, config: EngineConfig, model: str | None) -> Engine:
    """Adds an engine. Raises ApiError.

    ``model``: the name of its model; None: as the engine reports.
    """
    front = call.front
    fleet, members = front.fleet, front.discovery.members
    if fleet.check_url is not None:
        try:
            fleet.check_url(config.url)
        except ConfigError as error:
            raise bad(str(error), param="url") from None
    await _check_addresses(front, config)
    added = Found(config, model)
    known = [Found(other.config, other.configured_model) for other in fleet.engines() if not other.leaving]

    def with_added(listed: Sequence[Found]) -> Sequence[Found]:
        for other in (*known, *listed):
            if other.config.label == config.label or added.is_also(other):
                raise ApiError(409, f"engine {other.config.label!r} at {other.config.url} already exists")
        return [*listed, added]

    await members.change(ADMIN, with_added)
    engine = fleet.engine(config.label)
    if engine is None:
        await members.change(ADMIN, partial(_without, config.label))
        raise bad(f"the engine cannot be added for model {model!r}; see the log for the reason")
    call.kept = engine.name, ADDED
    return engine


async def remove(call: Call, engine: Engine, seconds: float) -> bool:
    """Removes an engine once it is idle, or after ``seconds``. Raises ApiError.

    Returns False if the engine was added again meanwhile.
    """
    members, source = call.front.discovery.members, engine.source
    if source not in (CONFIGURED, ADMIN):
        raise ApiError(
            409,
            f"{engine.source} lists {engine.name} and would add it again: remove it there, or drain it",
            code="discovered",
        )
    await members.change(source, partial(_without, engine.name), seconds)
    await members.settled(engine)
    listed = (each.config.label for owner in (CONFIGURED, ADMIN) for each in members.of(owner))
    gone = call.front.fleet.engine(engine.name) is not engine
    if engine.name not in listed:
        if gone:  # else discovery lists it, too: it keeps its drain and its role
            call.removed = (*call.removed, engine.name)
        if source == CONFIGURED:  # a new worker reads the configuration, which still lists it
            call.kept = engine.name, REMOVED
    return gone


def _without(name: str, listed: Sequence[Found]) -> Sequence[Found]:
    return [each for each in listed if each.config.label != name]


async def _check_addresses(front: Frontend, config: EngineConfig) -> None:
    """Raises ApiError (400, 403) unless the router may connect to all addresses of an engine."""
    if unix_path(config.url) is not None:
        raise ApiError(403, "/admin adds no engines at unix sockets", param="url", code="engine_not_allowed")
    urls = [config.url]
    if isinstance(config.kv_events, KvEvents):
        given = config.kv_events
        endpoints = [each for each in (given.endpoint, given.replay_endpoint) if each is not None]
        if given.bind or any(each.startswith("ipc:") for each in endpoints):
            raise ApiError(
                403,
                "/admin adds no engines with kv_events.bind or KV events at unix sockets: they would let an "
                "administrator replace files; set them in the configuration",
                param="kv_events",
                code="engine_not_allowed",
            )
        urls += endpoints
    allowed = AllowedEngines(front.config.admin.allowed_engines)
    for host in {urlsplit(url).hostname for url in urls}:
        if host and host != "*":  # none: the engine's own host; *: all addresses of this machine
            await allowed.resolve(host)
