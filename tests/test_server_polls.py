"""Pages that the router reads from engines, over connections of their own that stay open."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from lmetric.config import EngineConfig, ServerConfig
from lmetric.server.upstream import pool as upstream_pool
from lmetric.server.upstream.connection import UpstreamError
from lmetric.server.upstream.pool import PAGE_BYTES, PAGE_CONNECTIONS, Upstream
from server_world import Behaviour, FakeEngine, Request, hang, plain, reset, says, self_signed, world
from test_server_members import remove
from waiting import until

OFTEN = {"health": {"interval": 0.02, "timeout": 60}, "load": {"interval": 0.02}}
KEPT = says(plain(200, b"{}"), then="keep")


class Polled(FakeEngine):
    """Records the requested pages. `page` answers them, if it is set."""

    def __init__(self, page: Behaviour | None = None) -> None:
        super().__init__(metrics=b"vllm:num_requests_running 1.0\n")
        self.page = page
        self.pages: list[Request] = []

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        if request.path.startswith("/v1/comp"):
            return await super()._answer(request, writer)
        self.pages.append(request)
        if self.page is not None:
            return await self.page(self, request, writer)
        return await super()._answer(request, writer)

    def polls(self, path: str) -> int:
        return sum(page.path == path for page in self.pages)

    @property
    def open(self) -> int:
        """The open connections to it."""
        return len(self._writers)


def behind(then: Behaviour) -> Behaviour:
    """Answers the first page of each connection well, and later pages in another way."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        assert isinstance(engine, Polled)
        first = sum(page.connection == request.connection for page in engine.pages) == 1
        return await (FakeEngine._answer(engine, request, writer) if first else then(engine, request, writer))

    return behave


@asynccontextmanager
async def one(page: Behaviour | None = KEPT, **limits: float) -> AsyncIterator[tuple[Polled, Upstream]]:
    """Starts an engine, and returns the router's state of it."""
    engine = Polled(page)
    await engine.start()
    upstream = Upstream(EngineConfig(url=engine.url), ServerConfig.model_validate({"limits": limits}))
    try:
        yield engine, upstream
    finally:
        upstream.close()
        await engine.stop()


async def left(engine: Polled, count: int = 0) -> None:
    """Waits until this many connections are open."""
    await until(lambda: engine.open == count, seen=lambda: f"{engine.open} are open")


async def test_polls_share_a_few_connections() -> None:
    """Each poll once opened its own connection."""
    fake = Polled()
    async with world([fake], **OFTEN) as it:
        await it.until(lambda: fake.polls("/health") > 30 and fake.polls("/metrics") > 30)
        assert fake.connections <= PAGE_CONNECTIONS
        assert it.server.fleet.models[0].engines["e0"].running == 0


async def test_polls_go_on_while_all_connections_of_requests_are_in_use() -> None:
    fake = Polled()
    fake.behave = hang
    async with world([fake], limits={"max_connections_per_engine": 1}, **OFTEN) as it:
        running = asyncio.create_task(it.post())
        await fake.asked(1)
        before = len(fake.pages)
        await it.until(lambda: len(fake.pages) > before + 20)
        engine = it.server.fleet.models[0].engines["e0"]
        assert (engine.running, engine.healthy) == (1, True)
        assert (await it.post())[0] == 503
        assert fake.connections <= 1 + PAGE_CONNECTIONS
        running.cancel()
        await it.until(lambda: engine.running == 0)


async def test_a_kept_connection_that_closes_under_a_poll_is_no_failure() -> None:
    fake = Polled(behind(reset))
    async with world([fake], **OFTEN) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        for _ in range(10):
            before = fake.connections
            await it.until(lambda before=before: fake.connections > before)
            assert (engine.healthy, engine.failures, engine.load_error) == (True, 0, None)
        await it.until(lambda: engine.load_reports["/metrics"] > 5)


async def test_a_health_check_that_hangs_does_not_delay_the_load_of_its_engine() -> None:
    stuck = False

    async def page(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if stuck and request.path == "/health":
            return await hang(engine, request, writer)
        return await FakeEngine._answer(engine, request, writer)

    fake = Polled(page)
    async with world([fake], **OFTEN) as it:
        await it.until(lambda: fake.polls("/metrics") > 3)
        stuck = True
        before = fake.polls("/metrics")
        await it.until(lambda: fake.polls("/metrics") > before + 20)
        assert fake.connections <= PAGE_CONNECTIONS


async def test_an_engine_that_takes_no_more_connections_does_not_come_back_by_a_kept_one() -> None:
    fake = Polled()
    async with world([fake], **OFTEN) as it:
        engine = it.server.fleet.models[0].engines["e0"]
        await it.until(lambda: fake.polls("/metrics") > 3)
        assert fake._server is not None
        fake._server.close()
        assert (await it.post())[0] == 502
        await it.until(lambda: fake.open == 0)
        before = len(fake.pages)
        await asyncio.sleep(0.1)
        assert (engine.healthy, len(fake.pages)) == (False, before)
        await fake.start()
        await it.until(lambda: engine.healthy)


async def test_no_connection_stays_behind_when_an_engine_leaves() -> None:
    fakes = [Polled(), Polled()]
    async with world(fakes, admin=True, **OFTEN) as it:
        for round_ in range(3):
            await it.until(lambda: all(fake.polls("/metrics") > 3 for fake in fakes))
            upstream = it.server.fleet.models[0].engines["e1"].upstream
            assert (await remove(it, "e1"))[0] == 200
            await left(fakes[1])
            assert not upstream._pages._open
            fakes[1].pages.clear()
            if round_ < 2:
                await it.post({"url": fakes[1].url, "name": "e1"}, "/admin/engines")
        assert 0 < fakes[0].open <= PAGE_CONNECTIONS
    await left(fakes[0])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_polls_over_tls_share_a_few_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, certificate = await self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    fake = Polled()
    secure = await asyncio.start_server(fake._serve, "127.0.0.1", 0, ssl=context)
    url = f"https://127.0.0.1:{secure.sockets[0].getsockname()[1]}"
    try:
        async with world(0, model="tiny", engines=[{"url": url, "name": "e0"}], **OFTEN) as it:
            await it.until(lambda: fake.polls("/health") > 10 and fake.polls("/metrics") > 10)
            assert fake.connections <= PAGE_CONNECTIONS
            assert it.server.fleet.models[0].engines["e0"].healthy
        await left(fake)
    finally:
        secure.close()


async def test_pages_asked_for_one_after_the_other_share_a_connection() -> None:
    async with one() as (engine, upstream):
        for _ in range(5):
            assert await upstream.get("/health", 5) == (200, b"{}")
            assert (await upstream.post("/tokenize", b"{}", 5))[0] == 200
        assert (engine.connections, len(engine.pages), upstream.in_use) == (1, 10, 0)
        # Each page carries the key, so connections are not tied to a key.
        upstream.set_key(SecretStr("new"))
        await upstream.get("/health", 5)
        assert engine.pages[-1].headers["authorization"] == "Bearer new"
        assert engine.connections == 1


async def test_of_many_connections_few_are_kept() -> None:
    async with one() as (engine, upstream):
        await asyncio.gather(*(upstream.get("/health", 5) for _ in range(6)))
        assert engine.connections == 6
        await left(engine, PAGE_CONNECTIONS)
        await asyncio.gather(*(upstream.get("/health", 5) for _ in range(PAGE_CONNECTIONS)))
        assert engine.connections == 6


@pytest.mark.parametrize(
    "page",
    [plain(200, b"{}", b"connection: close\r\n"), b"HTTP/1.0 200 X\r\ncontent-length: 2\r\n\r\n{}",
     b"HTTP/1.1 200 X\r\n\r\n{}", plain(200, b"{}") + b"more"],
    ids=["close", "HTTP/1.0", "until it closes", "more than was asked for"],
)  # fmt: skip
async def test_a_connection_that_may_not_be_kept_is_closed(page: bytes) -> None:
    then = "close" if b"HTTP/1.1 200 X\r\n\r\n" in page else "keep"
    async with one(says(page, then=then)) as (engine, upstream):
        for _ in range(3):
            assert await upstream.get("/health", 5) == (200, b"{}")
            await left(engine)
        assert (engine.connections, len(engine.pages)) == (3, 3)


LONG = plain(200, b"x" * (PAGE_BYTES + 1))


@pytest.mark.parametrize(
    ("then", "kind", "times"),
    [
        (hang, "timeout", 1),
        (says(LONG, then="keep"), "reset", 1),
        (says(b"nonsense\r\n\r\n", then="keep"), "reset", 1),
        (says(LONG[:100], then="reset"), "reset", 1),
        (says(b"HTTP/1.1 200", then="reset"), "reset", 1),
        (reset, "reset", 2),
    ],
    ids=["hangs", "too long", "nonsense", "cut in its body", "cut in its head", "nothing"],
)
async def test_only_a_page_of_which_nothing_came_is_asked_for_again(
    then: Behaviour, kind: str, times: int
) -> None:
    async with one() as (engine, upstream):
        await asyncio.gather(*(upstream.get("/health", 5) for _ in range(PAGE_CONNECTIONS)))
        engine.pages.clear()
        engine.page = then
        with pytest.raises(UpstreamError) as error:
            await upstream.get("/health", 0.3)
        assert (error.value.kind, len(engine.pages)) == (kind, times)
        await left(engine)  # other idle connections may be broken, and the address may have changed
        with pytest.raises(UpstreamError):
            await upstream.get("/health", 0.3)
        assert len(engine.pages) == times + 1, "a new connection is no reason to ask again"
        engine.page = KEPT
        assert (await upstream.get("/health", 5))[0] == 200


async def test_kept_connections_close_when_they_wait_too_long() -> None:
    async with one(idle_seconds=3.0) as (engine, upstream):
        await upstream.get("/health", 5)
        upstream.expire(time.monotonic() + 2.5)
        await asyncio.sleep(0.02)
        assert engine.open == 1
        upstream.expire(time.monotonic() + 3.5)
        await left(engine)


async def test_a_name_is_looked_up_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with frequent polls: the name may have another address by now."""
    monkeypatch.setattr(upstream_pool, "PAGE_CONNECTION_SECONDS", 0.1)
    async with one() as (engine, upstream):
        began = time.monotonic()
        while engine.connections < 4:
            await upstream.get("/health", 5)
        assert time.monotonic() - began > 0.3
        assert len(engine.pages) > 4
        await left(engine, 1)


async def test_a_poll_on_its_way_when_its_engine_is_removed_leaves_nothing() -> None:
    async with one() as (engine, upstream):
        poll = asyncio.create_task(upstream.get("/health", 5))
        await until(lambda: engine.pages)
        upstream.close()
        assert (await poll)[0] == 200
        await left(engine)
        assert (await upstream.get("/health", 5))[0] == 200
        await left(engine)
        assert not upstream._pages._open
