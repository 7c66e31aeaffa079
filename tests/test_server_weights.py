"""Weights that a trainer announces: old caches do not count, and answers name their version."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from lmetric import Request
from lmetric.config import ServerConfig
from lmetric.server.fleet.engine import blocks_differ
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.http.pages import admin
from pd_world import PROMPT as PD_PROMPT
from pd_world import nixl, pd
from server_world import (
    STREAM_HEAD,
    FakeEngine,
    World,
    answer,
    chunk,
    event,
    hang,
    plain,
    reset,
    says,
    usage,
    world,
)
from split_world import COMPLETIONS, asked, body_of, both, split
from test_server_failover import STORY_BODY, cut, fakes
from test_server_hedging import AFTER, later, two
from test_server_pd import PARAMS, bidirectional
from test_server_split_faults import FRAME, START

PROMPT = {"model": "tiny", "prompt": [*range(640)], "max_tokens": 3}


async def announce(it: World, **body: Any) -> tuple[int, Any]:
    status, _, got = await it.post(body, "/admin/weights")
    return status, got


async def ask(it: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head of an answer, and its decision record."""
    status, headers, _ = await it.post(PROMPT)
    assert status == 200
    _, record = await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
    return headers, orjson.loads(record)


async def test_prompts_of_old_weights_do_not_count_as_cached() -> None:
    async with world(1, admin=True, policy="lmetric") as it:
        headers, record = await ask(it)
        assert "x-lmetric-weights" not in headers
        assert "weights" not in record
        assert (await ask(it))[1]["predicted_cached_tokens"] > 500
        status, got = await announce(it, version=7)
        assert (status, [(each["name"], each["weights"]) for each in got]) == (200, [("e0", "7")])
        headers, record = await ask(it)
        assert record["predicted_cached_tokens"] == 0
        assert (headers["x-lmetric-weights"], record["weights"]) == ("7", ["7"])
        assert (await ask(it))[1]["predicted_cached_tokens"] > 500  # of the new weights


async def test_rollouts_on_sglangs_own_path_are_matched_with_the_caches() -> None:
    async with world(1, admin=True, policy="lmetric", paths=["/generate"]) as it:
        body = {"input_ids": [*range(640)], "sampling_params": {"max_new_tokens": 3}}
        found = []
        for version in (1, 1, 2):
            await announce(it, version=version) if not found or version == 2 else None
            status, headers, _ = await it.post(body, "/generate")
            assert (status, headers["x-lmetric-weights"]) == (200, str(version))
            _, record = await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
            found.append(orjson.loads(record)["predicted_cached_tokens"])
        assert found[0] == found[2] == 0
        assert found[1] > 500


async def test_only_the_named_engines_change() -> None:
    async with world(2, admin=True) as it:
        assert (await announce(it, version="step-1"))[0] == 200
        status, got = await announce(it, version="step-2", engines=["e1"])
        assert (status, [each["name"] for each in got]) == (200, ["e1"])
        for _ in range(4):
            headers, _ = await ask(it)
            expected = {"e0": "step-1", "e1": "step-2"}[headers["x-lmetric-instance"]]
            assert headers["x-lmetric-weights"] == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_has_the_version_with_which_it_began(stream: bool) -> None:
    async with world(1, admin=True) as it:
        (engine,) = it.engines
        go = asyncio.Event()

        async def wait(fake: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
            await go.wait()
            return await answer(fake, request, writer)

        engine.behave = wait
        await announce(it, version=1)
        running = asyncio.create_task(it.post({**PROMPT, "stream": stream}))
        await engine.asked(1)
        await announce(it, version=2)
        go.set()
        status, headers, _ = await running
        assert (status, headers["x-lmetric-weights"]) == (200, "1")
        assert (await ask(it))[0]["x-lmetric-weights"] == "2"


async def sent_to(it: World, first: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The head and the record of a request whose decision names this engine."""
    for _ in range(10):
        status, headers, _ = await it.post(PROMPT | changes)
        assert status == 200
        label = headers["x-lmetric-decision"]
        record = orjson.loads((await it.get(f"/debug/decisions/{label}"))[1])
        if (record.get("tried") or [record["instance"]])[0] == first:
            return headers, record
    raise AssertionError(f"no request was sent to {first} first")


def beginnings() -> dict[str, Any]:
    fault = event({"error": {"message": "no", "code": 503}})
    return {
        "reset": reset,
        "status": says(plain(503, {"error": {"message": "no"}}), then="keep"),
        "event": says(STREAM_HEAD + chunk(fault) + b"0\r\n\r\n", then="keep"),
    }


@pytest.mark.parametrize("how", ["reset", "status", "event"])
@pytest.mark.parametrize("second", ["b", None])
async def test_a_repeated_request_has_the_version_of_the_engine_that_answers(
    how: str, second: str | None
) -> None:
    """It had the version of the failed engine, although each token is of the other one."""
    async with world(2, admin=True) as it:
        await announce(it, version="a", engines=["e0"])
        if second is not None:
            await announce(it, version=second, engines=["e1"])
        it.engines[0].behave = beginnings()[how]
        headers, record = await sent_to(it, "e0", stream=how == "event")
        assert headers["x-lmetric-instance"] == "e1"
        assert headers.get("x-lmetric-weights") == second
        assert record.get("weights") == (None if second is None else [second])


async def test_a_stream_that_another_engine_continues_has_both_versions() -> None:
    async with fakes(cut(7), cut(7), admin=True) as it:
        await announce(it, version="a", engines=["e0"])
        await announce(it, version="b", engines=["e1"])
        _, headers, got = await it.post(STORY_BODY)
        assert it.server.fleet.models[0].failovers == {"continued": 1}
        assert b'"error"' not in got
        record = orjson.loads((await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}"))[1])
        first, second = record["weights"]
        assert {first, second} == {"a", "b"}
        assert headers["x-lmetric-weights"] == first == {"e0": "a", "e1": "b"}[record["tried"][0]]


@pytest.mark.parametrize("winner", ["e0", "e1"])
async def test_a_hedged_request_has_the_version_of_the_engine_that_answers(winner: str) -> None:
    """A hedge that won had no version, because it has a decision of its own."""
    behave = (hang, answer) if winner == "e1" else (later(2 * AFTER), hang)
    async with two(*behave, admin=True) as it:
        await announce(it, version="a", engines=["e0"])
        await announce(it, version="b", engines=["e1"])
        status, headers, _ = await it.post({**PROMPT, "stream": True})
        assert (status, headers["x-lmetric-instance"]) == (200, winner)
        version = {"e0": "a", "e1": "b"}[winner]
        assert headers["x-lmetric-weights"] == version
        record = orjson.loads((await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}"))[1])
        assert record["weights"] == [version]
        other = orjson.loads((await it.get(f"/debug/decisions/{record['other_attempt']}"))[1])
        assert "weights" not in other  # its engine gave no token


async def test_a_prefill_adds_no_version() -> None:
    """It had the prefill's version, although the decode engine computed every token."""
    async with pd(nixl("prefill"), nixl("decode"), admin=True) as it:
        await it.post({"version": "a", "engines": ["p0"]}, "/admin/weights")
        status, headers, _ = await it.post()
        assert (status, headers["x-lmetric-prefill"]) == (200, "p0")
        assert "x-lmetric-weights" not in headers
        await it.post({"version": "b", "engines": ["d0"]}, "/admin/weights")
        status, headers, _ = await it.post()
        assert (status, headers["x-lmetric-prefill"]) == (200, "p0")
        assert headers["x-lmetric-weights"] == "b"
        async with it.client.get(f"{it.url}/debug/decisions/{headers['x-lmetric-decision']}") as page:
            assert (await page.json())["weights"] == ["b"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("prompt", "versions"), [(PD_PROMPT, ["b"]), ("a", ["a", "b"])])
async def test_a_split_answer_has_the_versions_of_its_tokens(
    stream: bool, prompt: str, versions: list[str]
) -> None:
    """A split inside the prompt gives one version, a split inside the answer two."""
    async with split(both(), both(), at=0.5, admin=True) as it:
        for name, version in (("b0", "a"), ("b1", "b")):
            await it.post({"version": version, "engines": [name]}, "/admin/weights")
        said = await asked(it, COMPLETIONS, body_of(COMPLETIONS, prompt, stream=stream))
        answering = said["headers"]["x-lmetric-prefill"], said["headers"]["x-lmetric-instance"]
        assert answering == ("b0", "b1")
        assert said["headers"]["x-lmetric-weights"] == versions[0]
        label = said["headers"]["x-lmetric-decision"]
        async with it.client.get(f"{it.url}/debug/decisions/{label}") as page:
            assert (await page.json())["weights"] == versions


async def test_an_aborted_answer_after_a_transfer_adds_no_version() -> None:
    """It named the version of the engine that stopped, although another one gave each token."""
    decoded: list[FakeEngine] = []
    seen: set[str] = set()

    async def decode(fake: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        decoded.append(fake)
        return await says(with_end("abort" if len(decoded) == 1 else "length"), then="keep")(
            fake, request, writer
        )

    def with_end(finish: str, **more: Any) -> bytes:
        choices = [{"index": 0, "text": "a", "finish_reason": finish}]
        return plain(200, {"id": "1", "choices": choices, "usage": usage()} | more)

    prefill = says(with_end("length", kv_transfer_params=PARAMS), then="keep")
    engines = bidirectional(prefill, decode, decode)
    async with world(engines, admin=True, policy="round_robin") as it:
        await it.until(lambda: all(each.identified for each in it.server.fleet.engines()))
        for name, version in (("e0", "b"), ("e1", "b"), ("e2", "c")):  # only e1 can fetch the prefill
            await announce(it, version=version, engines=[name])
        for _ in range(2):
            decoded.clear()
            status, headers, _ = await it.post({"model": "tiny", "prompt": "a", "max_tokens": 3})
            assert (status, len(decoded)) == (200, 2)
            version = {"e1": "b", "e2": "c"}[headers["x-lmetric-instance"]]
            assert headers["x-lmetric-weights"] == version
            _, record = await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
            assert orjson.loads(record)["weights"] == [version]
            seen.add(version)
        assert seen == {"b", "c"}


async def test_a_continuation_that_cannot_be_merged_adds_no_version() -> None:
    continuations: list[FakeEngine] = []

    async def behave(fake: FakeEngine, request: Any, writer: asyncio.StreamWriter) -> bool:
        if len(request.json["prompt"]) > len(START):
            continuations.append(fake)
            if len(continuations) == 1:
                choice = {"index": 0, "text": " a", "token_ids": None, "finish_reason": None}
                writer.write(STREAM_HEAD + chunk(event(FRAME | {"choices": [choice]})))
                await writer.drain()
                await fake.until_left(writer)
                return False
        return await cut(7)(fake, request, writer)

    async with fakes(behave, behave, behave, admin=True) as it:
        for number in range(3):
            await announce(it, version=f"v{number}", engines=[f"e{number}"])
        _, headers, got = await it.post(STORY_BODY)
        assert b'"error"' not in got
        assert len(continuations) == 2
        _, record = await it.get(f"/debug/decisions/{headers['x-lmetric-decision']}")
        third = it.engines.index(continuations[1])
        first = 3 - third - it.engines.index(continuations[0])
        assert headers["x-lmetric-weights"] == f"v{first}"
        assert orjson.loads(record)["weights"] == [f"v{first}", f"v{third}"]


async def test_only_the_router_names_versions() -> None:
    async with world(1, admin=True) as it:
        choices = [{"index": 0, "text": "a", "finish_reason": "length"}]
        said = plain(200, {"choices": choices, "usage": usage()}, b"x-lmetric-weights: of the engine\r\n")
        it.engines[0].behave = says(said, then="keep")
        assert "x-lmetric-weights" not in (await ask(it))[0]


async def test_a_new_process_has_no_announced_version() -> None:
    async with world(1, admin=True, health={"interval": 0.1}) as it:
        await announce(it, version=3)
        assert (await ask(it))[0]["x-lmetric-weights"] == "3"
        engine = it.server.fleet.engine("e0")
        assert engine is not None
        engine.restarted()
        await it.until(lambda: engine.identified)
        assert "x-lmetric-weights" not in (await ask(it))[0]


async def test_other_tasks_run_while_the_caches_of_many_engines_leave_the_index() -> None:
    """Those of 4,096 engines take 0.3 s."""
    config = ServerConfig(model="tiny", engines=[f"http://10.0.0.1:{8000 + each}" for each in range(100)])
    fleet = Fleet(config)
    fleet.build()
    router = fleet.models[0].router
    key = list(range(64))
    for each in fleet.engines():
        router.update_instance(each.name, kv_source="exact")
        router.blocks_stored(each.name, [1, 2, 3, 4], key)
    known: set[int] = set()

    async def watch() -> None:
        while True:
            known.add(int((router.cached_tokens(Request(key)) > 0).sum()))
            await asyncio.sleep(0)

    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await admin._begin(list(fleet.engines()), "2", cache_kept=False)
    task.cancel()
    assert known >= {100, 92, 84, 12}
    assert max(router.cached_tokens(Request(key))) == 0
    assert {each.weights for each in fleet.engines()} == {"2"}


async def test_an_engine_that_slept_comes_back_with_an_empty_index() -> None:
    async with world(1, admin=True, policy="lmetric") as it:
        await ask(it)
        assert (await it.post({}, "/admin/engines/e0/drain"))[0] == 200  # before /sleep
        assert (await it.post(PROMPT))[0] == 503
        assert (await announce(it, version=5, engines=["e0"]))[0] == 200
        assert (await it.post({}, "/admin/engines/e0/undrain"))[0] == 200  # after /wake_up
        headers, record = await ask(it)
        assert (headers["x-lmetric-weights"], record["predicted_cached_tokens"]) == ("5", 0)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "version"),
        ({"version": ""}, 400, "version"),
        ({"version": True}, 400, "version"),
        ({"version": 1.5}, 400, "version"),
        ({"version": "a b"}, 400, "version"),
        ({"version": "a\r\nx-evil: 1"}, 400, "version"),
        ({"version": "é"}, 400, "version"),
        ({"version": "x" * 201}, 400, "version"),
        ({"version": 1, "engines": "e0"}, 400, "engines"),
        ({"version": 1, "engines": [1]}, 400, "engines"),
        ({"version": 1, "engines": ["e0", "nobody"]}, 404, "engines"),
        ({"version": 1, "cache_kept": "yes"}, 400, "cache_kept"),
        ({"version": 1, "more": 1}, 400, "more"),
    ],
)
async def test_bad_announcements_change_nothing(body: dict[str, Any], status: int, param: str) -> None:
    async with world(1, admin=True) as it:
        got_status, got = await announce(it, **body)
        assert (got_status, got["error"]["param"]) == (status, param)
        assert "x-lmetric-weights" not in (await ask(it))[0]


async def test_kv_passes_only_between_engines_with_the_same_version() -> None:
    async with world(2, admin=True) as it:
        one, other = it.server.fleet.engines()
        assert blocks_differ(one, other) is None
        await announce(it, version=1)
        assert blocks_differ(one, other) is None
        await announce(it, version=2, engines=["e1"])
        assert blocks_differ(one, other) == "e0 serves revision 1 of the model, e1 serves 2"
        one.config = one.config.model_copy(update={"revision": "main"})
        assert one.revision == "1"  # the weights have changed since the start


async def test_an_engine_that_keeps_its_cache_on_purpose_keeps_its_index() -> None:
    async with world(1, admin=True, policy="lmetric") as it:
        await ask(it)
        assert (await announce(it, version=1, cache_kept=True))[0] == 200
        headers, record = await ask(it)
        assert record["predicted_cached_tokens"] > 500
        assert headers["x-lmetric-weights"] == "1"
