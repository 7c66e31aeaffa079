"""Issued API keys of routers that are killed, and of several routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml
from structlog.testing import capture_logs

from lmetric.config import ConfigError
from lmetric.server.api.issued import MOST_KEYS, IssuedKey, KeyTable, decode, issue, revoke
from lmetric.server.api.replica_pages import KEYS_PATH
from lmetric.server.background import key_exchange
from lmetric.server.observe.key_store import FILE
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, World, answer, world
from test_server_keys import ADMIN, call, issued, settings, use
from test_server_process import Process, engine, router
from waiting import PATIENCE_SECONDS, until

HOUR = 3600
PEER = {"authorization": "Bearer among-us"}
BODY = {"model": "tiny", "prompt": "a"}


class Client:
    """A client of a router, with a new connection for each request."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def call(self, method: str, path: str, body: Any = None, token: str = "root-token") -> Any:
        """Returns the status and the answer."""
        headers = {"authorization": f"Bearer {token}"}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def issue(self) -> dict[str, Any]:
        body = {"tenant": "acme", "expires_in_seconds": HOUR}
        status, made = await self.call("POST", "/admin/keys", body)
        assert status == 201, made
        return dict(made)

    async def revoke(self, key: dict[str, Any]) -> None:
        assert (await self.call("DELETE", f"/admin/keys/{key['id']}"))[0] == 200

    async def use(self, key: dict[str, Any]) -> int:
        return int((await self.call("POST", "/v1/completions", BODY, key["key"]))[0])

    async def until(self, key: dict[str, Any], status: int) -> None:
        """Waits until requests with a key get a status."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self.use(key) != status:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def configuration(folder: Path, fake: FakeEngine, **more: Any) -> Path:
    """A file with the settings of a router that issues keys."""
    folder.mkdir(exist_ok=True)
    values = settings(folder, engines=[{"url": fake.url, "name": "e0"}], **more)
    file = folder / "router.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@asynccontextmanager
async def process(file: Path, *flags: str) -> AsyncIterator[tuple[Process, Client]]:
    async with router("--config", str(file), *flags) as running:
        await running.listening(60)
        client = Client(running.url)
        try:
            yield running, client
        finally:
            await client.session.close()


@pytest.mark.nightly
async def test_a_key_that_was_shown_survives_a_kill(tmp_path: Path) -> None:
    async with engine(behave=answer) as fake:
        file = configuration(tmp_path, fake)
        keys = []
        for _ in range(3):
            async with process(file) as (running, client):
                keys.append(await client.issue())
                running.process.kill()
                await running.ended()
        async with process(file) as (_, client):
            assert [await client.use(each) for each in keys] == [200] * 3


# Several routers.


@asynccontextmanager
async def routers(
    folder: Path, count: int, **more: Any
) -> AsyncIterator[tuple[list[Path], list[Process], list[Client], AsyncExitStack]]:
    """Starts routers as processes, each with the addresses of all of them."""
    ports = free_ports(count)
    peers = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "token": "among-us"}
    async with engine(behave=answer) as fake, AsyncExitStack() as stack:
        files, running, clients = [], [], []
        for port in ports:
            files.append(configuration(folder / str(port), fake, port=port, replicas=peers, **more))
            each, client = await stack.enter_async_context(process(files[-1], "--port", str(port)))
            running.append(each)
            clients.append(client)
        yield files, running, clients, stack


async def connected(clients: Sequence[Client]) -> None:
    """Waits until each router receives the load of all others."""
    async with asyncio.timeout(30):
        for client in clients:
            while True:
                _, state = await client.call("GET", "/debug/replicas")
                if len(state["received_from"]) == len(clients) - 1:
                    break
                await asyncio.sleep(0.02)


@pytest.mark.nightly
async def test_routers_share_keys_and_a_router_that_was_down_brings_no_revoked_key_back(
    tmp_path: Path,
) -> None:
    async with routers(tmp_path, 3) as (files, running, (a, b, c), stack):
        await connected([a, b, c])
        for client in (a, b, c):
            made = await client.issue()
            for each in (a, b, c):
                await each.until(made, 200)
            await (b if client is a else a).revoke(made)
            for each in (a, b, c):
                await each.until(made, 401)
        old = await a.issue()
        running[2].process.kill()
        await running[2].ended()
        # `old` is revoked and `new` is made while the third router is down.
        new = await b.issue()
        await a.revoke(old)
        running[0].process.kill()
        await running[0].ended()
        await b.until(old, 401)
        assert await b.use(new) == 200
        _, c = await stack.enter_async_context(process(files[2], "--port", c.url.rpartition(":")[2]))
        await c.until(old, 401)
        await c.until(new, 200)
        _, a = await stack.enter_async_context(process(files[0], "--port", a.url.rpartition(":")[2]))
        await connected([a, b, c])
        late = await c.issue()
        for client in (a, b, c):
            await client.until(late, 200)
            assert [await client.use(each) for each in (old, new)] == [401, 200]
        content = decode((files[2].parent / "state" / FILE).read_bytes())
        assert {key.sha256: bool(key.revoked) for key in content.keys}[hash_of(old)]


def hash_of(key: dict[str, Any]) -> str:
    return sha256(key["key"].encode()).hexdigest()


@asynccontextmanager
async def two(folder: Path, **more: Any) -> AsyncIterator[tuple[World, World]]:
    """Two routers in this process."""
    ports = free_ports(2)
    peers = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02, "token": "among-us"}
    for name in ("a", "b"):
        (folder / name).mkdir()
    async with (
        world(1, **settings(folder / "a", port=ports[0], replicas=peers, **more)) as a,
        world(1, **settings(folder / "b", port=ports[1], replicas=peers, **more)) as b,
    ):
        await until(lambda: all(each.server.front.replicas.received for each in (a, b)))
        yield a, b


async def test_the_others_know_a_change_before_its_answer_and_before_they_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_SECONDS", "CONFIRM_SECONDS"):
        monkeypatch.setattr(key_exchange, name, PATIENCE_SECONDS)
    async with two(tmp_path) as (a, b):
        made, other = await issued(a), await issued(b)
        assert [await use(each, key["key"]) for each in (a, b) for key in (made, other)] == [(200, None)] * 4
        assert (await call(b, "DELETE", f"/admin/keys/{made['id']}"))[0] == 200
        assert (await use(a, made["key"]))[0] == 401
        peers = {"urls": [a.url], "token": "among-us"}
        (tmp_path / "c").mkdir()
        async with world(1, **settings(tmp_path / "c", replicas=peers)) as c:
            # It has copied the keys, and `a` does not know that it exists.
            assert [(await use(c, each["key"]))[0] for each in (made, other)] == [401, 200]
            # It does not wait for routers that do not send their load.
            late = await issued(c)
            assert (await use(c, late["key"]))[0] == 200


async def test_a_router_that_does_not_copy_keys_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_exchange, "CONFIRM_SECONDS", 0.1)
    async with two(tmp_path) as (a, b):
        monkeypatch.setattr(b.server.front.replicas, "on_keys_version", lambda *_: None)
        with capture_logs() as logs:
            await issued(a)
        (line,) = [each for each in logs if each["log_level"] == "warning"]
        assert line["event"] == "other routers have not copied a change of API keys yet"
        assert line["routers"] == [b.server.front.replicas.id]


async def test_routers_copy_many_keys_in_parts(tmp_path: Path) -> None:
    async with two(tmp_path) as (a, b):
        many = [issue("t", f"key {number}", 2_000_000_000)[1] for number in range(1234)]
        await a.server._keys.change(many)
        await a.server._keys.change([revoke(key, 5) for key in many[::2]])
        everything = set(a.server.issued.all())
        await until(lambda: set(b.server.issued.all()) == everything)
        assert b.server.issued.count() == 617
        version = b.server.issued.version
        await asyncio.sleep(0.2)  # ten messages
        assert b.server.issued.version == version, "what is known is not copied again"


async def test_only_routers_with_the_token_read_the_records(tmp_path: Path) -> None:
    async with two(tmp_path) as (a, _):
        made = await issued(a)
        page = f"{KEYS_PATH}?after=0&copied=0&router=x"
        for headers in ({}, ADMIN, {"authorization": f"Bearer {made['key']}"}):
            assert (await a.get(page, headers))[0] == 401
        status, body = await a.get(page, PEER)
        assert status == 200
        table = decode(body)
        assert [key.id for key in table.keys] == [made["id"]]
        assert table.router == a.server.front.replicas.id
        assert made["key"].encode() not in body
        for query in ("", "?after=0", "?after=x&copied=0&router=x", f"{page}&more=1", f"{page}&after=1"):
            path = query if query.startswith("/") else KEYS_PATH + query
            assert (await a.get(path, PEER))[0] == 400
        for after in ("-5", "999999999999999999999"):
            status, body = await a.get(f"{KEYS_PATH}?after={after}&copied=1&router=x", PEER)
            assert status == 200
        # Nobody can add a key: there is no method for it.
        assert (await call(a, "POST", KEYS_PATH, KeyTable([]).encode(), **PEER))[0] == 405


async def test_a_router_without_a_folder_has_the_keys_of_the_others(tmp_path: Path) -> None:
    ports = free_ports(2)
    peers = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02, "token": "among-us"}
    given = settings(tmp_path, "sk-file: bob\n", replicas=peers)
    without = {name: each for name, each in given.items() if name != "state_folder"}
    async with world(1, **given, port=ports[0]) as a, world(1, **without, port=ports[1]) as b:
        await until(lambda: all(each.server.front.replicas.received for each in (a, b)))
        made = await issued(a)
        assert (await use(b, made["key"]))[0] == 200
        assert (await call(b, "DELETE", f"/admin/keys/{made['id']}"))[0] == 200
        assert (await use(a, made["key"]))[0] == 401


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"{}",
        b"[" * 5000,
        orjson.dumps({"keys": [{"sha256": "x"}], "router": "r", "version": 1}),
        KeyTable([IssuedKey("ab" * 32, "t", "", 1, 2)] * 1000, "x", 1).encode(),
        b" " * (key_exchange.MOST_ANSWER_BYTES + 1),
    ],
)
async def test_an_answer_that_is_no_table_of_keys_changes_nothing(
    tmp_path: Path, page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> bytes:
        return page

    async with two(tmp_path) as (a, b):
        monkeypatch.setattr(a.server.front, "keys_page", answer)
        await a.server._keys.change([issue("t", "", 2_000_000_000)[1]])
        await asyncio.sleep(0.2)
        assert b.server.issued.all() == []
        monkeypatch.undo()
        await until(lambda: b.server.issued.count() == 1)


async def test_a_new_router_at_a_known_address_is_logged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object) -> bytes:
        return b"{}"

    def warnings() -> int:
        return sum(each["event"] == "cannot copy API keys of another router" for each in logs)

    async with two(tmp_path) as (a, b):
        monkeypatch.setattr(a.server.front, "keys_page", answer)
        with capture_logs() as logs:
            await a.server._keys.change([issue("t", "", 2_000_000_000)[1]])
            await until(warnings)
            await asyncio.sleep(0.1)
            assert warnings() == 1, "not at each message"
            replicas = b.server.front.replicas
            replicas.addresses.clear()  # as a look-up without the router does
            await replicas._resolve()
            await until(lambda: warnings() == 2)


async def test_the_largest_answer_fits(tmp_path: Path) -> None:
    longest = "\x7f" * 128  # six bytes each in JSON
    keys = [IssuedKey(f"{number:064x}", longest, longest, 2**36, 2**36, 2**36) for number in range(MOST_KEYS)]
    table = KeyTable(keys[: key_exchange.MOST_RECORDS], "r" * 16, 2**40)
    assert len(table.encode()) < key_exchange.MOST_ANSWER_BYTES


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    async def start() -> None:
        async with world(1, **{**settings(tmp_path), "state_folder": str(file)}):
            pass

    with pytest.raises(ConfigError, match=r"state_folder: cannot use .*file: "):
        asyncio.run(start())
