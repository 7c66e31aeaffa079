"""TCP ports for processes that must know their port before they start."""

import contextlib
import socket

_HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 on which no process listens.

    The kernel gives them to no other socket that asks for any port, for as long as it remembers a
    closed connection (Linux: 60 s). A listener with ``SO_REUSEADDR`` can bind them.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        for listener in listeners:
            with socket.create_connection(listener.getsockname()) as client:
                listener.accept()[0].close()  # the side that closes first waits: the one with this port
                client.recv(1)
        return [listener.getsockname()[1] for listener in listeners]
