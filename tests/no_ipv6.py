"""Listens at :: with `serve`, `epp` and workers in a process without IPv6.

A filter of system calls refuses sockets of IPv6, as a kernel with `ipv6.disable=1`. Prints, as
JSON, the addresses of the sockets of two workers, and the status of each port at 127.0.0.1.
"""

import asyncio
import ctypes
import errno
import json
import os
import platform
import socket
import struct
from typing import Any

import aiohttp
import grpc

from epp_world import picking
from lmetric.server.epp.ext_proc_pb2 import HealthCheckRequest, HealthCheckResponse
from lmetric.server.supervisor.ports import divide, hold

# Numbers of the architecture and of the system call `socket`, by machine (linux/audit.h, unistd.h).
MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06  # instructions of a filter (linux/filter.h)
NUMBER_AT, ARCHITECTURE_AT, FAMILY_AT = 0, 4, 16  # fields of struct seccomp_data
ALLOW, FAIL = 0x7FFF0000, 0x00050000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


def refuse_ipv6() -> None:
    """Sockets of IPv6 fail from now on. Raises OSError."""
    architecture, number = MACHINES[platform.machine()]
    program = b"".join(
        struct.pack("HBBI", *each)
        for each in (
            (LOAD, 0, 0, ARCHITECTURE_AT),
            (EQUALS, 0, 5, architecture),
            (LOAD, 0, 0, NUMBER_AT),
            (EQUALS, 0, 3, number),
            (LOAD, 0, 0, FAMILY_AT),
            (EQUALS, 0, 1, socket.AF_INET6),
            (RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT),
            (RETURN, 0, 0, ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HL", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, MODE_FILTER, filters):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


async def main() -> None:
    divided = divide(await hold("::", 0, "--port"), 2)
    found: list[Any] = [[each.getsockname()[0] for each in sockets] for sockets in divided]
    async with picking(host="::") as world, aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{world.server.port}/health") as answer:
            found.append(answer.status)
        async with grpc.aio.insecure_channel(world.target) as channel:
            check: Any = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            found.append((await check(HealthCheckRequest(service="liveness"))).status)
    print(json.dumps(found))


if __name__ == "__main__":
    refuse_ipv6()
    asyncio.run(main())
