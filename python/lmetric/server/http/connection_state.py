"""The states of a client's connection."""

from enum import IntEnum


class State(IntEnum):
    """The destination of the next bytes."""

    FREE = 0  # a new request
    COLLECTING = 1  # an incomplete request
    ASKED = 2  # the queue behind a request in flight
    SKIPPING = 3  # the rest of the body of a request that aiohttp has answered
    DISCARDING = 4  # none: the connection closes after its answer
    AWAITING = 5  # an incomplete request: reading is paused until its key is known


FREE, COLLECTING, ASKED, SKIPPING, DISCARDING, AWAITING = State
