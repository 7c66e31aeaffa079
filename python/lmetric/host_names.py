"""Look-ups of host names, in threads of their own.

The system's resolver holds a thread for 10 s or more if a name server does not answer. Event loops
have few threads for look-ups (uvloop 2), so that one such name would stop all others.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# Threads of each kind. Up to this number of silent names delay no others.
MOST_THREADS = 128
# A name whose last look-up took longer waits beside names of the same kind alone. Good name servers
# answer in less, and the system's resolver repeats a lost query after 5 s.
SLOW_SECONDS = 2.0

Addresses = list[tuple[int, str]]  # family and IP address


class _Threads:
    """Up to `MOST_THREADS` daemon threads: a process that ends does not wait for name servers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = 0

    def run(self, work: Callable[[], None]) -> None:
        """Raises OSError if no thread can do the work."""
        with self._lock:
            self._waiting.append(work)
            if self._running == MOST_THREADS:
                return
            self._running += 1
        try:
            threading.Thread(target=self._work, name="lmetric-names", daemon=True).start()
        except RuntimeError:  # the system allows no further thread
            with self._lock:
                self._running -= 1
                if self._running:
                    return  # another thread does the work later
                self._waiting.clear()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running -= 1
                    return
                work = self._waiting.popleft()
            work()


_lock = threading.Lock()
_running: dict[str, Future[Addresses]] = {}  # by name
_slow: set[str] = set()  # names whose last look-up took longer than SLOW_SECONDS
_threads = {slow: _Threads() for slow in (False, True)}


async def look_up(name: str) -> Addresses:
    """Returns the addresses of a host name, as the system's resolver orders them.

    A name is looked up once at a time: all who wait for it share the answer. A canceled caller does
    not end the look-up. Raises OSError, or UnicodeError if no DNS name has this form.
    """
    if is_ip_address(name) and "%" not in name:  # a zone has a number that the system knows
        address = ipaddress.ip_address(name)
        return [(socket.AF_INET6 if address.version == 6 else socket.AF_INET, str(address))]
    with _lock:
        answer = _running.get(name)
        if answer is None:
            answer = _running[name] = Future()
            answer.set_running_or_notify_cancel()  # a canceled caller ignores the answer
            try:
                _threads[name in _slow].run(lambda: _look_up(name, answer))
            except OSError:
                del _running[name]
                raise
    return await asyncio.wrap_future(answer)


def _look_up(name: str, answer: Future[Addresses]) -> None:
    began = time.monotonic()
    found: Addresses = []
    failed: BaseException | None = None
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found = [(family, _text(place)) for family, _, _, _, place in infos]
    except BaseException as error:
        failed = error
    with _lock:
        del _running[name]
        (_slow.add if time.monotonic() - began > SLOW_SECONDS else _slow.discard)(name)
    if failed is not None:
        answer.set_exception(failed)
    else:
        answer.set_result(found)


def _text(place: tuple[Any, ...]) -> str:
    """Returns the IP address of a socket address; a link-local one with its interface."""
    return f"{place[0]}%{place[3]}" if len(place) == 4 and place[3] else str(place[0])


def is_ip_address(host: str) -> bool:
    """Whether a host is an IP address and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
