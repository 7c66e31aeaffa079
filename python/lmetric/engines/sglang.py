"""The SGLang adapter, from the sources of 0.5.23. It was never tested with a running SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from lmetric.engines.adapter import (
    Adapter,
    Capabilities,
    EventSource,
    Handover,
    Load,
    Model,
    Pages,
    Priority,
    Role,
    count_of,
    number_of,
    samples,
    text_of,
)

LOADS = "/v1/loads?include=core"
_EVENTS_FLAG = """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'"""
_HANDOVER_FLAG = "--disaggregation-mode prefill (or decode)"
_ROLES: Mapping[str, Role] = {"null": "both", "prefill": "prefill", "decode": "decode"}
_BOOTSTRAP_PORT = 8998  # where the flag is left out
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

    async def recognises(self, pages: Pages) -> bool:
        """Recognizes SGLang by the owner of its models, or its metrics."""
        return await pages.owner() == "sglang" or b"\nsglang:" in b"\n" + await pages.text("/metrics")

    async def version(self, pages: Pages) -> str | None:
        """The version in /server_info."""
        return text_of(await _info(pages), "version")

    async def capabilities(self, pages: Pages) -> Capabilities:
        """Capabilities from its endpoints. /server_info has all its flags."""
        info = await _info(pages)
        model = await pages.object("/model_info") or await pages.object("/get_model_info")
        metrics = await pages.text("/metrics")
        sizes = {name: int(value) for name, _, value in samples(metrics, self.prefix, _SIZES)}
        page = count_of(info, "page_size") or sizes.get("page_size")
        events = info["kv_events"] if isinstance(info.get("kv_events"), dict) else {}
        tokens = count_of(info, "max_total_num_tokens") or sizes.get("max_total_num_tokens")
        ranks = count_of(events, "dp_size") or count_of(info, "dp_size") or 1
        load_path = LOADS if self.load(await pages.text(LOADS)) else "/metrics"
        load = self.load(await pages.text(load_path))
        sources, no_events = _sources(info, events, ranks)
        role = _ROLES.get(str(info.get("disaggregation_mode") or model.get("disaggregation_mode")))
        parts = role in ("prefill", "decode")
        port = count_of(info, "disaggregation_bootstrap_port") or _BOOTSTRAP_PORT
        load_base = count_of(events, "load_endpoint_port_base")
        return Capabilities(
            self.name,
            await self.version(pages),
            tuple(_rooted(card, model) for card in await pages.models()),
            block_size=count_of(events, "block_size") or page,
            # Its pool of tokens is that of one rank.
            cache_blocks=tokens // page * (ranks if self.rank is None else 1) if tokens and page else None,
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
        )

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
        return Load(waiting, running, max(usages) if usages else None, names)


_SIZES = ("page_size", "max_total_num_tokens")


async def _info(pages: Pages) -> dict[str, Any]:
    """The content of /server_info, before 0.5 /get_server_info."""
    return await pages.object("/server_info") or await pages.object("/get_server_info")


def _priority(info: Mapping[str, Any]) -> Priority:
    low_first = info.get("schedule_low_priority_values_first") is True
    honoured = bool(info["enable_priority_scheduling"]) if "enable_priority_scheduling" in info else None
    return Priority("lower_first" if low_first else "higher_first", honoured)


def _rooted(card: Model, info: Mapping[str, Any]) -> Model:
    """/v1/models repeats the model's name as its root; /model_info has the folder."""
    root = text_of(info, "tokenizer_path") or text_of(info, "model_path")
    return (
        card if card.parent is not None or root is None else Model(card.name, root, None, card.max_model_len)
    )


def _sources(
    info: Mapping[str, Any], events: Mapping[str, Any], ranks: int
) -> tuple[tuple[EventSource, ...], str | None]:
    """The KV event sources by rank, or the reason why there are none."""
    try:
        config = orjson.loads(text_of(info, "kv_events_config") or "{}")
    except orjson.JSONDecodeError:
        config = {}
    host, port = text_of(events, "endpoint_host"), count_of(events, "endpoint_port_base")
    if host is None or port is None:
        # The block does not contain a local socket.
        local = str(config.get("endpoint", ""))
        if config.get("publisher") == "zmq" and local.startswith("ipc://"):
            source = EventSource(0, local, config.get("topic") or "", config.get("replay_endpoint"))
            return (source,), None
        return (), "its KV events are off"
    replay = count_of(events, "replay_endpoint_port_base")
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
