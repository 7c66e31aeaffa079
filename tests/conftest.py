"""Shared by all tests."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from hypothesis import settings

from log_watch import watched_log

# The same draws every time; `--hypothesis-profile default` draws anew.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


def pytest_configure() -> None:
    """Ctrl-C works although the tests may run in the background, where a shell has it ignored: what the tests
    start would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The server runs under uvloop where there is one, else under asyncio: its tests run under the first, and
    every night under the second, too (TEST_LOOP=asyncio; LMETRIC_... would be a setting)."""
    if "test_server" in item.nodeid and os.environ.get("TEST_LOOP") != "asyncio":
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def no_secret_in_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reliability C1: whatever the tests of the server do, no client's key or prompt is in its log."""
    if "_server" not in request.node.nodeid:
        yield
        return
    with watched_log():
        yield
