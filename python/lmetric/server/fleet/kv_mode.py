"""KV index modes: the source of an engine's entries in the KV index, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lmetric.config import KvEvents, KvEventsSetting
from lmetric.engines.adapter import Capabilities, EventSource
from lmetric.engines.endpoints import DEFAULT_EVENTS, DEFAULT_REPLAY, at_rank, listening


@dataclass(frozen=True, slots=True)
class Mode:
    """The source of an engine's entries in the KV index, the reason, and the way to `exact`.

    name: exact: its KV events. approximate: the requests sent to it. load_only: none, as it caches
    nothing. cause: the reason without addresses, names and texts, for clients without credentials.
    detail: the rest of the reason, without changing figures, so that equal modes compare equal.
    fix: the setting of the engine or of the router that allows `exact`; None: `exact` already, or
    the router does not know a fix.
    """

    name: Literal["exact", "approximate", "load_only"]
    cause: str
    detail: str | None = None
    fix: str | None = None

    @property
    def reason(self) -> str:
        """Cause and detail."""
        return self.cause if self.detail is None else f"{self.cause}: {self.detail}"


ENCODES = Mode("load_only", "it only encodes, and caches no prompt")
UNASKED = Mode("approximate", "it is not identified yet")

_FIX_EVENTS = "turn on KV events on the engine"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties of a model that affect its engines' modes."""

    block_size: int
    block_size_from: str = field(compare=False)  # an engine, the configuration, or default
    knows_tokens: bool  # text prompts become token ids
    tokenizer_note: str | None = field(default=None, compare=False)  # why they do not


def without_events(
    capabilities: Capabilities, setting: KvEventsSetting, flags: Mapping[str, str]
) -> Mode | None:
    """Returns the mode of an engine without events for the router; None: there are some.

    ``flags``: the flags of this kind of engine by feature (`Adapter.flags`), for the fix.
    """
    flags = flags_for(flags, setting)
    if capabilities.prefix_caching is False:
        return Mode("load_only", "its prefix cache is off", fix=flag_fix(flags, "prefix_cache"))
    if setting == "off":
        fix = "remove kv_events: off from the configuration"
        return Mode("approximate", "kv_events is off in the configuration", fix=fix)
    if sources_of(capabilities, setting if isinstance(setting, KvEvents) else KvEvents()):
        return None
    fix = capabilities.events_fix or flag_fix(flags, "kv_events") or _FIX_EVENTS
    return Mode("approximate", "it reports no KV events", capabilities.no_events, fix)


def flags_for(flags: Mapping[str, str], setting: KvEventsSetting) -> Mapping[str, str]:
    """Returns the flags of an engine, with the endpoints that the configuration has for its events.

    Without a `replay_endpoint` in the configuration, the flag names the port after that of the
    events, so that engines on one host do not share one.
    """
    if "kv_events" not in flags or not isinstance(setting, KvEvents):
        return flags
    endpoints = {}
    if setting.endpoint is not None and not setting.bind:
        endpoints[DEFAULT_EVENTS] = listening(setting.endpoint)
        endpoints[DEFAULT_REPLAY] = at_rank(endpoints[DEFAULT_EVENTS], 1)
    if setting.replay_endpoint is not None:
        endpoints[DEFAULT_REPLAY] = listening(setting.replay_endpoint)
    pattern = "|".join(map(re.escape, (DEFAULT_EVENTS, DEFAULT_REPLAY)))
    flag = re.sub(pattern, lambda found: endpoints.get(found[0], found[0]), flags["kv_events"])
    return {**flags, "kv_events": flag}


def flag_fix(flags: Mapping[str, str], feature: str) -> str | None:
    """Returns the fix that sets an engine's flag for a feature."""
    flag = flags.get(feature)
    return f"start the engine with {flag}" if flag and flag.startswith("--") else flag


def sources_of(capabilities: Capabilities, given: KvEvents) -> tuple[EventSource, ...]:
    """Returns the engine's event sources, with the configured endpoint if there is one."""
    reported = capabilities.event_sources
    if given.endpoint is None:
        return reported
    return tuple(
        EventSource(
            source.rank,
            at_rank(given.endpoint, source.rank),  # also if the ranks connect to the router
            source.topic,
            source.replay_endpoint,
            connects=given.bind,
        )
        for source in reported or (EventSource(capabilities.data_parallel_rank or 0, given.endpoint),)
    )
