"""The router's findings about an engine: recorded answers, and the emulated engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lmetric.engines.adapter import Capabilities, EventSource, Load, Priority
from lmetric.engines.endpoints import EndpointError, at_rank, reachable
from lmetric.engines.identify import UNKNOWN, identify
from lmetric.engines.sglang import Sglang
from lmetric.engines.vllm import Vllm
from lmetric_lab.emulated import EngineOptions, EngineServer

SAMPLES = Path(__file__).parent / "samples"
MODELS = '{"data": [{"id": "tiny", "parent": null}]}'


async def of(pages: dict[str, str], rank: int | None = None) -> tuple[Any, Capabilities]:
    async def ask(path: str) -> tuple[int, bytes]:
        return (200, pages[path].encode()) if path in pages else (404, b'{"detail": "Not Found"}')

    return await identify(ask, rank)


def sample(name: str) -> dict[str, Any]:
    return dict(json.loads((SAMPLES / f"{name}.json").read_text()))


async def test_vllm_as_it_is() -> None:
    adapter, told = await of(sample("vllm-0.32.0")["pages"])
    assert isinstance(adapter, Vllm)
    assert (told.engine, told.version) == ("vllm", "0.32.0")
    [model] = told.models
    assert (model.name, model.parent, model.max_model_len) == ("tiny", None, 4096)
    assert model.root
    assert (told.block_size, told.cache_blocks, told.cache_tokens) == (32, 512, 512 * 32)
    assert told.prefix_caching is True
    [source] = told.event_sources
    assert (source.rank, source.connects, told.no_events) == (0, False, None)
    assert source.endpoint.startswith(("ipc://", "tcp://*"))
    assert told.load_path == "/metrics"
    assert set(told.load_names) == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    }
    assert told.full_report == {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    assert told.priority == Priority("lower_first", None, header=True)
    assert (told.cached_tokens, told.handover) == (None, None)  # unreported values are not made up


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("rank", [None, 0])
async def test_the_cache_of_a_data_parallel_vllm_is_counted_once(ranks: int, rank: int | None) -> None:
    """vLLM 0.32 repeats the blocks of all its ranks together for each rank, and the tokens of one
    rank (log_metrics_info, _apply_ready_response). The sum over the ranks was N times too large."""
    pages = sample("vllm-0.32.0")["pages"]
    del pages["/kv_event_sources"]
    lines = pages["/metrics"].replace('num_gpu_blocks="512"', f'num_gpu_blocks="{512 * ranks}"').splitlines()
    pages["/metrics"] = "".join(
        line.replace('engine="0"', f'engine="{each}"') + "\n" for line in lines for each in range(ranks)
    )
    counted = 1 if rank is not None else ranks
    _, told = await of(pages, rank)
    assert told.ranks == tuple(range(ranks))
    assert (told.cache_blocks, told.cache_tokens) == (512 * counted, 16384 * counted)
    # Versions without the tokens also sum.
    for tokens in ('kv_cache_size_tokens="16384",', 'kv_cache_size_tokens="None",'):
        pages["/metrics"] = pages["/metrics"].replace('kv_cache_size_tokens="16384",', tokens)
        _, told = await of(pages, rank)
        assert told.cache_blocks == 512 * counted
    with pytest.raises(ValueError, match=f"data_parallel_rank: {ranks}: the engine has the ranks 0"):
        await of(pages, ranks)


async def test_a_hybrid_cache_and_blocks_of_several_gpus() -> None:
    """Blocks times their setting are not the tokens of a model with several groups of layers, and
    blocks of decode context parallelism are larger than the setting."""
    pages = sample("vllm-0.32.0")["pages"]
    page = pages["/metrics"].replace('kv_cache_size_tokens="16384"', 'kv_cache_size_tokens="6400"')
    _, told = await of(pages | {"/metrics": page})
    assert (told.block_size, told.cache_blocks, told.cache_tokens) == (32, 200, 6400)
    label = 'effective_attention_block_size="%s"'
    page = pages["/metrics"].replace(label % 32, label % 128)
    _, told = await of(pages | {"/metrics": page})
    assert (told.block_size, told.cache_blocks, told.cache_tokens) == (128, 128, 16384)
    _, told = await of(pages | {"/metrics": page.replace(label % 128, label % "None")})
    assert (told.block_size, told.cache_tokens) == (32, 16384)


async def test_sglang_as_its_sources_have_it() -> None:
    adapter, told = await of(sample("sglang-0.5.23")["pages"])
    assert isinstance(adapter, Sglang)
    assert (told.engine, told.version) == ("sglang", "0.5.23")
    model, lora = told.models
    assert (model.name, model.root, model.max_model_len) == ("qwen", "qwen", 32768)
    assert told.root() == "/models/qwen"  # the list of models has only the name
    assert (lora.name, lora.root, lora.parent) == ("sql", "/adapters/sql", "qwen")
    assert (told.block_size, told.cache_blocks) == (64, 2 * 131072 // 64)
    pages = sample("sglang-0.5.23")["pages"]
    small = {path: page.replace("131072", "63") for path, page in pages.items()}
    assert (await of(small))[1].cache_blocks == 2  # not 0, which no router accepts
    assert told.event_sources == (
        EventSource(0, "tcp://*:5557", "kv", "tcp://*:5559"),
        EventSource(1, "tcp://*:5558", "kv", "tcp://*:5560"),
    )
    assert (told.load_feeds, told.load_topic) == (("tcp://*:5561", "tcp://*:5562"), "load")
    assert told.load_path == "/v1/loads?include=core"
    assert (told.cached_tokens, told.full_report) == (True, None)
    assert told.priority == Priority("higher_first", True)
    pages = sample("sglang-0.5.23")["pages"]
    both = [adapter.load(pages[path].encode()) for path in ("/v1/loads?include=core", "/metrics")]
    assert [(load.waiting, load.running, load.kv_usage) for load in both] == [(2, 4, 0.3)] * 2


@pytest.mark.parametrize(
    ("changes", "sources", "why"),
    [
        ({"kv_events": None, "kv_events_config": None}, (), "KV events are off"),
        (
            {"kv_events": None, "kv_events_config": '{"publisher": "zmq", "endpoint": "ipc:///kv"}'},
            (EventSource(0, "ipc:///kv"),),
            None,
        ),
        (
            {"kv_events": {"endpoint_host": "10.0.0.9", "endpoint_port_base": 5, "dp_size": 1}},
            (EventSource(0, "tcp://10.0.0.9:5", connects=True),),
            None,
        ),
        (
            {
                "kv_events": {"endpoint_host": "127.0.0.1", "endpoint_port_base": 5, "dp_size": 1},
                "kv_events_config": '{"bind": true}',
            },
            (EventSource(0, "tcp://127.0.0.1:5"),),
            None,
        ),
    ],
)
async def test_sglang_wired_in_other_ways(
    changes: dict[str, Any], sources: tuple[EventSource, ...], why: str | None
) -> None:
    pages = dict(sample("sglang-0.5.23")["pages"])
    info = json.loads(pages["/server_info"])
    # An older one has the page under its old name.
    pages["/get_server_info"] = json.dumps(info | changes)
    del pages["/server_info"]
    _, told = await of(pages)
    assert told.event_sources == sources
    assert (told.no_events is None) == (why is None)
    assert why is None or why in str(told.no_events)


async def test_older_and_other_engines() -> None:
    metrics = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:gpu_cache_usage_perc{engine="0"} 0.5\n'
    config = 'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="%s"} 1.0\n'
    pages = {
        "/v1/models": MODELS,
        "/version": '{"version": "0.9.2"}',
        "/metrics": metrics + config % (0, "250") + config % (1, "250"),  # of both ranks together
    }
    adapter, told = await of(pages)
    assert (told.engine, told.block_size, told.cache_blocks) == ("vllm", 16, 250)
    assert told.ranks == (0, 1)
    assert (await of(pages, 1))[1].cache_blocks == 125
    assert told.load_names == ("vllm:num_requests_running", "vllm:gpu_cache_usage_perc")
    assert adapter.load(metrics.encode()) == Load(None, 2.0, 0.5, told.load_names)
    assert "0.9.2 does not report its KV event endpoints" in str(told.no_events)
    assert (told.full_report, told.event_sources) == (None, ())
    # Not told yet is not a number.
    _, told = await of(pages | {"/metrics": metrics + config % (0, "None")})
    assert (told.block_size, told.cache_blocks) == (16, None)
    assert told.max_loras is None
    loras = (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters=""} 1.7e9\n'
    )
    _, told = await of(pages | {"/metrics": metrics + loras})
    assert told.max_loras == 4
    off = config.replace('block_size="16"', 'block_size="16",enable_prefix_caching="False"')
    _, told = await of(pages | {"/metrics": metrics + off % (0, "9")})
    assert told.prefix_caching is False
    adapter, told = await of({"/v1/models": MODELS})
    assert (adapter, told.engine, [model.name for model in told.models]) == (UNKNOWN, "unknown", ["tiny"])
    assert "neither vLLM nor SGLang" in str(told.no_events)
    with pytest.raises(ValueError, match="lists no model"):
        await of({"/v1/models": '{"data": []}'})
    for body in ("{}", "[]", '{"data": [{"id": "a", "parent": "b"}]}', "nonsense"):
        with pytest.raises(ValueError, match="not a list of models"):
            await of({"/v1/models": body})
    with pytest.raises(ValueError, match="status 404"):
        await of({})


def test_load_is_read_from_either_engines_metrics() -> None:
    ranks = b'vllm:num_requests_running{engine="0",a="}"} 3\nvllm:num_requests_running{engine="1"} 4\n'
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    for adapter in (Vllm(), UNKNOWN):
        assert adapter.load(ranks + b"vllm:kv_cache_usage_perc 0.25\n") == Load(None, 7.0, 0.25, names)
    page = b"sglang:num_running_reqs 2\nsglang:num_queue_reqs{} 1e0\nsglang:token_usage NaN\n"
    assert UNKNOWN.load(page) == Load(1.0, 2.0, None, ("sglang:num_running_reqs", "sglang:num_queue_reqs"))
    assert not UNKNOWN.load(b"x vllm:num_requests_running 3\nvllm:num_requests_running_total 9\n\xff")


def test_load_headers_of_both_forms() -> None:
    vllm = Vllm()
    values = '{"named_metrics": {"num_requests_waiting": 7.0, "kv_cache_usage_perc": 0.5}}'
    text = "named_metrics.num_requests_waiting=7.0, named_metrics.kv_cache_usage_perc=0.5"
    for header in (f"TEXT {text}", text, f"JSON {values}"):
        assert vllm.load_of_header(header) == {"waiting": 7.0, "kv_usage": 0.5}, header
    for header in sample("vllm-0.32.0")["load_headers"]:
        assert vllm.load_of_header(header) == {"waiting": 0.0, "kv_usage": 0.0}, header
    for header in (
        "TEXT ",
        "",
        "JSON {",
        "JSON []",
        "JSON 3",
        "TEXT a=b, named_metrics.num_requests_waiting=nan",
    ):
        assert not vllm.load_of_header(header), header


def test_what_engines_say_of_an_error() -> None:
    for body, said in (
        (b'{"error": {"message": "busy:\\n try later", "code": 503}}', "busy: try later"),
        (
            b'{"object": "error", "message": "The request queue is full.", "code": 503}',
            "The request queue is full.",
        ),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "x"}', "x"),
        (b"<html>\n bad gateway", "<html> bad gateway"),
        (b"[1]", "[1]"),
        (b'{"message": 3}', '{"message": 3}'),
        (b"a" * 1000, "a" * 300),
        (b"", ""),
    ):
        assert Vllm().error(body) == said


def test_urgency_means_the_same_everywhere() -> None:
    assert Priority("lower_first", True).field(3) == -3
    assert Priority("lower_first", None).field(3) == -3
    assert Priority("higher_first", True).field(3) == 3
    assert Priority("higher_first", False).field(3) is None


def test_endpoints_are_made_reachable(tmp_path: Path) -> None:
    socket = tmp_path / "kv"
    socket.touch()
    for endpoint, host, there in (
        ("tcp://*:5557", "10.0.0.4", "tcp://10.0.0.4:5557"),
        ("tcp://0.0.0.0:5557", "engine-0", "tcp://engine-0:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        ("tcp://10.1.1.1:5557", "10.0.0.4", "tcp://10.1.1.1:5557"),
        ("tcp://127.0.0.1:5557", "localhost", "tcp://127.0.0.1:5557"),
        (f"ipc://{socket}", "localhost", f"ipc://{socket}"),
        ("ipc://@kv", "localhost", "ipc://@kv"),
    ):
        assert reachable(endpoint, host) == there
    for endpoint, host, why in (
        ("tcp://127.0.0.1:5557", "10.0.0.4", "only its own machine"),
        # security F9: other spellings of this machine's addresses, and sockets on it.
        ("tcp://[::ffff:127.0.0.1]:5557", "10.0.0.4", "only its own machine"),
        ("tcp://[::1]:5557", "10.0.0.4", "only its own machine"),
        ("tcp://127.1:5557", "10.0.0.4", "only its own machine"),
        ("tcp://0x7f000001:5557", "10.0.0.4", "only its own machine"),
        ("tcp://0:5557", "10.0.0.4", "only its own machine"),
        ("tcp://:::5557", "10.0.0.4", "only its own machine"),
        ("tcp://[::ffff:0.0.0.0]:5557", "10.0.0.4", "only its own machine"),
        ("tcp://localhost.:5557", "10.0.0.4", "only its own machine"),
        (f"ipc://{socket}", "10.0.0.4", "its own machine"),
        ("ipc://@kv", "engine-0", "its own machine"),
        ("tcp://*:kv", "10.0.0.4", "not tcp://host:port"),
        ("tcp://*:70000", "10.0.0.4", "not tcp://host:port"),
        ("inproc://kv", "localhost", "no other process"),
        (f"ipc://{tmp_path}/none", "localhost", "no such socket"),
    ):
        with pytest.raises(EndpointError, match=why):
            reachable(endpoint, host)
    assert at_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert at_rank("ipc:///kv", 1) == "ipc:///kv"


async def test_an_engine_with_another_owner_is_not_vllm_for_its_version() -> None:
    """TensorRT-LLM 1.2 refuses fields that it does not know, so it must not get vLLM's."""
    card = {"id": "tiny", "object": "model", "created": 1, "owned_by": "tensorrt_llm"}
    pages = {"/v1/models": json.dumps({"object": "list", "data": [card]}), "/version": '{"version": "1.2.0"}'}
    adapter, told = await of(pages | {"/metrics": "[]"})
    assert adapter is UNKNOWN
    assert (told.token_ids, told.full_report, adapter.cache_salt) == (False, None, False)
    del card["owned_by"]  # a proxy may leave it out
    adapter, told = await of(pages | {"/v1/models": json.dumps({"object": "list", "data": [card]})})
    assert isinstance(adapter, Vllm)
    assert told.token_ids


@pytest.mark.parametrize("api", ["vllm", "sglang"])
async def test_emulated_engines_need_no_adapter_of_their_own(api: str) -> None:
    options = EngineOptions.model_validate(
        {
            "port": 0,
            "api": api,
            "cache_blocks": 1000,
            "kv_events_endpoint": "tcp://*:0",
            "kv_events_replay_endpoint": "tcp://*:0",
            "kv_events_topic": "kv@0",
            "load_publish_endpoint": "tcp://*:0" if api == "sglang" else None,
        }
    )
    async with EngineServer(options) as engine, aiohttp.ClientSession() as http:

        async def ask(path: str) -> tuple[int, bytes]:
            async with http.get(engine.url + path) as response:
                return response.status, await response.read()

        adapter, told = await identify(ask)
        said = engine.description()
        load = adapter.load((await ask(str(told.load_path)))[1])
    assert (adapter.name, told.engine) == (api, api)
    assert "+lmetric." in str(told.version)  # the version shows that it is no real engine
    assert (told.models[0].name, told.block_size, told.cache_blocks) == ("emulated", 16, 1000)
    assert told.event_sources == (
        EventSource(0, said["kv_events_endpoint"], "kv@0", said["kv_events_replay_endpoint"]),
    )
    assert (load.waiting, load.running, load.kv_usage) == (0, 0, 0)
    assert len(told.load_feeds) == (api == "sglang")
    assert (told.full_report is not None) == (api == "vllm")
