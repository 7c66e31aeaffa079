"""Several routers over sockets: each counts the load of the others while they send it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ConfigError, load_config
from lmetric.server.api.replica_pages import MOST_MESSAGE_BYTES, PATH
from lmetric_lab.ports import free_ports
from load_messages import Loads, message, number
from server_world import FakeEngine, World, decision_id, hang, world
from test_server_programs import SETTINGS, body, held, programs
from waiting import PATIENCE_SECONDS, until

TOLD = message()


@contextlib.asynccontextmanager
async def several(
    count: int, engines: list[FakeEngine], replicas: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[list[World]]:
    """Starts routers before the same engines, each with the addresses of all of them."""
    ports = free_ports(count)
    told = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02, **(replicas or {})}
    given = {"policy": "least_requests", "replicas": told, **config}
    async with contextlib.AsyncExitStack() as stack:
        routers = [await stack.enter_async_context(world(engines, **given, port=ports[0]))]
        named = [{"url": engine.url, "name": engine.name} for engine in engines]
        for port in ports[1:]:
            routers.append(await stack.enter_async_context(world([], **given, port=port, engines=named)))
        await until(lambda: all(len(each.server.front.replicas.received) == count - 1 for each in routers))
        yield routers


@contextlib.asynccontextmanager
async def two(
    engines: list[FakeEngine], replicas: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[tuple[World, World]]:
    """Starts two routers before the same engines."""
    async with several(2, engines, replicas, **config) as (a, b):
        yield a, b


def bs(seen: World) -> list[float]:
    """Returns the requests on each engine, as a router counts them."""
    return seen.server.fleet.models[0].router.indicators()["bs"].tolist()


async def test_the_next_request_goes_where_the_other_router_has_none() -> None:
    engines = [FakeEngine(behave=hang), FakeEngine(behave=hang)]
    async with two(engines) as (a, b):
        asking = []
        for turn in range(6):
            asking.append(asyncio.create_task((a, b)[turn % 2].post()))
            await until(lambda n=turn: [sum(bs(a)), sum(bs(b))] == [n + 1, n + 1])
            assert bs(a) == bs(b)
        # Alone, each router would have split its own three: two and one, by chance on the same
        # engine.
        assert bs(a) == [3, 3]
        assert [len(engine.requests) for engine in engines] == [3, 3]
        state = orjson.loads((await a.get("/debug/replicas"))[1])
        assert sorted((each["itself"], each["reached"]) for each in state["sent_to"]) == [
            (False, True),
            (True, None),
        ]
        (source,) = state["received_from"]
        assert source["router"] == b.server.front.replicas.id
        assert source["age_seconds"] < 5
        page = (await a.get("/metrics"))[1].decode()
        assert "lmetric_replicas 1.0" in page
        assert 'lmetric_replica_messages_total{direction="sent",outcome="accepted"}' in page
        for task in asking:
            task.cancel()
        await until(lambda: bs(a) == bs(b) == [0, 0])


async def test_four_routers_place_requests_as_one_does() -> None:
    engines = [FakeEngine(behave=hang) for _ in range(4)]
    async with several(4, engines) as routers:
        asking = []
        for turn in range(12):
            asking.append(asyncio.create_task(routers[turn % 4].post()))
            await until(lambda n=turn: all(sum(bs(each)) == n + 1 for each in routers))
        assert all(bs(each) == [3, 3, 3, 3] for each in routers)
        for task in asking:
            task.cancel()
        await until(lambda: all(bs(each) == [0, 0, 0, 0] for each in routers))


async def test_a_router_that_is_gone_counts_no_longer_and_back_again_it_does() -> None:
    engines = [FakeEngine(behave=hang)]
    async with two(engines, {"silent_after": 0.3}) as (a, b):
        asking = asyncio.create_task(b.post())
        await until(lambda: bs(a) == [1])
        await b.server.front.replicas.stop()  # its messages stop; its request continues
        await until(lambda: not a.server.front.replicas.received)
        assert bs(a) == [0]
        assert b.in_flight() == 1
        await b.server.front.replicas.start()
        await until(lambda: bs(a) == [1])
        asking.cancel()
        await until(lambda: bs(a) == [0])


async def working_set(seen: World) -> dict[str, float]:
    """Returns the working set of the only engine, as a router counts it."""
    (told,) = orjson.loads((await seen.get("/debug/programs"))[1]).values()
    engine: dict[str, float] = told["instances"].get("e0", {})
    return engine


async def test_a_program_is_held_while_another_routers_program_fills_the_cache() -> None:
    settings = {**SETTINGS, "forget_seconds": 2}
    async with two([FakeEngine()], programs=settings, cache_blocks=100) as (a, b):
        assert (await a.post(body(1)))[0] == 200
        await until_true(lambda: working_set(b), lambda told: told.get("peer_tokens", 0) > 500)
        waiting = asyncio.create_task(b.post(body(2)))
        await held(b, 1)
        assert (await programs(a))["states"]["held"] == 0
        told = await working_set(b)
        assert told["expected_tokens"] == pytest.approx(told["other_tokens"] + told["peer_tokens"])
        async with asyncio.timeout(PATIENCE_SECONDS):
            status, headers, _ = await waiting  # a forgets its program
        assert status == 200
        record = b.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert record["held_seconds"] > 0.3
        # Now b's program counts at a.
        await until_true(lambda: working_set(a), lambda told: told["peer_tokens"] > 500)
        assert (await programs(a))["states"]["held"] == 0


async def test_programs_of_a_router_that_is_gone_hold_nobody() -> None:
    settings = {**SETTINGS, "forget_seconds": 600}
    async with two([FakeEngine()], {"silent_after": 0.5}, programs=settings, cache_blocks=100) as (a, b):
        assert (await a.post(body(1)))[0] == 200
        await until_true(lambda: working_set(b), lambda told: told.get("peer_tokens", 0) > 500)
        waiting = asyncio.create_task(b.post(body(2)))
        await held(b, 1)
        await a.server.front.replicas.stop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await waiting)[0] == 200
        assert (await working_set(b))["peer_tokens"] == 0


async def test_a_program_goes_on_at_any_router_and_counts_once() -> None:
    settings = {**SETTINGS, "forget_seconds": 600}
    async with several(4, [FakeEngine()], programs=settings, cache_blocks=1000) as routers:
        for turn, router in enumerate(routers):
            tokens = 1200 + 400 * turn
            status, headers, _ = await router.post(body(1, tokens))
            assert status == 200
            record = router.server.fleet.models[0].router.explain(decision_id(headers))
            assert record is not None
            assert record["program_tokens"] == tokens
            least = 0.85 * tokens  # in its gap, a program counts with the probability that it returns
            for other in routers:
                await until_true(
                    lambda seen=other: working_set(seen),
                    lambda told, least=least: told.get("expected_tokens", 0) > least,
                )
        await until_true(lambda: programs(routers[3]), lambda told: told["states"]["gap"] == 1)
        told = [await programs(router) for router in routers]
        assert [each["continuations"] for each in told] == [0, 1, 1, 1]
        assert [each["states"]["gap"] for each in told] == [0, 0, 0, 1]
        assert sum(each["forks"] + each["new_programs"] for each in told) == 1
        for router in routers:
            assert (await working_set(router))["expected_tokens"] < 2450


async def until_true(look: Callable[[], Awaitable[Any]], true: Callable[[Any], bool]) -> None:
    """Waits until what a router shows is so."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true(await look()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_one_that_stops_is_not_reached_and_requests_go_on() -> None:
    engines = [FakeEngine()]
    ports = free_ports(2)
    replicas = {"urls": [f"http://127.0.0.1:{port}" for port in ports], "interval": 0.02, "silent_after": 0.3}
    async with world(engines, replicas=replicas, port=ports[0]) as a:
        named = [{"url": engines[0].url, "name": "e0"}]
        async with world([], replicas=replicas, port=ports[1], engines=named) as b:
            await until(lambda: a.server.front.replicas.received and b.server.front.replicas.received)
        await until(lambda: not a.server.front.replicas.received)
        state = a.server.front.replicas.state()
        (other,) = [each for each in state["sent_to"] if not each["itself"]]
        assert (other["reached"], other["error"]) == (False, "no connection: Connection refused")
        (problem,) = a.server.fleet.own_problems()
        assert (problem.what, problem.engines) == ("replica", [])
        assert problem.reason.startswith(other["address"])
        warning = orjson.loads((await a.get("/ready"))[1])["warnings"][-1]
        assert (warning["what"], warning["cause"]) == ("replica", "another router cannot be reached")
        shown = orjson.loads((await a.get("/debug/live"))[1])["problems"][0]
        assert (shown["level"], shown["what"]) == ("warn", "another router cannot be reached")
        assert shown["since"] == pytest.approx(time.time(), abs=60)
        status, _, _ = await a.post()
        assert status == 200


async def test_with_a_token_only_routers_are_heard(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-client: someone\n")
    auth = {"keys_file": str(keys)}
    told = {"urls": ["http://127.0.0.1:1"]}
    with pytest.raises(ConfigError, match="a router's URL looks like http://host:port"):
        load_config(None, {"replicas.urls": ["routers:8080"]}, environ={})
    with pytest.raises(ConfigError, match=r"replicas\.token is needed because clients have API keys"):
        load_config(None, {"replicas.urls": told["urls"], "auth.keys_file": str(keys)}, environ={})
    async with two([FakeEngine()], {"token": "among-us"}, auth=auth) as (a, b):
        assert (a.server.front.replicas.received, b.server.front.replicas.received) != ({}, {})
        for headers in ({}, {"authorization": "Bearer sk-client"}, {"authorization": "among-us"}):
            status, _, answer = await a.post(TOLD, PATH, headers)
            assert (status, answer["error"]["message"]) == (
                401,
                "wrong replica token; set the same replicas.token on all routers",
            )
        assert list(a.server.front.replicas.received) == [b.server.front.replicas.id]


GOOD = {0: 1.0}


@pytest.mark.parametrize(
    ("told", "status", "part"),
    [
        (b"", 400, "not a load message"),
        (b'{"router": "ab", "models": {}}', 400, 'not a load message: it does not begin with "lmload"'),
        (message(form=1), 409, "load message of format 1; this router reads format 4; run the same version"),
        (TOLD[:-1], 400, "it ends in the number of bytes of budgets"),
        (TOLD + b"x", 400, "1 bytes after its end"),
        (message(sender="x"), 400, 'sender "x"; expected 1 to 64 hexadecimal digits'),
        (message(sender="a" * 65), 400, "65 bytes of the sender; expected at most 64"),
        (message(version=3, base=4), 400, "version 3 changes a later version"),
        (TOLD[:-2] + number(65_536), 400, "65536 models; expected at most 1024"),
        (TOLD[:-2] + b"\x01\x04tiny" + number(65_537), 400, "65537 instances; expected at most 65536"),
        (message({"tiny": {"e" * 201: GOOD}}), 400, "201 bytes of an instance; expected at most 200"),
        (message({"tiny": {"e0": {16: 1.0}}}), 400, "expected at most 16 bits"),
        (message({"tiny": {"e0": {0: -1.0}}}), 400, "coming on e0 in the load of router ab: -1"),
        (message({"tiny": {"e0": {3: float("nan")}}}), 400, "decoding on e0 in the load of router ab"),
        (message({"tiny": {}}, programs=b"\xff" * 51), 400, "NaN of prefill or pauses; expected 0 to"),
        (
            message({"tiny": {}}, programs=bytes(49) + number(4097)),
            400,
            "4097 programs; expected at most 4096",
        ),
        # A mistake anywhere, even on a model that is not served here, refuses all of it.
        (message({"tiny": {"e0": GOOD}, "other": {"e0": {0: 1e16}}}), 400, "coming on e0"),
        ({f"u{each}": GOOD for each in range(16_385)}, 400, "at most 16384"),
    ],
)
async def test_what_no_router_says_is_refused_and_changes_nothing(
    told: bytes | Loads, status: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Encoded here, and not by each process that collects tests: it takes a quarter of a second.
    content = told if isinstance(told, bytes) else message({"tiny": told})
    async with world(1, replicas={"urls": ["http://127.0.0.1:1"]}) as a:
        got, _, answer = await a.post(content, PATH)
        assert got == status
        assert part in answer["error"]["message"]
        assert answer["error"]["code"] == ("other_version" if status == 409 else None)
        assert (a.server.front.replicas.received, bs(a)) == ({}, [0])
    assert "Traceback" not in capsys.readouterr().err


async def test_a_message_of_an_impossible_size_is_not_read() -> None:
    async with world(1, replicas={"urls": ["http://127.0.0.1:1"]}) as a:
        status, _, answer = await a.post(TOLD + bytes(MOST_MESSAGE_BYTES), PATH)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")


async def test_engines_and_models_that_are_not_known_here_are_passed_over() -> None:
    load = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}  # coming, queued, scheduled, decoding
    models = {"tiny": {"e0": load, "elsewhere": load}, "other": {"e0": load}}
    async with world(1, replicas={"urls": ["http://127.0.0.1:1"], "silent_after": 0.2}) as a:
        ours = a.server.front.replicas.id
        assert (await a.post(message(models, version=7), PATH))[::2] == (
            200,
            {"router": ours, "version": 7, "keys": 0},
        )
        assert bs(a) == [4.0]
        # Changes of the last version, and the same changes again.
        less = message({"tiny": {"e0": {0: 1.0}}}, version=9, base=7)
        assert (await a.post(less, PATH))[::2] == (200, {"router": ours, "version": 9, "keys": 0})
        assert bs(a) == [1.0]
        assert (await a.post(less, PATH))[::2] == (200, {"router": ours, "version": None, "keys": 0})
        assert bs(a) == [1.0]
        await until(lambda: bs(a) == [0.0])


async def test_an_answer_of_another_router_is_short_plain_and_from_its_address() -> None:
    """Security F13: 4 KiB of it are read at most, not unpacked, and no redirect is followed."""
    sent: list[int] = []
    got: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                got.append(head + await reader.readexactly(length))
                writer.write(answers[0][0])
                for part in range(answers[0][1]):
                    writer.write(bytes(65536))
                    await writer.drain()
                    sent.append(part)
                if answers[0][1] < 0:
                    break
        writer.close()

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(b"redirected" + await reader.read(100))
        writer.close()

    other = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    place = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    zipped = gzip.compress(b'{"router":"ab","version":1}')
    head = b"HTTP/1.1 200 OK\r\n"
    answers = [(b"", 0)]
    peer = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = peer.sockets[0].getsockname()[1]
    told = {"urls": [f"http://127.0.0.1:{port}"], "interval": 0.02, "silent_after": 5}
    for each, reason in [
        ((head + b"content-length: 1000000000\r\n\r\n", 10_000), "more than 4096 bytes"),
        ((head + b"transfer-encoding: chunked\r\n\r\n3fffffff\r\n", 10_000), "more than 4096 bytes"),
        (
            (head + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s" % (len(zipped), zipped), 0),
            "the answer is not a router's",
        ),
        ((head + b"content-length: 2\r\n\r\n{}", 0), "the answer is not a router's"),
        ((head + b"content-length: 100\r\n\r\n{", -1), "the connection broke before the end of the answer"),
        ((b"SSH-2.0-OpenSSH\r\n", 0), "the answer is not valid HTTP"),
        (
            (
                b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://%s/\r\ncontent-length: 0\r\n\r\n"
                % place.encode(),
                0,
            ),
            "status 307",
        ),
    ]:
        answers[0] = each
        sent.clear()
        got.clear()
        async with world(1, replicas=told) as a:
            (address,) = a.server.front.replicas.addresses.values()
            await until(lambda address=address: address.error is not None)
            error = address.error
            assert error is not None
            assert reason in error
        # Bytes that the kernel and the sender buffer, and no more.
        assert max(sent, default=0) < 200
        assert not any(message.startswith(b"redirected") for message in got)
    peer.close()
    other.close()


async def test_a_message_has_only_what_changed_and_a_lost_one_costs_a_full_one() -> None:
    """Defect 24 of the core review."""
    engines = [FakeEngine(behave=hang), FakeEngine(behave=hang)]
    async with two(engines, {"silent_after": 60}) as (a, b):
        ours = a.server.front.replicas
        asking = [asyncio.create_task(a.post()) for _ in range(4)]
        await until(lambda: bs(b) == [2, 2])
        (address,) = [each for each in ours.addresses.values() if each.reached]
        full_at = address.full_at
        await until(lambda: address.version is not None and address.version > 20)
        assert address.full_at == full_at
        # The other router has lost the load: the next message is full.
        assert (await b.post(message(sender=ours.id, version=1 << 40), PATH))[0] == 200
        asking.append(asyncio.create_task(a.post()))
        await until(lambda: sum(bs(b)) == 5)
        assert address.full_at > full_at
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: bs(b) == [0, 0])


async def test_no_more_routers_than_are_listened_to() -> None:
    async with world(1, replicas={"urls": ["http://127.0.0.1:1"], "silent_after": 60}) as a:
        for sender in range(65):
            status, _, answer = await a.post(message(sender=f"{sender:x}"), PATH)
            assert status == (200 if sender < 64 else 409)
        assert answer["error"]["message"] == "this router already receives load from 64 routers, the limit"


async def test_alone_it_neither_tells_nor_hears() -> None:
    async with world(1) as a:
        status, _, answer = await a.post(TOLD, PATH)
        assert (status, answer["error"]["code"]) == (404, "unknown_path")
        state = orjson.loads((await a.get("/debug/replicas"))[1])
        assert (state["sent_to"], state["received_from"]) == ([], [])


async def test_a_name_without_addresses_is_told_of_and_looked_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lmetric.server.background.replicas.RESOLVE_SECONDS", 0.05)
    async with world(
        1, replicas={"urls": ["http://routers.invalid:8080"], "interval": 0.02, "token": "t"}
    ) as a:
        replicas = a.server.front.replicas
        assert list(replicas.state()["not_looked_up"]) == ["http://routers.invalid:8080"]
        replicas.config.urls[0] = f"http://localhost:{a.server.port}"  # the name resolves now
        (problem,) = a.server.fleet.own_problems()
        assert problem.reason.startswith("http://routers.invalid:8080: DNS: ")
        assert "Errno" not in problem.reason
        await until(lambda: any(address.own for address in replicas.addresses.values()))
        assert not [*a.server.fleet.own_problems()]
