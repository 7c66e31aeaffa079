"""Prefill and decode through the server, with vLLM's NIXL protocol of the emulated engines."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson
import pytest

from lmetric_lab.emulated import EngineOptions, EngineServer
from pd_world import BODY, PROMPT, nixl, pd
from server_world import Behaviour, FakeEngine, Request, answer, decision_id, plain, says, usage, world

TWO_AND_TWO = [nixl("prefill"), nixl("prefill"), nixl("decode"), nixl("decode")]


@pytest.mark.parametrize("binding", ["early", "late"])
async def test_the_answer_is_one_engines(binding: str) -> None:
    async with pd(*TWO_AND_TWO, binding=binding, policy="round_robin") as w:
        model = w.server.fleet.models[0]
        assert {name: engine.role for name, engine in model.engines.items()} == {
            "p0": "prefill",
            "p1": "prefill",
            "d0": "decode",
            "d1": "decode",
        }
        alone = await w.alone()
        for _ in range(2):
            status, headers, said = await w.post()
            assert (status, said["choices"][0]["text"]) == (200, alone)
            assert headers["x-lmetric-prefill"][0] == "p"
            assert headers["x-lmetric-instance"][0] == "d"
            assert said["usage"]["completion_tokens"] == 20
            assert "kv_transfer_params" not in said or said["kv_transfer_params"] is None
            record = model.router.explain(decision_id(headers))
            assert record is not None
            assert (record["outcome"], record["instance"]) == ("finished", headers["x-lmetric-prefill"])
            assert await w.stream() == alone
        # Decode engines compute no prompt, and prefill engines produce one token each.
        pulled = sum(w.load(name)["fetched_prompt_tokens"] for name in ("d0", "d1"))
        assert pulled > 0
        assert sum(w.load(name)["generation_tokens"] for name in ("p0", "p1")) == 4
        assert sum(w.load(name)["generation_tokens"] for name in ("d0", "d1")) == 80
        assert w.outcomes == {"transferred": 4}
        chat = {"model": "emulated", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5}
        status, headers, said = await w.post(chat, "/v1/chat/completions")
        assert (status, said["usage"]["completion_tokens"]) == (200, 5)
        assert w.outcomes == {"transferred": 5}
        page = (await (await w.client.get(f"{w.url}/metrics")).text()).splitlines()
        assert 'lmetric_kv_transfers_total{model="emulated",outcome="transferred"} 5.0' in page


async def test_many_at_once() -> None:
    async with pd(*TWO_AND_TWO) as w:
        prompts = [f"{number} {PROMPT}" for number in range(20)]
        alone = await asyncio.gather(*(w.alone(BODY | {"prompt": prompt}) for prompt in prompts[:3]))
        texts = await asyncio.gather(
            *((w.stream if n % 2 else w.text)(BODY | {"prompt": prompt}) for n, prompt in enumerate(prompts))
        )
        assert texts[:3] == alone
        assert w.outcomes == {"transferred": 20}


async def test_what_is_late_is_computed_again() -> None:
    late = [nixl("prefill", kv_lease_seconds=0.05), nixl("decode", kv_load_failure_policy="recompute")]
    async with pd(*late, handover_seconds=1e-9) as w:
        assert await w.text() == await w.alone()
        assert w.outcomes == {"late": 1}
        assert w.load("d0")["fetched_prompt_tokens"] == 0
        # With a longer trusted time, the answer would have been wrong without notice.
        engine = w.server.fleet.models[0].engines["p0"]
        assert engine.connector is not None
        assert engine.handover is not None
        assert engine.connector.deadline_seconds(engine.handover) == pytest.approx(0.05 * 2 / 3)


@pytest.mark.parametrize(
    ("change", "path"),
    [({"n": 1, "prompt": ["a b c"]}, "transferred"), ({"prompt_logprobs": None}, "transferred")],
)
async def test_what_can_be_cut(change: dict[str, Any], path: str) -> None:
    async with pd(nixl("prefill"), nixl("decode")) as w:
        status, _, _ = await w.post(BODY | change)
        assert status == 200
        assert w.outcomes == {path: 1}


NIXL_PAGE = b'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'


def second(params: Any) -> Any:
    """Returns the behavior of a prefill engine with these transfer parameters."""

    async def behave(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(200, {"choices": [], "usage": usage(cached=4), "kv_transfer_params": params}))
        return True

    return behave


PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(1, 100))],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_num_tokens": 10,
}


async def fakes(*engines: FakeEngine) -> list[dict[str, Any]]:
    """Starts engines and returns their configuration: the first prefills, the others decode."""
    given = []
    for number, engine in enumerate(engines):
        engine.name, engine.metrics = f"e{number}", NIXL_PAGE
        await engine.start()
        role = "decode" if number else "prefill"
        given.append({"url": engine.url, "name": engine.name, "role": role})
    return given


@pytest.mark.parametrize(
    ("params", "outcome"),
    [(None, "missing"), ({"do_remote_prefill": True}, "missing"), (PARAMS, "transferred")],
)
async def test_what_the_second_leg_is_sent(params: Any, outcome: str) -> None:
    prefill, decode = FakeEngine(behave=second(params)), FakeEngine()
    async with world([], engines=await fakes(prefill, decode)) as w:
        raw = b'{"model": "tiny", "prompt": "hello",  "stream": true, "max_tokens": 7, "odd": 1.500}'
        status, headers, _ = await w.post(raw, headers={"x-request-id": "rid-1"})
        assert (status, headers["x-lmetric-instance"]) == (200, "e1")
        (first,), (then,) = prefill.requests, decode.requests
        assert (first.json["max_tokens"], first.json["stream"]) == (1, False)
        assert first.json["kv_transfer_params"]["do_remote_decode"] is True
        assert {sent.headers["x-request-id"] for sent in (first, then)} == {"rid-1"}
        assert then.body.endswith(raw[1:])
        assert then.json.get("kv_transfer_params") == (params if outcome == "transferred" else None)
        assert dict(w.server.fleet.models[0].kv_transfers) == {outcome: 1}
        # The client's own fields would kill an engine.
        status, _, said = await w.post({"model": "tiny", "prompt": "a", "kv_transfer_params": PARAMS})
        assert (status, said["error"]["param"]) == (400, "kv_transfer_params")
    for engine in (prefill, decode):
        await engine.stop()


async def test_what_was_sent_once_is_not_sent_again() -> None:
    async def busy(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(503, {"error": {"message": "busy"}}))
        return True

    prefill, bad, good = FakeEngine(behave=second(PARAMS)), FakeEngine(behave=busy), FakeEngine()
    engines = await fakes(prefill, bad, good)
    async with world([], engines=engines, decode_policy="round_robin") as w:
        while not bad.requests:
            status, headers, _ = await w.post()
            assert (status, headers["x-lmetric-instance"]) == (200, "e2")
        assert "kv_transfer_params" in bad.requests[0].json
        assert "kv_transfer_params" not in good.requests[-1].json
        assert w.server.fleet.models[0].kv_transfers["spent"] == 1
        # An unreachable engine has fetched nothing.
        await bad.stop()
        before = len(good.requests)
        for _ in range(2):
            status, _, _ = await w.post()
            assert status == 200
        assert all("kv_transfer_params" in request.json for request in good.requests[before:])
    for engine in (prefill, good):
        await engine.stop()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_transfer_that_breaks_costs_no_answer(streamed: bool) -> None:
    prefill = FakeEngine(behave=second(PARAMS), model="emulated")
    (config,) = await fakes(prefill)
    async with EngineServer(nixl("decode")) as decode:
        engines = [config, {"url": decode.url, "name": "d", "role": "decode"}]
        async with world([], engines=engines, model="emulated") as w:
            body = {"model": "emulated", "prompt": PROMPT, "max_tokens": 3, "stream": streamed}
            status, headers, _ = await w.post(body)
            assert (status, headers["x-lmetric-instance"]) == (200, "d")
            assert dict(w.server.fleet.models[0].kv_transfers) == {"transferred": 1, "broken": 1}
    await prefill.stop()


async def test_the_prefill_engines_own_refusal_is_the_clients() -> None:
    async with pd(nixl("prefill"), nixl("decode")) as w:
        status, _, said = await w.post(BODY | {"prompt": [1] * 12_000_000})
        assert status in (400, 413)
    async with pd(nixl("prefill", max_model_len=64), nixl("decode")) as w:
        status, headers, said = await w.post()
        assert (status, said["error"]["type"]) == (400, "BadRequestError")
        assert "maximum context length is 64" in said["error"]["message"]
        assert headers["x-request-id"]


async def test_an_engine_of_either_kind_dies() -> None:
    async with pd(*TWO_AND_TWO, policy="round_robin", decode_policy="round_robin") as w:
        alone = await w.alone()
        await w.kill("p0")
        assert [await w.text() for _ in range(3)] == [alone] * 3
        await w.kill("d1")
        assert [await w.text() for _ in range(3)] == [alone] * 3
        # Without prefill engines, decode engines serve whole requests, and the other way round.
        await w.kill("p1")
        status, headers, said = await w.post()
        assert (status, headers["x-lmetric-instance"], said["choices"][0]["text"]) == (200, "d0", alone)
        assert "x-lmetric-prefill" not in headers
    async with pd(nixl("prefill"), nixl("decode")) as w:
        await w.kill("d0")
        for _ in range(2):
            status, headers, said = await w.post()
            assert (status, headers["x-lmetric-instance"], said["choices"][0]["text"]) == (200, "p0", alone)
    async with pd(nixl("prefill"), nixl("decode"), colocate=False) as w:
        await w.kill("d0")
        for _ in range(2):
            status, _, said = await w.post()
            assert (status, said["error"]["type"]) in ((502, "server_error"), (503, "overloaded_error"))
        await w.until(lambda: not w.server.fleet.models[0].engines["d0"].healthy)
        status, _, said = await w.post()
        assert (status, said["error"]["code"]) == (503, "no_engine")
        assert "role decode" in said["error"]["message"]


async def test_a_decode_engine_dies_in_mid_stream() -> None:
    slow = [nixl("prefill"), nixl("decode", clock_speed=1.0), nixl("decode", clock_speed=1.0)]
    async with pd(*slow) as w:
        streams = [
            asyncio.create_task(w.stream(BODY | {"prompt": f"{n} {PROMPT}", "max_tokens": 200}))
            for n in range(4)
        ]
        await w.until(
            lambda: w.load("d0")["generation_tokens"] > 10 and w.load("d1")["generation_tokens"] > 10
        )
        await w.kill("d0")
        ends = await asyncio.gather(*streams)
        assert sorted(end.endswith("<reset>") for end in ends) == [False, False, True, True]
        assert await w.text() == await w.alone()


async def test_a_client_that_leaves() -> None:
    slow = [nixl("prefill", clock_speed=0.05), nixl("decode", clock_speed=0.5)]
    async with pd(*slow) as w:
        for name in ("p0", "d0"):
            asking = asyncio.create_task(w.stream(BODY | {"max_tokens": 500}))
            await w.until(lambda name=name: w.busy(name) == 1)
            w.pace("d0", 0.02)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await w.until(lambda: w.busy("p0") + w.busy("d0") == 0)
            await w.until(lambda: w.in_flight() == 0)
        nixl_side = w.engines["p0"]._api._nixl  # type: ignore[union-attr]
        assert nixl_side.holding == 0  # the second engine's cache was fetched


async def test_a_first_leg_that_takes_too_long() -> None:
    slow = [nixl("prefill", clock_speed=0.001), nixl("decode")]
    async with pd(*slow, timeouts={"first_byte": 0.2}) as w:
        status, headers, said = await w.post()
        # The only prefill engine failed the request; decode engines may serve all of it.
        assert (status, headers["x-lmetric-instance"]) == (200, "d0")
        await w.until(lambda: w.busy("p0") == 0)
    async with pd(*slow, timeouts={"first_byte": 0.2}, colocate=False) as w:
        status, _, said = await w.post()
        assert (status, said["error"]["code"]) == (504, "timeout")


async def test_an_engine_without_a_connector_is_found_at_the_start() -> None:
    plain_engine = EngineOptions(port=0, clock_speed=10.0)
    given = {"b0": "prefill"}
    async with pd(plain_engine, nixl("prefill"), nixl("decode"), roles=given) as w:
        engines = w.server.fleet.models[0].engines
        assert not engines["b0"].healthy
        assert "--kv-connector nixl" in str(engines["b0"].last_error)
        for _ in range(3):
            status, headers, _ = await w.post()
            assert (status, headers["x-lmetric-prefill"]) == (200, "p0")
        shown = await (await w.client.get(f"{w.url}/debug/engines")).json()
        assert {each["name"]: each["role"] for each in shown} == {
            "b0": "prefill",
            "p0": "prefill",
            "d0": "decode",
        }
        assert "role prefill" in shown[0]["unfit"]


async def test_roles_change_while_it_runs() -> None:
    async with pd(nixl("both"), nixl("both"), nixl("both"), admin=True) as w:
        alone = await w.alone()
        status, headers, _ = await w.post()
        assert "x-lmetric-prefill" not in headers

        async def switch(name: str, role: str, **more: Any) -> tuple[int, Any]:
            url = f"{w.url}/admin/engines/{name}/role"
            async with w.client.post(url, json={"role": role, **more}) as response:
                return response.status, await response.json()

        for name, role in (("b0", "prefill"), ("b1", "decode"), ("b2", "decode")):
            status, shown = await switch(name, role, drain=5)
            assert (status, shown["role"], shown["draining"]) == (200, role, False)
        status, headers, said = await w.post()
        assert (headers["x-lmetric-prefill"], said["choices"][0]["text"]) == ("b0", alone)
        # Drained first: running requests end on the engine.
        running = asyncio.create_task(w.stream(BODY | {"max_tokens": 300}))
        await w.until(lambda: w.busy("b1") + w.busy("b2") == 1)
        name = "b1" if w.busy("b1") else "b2"
        status, shown = await switch(name, "both", drain=20)
        assert (status, shown["role"], shown["running"]) == (200, "both", 0)
        assert "<" not in await running
        for body in ({"role": "nobody"}, {}, {"role": "both", "drain": -1}, {"role": "both", "more": 1}):
            async with w.client.post(f"{w.url}/admin/engines/{name}/role", json=body) as response:
                assert response.status == 400
    async with pd(EngineOptions(port=0), admin=True) as w:
        url = f"{w.url}/admin/engines/b0/role"
        async with w.client.post(url, json={"role": "decode"}) as response:
            assert response.status == 409
            assert "--kv-connector nixl" in (await response.json())["error"]["message"]
        assert (await w.post())[0] == 200  # it continues unchanged


async def test_requests_that_cannot_be_cut() -> None:
    prefill, decode = FakeEngine(behave=second(PARAMS)), FakeEngine(behave=answer)
    async with world([], engines=await fakes(prefill, decode)) as w:
        for body, path in (
            ({"model": "tiny", "prompt": "a", "n": 2}, "/v1/completions"),
            ({"model": "tiny", "input": "a"}, "/v1/embeddings"),
        ):
            status, headers, _ = await w.post(body, path)
            assert (status, headers["x-lmetric-instance"]) == (200, "e1")
            assert "x-lmetric-prefill" not in headers  # no other engine has computed tokens
        assert (len(prefill.requests), w.server.fleet.models[0].kv_transfers["not_cut"]) == (0, 2)
    for engine in (prefill, decode):
        await engine.stop()


async def test_slow_clients_and_the_stop_of_the_server() -> None:
    slow = [nixl("prefill", clock_speed=0.02), nixl("decode")]
    async with pd(*slow) as w:
        asking = asyncio.create_task(w.post())
        await w.until(lambda: w.busy("p0") == 1)
        for relay in list(w.server.front.relays):
            relay.stop()
        status, _, said = await asking
        assert (status, said["error"]["type"]) == (503, "overloaded_error")


def development(role: str) -> tuple[int, bytes]:
    """vLLM's report in development mode: NIXL, by which the decode engine keeps its cache, too."""
    extra = {"kv_lease_duration": 30.0, "bidirectional_kv_xfer": True}
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return 200, orjson.dumps({"vllm_config": {"kv_transfer_config": transfer}})


def bidirectional(prefill: Behaviour, *decodes: Behaviour) -> list[FakeEngine]:
    """A prefill engine and decode engines that keep their cache."""
    roles = ["kv_producer", *["kv_consumer"] * len(decodes)]
    return [
        FakeEngine(
            behave=behave,
            metrics=NIXL_PAGE,
            extra_pages={"/server_info?config_format=json": development(role)},
        )
        for role, behave in zip(roles, (prefill, *decodes), strict=True)
    ]


LOGPROBS = {
    "model": "tiny",
    "messages": [{"role": "user", "content": PROMPT}],
    "logprobs": True,
    "top_logprobs": 20,
}


def head_of(body: bytes, lines: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    return head + b"%bcontent-length: %d\r\n\r\n" % (lines, len(body))


def with_logprobs(tokens: int, tail: bytes) -> bytes:
    """An answer as vLLM gives it, with 20 logprobs for each token, and the address of its cache."""
    top = [{"token": f"word {n}", "logprob": -1.2345678 - n, "bytes": [32, 97, 98]} for n in range(20)]
    one = orjson.dumps({"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": top})
    content = b",".join([one] * tokens)
    return (
        b'{"id":"chatcmpl-1","choices":[{"index":0,"message":{"role":"assistant","content":"a"},'
        b'"logprobs":{"content":[%b]},"finish_reason":"length"}],"usage":%b,%b}'
    ) % (content, orjson.dumps(usage()), tail)


ADDRESS = b'"kv_transfer_params":{"remote_host":"10.0.0.9","remote_port":1}'


NULL = b'"kv_transfer_params":null'
NAN = b'"x":NaN'  # no JSON, but some engines write it


@pytest.mark.parametrize(
    ("tokens", "before", "tail"),
    [
        (1, NAN, ADDRESS),
        (14_000, NAN, ADDRESS),
        (14_000, NAN, b'"x":1'),
        (100, NAN, ADDRESS + b',"prompt_token_ids":null'),
        (100, b'"y":1', ADDRESS + b',"x":{"kv_transfer_params":{"a":1},"b":[2]}'),
        (100, NAN, ADDRESS + b',"x":"\\"kv_transfer_params\\":1"'),
        (100, b'"y":1', ADDRESS + b',"x":["kv_transfer_params"]'),
        (100, NAN, ADDRESS.replace(b":", b" : ", 1)),
        (100, NAN, NULL),
    ],
    ids=["small", "large", "large_none", "members", "nested", "text", "value", "space", "null"],
)
async def test_an_answer_after_a_transfer_is_computed_once(tokens: int, before: bytes, tail: bytes) -> None:
    """Large answers are not parsed, which would stop all requests for seconds."""
    first = {"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": usage()}
    last = with_logprobs(tokens, before + b"," + tail)
    assert (len(last) > 16 << 20) == (tokens > 100)
    prefill = says(plain(200, first | {"kv_transfer_params": PARAMS}), then="keep")
    decode = says(head_of(last) + last, then="keep")
    engines = bidirectional(prefill, decode, decode)
    async with world(engines) as it:
        (model,) = it.server.fleet.models
        await it.until(lambda: all(each.identified for each in model.engines.values()))
        assert [each.role for each in model.engines.values()] == ["prefill", "decode", "decode"]
        async with it.client.post(f"{it.url}/v1/chat/completions", json=LOGPROBS) as response:
            got, headers = await response.read(), response.headers
        assert (response.status, headers["x-lmetric-prefill"]) == (200, "e0")
        expected = last.replace(ADDRESS, NULL).replace(ADDRESS.replace(b":", b" : ", 1), NULL)
        assert got == expected
        assert sorted(len(engine.requests) for engine in engines) == [0, 1, 1]
        (asked,) = engines[int(headers["x-lmetric-instance"][1])].requests
        assert asked.json["kv_transfer_params"]["do_remote_prefill"] is True
        assert dict(model.kv_transfers) == {"transferred": 1}
        assert all(each.service.tally.failures == 0 for each in model.engines.values())


@pytest.mark.parametrize(
    ("tokens", "start", "tail"),
    [
        (56_000, b"", b'"x":1'),
        (14_000, b"", ADDRESS + b',"x":{"kv_transfer_params":{"a":1}}'),
        (14_000, ADDRESS + b",", b'"x":1'),
    ],
    ids=["limit", "parsed", "early"],
)
async def test_too_large_answers_are_not_computed_again(tokens: int, start: bytes, tail: bytes) -> None:
    """The next engine computed prompt and answer again, and its answer was as large."""
    first = {"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": usage()}
    last = b"{" + start + with_logprobs(tokens, tail).removeprefix(b"{")
    prefill = says(plain(200, first | {"kv_transfer_params": PARAMS}), then="keep")
    decode = says(head_of(last) + last, then="keep")
    engines = bidirectional(prefill, decode, decode)
    async with world(engines) as it:
        (model,) = it.server.fleet.models
        await it.until(lambda: all(each.identified for each in model.engines.values()))
        status, _, got = await it.post(LOGPROBS, "/v1/chat/completions")
        error = got["error"]
        assert (status, error["code"]) == (502, "answer_too_large")
        assert f"{64 if tokens > 50_000 else 16} MiB" in error["message"]
        assert sorted(len(engine.requests) for engine in engines) == [0, 1, 1]
        assert not model.retried
        assert all(each.service.tally.failures == 0 for each in model.engines.values())


async def test_a_compressed_answer_after_a_transfer_does_not_pass() -> None:
    """The router could not remove the address from it."""
    first = {"id": "1", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}], "usage": usage()}
    body = gzip.compress(with_logprobs(1, ADDRESS))
    prefill = says(plain(200, first | {"kv_transfer_params": PARAMS}), then="keep")
    decode = says(head_of(body, b"content-encoding: gzip\r\n") + body, then="keep")
    engines = bidirectional(prefill, decode, decode)
    async with world(engines) as it:
        await it.until(lambda: all(each.identified for each in it.server.fleet.engines()))
        await it.post(LOGPROBS, "/v1/chat/completions")
        sent = [bool(asked.json.get("kv_transfer_params")) for each in engines[1:] for asked in each.requests]
        assert sorted(sent) == [False, True]  # again, without a transfer, after which it gives no address
