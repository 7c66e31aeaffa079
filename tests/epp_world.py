"""An endpoint picker, a gateway of the test that speaks its protocol, and real Envoys."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import orjson
import pytest
import yaml

from constants import configured
from lmetric.server import Server
from lmetric.server.epp.ext_proc_pb2 import (
    BodySendMode,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
)
from lmetric.server.epp.picker import SERVICE
from lmetric.server.epp.settings import for_gateway
from lmetric_lab.ports import free_ports
from server_world import FakeEngine, usage
from waiting import PATIENCE_SECONDS, until

EXAMPLE = Path(__file__).parent.parent / "examples" / "envoy"
PROMPT = {"model": "tiny", "prompt": "once upon a time"}
# The test's gateways set the fields with a tenant.
TRUSTED = {"trusted_proxies": ["127.0.0.1"]}
# An engine's whole answer.
WHOLE = orjson.dumps(
    {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}], "usage": usage(12, 7, 4)}
)
ENVOY_TYPES = "type.googleapis.com/envoy.extensions"
DESTINATION = "x-gateway-destination-endpoint"

_spec = importlib.util.spec_from_file_location("envoy_example", EXAMPLE / "run.py")
assert _spec is not None
assert _spec.loader is not None
example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(example)


def needs_envoy() -> None:
    """Skips the test without Envoy."""
    try:
        example.envoy_program()
    except example.StartError as error:
        pytest.skip(str(error))


class PickerWorld:
    """Engines and a picker."""

    def __init__(self, server: Server, engines: list[FakeEngine]) -> None:
        self.server = server
        self.engines = engines

    @property
    def places(self) -> list[str]:
        return [f"{engine.host}:{engine.port}" for engine in self.engines]

    @property
    def target(self) -> str:
        assert self.server.picker is not None
        return f"127.0.0.1:{self.server.picker.port}"

    def in_flight(self) -> int:
        return sum(model.router.in_flight() for model in self.server.fleet.models)

    def running(self) -> dict[str, int]:
        """The requests at each engine, as administrators see them."""
        return {engine.name: engine.running for engine in self.server.fleet.engines()}

    def stats(self) -> Mapping[str, Any]:
        return self.server.fleet.models[0].router.stats()

    async def settled(self) -> None:
        """Waits until no request is in flight."""
        relays, clients = self.server.front.relays, self.server.front.clients
        await until(
            lambda: not self.in_flight() and not relays and not clients.body_bytes,
            seen=lambda: f"{self.in_flight()} in flight, {relays}, {clients.body_bytes} bytes",
        )


@contextlib.asynccontextmanager
async def picking(fakes: int | Sequence[FakeEngine] = 1, /, **config: Any) -> AsyncIterator[PickerWorld]:
    """Starts a picker for ``fakes`` engines named e0, e1, …. At the end, none is in flight."""
    engines = [FakeEngine() for _ in range(fakes)] if isinstance(fakes, int) else list(fakes)
    for number, engine in enumerate(engines):
        engine.name = f"e{number}"
        await engine.start()
    roles = config.pop("roles", [None] * len(engines))
    values: dict[str, Any] = {
        "port": 0,
        "epp": {"port": 0, **config.pop("epp", {})},
        "engines": [
            {"url": engine.url, "name": engine.name, "role": role}
            for engine, role in zip(engines, roles, strict=True)
        ],
        "policy": "round_robin",
        "experimental": True,
        "load": {"interval": None},
        **config,
    }
    with configured(values) as settings:
        server = Server(for_gateway(settings), picks=True)
        await server.start()
        world = PickerWorld(server, engines)
        try:
            yield world
            await world.settled()
        finally:
            await server.stop()
            for engine in engines:
                await engine.stop()


def header_map(fields: Mapping[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=fields[key].encode()) for key in fields])


def request_head(
    path: str = "/v1/completions", method: str = "POST", ends: bool = False, **fields: str
) -> ProcessingRequest:
    """The first message of a gateway. ``fields``: header fields, with _ for -."""
    given = {name.replace("_", "-"): value for name, value in fields.items()}
    pseudo = {":method": method, ":path": path, ":authority": "gateway", ":scheme": "http"}
    return ProcessingRequest(
        request_headers=HttpHeaders(headers=header_map(pseudo | given), end_of_stream=ends)
    )


def answer_head(status: int = 200, ends: bool = False, **fields: str) -> ProcessingRequest:
    given = {name.replace("_", "-"): value for name, value in fields.items()}
    return ProcessingRequest(
        response_headers=HttpHeaders(headers=header_map({":status": str(status)} | given), end_of_stream=ends)
    )


def request_body(data: bytes, ends: bool) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=ends))


def answer_body(data: bytes, ends: bool) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=ends))


def request_trailers() -> ProcessingRequest:
    return ProcessingRequest(request_trailers=HttpTrailers())


def with_subset(message: ProcessingRequest, places: Sequence[str] | str) -> ProcessingRequest:
    value = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    value.update({f"{DESTINATION}-subset": places})
    return message


def with_modes(message: ProcessingRequest, request: str, answer: str) -> ProcessingRequest:
    message.protocol_config.request_body_mode = BodySendMode.Value(request)
    message.protocol_config.response_body_mode = BodySendMode.Value(answer)
    return message


class Exchange:
    """One request of a gateway."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *messages: ProcessingRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def next(self) -> ProcessingResponse:
        """The picker's next message."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.call.read()

    async def ask(
        self, body: Any = PROMPT, head: ProcessingRequest | None = None
    ) -> tuple[str, dict[str, str], bytes]:
        """Sends a whole request. Returns the picked engines, the changed fields, and the body."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        await self.send(head or request_head(), request_body(data, True))
        return await self.picked()

    async def picked(self) -> tuple[str, dict[str, str], bytes]:
        picked = await self.next()
        common = picked.request_headers.response
        assert common.clear_route_cache, picked
        fields = changed(common.header_mutation)
        metadata = picked.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
        assert metadata == fields[DESTINATION], "the protocol allows no two values"
        return metadata, fields, await self.body("request_body")

    async def body(self, name: str) -> bytes:
        parts = b""
        while True:
            message = await self.next()
            assert message.WhichOneof("response") == name, message
            part = getattr(message, name).response.body_mutation.streamed_response
            assert len(part.body) <= 62_000
            parts += part.body
            if part.end_of_stream:
                return parts

    async def refused(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, fields and error of the picker's own answer."""
        message = await self.next()
        assert message.WhichOneof("response") == "immediate_response", message
        answer = message.immediate_response
        return answer.status.code, changed(answer.headers), orjson.loads(answer.body)["error"]

    async def end(self) -> None:
        """Ends the stream as a gateway does after an answer."""
        await self.call.done_writing()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await self.call.read() is grpc.aio.EOF
            assert await self.call.code() is grpc.StatusCode.OK


async def answered(
    stream: Exchange, body: bytes = WHOLE, head: ProcessingRequest | None = None, **fields: str
) -> dict[str, str]:
    """Sends an engine's whole answer. Returns the fields that the picker adds to it."""
    head = head or answer_head(200, content_type="application/json", **fields)
    await stream.send(head, answer_body(body, True))
    got = await stream.next()
    assert await stream.body("response_body") == body
    await stream.end()
    return changed(got.response_headers.response.header_mutation)


def changed(mutation: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


def connect(target: str) -> grpc.aio.Channel:
    """A gateway's connection, which no other channel of this process shares."""
    return grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])


def begin(channel: grpc.aio.Channel) -> Exchange:
    """Begins a stream of a gateway."""
    process = channel.stream_stream(
        f"/{SERVICE}/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )
    return Exchange(process())


@contextlib.asynccontextmanager
async def exchange(target: str) -> AsyncIterator[Exchange]:
    """Opens a connection and a stream of a gateway."""
    async with connect(target) as channel:
        stream = begin(channel)
        try:
            yield stream
        finally:
            stream.call.cancel()


def engine_cluster(config: dict[str, Any]) -> dict[str, Any]:
    """The engines in a configuration of Envoy."""
    (found,) = (each for each in config["static_resources"]["clusters"] if each["name"] == "engines")
    return found


def manager(config: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager in a configuration of Envoy: routes and filters."""
    (listener,) = config["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def limit_to(places: list[str]) -> Callable[[dict[str, Any]], None]:
    """Envoy limits all requests to these engines."""

    def change(config: dict[str, Any]) -> None:
        limit = {
            "metadata_namespace": "envoy.lb.subset_hint",
            "value": {f"{DESTINATION}-subset": places},
        }
        typed = {"@type": f"{ENVOY_TYPES}.filters.http.set_metadata.v3.Config", "metadata": [limit]}
        name = "envoy.filters.http.set_metadata"
        manager(config)["http_filters"].insert(0, {"name": name, "typed_config": typed})

    return change


async def post(
    client: aiohttp.ClientSession, url: str, body: object = PROMPT
) -> tuple[int, bytes, dict[str, str]]:
    async with client.post(f"{url}/v1/completions", data=orjson.dumps(body)) as answer:
        return answer.status, await answer.read(), {k.lower(): v for k, v in answer.headers.items()}


@contextlib.asynccontextmanager
async def envoy(
    pickers: Iterable[str],
    engines: Iterable[str],
    *,
    fail_open: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> AsyncIterator[str]:
    """Starts Envoy with the example's configuration. Yields its URL.

    ``change``: changes the configuration.
    """
    ports = free_ports(2)
    config = yaml.safe_load(example.envoy_config(ports, pickers, engines, fail_open))
    if change is not None:
        change(config)
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(example.start_envoy, stack, yaml.safe_dump(config), ports[1])
        try:
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            await asyncio.to_thread(stack.pop_all().close)
