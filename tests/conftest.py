"""Settings and fixtures of all tests."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvloop
from hypothesis import settings

from log_watch import watched_log

# Hundreds of tests start processes: without bytecode files, each would compile all modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
IN_ROUTER = Path(__file__).parent / "in_router"
NIGHTLY = Path(__file__).parent / "real"
sys.path.append(str(IN_ROUTER))
# Of the benchmarks, tests import `train_lengths`.
sys.path.append(str(IN_ROUTER.parents[1] / "bench"))
sys.path.append(str(IN_ROUTER.parents[1] / "integrations" / "vllm"))
from turn_guard import watch_servers  # noqa: E402

# Draws the same examples each time; `--hypothesis-profile default` draws new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

# The engine's and the router's. Tests run side by side, and two of them could bind the same one.
DEFAULT_PORTS = (8000, 8080)


def pytest_configure(config: pytest.Config) -> None:
    """Enables Ctrl-C for tests and their processes, even if a background shell ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # aiohttp reads the system's authorities twice when it is imported: 60 ms of CPU time in each
    # process. Tests reach no public address, and name the authorities of their own certificates.
    # The file has one certificate, whose key nobody has: httpx refuses an empty file. Nightly tests
    # install packages.
    if config.option.markexpr == "not nightly":
        os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data" / "authority.pem")


def pytest_sessionstart() -> None:
    """Makes each test that binds a default port fail, and not just beside another such test.

    An audit hook would run at thousands of other events, too: 1% of the time of all tests.
    """
    bind = socket.socket.bind

    def watched(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[1] in DEFAULT_PORTS:
            raise RuntimeError(f"a test binds the default port {address[1]}; use port 0 in tests")
        bind(self, address)

    socket.socket.bind = watched  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests without garbage collection, which takes a third of the time.

    It would look at thousands of tests again and again, here and while the tests run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out `tests/real` unless nightly tests are asked for: its imports take a second."""
    return True if collection_path == NIGHTLY and config.option.markexpr == "not nightly" else None


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Chooses the event loop: the server runs under uvloop if it is installed, else under asyncio.

    Its tests run under uvloop, and nightly also under asyncio (TEST_LOOP=asyncio).
    """
    if "test_server" in item.nodeid and os.environ.get("TEST_LOOP") != "asyncio":
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Commands that run in the tests' process write logs to a stream that ends with the test."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def no_long_turn(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """In all tests of the server, no turn of its loop is long (`turn_guard.py`); reload included.

    It holds for servers in this process and for the processes of routers.
    """
    if "_server" not in request.node.nodeid and "_epp" not in request.node.nodeid:
        yield
        return
    from lmetric.server import Server

    file = tmp_path_factory.getbasetemp() / "turns.txt"
    file.unlink(missing_ok=True)
    monkeypatch.setenv("TURN_GUARD_FILE", str(file))
    monkeypatch.setenv("PYTHONPATH", str(IN_ROUTER), prepend=os.pathsep)
    found: list[str] = []
    undo = watch_servers(Server, found.append, own=False)
    try:
        yield
    finally:
        undo()
    if file.exists():
        found += [f"router process: {line}" for line in file.read_text().splitlines()]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def no_late_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problems of a router in a test's process do not depend on the machine's speed."""
    if "_server" in request.node.nodeid:
        from lmetric.server.background import problems

        monkeypatch.setattr(problems, "LATE_SHARE", 2.0)


@pytest.fixture(autouse=True)
def no_secret_in_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reliability C1: in all tests of the server, its log contains no client's key or prompt."""
    if "_server" not in request.node.nodeid:
        yield
        return
    with watched_log():
        yield
