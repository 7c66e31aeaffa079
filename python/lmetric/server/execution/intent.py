"""A client's request as it was read: from its model's choice to its placement and execution."""

from __future__ import annotations

from typing import cast

from msgspec import Struct

from lmetric._core import Arrival, Request
from lmetric.server.api.request import ParsedRequest
from lmetric.server.execution.exchange import ClientRequest
from lmetric.server.execution.plan import Hedge
from lmetric.server.fleet.model import Model


class Intent(Struct, eq=False, gc=False):
    """A request whose body was read and whose model is known. Placement adds how it may run."""

    client_request: ClientRequest
    call: ParsedRequest
    model: Model
    adapter: str | None = None
    asked: Request = cast(Request, None)  # for the core router; set by placement
    moves: bool = False  # it may be split or moved
    fetches: bool = False  # it may get a prefix fetch
    resumes: bool = False  # after a failure, another engine may continue its stream
    hedge: Hedge | None = None  # another engine may get it, too, if its first token is late
    arrival: Arrival | None = None  # its place in the core router's queue; None: there is no queue
