"""Engines behind a DNS name, with a DNS server on loopback."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from turn_guard import TurnGuard

from constants import with_constants
from discovery_world import DnsServer, Told, following
from lmetric.config import ConfigError, DiscoverySource, DnsSource, load_config
from lmetric.server.discovery import dns as module
from lmetric.server.discovery.dns import DnsNames
from server_world import FakeEngine, world


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHORTEST_SECONDS", 0.02)
    monkeypatch.setattr(module, "LOOK_UP_SECONDS", 0.2)


def source(server: DnsServer, **values: Any) -> DnsNames:
    values = {"name": "vllm.test", "port": 8000, "interval": 0.05, "nameservers": [server.address], **values}
    dns = with_constants(DnsSource, **values)
    return DnsNames(dns, DiscoverySource(dns=dns))


async def test_addresses_come_and_go() -> None:
    async with DnsServer() as server:
        server.zone["vllm.test", "A"] = ["10.0.0.1", "10.0.0.2"]
        server.zone["vllm.test", "AAAA"] = ["fd00::1"]
        async with following(source(server)) as told:
            await told.until(lambda: told.names == ["10.0.0.1:8000", "10.0.0.2:8000"])
            server.zone["vllm.test", "A"] = ["10.0.0.2", "10.0.0.3"]
            await told.until(lambda: told.names == ["10.0.0.2:8000", "10.0.0.3:8000"])
        async with following(source(server, type="AAAA")) as told:
            await told.until(lambda: told.lists)
            assert [each.config.url for each in told.lists[0]] == ["http://[fd00::1]:8000"]


async def test_service_records_bring_ports_and_names() -> None:
    async with DnsServer() as server:
        server.zone["_http._tcp.vllm.test", "SRV"] = [
            "0 5 8001 e-1.test.",
            "0 5 8000 e-0.test.",
            "0 5 1 lost.test.",
        ]
        server.zone["e-0.test", "A"] = ["10.0.0.1"]
        server.zone["e-1.test", "AAAA"] = ["fd00::2"]
        async with following(source(server, name="_http._tcp.vllm.test", type="SRV", port=None)) as told:
            await told.until(lambda: told.lists)
            assert {each.config.label: each.config.url for each in told.lists[0]} == {
                "e-0.test:8000": "http://10.0.0.1:8000",
                "e-1.test:8001": "http://[fd00::2]:8001",
            }
            assert told.problems[0] == "SRV of _http._tcp.vllm.test: lost.test:1 has no address"


async def test_a_target_whose_look_up_fails_removes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    async with DnsServer() as server:
        server.ttl = 0
        server.zone["vllm.test", "SRV"] = [f"0 0 8000 e-{number}.test." for number in range(3)]
        for number in range(3):
            server.zone[f"e-{number}.test", "A"] = [f"10.0.0.{number}"]
        server.failing |= {("e-0.test", "A"), ("e-1.test", "AAAA")}
        every = [f"e-{number}.test:8000" for number in range(3)]
        async with following(source(server, type="SRV", port=None, grace=60)) as told:
            await told.until(lambda: told.names == every[1:])
            server.failing = {("e-1.test", "A")}
            await told.until(lambda: told.names == every)
            assert "SRV of vllm.test: A of e-0.test: " in told.problems[0]
            for seconds, left in ((59, every), (2, [every[0], every[2]])):
                now += seconds
                known = len(told.lists)
                await told.until(lambda known=known: len(told.lists) > known + 1)
                assert told.names == left
            assert "A of e-1.test: " in told.problems[-1]
            server.failing.clear()
            server.zone["e-1.test", "A"] = ["10.0.1.1"]
            await told.until(lambda: told.names == every)
            assert told.lists[-1][1].config.url == "http://10.0.1.1:8000"


async def test_addresses_beside_service_records_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_UP_SECONDS", 60.0)
    async with DnsServer() as server:
        server.with_addresses = True
        server.zone["vllm.test", "SRV"] = [f"0 0 8000 e-{number}.test." for number in range(40)]
        for number in range(39):
            server.zone[f"e-{number}.test", "A"] = ["9.0.0.1", "10.0.0.1"]
            server.zone[f"e-{number}.test", "AAAA"] = ["1::1"]
        async with following(source(server, type="SRV", port=None, interval=3600)) as told:
            await told.until(lambda: told.lists)
            lowest = min("10.0.0.1", "9.0.0.1")  # as text
            assert {each.config.url for each in told.lists[0]} == {f"http://{lowest}:8000"}
            assert len(told.names) == 39
            assert "e-39.test:8000 has no address" in told.problems[0]
        assert {name for name, _ in server.asked} == {"vllm.test", "e-39.test"}


async def test_long_answers_are_read_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_UP_SECONDS", 60.0)
    found: list[str] = []
    async with DnsServer() as server:
        server.ttl = 3600
        server.zone["e.test", "A"] = ["10.0.0.1"]
        server.zone["vllm.test", "SRV"] = [f"{number} 0 8000 e.test." for number in range(2300)]
        guard = TurnGuard(found.append, own=False)
        told = Told()
        # The guard counts no task that a test's own function runs.
        task = asyncio.create_task(source(server, type="SRV", port=None, interval=3600).follow(told))
        await told.until(lambda: told.names == ["e.test:8000"])
        await asyncio.sleep(0.05)
        guard.stop()
        task.cancel()
    assert not found


async def test_an_address_of_one_kind_suffices() -> None:
    async with DnsServer() as server:
        server.zone["vllm.test", "SRV"] = ["0 0 8000 e-0.test."]
        server.zone["e-0.test", "AAAA"] = ["fd00::1"]
        server.failing.add(("e-0.test", "A"))
        async with following(source(server, type="SRV", port=None)) as told:
            await told.until(lambda: told.names == ["e-0.test:8000"])
            assert not told.problems


async def test_a_long_answer_comes_whole() -> None:
    async with DnsServer() as server:
        server.zone["vllm.test", "A"] = [f"10.0.{number}.1" for number in range(200)]
        async with following(source(server)) as told:
            await told.until(lambda: len(told.names) == 200)


async def test_a_shorter_time_to_live_is_heeded() -> None:
    async with DnsServer() as server:
        server.ttl = 0
        server.zone["vllm.test", "A"] = ["10.0.0.1"]
        async with following(source(server, interval=3600)) as told:
            await told.until(lambda: len(told.lists) > 2)


@pytest.mark.parametrize("how", ["fails", "silent", "unknown", "no records"])
async def test_a_failing_look_up_keeps_the_last_answer_for_the_grace(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    async with DnsServer() as server:
        server.zone["vllm.test", "A"] = ["10.0.0.1"]
        async with following(source(server, grace=60)) as told:
            await told.until(lambda: told.names == ["10.0.0.1:8000"])
            server.fails, server.silent = how == "fails", how == "silent"
            if how == "unknown":
                server.zone.clear()
            elif how == "no records":
                server.zone = {("vllm.test", "TXT"): ["x"]}
            await told.until(lambda: told.problems)
            assert told.names == ["10.0.0.1:8000"]
            expected = {
                "fails": "answered SERVFAIL",
                "silent": "no answer within 0.2 s",
                "unknown": "does not exist",
                "no records": "does not contain an answer",
            }
            assert expected[how] in told.problems[0]
            assert told.problems[0].startswith("A of vllm.test: ")
            now += 59
            failures = len(told.problems)
            await told.until(lambda: len(told.problems) > failures + 1)
            assert told.names == ["10.0.0.1:8000"]
            now += 2
            await told.until(lambda: told.lists[-1] == [])
            assert "A of vllm.test: no records for 60 s" in told.problems
            server.zone["vllm.test", "A"] = ["10.0.0.1"]
            server.fails = server.silent = False
            await told.until(lambda: told.names == ["10.0.0.1:8000"])


async def test_requests_reach_engines_by_their_address() -> None:
    first = FakeEngine(host="127.0.0.2")
    await first.start()
    second = FakeEngine(host="127.0.0.3", port=first.port)
    await second.start()
    async with DnsServer() as server:
        server.zone["vllm.test", "A"] = ["127.0.0.2"]
        dns = {"name": "vllm.test", "port": first.port, "interval": 0.05, "nameservers": [server.address]}
        async with world(0, discovery=[{"dns": dns}]) as it:
            assert (await it.post())[1]["x-lmetric-instance"] == f"127.0.0.2:{first.port}"
            server.zone["vllm.test", "A"] = ["127.0.0.3"]
            await it.until(lambda: [e.config.url for e in it.server.fleet.engines()] == [second.url])
            await it.until(it.server.fleet.ready)
            assert (await it.post())[1]["x-lmetric-instance"] == f"127.0.0.3:{first.port}"
    await first.stop()
    await second.stop()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{dns: {name: a}}", "need a port"),
        ("{dns: {name: a, type: SRV, port: 3}}", "need a port"),
        ("{dns: {name: a, port: 70000}}", "discovery[0].dns.port = 70000"),
        ("{dns: {name: a, prt: 1}}", "discovery[0].dns.prt = 1: unknown key; did you mean 'port'?"),
        ("{dns: {name: a, port: 1}, file: x}", "exactly one of file, dns and kubernetes"),
        ("{}", "exactly one of file, dns and kubernetes"),
        ("{kubernetes: {port: http}}", "set either inference_pool, or both selector and port"),
        ("{kubernetes: {selector: a, port: 0}}", "a port is a number from 1 to 65535"),
        ("{file: a}, {file: a}", "two discovery sources are equal: file:a"),
    ],
)
def test_what_is_wrong_with_a_source_is_told(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(f"discovery: [{text}]")
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:5353", "fd00::1", "[fd00::1]:53"])
def test_name_servers(text: str) -> None:
    server = module._nameserver(text)
    assert str(server) in ("Do53:10.0.0.1@53", "Do53:10.0.0.1@5353", "Do53:fd00::1@53")
