"""The vLLM adapter, tested with 0.32.0. Names of older versions come from its sources."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import orjson

from lmetric.engines.adapter import (
    MOST_BLOCK_TOKENS,
    MOST_BLOCKS,
    MOST_RANKS,
    MOST_TEXT_CHARACTERS,
    Adapter,
    Capabilities,
    EventSource,
    Handover,
    Load,
    Pages,
    Priority,
    Scheduler,
    labels_of,
    number_of,
    read_page,
    samples,
    text_of,
)
from lmetric.roles import Role

_EVENTS_FLAG = (
    """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", """
    """"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}'"""
)
_HANDOVER_FLAG = (
    """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", """
    """"kv_load_failure_policy": "recompute"}'"""
)
_INFOS = ("cache_config_info", "lora_requests_info")
_SLEEP_STATE = "engine_sleep_state"
_ASLEEP = ("weights_offloaded", "discard_all")
_SOURCES = "/kv_event_sources"
_OFF = "its KV events are off"
_NIXL = re.compile(rb"^vllm:nixl_", re.MULTILINE)
_ROLES: Mapping[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
# The first version that can report a request's cached prefix again.
_FULL_REPORT_SINCE = (0, 32)
MOST_SETTINGS = 32  # labels of a scheduler


class Vllm(Adapter):
    """vLLM, and engines with the same API such as the emulated engine."""

    name = "vllm"
    title = "vLLM"
    cache_salt = True  # tried on 0.32.0
    salts_messages = True  # read in 0.32.0
    prefix = "vllm:"
    gauges: Mapping[str, Literal["waiting", "running", "kv_usage"]] = {
        "num_requests_running": "running",
        "num_requests_waiting": "waiting",
        "kv_cache_usage_perc": "kv_usage",
        "gpu_cache_usage_perc": "kv_usage",  # until 0.10
    }
    cached_counter = "prefix_cache_hits_total"
    rank_label = "engine"
    flags: Mapping[str, str] = {
        "load": "leave out --disable-log-stats",
        "prefix_cache": "--enable-prefix-caching",
        "cached_tokens": "--enable-prompt-tokens-details",
        "kv_events": _EVENTS_FLAG,
        "priority": "--scheduling-policy priority",
        "handover": _HANDOVER_FLAG,
    }

    async def version(self, pages: Pages) -> str | None:
        """The version in /version."""
        return text_of(await pages.object("/version"), "version")

    async def capabilities(self, pages: Pages) -> Capabilities:
        """Capabilities from its endpoints. Block and cache size are labels of
        `vllm:cache_config_info`."""
        version = await self.version(pages)
        all_caches, loras, load, nixl, scheduler = await read_page(
            await pages.text("/metrics"), self._metrics
        )
        labeled = _ranks(all_caches)
        caches = [cache for cache in all_caches if self.rank is None or _ranks([cache]) in ((), (self.rank,))]
        block_size = _block_size(pages, caches)
        caching = {cache.get("enable_prefix_caching") for cache in caches}
        kv_events = await pages.answer(_SOURCES)
        sources, no_events = await read_page(kv_events[1], lambda body: _sources(kv_events[0], body, version))
        # In development mode it reports its configuration.
        told = (await pages.object("/server_info?config_format=json")).get("vllm_config")
        handover, role = _handover(told, nixl)
        if _encodes(told):
            role = "encode"
        return Capabilities(
            self.name,
            version,
            await pages.models(),
            revision=_revision(told),
            block_size=block_size,
            cache_blocks=_cache_blocks(pages, caches, block_size, len(labeled)),
            max_loras=next((count for each in loras if (count := pages.count(each, "max_lora"))), None),
            prefix_caching=None if not caching & {"True", "False"} else "True" in caching,
            ranks=tuple(source.rank for source in sources) or labeled,
            event_sources=sources,
            no_events=no_events,
            events_fix=None if no_events in (None, _OFF) else "set kv_events.endpoint in the configuration",
            load_path="/metrics" if load else None,
            load_names=load.names,
            load_header=True,
            token_ids=True,  # since 0.10.2; earlier versions ignore the field
            # Lower runs earlier. Under --scheduling-policy fcfs, the default, it is accepted and
            # ignored.
            priority=Priority("lower_first", _honours(told), header=True),
            scheduler=scheduler,
            full_report=(
                {"vllm_xargs": {"kv_cache_report_mode": "full"}}
                if _number(version) >= _FULL_REPORT_SINCE
                else None
            ),
            handover=handover,
            no_handover=(
                None
                if handover
                else f"its /metrics have no NIXL metrics; start it with {self.flags['handover']}"
            ),
            role=role,
            # Only in development mode can it be paused. /health does not show it.
            pause_pages=("/is_paused", "/is_sleeping") if isinstance(told, dict) else (),
            ignored=tuple(pages.ignored),
        )

    def asleep(self, page: bytes) -> bool:
        """Whether `vllm:engine_sleep_state` shows level 1 or 2; level 0 only pauses."""
        states = samples(self.own(page), self.prefix, (_SLEEP_STATE,))
        return any(labels_of(raw).get("sleep_state") in _ASLEEP and state > 0 for _, raw, state in states)

    def _metrics(
        self, page: bytes
    ) -> tuple[list[dict[str, str]], list[dict[str, str]], Load, bool, Scheduler | None]:
        """The labels about the caches of all ranks and about adapters, the load, whether it has
        NIXL metrics, and its scheduler."""
        own = self.own(page)
        infos: dict[str, list[dict[str, str]]] = {name: [] for name in _INFOS}
        for name, raw, _ in samples(page, self.prefix, _INFOS):
            infos[name].append(labels_of(raw))
        caches, loras = infos.values()
        return caches, loras, self.load(own), _NIXL.search(own) is not None, _scheduler(page)


def _ranks(caches: Iterable[Mapping[str, str]]) -> tuple[int, ...]:
    """The data-parallel ranks in the labels `engine` of its caches, in order."""
    found = {name for cache in caches if (name := cache.get("engine", "")).isdecimal() and len(name) < 5}
    return tuple(sorted(rank for rank in map(int, found) if rank < MOST_RANKS))


def _block_size(pages: Pages, caches: Sequence[Mapping[str, str]]) -> int | None:
    """Tokens of a KV block. With decode context parallelism, the blocks of attention are larger
    than the setting (0.32.0)."""
    for name in ("effective_attention_block_size", "block_size"):
        for cache in caches:
            if size := pages.count(cache, name, MOST_BLOCK_TOKENS):
                return size
    return None


def _cache_blocks(
    pages: Pages, caches: Sequence[Mapping[str, str]], block_size: int | None, ranks: int
) -> int | None:
    """KV blocks of the ranks in `caches`. ``ranks``: the number of all its ranks.

    The label of each rank repeats `num_gpu_blocks` of all ranks together, and
    `kv_cache_size_tokens` of one rank (0.32.0). Only the tokens are right for hybrid models.
    """
    read = max(1, len(_ranks(caches)))
    for cache in caches:
        if block_size and (tokens := pages.count(cache, "kv_cache_size_tokens", MOST_BLOCKS)):
            return min(max(1, tokens // block_size) * read, MOST_BLOCKS)
    blocks = [count for cache in caches if (count := pages.count(cache, "num_gpu_blocks", MOST_BLOCKS))]
    return max(1, max(blocks) * read // max(1, ranks)) if blocks else None


def _scheduler(page: bytes) -> Scheduler | None:
    """The scheduler of lmetric-vllm that it runs, by that package's metric."""
    for _, raw, _ in samples(page, "lmetric_", ("scheduler_info",)):
        labels = {name: value for name, value in labels_of(raw).items() if value}
        if len(labels) <= MOST_SETTINGS and max(map(len, labels.values()), default=0) <= MOST_TEXT_CHARACTERS:
            name, version = (labels.pop(label, "") for label in ("scheduler", "version"))
            return Scheduler(name, version, labels) if name and version else None
    return None


def _honours(config: object) -> bool | None:
    """Whether its queue is ordered by priority; None if it does not report this."""
    scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
    policy = scheduler.get("policy") if isinstance(scheduler, dict) else None
    return policy == "priority" if isinstance(policy, str) else None


def _revision(config: object) -> str | None:
    """The revision of its model, which it reports in development mode."""
    model = config.get("model_config") if isinstance(config, dict) else None
    return text_of(model, "revision") if isinstance(model, dict) else None


def _handover(config: object, nixl: bool) -> tuple[Handover | None, Role | None]:
    """Its KV connector (from its metrics) and role, with details in development mode."""
    if not nixl:
        return None, None
    transfer = config.get("kv_transfer_config") if isinstance(config, dict) else None
    if not isinstance(transfer, dict):
        return Handover("nixl"), None
    extra = transfer.get("kv_connector_extra_config")
    lease = number_of(extra.get("kv_lease_duration", 30)) if isinstance(extra, dict) else None
    both_ways = extra.get("bidirectional_kv_xfer") if isinstance(extra, dict) else None
    policy = text_of(transfer, "kv_load_failure_policy")
    told = Handover("nixl", lease, policy, bidirectional=both_ways is True)
    return told, _ROLES.get(str(transfer.get("kv_role")))


def _encodes(config: object) -> bool:
    """Whether it runs no language model, and stores encoded images for others (`ec_producer`)."""
    transfer = config.get("ec_transfer_config") if isinstance(config, dict) else None
    return isinstance(transfer, dict) and transfer.get("ec_role") == "ec_producer"


def _number(version: str | None) -> tuple[int, ...]:
    found = re.match(r"(\d{1,9})\.(\d{1,9})", version or "")
    return tuple(map(int, found.groups())) if found else ()


def _sources(status: int, body: bytes, version: str | None) -> tuple[tuple[EventSource, ...], str | None]:
    """The KV event sources by rank, or the reason why there are none.

    The page is optional, and a proxy may answer it with a page of its own.
    """
    if status != 200:
        what = f"vLLM {version or 'of this version'} does not report its KV event endpoints"
        return (), f"{what} (GET {_SOURCES}: status {status})"
    try:
        ranks: dict[str, Any] = orjson.loads(body)
        if len(ranks) > MOST_RANKS:
            return (), f"GET {_SOURCES}: {len(ranks)} ranks (at most {MOST_RANKS})"
        sources = tuple(
            _source(rank, source)
            for rank, source in sorted(
                ((_rank(name), each) for name, each in ranks.items()), key=itemgetter(0)
            )
            if source.get("publisher", "zmq") == "zmq"
        )
    except (orjson.JSONDecodeError, ValueError, KeyError, TypeError, AttributeError):
        return (), f"GET {_SOURCES}: not a list of sources: {body[:120]!r}"
    return sources, None if sources else _OFF


def _source(rank: int, source: Mapping[str, Any]) -> EventSource:
    """Raises TypeError if it has no endpoint."""
    endpoint = text_of(source, "endpoint")
    if endpoint is None:
        raise TypeError
    topic, replay = text_of(source, "topic") or "", text_of(source, "replay_endpoint")
    return EventSource(rank, endpoint, topic, replay, connects=not binds(endpoint))


def _rank(name: str) -> int:
    """A data-parallel rank. Raises ValueError."""
    rank = int(name)
    if not 0 <= rank < MOST_RANKS:
        raise ValueError(name)
    return rank


def binds(endpoint: str) -> bool:
    """Whether vLLM's publisher with this endpoint listens on it. Otherwise it connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
