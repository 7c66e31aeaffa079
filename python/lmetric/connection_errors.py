"""The reason of a failed connection in the system's words, whatever event loop reports it."""

from __future__ import annotations

import os
import re
import socket
import ssl

_ERRNO = re.compile(r"\[Errno (\d+)\]")


def error_numbers(error: OSError) -> set[int]:
    """Returns the error numbers of a failed connection.

    If all addresses of a host fail, asyncio reports the numbers only in its message.
    """
    return {error.errno} if error.errno else set(map(int, _ERRNO.findall(str(error))))


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failed connection, such as "Connection refused"; "": none."""
    if (inner := system_error(error)) is not None:
        return reason_of(inner)
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror | ssl.SSLError):
        numbers = sorted(error_numbers(error))
        if numbers and min(numbers) > 0:
            return ", ".join(map(os.strerror, numbers))
    return getattr(error, "strerror", None) or str(error)


def system_error(error: BaseException) -> OSError | None:
    """Returns the system's error within an error of aiohttp or urllib; None: it has none."""
    for name in ("certificate_error", "os_error", "reason"):
        if isinstance(inner := getattr(error, name, None), OSError):
            return inner
    return None
