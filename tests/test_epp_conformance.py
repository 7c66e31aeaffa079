"""Checks of the Gateway API Inference Extension's conformance suite, with a real Envoy.

docs/how-to/other_routers.md maps the suite's tests to these. The suite itself needs a cluster.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from epp_world import (
    ENVOY_TYPES,
    PROMPT,
    engine_cluster,
    envoy,
    example,
    limit_to,
    manager,
    needs_envoy,
    picking,
    post,
)
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, says, token
from tls_world import Authority, needs_openssl
from waiting import PATIENCE_SECONDS, until

HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@pytest.fixture(autouse=True)
def _needs_envoy() -> None:
    needs_envoy()


async def test_weights_split_the_requests_of_two_pools() -> None:
    """GatewayWeightedAcrossTwoInferencePools: each pool has its picker; the subset names both."""
    async with picking(2) as one, picking(2) as two:

        def change(config: dict[str, Any]) -> None:
            limit_to([*one.places, *two.places])(config)
            clusters = config["static_resources"]["clusters"]
            for cluster in list(clusters):
                other = copy.deepcopy(cluster)
                other["name"] = other["load_assignment"]["cluster_name"] = f"{cluster['name']}-2"
                addresses = {"picker": [two.target], "engines": two.places}[cluster["name"]]
                (locality,) = other["load_assignment"]["endpoints"]
                locality["lb_endpoints"] = [endpoint(each) for each in addresses]
                clusters.append(other)
            grpc = {"envoy_grpc": {"cluster_name": "picker-2"}, "timeout": "0s"}
            own = {
                "@type": f"{ENVOY_TYPES}.filters.http.ext_proc.v3.ExtProcPerRoute",
                "overrides": {"grpc_service": grpc},
            }
            (host,) = manager(config)["route_config"]["virtual_hosts"]
            route = host["routes"][0]["route"]
            del route["cluster"]
            route["weighted_clusters"] = {
                "clusters": [
                    {"name": "engines", "weight": 70},
                    {
                        "name": "engines-2",
                        "weight": 30,
                        "typed_per_filter_config": {"envoy.filters.http.ext_proc": own},
                    },
                ]
            }

        async with (
            envoy([one.target], one.places, change=change) as url,
            aiohttp.ClientSession() as client,
        ):
            for _ in range(100):
                assert (await post(client, url))[0] == 200
            await one.settled()
            await two.settled()
        served = [sum(len(each.requests) for each in world.engines) for world in (one, two)]
        picked = [world.stats()["finished"] for world in (one, two)]
        assert served == picked, "the pool's picker picks, and its engine answers"
        assert sum(served) == 100
        assert 50 <= served[0] <= 90, "70 of 100; the chance of a larger difference is below 1e-4"


async def test_several_target_ports_are_engines_of_their_own() -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: an address allows all its ports."""
    hosts = ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]
    async with picking([FakeEngine(host=host) for host in hosts]) as world:
        places = world.places
        for allowed, expected in (
            (["127.0.0.2"], {"e2", "e3"}),
            (["127.0.0.1", places[3]], {"e0", "e1", "e3"}),
            ([places[0], places[1], "127.0.0.2"], {"e0", "e1", "e2", "e3"}),
        ):
            async with (
                envoy([world.target], places, change=limit_to(allowed)) as url,
                aiohttp.ClientSession() as client,
            ):
                names = [(await post(client, url))[2]["x-lmetric-instance"] for _ in range(8)]
            assert set(names) == expected


@pytest.mark.parametrize("h2c", [False, True])
async def test_engines_behind_h2c_and_http1(h2c: bool) -> None:
    """InferencePoolAppProtocol: a second listener of Envoy is an engine that accepts both."""
    backend = FakeEngine()
    await backend.start()
    (port,) = free_ports(1)
    place = f"127.0.0.1:{port}"

    def change(config: dict[str, Any]) -> None:
        resources = config["static_resources"]
        bridge = copy.deepcopy(resources["listeners"][0])
        bridge["address"]["socket_address"]["port_value"] = port
        inner = bridge["filter_chains"][0]["filters"][0]["typed_config"]
        inner["http_filters"] = inner["http_filters"][-1:]
        (host,) = inner["route_config"]["virtual_hosts"]
        host["routes"][0]["route"] = {"cluster": "backend"}
        seen = {"key": "x-seen-protocol", "value": "%PROTOCOL%"}
        host["request_headers_to_add"] = [{"header": seen}]
        resources["listeners"].append(bridge)
        assigned = {"cluster_name": "backend", "endpoints": [{"lb_endpoints": [endpoint(backend.url[7:])]}]}
        resources["clusters"].append({"name": "backend", "type": "STATIC", "load_assignment": assigned})
        if h2c:
            options = {
                "@type": f"type.googleapis.com/{HTTP_OPTIONS}",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
            engine_cluster(config)["typed_extension_protocol_options"] = {HTTP_OPTIONS: options}

    engines = [{"url": f"http://{place}", "name": "bridge"}]
    try:
        async with (
            picking(0, engines=engines, health={"interval": 0.05}) as world,
            envoy([world.target], [place], change=change) as url,
            aiohttp.ClientSession() as client,
        ):
            await answers(client, url, 200)  # the picker waits for its engine, which is Envoy
            backend.requests.clear()
            for stream in (False, True):
                status, _, fields = await post(client, url, {**PROMPT, "stream": stream})
                assert (status, fields["x-lmetric-instance"]) == (200, "bridge")
            await world.settled()
            assert world.stats()["finished"] == 3
        expected = "HTTP/2" if h2c else "HTTP/1.1"
        assert [each.headers["x-seen-protocol"] for each in backend.requests] == [expected] * 2
    finally:
        await backend.stop()


@needs_openssl
@pytest.mark.parametrize("client_certificate", [False, True])
async def test_envoy_reaches_its_picker_over_tls(client_certificate: bool, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue("picker").files
    own = authority.issue("gateway")
    if client_certificate:
        tls["client_ca_file"] = str(authority.file)

    def change(config: dict[str, Any]) -> None:
        trusted = {"trusted_ca": {"filename": str(authority.file)}}
        context: dict[str, Any] = {"alpn_protocols": ["h2"], "validation_context": trusted}
        if client_certificate:
            files = {"certificate_chain": own.certificate, "private_key": own.key}
            context["tls_certificates"] = [{name: {"filename": str(file)} for name, file in files.items()}]
        (picker,) = (each for each in config["static_resources"]["clusters"] if each["name"] == "picker")
        typed = {"@type": f"{ENVOY_TYPES}.transport_sockets.tls.v3.UpstreamTlsContext"}
        typed["common_tls_context"] = context  # type: ignore[assignment]
        picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": typed}

    async with (
        picking(2, epp={"tls": tls}) as world,
        envoy([world.target], world.places, change=change) as url,
        aiohttp.ClientSession() as client,
    ):
        status, _, fields = await post(client, url)
        assert (status, fields["x-lmetric-instance"]) == (200, "e0")
    async with (
        picking(2, epp={"tls": tls}) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        assert (await post(client, url))[0] == 500, "without TLS, Envoy reaches no picker"


async def test_metrics_count_the_requests_of_envoy() -> None:
    async with (
        picking(2, policy="least_requests", health={"interval": 30.0}) as world,
        envoy([world.target], world.places) as url,
        aiohttp.ClientSession() as client,
    ):
        await world.engines[0].stop()
        for _ in range(3):
            assert (await post(client, url))[0] == 200
        assert (await post(client, url, {**PROMPT, "model": "other"}))[0] == 404
        picker = world.server.picker
        assert picker is not None
        await until(lambda: not picker.shared.streams)
        async with client.get(f"http://127.0.0.1:{world.server.port}/metrics") as answer:
            page = await answer.text()
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("lmetric_epp_"))
        assert lines['lmetric_epp_requests_total{outcome="picked"}'] == "3.0"
        assert lines['lmetric_epp_requests_total{outcome="refused"}'] == "1.0"
        assert float(lines['lmetric_epp_requests_total{outcome="fallbacks"}']) <= 1, (
            "then e0 is known to be down"
        )
        assert lines["lmetric_epp_decision_seconds_count"] == "4.0"
        assert lines["lmetric_epp_streams"] == "0.0"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fail_open", [True, False])
async def test_a_picker_that_dies_ends_its_streams_and_later_requests_fail_open_or_closed(
    fail_open: bool,
) -> None:
    """EppUnAvailableFailOpen, and what becomes of answers on their way."""
    engine = FakeEngine(behave=says(STREAM, token("a"), then="hang"))
    await engine.start()
    pages, picker = free_ports(2)
    with ExitStack() as stack:
        start = lambda: example.start_router(stack, "epp", [engine.url], (pages, picker))  # noqa: E731
        process = await asyncio.to_thread(start)
        place = f"127.0.0.1:{engine.port}"
        async with (
            envoy([f"127.0.0.1:{picker}"], [place], fail_open=fail_open) as url,
            aiohttp.ClientSession() as client,
        ):
            body = orjson.dumps({**PROMPT, "stream": True})
            async with client.post(f"{url}/v1/completions", data=body) as answer:
                assert (await answer.content.readuntil(b"\n\n")) == token("a")
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.read()
            await until(lambda: engine.left == 1)
            engine.behave = says(STREAM, token("a", "stop"))
            # Until its health checks fail, Envoy sends bodies to the picker and answers 500.
            fields = await answers(client, url, 200 if fail_open else 500)
            assert "x-lmetric-instance" not in fields
            restarted = await asyncio.to_thread(start)
            assert restarted.pid != process.pid

            await answers(client, url, 200, picked=True)
    await engine.stop()


async def answers(
    client: aiohttp.ClientSession, url: str, expected: int, *, picked: bool = False
) -> dict[str, str]:
    """Sends requests until one gets this status, with ``picked`` from the picker's engine.

    Returns its header fields.
    """
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            status, _, fields = await post(client, url, {**PROMPT, "stream": True})
            assert status in (200, 500)
            if status == expected and picked <= ("x-lmetric-instance" in fields):
                return fields
            await asyncio.sleep(0.1)


def endpoint(place: str) -> dict[str, Any]:
    """An endpoint of a cluster."""
    host, _, port = place.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
