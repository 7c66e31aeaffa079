"""Pages of engines that are hostile or broken: security F4 and F10, bugs 29, and the bounds of L.

An engine is not trusted with the router's availability. The time to read a page grows with the
page. A figure beyond its bound counts as not reported. An optional page that cannot be read counts
as missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from lmetric._core import BadValueError
from lmetric.config import EngineConfig
from lmetric.engines import adapter as adapters
from lmetric.engines.adapter import LARGE_PAGE, Capabilities, Load, labels_of, samples
from lmetric.engines.errors import error_text
from lmetric.engines.identify import identify
from lmetric.engines.sglang import Sglang
from lmetric.engines.vllm import Vllm
from lmetric_lab.migrate import detect
from server_world import FakeEngine, World, world

MODELS = b'{"data": [{"id": "tiny", "parent": null}]}'
SMALL, FACTOR = 32 << 10, 8


def fill(piece: bytes, size: int) -> bytes:
    return (piece * (size // len(piece) + 1))[:size]


PAGES: dict[str, Callable[[int], bytes]] = {
    "open braces on lines": lambda n: fill(b"vllm:num_requests_running{a=\n", n),
    "open braces on one line": lambda n: fill(b"vllm:num_requests_running{a=", n),
    "open quotes on lines": lambda n: fill(b'vllm:num_requests_running{a="\n', n),
    "open quotes on one line": lambda n: fill(b'vllm:num_requests_running{a="', n),
    "labels without end": lambda n: b"vllm:num_requests_running{" + fill(b'a="b",', n),
    "a label without end": lambda n: b'vllm:num_requests_running{a="' + fill(b"x", n),
    "escapes": lambda n: fill(b'vllm:num_requests_running{a="' + b"\\" * 31 + b"\n", n),
    "quotes": lambda n: fill(b'vllm:num_requests_running{""""""""""""""""\n', n),
    "spaces": lambda n: b"vllm:num_requests_running " + fill(b" ", n),
    "spaces on lines": lambda n: fill(b"vllm:num_requests_running            x\n", n),
    "digits": lambda n: b"vllm:num_requests_running " + fill(b"1", n),
    "signs": lambda n: fill(b"vllm:num_requests_running +-+-+-+-e\n", n),
    "letters": lambda n: fill(b"a", n),
    "a letter run as labels": lambda n: b"vllm:cache_config_info{" + fill(b"a", n) + b"} 1\n",
    "names as labels": lambda n: b"vllm:cache_config_info{" + fill(b"a=", n) + b"} 1\n",
    "commas as labels": lambda n: b"vllm:cache_config_info{" + fill(b",", n) + b"} 1\n",
    "many samples": lambda n: fill(b'vllm:cache_config_info{block_size="16"} 1\n', n),
    "many ranks": lambda n: fill(b'vllm:num_requests_running{engine="7"} 1\n', n),
    "line ends": lambda n: fill(b"\n", n),
    "carriage returns": lambda n: fill(b"vllm:num_requests_running\r", n),
    "not text": lambda n: fill(b"\xff\x00\x85", n),
    "objects": lambda n: b'{"loads": [' + fill(b"{},", n) + b"{}]}",
    "nested": lambda n: fill(b"[", n),
}


def read_all(page: bytes) -> None:
    """Everything that the router does with a page of metrics."""
    for adapter in (Vllm(), Vllm().of_rank(3), Sglang()):
        adapter.load(page)
        adapter.own(page)
    Vllm()._metrics(page)
    for _, raw, _ in samples(page, "vllm:", ("cache_config_info",)):
        labels_of(raw)
    labels_of(page)
    error_text(page)
    detect._is_nginx(page.decode(errors="replace"))


@pytest.mark.parametrize("name", PAGES)
def test_the_time_to_read_a_page_grows_with_the_page(name: str) -> None:
    """F4: eight times the page took 64 times as long. No absolute limit: machines differ."""

    def seconds(size: int) -> float:
        page = PAGES[name](size)
        best = float("inf")
        for _ in range(3):
            began = time.thread_time()
            read_all(page)
            best = min(best, time.thread_time() - began)
        return best

    small, large = seconds(SMALL), seconds(SMALL * FACTOR)
    assert large < 3 * FACTOR * small + 0.02


async def test_a_large_page_is_read_in_a_thread_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: one search holds the interpreter, so a page is searched in pieces."""
    sample = b"vllm:num_requests_waiting{} 2\n"
    page = fill(b"# a comment\n", 3 * LARGE_PAGE) + b"\n" + sample + b"x" * (2 * LARGE_PAGE) + b"\n" + sample
    assert Vllm().load(page).waiting == 4.0
    assert max(map(len, adapters._pieces(page))) <= LARGE_PAGE
    assert b"".join(adapters._pieces(page)).count(sample) == 2
    used: list[int] = []

    async def spy(work: Callable[..., Any], *arguments: Any) -> Any:
        used.append(len(arguments[0]))
        return work(*arguments)

    monkeypatch.setattr(adapters.asyncio, "to_thread", spy)
    pages = {"/v1/models": MODELS, "/metrics": page, "/kv_event_sources": fill(b"[", LARGE_PAGE + 1)}
    await told(pages | {"/version": b'{"version": "0.32.0"}'})
    assert used == [len(page), LARGE_PAGE + 1]


async def told(pages: dict[str, bytes]) -> Capabilities:
    async def ask(path: str) -> tuple[int, bytes]:
        return (200, pages[path]) if path in pages else (404, b"")

    return (await identify(ask))[1]


VLLM: dict[str, bytes] = {"/v1/models": MODELS, "/version": b'{"version": "0.32.0"}'}


LISTED = b'{"0": {"endpoint": ["*"], "publisher": "zmq"}}'


@pytest.mark.parametrize(
    "page", [b"<html>", b"{}x", b"null", b"[]", b"", b'{"a": 1}', b'{"0": 5}', b'"x"', LISTED]
)
async def test_an_optional_page_that_cannot_be_read_counts_as_missing(page: bytes) -> None:
    """Bugs 29: a proxy answers unknown pages with 200 and a page of its own."""
    found = await told(VLLM | {"/kv_event_sources": page})
    assert (found.engine, found.event_sources, [model.name for model in found.models]) == (
        "vllm",
        (),
        ["tiny"],
    )
    assert "GET /kv_event_sources: not a list of sources" in str(found.no_events)
    assert found.events_fix == "set kv_events.endpoint in the configuration"
    every = dict.fromkeys(("/metrics", "/server_info?config_format=json", "/kv_event_sources"), page)
    assert (await told(VLLM | every)).engine == "vllm"
    sglang = b'{"data": [{"id": "tiny", "owned_by": "sglang"}]}'
    paths = ("/metrics", "/server_info", "/get_server_info", "/model_info", "/v1/loads?include=core")
    found = await told({"/v1/models": sglang} | dict.fromkeys(paths, page))
    assert (found.engine, found.event_sources) == ("sglang", ())
    if not isinstance(value_of(page), dict):
        assert "GET /server_info: not a JSON object" in str(found.no_events)


def value_of(page: bytes) -> Any:
    try:
        return json.loads(page)
    except ValueError:
        return None


async def test_a_vllm_behind_a_proxy_with_pages_of_its_own_is_usable() -> None:
    fake = FakeEngine(
        extra_pages={"/version": (200, b'{"version": "0.32.0"}'), "/kv_event_sources": (200, b"<html>")}
    )
    async with world([fake]) as w:
        assert (await w.post())[0] == 200
        engine = (await engines(w))[0]
        assert engine["mode"] == "approximate"
        assert "GET /kv_event_sources: not a list of sources: b'<html>'" in engine["mode_reason"]


async def engines(w: World) -> list[dict[str, Any]]:
    status, body = await w.get("/debug/engines")
    assert status == 200
    return list(orjson.loads(body))


async def test_figures_beyond_their_bounds_count_as_not_reported() -> None:
    """F10: 1e300 blocks broke /debug/engines, /admin/engines and the records."""
    metrics = b'vllm:cache_config_info{block_size="1e300",num_gpu_blocks="1e300"} 1\n'
    loads = b"vllm:num_requests_running 1e308\nvllm:num_requests_waiting 3\n"
    card = {"id": "tiny", "max_model_len": 1e300, "created": 1e300}
    pages = {"/metrics": (200, metrics + loads), "/version": (200, b'{"version": "0.32.0"}')}
    fake = FakeEngine(cards=[card], extra_pages=pages)
    async with world([fake], load={"interval": 0.05}, admin=True) as w:
        engine = (await engines(w))[0]["capabilities"]
        assert (engine["block_size"], engine["cache_blocks"]) == (None, None)
        assert engine["models"][0]["max_model_len"] is None
        assert [text.partition(":")[0] for text in engine["ignored"]] == [
            "block_size",
            "max_model_len",
            "num_gpu_blocks",
        ]
        await w.until(lambda: w.server.fleet.models[0].engines["e0"].load_reports)
        assert b"Inf" not in (await w.get("/metrics"))[1].replace(b'le="+Inf"', b"")
        assert (await w.get("/admin/engines"))[0] == 200
        assert (await w.post({}, "/admin/engines/e0/drain"))[0] == 200
        assert (await w.post({}, "/admin/engines/e0/undrain"))[0] == 200
        assert (await w.post())[0] == 200


async def test_the_largest_allowed_figures_are_used() -> None:
    metrics = b'vllm:cache_config_info{block_size="%d",num_gpu_blocks="%d"} 1\n' % (1 << 20, 1 << 40)
    fake = FakeEngine(
        cards=[{"id": "tiny", "max_model_len": 1 << 30}],
        extra_pages={"/metrics": (200, metrics), "/version": (200, b'{"version": "0.32.0"}')},
    )
    async with world([fake]) as w:
        engine = (await engines(w))[0]["capabilities"]
        assert (engine["block_size"], engine["cache_blocks"]) == (1 << 20, 1 << 40)
        assert (engine["models"][0]["max_model_len"], engine["ignored"]) == (1 << 30, [])
        assert (await w.post())[0] == 200


async def test_sglang_with_figures_beyond_their_bounds() -> None:
    info = {
        "version": "0.5.23",
        "page_size": 1e300,
        "max_total_num_tokens": 1e300,
        "dp_size": 1_000_000_000,
        "kv_events_config": "[]",
        "kv_events": {"endpoint_host": "*", "endpoint_port_base": 1e9, "dp_size": 1_000_000_000},
    }
    found = await told(
        {
            "/v1/models": b'{"data": [{"id": "tiny", "owned_by": "sglang"}]}',
            "/server_info": orjson.dumps(info),
            "/metrics": b"sglang:page_size 1e300\n",
            "/v1/loads?include=core": b'{"loads": [{"num_waiting_reqs": 1e308, "num_running_reqs": 1}]}',
        }
    )
    assert (found.block_size, found.cache_blocks, found.ranks) == (None, None, (0,))
    assert (found.event_sources, found.no_events) == ((), "its KV events are off")
    assert len(found.ignored) == 4


@pytest.mark.parametrize(
    "sources",
    [
        {str(rank): {"endpoint": "tcp://*:1"} for rank in range(2000)},
        {"-1": {"endpoint": "tcp://*:1"}},
        {"99999999999": {"endpoint": "tcp://*:1"}},
        {"9" * 5000: {"endpoint": "tcp://*:1"}},
        {"0": {"endpoint": 5}},
        {"0": []},
    ],
)
async def test_too_many_or_wrong_ranks_are_no_sources(sources: dict[str, Any]) -> None:
    found = await told(VLLM | {"/kv_event_sources": orjson.dumps(sources)})
    assert found.event_sources == ()
    assert "GET /kv_event_sources" in str(found.no_events)


async def test_fields_of_other_types_in_sources_are_left_out() -> None:
    source = {"endpoint": "tcp://*:5557", "topic": 5, "replay_endpoint": ["x"]}
    [found] = (await told(VLLM | {"/kv_event_sources": orjson.dumps({"0": source})})).event_sources
    assert (found.topic, found.replay_endpoint) == ("", None)
    fake = FakeEngine(
        extra_pages={
            "/version": (200, b'{"version": "0.32.0"}'),
            "/kv_event_sources": (200, orjson.dumps({"0": {"endpoint": "tcp://*:" + "9" * 5000}})),
        }
    )
    async with world([fake]) as w:
        assert (await w.post())[0] == 200


async def test_names_of_models_have_at_most_256_characters() -> None:
    """Security L: a name of 900 kB became a label of metrics and a card of /v1/models."""
    long, ok = "x" * 257, "é" * 256
    fake = FakeEngine(cards=[{"id": long}, {"id": "tiny"}, {"id": ok}, {"id": ""}, {"id": 5}])
    async with world([fake]) as w:
        cards = orjson.loads((await w.get("/v1/models"))[1])["data"]
        assert [card["id"] for card in cards] == ["tiny", ok]
        assert "more than 256 characters" in (await engines(w))[0]["capabilities"]["ignored"][0]
    async with world([FakeEngine(cards=[{"id": long}])]) as w:
        status, _, got = await w.post({"model": "tiny", "prompt": "x"})
        assert (status, "model not known" in got["error"]["message"]) == (503, True)
        assert len(orjson.dumps(await engines(w))) < 10_000


async def test_administrators_give_names_of_at_most_256_characters() -> None:
    async with world(1, admin=True) as w:
        for model in ("x" * 257, "x" * 900_000, ""):
            status, _, got = await w.post({"url": w.engines[0].url, "model": model}, "/admin/engines")
            assert (status, got["error"]["param"]) == (400, "model")
        with pytest.raises(BadValueError, match="257 characters"):
            w.server.fleet.add(EngineConfig(url="http://127.0.0.1:1"), "dns", "x" * 257)


async def test_an_engine_has_a_bounded_number_of_names() -> None:
    found = await told({"/v1/models": orjson.dumps({"data": [{"id": f"m{n}"} for n in range(5000)]})})
    assert (len(found.models), found.ignored) == (4096, ("models beyond the first 4096",))


@pytest.mark.parametrize("value", ["1e308", "1000000001", "-1", "nan", "inf"])
def test_a_load_beyond_its_bound_is_unknown(value: str) -> None:
    """Security L: 1e308 became +Inf."""
    page = f"vllm:num_requests_running {value}\n".encode()
    assert Vllm().load(page) == Load(names=Vllm().load(page).names)
    assert not Vllm().load_of_header(f"TEXT num_requests_running={value}")
    both = b'vllm:num_requests_running{engine="0"} 9e8\nvllm:num_requests_running{engine="1"} 9e8\n'
    assert Vllm().load(both).running is None
    assert Vllm().load(b"vllm:num_requests_running 1e9\n").running == 1e9


async def test_requests_are_answered_while_an_engine_sends_a_hostile_page() -> None:
    """F4 in the server: one of two engines has 900 kB of open braces (15 minutes a page)."""
    page = b"vllm:num_requests_running 1\n" + PAGES["open braces on lines"](900_000)
    bad = FakeEngine(extra_pages={"/version": (200, b'{"version": "0.32.0"}'), "/metrics": (200, page)})
    async with world([bad, FakeEngine()], load={"interval": 0.05}) as w:
        for _ in range(20):
            assert (await w.post())[0] == 200
        await w.until(lambda: bad.page_reads.count("/metrics") > 3)
