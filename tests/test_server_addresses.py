"""The addresses at which a server listens, over real sockets."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from epp_world import picking
from lmetric.server.epp.ext_proc_pb2 import HealthCheckResponse
from lmetric.server.supervisor.ports import divide, hold
from no_ipv6 import MACHINES
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


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES, reason="filters system calls of Linux"
)
def test_a_machine_without_ipv6_listens_at_ipv4() -> None:
    run = [sys.executable, Path(__file__).with_name("no_ipv6.py")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [["0.0.0.0"], ["0.0.0.0"], 200, HealthCheckResponse.SERVING]
