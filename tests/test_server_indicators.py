"""Configured indicators, groups of engines, and request properties in the server's expressions.

Indicators come from metrics, from load headers, or are pushed.
"""

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from pydantic import ValidationError

import lmetric as lm
from lmetric.config import ConfigError, ServerConfig, load_config
from lmetric.config.schema import IndicatorConfig
from lmetric.server import Server
from lmetric.server.fleet.indicators import Indicators
from server_world import FakeEngine, Request, World, answer, lora, plain, says, world
from test_server_kv import emulated

LOAD = {"interval": 0.02}
LOADED = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n"


def declared(name: str, source: str, **more: Any) -> dict[str, Any]:
    return {name: {"source": source, **more}}


def column(w: World, name: str) -> list[float]:
    """Returns an indicator of e0, e1, ...."""
    router = w.server.fleet.models[0].router
    by_name = dict(zip(router.instances(), router.indicators()[name].tolist(), strict=True))
    return [by_name[each] for each in sorted(by_name)]


def shown(values: list[float]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values]


async def placed(w: World, count: int = 1, **body: Any) -> list[str]:
    """Sends requests one after another. Returns their engines."""
    engines = []
    for _ in range(count):
        status, headers, _ = await w.post({"model": "tiny", "prompt": "a", **body})
        assert status == 200
        engines.append(headers["x-lmetric-instance"])
    return engines


async def test_a_metric_is_an_indicator() -> None:
    indicators = declared("srv_power", "vllm:power_watts")
    pages = [b'vllm:power_watts{gpu="0"} %d\nvllm:power_watts{gpu="1"} 20.5\n' % n for n in (300, 100, 200)]
    engines = [FakeEngine(metrics=LOADED % 0 + page) for page in pages]
    async with world(engines, policy="srv_power", indicators=indicators, load=LOAD) as w:
        await w.until(lambda: column(w, "srv_power") == [320.5, 120.5, 220.5])
        assert await placed(w, 3) == ["e1"] * 3
        # The next page counts, negative numbers included.
        engines[2].metrics = LOADED % 0 + b"vllm:power_watts -1\n"
        await w.until(lambda: column(w, "srv_power")[2] == -1)
        assert await placed(w) == ["e2"]
        page = (await w.get("/metrics"))[1].decode()
        assert 'lmetric_indicator{indicator="srv_power",instance="e0",model="tiny"} 320.5' in page
        values = orjson.loads((await w.get("/debug/indicators"))[1])["tiny"]
        assert [values[f"e{n}"]["srv_power"] for n in range(3)] == [320.5, 120.5, -1]
        label = (await w.post())[1]["x-lmetric-decision"]
        record = orjson.loads((await w.get(f"/debug/decisions/{label}"))[1])
        assert record["best"][0]["terms"] == {"srv_power": -1.0}


@pytest.mark.parametrize("default", [None, 50.0])
async def test_a_metric_that_disappears_leaves_the_default_or_nothing(default: float | None) -> None:
    name = "srv_gone" if default is None else "srv_gone_default"
    indicators = declared(name, "vllm:power_watts", default=default)
    engines = [FakeEngine(metrics=LOADED % 0 + b"vllm:power_watts %d\n" % n) for n in (10, 40)]
    async with world(engines, policy=name, indicators=indicators, load=LOAD) as w:
        await w.until(lambda: column(w, name) == [10, 40])
        assert await placed(w) == ["e0"]
        engines[0].metrics = LOADED % 0
        await w.until(lambda: shown(column(w, name)) == [default, 40])
        assert await placed(w, 2) == ["e1"] * 2
        rows = orjson.loads((await w.get("/debug/engines"))[1])
        assert [row["load"]["missing_metrics"] for row in rows] == [["vllm:power_watts"], []]
        sample = f'lmetric_indicator{{indicator="{name}",instance="e0",model="tiny"}}'
        assert (sample in (await w.get("/metrics"))[1].decode()) == (default is not None)
        engines[0].metrics = LOADED % 0 + b"vllm:power_watts 1\n"
        await w.until(lambda: column(w, name) == [1, 40])
        assert await placed(w) == ["e0"]


async def test_values_age_when_the_page_does_not_come() -> None:
    indicators = declared("srv_aged", "vllm:power_watts", max_age_seconds=0.3)
    indicators |= declared("srv_ageless", "vllm:power_watts")
    answered = FakeEngine(metrics=LOADED % 0 + b"vllm:power_watts 7\n")
    async with world([answered], indicators=indicators, load=LOAD) as w:
        await w.until(lambda: column(w, "srv_aged") == [7])
        [engine] = w.server.fleet.engines()
        hang = asyncio.Event()

        async def get(path: str, seconds: float) -> tuple[int, bytes]:
            await hang.wait()
            return 200, b""

        engine.upstream.get = get  # type: ignore[method-assign]
        await w.until(lambda: shown(column(w, "srv_aged")) == [None])
        assert column(w, "srv_ageless") == [7]
        hang.set()


async def test_an_engine_whose_process_ends_loses_its_values_but_not_the_pushed_ones() -> None:
    indicators = declared("srv_lost", "vllm:power_watts") | declared("srv_kept", "push")
    engine = FakeEngine(metrics=LOADED % 0 + b"vllm:power_watts 7\n")
    health = {"interval": 0.02}
    async with world([engine], indicators=indicators, load=LOAD, admin=True, health=health) as w:
        await w.until(lambda: column(w, "srv_lost") == [7])
        assert (await w.post({"srv_kept": 3}, "/admin/engines/e0/indicators"))[0] == 200
        await engine.stop()
        await w.until(lambda: shown(column(w, "srv_lost")) == [None])
        assert column(w, "srv_kept") == [3]


async def test_an_engine_added_while_the_router_serves_has_its_metric() -> None:
    indicators = declared("srv_added", "engine_price")
    engines = [FakeEngine(metrics=b"engine_price %d\n" % n) for n in (5, 2)]
    async with world(engines[:1], policy="srv_added", indicators=indicators, load=LOAD, admin=True) as w:
        await w.until(lambda: column(w, "srv_added") == [5])
        await engines[1].start()
        try:
            status, _, row = await w.post(
                {"url": engines[1].url, "name": "e1", "model": "tiny"}, "/admin/engines"
            )
            assert (status, row["group"]) == (200, None)
            await w.until(lambda: column(w, "srv_added") == [5, 2])
            assert await placed(w) == ["e1"]
        finally:
            await engines[1].stop()


async def test_metrics_of_an_engine_whose_load_is_on_another_page() -> None:
    indicators = declared("srv_sglang", "sglang:num_running_reqs")
    async with emulated(api="sglang", model="tiny") as engine:
        entries = [{"url": engine.url, "name": "e0"}]
        async with world([], engines=entries, indicators=indicators, load=LOAD) as w:
            [e0] = w.server.fleet.engines()
            assert e0.load_pages == ["/v1/loads?include=core", "/metrics"]
            await w.until(lambda: e0.load_reports["/v1/loads"] > 2 and column(w, "srv_sglang") == [0])
            assert e0.load_error is None


async def test_header_fields_are_indicators() -> None:
    indicators = declared("srv_queue", "header") | declared("srv_cpu", "header:cpu_utilization")

    def engine(number: int) -> FakeEngine:
        header = b"TEXT named_metrics.srv_queue=%d, cpu_utilization=0.5" % number
        extra = b"endpoint-load-metrics: %s\r\n" % header
        body = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
        return FakeEngine(behave=says(plain(200, body, extra), then="keep"))

    async with world([engine(9), engine(4)], indicators=indicators) as w:
        assert sorted(await placed(w, 2)) == ["e0", "e1"]
        assert (column(w, "srv_queue"), column(w, "srv_cpu")) == ([9, 4], [0.5, 0.5])
        assert [e.load_reports["header"] for e in w.server.fleet.engines()] == [0, 0]
        for each in w.engines:
            each.behave = answer  # without the header, the values stay
        await placed(w, 2)
        assert column(w, "srv_queue") == [9, 4]


async def test_pushed_values() -> None:
    indicators = declared("srv_watts", "push", default=0.0) | declared("srv_read", "a_metric")
    token = {"authorization": "Bearer secret"}
    admin = {"enabled": True, "token": "secret"}
    async with world(2, policy="srv_watts", admin=admin, indicators=indicators, load=LOAD) as w:
        path = "/admin/engines/e0/indicators"
        assert (await w.post({"srv_watts": 300}, path))[0] == 401
        status, _, got = await w.post({"srv_watts": 300}, path, token)
        assert (status, got) == (200, {"engine": "e0", "indicators": {"srv_watts": 300}})
        assert column(w, "srv_watts") == [300, 0]
        assert await placed(w, 3) == ["e1"] * 3
        for body, expected in (
            ({"srv_read": 1}, "'srv_read' is not an indicator with source push; expected one of: srv_watts"),
            ({"srv_watts": "hot"}, "expected a finite number"),
            ({"srv_watts": True}, "expected a finite number"),
            (b"[1]", "object"),
        ):
            status, _, got = await w.post(body, path, token)
            assert status == 400
            assert expected in got["error"]["message"]
        assert (await w.post({"srv_watts": 1}, "/admin/engines/e9/indicators", token))[0] == 404
        assert (await w.client.get(w.url + path, headers=token)).status == 405
        assert column(w, "srv_watts") == [300, 0]
        assert (await w.post({"srv_watts": None}, path, token))[0] == 200
        assert column(w, "srv_watts") == [0, 0]


@pytest.mark.parametrize(
    ("indicator", "more", "message"),
    [
        ({"source": "pull"}, {}, r"indicators\.srv_bad\.source = 'pull': 'pull' is not valid; expected push"),
        ({"source": 'vllm:a{b="c"}'}, {}, "without labels"),
        ({"source": "header:"}, {}, "expected push, header, header:FIELD"),
        ({}, {}, r"indicators\.srv_bad\.source: missing"),
        ({"source": "push", "default": math.nan}, {}, r"indicators\.srv_bad\.default = nan"),
        ({"source": "push", "max_age_seconds": 0}, {}, r"indicators\.srv_bad\.max_age_seconds = 0"),
        ({"source": "push", "max_age": 3}, {}, "unknown key; did you mean 'max_age_seconds'"),
        ({"source": "push"}, {"admin": False}, "source push needs admin.enabled: true"),
        ({"source": "a:b"}, {"load": {"interval": None}}, "source a:b needs load.interval, which is null"),
    ],
)
def test_bad_declarations_are_told(indicator: dict[str, Any], more: dict[str, Any], message: str) -> None:
    given = {"admin": True, **more, "indicators": {"srv_bad": indicator}}
    with pytest.raises(ConfigError, match=message):
        load_config(None, given, {})
    with pytest.raises(ValidationError, match=r"admin\.enabled|source|max_age|default|load\."):
        ServerConfig.model_validate({**given, "indicators": {}, "models": [{"name": "m", **_of(indicator)}]})


def _of(indicator: dict[str, Any]) -> dict[str, Any]:
    return {"indicators": {"srv_bad": indicator}}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bs", r"indicators\.bs: .*the name of a built-in indicator"),
        ("GPU", r"indicators\.GPU: .*lowercase letters"),
        ("lmetric", r"indicators\.lmetric: .*the name of a policy"),
    ],
)
def test_names_that_are_taken_are_told(name: str, message: str) -> None:
    with pytest.raises(lm.BadValueError, match=message):
        Server(ServerConfig(admin=True, indicators=declared(name, "push"))).build()


def test_the_documented_declarations_can_be_used() -> None:
    text = (Path(__file__).parents[1] / "docs" / "tutorials" / "your_own_policy.md").read_text()
    shown = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "indicators:" in block]
    assert len(shown) == 2
    for block in shown:
        Server(ServerConfig.model_validate(yaml.safe_load(block))).build()


def test_an_unknown_key_below_a_name_is_told() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.acme\.wieght = 2: unknown key; did you mean 'weight'"):
        load_config(None, {"tenants": {"acme": {"wieght": 2}}}, {})


def test_values_of_a_page_and_of_a_header() -> None:
    sources = {"srv_a": "vllm:a_b", "srv_b": "vllm:a_b_total", "srv_h": "header", "srv_i": "header:Other-1"}
    indicators = Indicators({name: IndicatorConfig(source=source) for name, source in sources.items()})
    page = b'vllm:a_b{engine="0"} 3\nvllm:a_b{engine="1"} -4.5e1\nx:a_b 9\nvllm:a_b_total NaN\n'
    assert indicators.of_page(page) == {"srv_a": -42.0, "srv_b": None}
    assert indicators.missing(indicators.of_page(page)) == ["vllm:a_b_total"]
    assert indicators.of_page(b"") == {"srv_a": None, "srv_b": None}
    for header in (
        "TEXT named_metrics.srv_h=5, Other-1=-0.5, cpu_utilization=1",
        'JSON {"named_metrics": {"srv_h": 5, "x": 1}, "Other-1": -0.5}',
    ):
        assert indicators.of_header(header) == {"srv_h": 5.0, "srv_i": -0.5}
    for header in ("TEXT named_metrics.srv_h=x", "JSON [", "JSON []", 'JSON {"named_metrics": 3}', ""):
        assert indicators.of_header(header) == {"srv_h": None, "srv_i": None}


async def test_a_reload_declares_indicators_for_its_policies() -> None:
    engines = [FakeEngine(metrics=LOADED % 0 + b"vllm:a_b %d\nvllm:c_d %d\n" % n) for n in ((1, 9), (2, 8))]
    before = declared("srv_before", "vllm:a_b")
    async with world(engines, policy="srv_before", indicators=before, load=LOAD) as w:
        await w.until(lambda: column(w, "srv_before") == [1, 2])
        given = w.server.config.model_dump() | {
            "policy": "srv_after",
            "indicators": declared("srv_after", "vllm:c_d"),
        }
        await w.server.apply(w.server.prepare(ServerConfig.model_validate(given)))
        assert shown(column(w, "srv_before")) == [None, None]  # no source reports it any more
        await w.until(lambda: column(w, "srv_after") == [9, 8])
        assert await placed(w, 2) == ["e1"] * 2
        # A wrong declaration changes nothing.
        given["indicators"] = declared("lmetric", "vllm:c_d")
        with pytest.raises(lm.BadValueError, match=r"indicators\.lmetric: .*the name of a policy"):
            await w.server.apply(w.server.prepare(ServerConfig.model_validate(given)))
        assert await placed(w) == ["e1"]


# Groups of engines.


async def test_ranks_of_an_engine_are_a_group() -> None:
    async with emulated(ranks=2) as first, emulated(ranks=2) as second:
        ranks = [
            {"url": engine.url, "name": f"{name}{rank}", "data_parallel_rank": rank}
            for name, engine in (("a", first), ("b", second))
            for rank in (0, 1)
        ]
        named = [{"url": "http://127.0.0.1:9", "name": name, "group": "node"} for name in ("c", "d")]
        alone = [{"url": "http://127.0.0.1:9/x", "name": "e"}]
        indicators = declared("srv_tokens", "push")
        async with world(
            [], engines=[*ranks, *named, *alone], model="tiny", indicators=indicators, admin=True,
            policy="group_max(srv_tokens) + srv_tokens / 1000",
        ) as w:  # fmt: skip
            values = {"a0": 1, "a1": 50, "b0": 20, "b1": 10, "c": 7, "d": 9, "e": 4}
            for name, value in values.items():
                assert (await w.post({"srv_tokens": value}, f"/admin/engines/{name}/indicators"))[0] == 200
            rows = {row["name"]: row["group"] for row in orjson.loads((await w.get("/debug/engines"))[1])}
            assert rows["a0"] == rows["a1"] == first.url
            assert (rows["c"], rows["e"]) == ("node", None)
            router = w.server.fleet.models[0].router
            scores = dict(zip(router.instances(), router.score(lm.Request(prompt_tokens=9)), strict=True))
            of_groups = {name: score - values[name] / 1000 for name, score in scores.items()}
            assert {n: round(v, 6) for n, v in of_groups.items() if not math.isnan(v)} == {
                "a0": 50,
                "a1": 50,
                "b0": 20,
                "b1": 20,
            }
            # The rank with the least load in the group with the smallest maximum.
            assert await placed(w, 2) == ["b1"] * 2
            for name in ("c", "d", "e"):
                router.update_instance(name, healthy=True)
            scores = dict(zip(router.instances(), router.score(lm.Request(prompt_tokens=9)), strict=True))
            assert [round(scores[n]) for n in ("c", "d", "e")] == [9, 9, 4]


async def test_a_ranks_indicator_is_its_own_sample() -> None:
    indicators = declared("srv_of_rank", "vllm:generation_tokens_total")
    async with emulated(ranks=2) as engine:
        entries = [{"url": engine.url, "name": f"e{rank}", "data_parallel_rank": rank} for rank in (0, 1)]
        async with world([], engines=entries, indicators=indicators, load=LOAD) as w:
            served = await placed(w, 3, max_tokens=4)
            expected = [4 * served.count(name) for name in ("e0", "e1")]
            assert sorted(expected) == [4, 8]
            await w.until(lambda: column(w, "srv_of_rank") == expected)


# Properties of requests.


async def test_a_tenant_fence_is_one_line() -> None:
    fence = {"score": "bs", "filter": '(srv_fenced == 0) | (tenant == "acme")', "then": ["-srv_fenced"]}
    indicators = declared("srv_fenced", "push", default=0)
    tenants = {"acme": {}, "other": {}}
    async with world(3, policy=fence, indicators=indicators, admin=True, tenants=tenants) as w:
        await w.post({"srv_fenced": 1}, "/admin/engines/e1/indicators")

        async def served(tenant: str | None) -> set[str]:
            headers = {} if tenant is None else {"x-tenant": tenant}
            return {(await w.post(headers=headers))[1]["x-lmetric-instance"] for _ in range(12)}

        assert await served("acme") == {"e1"}
        for outside in ("other", None, "unknown"):
            assert await served(outside) == {"e0", "e2"}


async def test_requests_without_a_tenant_are_nobodys() -> None:
    go = asyncio.Event()

    async def waits(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await answer(engine, request, writer)

    async with world([FakeEngine(behave=waits)], tenants={"acme": {}}) as w:
        asks = [asyncio.create_task(w.post(headers=h)) for h in ({}, {}, {"x-tenant": "acme"})]
        await w.engines[0].asked(3)
        router = w.server.fleet.models[0].router
        router.set_policy("tenant_bs")
        assert router.score(lm.Request(prompt_tokens=9)) == [0]
        assert router.score(lm.Request(prompt_tokens=9, tenant="acme")) == [1]
        go.set()
        assert [(await ask)[0] for ask in asks] == [200] * 3


async def test_lora_affinity_is_one_line() -> None:
    go = asyncio.Event()

    async def waits(engine: FakeEngine, request: Request, writer: asyncio.StreamWriter) -> bool:
        await go.wait()
        return await answer(engine, request, writer)

    cards = [{"id": "tiny"}, *map(lora, ("sql", "chat", "code"))]
    engines = [FakeEngine(behave=waits, cards=cards) for _ in range(3)]
    for engine in engines:
        await engine.start()
    entries = [{"url": engine.url, "name": f"e{number}"} for number, engine in enumerate(engines)]
    model = {"name": "tiny", "engines": entries, "adapters": ["sql", "chat", "code"]}
    async with world([], engines=[], models=[model], policy="bs - 10 * lora_bs") as w:
        router = w.server.fleet.models[0].router
        homes: dict[str, list[str]] = {}
        asks = []
        for adapter in ("sql", "chat", "code", "chat", "code", "sql", "sql"):
            before = {n: r["decisions"] for n, r in router.stats()["instances"].items()}
            asks.append(asyncio.create_task(w.post({"model": adapter, "prompt": "a"})))
            await w.until(lambda: router.in_flight() == len(asks))
            after = {n: r["decisions"] for n, r in router.stats()["instances"].items()}
            [home] = [name for name in after if after[name] != before[name]]
            homes.setdefault(adapter, []).append(home)
        assert all(len(set(each)) == 1 for each in homes.values())
        assert len({each[0] for each in homes.values()}) == 3
        go.set()
        assert [(await ask)[0] for ask in asks] == [200] * 7
    for engine in engines:
        await engine.stop()


async def test_the_clients_priority_is_a_fact_of_the_request() -> None:
    # e0 gets urgent requests, e1 others, e2 requests without a priority.
    facts = declared("srv_urgent", "push", default=0) | declared("srv_none", "push", default=0)
    policy = {
        "score": "where(priority < 0, -srv_urgent, where(priority >= 0, srv_urgent + srv_none, -srv_none))"
    }
    async with world(3, policy={"score": "bs"}, indicators=facts, admin=True) as w:
        for engine, values in (("e0", {"srv_urgent": 1}), ("e2", {"srv_none": 1})):
            await w.post(values, f"/admin/engines/{engine}/indicators")
        assert (await w.client.put(w.url + "/admin/policy", json={"policy": policy})).status == 200
        assert await placed(w, 2, priority=-3) == ["e0"] * 2
        assert await placed(w, 2, priority=2) == ["e1"] * 2
        assert await placed(w, 2) == ["e2"] * 2
        assert await placed(w, 2, priority="3") == ["e2"] * 2  # the engine decides
        # As in vLLM, the header precedes the field.
        for header, expected in (("-1", "e0"), ("4", "e1"), ("soon", "e2")):
            _, got, _ = await w.post(
                {"model": "tiny", "prompt": "a", "priority": 9}, headers={"x-vllm-priority": header}
            )
            assert got["x-lmetric-instance"] == expected
        assert w.engines[1].requests[-1].headers["x-vllm-priority"] == "4"  # it is forwarded, too


async def test_the_length_class_is_path_and_tenant_where_a_policy_reads_it() -> None:
    fact = declared("srv_chats", "push", default=0)
    policy = (
        'where((length_class == "/v1/chat/completions") | (length_class == "/v1/completions acme"), 1, 0)'
    )
    async with world(2, indicators=fact, admin=True, tenants={"acme": {}}) as w:
        [model] = w.server.fleet.models
        assert not model.policies.reads_length_class
        await w.post({"srv_chats": 1}, "/admin/engines/e0/indicators")
        change = {"policy": f"({policy}) * (1 - 2 * srv_chats) + srv_chats * 0.5"}
        assert (await w.client.put(w.url + "/admin/policy", json=change)).status == 200
        assert model.policies.reads_length_class
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
        for body, path, tenant, expected in (
            (chat, "/v1/chat/completions", {}, "e0"),
            (None, "/v1/completions", {}, "e1"),
            (None, "/v1/completions", {"x-tenant": "acme"}, "e0"),
            (chat, "/v1/chat/completions", {"x-tenant": "acme"}, "e1"),
        ):
            _, headers, _ = await w.post(body, path, tenant)
            assert headers["x-lmetric-instance"] == expected, (path, tenant)
