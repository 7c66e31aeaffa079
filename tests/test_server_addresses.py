"""The addresses at which a server listens, over real sockets."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from epp_world import picking
from lmetric.server.http import port
from lmetric.server.supervisor.ports import divide, hold
from server_world import world

ALL = {("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)}


@pytest.mark.parametrize("host", ["::", ""])
async def test_all_addresses_are_ipv4_and_ipv6(host: str) -> None:
    async with world(1, host=host) as w:
        for address in ("127.0.0.1", "[::1]"):
            async with w.client.get(f"http://{address}:{w.server.port}/health") as answer:
                assert answer.status == 200


@pytest.mark.parametrize("host", ["::", ""])
async def test_a_picker_listens_at_all_addresses(host: str) -> None:
    async with picking(host=host) as w:
        for address in ("127.0.0.1", "::1"):
            for number in (w.server.port, w.server.picker.port):
                socket.create_connection((address, number)).close()


async def test_workers_divide_both_sockets() -> None:
    for sockets in divide(await hold("::", 0, "--port"), 2):
        assert {(each.getsockname()[0], each.family) for each in sockets} == ALL
        assert len({each.getsockname()[1] for each in sockets}) == 1
        for each in sockets:
            each.close()


async def test_a_machine_without_ipv6_listens_at_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    bound_socket = port.bound_socket

    def without_ipv6(family: int, address: Any, *options: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return bound_socket(family, address, *options)

    monkeypatch.setattr(port, "bound_socket", without_ipv6)
    (only,) = await port.bind_addresses("::", 0, "--port")
    with only:
        assert only.getsockname()[0] == "0.0.0.0"
