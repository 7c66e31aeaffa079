"""Emulated engines hand KV caches over as the real ones do, and go wrong as they do."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from lmetric.engines.adapter import Handover
from lmetric.engines.connectors import CONNECTORS
from lmetric.engines.handover import COMPLETIONS, FirstSegment, with_fields
from lmetric.engines.identify import identify
from lmetric_lab.emulated import EngineOptions, EngineServer
from waiting import PATIENCE_SECONDS

NIXL = CONNECTORS["nixl"]
PROMPT = [(7 * n) % 1000 for n in range(200)]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12}


def options(**changes: Any) -> EngineOptions:
    given = {"port": 0, "clock_speed": 20.0, "cache_blocks": 500, "kv_connector": "nixl"}
    return EngineOptions.model_validate(given | changes)


def sglang(role: str, **changes: Any) -> EngineOptions:
    return options(api="sglang", kv_connector="none", role=role, **changes)


async def post(engine: EngineServer, body: Any) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(engine.url + COMPLETIONS, json=body) as response:
        return response.status, dict(await response.json())


async def streamed(engine: EngineServer, body: Any) -> str:
    """The text of a stream, with what went wrong."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(engine.url + COMPLETIONS, json=body | {"stream": True}) as response,
    ):
        assert response.status == 200
        *events, end, _ = (await response.text()).split("\n\n")
    assert end == "data: [DONE]"
    said = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(str(e["error"]["code"]) if "error" in e else e["choices"][0]["text"] for e in said)


async def get(engine: EngineServer, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(engine.url + path) as response:
        return response.status, await response.text()


async def counted(engine: EngineServer, name: str) -> float:
    lines = (await get(engine, "/metrics"))[1].splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def source(engine: EngineServer, which: str) -> float:
    lines = (await get(engine, "/metrics"))[1].splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:prompt_tokens_by_source_total") and f'source="{which}"' in line
    )


async def first_leg(engine: EngineServer, body: dict[str, Any] = BODY) -> bytes:
    leg = NIXL.first(FirstSegment(COMPLETIONS, json.dumps(body).encode()), "", Handover("nixl"))
    status, answer = await post(engine, json.loads(leg))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 1
    return json.dumps(answer).encode()


def second_body(answer: bytes, body: dict[str, Any] = BODY, **changes: Any) -> dict[str, Any]:
    fields: Any = NIXL.fields(answer)
    fields = {"kv_transfer_params": fields["kv_transfer_params"] | changes}
    return dict(json.loads(with_fields(json.dumps(body).encode(), fields)))


async def until(true: Any) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await true():  # noqa: ASYNC110 - another server is asked
            await asyncio.sleep(0.02)


async def test_a_pull_decodes_without_computing() -> None:
    async with EngineServer(options()) as prefill, EngineServer(options()) as decode:
        for engine, role in ((prefill, "both"), (decode, "both")):

            async def ask(path: str, engine: EngineServer = engine) -> tuple[int, bytes]:
                status, body = await get(engine, path)
                return status, body.encode()

            told = (await identify(ask))[1]
            assert (told.handover, told.role) == (Handover("nixl", 30.0, "fail", bidirectional=False), role)
        answer = await first_leg(prefill)
        params = json.loads(answer)["kv_transfer_params"]
        assert (params["remote_num_tokens"], params["transfer_mode"]) == (200, "pull")
        assert len(params["remote_block_ids"][0]) == 13
        status, whole = await post(decode, second_body(answer))
        _, alone = await post(prefill, BODY)
        assert status == 200
        assert whole["choices"][0]["text"] == alone["choices"][0]["text"]
        assert whole["usage"]["completion_tokens"] == 12
        assert (await source(decode, "external_kv_transfer"), await source(decode, "local_compute")) == (
            pytest.approx(200, abs=1),
            pytest.approx(0, abs=1),
        )
        assert await counted(decode, "vllm:nixl_xfer_time_seconds_count") == 1
        assert await counted(decode, "vllm:nixl_bytes_transferred_sum") > 200 * 1000
        # Streams neither hold nor tell.
        leg = json.loads(
            NIXL.first(FirstSegment(COMPLETIONS, json.dumps(BODY).encode()), "", Handover("nixl"))
        )
        assert "kv_transfer_params" not in await streamed(prefill, leg)
        # An engine without a connector takes the fields for nothing.
        async with EngineServer(options(kv_connector="none")) as plain:
            status, answer_ = await post(plain, BODY | {"kv_transfer_params": {"do_remote_prefill": True}})
            assert (status, answer_["kv_transfer_params"]) == (200, None)
            assert answer_["choices"][0]["text"] == alone["choices"][0]["text"]
            assert (await get(plain, "/server_info"))[0] == 404
            assert "nixl" not in (await get(plain, "/metrics"))[1]


async def test_a_transfer_takes_its_time() -> None:
    slow = options(kv_transfer_gigabytes_per_second=0.01, clock_speed=1.0)
    async with EngineServer(options()) as prefill, EngineServer(slow) as decode:
        second = second_body(await first_leg(prefill), max_tokens=1)
        before = time.monotonic()
        asking = asyncio.create_task(post(decode, second))

        async def waits() -> bool:
            return await counted(decode, "vllm:num_requests_waiting{") == 1

        await until(waits)
        assert (await asking)[0] == 200
        size = await counted(decode, "vllm:nixl_bytes_transferred_sum")
        assert time.monotonic() - before >= size / 1e7


async def test_what_was_fetched_or_is_late_is_wrong_and_nobody_says_so() -> None:
    short = options(kv_lease_seconds=0.05)
    async with EngineServer(short) as prefill, EngineServer(options()) as decode:
        _, alone = await post(prefill, BODY)
        answer = await first_leg(prefill)

        async def expired() -> bool:
            return await counted(prefill, "vllm:nixl_num_kv_expired_reqs_total") == 1

        await until(expired)
        late = await post(decode, second_body(answer))
        answer = await first_leg(prefill)
        right = await post(decode, second_body(answer))
        again = await post(decode, second_body(answer))
        texts = [got[1]["choices"][0]["text"] for got in (late, right, again)]
        assert [got[0] for got in (late, right, again)] == [200, 200, 200]
        assert [text == alone["choices"][0]["text"] for text in texts] == [False, True, False]
        assert alone["choices"][0]["text"] != await streamed(decode, second_body(answer))


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_a_dead_prefill_engine(policy: str) -> None:
    async with EngineServer(options(kv_load_failure_policy=policy)) as decode:
        async with EngineServer(options()) as prefill:
            answer = await first_leg(prefill)
            _, alone = await post(prefill, BODY)
        status, got = await post(decode, second_body(answer))
        said = await streamed(decode, second_body(answer))
        text = alone["choices"][0]["text"]
        if policy == "recompute":
            assert (status, got["choices"][0]["text"], said) == (200, text, text)
        else:
            assert (status, got["error"]["code"], said) == (500, 500, "500")
        assert await counted(decode, "vllm:nixl_num_failed_transfers_total") == 2
        # Another process at the same address does not serve the first process's blocks.
        async with EngineServer(options()) as other:
            port = json.loads(await first_leg(other))["kv_transfer_params"]["remote_port"]
            status, _ = await post(decode, second_body(answer, remote_port=port))
        assert status == (200 if policy == "recompute" else 500)


async def test_wrong_params_kill() -> None:
    async with EngineServer(options()) as prefill:
        for how in ("alone", "longer"):
            async with EngineServer(options(clock_speed=1.0)) as decode:
                running = asyncio.create_task(streamed(decode, {"prompt": [1], "max_tokens": 5000}))
                await asyncio.sleep(0.1)
                if how == "alone":
                    body = BODY | {"kv_transfer_params": {"do_remote_prefill": True}}
                else:
                    body = second_body(await first_leg(prefill), BODY | {"prompt": PROMPT + [1] * 9})
                status, said = await post(decode, body)
                assert (status, said["error"]["message"][:10]) == (500, "EngineCore")
                assert (await running).endswith("500")
                assert (await post(decode, BODY))[0] == 500
                assert (await get(decode, "/health"))[0] == 503
        async with EngineServer(options(kv_wrong_params="refuse")) as soft:
            status, said = await post(soft, BODY | {"kv_transfer_params": {"do_remote_prefill": True}})
            assert (status, said["error"]["param"]) == (400, "kv_transfer_params")
            assert (await post(soft, BODY))[0] == 200
        # Without the bidirectional mode, a request that needs it waits for ever.
        async with EngineServer(options()) as decode:
            params = {"do_remote_prefill": False, "do_remote_decode": True}
            hanging = second_body(await first_leg(prefill), **params)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await post(decode, hanging)


def room(engine: EngineServer, number: int, **more: Any) -> dict[str, Any]:
    channel = engine._api._rooms.channel  # type: ignore[union-attr]
    where = {"bootstrap_host": channel.host, "bootstrap_port": channel.port, "bootstrap_room": number}
    return BODY | where | more


async def test_prefill_and_decode_meet_in_a_room() -> None:
    async with (
        EngineServer(sglang("prefill")) as prefill,
        EngineServer(sglang("decode")) as decode,
        EngineServer(sglang("both")) as both,
    ):
        for engine, role in ((prefill, "prefill"), (decode, "decode"), (both, "both")):

            async def ask(path: str, engine: EngineServer = engine) -> tuple[int, bytes]:
                status, body = await get(engine, path)
                return status, body.encode()

            told = (await identify(ask))[1]
            assert told.role == role
            assert (told.handover is None) == (role == "both")
            if role == "prefill":
                assert told.handover is not None
                body = room(prefill, 5)
                assert told.handover.bootstrap_port == body["bootstrap_port"]
        _, alone = await post(both, BODY)
        for first, second in ((prefill, decode), (decode, prefill)):
            legs = [asyncio.create_task(post(first, body))]
            await asyncio.sleep(0.05)
            assert not legs[0].done()  # each waits for the other
            legs.append(asyncio.create_task(post(second, body)))
            (one, got_one), (two, got_two) = await asyncio.gather(*legs)
            assert (one, two) == (200, 200)
            answers = {first: got_one, second: got_two}
            assert answers[prefill]["usage"]["completion_tokens"] == 1
            assert answers[decode]["choices"][0]["text"] == alone["choices"][0]["text"]
        assert prefill._api._rooms.waiting == 0  # type: ignore[union-attr]
        for engine in (prefill, decode):
            assert (await post(engine, BODY))[0] == 400  # no room


async def test_neither_half_waits_for_one_that_left() -> None:
    patient = {"kv_patience_seconds": 1.0}
    async with (
        EngineServer(sglang("prefill", **patient)) as prefill,
        EngineServer(sglang("decode")) as decode,
    ):
        rooms = prefill._api._rooms  # type: ignore[union-attr]

        async def waiting() -> bool:
            return bool(rooms.waiting == 1)

        async def empty() -> bool:
            return not rooms.waiting

        # A decode engine whose client left takes its half with it.
        leg = asyncio.create_task(post(decode, room(prefill, 1)))
        await until(waiting)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        await until(empty)
        # A prefill half that is given up ends the other.
        leg = asyncio.create_task(post(prefill, room(prefill, 2)))
        other = asyncio.create_task(post(decode, room(prefill, 2, prompt=PROMPT[:50])))
        status, said = await other
        assert (status, said["code"]) == (500, 500)
        assert "another prompt" in said["message"]
        await leg
        # Nobody comes.
        status, said = await post(prefill, room(prefill, 3))
        assert (status, "no decode engine came" in said["message"]) == (500, True)
        status, said = await post(decode, room(prefill, 4))
        assert status == 500
        await until(empty)
    async with EngineServer(sglang("decode")) as decode:
        status, said = await post(
            decode, BODY | {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
        )
        assert (status, "no engine at 127.0.0.1:1" in said["message"]) == (500, True)


def test_options_that_do_not_go_together() -> None:
    for wrong, why in (
        ({"kv_connector": "none", "role": "prefill"}, "needs kv_connector nixl"),
        ({"api": "sglang"}, "kv_connector is a setting of vLLM"),
    ):
        with pytest.raises(ValidationError, match=why):
            options(**wrong)
