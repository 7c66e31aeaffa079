"""Edge cases of the API: bad requests, unknown models and paths, limits, keys, own pages."""

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmetric._core import INTERNAL_FIELDS, BadRequestError, check_object
from lmetric.engines.handover import CHAT, COMPLETIONS
from lmetric.server.api.eligibility import split_ineligibility
from lmetric.server.api.errors import ApiError
from lmetric.server.api.paths import RELAYED
from lmetric.server.api.request import parse
from server_world import FakeEngine, answer, decision_id, hang, lora, plain, says, world
from token_folders import byte_level, write_folder
from waiting import PATIENCE_SECONDS

CHAT_BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "says_so", "param"),
    [
        (CHAT, b"", "not valid JSON", None),
        (CHAT, b'{"model": "tiny",\n "messages": [}', "line 2, column 15", None),
        (CHAT, b"[1]", "must be a JSON object, not a list", None),
        (CHAT, b'"\xff"', "not valid JSON", None),
        (CHAT, CHAT_BODY | {"model": 3}, "model must be a string, not the number 3", "model"),
        (
            CHAT,
            CHAT_BODY | {"vllm_xargs": {"kv_transfer_params": "x"}},
            "internal",
            "vllm_xargs.kv_transfer_params",
        ),
        ("/v1/embeddings", {"input": "x", "kv_transfer_params": None}, "internal", "kv_transfer_params"),
    ],
)
async def test_bad_bodies_are_told_apart(path: str, body: Any, says_so: str, param: str | None) -> None:
    async with world(1) as w:
        status, headers, got = await w.post(body, path, {"x-request-id": "r1"})
        error = got["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert says_so in error["message"]
        assert headers["x-request-id"] == "r1"
        assert not w.engines[0].requests


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAYS: dict[str, Any] = {"model": "tiny", "prompt": "a"}


JUDGED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"model": "tiny"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "hi"}),
    (CHAT, {"messages": [3]}),
    (CHAT, {"messages": [{"content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}),
    (CHAT, {"messages": [{"role": "user", "content": [3]}]}),
    (CHAT, CHAT_BODY | {"stream": "perhaps"}),
    (CHAT, CHAT_BODY | {"max_tokens": -1}),
    (CHAT, CHAT_BODY | {"max_tokens": 2.0}),
    (CHAT, CHAT_BODY | {"max_tokens": "2"}),
    (CHAT, CHAT_BODY | {"max_completion_tokens": 1.5}),
    (CHAT, CHAT_BODY | {"max_tokens": True}),
    (CHAT, CHAT_BODY | {"max_tokens": 10**15}),
    (CHAT, CHAT_BODY | {"cache_salt": ["a"]}),
    (CHAT, CHAT_BODY | {"vllm_xargs": []}),
    (CHAT, CHAT_BODY | {"stream_options": "x", "user": 3, "session_id": [], "priority": "x"}),
    ("/v1/chat/completions/batch", {"messages": {}}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"prompt": 3}),
    (COMPLETIONS, {"prompt": [1, -2]}),
    (COMPLETIONS, {"prompt": [1, 2**32]}),
    (COMPLETIONS, {"prompt": [1, "a"]}),
    (COMPLETIONS, {"prompt": [[1], "a"]}),
    (COMPLETIONS, {"prompt": ["a", 1]}),
    (COMPLETIONS, {"prompt": ["a"] * 10_001}),
    (COMPLETIONS, {"prompt": [None]}),
    (COMPLETIONS, {"prompt_embeds": "AAAA"}),
    (COMPLETIONS, {"prompt_embeds": "AAAA", "prompt": None}),
    (COMPLETIONS, {"prompt_embeds": ["AAAA"], "prompt": []}),
    ("/inference/v1/generate", {"token_ids": []}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": -1}}),
    (MESSAGES, {"messages": 3, "system": 4, "tools": 5}),
    (RESPONSES, {"input": 3, "instructions": 4, "tools": 5}),
    ("/v1/rerank", {"query": 3, "documents": {}}),
]


@pytest.mark.parametrize("tokenizer", [False, True])
async def test_what_the_engine_judges_reaches_it(
    tokenizer: bool, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Bugs 9, 23, 25: a field that is read for load or matching only never refuses a request."""
    settings: dict[str, Any] = {"tokenizer": str(write_folder(tmp_path, byte_level()))} if tokenizer else {}
    async with world(1, **settings) as w:
        for number, (path, body) in enumerate(JUDGED):
            with subtests.test(number=number, path=path):
                w.engines[0].requests.clear()
                status, _, _ = await w.post(body, path)
                assert status == 200
                (request,) = (each for each in w.engines[0].requests if each.path == path)
                assert request.json == request.json | body  # all that the client sent
                assert w.in_flight() == 0


def test_long_lists_are_bounded_by_the_bytes_of_the_body() -> None:
    """Bugs 23: LangChain's 1,000 texts of 1,000 IDs, long prompts, documents with two members."""
    texts = parse(RELAYED["/v1/embeddings"], orjson.dumps({"input": [[1] * 1000] * 1001}))
    assert texts.tokens is not None
    assert (len(texts.tokens), texts.more_tokens) == (1000, 1_000_000)
    prompts = parse(RELAYED[COMPLETIONS], orjson.dumps({"prompt": [[20_000] * 20_000] * 64}))
    assert prompts.more_tokens == 63 * 20_000
    documents = [{"text": "word " * 40, "id": number} for number in range(30_000)]
    ranked = parse(RELAYED["/v1/rerank"], orjson.dumps({"query": "query", "documents": documents}))
    assert ranked.more_bytes == 29_999 * (5 + 200)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
async def test_bodies_pass_in_the_encodings_that_engines_read(encoding: str, path: str) -> None:
    """Bugs 34: a byte order mark, UTF-16 and UTF-32."""
    body = {"model": "tiny", "prompt": "é🙂", "input": "é🙂"}
    async with world(1) as w:
        assert (await w.post(json.dumps(body, ensure_ascii=False).encode(encoding), path))[0] == 200
        got = w.engines[0].requests[-1].json
        assert {name: got[name] for name in body} == body


@pytest.mark.parametrize(
    ("value", "streams"),
    [(True, True), (1, True), ("true", True), ("On", True), (0, False), ("false", False), (None, False)],
)
async def test_stream_is_read_as_engines_read_it(value: Any, streams: bool) -> None:
    """Bugs 25: numbers and texts for `stream`."""
    assert parse(RELAYED[COMPLETIONS], orjson.dumps(SAYS | {"stream": value})).stream is streams


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"stream": "false"}, "stream"),
        ({"stream_options": "x"}, "stream_options"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "2"}, "max_completion_tokens"),
    ],
)
def test_spellings_that_only_engines_read_keep_a_request_on_one_engine(fields: Any, says: str) -> None:
    """Bugs 25: segments and resumed streams need limits that the router reads as engines do."""
    why = split_ineligibility(CHAT, CHAT_BODY | {"max_tokens": 9} | fields, tokens=True)
    assert why is not None
    assert f"({says})" in why


def test_fields_that_are_null_or_of_other_types_count_as_absent() -> None:
    nothing = dict.fromkeys(("model", "stream", "cache_salt", "vllm_xargs", "user", "max_tokens"))
    call = parse(RELAYED[CHAT], orjson.dumps(CHAT_BODY | nothing))
    assert (call.model, call.stream, call.salt, call.session, call.max_tokens) == (
        None,
        False,
        None,
        None,
        None,
    )
    call = parse(
        RELAYED[COMPLETIONS],
        orjson.dumps({"prompt": ["a", "bc"], "user": 3, "n": {}, "max_output_tokens": 7}),
    )
    assert (call.text, call.more_bytes, call.session, call.max_tokens) == (b"a", 2, None, 7)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
_BROKEN = st.sampled_from(
    [b"", b'"', b"\\", b"\\u12", b"\\ud800", b"\xff", b"\x00", b",", b"{", b"]", b"-", b"1e999", b" "]
)


@given(st.dictionaries(st.text(), _VALUES, max_size=4), st.booleans(), st.floats(0, 1), _BROKEN)
def test_what_is_read_in_rust_can_be_read_in_python_and_the_reverse(
    fields: dict[str, Any], ascii_only: bool, where: float, broken: bytes
) -> None:
    whole = json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    at = int(where * len(whole))
    for body in (whole, whole[:at] + broken + whole[at:], whole[:at] + broken + whole[at + 1 :]):
        try:
            good = type(orjson.loads(body)) is dict
        except orjson.JSONDecodeError:
            good = False
        if good:
            check_object(body)
        else:
            with pytest.raises(BadRequestError):
                check_object(body)


@pytest.mark.parametrize("name", sorted(INTERNAL_FIELDS))
def test_no_internal_field_reaches_an_engine(name: str) -> None:
    for path in RELAYED.values():
        if path.prompt == "form":
            continue  # tests/test_server_audio.py
        with pytest.raises(ApiError, match=name):
            parse(
                path, orjson.dumps({"prompt": "a", "messages": [{"role": "user", "content": ""}], name: {}})
            )


@pytest.mark.parametrize("name", ["lora_path", "lora_id"])
def test_adapters_are_named_by_model_alone(name: str) -> None:
    """Security: SGLang serves the adapter of `lora_path`, whatever `model` says."""
    for path in RELAYED.values():
        if path.prompt != "form":
            body = {"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": ""}]}
            for value in ("private", ["private", None]):
                with pytest.raises(ApiError, match=f"{name} is internal") as refused:
                    parse(path, orjson.dumps({**body, name: value}))
                assert refused.value.status == 400
            assert parse(path, orjson.dumps({**body, name: None})).model == "tiny"


def test_prompt_keys_share_prefixes_exactly_where_prompts_do() -> None:
    def key(*messages: dict[str, Any], **more: Any) -> str:
        text = parse(RELAYED[CHAT], orjson.dumps({"messages": messages, **more})).text
        assert text is not None
        return text.decode()

    system, one = {"role": "system", "content": "be"}, {"role": "user", "content": "hello"}
    reply = {"role": "assistant", "content": "yes"}
    assert key(system, one, reply, one).startswith(key(system, one))
    assert key(system, one) != key(system | {"role": "user"}, one)
    assert key(one, tools=[{"type": "function"}]) != key(one)
    parts = [
        {"type": "text", "text": "hello"},
        {"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}},
    ]
    image = key({"role": "user", "content": parts})
    assert len(image) < 200
    assert image.startswith(key(one))
    parts[1]["image_url"] = {"url": "data:" + "B" * 9999}
    assert key({"role": "user", "content": parts}) != image
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert key(call) != key(call | {"tool_calls": [{"id": "2"}]})
    assert parse(RELAYED[COMPLETIONS], b'{"prompt": [1, 2, 3]}').tokens.tolist() == [1, 2, 3]
    batch = parse(RELAYED[COMPLETIONS], b'{"prompt": [[1, 2], [3, 4, 5]]}')
    assert (list(batch.tokens), batch.more_tokens) == ([1, 2], 3)


async def test_models() -> None:
    engines = [FakeEngine(cards=[{"id": "tiny"}, lora("sql")]), FakeEngine(model="other")]
    for number, engine in enumerate(engines):
        engine.name = f"e{number}"
        await engine.start()
    models = [
        {"name": "tiny", "engines": [{"url": engines[0].url, "name": "e0"}], "adapters": ["sql"]},
        {"name": "other", "engines": [{"url": engines[1].url, "name": "e1"}], "policy": "bs"},
    ]
    async with world([], models=models) as w:
        cards = orjson.loads((await w.get("/v1/models"))[1])["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("sql", "tiny"),
            ("other", None),
        ]
        assert orjson.loads((await w.get("/v1/models/sql"))[1])["parent"] == "tiny"
        for model, instance in (("tiny", "e0"), ("sql", "e0"), ("other", "e1")):
            _, headers, _ = await w.post({"model": model, "prompt": "x" * 600})
            assert headers["x-lmetric-instance"] == instance
        assert headers["x-lmetric-decision"].startswith("1-")
        record = orjson.loads((await w.get("/debug/decisions/" + headers["x-lmetric-decision"]))[1])
        assert (record["model"], record["policy"]) == ("other", "expression")
        status, _, got = await w.post({"model": "othr", "prompt": "x"})
        assert (status, got["error"]["code"]) == (404, "model_not_found")
        assert "'other'" in got["error"]["message"]
        status, _, got = await w.post({"prompt": "x"})
        assert (status, got["error"]["param"]) == (400, "model")
    for engine in engines:
        await engine.stop()


async def test_engines_tell_their_models_also_late() -> None:
    late = FakeEngine(model="late")
    await late.start()
    await late.stop()
    async with world(1, health={"interval": 0.05}, engines=[{"url": late.url, "name": "late"}]) as w:
        assert (await w.get("/ready"))[0] == 503
        status, _, got = await w.post()
        assert (status, got["error"]["code"]) == (503, "no_engine")
        await late.start()
        await w.until(w.server.fleet.ready)
        assert (await w.post({"model": "late", "prompt": "a"}))[0] == 200
    await late.stop()


async def test_adapters_and_salts_never_share_a_prefix() -> None:
    fakes = [FakeEngine(cards=[{"id": "tiny"}, lora("sql")])]
    async with world(fakes, models=[], policy="lmetric", model="tiny") as w:
        prompt = "x" * 4096
        hits = []
        for body in (
            {"model": "tiny"},
            {"model": "tiny"},
            {"model": "sql"},
            {"model": "tiny", "cache_salt": "s"},
        ):
            _, headers, _ = await w.post(body | {"prompt": prompt})
            record = w.server.fleet.models[0].router.explain(decision_id(headers))
            hits.append(record["predicted_cached_tokens"] > 0)
        assert hits == [False, True, False, False]


async def test_paths_and_methods() -> None:
    async with world(1, paths=["/v1/own"]) as w:
        for path, body in (
            ("/v1/embeddings", {"input": ["a", "b"]}),
            ("/v1/responses", {"input": "a", "instructions": "b"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "system": "s"}),
            ("/tokenize", {"prompt": "a"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/own?x=1", {}),
        ):
            status, headers, _ = await w.post({"model": "tiny", **body}, path)
            assert status == 200, path
            assert headers["x-lmetric-instance"] == "e0"
            assert w.engines[0].requests[-1].path == path
        status, _, got = await w.post(path="/chat/completions")
        assert (status, got["error"]["code"]) == (404, "unknown_path")
        assert "/v1/chat/completions" in got["error"]["message"]
        for method, path, allow in (
            ("GET", CHAT, "POST"),
            ("PUT", "/v1/models", "GET"),
            ("POST", "/health", "GET"),
        ):
            async with w.client.request(method, w.url + path) as response:
                assert (response.status, response.headers["allow"][: len(allow)]) == (405, allow)
                assert "not allowed" in (await response.json())["error"]["message"]
        async with w.client.get(w.url + "/nowhere") as response:
            assert response.status == 404


async def test_body_limits() -> None:
    async with world(1, limits={"max_body_bytes": 1000}, timeouts={"body": 0.3}) as w:
        status, _, got = await w.post({"prompt": "x" * 1000})
        assert (status, got["error"]["code"]) == (413, "body_too_large")
        assert (await w.post({"prompt": "x" * 900}))[0] == 200

        async def pieces() -> Any:
            for _ in range(50):
                yield b" " * 100

        async with w.client.post(w.url + COMPLETIONS, data=pieces()) as response:
            assert response.status == 413
        import gzip

        bomb = gzip.compress(b" " * 10_000_000)
        assert (await w.post(bomb[:900], headers={"content-encoding": "gzip"}))[0] in (400, 413)
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        body = b'{"prompt":"a"}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        assert (
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
            == b"HTTP/1.1 100 Continue\r\n\r\n"
        )
        writer.write(body)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()
        # HTTP/1.0 does not have the status 100.
        reader, writer = await asyncio.open_connection("127.0.0.1", w.server.port)
        writer.write(
            b"POST /v1/completions HTTP/1.0\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        await asyncio.sleep(0.1)
        writer.write(body)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), PATIENCE_SECONDS)
        writer.close()
        assert len(w.engines[0].requests) == 3


async def test_concurrency_and_connection_limits() -> None:
    async with world(
        [FakeEngine(behave=hang)], limits={"max_concurrent_requests": 2, "max_client_share": 1.0}
    ) as w:
        tasks = [asyncio.create_task(w.post()) for _ in range(2)]
        await w.until(lambda: w.in_flight() == 2)
        status, headers, got = await w.post()
        assert (status, headers["retry-after"], got["error"]["code"]) == (503, "1", "too_many")
        for task in tasks:
            task.cancel()
    async with world(2, limits={"max_connections_per_engine": 1}) as w:
        w.engines[0].behave = w.engines[1].behave = hang
        tasks = [asyncio.create_task(w.post()) for _ in range(2)]
        await w.until(lambda: len(w.engines[0].requests) + len(w.engines[1].requests) == 2)
        assert [len(engine.requests) for engine in w.engines] == [1, 1]
        status, _, got = await w.post()
        assert status == 503
        assert "all 1 connections" in got["error"]["message"]
        for task in tasks:
            task.cancel()


async def test_keys_and_tenants(tmp_path: Path) -> None:
    import hashlib

    keys = tmp_path / "keys.yaml"
    keys.write_text(f"sk-a: team-a\nsha256:{hashlib.sha256(b'sk-b').hexdigest()}: team-b\n")
    async with world(1, auth={"keys_file": str(keys)}, admin={"enabled": True, "token": "root"}) as w:
        for headers in (None, {"authorization": "Bearer sk-c"}, {"authorization": "Basic sk-a"}):
            status, _, got = await w.post(headers=headers)
            assert (status, got["error"]["type"]) == (401, "authentication_error")
        for path in (
            "/v1/models",
            "/debug/engines",
            "/debug/decisions/0",
            "/debug/indicators",
            "/admin/engines",
        ):
            assert (await w.get(path))[0] == 401, path
        for path in ("/health", "/ready", "/metrics"):
            assert (await w.get(path))[0] == 200, path
        assert (await w.post(headers={"authorization": "Bearer sk-a"}))[0] == 200
        assert (await w.post(headers={"x-api-key": "sk-b"}))[0] == 200
        assert not {"authorization", "x-api-key"} & w.engines[0].requests[0].headers.keys()
        text = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_requests_total{code="200",model="tiny",tenant="team-a"} 1.0' in text
        assert 'tenant="team-b"} 1.0' in text
        assert (await w.get("/v1/models", {"authorization": "bearer sk-a"}))[0] == 200
    async with world(1) as w:
        await w.post(headers={"authorization": "Bearer theirs"})
        assert w.engines[0].requests[0].headers["authorization"] == "Bearer theirs"


async def test_own_pages() -> None:
    async with world(2, policy="lmetric") as w:
        w.engines[0].behave = w.engines[1].behave = answer
        await w.post({"prompt": "x" * 3000, "stream": True})
        await w.post({"prompt": "x" * 3000})
        text = (await w.get("/metrics"))[1].decode()
        for line in (
            'lmetric_requests_total{code="200",model="tiny",tenant=""} 2.0',
            'lmetric_decisions_total{model="tiny"} 2.0',
            'lmetric_time_to_first_token_seconds_count{model="tiny",slo_class=""} 1.0',
            'lmetric_request_seconds_count{model="tiny",slo_class=""} 2.0',
            'lmetric_instance_healthy{instance="e0",model="tiny"} 1.0',
            'lmetric_instance_predicted_ttft_source{instance="e0",model="tiny",source="',
        ):
            assert line in text, line
        assert "_created" not in text
        engines = orjson.loads((await w.get("/debug/engines"))[1])
        assert [(e["name"], e["healthy"], e["model"]) for e in engines] == [
            ("e0", True, "tiny"),
            ("e1", True, "tiny"),
        ]
        indicators = orjson.loads((await w.get("/debug/indicators"))[1])
        assert {"bs", "q_bs", "r_bs"} <= indicators["tiny"]["e0"].keys()
        for bad in ("x", "0-", "-1", "99999999999999999999999", "²"):
            assert (await w.get(f"/debug/decisions/{bad}"))[0] in (400, 404), bad
        assert (await w.get("/debug/decisions/12345-0123456789abcdef"))[0] == 404


async def test_unhealthy_engines_get_nothing_and_come_back() -> None:
    async with world(2, health={"interval": 0.03, "down_after": 2}) as w:
        w.engines[0].health = 503
        engine = w.server.fleet.models[0].engines["e0"]
        await w.until(lambda: not engine.healthy)
        for _ in range(4):
            assert (await w.post())[1]["x-lmetric-instance"] == "e1"
        w.engines[1].health = 500
        await w.until(lambda: not w.server.fleet.ready())
        assert (await w.get("/ready"))[0] == 503
        assert (await w.get("/health"))[0] == 200
        assert (await w.post())[0] == 503
        w.engines[0].health = 200
        await w.until(lambda: engine.healthy)
        assert (await w.get("/ready"))[0] == 200
        assert (await w.post())[1]["x-lmetric-instance"] == "e0"


async def test_admin(tmp_path: Path) -> None:
    extra = FakeEngine(name="extra")
    await extra.start()
    async with world(1) as w:
        assert (await w.post({"on": True}, "/admin/guard"))[0] == 403
    async with world(1, admin=True, health={"interval": 0.03}) as w:
        status, _, got = await w.post({"url": extra.url, "name": "extra"}, "/admin/engines")
        assert (status, got["model"]) == (200, None)
        assert (await w.post({"url": extra.url, "name": "extra"}, "/admin/engines"))[0] == 409
        assert (await w.post({"url": "ftp://x"}, "/admin/engines"))[0] == 400
        assert (await w.post({"uri": extra.url}, "/admin/engines"))[2]["error"]["param"] == "uri"
        await w.until(lambda: "extra" in w.server.fleet.models[0].engines)
        assert (await w.post({}, "/admin/engines/e0/drain"))[2]["draining"] is True
        for _ in range(3):
            assert (await w.post())[1]["x-lmetric-instance"] == "extra"
        async with w.client.delete(w.url + "/admin/engines/extra") as response:
            assert response.status == 200
        assert (await w.post())[0] == 503
        assert (await w.post({}, "/admin/engines/e0/undrain"))[0] == 200
        assert (await w.post())[1]["x-lmetric-instance"] == "e0"
        assert (await w.post({"on": False}, "/admin/guard"))[2] == {"guard": False}
        assert (await w.post({}, "/admin/engines/nobody/drain"))[0] == 404
    await extra.stop()


async def test_load_reports_reach_the_indicators() -> None:
    load = b'# TYPE x gauge\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{a="}"} 2\n'
    async with world([FakeEngine(metrics=load)], load={"interval": 0.03}, policy="lmetric") as w:
        model = w.server.fleet.models[0]
        await w.until(lambda: model.router.indicators()["bs"][0] == 5)
        gauges = b"named_metrics.num_requests_waiting=7.0, named_metrics.kv_cache_usage_perc=0.5"
        header = b"endpoint-load-metrics: TEXT %s\r\n" % gauges
        w.engines[0].behave = says(plain(200, {"choices": []}, header), then="keep")
        w.engines[0].metrics = b""
        _, headers, _ = await w.post()
        assert w.engines[0].requests[0].headers["endpoint-load-metrics-format"] == "TEXT"
        assert "endpoint-load-metrics" not in headers
        assert model.router.indicators()["kv_usage"][0] == 0.5


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/inference/v1/generate"]
)
async def test_engines_get_the_session_where_they_read_it(path: str) -> None:
    """vLLM reads the header on every path, but the field of the body only on some."""
    prompt: dict[str, Any] = {
        CHAT: CHAT_BODY,
        COMPLETIONS: {"prompt": "hello"},
        "/v1/responses": {"input": "hello", "store": False},
        "/v1/messages": {"messages": CHAT_BODY["messages"], "max_tokens": 4},
        "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {}},
    }[path]
    async with world(1) as w:
        for given, headers, sent in (
            ({}, {"x-session-id": "s1"}, "s1"),
            ({"session_id": "s2"}, {}, "s2"),
            ({"session_id": "s3"}, {"x-session-id": "s1"}, "s1"),  # the engine prefers its own order
            ({"session_id": ""}, {}, None),
            ({"session_id": 7}, {}, None),
            ({"session_id": "two words"}, {}, None),
            ({"session_id": "x\r\nx-tenant: other"}, {}, None),
            ({"session_id": "é"}, {}, None),
            ({}, {}, None),
        ):
            body = {"model": "tiny", **prompt, **given}
            await w.post(body, path=path, headers=headers)
            got = w.engines[0].requests[-1]
            assert got.headers.get("x-session-id") == sent, (given, headers)
            assert got.json.get("session_id") == given.get("session_id"), "the body is unchanged"


async def test_sessions_stay_together() -> None:
    async with world(4, policy="session_affinity") as w:
        for headers, body in (
            ({"x-session-id": "s1"}, {}),
            ({}, {"user": "u1"}),
            ({}, {"session_id": "b1"}),
            ({}, {"vllm_xargs": {"session_id": "x1"}}),
        ):
            places = {
                (await w.post({"prompt": str(n), **body}, headers=headers))[1]["x-lmetric-instance"]
                for n in range(8)
            }
            assert len(places) == 1
        spread = {
            (await w.post(headers={"x-session-id": f"s{n}"}))[1]["x-lmetric-instance"] for n in range(40)
        }
        assert len(spread) > 1


async def test_the_ratio_of_bytes_to_tokens_is_learned() -> None:
    body = {"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": 1}}
    async with world([FakeEngine(behave=says(plain(200, body), then="keep"))]) as w:
        model = w.server.fleet.models[0]
        before = model.ratio.tokens_of(8000)
        for _ in range(30):
            await w.post({"prompt": "x" * 8000})
        assert before == 2001
        assert model.ratio.tokens_of(8000) == pytest.approx(1000, rel=0.1)
