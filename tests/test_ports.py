"""Ports for processes that must know theirs before they start."""

import contextlib
import socket

from lmetric_lab.ports import free_ports


def test_a_free_port_is_given_to_no_other_socket() -> None:
    ports = set(free_ports(500))
    assert len(ports) == 500
    with contextlib.ExitStack() as stack:
        bound = {
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(500)
        }
        assert not bound & ports
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(500):
            with socket.create_connection(server.getsockname()) as client:
                assert client.getsockname()[1] not in ports
                server.accept()[0].close()


def test_a_server_listens_on_a_free_port() -> None:
    for port in free_ports(20):
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port)) as client,
        ):
            server.accept()[0].sendall(b"a")
            assert client.recv(1) == b"a"
