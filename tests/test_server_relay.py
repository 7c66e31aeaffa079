"""Answers for clients through the router: bytes, failover, faults before and during an answer."""

import asyncio

import aiohttp
import orjson
import pytest

from server_world import (
    HEAD,
    JSON,
    STREAM_HEAD,
    STREAM_TAIL,
    FakeEngine,
    Request,
    answer,
    chunk,
    decision_id,
    event,
    hang,
    plain,
    reset,
    says,
    token,
    usage,
    world,
)
from waiting import PATIENCE_SECONDS

STREAM = {"model": "tiny", "prompt": "hello", "stream": True}
FAST = {"timeouts": {"first_byte": 0.2, "answer": 0.2, "between_chunks": 0.2}}


async def test_plain_answer_and_its_record() -> None:
    async with world(1) as w:
        status, headers, got = await w.post(headers={"x-request-id": "rid-7"})
        assert (status, got["choices"][0]["text"]) == (200, "from e0")
        assert headers["x-lmetric-instance"] == "e0"
        assert headers["x-request-id"] == w.engines[0].requests[0].headers["x-request-id"] == "rid-7"
        code, record = await w.get("/debug/decisions/" + headers["x-lmetric-decision"])
        record = orjson.loads(record)
        assert code == 200
        assert (record["instance"], record["outcome"], record["request_id"]) == ("e0", "finished", "rid-7")
        assert (record["cached_tokens"], record["output_tokens"]) == (4, 3)
        assert record["model"] == "tiny"


async def test_stream_passes_bytes_exactly_and_counts_tokens() -> None:
    async with world(1) as w:
        status, headers, got = await w.post(STREAM)
        usage_event = event({"choices": [], "usage": usage()})
        assert got == token("a") + token("b") + token("c", "length") + usage_event + event(b"[DONE]")
        assert (status, headers["transfer-encoding"]) == (200, "chunked")
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert (record["outcome"], record["output_tokens"]) == ("finished", 3)
        assert record["ttft_seconds"] > 0


async def test_each_chunk_arrives_before_the_next_is_sent() -> None:
    gate = asyncio.Event()

    async def gated(_: FakeEngine, __: object, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(token("a")))
        await gate.wait()
        writer.write(chunk(token("b", "stop")) + STREAM_TAIL)
        return True

    async with (
        world([FakeEngine(behave=gated)]) as w,
        w.client.post(f"{w.url}/v1/completions", json=STREAM) as got,
    ):
        first = await asyncio.wait_for(got.content.readany(), PATIENCE_SECONDS)
        assert first == token("a")
        gate.set()
        assert (await got.content.read()).endswith(b"[DONE]\n\n")


async def test_head_for_the_engine() -> None:
    engine = {"api_key": "engine-key"}
    fake = FakeEngine()
    await fake.start()
    async with world([], engines=[{"url": fake.url, "name": "e0", **engine}]) as w:
        await w.post(
            headers={
                "connection": "keep-alive, x-hop",
                "x-hop": "1",
                "x-own": "2",
                "accept-encoding": "gzip",
                "x-data-parallel-rank": "3",
            }
        )
        sent = fake.requests[0]
        assert sent.headers["host"] == f"127.0.0.1:{fake.port}"
        assert sent.headers["authorization"] == "Bearer engine-key"
        assert sent.headers["x-own"] == "2"
        assert sent.headers["content-length"] == str(len(sent.body))
        assert sent.headers["accept-encoding"] == "identity"  # not the client's
        assert not {"x-hop", "x-data-parallel-rank", "connection"} & sent.headers.keys()
        assert sent.headers["x-request-id"]
    await fake.stop()


async def test_one_dead_engine_costs_no_client_an_error() -> None:
    async with world(2) as w:
        await w.engines[0].stop()
        for _ in range(6):
            status, headers, _ = await w.post()
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert not w.server.fleet.models[0].engines["e0"].healthy


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(reset, id="reset"),
        pytest.param(hang, id="hang"),
        pytest.param(says(b"SSH-2.0-OpenSSH\r\n\r\n"), id="garbage"),
        pytest.param(says(b"HTTP/1.1 200 OK\r\ncontent-le"), id="cut head"),
        pytest.param(says(plain(503, {"error": {"message": "busy"}})), id="busy"),
        pytest.param(says(HEAD % (200, JSON) + b"content-length: 900\r\n\r\n{"), id="cut body"),
        pytest.param(says(HEAD % (200, JSON) + b"content-length: 900\r\n\r\n{", then="hang"), id="half body"),
        pytest.param(says(HEAD % (200, JSON) + b"transfer-encoding: chunked\r\n\r\nzz\r\n"), id="bad chunk"),
    ],
)
async def test_faults_before_the_first_byte_go_down_the_ranking(fault: object) -> None:
    async with world(2, **FAST) as w:
        w.engines[0].behave = fault
        for _ in range(2):
            status, headers, got = await w.post()
            assert (status, got["choices"][0]["text"]) == (200, "from e1")
            assert headers["x-lmetric-instance"] == "e1"
        assert w.engines[0].requests
        assert w.engines[0].requests[0].body == w.engines[1].requests[-1].body


async def pings(engine: FakeEngine, _: Request, writer: asyncio.StreamWriter) -> bool:
    """Sends only comments until the client leaves."""
    writer.write(STREAM_HEAD)
    leaves = asyncio.create_task(engine.until_left(writer))
    while not leaves.done():
        writer.write(chunk(b": ping\n\n"))
        await asyncio.wait([leaves], timeout=0.02)
    return False


async def test_an_engine_that_sends_only_comments_loses_the_request() -> None:
    """Reliability M7: comments neither commit an answer nor extend the limit on the first token."""
    async with world(2, **FAST) as w:
        w.engines[0].behave = pings
        status, headers, got = await w.post(STREAM)
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert got.startswith(token("a"))
        w.engines[1].behave = pings
        status, _, got = await w.post(STREAM)
        assert (status, got["error"]["code"]) == (504, "timeout")
        await w.until(lambda: [engine.left for engine in w.engines] == [2, 1])


async def test_comments_before_the_first_token_are_dropped_and_later_comments_pass() -> None:
    """Reliability M7: a slow engine that sends comments meanwhile is not lost."""
    ping, role = b": ping\n\n", event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    pieces = (ping, role + ping, ping + token("a"), ping, token("b", "stop"))
    behave = says(STREAM_HEAD, *(chunk(piece) for piece in pieces), STREAM_TAIL, then="keep")
    async with world([FakeEngine(behave=behave)]) as w:
        status, _, got = await w.post(STREAM)
        assert status == 200
        assert got.startswith(role + token("a") + ping + token("b", "stop"))


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(
            (event({"error": {"message": "busy", "code": 503}}) + event(b"[DONE]"),), id="busy event"
        ),
        pytest.param((event(b"[DONE]"),), id="done at once"),
        pytest.param((b'data: {"choices":[{"te',), id="half an event"),
        pytest.param(
            (event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),), id="only the role"
        ),
    ],
)
async def test_streams_that_fail_before_a_token_go_down_the_ranking(pieces: tuple[bytes, ...]) -> None:
    fault = says(STREAM_HEAD, *(chunk(piece) for piece in pieces))
    async with world(2, **FAST) as w:
        w.engines[0].behave = fault
        for _ in range(2):
            status, headers, got = await w.post(STREAM)
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
            assert got.startswith(token("a"))
        assert w.engines[0].requests


async def test_all_engines_failing_is_one_clear_error() -> None:
    async with world(2, **FAST) as w:
        w.engines[0].behave = reset
        w.engines[1].behave = says(STREAM_HEAD + chunk(event({"error": {"message": "no", "code": 503}})))
        status, headers, got = await w.post(STREAM)
        assert status in (502, 503)
        assert "e0: " in got["error"]["message"]
        assert "e1: error 503" in got["error"]["message"]
        assert headers["content-type"].startswith("application/json")
        for engine in w.engines:
            await engine.stop()
        await w.post()
        status, headers, got = await w.post()
        assert (status, headers["retry-after"], got["error"]["code"]) == (503, "2", "no_engine")


async def test_the_clients_own_fault_is_not_retried() -> None:
    error = {"error": {"message": "too long", "code": 400}}
    async with world(2) as w:
        for engine in w.engines:
            engine.behave = says(plain(400, error))
        status, headers, got = await w.post()
        assert (status, got) == (400, error)
        assert sum(len(engine.requests) for engine in w.engines) == 1
        assert headers["x-lmetric-instance"]
        for engine in w.engines:
            engine.behave = says(STREAM_HEAD + chunk(event(error)) + chunk(event(b"[DONE]")) + b"0\r\n\r\n")
        status, _, got = await w.post(STREAM)
        assert (status, got) == (200, event(error) + event(b"[DONE]"))


@pytest.mark.parametrize(
    ("tail", "then"),
    [
        pytest.param(b"", "close", id="closed"),
        pytest.param(b"", "reset", id="reset"),
        pytest.param(b"", "hang", id="silent"),
        pytest.param(b'20\r\ndata: {"choi', "close", id="inside a chunk"),
        pytest.param(chunk(event(b"[DONE]")) + b"0\r\n\r\n", "keep", id="no finish_reason"),
        pytest.param(b"nonsense\r\n", "keep", id="garbage"),
    ],
)
async def test_dying_in_mid_stream_ends_with_an_error_event(tail: bytes, then: str) -> None:
    fault = says(STREAM_HEAD + chunk(token("a")), tail, then=then)
    async with world([FakeEngine(behave=fault)], **FAST) as w:
        status, headers, got = await w.post(STREAM)
        assert status == 200
        first, error, done, rest = got.split(b"\n\n")
        assert first + b"\n\n" == token("a")
        problem = orjson.loads(error.removeprefix(b"data: "))["error"]
        assert problem["message"].startswith("the engine failed in the middle of its answer (e0: ")
        assert (done, rest) == (b"data: [DONE]", b"")
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert record["outcome"] not in ("finished", "running", "dropped")
        # The client's connection is intact and serves the next request.
        w.engines[0].behave = answer
        assert (await w.post())[0] == 200
        if then == "hang":
            await w.until(lambda: w.engines[0].left == 1)


async def test_an_engine_that_aborts_is_no_success() -> None:
    fault = says(STREAM_HEAD + chunk(token("a")) + chunk(token("", "abort")) + STREAM_TAIL, then="keep")
    async with world([FakeEngine(behave=fault)]) as w:
        _, headers, got = await w.post(STREAM)
        assert b'"abort"' in got
        record = w.server.fleet.models[0].router.explain(decision_id(headers))
        assert record is not None
        assert record["outcome"] == "engine_error"


async def test_a_client_that_leaves_stops_the_engine() -> None:
    for body, behave in ((STREAM, says(STREAM_HEAD, chunk(token("a")), then="hang")), (None, hang)):
        async with world([FakeEngine(behave=behave)]) as w:
            task = asyncio.create_task(w.post(body))
            await w.until(lambda w=w: w.engines[0].requests and w.in_flight() == 1)
            await asyncio.sleep(0.05)
            task.cancel()
            await w.until(lambda w=w: w.engines[0].left == 1)
            await w.settled()
            failed = w.server.fleet.models[0].router.stats()["failed"]
            assert failed == {kind: int(kind == "cancelled") for kind in failed}
            assert list(w.server.metrics.requests.requests) == [("tiny", "", 200 if body else 499)]
            assert w.server.fleet.models[0].engines["e0"].failures == 0


async def test_a_slow_reader_holds_the_engine_back() -> None:
    """100 MB for a client that reads nothing: the engine pauses early, and memory stays small."""
    sent = 0
    piece = chunk(token("x" * 65_000))

    async def flood(_: FakeEngine, __: object, writer: asyncio.StreamWriter) -> bool:
        nonlocal sent
        writer.write(STREAM_HEAD)
        for _n in range(1600):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
        writer.write(chunk(token("", "stop")) + STREAM_TAIL)
        return True

    async with world([FakeEngine(behave=flood)]) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port, limit=1024)
        body = orjson.dumps(STREAM)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await w.until(lambda: sent > 0)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 30_000_000, "stopped by back pressure, after the sockets' buffers"
        relay = next(iter(w.server.front.relays))
        assert relay.client_request.transport.get_write_buffer_size() < 2_000_000
        total = 0
        while b"[DONE]" not in (data := await reader.read(1 << 20)):
            total += len(data)
        assert total > 1600 * 65_000
        writer.close()


async def test_a_client_that_never_reads_is_cut_off() -> None:
    async def flood(_: FakeEngine, __: object, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(token("x" * 65_000)))
            await writer.drain()

    async with world([FakeEngine(behave=flood)], timeouts={"slow_client": 0.3}) as w:
        _, writer = await asyncio.open_connection("127.0.0.1", w.server.port, limit=1024)
        body = orjson.dumps(STREAM)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        await w.until(lambda: w.in_flight() == 1)
        await w.settled()
        writer.close()


async def test_connections_are_kept_on_both_sides() -> None:
    async with world(1) as w:
        for _ in range(5):
            assert (await w.post())[0] == 200
            assert (await w.post(STREAM))[0] == 200
        assert w.engines[0].used_connections == 1
        assert len(w.server.front.connections) == 1


async def test_a_kept_connection_that_the_engine_closes_is_no_failure() -> None:
    """An engine may close an idle connection just when it is used again."""

    async def once(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        if sum(r.connection == request.connection for r in engine.requests) > 1:
            return await reset(engine, request, writer)
        return await answer(engine, request, writer)

    async with world([FakeEngine(behave=once)]) as w:
        for _ in range(3):
            assert (await w.post())[0] == 200
        assert len(w.engines[0].requests) == 5
        assert w.server.fleet.models[0].router.stats()["retries"] == 0


async def test_bytes_that_nobody_asked_for_cost_the_connection() -> None:
    async def talkative(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await answer(engine, request, writer)
        await asyncio.sleep(0.05)
        writer.write(plain(200, {"choices": [], "from": "somebody else"}))
        return True

    async with world([FakeEngine(behave=talkative)]) as w:
        for _ in range(2):
            assert (await w.post())[2]["choices"]
            await asyncio.sleep(0.1)
        assert w.engines[0].used_connections == 2


async def test_an_answer_to_a_stalled_client_leaves_its_connection_usable() -> None:
    big = plain(200, {"choices": [{"text": "x" * 200_000, "finish_reason": "stop"}]})
    async with world([FakeEngine(behave=says(big, then="keep"))]) as w:
        _, writer = await asyncio.open_connection("127.0.0.1", w.server.port, limit=1024)
        front = w.server.front
        body = b'{"prompt": "a"}'
        for _ in range(200):
            if any(connection.writing_paused for connection in front.connections):
                break
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            asked = len(w.engines[0].requests) + 1
            await w.engines[0].asked(asked)
            await w.settled()
        else:
            raise AssertionError("never stalled")
        status, _, _ = await asyncio.wait_for(w.post(), PATIENCE_SECONDS)
        assert status == 200
        assert w.engines[0].used_connections == 1
        writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with world(1) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        for number in range(3):
            body = orjson.dumps({"prompt": "hi"})
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: r%d\r\n"
                b"content-length: %d\r\n\r\n%s" % (number, len(body), body)
            )
        writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        got = await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)
        places = [got.index(b"x-request-id: r%d" % number) for number in range(3)]
        assert places == sorted(places)
        assert got.count(b"HTTP/1.1 200") == 4
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", [b"", b"connection: keep-alive\r\n"])
async def test_http_1_0_clients_get_no_chunks(stream: bool, field: bytes) -> None:
    async with world(1) as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        body = orjson.dumps({"prompt": "hi", "stream": stream})
        line = b"POST /v1/completions HTTP/1.0\r\n%bcontent-length: %d\r\n\r\n" % (field, len(body))
        writer.write(line + body)
        head, _, payload = (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"connection: close" in head
        assert payload.startswith(token("a")) if stream else orjson.loads(payload)["id"] == "cmpl-1"
        writer.close()


async def test_every_framing_reaches_the_client() -> None:
    body = orjson.dumps({"choices": [{"text": "x" * 300_000, "finish_reason": "stop"}], "usage": usage()})
    head = HEAD % (200, JSON)
    framings = {
        "length": head + b"content-length: %d\r\n\r\n" % len(body) + body,
        "chunks": head
        + b"transfer-encoding: chunked\r\n\r\n"
        + chunk(body[:9])
        + chunk(body[9:])
        + b"0\r\n\r\n",
        "close": head + b"\r\n" + body,
    }
    async with world(1) as w:
        for name, whole in framings.items():
            w.engines[0].behave = says(whole[:100], whole[100:], then="close" if name == "close" else "keep")
            _, _, got = await w.post()
            assert orjson.dumps(got) == body, name


async def test_a_retry_comes_at_the_time_limit_of_the_fault() -> None:
    async with world(2, timeouts={"first_byte": 3600, "answer": 0.2}) as w:
        w.engines[0].behave = hang
        for _ in range(2):
            status, headers, _ = await w.post()
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        assert w.engines[0].left >= 1


async def test_interim_answers_and_comments_are_read_over() -> None:
    pieces = (
        b"HTTP/1.1 100 Continue\r\n\r\n",
        STREAM_HEAD,
        chunk(b": keep-alive\n\n"),
        chunk(token("a", "stop")),
    )
    async with world([FakeEngine(behave=says(*pieces, STREAM_TAIL, then="keep"))]) as w:
        _, _, got = await w.post(STREAM)
        assert got.startswith(token("a", "stop"))


async def test_official_shapes_through_aiohttp_clients_gzip() -> None:
    """A compressed body is decompressed and forwarded uncompressed."""
    import gzip

    body = gzip.compress(orjson.dumps({"prompt": "hello"}))
    async with world(1) as w:
        status, _, _ = await w.post(body, headers={"content-encoding": "gzip"})
        assert status == 200
        assert w.engines[0].requests[0].json == {"prompt": "hello"}
        assert "content-encoding" not in w.engines[0].requests[0].headers


async def test_many_at_once_leave_nothing_behind() -> None:
    async with world(4, timeouts=FAST["timeouts"]) as w:
        w.engines[1].behave = reset
        w.engines[2].behave = says(STREAM_HEAD + chunk(token("a")), then="reset")
        w.engines[3].pace = 0.005

        async def one(number: int) -> int:
            try:
                body = STREAM if number % 2 else None
                async with asyncio.timeout(0.02 if number % 7 == 0 else 10):
                    return (await w.post(body))[0]
            except (TimeoutError, aiohttp.ClientError):
                return -1

        codes = await asyncio.gather(*(one(number) for number in range(200)))
        await w.settled()
        assert codes.count(200) > 150
        stats = w.server.fleet.models[0].router.stats()
        assert stats["decisions"] >= stats["finished"] > 0
