"""Engines' own errors and coded answers reach the client unchanged: bugs 18, 22 and 28."""

import gzip
import time
from email.utils import formatdate
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.server.api.refusal import retry_after_seconds
from server_world import HEAD, JSON, SSE, Behaviour, FakeEngine, World, answer, event, says, token, world

STREAM = {"model": "tiny", "prompt": "x", "stream": True}
FIELDS = (
    b"x-ratelimit-reset-requests: 17\r\nretry-after-ms: 250\r\nx-should-retry: false\r\n"
    b"set-cookie: a=1\r\nset-cookie: b=2\r\nwww-authenticate: Bearer\r\n"
)
BODY = b"upstream\r\nbusy \xff"


def refusal(status: int, extra: bytes = FIELDS, body: bytes = BODY, kind: bytes = b"text/plain") -> bytes:
    return HEAD % (status, kind) + extra + b"content-length: %d\r\n\r\n" % len(body) + body


def pieces(answer: bytes) -> list[bytes]:
    """The head alone, then the body in two parts."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return [head + b"\r\n\r\n", body[:4], body[4:]]


def chunked(status: int) -> Behaviour:
    head = HEAD % (status, b"text/plain") + FIELDS + b"transfer-encoding: chunked\r\n\r\n"
    return says(
        head, b"8\r\n%b\r\n" % BODY[:8], b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) - 8, BODY[8:]), then="keep"
    )


async def got(w: World, body: dict[str, Any], **headers: str) -> tuple[int, Any, bytes]:
    async with w.client.post(w.url + "/v1/completions", json=body, headers=headers) as response:
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("how", ["whole", "pieces", "chunked", "until close"])
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 502, 503, 504, 529])
async def test_an_engines_error_passes_unchanged(status: int, how: str, engines: int, stream: bool) -> None:
    """Bugs 28: fields, type and body, byte for byte, also after a second engine was tried."""
    behave = {
        "whole": says(refusal(status), then="keep"),
        "pieces": says(*pieces(refusal(status)), then="keep"),
        "chunked": chunked(status),
        "until close": says(HEAD % (status, b"text/plain") + FIELDS + b"\r\n", BODY),
    }[how]
    async with world([FakeEngine(behave=behave) for _ in range(engines)]) as w:
        answered, headers, body = await got(w, STREAM if stream else {"model": "tiny", "prompt": "x"})
        assert (answered, body) == (status, BODY)
        assert headers["content-type"] == "text/plain"
        for name, value in (("x-ratelimit-reset-requests", "17"), ("retry-after-ms", "250")):
            assert headers.getall(name) == [value]
        assert headers["x-should-retry"] == "false"
        assert headers.getall("set-cookie") == ["a=1", "b=2"]
        assert headers["www-authenticate"] == "Bearer"
        assert headers["x-lmetric-instance"] in ("e0", "e1")
        assert headers.getall("x-request-id")
        assert len(headers.getall("x-lmetric-decision")) == 1
        assert ("retry-after" in headers) == (status in (429, 503))
        tried = sum(len(engine.requests) for engine in w.engines)
        assert tried == (engines if status in (429, 500, 502, 503, 504) else 1)


async def test_the_last_engines_error_is_the_one_that_passes() -> None:
    """Bugs 28, sibling: one engine is full, and the other refuses in another way."""
    first = FakeEngine(behave=says(refusal(503, b"x-from: e0\r\n"), then="keep"))
    second = FakeEngine(behave=says(refusal(500, b"x-from: e1\r\n", b"<p>", b"text/html"), then="keep"))
    async with world([first, second]) as w:
        for _ in range(2):
            status, headers, body = await got(w, {"model": "tiny", "prompt": "x"})
            expected = {503: ("e0", BODY, "text/plain"), 500: ("e1", b"<p>", "text/html")}[status]
            assert (headers["x-from"], body, headers["content-type"]) == expected
            assert headers["x-lmetric-instance"] == headers["x-from"]


async def test_an_error_answer_that_never_ends_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs 28, sibling: the body is awaited for a short time, then the next engine answers."""
    monkeypatch.setattr("lmetric.server.execution.attempt.REFUSAL_SECONDS", 0.05)
    head = HEAD % (503, b"text/plain") + b"content-length: 100\r\n\r\nhalf"
    async with world([FakeEngine(behave=says(head, then="hang"))]) as w:
        status, _, body = await got(w, {"model": "tiny", "prompt": "x"})
        assert (status, orjson.loads(body)["error"]["code"]) == (503, "status")
    async with world([FakeEngine(behave=says(head, then="hang")), FakeEngine()]) as w:
        assert [(await got(w, {"model": "tiny", "prompt": "x"}))[0] for _ in range(2)] == [200, 200]


async def test_cors_fields_of_an_error_are_the_routers() -> None:
    """Bugs 28, sibling: an engine's own CORS fields are replaced, as in other answers."""
    extra = b"access-control-allow-origin: *\r\n"
    async with world([FakeEngine(behave=says(refusal(429, extra)))], cors={"origins": ["http://page"]}) as w:
        status, headers, _ = await got(w, {"model": "tiny", "prompt": "x"}, origin="http://page")
        assert (status, headers.getall("access-control-allow-origin")) == (429, ["http://page"])


async def test_without_engine_names_an_error_names_none() -> None:
    async with world([FakeEngine(behave=says(refusal(500)))], errors={"show_engines": False}) as w:
        _, headers, _ = await got(w, {"model": "tiny", "prompt": "x"})
        assert "x-lmetric-instance" not in headers
        assert "x-lmetric-decision" in headers


# -- Retry-After -----------------------------------------------------------------------------------


def line(value: str, date: str = "") -> bytes:
    return (
        b"HTTP/1.1 429 X\r\n"
        + (f"date: {date}\r\n" if date else "").encode()
        + b"Retry-After: %b\r\n" % (value.encode())
    )


def test_retry_after_is_a_number_or_a_date() -> None:
    """Bugs 18: all three forms of a date count; other values do not."""
    assert retry_after_seconds(line("17")) == 17
    assert retry_after_seconds(b"HTTP/1.1 429 X\r\nx-retry-after: 9\r\n") is None
    for value in ("-1", "1.5", "soon", "", "Wed, 99 Oct 2026 07:28:00 GMT", "\xff"):
        assert retry_after_seconds(line(value)) is None, value
    date = "Sun, 06 Nov 1994 08:49:37 GMT"
    for later in (
        "Sun, 06 Nov 1994 08:50:07 GMT",
        "Sunday, 06-Nov-94 08:50:07 GMT",
        "Sun Nov  6 08:50:07 1994",
    ):
        assert retry_after_seconds(line(later, date)) == 30
        assert retry_after_seconds(line(later)) == 0  # long ago by this machine's clock
        assert retry_after_seconds(line(date, later)) == 0
    assert retry_after_seconds(line(formatdate(time.time() + 30, usegmt=True))) in (29, 30, 31)
    assert retry_after_seconds(line("9" * 400)) is not None


def test_a_date_without_a_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    date = time.asctime(time.gmtime(time.time() + 30))
    try:
        for zone in ("America/New_York", "UTC", "Asia/Tokyo"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert retry_after_seconds(line(date)) in (28, 29, 30, 31), zone
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_date_rests_the_engine_and_reaches_the_client(status: int) -> None:
    """Bugs 18: 30 s as a date are 30 s, for the engine and for the client."""
    date = formatdate(time.time() + 30, usegmt=True)
    full = FakeEngine(behave=says(refusal(status, b"retry-after: %b\r\n" % date.encode()), then="keep"))
    async with world([full, FakeEngine()]) as w:
        before = time.monotonic()
        for _ in range(6):
            assert (await got(w, {"model": "tiny", "prompt": "x"}))[0] == 200
        assert len(full.requests) == 1
        until = w.server.fleet.models[0].engines["e0"].service.saturated_until
        assert 25 < until - before <= 32
        w.engines[1].behave = full.behave
        _, headers, _ = await got(w, {"model": "tiny", "prompt": "x"})
        assert headers.getall("retry-after") == [date]


# -- content-encoding ------------------------------------------------------------------------------

EVENTS = b"".join([token("a"), token("b", "length"), event(b"[DONE]")])
PACKED = gzip.compress(EVENTS, mtime=0)
ERROR = gzip.compress(b'{"error": {"message": "zipped"}}', mtime=0)
WHOLE = gzip.compress(b'{"choices": []}', mtime=0)
CODED = b"content-encoding: gzip\r\nvary: accept-encoding\r\n"


async def raw(w: World, body: dict[str, Any]) -> tuple[int, Any, bytes]:
    async with w.client.post(w.url + "/v1/completions", json=body) as response:
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_a_coded_stream_passes_unread(framing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs 22: a gzip stream passes with its field and its bytes, in any framing; it was a 502."""
    first, rest = PACKED[:20], PACKED[20:]
    behave = {
        "chunked": says(
            HEAD % (200, SSE) + CODED + b"transfer-encoding: chunked\r\n\r\n",
            b"%x\r\n%b\r\n" % (len(first), first),
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest),
            then="keep",
        ),
        "length": says(
            HEAD % (200, SSE) + CODED + b"content-length: %d\r\n\r\n" % len(PACKED), first, rest, then="keep"
        ),
        "close": says(HEAD % (200, SSE) + CODED + b"\r\n", first, rest),
    }[framing]
    async with world([FakeEngine(behave=behave)]) as w:
        w.client._auto_decompress = False
        for _ in range(2):
            status, headers, body = await raw(w, STREAM)
            assert (status, headers["content-encoding"], headers["vary"]) == (200, "gzip", "accept-encoding")
            assert body == PACKED
            assert headers["content-type"] == SSE.decode()
        await w.settled()
        [model] = w.server.fleet.models
        assert model.router.stats()["finished"] == 2
        w.engines[0].behave = answer
        assert (await raw(w, STREAM))[0] == 200


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("status", [200, 400, 429, 500, 503])
async def test_a_coded_answer_passes_with_its_field(status: int, engines: int) -> None:
    """Bugs 22: errors, too, keep `content-encoding`; no message quotes the packed bytes."""
    body = WHOLE if status == 200 else ERROR
    behave = says(refusal(status, CODED, body, JSON), then="keep")
    async with world([FakeEngine(behave=behave) for _ in range(engines)]) as w:
        w.client._auto_decompress = False
        for stream in (False, True):
            request = {"model": "tiny", "prompt": "x", "stream": stream}
            answered, headers, bytes_ = await raw(w, request)
            assert (answered, headers["content-encoding"], bytes_) == (status, "gzip", body)
            assert headers["content-type"] == "application/json"


async def test_engines_are_asked_for_no_coding() -> None:
    """Bugs 22: no `accept-encoding` allows any coding; pages are asked in the same way."""
    async with world(1) as w:
        await got(w, {"model": "tiny", "prompt": "x"}, **{"accept-encoding": "br, gzip"})
        assert w.engines[0].requests[0].headers["accept-encoding"] == "identity"
        assert b"accept-encoding: identity\r\n" in w.server.fleet.models[0].engines["e0"].upstream.head(
            b"/v1/models", stream=False, method=b"GET"
        )


async def test_a_cut_coded_stream_closes_the_connection() -> None:
    """Bugs 22, sibling: no event of the router is put into packed bytes."""
    head = HEAD % (200, SSE) + CODED + b"transfer-encoding: chunked\r\n\r\n"
    behave = says(head, b"14\r\n%b\r\n" % PACKED[:20], then="reset")
    async with world([FakeEngine(behave=behave)]) as w:
        w.client._auto_decompress = False
        async with w.client.post(w.url + "/v1/completions", json=STREAM) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await w.settled()
