"""Identifies an engine: reads its endpoints until an adapter recognizes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lmetric.engines.adapter import Adapter, Ask, Capabilities, Load, Pages
from lmetric.engines.sglang import Sglang
from lmetric.engines.vllm import Vllm

# Add new kinds of engines here.
ADAPTERS: tuple[Adapter, ...] = (Sglang(), Vllm())


class Unknown(Adapter):
    """An unknown engine: the OpenAI API, and load if its metrics have known names."""

    name = "unknown"
    prefix = ""
    gauges: Mapping[str, Literal["waiting", "running", "kv_usage"]] = {
        name: meaning for adapter in ADAPTERS for name, meaning in adapter.gauges.items()
    }

    async def recognises(self, pages: Pages) -> bool:
        """Any engine."""
        return True

    async def capabilities(self, pages: Pages) -> Capabilities:
        """Its models."""
        names = " or ".join(adapter.name for adapter in ADAPTERS)
        return Capabilities(
            self.name,
            models=await pages.models(),
            no_events=f"what engine it is could not be told: neither {names}",
            load_path="/metrics",
        )

    def load(self, page: bytes) -> Load:
        """The load from metrics with the names of any known engine."""
        return next((load for adapter in ADAPTERS if (load := adapter.load(page))), Load())


UNKNOWN = Unknown()


async def identify(ask: Ask) -> tuple[Adapter, Capabilities]:
    """The engine's adapter and its reported capabilities.

    Raises ValueError for invalid content, especially of /v1/models, and the errors of `ask`.
    """
    pages = Pages(ask)
    for adapter in ADAPTERS:
        if await adapter.recognises(pages):
            return adapter, await adapter.capabilities(pages)
    return UNKNOWN, await UNKNOWN.capabilities(pages)
