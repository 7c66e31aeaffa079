"""The port of the server. It is bound first, before slow steps of the start."""

import asyncio
import contextlib
import errno
import os
import socket

_FIXES = {
    errno.EADDRINUSE: "stop the process that uses the port, or set another --port",
    errno.EACCES: "set a --port of 1024 or above, or allow the process to use lower ports",
}


class PortError(OSError):
    """The server cannot listen on its address. ``errno`` has the reason."""

    def __str__(self) -> str:
        return str(self.args[1])


def port_error(host: str, port: int, error: Exception) -> PortError:
    """Returns the PortError for a failed bind or listen."""
    number = getattr(error, "errno", None) or errno.EADDRNOTAVAIL
    reason = os.strerror(number) if number > 0 else error
    fix = _FIXES.get(number, "set --host to an address of this machine")
    return PortError(number, f"cannot listen on {host}:{port}: {reason}; {fix}")


async def bind(host: str, port: int) -> list[socket.socket]:
    """Returns sockets bound to all addresses of a host. Raises PortError.

    They do not listen yet, so clients are refused instead of waiting.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        try:
            addresses = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            sockets = []
            for family, kind, protocol, _, address in dict.fromkeys(addresses):
                try:
                    each = socket.socket(family, kind, protocol)
                except OSError as error:
                    if error.errno == errno.EAFNOSUPPORT and len(addresses) > 1:
                        continue  # a machine without IPv6
                    raise
                opened.callback(each.close)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                each.bind(address)
                sockets.append(each)
        except (OSError, OverflowError) as error:
            raise port_error(host, port, error) from None
        opened.pop_all()
    return sockets
