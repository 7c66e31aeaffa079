"""Bodies of 32 MB: threads read, change and join them, and no turn of the loop is long.

Security, the kind of F1, F4 and F12. Evidence: the threads that do the work, the bytes that engines
get, and the turn guard (`turn_guard.py`), which watches all of these tests.
"""

import asyncio
import gzip
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from lmetric.config import ServerConfig
from lmetric.engines import handover
from lmetric.server.api import request as api_request
from lmetric.server.api.request import LARGE_BODY, BodyParts
from lmetric.server.http import home
from lmetric.server.http.pages import engines as engine_pages
from lmetric.server.tls.contexts import TlsContext
from server_world import FakeEngine, Request, chunk, plain, usage, world
from test_server_client import client, post
from test_server_pd import PARAMS, fakes, second
from waiting import PATIENCE_SECONDS

SIZE = (32 << 20) - 8192
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGE = b'{"role": "user", "content": "' + b"hi there " * 12 + b'"}'
TEXT = b'"' + b"hello wo" * 4 + b'"'


def items(item: bytes) -> bytes:
    """A list that fills a body."""
    return b"[" + b",".join([item] * (SIZE // (len(item) + 1))) + b"]"


def text(piece: bytes) -> bytes:
    return b'"' + piece * (SIZE // len(piece)) + b'"'


def body(prompt: bytes, name: str = "prompt", more: bytes = b"") -> bytes:
    return b'{"model": "tiny", ' + more + b'"%s": ' % name.encode() + prompt + b"}"


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "token ids": (COMPLETIONS, lambda: body(b"[" + b"1," * (SIZE // 2) + b"1]")),
    "lists of token ids": (COMPLETIONS, lambda: body(items(b"[" + b"12345," * 10_000 + b"1]"))),
    "text with escapes": (COMPLETIONS, lambda: body(text(b"\\n"))),
    "text in UTF-16": (
        COMPLETIONS,
        lambda: body(b'"' + b"x" * (SIZE // 2) + b'"').decode().encode("utf-16"),
    ),
    "prompts": (COMPLETIONS, lambda: body(items(TEXT))),
    "no JSON": (COMPLETIONS, lambda: body(items(b"12345"))[:-1] + b"x"),
    "too many values": (COMPLETIONS, lambda: body(items(b'"a"'))),
    "messages": (CHAT, lambda: body(items(MESSAGE), "messages")),
    "tools": (
        CHAT,
        lambda: body(items(b'{"type": "function", "x": "' + b"y" * 120 + b'"}'), "tools", b'"messages": [],'),
    ),
    "deep lists": (CHAT, lambda: body(items(b"[" * 60 + b'"' + b"x" * 8000 + b'"' + b"]" * 60), "x")),
    "Messages": ("/v1/messages", lambda: body(items(MESSAGE), "messages")),
    "Responses": ("/v1/responses", lambda: body(items(MESSAGE), "input")),
    "embeddings": ("/v1/embeddings", lambda: body(items(TEXT), "input")),
    "documents to rank": ("/v1/rerank", lambda: body(items(TEXT), "documents", b'"query": "q",')),
    "texts to compare": ("/v1/score", lambda: body(items(TEXT), "text_2", b'"text_1": "q",')),
    "tokens to decode": ("/detokenize", lambda: body(items(b"12345"), "tokens")),
}
REFUSED = ("no JSON", "too many values")


def without(large: bytes, data: bytes) -> Any:
    """Parses a body that has the large value once, byte for byte, with null in its place."""
    before, found, behind = data.partition(large)
    assert found
    return orjson.loads(before + b"null" + behind)


def large_value(data: bytes) -> bytes:
    """The value of the second and last field of a body."""
    return data[data.index(b'": ', len(b'{"model": ')) + 3 : -1]


# Of each way that a body is read, one; the other bodies are read nightly.
QUICK = ("token ids", "text with escapes", "text in UTF-16", "no JSON", "messages", "deep lists", "Responses")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Collects the long work on bodies: its name, and whether a thread does it."""
    found: list[tuple[str, bool]] = []
    main = threading.get_ident()
    names = [(api_request, name) for name in ("read_request", "edit_object", "join_parts", "short_members")]
    for module, name in [*names, (handover, "outline"), (handover, "edit_object")]:
        call = getattr(module, name)

        def noted(*given: Any, name: str = name, call: Any = call) -> Any:
            if any(len(each) > LARGE_BODY for each in given if isinstance(each, bytes)) or (
                isinstance(given[0], list) and sum(map(len, given[0])) > LARGE_BODY
            ):
                found.append((name, threading.get_ident() != main))
            return call(*given)

        monkeypatch.setattr(module, name, noted)
    return found


async def whole(_: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    choices = [{"index": 0, "text": "a", "finish_reason": "stop"}]
    writer.write(plain(200, {"id": "x", "choices": choices, "usage": usage()}))
    return True


def in_chunks(data: bytes, path: str, fields: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{fields}transfer-encoding: chunked\r\n\r\n"
    pieces = [data[at : at + 500_000] for at in range(0, len(data), 500_000)]
    return head.encode() + b"".join(map(chunk, pieces)) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in BODIES if kind not in QUICK)]
)
async def test_a_thread_reads_a_large_body(kind: str, work: list[tuple[str, bool]]) -> None:
    path, make = BODIES[kind]
    data = make()
    async with world([FakeEngine(behave=whole)]) as w, client(w) as c:
        await c.send(post(data, path))
        status, _, answer = await c.answer()
        assert (status == 200) == (kind not in REFUSED), answer
        if status == 200:
            sent = w.engines[0].requests[-1].body
            assert sent.decode() == data.decode("utf-16") if "UTF-16" in kind else sent.endswith(data[1:])
        assert {name for name, _ in work} >= {"join_parts", "read_request"}
        assert all(in_thread for _, in_thread in work), work
        assert w.server.front.clients.body_bytes == 0


@pytest.mark.parametrize("packed", [False, True], ids=["chunks", "gzip"])
async def test_a_thread_joins_a_large_body_in_pieces(packed: bool, work: list[tuple[str, bool]]) -> None:
    path, make = BODIES["token ids"]
    data = make()
    fields = "content-encoding: gzip\r\n" if packed else ""
    sent = gzip.compress(data, 1) if packed else data
    async with world([FakeEngine(behave=whole)]) as w, client(w) as c:
        await c.send(in_chunks(sent, path, fields))
        assert (await c.answer())[0] == 200
        assert w.engines[0].requests[-1].body == data
        assert all(in_thread for _, in_thread in work), work
        assert w.server.front.clients.body_bytes == 0


@pytest.mark.parametrize("kind", ["token ids", "messages", "Responses"])
async def test_a_thread_changes_a_large_body(kind: str, work: list[tuple[str, bool]], tmp_path: Path) -> None:
    """The salt of an isolated tenant, the client's priority, the ID of a stored response."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    path, make = BODIES[kind]
    data = make()
    large, data = large_value(data), data[:-1] + b', "priority": 5}'
    tenants = {"alice": {"isolate": True}}
    async with (
        world([FakeEngine(behave=whole)], auth={"keys_file": str(keys)}, tenants=tenants) as w,
        client(w) as c,
    ):
        await c.send(post(data, path, "authorization: Bearer sk-alice\r\n"))
        status, _, answer = await c.answer()
        assert status == 200, answer
        got, given = without(large, w.engines[0].requests[-1].body), without(large, data)
        added = {name: got.pop(name) for name in list(got) if name not in given}
        assert set(added) == {"cache_salt", "request_id"} if kind == "Responses" else {"cache_salt"}
        assert given.pop("priority") == 5
        assert got == given
        assert [name for name, _ in work].count("edit_object") == 2
        assert all(in_thread for _, in_thread in work), work


@pytest.mark.parametrize("kind", ["token ids", "text with escapes", "messages", "prompts"])
async def test_a_thread_writes_the_large_body_of_a_prefill(kind: str, work: list[tuple[str, bool]]) -> None:
    """With prefill and decode engines, a turn parsed and wrote a body again: 0.4 s."""
    path, make = BODIES[kind]
    data = make()
    large, data = large_value(data), data[:-1] + b', "max_tokens": 7, "min_tokens": 7}'
    prefill, decode = FakeEngine(behave=second(PARAMS)), FakeEngine(behave=whole)
    async with world([], engines=await fakes(prefill, decode)) as w, client(w) as c:
        await c.send(post(data, path))
        status, _, answer = await c.answer()
        assert status == 200, answer
        if kind == "prompts":  # they cannot be split
            assert not prefill.requests
            assert w.server.fleet.models[0].kv_transfers == {"not_cut": 1}
        else:
            (first,) = prefill.requests
            got, given = without(large, first.body), without(large, data)
            assert (got.pop("stream"), got["max_tokens"]) == (False, 1)
            assert got.pop("kv_transfer_params")["do_remote_decode"] is True
            assert got.pop("max_completion_tokens", None) == (1 if path == CHAT else None)
            assert got == {name: value for name, value in given.items() if name != "min_tokens"} | {
                "max_tokens": 1
            }
            (then,) = decode.requests
            assert then.body.endswith(data[1:])
            assert work.count(("edit_object", True)) == 1
        assert work.count(("outline", True)) == 1
        assert all(in_thread for _, in_thread in work), work
        assert w.server.front.clients.body_bytes == 0
    for engine in (prefill, decode):
        await engine.stop()


@pytest.mark.parametrize("plan", ["split", "prefix_fetch"])
async def test_a_large_body_gets_no_plan_that_parses_it(
    plan: str, work: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a plan parsed the body on the loop. `engines.md` names the sizes."""
    parsed: list[int] = []
    get = api_request.ParsedRequest.request.fget
    assert get is not None
    noted = property(lambda it: parsed.append(len(it.body)) or get(it))
    monkeypatch.setattr(api_request.ParsedRequest, "request", noted)
    path, make = BODIES["token ids"]
    settings: dict[str, Any] = {plan: "libra" if plan == "split" else "on"}
    settings |= {"experimental": True, "stream_failover": False}
    async with world([FakeEngine(behave=whole), FakeEngine(behave=whole)], **settings) as w, client(w) as c:
        model = w.server.fleet.models[0]
        for size, data in ((0, make()), (1, body(b"[1,2,3]"))):
            await c.send(post(data[:-1] + b', "max_tokens": 9}', path))
            assert (await c.answer())[0] == 200
            assert bool(parsed) == bool(size)
        assert model.ineligible["prefix_fetch" if plan != "split" else "split_or_migration"] == 2
        assert all(in_thread for _, in_thread in work), work


async def test_requests_behind_a_large_one_and_clients_that_leave() -> None:
    """The state of a connection is that of a small request."""
    path, make = BODIES["lists of token ids"]
    large = post(make(), path)
    async with world([FakeEngine(behave=whole)]) as w:
        async with client(w) as c:
            small = post(b'{"prompt": "a"}')
            await c.send(large + small + large + small)
            assert [(await c.answer())[0] for _ in range(4)] == [200] * 4
        for _ in range(3):
            async with client(w) as c:
                await c.send(large)
                await w.until(lambda: w.server.front.relays)
        await w.settled()
        front = w.server.front
        await w.until(lambda: not front.clients.body_bytes and not front.connections)
        front._threads._threads.shutdown()  # else its work would count in the next test


@pytest.mark.parametrize("packed", [False, True], ids=["chunks", "gzip"])
async def test_a_client_that_leaves_while_its_body_is_joined_has_left(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request went to an engine, and nobody stopped it there."""
    begun, release, joined = threading.Event(), threading.Event(), BodyParts.joined

    def wait(parts: BodyParts) -> bytes:
        if len(parts) > LARGE_BODY:
            begun.set()
            assert release.wait(PATIENCE_SECONDS)
        return joined(parts)

    monkeypatch.setattr(BodyParts, "joined", wait)
    data = body(b"[" + b"1," * LARGE_BODY + b"1]")
    fields = "content-encoding: gzip\r\n" if packed else ""
    async with world([FakeEngine(behave=whole)]) as w:
        front, counts = w.server.front, w.server.metrics.requests.requests
        try:
            async with client(w) as c:
                await c.send(in_chunks(gzip.compress(data) if packed else data, COMPLETIONS, fields))
                await w.until(begun.is_set)
            await w.until(lambda: not front.clients.connections)
        finally:
            release.set()
        await w.until(lambda: counts)
        assert list(counts) == [("", "", 499)]
        assert not w.engines[0].requests
        assert not front.clients.body_bytes


async def test_small_bodies_need_no_thread(work: list[tuple[str, bool]]) -> None:
    async with world(1) as w:
        w.server.front._threads.close()
        data = body(b"[" + b"1," * (LARGE_BODY // 2 - 1000) + b"1]")
        assert (await w.post(data))[0] == 200
        assert work == []


# Pages and reloads of large fleets. With 10,000 engines, they took 60 to 370 ms of one turn.


async def test_pages_of_large_fleets_leave_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, threads = 0, []
    main, loop = threading.get_ident(), asyncio.get_running_loop()
    describe = home._home

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    def described(shown: Any) -> str:
        threads.append(threading.get_ident())
        return describe(shown)

    monkeypatch.setattr(engine_pages, "ENGINES_IN_TURN", 1)
    monkeypatch.setattr(home, "_home", described)
    engines = [{"url": f"http://127.0.0.1:{port}", "name": f"e{port}"} for port in range(1, 41)]
    async with world([], engines=engines) as w:
        turn()
        shown = await engine_pages.shown(w.server.fleet, w.server.fleet.engines())
        assert [each["name"] for each in shown] == [each["name"] for each in engines]
        assert turns >= 40
        assert (await w.get("/", {"accept": "text/html"}))[0] == 200
        assert threads
        assert main not in threads


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_reload_reads_the_tls_settings_that_engines_share_once(
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet without https engines needs none."""
    engines = [{"url": f"{scheme}://127.0.0.1:{port}", "name": f"e{port}"} for port in range(1, 41)]
    async with world([], engines=engines) as w:
        read: list[Any] = []
        refresh = TlsContext.refresh
        monkeypatch.setattr(TlsContext, "refresh", lambda it: read.append(it) or refresh(it))
        await w.server.apply(w.server.prepare(w.server.config))
        assert len(read) == (scheme == "https")
        # Engines that are as before are the same objects: comparing them takes no time.
        before = w.server.config
        await w.server.apply(w.server.prepare(ServerConfig.model_validate(before.model_dump())))
        assert all(one is other for one, other in zip(w.server.config.engines, before.engines, strict=True))
