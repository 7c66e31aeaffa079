"""Replaces policies whose files have changed. Routers with policies in files load this module."""

from __future__ import annotations

import asyncio

import structlog

from lmetric._core import LmetricError
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.policies import Policies
from lmetric.server.fleet.policy_files import stamps

log = structlog.get_logger("lmetric.health")


async def replace_changed(model: Model) -> None:
    """Replaces the policies of a model if their files have changed, also those on trial.

    A thread loads them: their imports and test calls may take seconds.
    """
    before = model.policies
    files = stamps(before.files)
    if files == before.seen:
        return
    before.seen = files
    try:
        policies = await asyncio.to_thread(Policies, before.settings)
        if model.policies is not before:
            return  # replaced meanwhile; the next look compares the files of the new ones
        trials = model.trials
        if trials is not None:
            trials.check(policies)
        model.install(policies)
        if trials is not None:
            trials.configure(policies, before)
    except LmetricError as error:
        log.error(
            "cannot use a changed policy file; the old policy stays in use",
            model=model.name,
            reason=str(error),
        )
