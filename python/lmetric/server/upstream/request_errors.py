"""Errors of requests by aiohttp, in the words of connections to engines."""

from __future__ import annotations

import aiohttp

from lmetric.connection_errors import reason_of, system_error
from lmetric.server.upstream.connection import connect_error


def request_error(error: BaseException, seconds: float | None = None) -> str:
    """Returns the reason why a request by aiohttp has no answer, in the words of `connect_error`.

    ``seconds``: the time limit of the request; None: not known.
    """
    if isinstance(error, TimeoutError):
        return "no answer in time" if seconds is None else f"no answer within {seconds:g} s"
    inner = system_error(error)
    if isinstance(error, aiohttp.ClientConnectionError) and inner is not None:
        return str(connect_error(inner))
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | ConnectionError):
        return "the connection broke before the end of the answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the answer is not valid HTTP"
    return reason_of(error) or type(error).__name__
