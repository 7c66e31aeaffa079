"""Chromium for tests of the live page, and a router with many engines behind it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server_world import FakeEngine, World, world
from waiting import PATIENCE_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs chromium and the Python package playwright",
)


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as play:
        chromium = await play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        try:
            yield chromium
        finally:
            await chromium.close()


@contextlib.asynccontextmanager
async def open_page(chromium: Any, url: str, **context: Any) -> AsyncIterator[Any]:
    """Opens a page, and fails at the end if it logged an error or broke its policy."""
    faults: list[str] = []
    made = await chromium.new_context(**context)
    page = await made.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda message: faults.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on(
        "request", lambda request: faults.append(request.url) if not request.url.startswith(url) else None
    )
    try:
        await page.goto(f"{url}/ui")
        yield page
        assert [fault for fault in faults if "401" not in fault and "404" not in fault] == []
    finally:
        await made.close()


async def shown(page: Any, condition: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until a JavaScript condition is true. The page's policy forbids Playwright's wait."""
    async with asyncio.timeout(seconds):
        while not await page.evaluate(condition):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def login(page: Any, token: str) -> None:
    """Enters a token. The page loads anew."""
    await page.fill("#token", token)
    async with page.expect_navigation():
        await page.keyboard.press("Enter")


@contextlib.asynccontextmanager
async def large_world(engines: int, **config: Any) -> AsyncIterator[World]:
    """A router with this many engines: one process that listens on all addresses of 127.0.0.0/8."""
    engine = FakeEngine(host="0.0.0.0")
    await engine.start()
    assert engine._server is not None
    # The router connects to all engines at once.
    with socket.socket(fileno=os.dup(engine._server.sockets[0].fileno())) as listener:
        listener.listen(4096)
    urls = [f"http://127.0.{number // 250}.{number % 250 + 1}:{engine.port}" for number in range(engines)]
    async with world(
        0,
        **{
            "engines": [{"url": url, "name": f"e{number}"} for number, url in enumerate(urls)],
            "health": {"interval": 60, "timeout": 20},
            "policy": "lmetric",
            **config,
        },
    ) as it:
        it.engines.append(engine)
        try:
            yield it
        finally:
            await engine.stop()


def load_engines(it: World) -> None:
    """Reports loads, as engines would: some idle, one hot."""
    for model in it.server.fleet.models:
        for name in model.router.instances():
            number = int(name.removeprefix("e"))
            running = 40 if number == 1 else number * 7 % 13
            model.router.report_load(
                name,
                waiting=number * 5 % 7 if number % 3 == 0 else 0,
                running=running,
                kv_usage=number * 37 % 100 / 100,
            )
