"""The sockets of several workers."""

import contextlib
import socket
import sys

from lmetric.server.http.port import BACKLOG, Bound, bind_addresses, bound_socket, port_error


async def hold(host: str, port: int, setting: str) -> Bound:
    """Returns sockets that hold a port for the listeners of several workers. Raises PortError.

    They accept nothing. Processes of this user may bind the port with SO_REUSEPORT, and no other
    process can. ``setting``: name of the port's setting.
    """
    bound = Bound(await bind_addresses(host, port, setting))
    if port == 0:  # a socket that stops listening keeps only a port that it was given
        free, bound = bound, Bound(await bind_addresses(host, bound.port, setting))
        for each in free.sockets:
            each.close()
    try:
        for each in bound.sockets:
            # It fails if another socket listens on the port, or holds it.
            each.listen()
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # With SO_REUSEADDR, others could listen on the port once this socket does not.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            each.shutdown(socket.SHUT_RDWR)  # ends only the listening
    except OSError as error:
        for each in bound.sockets:
            each.close()
        raise port_error(host, port, error, setting=setting) from None
    return bound


def divide(bound: Bound, workers: int) -> list[list[socket.socket]]:
    """Returns the sockets of each worker, which listen. Raises PortError.

    The kernel gives each worker its share of the connections. Sockets that cannot be bound again
    (of systemd, and unix sockets) are shared: who comes first accepts.
    """
    alone = not bound.shared and bound.path is None and sys.platform == "linux"
    if not alone:
        for each in bound.sockets:
            each.listen(BACKLOG)
        return [bound.sockets] * workers
    host, port = bound.host, bound.port
    addresses = [(each.family, each.getsockname()) for each in bound.sockets]
    # They share their port with none, so another server cannot have had it.
    for each in bound.sockets:
        each.close()
    with contextlib.ExitStack() as opened:
        divided: list[list[socket.socket]] = []
        try:
            for _ in range(workers):
                divided.append([])
                for family, address in addresses:
                    made = opened.enter_context(bound_socket(family, address, socket.SO_REUSEPORT))
                    made.listen(BACKLOG)
                    divided[-1].append(made)
        except OSError as error:
            raise port_error(host, port, error) from None
        opened.pop_all()
    return divided
