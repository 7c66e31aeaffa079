"""Replaces policies whose files have changed. Routers with policies in files load this module."""

from __future__ import annotations

import structlog

from lmetric._core import LmetricError
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.policies import Policies

log = structlog.get_logger("lmetric.health")


async def replace_changed(model: Model) -> None:
    """Replaces the policies of a model if their files have changed, also those on trial."""
    before = model.policies
    if not before.changed():
        return
    try:
        policies = Policies(before.settings)
        model.trials.check(policies)
        model.install(policies)
        model.trials.configure(policies, before)
    except LmetricError as error:
        log.error(
            "cannot use a changed policy file; the old policy stays in use",
            model=model.name,
            reason=str(error),
        )
