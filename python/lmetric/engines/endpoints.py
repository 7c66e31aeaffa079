"""Converts the ZMQ endpoints that an engine reports to endpoints that are reachable from here."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

# The endpoints that the flags of the adapters name.
DEFAULT_EVENTS = "tcp://*:5557"
DEFAULT_REPLAY = "tcp://*:5558"
_WILDCARDS = ("*", "0.0.0.0", "[::]")
_USE_TCP = "set a tcp endpoint on the engine, such as tcp://*:5557"


class EndpointError(ValueError):
    """An endpoint is not reachable from here. ``fix``: the setting that makes it reachable."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def reachable(endpoint: str, host: str) -> str:
    """The endpoint to connect to for an engine's listening endpoint: a wildcard becomes `host`.

    Raises EndpointError.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        if not is_local(host):
            raise EndpointError(f"its KV events are at {endpoint}, a socket of its own machine", _USE_TCP)
        if rest.startswith("@") or Path(rest).exists():
            return endpoint
        raise EndpointError(
            f"its KV events are at {endpoint}, and there is no such socket on this machine", _USE_TCP
        )
    if scheme != "tcp":
        raise EndpointError(f"its KV events are at {endpoint}, which no other process can reach", _USE_TCP)
    name, _, port = rest.rpartition(":")
    if not name or not _is_port(port):
        raise EndpointError(f"its KV events are at {endpoint}, which is not tcp://host:port", _USE_TCP)
    if name in _WILDCARDS:
        name = f"[{host}]" if ":" in host else host
    elif is_local(name) and not is_local(host):
        raise EndpointError(
            f"its KV events are at {endpoint}, which only its own machine can reach",
            f"set the endpoint tcp://*:{port} on the engine",
        )
    return f"tcp://{name}:{port}"


def listening(endpoint: str) -> str:
    """The endpoint that an engine listens at, for an endpoint to connect to."""
    scheme, _, rest = endpoint.partition("://")
    return f"tcp://*:{rest.rpartition(':')[2]}" if scheme == "tcp" else endpoint


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: engines add the rank to the port."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}" if rank and _is_port(port) else endpoint


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def is_local(host: str) -> bool:
    """Whether a host is a loopback address of this machine."""
    address = literal(host)
    if address is None:
        name = host.rstrip(".").lower()
        return name == "localhost" or name.endswith(".localhost")
    return address.is_loopback or address.is_unspecified  # connections to 0.0.0.0 stay here


def literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host spells, in any form that the system's look-up reads. None: a name.

    An IPv4 address within an IPv6 address counts as the IPv4 address.
    """
    host = host.strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if not re.fullmatch("[0-9a-fA-FxX.]+", host):
            return None
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))  # such as 127.1 and 0x7f000001
        except OSError:
            return None
    return (address.version == 6 and address.ipv4_mapped) or address


def host_of(endpoint: str) -> str | None:
    """The host of a tcp endpoint, without brackets. None: another kind of endpoint."""
    scheme, _, rest = endpoint.partition("://")
    return rest.rpartition(":")[0].strip("[]") if scheme == "tcp" else None


def with_host(endpoint: str, host: str) -> str:
    """A tcp endpoint with another host."""
    name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{endpoint.rpartition(':')[2]}"
