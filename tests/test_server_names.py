"""Names follow the engines: bugs 1, 2, 3, 4, 24 and 36, ux 3.3, python 6.12.

An engine's list of models (`GET /v1/models`) is read again while it runs. Requests go only to
engines that list their model.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import orjson
import pytest
from structlog.testing import capture_logs

from lmetric.engines.adapter import ModelCard
from lmetric.server.background import monitor
from lmetric.server.fleet import fleet, names
from lmetric.server.fleet.names import ModelNames
from lmetric.server.observe.startup import startup_block
from server_world import FakeEngine, Request, World, answer, lora, plain, strict, world

BASE = {"id": "tiny", "parent": None}
FAST = {"interval": 0.05}


@pytest.fixture(autouse=True)
def reads_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each health check reads the list of models."""
    monkeypatch.setattr(monitor, "MODELS_SECONDS", 0.0)


def fakes(*lists: list[dict[str, Any]]) -> list[FakeEngine]:
    return [FakeEngine(cards=list(cards), behave=strict) for cards in lists]


async def ask(w: World, model: str, times: int = 1) -> Counter[tuple[int, str | None]]:
    """Statuses and engines of requests for a model."""
    seen: Counter[tuple[int, str | None]] = Counter()
    for _ in range(times):
        status, headers, _ = await w.post({"model": model, "prompt": "hello"})
        seen[status, headers.get("x-lmetric-instance")] += 1
    return seen


async def cards(w: World) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in orjson.loads((await w.get("/v1/models"))[1])["data"]}


async def debug(w: World, name: str) -> dict[str, Any]:
    engines = orjson.loads((await w.get("/debug/engines"))[1])
    return next(engine for engine in engines if engine["name"] == name)


# -- several base names (bugs 1) -------------------------------------------------------------------


async def test_all_base_names_of_an_engine_are_names_of_one_pool_in_any_order() -> None:
    a, b = {"id": "a", "root": "/m"}, {"id": "b", "root": "/m"}
    async with world(fakes([a, b], [b, a])) as w:
        assert [model.name for model in w.server.fleet.models] == ["a"]
        assert list(await cards(w)) == ["a", "b"]
        for name in ("a", "b"):
            assert await ask(w, name, 4) == {(200, "e0"): 2, (200, "e1"): 2}
        assert {request.json["model"] for engine in w.engines for request in engine.requests} == {"a", "b"}


async def test_aliases_share_one_cache() -> None:
    async with world(fakes([{"id": "a"}, {"id": "b"}]), policy="lmetric") as w:
        hits = []
        for name in ("a", "b"):
            _, headers, _ = await w.post({"model": name, "prompt": "x" * 4096})
            record = orjson.loads((await w.get("/debug/decisions/" + headers["x-lmetric-decision"]))[1])
            hits.append(record["predicted_cached_tokens"] > 0)
        assert hits == [False, True]


async def test_an_alias_of_one_engine_goes_to_this_engine_only() -> None:
    async with world(fakes([{"id": "a"}, {"id": "b"}], [{"id": "a"}])) as w:
        assert len(w.server.fleet.models) == 1
        assert await ask(w, "a", 4) == {(200, "e0"): 2, (200, "e1"): 2}
        assert await ask(w, "b", 4) == {(200, "e0"): 4}


async def test_a_renaming_of_all_engines_one_by_one_never_splits_the_pool_early() -> None:
    async with world(fakes([{"id": "a"}], [{"id": "a"}]), health=FAST) as w:
        first, second = w.engines
        old, new = {"id": "a"}, {"id": "b"}
        for engine in (first, second):
            engine.cards = [old, new]
            assert (await ask(w, "b")).keys() <= {(200, "e0"), (200, "e1")}
        await w.until(lambda: w.server.fleet.models[0].names.uniform)
        first.cards = [new]
        await w.until(lambda: len(w.server.fleet.models[0].names.listed["a"]) == 1)
        assert len(w.server.fleet.models) == 1
        assert await ask(w, "a", 3) == {(200, "e1"): 3}
        second.cards = [new]
        await w.until(lambda: w.server.fleet.names["b"].model.name == "b")
        await w.until(
            lambda: len([e for e in w.server.fleet.names["b"].model.engines.values() if e.in_service]) == 2
        )
        assert await ask(w, "b", 4) == {(200, "e0"): 2, (200, "e1"): 2}
        assert (await ask(w, "a")) == {(503, None): 1}


# -- adapters (bugs 2, 24) -------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"model": "tiny"}, {"models": True}])
async def test_the_first_request_for_an_adapter_that_was_just_loaded_gets_200(config: dict[str, Any]) -> None:
    engines = fakes([BASE], [BASE])
    if "models" in config:
        for engine in engines:
            await engine.start()
        urls = [{"url": engine.url, "name": f"e{number}"} for number, engine in enumerate(engines)]
        config = {"models": [{"name": "tiny", "engines": urls}], "engines": []}
    async with world(engines, health={"interval": 60}, **config) as w:
        w.engines[1].cards = [BASE, lora("sql")]
        assert await ask(w, "sql", 20) == {(200, "e1"): 20}
        assert set(await cards(w)) == {"tiny", "sql"}
        w.engines[1].cards = [BASE, lora("sql"), lora("chat")]
        w.engines[0].cards = [BASE, lora("chat")]
        assert await ask(w, "chat", 4) == {(200, "e0"): 2, (200, "e1"): 2}, "a second search waits its turn"
        assert w.server.fleet.search._waiting == {}


async def test_adapters_come_and_go_with_the_health_checks() -> None:
    async with world(fakes([BASE], [BASE, lora("sql")]), health=FAST) as w:
        assert await ask(w, "sql", 4) == {(200, "e1"): 4}
        w.engines[0].cards = [BASE, lora("sql")]
        await w.until(lambda: len(w.server.fleet.models[0].names.listed["sql"]) == 2)
        assert await ask(w, "sql", 4) == {(200, "e0"): 2, (200, "e1"): 2}
        for engine in w.engines:
            engine.cards = [BASE]
        await w.until(lambda: "sql" not in w.server.fleet.names)
        assert set(await cards(w)) == {"tiny"}
        assert await ask(w, "sql") == {(404, None): 1}
        assert await ask(w, "tiny", 4) == {(200, "e0"): 2, (200, "e1"): 2}


async def test_an_adapter_whose_engine_is_not_in_service_gives_503_with_the_reason() -> None:
    async with world(fakes([BASE], [BASE, lora("sql")]), admin=True) as w:
        await w.post({}, "/admin/engines/e1/drain")
        status, headers, got = await w.post({"model": "sql", "prompt": "x"})
        assert (status, got["error"]["code"]) == (503, "no_engine")
        assert "sql: no usable engine: draining (1 of 1 engines) (e1: draining)" in got["error"]["message"]
        assert "retry-after" in headers
        async with w.client.delete(w.url + "/admin/engines/e1") as answered:
            assert answered.status == 200
        status, _, got = await w.post({"model": "sql", "prompt": "x"})
        assert (status, got["error"]["code"]) == (503, "no_engine"), "its engine may come back"
        assert "no engine of tiny lists it" in got["error"]["message"]
        assert set(await cards(w)) == {"tiny"}


async def test_a_configured_adapter_needs_an_engine_that_lists_it() -> None:
    [engine] = fakes([BASE])
    await engine.start()
    models = [{"name": "tiny", "engines": [{"url": engine.url, "name": "e0"}], "adapters": ["sql"]}]
    async with world([engine], models=models, engines=[], health=FAST) as w:
        status, _, got = await w.post({"model": "sql", "prompt": "x"})
        assert (status, "no engine of tiny lists it" in got["error"]["message"]) == (503, True)
        assert set(await cards(w)) == {"tiny"}
        engine.cards = [BASE, lora("sql")]
        await w.until(lambda: w.server.fleet.models[0].names.engines_of("sql") is None)
        assert await ask(w, "sql") == {(200, "e0"): 1}


async def test_a_hedge_of_an_adapter_goes_only_to_engines_that_list_it() -> None:
    async def late(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(0.2)
        return await answer(engine, request, writer)

    async with world(fakes([BASE], [BASE, lora("sql")]), hedging={"after_seconds": 0.02}) as w:
        w.engines[1].behave = late
        status, _, _ = await w.post({"model": "sql", "prompt": "x", "stream": True})
        assert (status, len(w.engines[0].requests)) == (200, 0)


# -- a 404 of the engine ---------------------------------------------------------------------------


async def test_a_404_for_a_listed_name_is_the_failure_of_its_engine() -> None:
    """The router's list is old: two of three engines have unloaded the adapter."""
    async with world(fakes(*[[BASE, lora("sql")]] * 3), health={"interval": 60}) as w:
        for engine in w.engines[:2]:
            engine.cards = [BASE]
            w.server.fleet.models[0].engines[engine.name].models_at -= 5
        assert await ask(w, "sql", 4) == {(200, "e2"): 4}
        model = w.server.fleet.models[0]
        await w.until(lambda: model.names.engines_of("sql") == ["e2"])
        before = [len(engine.requests) for engine in w.engines]
        assert await ask(w, "sql", 6) == {(200, "e2"): 6}
        assert [len(engine.requests) for engine in w.engines][:2] == before[:2]
        assert all(engine.healthy for engine in model.engines.values())
        w.engines[2].cards = [BASE]
        status, _, got = await w.post({"model": "sql", "prompt": "x"})
        assert (status, got["error"]["type"]) == (404, "NotFoundError"), "no other engine: its own answer"
        await w.until(lambda: w.server.fleet.models[0].engines["e2"].models_due)


@pytest.mark.parametrize("body", [b"", b'{"message":"Model not found","type":"Not Found","code":404}'])
async def test_a_404_without_the_model_s_name_is_the_failure_of_its_engine(body: bytes) -> None:
    """Dynamo's frontend answers so before the router has read that its list is empty."""

    async def refuse(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(404, body))
        return True

    async with world(fakes([BASE], [BASE]), health={"interval": 60}) as w:
        engine = w.server.fleet.models[0].engines["e0"]
        w.engines[0].behave, engine.models_at = refuse, engine.models_at - 5
        w.engines[0].extra_pages["/v1/models"] = (200, b'{"data": []}')
        assert await ask(w, "tiny", 2) == {(200, "e1"): 2}
        await w.until(lambda: not engine.in_service)
        assert await ask(w, "tiny", 4) == {(200, "e1"): 4}
        assert len(w.engines[0].requests) == 1


async def test_other_404s_pass_unchanged() -> None:
    async def refuse(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(404, {"error": {"message": "Response with id 'r' not found.", "param": "id"}}))
        return True

    async with world(2) as w:
        for engine in w.engines:
            engine.behave = refuse
        status, _, got = await w.post()
        assert (status, got["error"]["param"]) == (404, "id")
        assert sum(len(engine.requests) for engine in w.engines) == 1


# -- engines of another model (bugs 4, 36, ux 3.3) -------------------------------------------------


async def test_an_engine_that_comes_back_with_another_model_moves_to_its_pool() -> None:
    async with world(fakes([{"id": "old"}], [{"id": "old"}]), health=FAST, policy="lmetric") as w:
        await w.post({"model": "old", "prompt": "x" * 4096})
        await w.engines[1].stop()
        w.engines[1].cards = [{"id": "new"}]
        await w.engines[1].start()
        assert (await ask(w, "old", 10)).keys() == {(200, "e0")}
        await w.until(lambda: "new" in w.server.fleet.names)
        new = w.server.fleet.names["new"].model
        await w.until(lambda: new.engines["e1"].in_service)
        assert await ask(w, "new", 4) == {(200, "e1"): 4}
        assert new.router.stats()["instances"]["e1"]["decisions"] == 4, "its counts begin anew"
        assert (await debug(w, "e1"))["model"] == "new"
        assert set(w.server.fleet.names["old"].model.engines) == {"e0"}
        (problem,) = w.server.fleet.own_problems()
        assert (problem.what, problem.engines) == ("other model", ["e1"])
        assert problem.reason == "it serves 'new', no longer 'old'"


@pytest.mark.parametrize("alone", [True, False])
async def test_an_engine_that_returns_to_its_model_leaves_no_trace(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a problem, nor a model that was served only in between, nor repeated log lines."""
    monkeypatch.setattr(monitor, "REMINDER_SECONDS", 0.05)
    with capture_logs() as log:
        async with world(fakes(*[[{"id": "old"}]] * (1 if alone else 2)), health=FAST) as w:
            fleet = w.server.fleet
            for between in ("a", "b", "old"):
                await w.engines[0].stop()
                w.engines[0].cards = [{"id": between}]
                await w.engines[0].start()
                await w.until(
                    lambda name=between: name in fleet.names and "e0" in fleet.names[name].model.engines
                )
                await w.until(lambda name=between: fleet.names[name].model.engines["e0"].in_service)
                await w.until(lambda name=between: set(fleet.names) <= {"old", name})
                assert set(await cards(w)) == {"old", between}
                reads = len(w.engines[0].page_reads)
                await w.until(lambda reads=reads: len(w.engines[0].page_reads) > reads + 20)
                reasons = [problem.reason for problem in fleet.own_problems()]
                assert reasons == ([] if between == "old" else [f"it serves '{between}', no longer 'old'"])
            assert await ask(w, "a") == {(404, None): 1}
            assert b"other model" not in (await w.get("/ready"))[1]
            shown = orjson.loads((await w.get("/debug/live"))[1])
            assert not [each for each in shown["problems"] if "other model" in each["what"]]
    assert len([each for each in log if each.get("reason") == "there are no engines"]) <= alone
    assert len([each for each in log if each["event"].endswith("it moves")]) == 2
    back = [each for each in log if each["event"] == "the engine serves its model again"]
    assert [(each["engine"], each["model"]) for each in back] == [("e0", "old")]


async def test_requests_in_flight_on_an_engine_that_moves_end_properly() -> None:
    go = asyncio.Event()

    async def wait(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await answer(engine, request, writer)

    async with world(fakes([{"id": "old"}]), health={"interval": 60}) as w:
        w.engines[0].behave = wait
        running = [asyncio.create_task(w.post({"model": "old", "prompt": "x"})) for _ in range(3)]
        await w.engines[0].asked(3)
        w.engines[0].cards = [{"id": "new"}]
        waiting = asyncio.create_task(w.post({"model": "new", "prompt": "x"}))  # its search finds the change
        await w.until(lambda: "new" in w.server.fleet.names)
        old = w.server.fleet.names["old"].model
        assert (old.engines, old.router.in_flight()) == ({}, 3)
        go.set()
        assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * 3
        assert (await waiting)[0] in (200, 503)  # 503: the engine is being identified
        assert await ask(w, "old") == {(503, None): 1}
        await w.settled()


async def test_an_engine_of_another_model_than_the_configured_one_is_out_of_service() -> None:
    with capture_logs() as log:
        it = world(fakes([BASE], [{"id": "other"}]), model="tiny", health=FAST)
        w = await it.__aenter__()
    try:
        assert await ask(w, "tiny", 10) == {(200, "e0"): 10}
        reason = "it serves 'other', not 'tiny'"
        assert (await debug(w, "e1"))["last_error"] == reason
        ready = orjson.loads((await w.get("/ready"))[1])
        [problem] = [each for each in ready["warnings"] if each["what"] == "not usable"]
        assert (problem["reason"], problem["names"]) == (reason, ["e1"])
        assert "--served-model-name" in problem["fix"]
        assert {"engine": "e1", "reason": reason} in [
            {k: e.get(k) for k in ("engine", "reason")} for e in log
        ]
        w.engines[1].cards = [BASE]
        await w.until(lambda: w.server.fleet.models[0].engines["e1"].in_service)
        assert await ask(w, "tiny", 4) == {(200, "e0"): 2, (200, "e1"): 2}
        w.engines[0].cards = [{"id": "x"}]
        await w.until(lambda: not w.server.fleet.models[0].engines["e0"].in_service)
        assert await ask(w, "tiny", 4) == {(200, "e1"): 4}
    finally:
        await it.__aexit__(None, None, None)


async def test_a_wrong_model_is_in_the_start_block_and_ready() -> None:
    """Ux 3.3: `serve --model WRONG` in front of an engine that serves only `emulated`."""
    with capture_logs() as log:
        it = world(fakes([{"id": "emulated"}]), model="qwen")
        w = await it.__aenter__()
    try:
        block = startup_block(next(event for event in log if event["event"] == "listening"))
        assert "0 of 1 usable" in block
        assert "WARNING  e0: not usable: it serves 'emulated', not 'qwen'" in block
        assert "fix: start the engine with --served-model-name" in block
        status, body = await w.get("/ready")
        assert (status, b"serves another model" in body) == (503, True)
        status, _, got = await w.post({"model": "qwen", "prompt": "x"})
        assert (status, "serves another model (1 of 1 engines)" in got["error"]["message"]) == (503, True)
    finally:
        await it.__aexit__(None, None, None)


async def test_one_name_for_two_models_is_a_problem_until_it_is_over() -> None:
    right, other = [{"id": "m", "root": "/data/Qwen3-8B/"}], [{"id": "m", "root": "meta/Llama-3-8B"}]
    same = [{"id": "m", "root": "/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd"}]
    with capture_logs() as log:
        async with world(fakes(right, same, other), health=FAST) as w:
            (problem,) = w.server.fleet.own_problems()
            assert (problem.what, problem.engines) == ("maybe other weights", ["e2"])
            assert problem.reason == "m: meta/Llama-3-8B at them, /data/Qwen3-8B/ at most engines"
            assert problem.fix is not None
            assert "--served-model-name" in problem.fix
            assert problem.shown(True) in orjson.loads((await w.get("/ready"))[1])["warnings"]
            assert "e2: maybe other weights" in [
                each["what"] for each in orjson.loads((await w.get("/debug/live"))[1])["problems"]
            ]
            w.engines[2].cards = right
            await w.until(lambda: not [*w.server.fleet.own_problems()])
    lines = [each for each in log if each["event"].startswith("the engine may have other weights")]
    assert [(each["engine"], each["weights"]) for each in lines] == [("e2", "meta/Llama-3-8B")]
    block = startup_block(next(event for event in log if event["event"] == "listening"))
    assert "WARNING  e2: maybe other weights: m: meta/Llama-3-8B at them" in block


async def test_several_models_in_one_list_are_in_the_start_block() -> None:
    with capture_logs() as log:
        async with world(fakes([{"id": "a"}], [{"id": "b"}], [{"id": "b"}])) as w:
            assert await ask(w, "a") == {(200, "e0"): 1}
            assert not [*w.server.fleet.own_problems()]
    block = startup_block(next(event for event in log if event["event"] == "listening"))
    for line in (
        "model    a (1 of 3 engines)",
        "model    b (2 of 3 engines)",
        "NOTE     the engines serve several",
    ):
        assert line in block


async def test_a_model_that_was_removed_leaves_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 6.12."""
    async with world(fakes([{"id": "old"}]), health=FAST) as w:
        await ask(w, "old")
        assert b'model="old"' in (await w.get("/metrics"))[1]
        w.engines[0].cards = [{"id": "new"}]
        await w.until(lambda: "new" in w.server.fleet.names)
        monkeypatch.setattr(fleet, "UNSERVED_SECONDS", 0.01)
        await w.until(lambda: "old" not in w.server.fleet.names)
        text = (await w.get("/metrics"))[1]
        assert b'model="old"' not in text
        assert b'model="new"' in text


async def test_an_engine_that_changes_its_name_again_and_again_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "MOST_UNSERVED", 3)
    async with world(fakes([{"id": "m0"}]), health={"interval": 0.02}) as w:
        for number in range(1, 9):
            w.engines[0].cards = [{"id": f"m{number}"}]
            await w.until(lambda name=f"m{number}": name in w.server.fleet.names)
        await w.until(lambda: len(w.server.fleet.models) <= 4)
        assert len(w.server.fleet.names) <= 4


# -- unknown names ---------------------------------------------------------------------------------


async def test_unknown_names_ask_each_engine_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "SEARCH_SECONDS", 30.0)
    monkeypatch.setattr(names, "MOST_SEARCHES", 5)
    async with world(fakes([BASE]), health={"interval": 60}) as w:
        assert await ask(w, "unknown") == {(404, None): 1}
        read = w.engines[0].page_reads.count("/v1/models")
        waiting = [asyncio.create_task(w.post({"model": f"u{n}", "prompt": "x"})) for n in range(20)]
        done, pending = await asyncio.wait(waiting, timeout=1.0)
        assert {task.result()[0] for task in done} == {404}
        assert (len(done), len(pending)) == (15, 5)
        assert w.engines[0].page_reads.count("/v1/models") == read
        assert (await ask(w, "tiny")) == {(200, "e0"): 1}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await w.until(lambda: not w.server.fleet.search._waiting)


async def test_an_engine_that_hangs_does_not_hold_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(fakes([BASE], [BASE]), health={"interval": 60, "timeout": 10}) as w:
        hung = asyncio.Event()

        async def hang(request: Request, writer: asyncio.StreamWriter) -> bool:
            hung.set()
            await asyncio.sleep(30)
            return False

        monkeypatch.setattr(w.engines[1], "_answer", hang)
        w.engines[0].cards = [BASE, lora("sql")]
        status, _, _ = await w.post({"model": "sql", "prompt": "x"})
        assert (status, hung.is_set()) == (200, True)


async def test_a_page_that_cannot_be_read_keeps_the_known_names() -> None:
    async with world(fakes([BASE, lora("sql")]), health={"interval": 0.02}) as w:
        for page in ((200, b"<html>"), (500, b""), (200, b"null")):
            w.engines[0].extra_pages["/v1/models"] = page
            read = len(w.engines[0].page_reads)
            await w.until(lambda read=read: w.engines[0].page_reads[read:].count("/v1/models") > 1)
            assert await ask(w, "sql") == {(200, "e0"): 1}


@pytest.mark.parametrize("config", [{}, {"model": "tiny"}])
async def test_an_engine_that_lists_no_model_gets_no_requests_until_it_lists_one(config: Any) -> None:
    """As Dynamo's frontend without a worker: it is healthy, and answers 404 at once."""
    empty = {"/v1/models": (200, b'{"object":"list","data":[]}')}
    async with world(fakes([BASE], [BASE]), health=FAST, **config) as w:
        first = w.server.fleet.models[0].engines["e0"]
        assert await ask(w, "tiny", 4) == {(200, "e0"): 2, (200, "e1"): 2}
        w.engines[0].extra_pages.update(empty)
        await w.until(lambda: not first.in_service)
        assert await ask(w, "tiny", 4) == {(200, "e1"): 4}
        w.engines[1].extra_pages.update(empty)
        await w.until(lambda: not any(each.in_service for each in first.model.engines.values()))
        status, _, got = await w.post({"model": "tiny", "prompt": "x"})
        assert (status, "lists no model (2 of 2 engines)" in got["error"]["message"]) == (503, True)
        assert (await debug(w, "e0"))["last_error"] == "GET /v1/models: it lists no model"
        for engine in w.engines:
            engine.extra_pages.clear()
        await w.until(lambda: all(each.in_service for each in first.model.engines.values()))
        assert await ask(w, "tiny", 4) == {(200, "e0"): 2, (200, "e1"): 2}


async def test_an_engine_whose_list_is_empty_at_the_start_is_not_usable() -> None:
    engines = fakes([BASE], [BASE])
    engines[0].extra_pages["/v1/models"] = (200, b'{"data": []}')
    async with world(engines, model="tiny", health=FAST) as w:
        assert await ask(w, "tiny", 4) == {(200, "e1"): 4}
        engines[0].extra_pages.clear()
        await w.until(lambda: w.server.fleet.models[0].engines["e0"].in_service)
        assert await ask(w, "tiny", 4) == {(200, "e0"): 2, (200, "e1"): 2}


async def test_one_model_can_be_asked_for_before_the_router_knows_it() -> None:
    async with world(fakes([BASE]), health={"interval": 60}) as w:
        assert (await w.get("/v1/models/sql"))[0] == 404
        w.engines[0].cards = [BASE, lora("org/sql")]
        status, body = await w.get("/v1/models/org%2Fsql")
        assert (status, orjson.loads(body)["parent"]) == (200, "tiny")


# -- cards (bugs 3) --------------------------------------------------------------------------------


async def test_cards_keep_what_the_engines_report() -> None:
    base = {"id": "tiny", "object": "model", "root": "/models/tiny", "parent": None, "created": 1_700_000_000}
    long = base | {"max_model_len": 131_072}
    short = base | {"max_model_len": 32_768, "created": 1_800_000_000}
    sql = lora("sql", root="/adapters/sql", created=1_700_000_001, max_model_len=None)
    async with world(fakes([long, sql], [short])) as w:
        found = await cards(w)
        owner = {"owned_by": "lmetric-router"}
        assert found["tiny"] == base | owner | {"max_model_len": 32_768}
        assert found["sql"] == {
            "id": "sql",
            "object": "model",
            "root": "/adapters/sql",
            "parent": "tiny",
            "created": 1_700_000_001,
            **owner,
        }
        for name, card in found.items():
            assert orjson.loads((await w.get(f"/v1/models/{name}"))[1]) == card


async def test_the_time_of_the_request_in_a_card_is_no_change() -> None:
    """vLLM sets `created` and the ids of permissions anew for each answer."""
    async with world(fakes([BASE | {"created": 1}])) as w:
        engine = w.server.fleet.models[0].engines["e0"]
        before = (await w.get("/v1/models"))[1]
        w.engines[0].cards = [BASE | {"created": 2, "permission": [{"id": "modelperm-2"}]}]
        await w.server.fleet.read_models(engine)
        assert (await w.get("/v1/models"))[1] == before
        assert engine.identified


async def test_a_list_that_returns_to_an_earlier_one_is_read() -> None:
    async with world(fakes([BASE, lora("sql")]), health={"interval": 60}) as w:
        engine = w.server.fleet.models[0].engines["e0"]
        await w.server.fleet.read_models(engine)
        w.engines[0].cards = [BASE]
        await w.server.fleet.identify(engine)
        assert set(await cards(w)) == {"tiny"}
        w.engines[0].cards = [BASE, lora("sql")]
        await w.server.fleet.read_models(engine)
        assert set(await cards(w)) == {"tiny", "sql"}


# -- the names of a pool, alone --------------------------------------------------------------------


def test_names_of_a_pool() -> None:
    it = ModelNames("a")
    base, alias, sql = ModelCard("a"), ModelCard("b"), ModelCard("sql", parent="a")
    assert it.update("e0", []) == []
    assert (it.uniform, it.engines_of("a")) == (True, None), "an engine without a list serves the main name"
    assert it.update("e0", [base, alias]) == ["a", "b"]
    assert it.update("e1", [base, sql]) == ["sql"]
    assert it.engines_of("a") is None
    assert (it.engines_of("b"), it.engines_of("sql"), it.uniform) == (["e0"], ["e1"], False)
    assert it.update("e1", [base]) == ["sql"]
    assert "sql" not in it.known
    assert it.remove("e0") == ["b"]
    assert "b" in it.known, "its engine may come back"
    assert (it.engines_of("b"), it.claim("b"), it.claim("sql")) == ([], 6, None)
    assert it.forget(float("inf")) == {"b"}
    assert (it.known, it.uniform) == (["a"], True)
    assert (it.name_for("e1"), it.name_for("unknown")) == ("a", "a")
    it.update("e2", [alias])
    assert it.name_for("e2") == "b"


async def test_clients_of_unknown_models_that_leave_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "SEARCH_SECONDS", 30.0)
    async with world(fakes([BASE]), health={"interval": 60}) as w:
        await ask(w, "unknown")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.2)) as client:
            with pytest.raises(TimeoutError):
                await client.post(w.url + "/v1/completions", json={"model": "x", "prompt": "y"})
        await w.until(lambda: not w.server.front.relays and not w.server.fleet.search._waiting)
