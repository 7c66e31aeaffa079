"""The state of engines, as pages show it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lmetric.server.fleet import priority
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.pool import Pool

ENGINES_IN_TURN = 128  # engines that a page describes in one turn of the event loop, 40 µs each


async def shown(fleet: Fleet, engines: Iterable[Engine]) -> list[dict[str, Any]]:
    """Describes engines."""
    ages: dict[str, float] = {}
    described: list[dict[str, Any]] = []
    for engine in list(engines):
        if len(described) % ENGINES_IN_TURN == ENGINES_IN_TURN - 1:
            await asyncio.sleep(0)
        pool, capabilities = fleet.pool_of(engine), engine.capabilities
        if pool is not None and engine.name not in ages:
            column = pool.router.indicators(names=["report_age_seconds"])["report_age_seconds"]
            ages |= dict(zip(pool.router.instances(), column.tolist(), strict=True))
        age = ages.get(engine.name, math.nan)
        described.append(
            {
                "name": engine.name,
                "url": engine.config.url,
                "model": pool.name if pool else None,
                "source": engine.source,
                "role": engine.role,
                "group": engine.config.group_label,
                "unfit": engine.unfit,
                "healthy": engine.healthy,
                "service": engine.service.shown(time.monotonic()),
                "ready": engine.ready,
                "draining": engine.draining or engine.switches > 0,
                "leaving": engine.leaving,
                "running": engine.running,
                "warming": pool is not None and pool.changes is not None and pool.changes.warms(engine.name),
                "sends_prefixes": engine.sends_prefixes,
                "last_error": engine.last_error,
                "mode": engine.mode.name,
                "mode_reason": engine.mode.reason,
                "capabilities": {**asdict(capabilities), "full_report": capabilities.full_report is not None},
                "load": {
                    "reports": engine.load_reports,
                    "age_seconds": age if math.isfinite(age) else None,
                    "error": engine.load_error,
                    "missing_metrics": engine.missing_metrics,
                },
                "kv_events": pool.kv.status(engine.name) if pool else None,
                "tiers": pool.router.tiers(engine.name) if pool else None,
                "refilling": engine.refill is not None,
                "priority": priority.how(engine) if pool and pool.settings.priority is not None else None,
                "tokenizer": _tokenizer(pool, engine) if pool else None,
            }
        )
    return described


def _tokenizer(pool: Pool, engine: Engine) -> dict[str, Any]:
    known = pool.tokenizers.current
    return {
        "folder": str(known.folder) if known is not None else None,
        "note": pool.tokenizers.note,
        "compared": known is not None and engine.compared is known,
        "differs": engine.tokens_differ,
    }
