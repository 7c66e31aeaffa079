"""Look-ups of host names in threads of their own.

The resolver here waits until the test lets it answer; test_server_silent_names.py uses the
system's.
"""

import asyncio
import socket
import threading
from typing import Any

import pytest

from lmetric import host_names
from lmetric.host_names import look_up
from waiting import until


class Resolver:
    """Answers each name but those that begin with far: these wait for ``answers``."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.running: list[str] = []
        self.asked: list[str] = []

    def getaddrinfo(self, name: str, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(name)
        self.running.append(name)
        if name.startswith("far"):
            assert self.answers.wait(60)
        self.running.remove(name)
        if name == "none":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        place = ("fe80::1", 0, 0, 7) if name == "local" else ("192.0.2.1", 0)
        return [(socket.AF_INET6 if name == "local" else socket.AF_INET, 1, 6, "", place)]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    made = Resolver()
    monkeypatch.setattr(host_names.socket, "getaddrinfo", made.getaddrinfo)
    return made


async def test_all_who_wait_for_a_name_share_one_look_up(resolver: Resolver) -> None:
    waiting = [asyncio.create_task(look_up("far")) for _ in range(9)]
    await until(lambda: resolver.running)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    resolver.answers.set()
    assert await asyncio.gather(*waiting[1:]) == [[(socket.AF_INET, "192.0.2.1")]] * 8
    assert resolver.asked == ["far"]
    await look_up("far")
    assert resolver.asked == ["far", "far"]


async def test_errors_and_link_local_addresses(resolver: Resolver) -> None:
    with pytest.raises(socket.gaierror):
        await look_up("none")
    assert await look_up("local") == [(socket.AF_INET6, "fe80::1%7")]


async def test_addresses_need_no_thread_and_a_missing_thread_is_an_error(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    # A thread of an earlier look-up may not have ended yet, and would do the work.
    monkeypatch.setattr(host_names, "_threads", {slow: host_names._Threads() for slow in (False, True)})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert await look_up("10.0.0.1") == [(socket.AF_INET, "10.0.0.1")]
        assert await look_up("0:0::1") == [(socket.AF_INET6, "::1")]
        for _ in range(2):
            with pytest.raises(OSError, match="temporarily unavailable"):
                await look_up("near")
    assert await look_up("near") == [(socket.AF_INET, "192.0.2.1")]
    assert resolver.asked == ["near"]


async def test_slow_names_wait_apart_from_others(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_names, "MOST_THREADS", 3)
    monkeypatch.setattr(host_names, "_slow", set())
    names = [f"far{number}" for number in range(8)]
    with monkeypatch.context() as patch:
        patch.setattr(host_names, "SLOW_SECONDS", 0.0)  # each name is slow
        resolver.answers.set()
        await asyncio.gather(*map(look_up, names))
    resolver.answers.clear()
    waiting = [asyncio.create_task(look_up(name)) for name in names]
    await until(lambda: len(resolver.running) == 3)
    assert await look_up("near") == [(socket.AF_INET, "192.0.2.1")]
    assert len(resolver.running) == 3
    resolver.answers.set()
    await asyncio.gather(*waiting)
    assert len(resolver.asked) == 17
    assert host_names._slow == set()  # they are quick again
