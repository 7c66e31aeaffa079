"""Replaces policies by a command. Routers with `admin.enabled` load this module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from lmetric._core import BadValueError
from lmetric.server.fleet.fleet import Fleet, install_all
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.policies import Policies

InUse = list[tuple[Model, Policies]]


async def replace_policies(fleet: Fleet, changes: Mapping[str, Any], model_name: str | None) -> list[Model]:
    """Replaces policies of one model, or of all (None). A thread builds them.

    Commands follow each other. Returns the models. Raises LmetricError.
    """
    built: InUse = []
    before: InUse | None = None
    async with fleet.replace_lock:
        while (now := _in_use(fleet, model_name)) != before:  # also if a reload came meanwhile
            before, built = now, await asyncio.to_thread(_build_changed, now, changes)
        with install_all(built):
            pass
        if model_name is None:
            fleet.config = fleet.config.model_copy(update=dict(changes))
    return [model for model, _ in built]


def _in_use(fleet: Fleet, model_name: str | None) -> InUse:
    """Returns one model, or all (None), with their policies.

    Raises BadValueError if a canary runs.
    """
    models = fleet.models if model_name is None else [fleet.catalog.find(model_name).model]
    for model in models:
        if model.trials is not None and model.trials.canary.running:
            raise BadValueError(f"{model.name}: a canary runs; promote it or roll it back first")
    return [(model, model.policies) for model in models]


def _build_changed(before: Iterable[tuple[Model, Policies]], changes: Mapping[str, Any]) -> InUse:
    """Returns the models with policies of changed settings. Raises LmetricError."""
    return [
        (model, Policies(policies.settings.model_copy(update=dict(changes)))) for model, policies in before
    ]
