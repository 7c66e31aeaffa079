"""The ways of running a request, one module each: generators without I/O.

A way yields the steps that engines shall run, and gets their answers: its place in the code is the
state of the request. ``attempt, flags = yield step`` sends a step, and goes on when its answer
begins; a step with the reader "whole" goes on at the end of its answer. ``yield None`` waits for
the next event. Failures are exceptions, raised where the way waits:

- `EngineLost`: the engine failed or declined. `execution.run` sends the segment to the next engine.
- `NoTransfer`: the KV transfer of the step cannot be used. The segment runs without it.
- `OtherEngine`: a gateway has the answer from another engine, which gets the segment.
- `SwitchTo`: a migration is ready, and its target takes over.
- `TimeIsUp`: the timer of the way is over (hedge, copy).
- `Ended`: the request ends with this error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmetric.server.execution.ways import copy as copy
    from lmetric.server.execution.ways import encode as encode
    from lmetric.server.execution.ways import move as move
    from lmetric.server.execution.ways import pair as pair
    from lmetric.server.execution.ways import parsed as parsed
    from lmetric.server.execution.ways import split as split
    from lmetric.server.fleet.model import Model

# The ways that not every model needs. Once loaded, each is an attribute of this package.
_OPTIONAL: dict[str, Callable[[Model], object]] = {
    "copy": lambda model: model.fetches_prefixes,
    "move": lambda model: model.mover is not None,
    "pair": lambda model: model.cuts,
    "split": lambda model: model.cuts,
    "encode": lambda model: model.encoders,
    "parsed": lambda model: model.parses,
}


def follow(model: Model) -> None:
    """Loads the ways that a new model needs, and those that its engines need, as they join.

    No request loads a way: an upgrade may have replaced its file meanwhile.
    """
    model.on_role = partial(_load, model)
    _load(model)


def _load(model: Model) -> None:
    for name, needed in _OPTIONAL.items():
        if needed(model):
            import_module(f"{__name__}.{name}")
