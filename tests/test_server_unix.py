"""Unix sockets: of clients and of engines."""

import asyncio
import socket
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from lmetric.config import EngineConfig, ServerConfig
from lmetric.server import Server
from lmetric.server.http.port import PortError, bind
from server_world import FakeEngine, World, world

BODY = {"model": "tiny", "prompt": "a"}


class UnixEngine(FakeEngine):
    """An engine on a unix socket."""

    path: Path

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)


async def post(w: World, path: str, body: Any = None) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as client,
        client.post("http://localhost/v1/completions", json=body or BODY) as response,
    ):
        return response.status, await response.read()


async def test_clients_connect_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    limits = {"max_client_share": 1e-9}
    with capture_logs() as logs:
        async with world(host=f"unix:{path}", socket_mode="600", limits=limits, log={"access": True}) as w:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            kept = [await asyncio.open_unix_connection(path) for _ in range(3)]
            for body in (BODY, BODY | {"stream": True}, BODY | {"prompt": "a" * 100_000}):
                assert (await post(w, str(path), body))[0] == 200, "limits per client do not apply"
            assert "x-forwarded-for" not in w.engines[0].requests[0].headers
            for _, writer in kept:
                writer.close()
    assert not path.exists()
    assert {line["client"] for line in logs if line["event"] == "request"} == {"unix"}
    (report,) = [line for line in logs if line["event"] == "listening"]
    assert report["url"] == f"unix:{path}"
    assert report["curl"].startswith(f"curl --unix-socket {path} http://localhost/v1/completions")


async def test_a_socket_file_is_replaced_only_if_nobody_listens(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    config = ServerConfig.model_validate({"host": f"unix:{path}"})
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    bound = await bind(config)
    bound.sockets[0].listen()
    with pytest.raises(PortError, match="Address already in use") as refused:
        await bind(config)
    assert f"unix:{path}" in str(refused.value)
    bound.sockets[0].close()
    bound.remove_file()
    assert not path.exists()
    path.write_text("a file of somebody else")
    with pytest.raises(PortError):
        await bind(config)
    assert path.read_text() == "a file of somebody else"
    with pytest.raises(PortError, match="No such file"):
        await bind(ServerConfig.model_validate({"host": "unix:/nowhere/router.sock"}))


async def test_engines_on_unix_sockets(tmp_path: Path) -> None:
    engine, other = UnixEngine(), FakeEngine()
    engine.path = tmp_path / "engine.sock"
    engines = [{"url": f"unix://{engine.path}"}]
    async with world([engine], engines=engines) as w:
        status, headers, answer = await w.post()
        assert (status, headers["x-lmetric-instance"]) == (200, str(engine.path))
        assert answer["choices"][0]["text"] == "from e0"
        assert engine.requests[0].headers["host"] == "localhost"
        assert (await w.post(BODY | {"stream": True}))[2].endswith(b"[DONE]\n\n")
    await other.start()
    both = [{"url": "unix:/nowhere/engine.sock", "name": "gone"}, {"url": other.url, "name": "there"}]
    async with world([], engines=both) as w:
        assert [(await w.post())[0] for _ in range(4)] == [200] * 4
        shown = {engine.name: engine.last_error for engine in w.server.fleet.engines()}
        assert shown["gone"] == "no connection: the unix socket does not exist"
    await other.stop()


async def test_administrators_add_no_unix_sockets() -> None:
    """The socket of a container engine or a database would be a way to other services."""
    async with world(admin=True) as w:
        for url in ("unix:///var/run/docker.sock", "unix:/run/x"):
            status, _, answer = await w.post({"url": url, "model": "tiny"}, "/admin/engines")
            assert (status, answer["error"]["code"]) == (403, "engine_not_allowed")


async def test_admin_pages_are_closed_on_a_unix_socket(tmp_path: Path) -> None:
    """A unix socket usually has a proxy in front, so its clients need not be on this machine."""
    with pytest.raises(ValueError, match=r"admin.enabled needs admin.token"):
        ServerConfig.model_validate({"host": f"unix:{tmp_path}/a", "admin": True})
    config = ServerConfig.model_validate({"host": f"unix:{tmp_path}/a"})
    assert not config.debug_is_open


def test_addresses_of_unix_sockets() -> None:
    for url in ("unix:/run/a.sock", "unix:///run/a.sock"):
        engine = EngineConfig.model_validate({"url": url})
        assert (engine.url, engine.label) == ("unix:///run/a.sock", "/run/a.sock")
    for bad in ("unix:a.sock", "unix://a/b", "unix:/run/", "unix:", "unix:/" + "a" * 108, "unix:/a?b"):
        with pytest.raises(ValueError, match=r"unix|query"):
            EngineConfig.model_validate({"url": bad})
    for bad in ("unix:a.sock", "unix://a/b", "unix:"):
        with pytest.raises(ValueError, match="unix socket"):
            ServerConfig.model_validate({"host": bad})
    for mode in (660, "0o660", "999", "66"):
        with pytest.raises(ValueError, match="octal"):
            ServerConfig.model_validate({"socket_mode": mode})


async def test_tls_over_a_unix_socket(tmp_path: Path) -> None:
    from tls_world import Authority

    authority, path = Authority(tmp_path), tmp_path / "router.sock"
    async with world(host=f"unix:{path}", tls=authority.issue("router").files) as w:
        reader, writer = await asyncio.open_unix_connection(
            path, ssl=authority.client(), server_hostname="localhost"
        )
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert isinstance(w.server, Server)
