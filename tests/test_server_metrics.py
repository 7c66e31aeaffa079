"""/metrics: its values after real requests, its two formats, and its turns for other tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from lmetric.config import EngineConfig, ServerConfig
from lmetric.printable import printable
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe.exposition import Table, labels_text, pieces, render
from lmetric.server.observe.families import families
from lmetric.server.observe.histograms import SHORT_SECONDS, Histogram
from lmetric.server.observe.metrics import Metrics
from server_world import FakeEngine, Request, World, plain, usage, world

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
PARSERS: dict[str, Callable[[str], Iterable[Metric]]] = {"text": prometheus, "openmetrics": openmetrics}
ACCEPT = {"text": "text/plain", "openmetrics": "application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"}


def values(families: Iterable[Metric]) -> Values:
    """Returns the value of each sample, by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def scraped(w: World, form: str = "text") -> Values:
    async with w.client.get(f"{w.url}/metrics", headers={"accept": ACCEPT[form]}) as response:
        wanted = "openmetrics" if form == "openmetrics" else "text/plain; version=0.0.4"
        assert wanted in response.headers["content-type"]
        return values(PARSERS[form](await response.text()))


def value(found: Values, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def names_an_engine(found: Values, engine: str) -> bool:
    return any(("instance", engine) in labels for _, labels in found)


def caches(tokens: int) -> Any:
    """Returns an engine whose answers report cached tokens of a prompt of 100."""

    async def behave(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
        writer.write(plain(200, {"id": "1", "choices": choices, "usage": usage(100, 3, tokens)}))
        return True

    return behave


@pytest.mark.parametrize("form", PARSERS)
async def test_latencies_by_class_and_instance(form: str) -> None:
    classes = {"classes": {"fast": {}, "batch": {}}}
    async with world(2, admission=classes) as w:
        for name in ("fast", "fast", "batch", None):
            headers = {"x-slo-class": name} if name else {}
            body = {"prompt": "hello", "stream": True, "max_tokens": 3}
            assert (await w.post(body, headers=headers))[0] == 200
        found = await scraped(w, form)
        for metric in ("time_to_first_token", "time_per_output_token", "request"):
            for name, count in (("fast", 2), ("batch", 1), ("", 1)):
                labels = {"model": "tiny", "slo_class": name}
                assert value(found, f"lmetric_{metric}_seconds_count", **labels) == count
            by_engine = [
                value(found, f"lmetric_instance_{metric}_seconds_count", model="tiny", instance=engine.name)
                for engine in w.engines
            ]
            assert by_engine == [2, 2]  # round robin
            last = value(
                found, f"lmetric_instance_{metric}_seconds_bucket", model="tiny", instance="e0", le="+Inf"
            )
            assert last == 2
        for metric in ("router_overhead", "decision"):
            assert value(found, f"lmetric_{metric}_seconds_count", model="tiny") == 4
            seconds = value(found, f"lmetric_{metric}_seconds_sum", model="tiny")
            assert 0 < seconds < 4
        assert value(found, "lmetric_router_overhead_seconds_sum", model="tiny") > value(
            found, "lmetric_decision_seconds_sum", model="tiny"
        )
        info = next(dict(labels) for name, labels in found if name == "lmetric_policy_info")
        assert info["policy"] == "round_robin"
        assert any(name == "lmetric_build_info" for name, _ in found)


async def test_the_wait_of_a_held_request_is_no_overhead() -> None:
    """A tenant may have one request at a time, so the second waits for the slow first."""
    tenants = {"a": {"max_concurrent": 1}}
    async with world([FakeEngine(pace=0.1)], tenants=tenants, admission={}) as w:
        body = {"prompt": "hello", "stream": True, "max_tokens": 3}
        both = [w.post(body, headers={"x-tenant": "a"}) for _ in range(2)]
        assert [status for status, _, _ in await asyncio.gather(*both)] == [200, 200]
        found = await scraped(w)
        assert value(found, "lmetric_decision_seconds_count", model="tiny") == 2
        assert value(found, "lmetric_router_overhead_seconds_count", model="tiny") == 1
        assert value(found, "lmetric_router_overhead_seconds_sum", model="tiny") < 0.1


async def test_predicted_and_reported_cached_tokens_are_compared() -> None:
    async with world(1, policy="lmetric", block_size=16) as w:
        w.engines[0].behave = caches(0)
        body = orjson.dumps({"prompt": list(range(100)), "max_tokens": 3})
        await w.post(body)
        found = await scraped(w)
        labels = {"model": "tiny", "instance": "e0"}
        assert value(found, "lmetric_instance_compared_prompt_tokens_total", **labels) == 100
        assert value(found, "lmetric_instance_overpredicted_tokens_total", **labels) == 0
        await w.post(body)  # the router predicts 96 tokens, and the engine reports none
        w.engines[0].behave = caches(100)
        await w.post(orjson.dumps({"prompt": list(range(200, 300)), "max_tokens": 3}))
        found = await scraped(w)
        assert value(found, "lmetric_instance_compared_prompt_tokens_total", **labels) == 300
        assert value(found, "lmetric_instance_overpredicted_tokens_total", **labels) == 96
        assert value(found, "lmetric_instance_underpredicted_tokens_total", **labels) == 100


async def test_predictions_count_without_reports_and_reports_have_their_own_prompts() -> None:
    async def silent(_: FakeEngine, __: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(plain(200, {"id": "1", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}))
        return True

    async with world(1, policy="lmetric", block_size=16) as w:
        w.engines[0].behave = silent
        body = orjson.dumps({"prompt": list(range(100)), "max_tokens": 3})
        counts = []
        for _ in range(3):
            await w.post(body)
            found = await scraped(w)
            kinds = ("prompt", "predicted_cached", "reported_prompt", "cached")
            counts.append([value(found, f"lmetric_{kind}_tokens_total", model="tiny") for kind in kinds])
            w.engines[0].behave = silent if len(counts) == 1 else caches(50)
    assert counts == [[100, 0, 0, 0], [200, 96, 0, 0], [300, 192, 100, 50]]


async def test_an_engine_that_left_has_no_samples() -> None:
    admin = {"enabled": True, "token": "root"}
    async with world(2, admin=admin) as w:
        for _ in range(2):
            await w.post()
        assert names_an_engine(await scraped(w), "e1")
        headers = {"authorization": "Bearer root"}
        async with w.client.delete(f"{w.url}/admin/engines/e1", headers=headers) as response:
            assert response.status == 200
        await w.until(lambda: "e1" not in w.server.fleet.models[0].engines)
        found = await scraped(w)
        assert names_an_engine(found, "e0")
        assert not names_an_engine(found, "e1")


async def test_without_a_scrape_engines_that_left_fill_no_memory() -> None:
    async with world(1, admin={"enabled": True}) as w:
        for number in range(8):
            w.engines[0].name = f"e{number}"
            assert (await w.post())[1]["x-lmetric-instance"] == f"e{number}"
            await w.settled()
            async with w.client.delete(f"{w.url}/admin/engines/e{number}") as response:
                assert response.status == 200
            body = {"url": w.engines[0].url, "name": f"e{number + 1}", "model": "tiny"}
            assert (await w.post(body, "/admin/engines"))[0] == 200
            await w.until(lambda: all(each.healthy for each in w.server.fleet.engines()))
        assert len(w.server.front.metrics.requests.instances["tiny"]) <= 3


async def test_budgets() -> None:
    async with world(1) as w:
        found = await scraped(w)
        assert value(found, "lmetric_budget_available", model="tiny", budget="retries") == 100
        assert value(found, "lmetric_budget_available", model="tiny", budget="hedges") == 1
        for _ in range(20):
            await w.post()
        found = await scraped(w)
        assert value(found, "lmetric_budget_available", model="tiny", budget="hedges") == 2
        assert value(found, "lmetric_budget_available", model="tiny", budget="retries") > 100


# The two formats.


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False))
def test_the_parser_of_prometheus_client_reads_all_labels_and_values(label: str, number: float) -> None:
    table = Table("lmetric_a", 'a "title"\\ of\nlines', "gauge", ("instance",))
    table.add(labels_text({"instance": label}), number)
    family = GaugeMetricFamily("lmetric_b", "b", labels=("instance",))
    family.add_metric((label,), number)
    text = "".join(piece for each in (table, family) for piece in pieces(each, False))
    expected = {
        (name, frozenset({("instance", printable(label))})): number for name in ("lmetric_a", "lmetric_b")
    }
    assert len(text.splitlines()) == 6
    assert values(prometheus(text)) == expected


def test_exemplars_are_in_openmetrics_only() -> None:
    histogram = Histogram(SHORT_SECONDS)
    histogram.observe(0.002)
    histogram.exemplify(0.002, "0af7651916cd43dd8448eb211c80319c")
    assert [len(row) for row in histogram.buckets()].count(3) == 1
    counter = CounterMetricFamily("lmetric_c", "c", labels=("model",))
    counter.add_metric(("m",), 1)
    text = "".join(pieces(counter, True))
    assert text.startswith("# HELP lmetric_c c\n# TYPE lmetric_c counter\nlmetric_c_total{")


async def test_other_tasks_run_while_a_large_fleet_is_written() -> None:
    engines = [EngineConfig(url="http://127.0.0.1:9", name=f"e{number}") for number in range(1000)]
    fleet = Fleet(ServerConfig(engines=engines, model="model"))
    fleet.build()
    metrics = Metrics(fleet)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    text = await render(families(metrics))
    task.cancel()
    assert turns > 5
    found = values(prometheus(text.decode()))
    assert sum(name == "lmetric_instance_bs" for name, _ in found) == 1000


async def test_nothing_is_lost_between_two_turns() -> None:
    table = Table("lmetric_a", "a", "counter", ("instance",))
    for number in range(5):
        table.add(labels_text({"instance": f"e{number}"}), number)
    text = await render([None, table, None, GaugeMetricFamily("lmetric_b", "b", 2)], openmetrics=True)
    found = values(openmetrics(text.decode()))
    assert value(found, "lmetric_a_total", instance="e4") == 4
    assert value(found, "lmetric_b") == 2
    assert len(found) == 6
