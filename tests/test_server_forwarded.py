"""Proxies in front: which forwarding fields engines get, and which client counts."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from lmetric.config import ServerConfig
from lmetric.server.http.forwarding import CACHE_BYTES, CACHED, Forwarding
from server_world import World, hang, world
from waiting import until

FORGED = {
    "x-forwarded-for": "6.6.6.6",
    "x-forwarded-proto": "gopher",
    "x-forwarded-host": "evil.example",
    "x-forwarded-port": "1",
    "forwarded": "for=6.6.6.6",
    "x-real-ip": "6.6.6.6",
    "x-lmetric-decision": "1",
    "x-own": "kept",
}
TRUSTED: dict[str, Any] = {"forwarded": {"trusted_proxies": ["127.0.0.1", "10.0.0.0/8"]}}


def forwarding_fields(w: World) -> dict[str, str]:
    headers = w.engines[0].requests[-1].headers
    names = ("x-forwarded", "forwarded", "x-real-ip", "x-lmetric")
    return {name: value for name, value in headers.items() if name.startswith(names)}


@pytest.mark.parametrize("slow", [False, True])
async def test_clients_cannot_forge_their_address(slow: bool) -> None:
    """Reliability L: these fields once passed unchanged. ``slow``: through aiohttp."""
    async with world() as w:
        host = f"127.0.0.1:{w.server.port}"
        status, _, _ = await w.post(headers=FORGED | ({"expect": "100-continue"} if slow else {}))
        assert status == 200
        assert forwarding_fields(w) == {
            "x-forwarded-for": "127.0.0.1",
            "x-forwarded-proto": "http",
            "x-forwarded-host": host,
        }
        assert w.engines[0].requests[-1].headers["x-own"] == "kept"


@pytest.mark.parametrize("slow", [False, True])
async def test_a_trusted_proxy_adds_its_client(slow: bool) -> None:
    with capture_logs() as logs:
        async with world(log={"access": True}, **TRUSTED) as w:
            more = {"expect": "100-continue"} if slow else {}
            for chain, client in (
                ("6.6.6.6, 1.2.3.4", "1.2.3.4"),
                ("6.6.6.6, 1.2.3.4, 10.1.2.3", "1.2.3.4"),
                ("10.9.9.9", "10.9.9.9"),
                ("6.6.6.6, nonsense, 10.1.2.3", "10.1.2.3"),
                ("[2001:db8::1]:443", "2001:db8::1"),
                ("1.2.3.4:5678", "1.2.3.4"),
                ("::ffff:1.2.3.4", "1.2.3.4"),
            ):
                sent = {**FORGED, "x-forwarded-for": chain, **more}
                assert (await w.post(headers=sent))[0] == 200
                assert forwarding_fields(w) == {
                    "x-forwarded-for": f"{chain}, 127.0.0.1",
                    "x-forwarded-proto": "gopher",
                    "x-forwarded-host": "evil.example",
                    "x-forwarded-port": "1",
                    "forwarded": "for=6.6.6.6",
                    "x-real-ip": "6.6.6.6",
                }
                line = next(line for line in reversed(logs) if line["event"] == "request")
                assert line["client"] == client, chain
            await w.post(headers=more)
            assert forwarding_fields(w) == {
                "x-forwarded-for": "127.0.0.1",
                "x-forwarded-proto": "http",
                "x-forwarded-host": f"127.0.0.1:{w.server.port}",
            }
            assert not w.server.front.clients._clients.keys() - {"127.0.0.1"}, "no client is left over"


async def test_bodies_count_for_the_client_behind_the_proxy() -> None:
    """The connections of the proxy are not limited per client, and bodies are by its clients."""
    limits = {"max_connections": 4, "max_body_bytes_total": 1_200_000, "max_client_share": 0.25}
    async with world(limits=limits, **TRUSTED) as w:
        clients = w.server.front.clients
        w.engines[0].behave = hang
        body = {"model": "tiny", "prompt": "a" * 200_000}

        def post(client: str) -> asyncio.Task[tuple[int, dict[str, str], Any]]:
            return asyncio.create_task(w.post(body, headers={"x-forwarded-for": client}))

        first, second = post("1.1.1.1"), post("2.2.2.2")
        await w.engines[0].asked(2)
        assert {name: each.body_bytes > 200_000 for name, each in clients._clients.items()} == {
            "127.0.0.1": False,
            "1.1.1.1": True,
            "2.2.2.2": True,
        }
        status, _, answer = await post("1.1.1.1")
        assert (status, answer["error"]["code"]) == (503, "too_many_bytes")
        assert clients.refused == {"body_bytes_per_client": 1}
        # An upload that stops counts for its client, too.
        _, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 250000\r\n")
        writer.write(b"x-forwarded-for: 3.3.3.3\r\n\r\n" + b"a" * 100_000)
        await until(
            lambda: clients._clients.get("3.3.3.3") and clients._clients["3.3.3.3"].body_bytes > 99_000
        )
        writer.close()
        await until(lambda: "3.3.3.3" not in clients._clients)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await w.settled()
        await until(lambda: not clients._clients.keys() - {"127.0.0.1"} and not clients.body_bytes)


async def test_pipelined_requests_have_their_own_clients() -> None:
    async with world(log={"access": True}, **TRUSTED) as w:
        data = b'{"model":"tiny","prompt":"a"}'
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        with capture_logs() as logs:
            for client in ("1.1.1.1", "2.2.2.2"):
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(data)
                )
                writer.write(b"x-forwarded-for: %s\r\n\r\n" % client.encode() + data)
            for _ in range(2):
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        assert [line["client"] for line in logs if line["event"] == "request"] == ["1.1.1.1", "2.2.2.2"]
        writer.close()
        clients = w.server.front.clients
        await until(lambda: not clients._clients)


async def test_proxies_on_a_unix_socket_may_be_trusted(tmp_path: Path) -> None:
    path = tmp_path / "router.sock"
    for rules, sent in (([], None), (["unix"], "1.2.3.4")):
        async with (
            world(host=f"unix:{path}", forwarded={"trusted_proxies": rules}) as w,
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client,
        ):
            body = {"model": "tiny", "prompt": "a"}
            headers = {"x-forwarded-for": "1.2.3.4"}
            async with client.post("http://h/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
            assert forwarding_fields(w).get("x-forwarded-for") == sent


def test_without_a_chain_the_proxy_is_the_client() -> None:
    forwarding = Forwarding(["10.0.0.0/8", "fd00::/8"])
    assert forwarding.client("10.0.0.1", None) == "10.0.0.1"
    assert forwarding.client("10.0.0.1", b"") == "10.0.0.1"
    assert forwarding.client("", b"unknown") == ""
    assert forwarding.client("10.0.0.1", b"fd00::1%eth0, 10.0.0.2") == "fd00::1"
    assert forwarding.peer(("::ffff:10.0.0.1", 1, 0, 0), secure=False).trusted
    assert not forwarding.peer(("11.0.0.1", 1), secure=False).trusted
    assert not forwarding.peer("", secure=False).trusted


def test_a_long_chain_costs_no_memory() -> None:
    """Security F14: the cache once kept whole fields, 3.9 GB at most; and only the end matters."""
    forwarding = Forwarding(["10.0.0.0/8"])
    long = b"6.6.6.6, " * 100_000
    assert forwarding.client("10.0.0.1", long + b"1.2.3.4, 10.1.1.1") == "1.2.3.4"
    # Of an entry that is cut, nothing is read: the rest of 2001:db8::6 would be an address, too.
    cut = b"2001:db8::6" + b", 10.1.1.10" * 46
    assert cut[-512:].startswith(b"db8::6,")
    assert forwarding.client("10.0.0.1", cut) == "10.1.1.10"
    tracemalloc.start()
    try:
        for number in range(2 * CACHED):
            forwarding.client("10.0.0.1", b"%d, %b1.2.3.4" % (number, long[:60_000]))
        assert tracemalloc.get_traced_memory()[0] < CACHE_BYTES
    finally:
        tracemalloc.stop()


def test_a_router_behind_proxies_is_not_local() -> None:
    """Requests of the world come from the loopback address of a proxy."""
    assert ServerConfig().debug_is_open
    assert not ServerConfig.model_validate(TRUSTED).debug_is_open
    with pytest.raises(ValueError, match="trusted proxies"):
        ServerConfig.model_validate(TRUSTED | {"admin": True})
    with pytest.raises(ValueError, match="CIDR"):
        ServerConfig.model_validate({"forwarded": {"trusted_proxies": ["proxy.example"]}})
