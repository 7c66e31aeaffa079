"""The embedded engines of `--embedded`, beside the router."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from lmetric.config import EngineConfig, ServerConfig, embedded_engines
from lmetric.engines.embedded import EmbeddedEngines
from lmetric.roles import Role


def embedded_flags(config: ServerConfig) -> list[tuple[Role, list[str]]]:
    """Returns the role and the flags of each embedded engine: N equal ones, or both roles ("2P4D").

    The flags set the scheduler, and the engine features that the configuration needs.
    """
    assert config.embedded is not None
    counts, order = embedded_engines(config.embedded)
    order = order or (["--order", "priority"] if config.orders else [])
    if len(counts) == 1:
        both = ["--kv-connector", "nixl", "--kv-bidirectional", "--kv-load-failure-policy", "fail"]
        moves = config.splits or config.fetches_prefixes or config.rebalances
        return [("both", order + (both if moves else []))] * counts[0]
    kv = ["--kv-connector", "nixl", "--kv-load-failure-policy", "recompute"]
    half: dict[Role, int] = {"prefill": counts[0], "decode": counts[1]}
    return [(role, [*order, "--role", role, *kv]) for role, count in half.items() for _ in range(count)]


@contextlib.asynccontextmanager
async def with_embedded(config: ServerConfig) -> AsyncIterator[ServerConfig]:
    """Yields the configuration with the embedded engines, which run as long as the context."""
    engines_of = embedded_flags(config)
    async with EmbeddedEngines([flags for _, flags in engines_of], kv_events=True) as embedded:
        engines = [
            EngineConfig(url=url, name=f"embedded-{number}", role=None if role == "both" else role)
            for number, (url, (role, _)) in enumerate(zip(embedded.urls, engines_of, strict=True))
        ]
        yield config.model_copy(update={"engines": [*config.engines, *engines]})
