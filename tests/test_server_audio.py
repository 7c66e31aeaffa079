"""Audio: multipart forms, which the router relays unchanged; WebSocket, which it refuses."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from turn_guard import of_reference

from lmetric._core import INTERNAL_FIELDS
from lmetric.server.api.errors import ApiError
from lmetric.server.api.form import MAX_PARTS, parse_form
from lmetric.server.api.paths import AUDIO, RELAYED
from server_world import STREAM_HEAD, STREAM_TAIL, FakeEngine, Request, chunk, plain, token, world

PATH = RELAYED[AUDIO[0]]
KIND = b"multipart/form-data; boundary=b"


def form(*parts: tuple[str, bytes], boundary: bytes = b"b") -> bytes:
    """A form; a name may have further parameters."""
    body = b""
    for name, value in parts:
        body += b"--%b\r\nContent-Disposition: form-data; name=%b\r\n\r\n" % (boundary, name.encode())
        body += value + b"\r\n"
    return body + b"--%b--\r\n" % boundary


def audio(size: int = 100_000) -> aiohttp.FormData:
    data = aiohttp.FormData()
    data.add_field("file", os.urandom(size), filename="a.wav", content_type="audio/wav")
    return data


async def heard(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
    if b"\r\n\r\ntrue\r\n" in request.body:
        writer.write(STREAM_HEAD + chunk(token("hello", "stop")) + STREAM_TAIL)
    else:
        writer.write(plain(200, {"text": f"heard by {engine.name}"}))
    return True


@pytest.mark.parametrize("path", AUDIO)
async def test_forms_reach_an_engine_unchanged(path: str) -> None:
    engines = [FakeEngine(behave=heard), FakeEngine(behave=heard)]
    async with world(engines) as w:
        for _ in range(2):
            data = audio()
            data.add_field("model", "tiny")
            payload = data()
            async with w.client.post(w.url + path, data=payload) as response:
                assert response.status == 200
                assert (await response.json())["text"].startswith("heard by")
                assert "x-lmetric-decision" in response.headers
        assert [len(engine.requests) for engine in engines] == [1, 1], "routed like other requests"
        request = engines[0].requests[0]
        assert request.path == path
        assert request.headers["content-type"].startswith("multipart/form-data; boundary=")
        found = parse_form(PATH, request.headers["content-type"].encode(), request.body)
        assert (found.model, found.stream, found.body) == ("tiny", False, request.body)


async def test_answers_to_forms_are_streamed_and_retried() -> None:
    async def busy(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(503, {"error": {"message": "busy"}}))
        return True

    async with world([FakeEngine(behave=busy), FakeEngine(behave=heard)]) as w:
        for _ in range(2):
            data = audio()
            data.add_field("stream", "true")
            async with w.client.post(w.url + AUDIO[0], data=data) as response:
                assert response.status == 200
                assert response.content_type == "text/event-stream"
                assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_forms_that_are_refused() -> None:
    async with world(limits={"max_body_bytes": 200_000}) as w:

        async def post(body: bytes, kind: bytes = KIND) -> tuple[int, Any]:
            status, _, answer = await w.post(body, AUDIO[0], {"content-type": kind.decode("latin-1")})
            return status, answer["error"]

        good = ("file", b"RIFF")
        for body, kind, status, said in (
            (b"{}", b"application/json", 415, "is 'application/json'; expected multipart/form-data"),
            (b"{}", b"multipart/form-data", 415, "is 'multipart/form-data'; expected one boundary"),
            (b"{}", b"multipart/mixed; boundary=\xe9", 415, r"boundary=\xc3\xa9'; expected multipart"),
            (form(good), b'multipart/form-data; boundary="a b"', 400, "one boundary without spaces"),
            (form(good), b"multipart/form-data; boundary=" + b"c" * 71, 400, "boundary"),
            (form(good), b"multipart/form-data; boundary=c", 400, "begin with its boundary"),
            # Engines may take the last boundary, skip a preamble, or decode names by the charset.
            (form(good), b"multipart/form-data\xa0; boundary=b", 415, "multipart/form-data"),
            (form(good), KIND + b"; boundary=c", 400, "one boundary"),
            (form(good), KIND + b'; BOUNDARY = "c"', 400, "one boundary"),
            (form(good), KIND + b"; boundary*=utf-8''c", 400, "one boundary"),
            (form(good), b"multipart/form-data; boundary*0=b", 400, "one boundary"),
            (form(good), b"multipart/form-data; boundary=<b>", 400, "one boundary"),
            (form(good), b'multipart/form-data; boundary="b\\c"', 400, "one boundary"),
            (form(good), b'multipart/form-data; a="; boundary=b; c="; boundary=d', 400, "one boundary"),
            (form(good), KIND + b"; charset=utf-7", 400, "b; charset=utf-7'; expected one charset"),
            (form(good), KIND + b"; charset=utf-8; charset=cp037", 400, "charset"),
            (form(good), KIND + b"; charset*=utf-7", 400, "charset"),
            (form(good), KIND + b"; charset=", 400, "charset"),
            (form(good), KIND + b"; charset=utf-16", 400, "charset"),
            (form(good), KIND + b"; charset=utf-8; charset=iso-8859-1", 400, "charset"),
            # Engines decode values by the charset, too.
            (form(good, ("model", b"\xc3\xa9")), KIND + b"; charset=iso-8859-1", 400, "not ASCII"),
            (form(good, ("model", b"\xc3\xa9")), KIND + b"; charset=utf8", 404, "\xe9"),
            (form(good), KIND + b"; a=" + b"b" * 500, 415, "535 bytes; expected at most 512"),
            (b"\n" + form(good), KIND, 400, "begin with its boundary"),
            (b"a" + form(good), KIND, 400, "begin with its boundary"),
            (b"\n" + form(("model", b"other")) + b"\r\n" + form(good), KIND, 400, "begin"),
            (form(good).replace(b"--b\r\n", b"--b \r\n"), KIND, 400, "header"),
            (form(good)[:-6], KIND, 400, "cut off"),
            (form(good, ("model", b"tiny"), ("model", b"big")), KIND, 400, "twice"),
            (form(good, ("model", b"t" * 1025)), KIND, 400, "longer"),
            (form(good, ("model", b"\xff")), KIND, 400, "UTF-8"),
            (form(*[good] * (MAX_PARTS + 1)), KIND, 400, "more than 64 parts"),
            (b"--b\r\n" + b"a: b\r\n" * 2000 + b"\r\n--b--", KIND, 400, "header"),
            (form(good, ("model", b"other")), KIND, 404, "other"),
            # Engines may take the last name of a part, and the last header.
            (form(("model", b"tiny"), ("x; name=model", b"other")), KIND, 400, "one name"),
            (form(("model", b"tiny"), ('"x"; NAME ="model"', b"other")), KIND, 400, "one name"),
            (form(("x\r\nContent-Disposition: form-data; name=model", b"other")), KIND, 400, "one name"),
            (form(("x\nContent-Disposition: form-data; name=model", b"other")), KIND, 400, "one name"),
            (b"--b\r\nContent-Type: text/plain\r\n\r\nother\r\n--b--", KIND, 400, "one name"),
            (form(("model", b"tiny"), ('"x"; name\x1c="model"', b"other")), KIND, 400, "one name"),
            (form(("\xa0model", b"other")), KIND, 400, "one name"),
            (form(("<model>", b"other")), KIND, 400, "one name"),
            (form(('"mod\\el"', b"other")), KIND, 400, "one name"),
            (form(('x;\r\n name="model"', b"other")), KIND, 400, "one name"),
            (b"--b\r\nContent-Disposition : form-data; name=a\r\n\r\nother\r\n--b--", KIND, 400, "one name"),
            (
                form(("model", b"tiny"), ('"x"; filename="a\\"; name="model"', b"other")),
                KIND,
                400,
                "one name",
            ),
            (form(("file", b"a" * 200_001)), KIND, 413, "200000"),
        ):
            got, error = await post(body, kind)
            assert (got, said in error["message"]) == (status, True), (got, error)
            assert error["message"].isascii() or status == 404
        for name in sorted(INTERNAL_FIELDS):
            for spelled in (name, f"{name}[a]"):
                with pytest.raises(ApiError, match=name):
                    parse_form(PATH, KIND, form((spelled, b"1")))
        assert not w.engines[0].requests


async def test_isolated_tenants_send_no_forms() -> None:
    async with world(tenants={"alice": {"isolate": True}}) as w:
        headers = {"x-tenant": "alice", "content-type": KIND.decode()}
        status, _, answer = await w.post(form(("file", b"a")), AUDIO[0], headers)
        assert (status, answer["error"]["code"]) == (403, "not_isolated")


def spans() -> Iterator[bytes]:
    yield os.urandom(30 << 20)
    yield b"\r\n--" * (6 << 20)  # the longest search for a boundary
    yield b"-" * (30 << 20)


def long_heads() -> Iterator[tuple[bytes, bytes]]:
    """Content-types and bodies of at most 256 KiB that the event loop reads."""
    for kind in (b'; a="' + b";" * 62_000, b"; " * 31_000, b";" + b" " * 62_000, b"; boundary" * 6200):
        yield KIND + kind, form()
    for end in (b'; y="' + b";" * 4000, b"; " * 2000, b";" + b" " * 3990, b"; name" * 660, b"\r\na:" * 990):
        yield KIND, form(*[("a" + end.decode(), b"")] * 60)


def test_long_heads_do_not_hold_the_loop() -> None:
    for kind, body in long_heads():
        began = time.thread_time()
        with contextlib.suppress(ApiError):
            parse_form(PATH, kind, body)
        assert of_reference(time.thread_time() - began) < 0.05, "at most 12 ms on an idle machine"


def test_a_large_file_does_not_hold_the_loop() -> None:
    for content in spans():
        body = form(("file; filename=a", content), ("model", b"tiny"), boundary=b"-" * 30 + b"c" * 40)
        began = time.thread_time()
        found = parse_form(PATH, b"multipart/form-data; boundary=" + b"-" * 30 + b"c" * 40, body)
        seconds = of_reference(time.thread_time() - began)
        assert seconds < 0.25, "about 10 ms on an idle machine"
        assert found.model == "tiny"


@given(
    st.lists(st.tuples(st.sampled_from(["file", "prompt", "language"]), st.binary(max_size=40)), max_size=6),
    st.integers(0, 6),
    st.sampled_from(["model", '"model"', '"model"; x=y', "model "]),
)
def test_the_model_is_found_anywhere(parts: list[tuple[str, bytes]], at: int, name: str) -> None:
    parts.insert(at, (name, b"tiny"))
    if any(b"\r\n--b" in value or value.startswith(b"--b") for _, value in parts):
        return
    assert parse_form(PATH, KIND, form(*parts)).model == "tiny"


@pytest.mark.parametrize(
    "head",
    [
        b'Content-Disposition: form-data; name="file"; filename="call name=Bob.wav"',
        b'Content-Disposition: form-data; name="file"; filename="get?name=bob.wav"',
        b"content-disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav",
        b'Content-Disposition: form-data; name="file"\r\nContent-Type: audio/wav; name="a.wav"',
        b'Content-Disposition: form-data; filename="a;b\\"c.wav"; Name = "file" ',
        b'Content-Type: audio/wav\r\nContent-Disposition: form-data; filename="a.wav"; name="file"',
    ],
)
def test_heads_that_clients_send_are_accepted(head: bytes) -> None:
    body = b"--b\r\n%b\r\n\r\nRIFF\r\n" % head + form(("model", b"tiny"))
    assert parse_form(PATH, KIND, body).model == "tiny"


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(body: bytes) -> None:
    for data in (body, b"--b" + body, b"--b\r\n" + body, form(("file", body))):
        with contextlib.suppress(ApiError):
            parse_form(PATH, KIND, data)


@pytest.mark.parametrize(
    "kind",
    [
        b'multipart/form-data; boundary="b"',
        b"Multipart/Form-Data;boundary=b; charset=UTF-8",
        b'multipart/form-data; charset="utf-8"; boundary=b',
        KIND + b"; charset=utf8",
        KIND + b"; charset=US-ASCII",
        KIND + b"; charset=ISO-8859-1",  # Java's HttpClient, for a form of its own content type
    ],
)
def test_kinds_that_clients_send_are_accepted(kind: bytes) -> None:
    for body in (form(("model", b"tiny")), b"\r\n" + form(("model", b"tiny")) + b"an epilogue"):
        assert parse_form(PATH, kind, body).model == "tiny"


async def test_websocket_is_refused_with_the_reason() -> None:
    async with world() as w:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await w.client.ws_connect(w.url + "/v1/realtime?model=tiny")
        assert refused.value.status == 426
        status, body = await w.get("/v1/realtime/sessions")
        assert status == 501
        assert b"WebSocket" in body
        assert (await w.post())[0] == 200
