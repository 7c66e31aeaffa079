"""Peers of discovery sources: a sink, a DNS server and a Kubernetes API server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import orjson
from aiohttp import web

from lmetric.config import DiscoverySource
from lmetric.server import Server
from lmetric.server.discovery.members import Found
from lmetric.server.discovery.source import Source, SourceError
from waiting import until


class Told:
    """A sink that stores its reports."""

    def __init__(self) -> None:
        self.lists: list[list[Found]] = []
        self.problems: list[str] = []

    def found(self, engines: Sequence[Found], problem: str | None = None) -> None:
        self.lists.append(list(engines))
        if problem is not None:
            self.problems.append(problem)

    def problem(self, reason: str) -> None:
        self.problems.append(reason)

    @property
    def names(self) -> list[str]:
        return sorted(each.config.label for each in self.lists[-1]) if self.lists else []

    async def until(self, true: Callable[[], object]) -> None:
        await until(true, seen=lambda: (self.names, self.problems))


@contextlib.asynccontextmanager
async def following(source: Source) -> AsyncIterator[Told]:
    """Follows a source, and restarts it if it ends."""
    told = Told()

    async def forever() -> None:
        while True:
            try:
                await source.follow(told)
            except SourceError as error:
                told.problem(str(error))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(forever())
    try:
        yield told
    finally:
        assert not task.done(), "following ended with an error nobody foresaw"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def keys(server: Server) -> dict[str, str | None]:
    """The API keys of a router's engines, by name."""
    found = {engine.name: engine.config.api_key for engine in server.fleet.engines()}
    return {name: None if key is None else key.get_secret_value() for name, key in found.items()}


async def reload_key(server: Server, section: dict[str, Any], key: str | None) -> list[str]:
    """Reloads a router with another API key of its section. Returns the engines that changed."""
    changed = DiscoverySource.model_validate({**section, "api_key": key})
    report = await server.apply(server.prepare(server.config.model_copy(update={"discovery": [changed]})))
    engines: list[str] = report["engine_keys_changed"]
    return engines


class DnsServer(asyncio.DatagramProtocol):
    """A DNS server for the records in ``zone``, by (name, type); other names do not exist.

    It answers over UDP, and over TCP for more than 512 bytes.
    """

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str]] = {}
        self.ttl = 1
        self.fails = False
        self.failing: set[tuple[str, str]] = set()  # answers SERVFAIL for these (name, type)
        self.silent = False
        self.with_addresses = False  # answers for SRV records have the addresses of their targets
        self.asked: list[tuple[str, str]] = []  # (name, type)
        self.address = ""

    async def __aenter__(self) -> DnsServer:
        loop = asyncio.get_running_loop()
        self._streams = await asyncio.start_server(self._stream, "127.0.0.1", 0)
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, self._streams.sockets[0].getsockname()
        )
        self.address = "{}:{}".format(*self._transport.get_extra_info("sockname"))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()
        self._streams.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        pass

    def datagram_received(self, data: bytes, address: Any) -> None:
        if self.silent:
            return
        answer = self._answer(data)
        wire = answer.to_wire()
        if len(wire) > 512:
            answer.answer.clear()
            answer.additional.clear()
            answer.flags |= dns.flags.TC
            wire = answer.to_wire()
        self._transport.sendto(wire, address)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = self._answer(await reader.readexactly(int.from_bytes(await reader.readexactly(2)))).to_wire()
        writer.write(len(wire).to_bytes(2) + wire)
        await writer.drain()
        writer.close()

    def _answer(self, data: bytes) -> dns.message.Message:
        query = dns.message.from_wire(data)
        question = query.question[0]
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name = question.name.to_text(omit_final_dot=True)
        asked = name, dns.rdatatype.to_text(question.rdtype)
        self.asked.append(asked)
        records = self.zone.get(asked)
        if self.with_addresses and asked[1] == "SRV":
            for (target, kind), addresses in self.zone.items():
                if kind != "SRV":
                    rrset = dns.rrset.from_text(f"{target}.", self.ttl, "IN", kind, *addresses)
                    answer.additional.append(rrset)
        if self.fails or asked in self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif records:
            answer.answer.append(
                dns.rrset.from_text(
                    question.name, self.ttl, "IN", dns.rdatatype.to_text(question.rdtype), *records
                )
            )
        elif not any(known == name for known, _ in self.zone):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer


def pod(name: str, url: str = "http://127.0.0.1:1", **changes: Any) -> dict[str, Any]:
    """A running, ready pod.

    The port of its engine is named http.

    ``changes``: ready, phase, labels, annotations.
    """
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return {
        "metadata": {
            "name": name,
            "namespace": "fleet",
            "labels": {"app": "vllm", **changes.get("labels", {})},
            "annotations": changes.get("annotations"),
        },
        "spec": {
            "containers": [
                {"name": "side"},
                {"ports": [{"containerPort": 9}, {"name": "http", "containerPort": int(port)}]},
            ]
        },
        "status": {
            "phase": changes.get("phase", "Running"),
            "podIP": host.strip("[]"),
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "Ready", "status": "True" if changes.get("ready", True) else "False"},
            ],
        },
    }  # fmt: skip


class ApiServer:
    """The part of the Kubernetes API that lists and watches the pods of one namespace.

    Changes get ascending resource versions. ``forget()`` drops their history, as a real server does
    after a time.
    """

    def __init__(self, token: str = "t0ken", tls: ssl.SSLContext | None = None) -> None:
        self.token = token
        self.allowed = True
        self.gone_by_status = False  # report a version that is too old by status, or by an event
        self.lists = 0
        self.page_pods: list[int] = []  # pods of each answer with a part of a list
        self.watches = 0
        self.selectors: set[str] = set()
        self.port = 0
        self.custom: dict[str, Any] = {}  # other objects and lists, by path
        self.forbidden: set[str] = set()  # other paths
        self.failing: set[str] = set()  # other paths
        self._tls = tls
        self._pods: dict[str, dict[str, Any]] = {}
        self._versions = itertools.count(1000)
        self._version = next(self._versions)
        self._oldest = self._version
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._generation = 0

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def kubeconfig(self, token: str | None = None) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "fleet"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token or self.token}}],
        }

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/fleet/pods", self._answer)
        app.router.add_get("/apis/{rest:.*}", self._custom)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.hang_up()
        await self._runner.cleanup()

    async def __aenter__(self) -> ApiServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def put(self, *pods: dict[str, Any]) -> None:
        """Creates or changes pods."""
        for each in pods:
            name = each["metadata"]["name"]
            self._happens("MODIFIED" if name in self._pods else "ADDED", each)
            self._pods[name] = each

    def delete(self, name: str) -> None:
        self._happens("DELETED", self._pods.pop(name))

    def bookmark(self) -> None:
        self._happens("BOOKMARK", {"metadata": {}})

    def forget(self) -> None:
        """Drops the history: versions up to now are too old for a watch."""
        self._version = self._oldest = next(self._versions)
        self._history.clear()

    def hang_up(self) -> None:
        """Ends all watches, as a server does at their time limit."""
        self._generation += 1
        self._changed.set()

    def _happens(self, kind: str, thing: dict[str, Any]) -> None:
        self._version = next(self._versions)
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._history.append((self._version, {"type": kind, "object": orjson.loads(orjson.dumps(thing))}))
        self._changed.set()

    async def _custom(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if request.path in self.forbidden:
            return _status(403, f"cannot list {request.path}")
        if request.path in self.failing:
            return _status(500, "etcdserver: request timed out")
        if request.path not in self.custom:
            return _status(404, "the server could not find the requested resource")
        return web.json_response(self.custom[request.path])

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if not self.allowed:
            return _status(403, 'pods is forbidden: User "router" cannot list resource "pods"')
        self.selectors.add(request.query.get("labelSelector", ""))
        if request.query.get("watch") not in ("true", "True"):
            begin = int(request.query.get("continue", 0))
            self.lists += not begin
            pods = list(self._pods.values())
            end = begin + int(request.query.get("limit", len(pods)))
            metadata = {"resourceVersion": str(self._version)}
            if end < len(pods):
                metadata |= {"continue": str(end), "remainingItemCount": len(pods) - end}
            self.page_pods.append(len(pods[begin:end]))
            return web.json_response({"metadata": metadata, "items": pods[begin:end]})
        self.watches += 1
        since = int(request.query["resourceVersion"])
        too_old = since < self._oldest
        if too_old and self.gone_by_status:
            return _status(410, "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if too_old:
            gone = {"code": 410, "reason": "Expired", "message": f"too old resource version: {since}"}
            await _line(response, {"type": "ERROR", "object": gone})
            return response
        generation = self._generation
        while generation == self._generation:
            self._changed.clear()
            for version, event in [each for each in self._history if each[0] > since]:
                await _line(response, event)
                since = version
            await self._changed.wait()
        return response


async def _line(response: web.StreamResponse, event: dict[str, Any]) -> None:
    """Returns an event in two chunks, as networks split them."""
    line = orjson.dumps(event) + b"\n"
    for piece in (line[:7], line[7:]):
        await response.write(piece)
        await asyncio.sleep(0)


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
