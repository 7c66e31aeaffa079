"""The sockets on which the server listens: its own, or those of systemd.

They are bound before slow steps of the start, and listen at its end.
"""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmetric.config import UNIX, ServerConfig, is_loopback, unix_path
from lmetric.connection_errors import reason_of

_FIXES = {
    errno.EADDRINUSE: "stop the process that uses the port, or set another {setting}",
    errno.EACCES: "set {setting} to 1024 or above, or allow the process to use lower ports",
}
_UNIX_FIX = "set --host to a path that this process may create"
BACKLOG = 2048  # connections that wait to be accepted
ALL_ADDRESSES = ("", "::")  # hosts
FIRST_PASSED = 3  # descriptor of systemd's first socket, sd_listen_fds(3)


class PortError(OSError):
    """The server cannot listen on its address. ``errno`` has the reason."""

    def __str__(self) -> str:
        return str(self.args[1])


def port_error(host: str, port: int, error: Exception, setting: str = "--port") -> PortError:
    """Returns the PortError for a failed bind or listen.

    ``host``, ``port``: as in the configuration. ``setting``: name of the port's setting.
    """
    number = getattr(error, "errno", None) or errno.EADDRNOTAVAIL
    reason = reason_of(error)
    if unix_path(host) is not None:
        fix = "stop the process that listens there, or set another --host"
        fix = fix if number == errno.EADDRINUSE else _UNIX_FIX
        return PortError(number, f"cannot listen on {host}: {reason}; {fix}")
    fix = _FIXES.get(number, "set --host to an address of this machine").format(setting=setting)
    return PortError(number, f"cannot listen on {host}:{port}: {reason}; {fix}")


@dataclass
class Bound:
    """Sockets for clients.

    ``shared``: systemd has them, too, so that connections wait for the next process when this one
    closes them. ``path``: the file of a unix socket that this process made.
    """

    sockets: list[socket.socket]
    shared: bool = False
    path: Path | None = None
    _inode: int = field(default=0)

    def __post_init__(self) -> None:
        if self.path is not None:
            self._inode = self.path.stat().st_ino

    @property
    def host(self) -> str:
        """The address, as `host` of a configuration; of several, an address off loopback."""
        hosts = []
        for each in self.sockets:
            name = each.getsockname()
            hosts.append(str(name[0]) if isinstance(name, tuple) else f"{UNIX}{name}")
        return next((host for host in hosts if not is_loopback(host)), hosts[0])

    @property
    def port(self) -> int:
        """The port; 0 for a unix socket."""
        name = self.sockets[0].getsockname()
        return int(name[1]) if isinstance(name, tuple) else 0

    def remove_file(self) -> None:
        """Removes the file of a unix socket, unless another process has replaced it."""
        if self.path is not None:
            # Once: after it, the file of the next process may get the same number.
            path, self.path = self.path, None
            with contextlib.suppress(OSError):
                if path.stat().st_ino == self._inode:
                    path.unlink()


async def bind(config: ServerConfig) -> Bound:
    """Returns bound sockets for all addresses of `config.host`. Raises PortError.

    They do not listen yet, so clients are refused instead of waiting.
    """
    passed = _passed()
    if passed:
        return Bound(passed, shared=True)
    path = unix_path(config.host)
    if path is not None:
        return _bind_unix(config, Path(path))
    return Bound(await bind_addresses(config.host, config.port, "--port"))


async def bind_addresses(host: str, port: int, setting: str) -> list[socket.socket]:
    """Returns sockets bound to all addresses of a host. Raises PortError.

    The hosts "" and :: are all IPv4 and IPv6 addresses of the machine. IPv4 has its own socket:
    clients at an IPv6 socket would have addresses such as ::ffff:10.0.0.1.
    """
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        try:
            addresses = await loop.getaddrinfo(
                None if host in ALL_ADDRESSES else host,
                port,
                type=socket.SOCK_STREAM,
                flags=socket.AI_PASSIVE,
            )
            sockets: list[socket.socket] = []
            for family, _, _, _, address in dict.fromkeys(addresses):
                if sockets:  # port 0: the same free port for all
                    address = (address[0], sockets[0].getsockname()[1], *address[2:])
                try:
                    each = bound_socket(family, address)
                except OSError as error:
                    if error.errno == errno.EAFNOSUPPORT and len(addresses) > 1:
                        continue  # a machine without IPv6
                    raise
                sockets.append(opened.enter_context(each))
        except (OSError, OverflowError) as error:
            raise port_error(host, port, error, setting=setting) from None
        opened.pop_all()
    return sockets


def bound_socket(family: int, address: Any, *options: int) -> socket.socket:
    """Returns a socket bound to an address. ``options``: further ones that are on."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            made.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _bind_unix(config: ServerConfig, path: Path) -> Bound:
    """Binds a unix socket. Raises PortError.

    A socket file that nobody listens on is left from a process that was killed: it is replaced.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale(path)
        sock.bind(str(path))
        path.chmod(int(config.socket_mode, 8))
    except OSError as error:
        sock.close()
        raise port_error(config.host, config.port, error) from None
    return Bound([sock], path=path)


def remove_stale(path: Path) -> None:
    """Removes a unix socket's file if no process listens there.

    Raises OSError (EADDRINUSE) if one does, or if the file is no socket.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its queue is full, so someone listens
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _passed() -> list[socket.socket]:
    """Returns the sockets that systemd has passed to this process, once: sd_listen_fds(3)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    count = int(os.environ.pop("LISTEN_FDS", "0"))
    for name in ("LISTEN_PID", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    sockets = []
    for number in range(FIRST_PASSED, FIRST_PASSED + count):
        os.set_inheritable(number, False)
        sockets.append(socket.socket(fileno=number))
    return sockets
