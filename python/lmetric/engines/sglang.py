"""The SGLang adapter, from the sources of 0.5.23. It was never tested with a running SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from lmetric.engines.adapter import (
    MOST_BLOCK_TOKENS,
    MOST_BLOCKS,
    MOST_RANKS,
    Adapter,
    Capabilities,
    EventSource,
    Handover,
    Load,
    Pages,
    Priority,
    bounded_load,
    count_of,
    number_of,
    read_page,
    samples,
    text_of,
)
from lmetric.roles import Role

LOADS = "/v1/loads?include=core"
_EVENTS_FLAG = """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'"""
_HANDOVER_FLAG = "--disaggregation-mode prefill (or decode)"
_ROLES: Mapping[str, Role] = {"null": "both", "prefill": "prefill", "decode": "decode"}
_BOOTSTRAP_PORT = 8998  # where the flag is left out
_MOST_PORT = 65535
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")


class Sglang(Adapter):
    """SGLang."""

    name = "sglang"
    title = "SGLang"
    cache_salt = True  # read in 0.5.23
    prefix = "sglang:"
    gauges: Mapping[str, Literal["waiting", "running", "kv_usage"]] = {
        "num_running_reqs": "running",
        "num_queue_reqs": "waiting",
        "token_usage": "kv_usage",
    }
    cached_counter = "cached_tokens_total"
    # OpenAI's routes take `X-Data-Parallel-Rank`; /generate takes the field `routed_dp_rank` alone.
    rank_label = "dp_rank"
    flags: Mapping[str, str] = {
        "load": "--enable-metrics",
        "prefix_cache": "leave out --disable-radix-cache",
        "cached_tokens": "--enable-cache-report",
        "kv_events": _EVENTS_FLAG,
        "priority": "--enable-priority-scheduling",
        "handover": _HANDOVER_FLAG,
    }

    async def version(self, pages: Pages) -> str | None:
        """The version in /server_info."""
        return text_of(await _info(pages), "version")

    async def capabilities(self, pages: Pages) -> Capabilities:
        """Capabilities from its endpoints. /server_info has all its flags."""
        info = await _info(pages)
        model = await pages.object("/model_info") or await pages.object("/get_model_info")
        metrics = await read_page(await pages.text("/metrics"), self._sizes)
        sizes = {**metrics, **{name: info[name] for name in _SIZES if count_of(info, name, None)}}
        page = pages.count(sizes, "page_size", MOST_BLOCK_TOKENS)
        tokens = pages.count(sizes, "max_total_num_tokens", MOST_BLOCKS)
        events = info["kv_events"] if isinstance(info.get("kv_events"), dict) else {}
        block_size = pages.count(events, "block_size", MOST_BLOCK_TOKENS) or page
        ranks = pages.count(events, "dp_size", MOST_RANKS) or pages.count(info, "dp_size", MOST_RANKS) or 1
        load_path = LOADS if await read_page(await pages.text(LOADS), self.load) else "/metrics"
        load = await read_page(await pages.text(load_path), self.load)
        sources, no_events = _sources(info, events, ranks)
        if not info:
            no_events = "; ".join(pages.unread[path] for path in _INFO if path in pages.unread)
        role = _ROLES.get(str(info.get("disaggregation_mode") or model.get("disaggregation_mode")))
        parts = role in ("prefill", "decode")
        port = pages.count(info, "disaggregation_bootstrap_port", _MOST_PORT) or _BOOTSTRAP_PORT
        load_base = pages.count(events, "load_endpoint_port_base", _MOST_PORT)
        return Capabilities(
            self.name,
            await self.version(pages),
            await pages.models(),
            # /v1/models repeats the model's name as its root; /model_info has the folder.
            model_path=text_of(model, "tokenizer_path") or text_of(model, "model_path"),
            block_size=block_size,
            # Its pool of tokens is that of one rank.
            cache_blocks=max(1, tokens // page) * (ranks if self.rank is None else 1)
            if tokens and page
            else None,
            revision=text_of(model, "weight_version"),
            prefix_caching=not info["disable_radix_cache"] if "disable_radix_cache" in info else None,
            ranks=tuple(range(ranks)),
            event_sources=sources,
            no_events=no_events,
            # The load sockets are always bound, whatever host the block names.
            load_feeds=tuple(f"tcp://*:{load_base + rank}" for rank in range(ranks)) if load_base else (),
            load_topic=text_of(events, "load_topic") or "",
            load_path=load_path if load else None,
            load_names=load.names,
            cached_tokens=bool(info["enable_cache_report"]) if "enable_cache_report" in info else None,
            priority=_priority(info),
            request_ids=False,
            handover=Handover("bootstrap", bootstrap_port=port) if parts else None,
            no_handover=None
            if parts
            else f"it serves whole requests; start it with {self.flags['handover']}",
            role=role,
            ignored=tuple(pages.ignored),
        )

    def _sizes(self, page: bytes) -> dict[str, float]:
        return {name: value for name, _, value in samples(page, self.prefix, _SIZES)}

    def load(self, page: bytes) -> Load:
        """The load on /v1/loads, of `rank` or over all data-parallel ranks, or on /metrics."""
        if not page.startswith(b"{"):
            return super().load(page)
        try:
            ranks = [each for each in orjson.loads(page)["loads"] if self.rank in (None, each.get("dp_rank"))]
            waiting = sum(number_of(rank["num_waiting_reqs"]) or 0.0 for rank in ranks)
            running = sum(number_of(rank["num_running_reqs"]) or 0.0 for rank in ranks)
            usages = [usage for rank in ranks if (usage := number_of(rank.get("token_usage"))) is not None]
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return Load()
        if not ranks:
            return Load()
        names = ("num_waiting_reqs", "num_running_reqs", *(("token_usage",) if usages else ()))
        usage = max(usages) if usages else None
        return bounded_load({"waiting": waiting, "running": running, "kv_usage": usage}, names)


_SIZES = ("page_size", "max_total_num_tokens")
_INFO = ("/server_info", "/get_server_info")  # the second one before 0.5


async def _info(pages: Pages) -> dict[str, Any]:
    """The content of /server_info or its older name."""
    return await pages.object(_INFO[0]) or await pages.object(_INFO[1])


def _priority(info: Mapping[str, Any]) -> Priority:
    low_first = info.get("schedule_low_priority_values_first") is True
    honoured = bool(info["enable_priority_scheduling"]) if "enable_priority_scheduling" in info else None
    return Priority("lower_first" if low_first else "higher_first", honoured)


def _sources(
    info: Mapping[str, Any], events: Mapping[str, Any], ranks: int
) -> tuple[tuple[EventSource, ...], str | None]:
    """The KV event sources by rank, or the reason why there are none."""
    try:
        config = orjson.loads(text_of(info, "kv_events_config") or "{}")
    except orjson.JSONDecodeError:
        config = {}
    config = config if isinstance(config, dict) else {}
    host, port = text_of(events, "endpoint_host"), count_of(events, "endpoint_port_base", _MOST_PORT)
    if host is None or port is None:
        # The block does not contain a local socket.
        local = str(config.get("endpoint", ""))
        if config.get("publisher") == "zmq" and local.startswith("ipc://"):
            replay_at = text_of(config, "replay_endpoint")
            source = EventSource(0, local, text_of(config, "topic") or "", replay_at)
            return (source,), None
        return (), "its KV events are off"
    replay = count_of(events, "replay_endpoint_port_base", _MOST_PORT)
    # The engine listens on a concrete host only if its flag sets this host.
    connects = host not in _WILDCARDS and config.get("bind") is not True
    return tuple(
        EventSource(
            rank,
            f"tcp://{host}:{port + rank}",
            text_of(events, "topic") or "",
            # The replay socket always listens, so the worker's own host is right for it.
            f"tcp://*:{replay + rank}" if replay else None,
            connects,
        )
        for rank in range(ranks)
    ), None
