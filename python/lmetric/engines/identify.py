"""Identifies an engine: reads its endpoints until an adapter recognizes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from typing import Literal

from lmetric.engines.adapter import Adapter, Ask, Capabilities, Load, Pages
from lmetric.engines.endpoints import DEFAULT_EVENTS, DEFAULT_REPLAY

# The kinds of engines, in the order in which they are tried. A kind owns the models of its engines,
# or prefixes their metrics. Add new kinds here and in `adapter_of`.
KINDS = ("sglang", "vllm")

# Part of the version of an emulated engine, and its own flags by API.
_EMULATED = "+lmetric."
_EMULATED_FLAGS: Mapping[str, str] = {
    "load": "leave out --no-metrics",
    "cached_tokens": "leave out --no-cached-tokens",
    "kv_events": f"--kv-events-endpoint '{DEFAULT_EVENTS}' --kv-events-replay-endpoint '{DEFAULT_REPLAY}'",
    "priority": "--order priority",
}
_EMULATED_HANDOVER = {"vllm": "--kv-connector nixl", "sglang": "--role prefill (or decode)"}


@cache
def adapter_of(kind: str) -> Adapter:
    """The adapter of one of `KINDS`. The first engine of a kind loads its module."""
    if kind == "sglang":
        from lmetric.engines.sglang import Sglang

        return Sglang()
    from lmetric.engines.vllm import Vllm

    return Vllm()


def adapters() -> Iterator[Adapter]:
    """The adapters of all kinds."""
    return map(adapter_of, KINDS)


class Unknown(Adapter):
    """An unknown engine: the OpenAI API, and load if its metrics have known names."""

    name = "unknown"
    title = "an unknown engine"
    prefix = ""

    @cached_property
    def gauges(self) -> Mapping[str, Literal["waiting", "running", "kv_usage"]]:  # type: ignore[override]
        """Those of all known engines."""
        return {name: meaning for adapter in adapters() for name, meaning in adapter.gauges.items()}

    async def capabilities(self, pages: Pages) -> Capabilities:
        """Its models."""
        titles = " nor ".join(adapter_of(kind).title for kind in reversed(KINDS))
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
        return next((load for adapter in adapters() if (load := adapter.load(page))), Load())


UNKNOWN = Unknown()


async def identify(ask: Ask, rank: int | None = None) -> tuple[Adapter, Capabilities]:
    """The engine's adapter and its reported capabilities; with ``rank``, both of that rank.

    Raises ValueError for invalid content, especially of /v1/models, and for a data-parallel rank
    that the engine does not have. Raises the errors of `ask`.
    """
    pages = Pages(ask)
    kind = await _kind(pages)
    adapter = UNKNOWN if kind is None else adapter_of(kind)
    if _EMULATED in (await adapter.version(pages) or ""):
        adapter = adapter.with_flags({**_EMULATED_FLAGS, "handover": _EMULATED_HANDOVER[adapter.name]})
    if rank is None:
        return adapter, await adapter.capabilities(pages)
    adapter = adapter.of_rank(rank)
    return adapter, (await adapter.capabilities(pages)).of_rank(rank)


async def _kind(pages: Pages) -> str | None:
    """Returns the kind by the owner of the models, the metrics, or /version without an owner."""
    owner = await pages.owner()
    for kind in KINDS:
        if owner == kind or b"\n%b:" % kind.encode() in b"\n" + await pages.text("/metrics"):
            return kind
    # TensorRT-LLM has /version, too, and refuses vLLM's fields.
    return "vllm" if owner is None and "version" in await pages.object("/version") else None
