"""A request that will have a record on disk, from its routing on."""

from __future__ import annotations

from msgspec import Struct

from lmetric._core import Decision, Request, Router


class Draft(Struct, gc=False):
    """The parts of a record that are known before the request ends.

    ``load``: indicators of the instance right after the decision, by name. ``prompt_bytes``: memory
    of the prompt, which the draft keeps alive.
    """

    request: Request
    stream: bool
    prompt_bytes: int
    router: Router | None = None  # None: the request was never routed
    decision: Decision | None = None
    load: dict[str, float] | None = None
    arm: str | None = None  # stable or canary; None: no canary ran
    hedged: bool = False  # the decision is that of a hedge, which answered
    tried: tuple[str, ...] = ()  # engines that its gateway tried; empty: as in the decision record
