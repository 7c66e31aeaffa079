"""A real Envoy asks the endpoint picker, with the configuration of `examples/envoy`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest
import yaml

from epp_world import (
    ENVOY_TYPES,
    EXAMPLE,
    PROMPT,
    TRUSTED,
    envoy,
    limit_to,
    manager,
    needs_envoy,
    picking,
    post,
)
from issuer_world import AUDIENCE, ISSUER, Issuer, Key, bearer
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, hang, plain, reset
from waiting import PATIENCE_SECONDS, until


@pytest.fixture(autouse=True)
def _needs_envoy() -> None:
    needs_envoy()


async def test_envoy_follows_the_picks_and_the_picker_follows_the_answers() -> None:
    async with (
        picking(3) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        for number in range(6):
            stream = bool(number % 2)
            status, body, fields = await post(client, url, {**PROMPT, "stream": stream})
            assert status == 200
            assert fields["x-lmetric-instance"] == f"e{number % 3}", "round robin"
            assert (b"data: [DONE]" in body) == stream
            served = world.engines[number % 3].requests[-1]
            assert served.json == {**PROMPT, "stream": stream}
            assert served.headers["x-request-id"] == fields["x-request-id"]
        await world.settled()
        assert (world.stats()["finished"], world.stats()["output_tokens"]) == (6, 9)
        big = {**PROMPT, "prompt": "word " * 100_000}
        assert (await post(client, url, big))[0] == 200
        assert world.engines[0].requests[-1].json == big
        assert (await post(client, url, {**PROMPT, "model": "other"}))[0] == 404


async def test_an_engine_that_envoy_does_not_know_yet_is_not_blamed() -> None:
    """Envoy's `fallback_policy` then takes another engine than the picked one."""
    async with (
        picking(3) as world,
        envoy([world.target], world.places[:1]) as url,
        aiohttp.ClientSession() as client,
    ):
        for _ in range(6):
            status, _, fields = await post(client, url)
            assert (status, fields["x-lmetric-instance"]) == (200, "e0")
        await world.settled()
        assert all(each.healthy for each in world.server.fleet.engines())
        assert world.stats()["finished"] == 6
        assert world.server.picker is not None
        counts = world.server.picker.shared.counts
        assert (counts["not_followed"], counts["fallbacks"]) == (4, 0)


async def test_trailers_behind_a_buffered_request() -> None:
    def buffer(config: dict[str, Any]) -> None:
        (filter_, _) = manager(config)["http_filters"]
        filter_["typed_config"]["processing_mode"]["request_body_mode"] = "BUFFERED"
        manager(config)["http_protocol_options"] = {"enable_trailers": True}

    async with picking() as world, envoy([world.target], world.places, change=buffer) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = orjson.dumps(PROMPT)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n"
            b"trailer: x-end\r\n\r\n%x\r\n%b\r\n0\r\nx-end: 1\r\n\r\n" % (len(body), body)
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await world.settled()
        assert world.stats()["finished"] == 1


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with (
        picking([FakeEngine(behave=hang)]) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        task = asyncio.create_task(post(client, url))
        await world.engines[0].asked(1)
        assert world.in_flight() == 1
        task.cancel()
        await world.settled()
        await until(lambda: world.engines[0].left == 1)


async def test_an_engine_that_breaks_ends_its_request() -> None:
    async with (
        picking([FakeEngine(behave=reset)]) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        assert (await post(client, url))[0] == 503
        await world.settled()
        assert world.stats()["finished"] == 0


async def test_envoy_tries_the_second_engine_and_it_gets_the_counts() -> None:
    async with (
        picking(2, health={"interval": 30.0}) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        await world.engines[0].stop()
        status, _, fields = await post(client, url)
        assert (status, fields["x-lmetric-instance"]) == (200, "e1")
        assert len(world.engines[1].requests) == 1
        await world.settled()
        assert (world.stats()["finished"], world.stats()["retries"]) == (1, 1)
        assert not world.server.fleet.models[0].engines["e0"].healthy, "the gateway's report is enough"


async def test_subsets_come_from_envoy() -> None:
    async with (
        picking(3) as world,
        envoy([world.target], world.places, change=limit_to([world.places[2]])) as url,
        aiohttp.ClientSession() as client,
    ):
        for _ in range(3):
            assert (await post(client, url))[2]["x-lmetric-instance"] == "e2"


IDENTITY = EXAMPLE.parent.parent / "docs" / "how-to" / "identity.md"


def checking_tokens(issuer: Issuer) -> Callable[[dict[str, Any]], None]:
    """Envoy checks tokens and names the tenant, with the filter in docs/how-to/identity.md."""
    (shown,) = re.findall(r"```text\n(- name: .*?)```", IDENTITY.read_text(), re.DOTALL)
    provider = {
        "issuer": ISSUER,
        "audiences": [AUDIENCE],
        "payload_in_metadata": "payload",
        "local_jwks": {"inline_string": issuer.key_set().decode()},
    }
    rule = {"match": {"prefix": "/"}, "requires": {"provider_name": "issuer"}}
    typed = {
        "@type": f"{ENVOY_TYPES}.filters.http.jwt_authn.v3.JwtAuthentication",
        "providers": {"issuer": provider},
        "rules": [rule],
    }
    check = {"name": "envoy.filters.http.jwt_authn", "typed_config": typed}

    def change(config: dict[str, Any]) -> None:
        manager(config)["http_filters"][:0] = [check, *yaml.safe_load(shown)]

    return change


async def test_envoy_checks_tokens_and_the_picker_takes_the_tenant_from_it_alone() -> None:
    issuer = Issuer()
    issuer.key = Key("rsa", "RS256")
    issuer.published = [issuer.key]
    tenants: dict[str, Any] = {"red": {}, "blue": {}}
    chosen = dict.fromkeys(
        ("x-tenant", "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"), "blue"
    )
    headers = bearer(issuer.token(team="red")) | chosen
    for forwarded, tenant in ((TRUSTED, "red"), ({}, "")):
        async with (
            picking(tenants=tenants, forwarded=forwarded) as world,
            envoy([world.target], world.places, change=checking_tokens(issuer)) as url,
            aiohttp.ClientSession(headers=headers) as client,
        ):
            assert (await post(client, url))[0] == 200
            await world.settled()
            assert world.server.front.metrics.requests.requests == {("tiny", tenant, 200): 1}
            async with client.post(url, headers=bearer(issuer.token(aud="x"))) as refused:
                assert refused.status == 403, "Envoy's own answer"


async def test_the_picker_checks_tokens_itself() -> None:
    async with (
        Issuer().serving() as issuer,
        picking(auth={"jwt": [issuer.settings()]}, tenants={"blue": {}}) as world,
        envoy([world.target], world.places) as url,
    ):
        for token, status in ((issuer.token(), 200), (issuer.token(aud="x"), 401), (issuer.token(), 200)):
            headers = bearer(token) | {"x-tenant": "blue"}
            async with aiohttp.ClientSession(headers=headers) as client:
                assert (await post(client, url))[0] == status
        await world.settled()
        counts = world.server.front.metrics.requests.requests
        assert (counts["tiny", "red", 200], counts["tiny", "blue", 200]) == (2, 0)
        assert all("authorization" not in each.headers for each in world.engines[0].requests)


@pytest.mark.parametrize("fail_open", [True, False])
async def test_without_a_picker_envoy_fails_open_or_closed(fail_open: bool) -> None:
    async with picking(2) as world:
        (nobody,) = free_ports(1)
        async with (
            envoy([f"127.0.0.1:{nobody}"], world.places, fail_open=fail_open) as url,
            aiohttp.ClientSession() as client,
        ):
            status, _, fields = await post(client, url)
            assert status == (200 if fail_open else 500)
            assert "x-lmetric-instance" not in fields


async def test_errors_of_engines_reach_the_client() -> None:
    async def refuses(_: object, __: object, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(400, {"error": {"message": "too long"}}))
        return True

    async with (
        picking([FakeEngine(behave=refuses)]) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        status, body, _ = await post(client, url)
        assert (status, orjson.loads(body)["error"]["message"]) == (400, "too long")


async def test_several_pickers_behind_one_envoy_share_their_load() -> None:
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    share = {"replicas": {"urls": urls, "interval": 0.02}, "policy": "least_requests"}
    engines = [FakeEngine(behave=hang) for _ in range(4)]
    async with picking(engines, port=ports[0], **share) as one:
        own = [FakeEngine(port=engine.port) for engine in engines]
        for engine in own:  # the same engines: only the first world starts and stops them
            engine.start = engine.stop = nothing  # type: ignore[method-assign]
        async with (
            picking(own, port=ports[1], **share) as two,
            envoy([one.target, two.target], one.places) as url,
            aiohttp.ClientSession() as client,
        ):
            await until(lambda: all(w.server.front.replicas.received for w in (one, two)))
            tasks = []
            for _ in range(4):
                tasks.append(asyncio.create_task(post(client, url)))
                await until(lambda: sum(len(each.requests) for each in engines) == len(tasks))
                await asyncio.sleep(0.1)  # several messages
            assert [len(each.requests) for each in engines] == [1, 1, 1, 1]
            assert min(one.in_flight(), two.in_flight()) >= 1, "both pick"
            for task in tasks:
                task.cancel()
            await two.settled()
            await one.settled()


async def nothing() -> None:
    pass


async def test_the_example_runs_with_one_command() -> None:
    words = [sys.executable, str(EXAMPLE / "run.py"), "--once", "--ports", *map(str, free_ports(4))]
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "x-lmetric-instance: " in done.stdout
