"""Identifies an engine: reads its endpoints until an adapter recognizes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lmetric.engines.adapter import Adapter, Ask, Capabilities, Load, Pages
from lmetric.engines.endpoints import DEFAULT_EVENTS, DEFAULT_REPLAY
from lmetric.engines.sglang import Sglang
from lmetric.engines.vllm import Vllm

# Add new kinds of engines here.
ADAPTERS: tuple[Adapter, ...] = (Sglang(), Vllm())

# Part of the version of an emulated engine, and its own flags by API.
_EMULATED = "+lmetric."
_EMULATED_FLAGS: Mapping[str, str] = {
    "load": "leave out --no-metrics",
    "cached_tokens": "leave out --no-cached-tokens",
    "kv_events": f"--kv-events-endpoint '{DEFAULT_EVENTS}' --kv-events-replay-endpoint '{DEFAULT_REPLAY}'",
    "priority": "--order priority",
}
_EMULATED_HANDOVER = {"vllm": "--kv-connector nixl", "sglang": "--role prefill (or decode)"}


class Unknown(Adapter):
    """An unknown engine: the OpenAI API, and load if its metrics have known names."""

    name = "unknown"
    title = "an unknown engine"
    prefix = ""
    gauges: Mapping[str, Literal["waiting", "running", "kv_usage"]] = {
        name: meaning for adapter in ADAPTERS for name, meaning in adapter.gauges.items()
    }

    async def recognises(self, pages: Pages) -> bool:
        """Any engine."""
        return True

    async def capabilities(self, pages: Pages) -> Capabilities:
        """Its models."""
        titles = " nor ".join(adapter.title for adapter in reversed(ADAPTERS))
        return Capabilities(
            self.name,
            models=await pages.models(),
            no_events=f"its type is unknown (neither {titles})",
            load_path="/metrics",
            token_ids=None if await pages.owner() is None else False,  # TensorRT-LLM refuses the field
            ignored=tuple(pages.ignored),
        )

    def load(self, page: bytes) -> Load:
        """The load from metrics with the names of any known engine."""
        return next((load for adapter in ADAPTERS if (load := adapter.load(page))), Load())


UNKNOWN = Unknown()


async def identify(ask: Ask, rank: int | None = None) -> tuple[Adapter, Capabilities]:
    """The engine's adapter and its reported capabilities; with ``rank``, both of that rank.

    Raises ValueError for invalid content, especially of /v1/models, and for a data-parallel rank
    that the engine does not have. Raises the errors of `ask`.
    """
    pages = Pages(ask)
    adapter: Adapter = UNKNOWN
    for each in ADAPTERS:
        if await each.recognises(pages):
            adapter = each
            break
    if _EMULATED in (await adapter.version(pages) or ""):
        adapter = adapter.with_flags({**_EMULATED_FLAGS, "handover": _EMULATED_HANDOVER[adapter.name]})
    if rank is None:
        return adapter, await adapter.capabilities(pages)
    adapter = adapter.of_rank(rank)
    return adapter, (await adapter.capabilities(pages)).of_rank(rank)
