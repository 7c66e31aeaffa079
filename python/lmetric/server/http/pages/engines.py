"""The state of engines, as pages show it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.fleet.model import Model

ENGINES_IN_TURN = 128  # engines that a page describes in one turn of the event loop, 40 µs each


async def shown(fleet: Fleet, engines: Iterable[Engine]) -> list[dict[str, Any]]:
    """Describes engines."""
    ages: dict[str, float] = {}
    described: list[dict[str, Any]] = []
    for engine in list(engines):
        if len(described) % ENGINES_IN_TURN == ENGINES_IN_TURN - 1:
            await asyncio.sleep(0)
        model, capabilities = fleet.model_of(engine), engine.capabilities
        if model is not None and engine.name not in ages:
            column = model.router.indicators(names=["report_age_seconds"])["report_age_seconds"]
            ages |= dict(zip(model.router.instances(), column.tolist(), strict=True))
        age = ages.get(engine.name, math.nan)
        described.append(
            {
                "name": engine.name,
                "url": engine.config.url,
                "model": model.name if model else None,
                "source": engine.source,
                "role": engine.role,
                "group": engine.config.group_label,
                "unfit": engine.unfit,
                "weights": engine.weights,
                "healthy": engine.healthy,
                "service": engine.service.shown(time.monotonic()),
                "ready": engine.ready,
                "draining": engine.draining or engine.switches > 0,
                "leaving": engine.leaving,
                "running": engine.running,
                "warming": model is not None
                and model.changes is not None
                and model.changes.warms(engine.name),
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
                "kv_events": model.kv.status(engine.name) if model else None,
                "tiers": model.router.tiers(engine.name) if model else None,
                "refilling": engine.refill is not None,
                "priority": model.priority.how(engine) if model and model.priority is not None else None,
                "tokenizer": _tokenizer(model, engine) if model else None,
            }
        )
    return described


def _tokenizer(model: Model, engine: Engine) -> dict[str, Any]:
    known = model.tokenizers.current
    return {
        "folder": str(known.folder) if known is not None else None,
        "note": model.tokenizers.note,
        "compared": known is not None and engine.compared is known,
        "differs": engine.tokens_differ,
        "images": len(known.images) if known is not None else 0,
        "images_waiting": model.images_waiting,
    }
