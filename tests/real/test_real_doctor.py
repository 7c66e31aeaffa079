"""`lmetric-router doctor` on real vLLM: green where all is right, red where something is broken."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_process import VllmEngine, free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

Start = Callable[..., list[VllmEngine]]
RUN = (
    "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', 'doctor', *sys.argv[1:]]; main()"
)


async def doctor(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what it prints with --json."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "--json", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode in (0, 1), err.decode()
    assert out, err.decode()
    print(out.decode())
    return process.returncode, json.loads(out)


def outcomes(engine: dict[str, Any]) -> dict[str, str]:
    return {verdict["check"]: verdict["outcome"] for verdict in engine["verdicts"]}


def green(engine: dict[str, Any]) -> bool:
    """Whether all is well with an engine that hands nothing over."""
    told = outcomes(engine)
    return told.pop("handover") == "not offered" and set(told.values()) == {"pass"}


def seen(engine: dict[str, Any], check: str) -> str:
    """The observation behind one verdict."""
    return next(str(verdict["seen"]) for verdict in engine["verdicts"] if verdict["check"] == check)


def red(engine: dict[str, Any]) -> dict[str, str]:
    """The checks that the engine does not pass, each with the cause and the remedy as one text."""
    told = {v["check"]: f"{v['seen']} SET {v['remedy']}" for v in engine["verdicts"]}
    return {name: told.get(name, "not tried") for name in engine["wanting"]}


def config(path: Path, engine: VllmEngine, **settings: Any) -> str:
    """A configuration file with that engine."""
    file = path / "router.yaml"
    file.write_text(yaml.safe_dump({"engines": [{"url": engine.url}], **settings}))
    return str(file)


async def test_two_engines_set_up_right_are_all_green(vllm_engines: Start) -> None:
    engines = vllm_engines(2)
    code, said = await doctor(*(engine.url for engine in engines))
    assert all(green(engine) for engine in said["engines"])
    assert all(len(engine["verdicts"]) == 13 for engine in said["engines"])
    assert (code, said["good"]) == (0, True)
    assert {engine["good_for"] for engine in said["engines"]} == {"exact"}
    for engine in said["engines"]:
        assert "by the times in its KV events" in seen(engine, "clock")
        assert "--thorough also tests" in seen(engine, "priority")


async def test_each_rank_of_an_engine_with_two(vllm_engines: Start) -> None:
    (engine,) = vllm_engines(1, data_parallel_size=2)
    code, said = await doctor(engine.url)
    (found,) = said["engines"]
    assert green(found)
    assert "on each of 2 ranks" in seen(found, "block_hashes")
    assert seen(found, "kv_events").count("tcp://") == 2
    assert (code, found["good_for"]) == (0, "exact")


async def test_a_queue_that_follows_priorities_and_one_that_does_not(vllm_engines: Start) -> None:
    for policy, outcome, told in (
        ("priority", "pass", "its queue follows them: an urgent request overtook"),
        # In development mode, an engine publishes its scheduling policy.
        ("fcfs", "not offered", "its queue ignores priorities"),
    ):
        (engine,) = vllm_engines(1, **({} if policy == "priority" else {"scheduling_policy": policy}))
        code, said = await doctor(engine.url, "--thorough")
        (found,) = said["engines"]
        assert outcomes(found)["priority"] == outcome
        assert told in seen(found, "priority")
        assert code == 0, "no mode needs it"


async def test_kv_events_that_are_off(vllm_engines: Start) -> None:
    (engine,) = vllm_engines(1, kv_events_config=None)
    code, said = await doctor(engine.url)
    (found,) = said["engines"]
    assert set(red(found)) == {"kv_events", "block_hashes"}
    assert outcomes(found)["kv_events"] == "not offered"
    assert "--kv-events-config" in red(found)["kv_events"]
    assert (code, found["good_for"]) == (1, "approximate")
    assert (await doctor(engine.url, "--require", "approximate"))[0] == 0


async def test_an_engine_that_connects_where_nobody_listens(vllm_engines: Start, tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    (engine,) = vllm_engines(1, kv_events_config=events)
    _, said = await doctor(engine.url)
    assert set(red(said["engines"][0])) == {"kv_events", "block_hashes"}
    assert endpoint in red(said["engines"][0])["kv_events"]
    # Where the router listens there, it is right.
    file = config(tmp_path, engine, kv_events={"endpoint": endpoint, "bind": True})
    code, said = await doctor("--config", file)
    assert red(said["engines"][0]) == {}
    assert code == 0


async def test_a_wrong_endpoint(vllm_engines: Start, tmp_path: Path) -> None:
    (engine,) = vllm_engines(1)
    file = config(tmp_path, engine, kv_events={"endpoint": f"tcp://127.0.0.1:{free_port()}"})
    _, said = await doctor("--config", file)
    assert set(red(said["engines"][0])) == {"kv_events", "block_hashes"}
    assert "no connection to" in red(said["engines"][0])["kv_events"]


async def test_a_wrong_topic(vllm_engines: Start, tmp_path: Path) -> None:
    (engine,) = vllm_engines(1)
    _, said = await doctor("--config", config(tmp_path, engine, kv_events={"topic": "kv@elsewhere"}))
    assert set(red(said["engines"][0])) == {"kv_events", "block_hashes"}
    assert "not 'kv@elsewhere'" in red(said["engines"][0])["kv_events"]


async def test_a_wrong_block_size(vllm_engines: Start, tmp_path: Path) -> None:
    (engine,) = vllm_engines(1)
    _, said = await doctor("--config", config(tmp_path, engine, block_size=16))
    assert set(red(said["engines"][0])) == {"block_hashes"}
    assert "32 tokens" in red(said["engines"][0])["block_hashes"]


async def test_prefix_caching_that_is_off(vllm_engines: Start) -> None:
    (engine,) = vllm_engines(1, enable_prefix_caching=False, kv_events_config=None)
    code, said = await doctor(engine.url)
    (found,) = said["engines"]
    assert set(red(found)) == {"prefix_cache", "kv_events", "block_hashes"}
    assert "--enable-prefix-caching" in red(found)["prefix_cache"]
    assert (code, found["good_for"]) == (1, "load")
    assert (await doctor(engine.url, "--require", "load"))[0] == 0


async def test_cached_tokens_that_are_not_told(vllm_engines: Start) -> None:
    (engine,) = vllm_engines(1, enable_prompt_tokens_details=None)
    _, said = await doctor(engine.url)
    (found,) = said["engines"]
    assert set(red(found)) == {"cached_tokens"}
    assert "--enable-prompt-tokens-details" in red(found)["cached_tokens"]
    assert outcomes(found)["prefix_cache"] == "pass"  # by the engine's counter


async def test_a_wrong_tokenizer(vllm_engines: Start, tmp_path: Path) -> None:
    """Another model's, by a slip: the template has one word more."""
    (engine,) = vllm_engines(1)
    wrong = tmp_path / "model"
    shutil.copytree(engine.model, wrong)
    template = wrong / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>assistant", "<|im_start|>the assistant"))
    _, said = await doctor(engine.url, "--tokenizer", str(wrong))
    assert set(red(said["engines"][0])) == {"tokenizer"}


async def test_an_engine_that_is_dead(vllm_engines: Start) -> None:
    code, said = await doctor(f"http://127.0.0.1:{free_port()}", "--require", "load")
    (found,) = said["engines"]
    assert outcomes(found) == {"reachable": "fail"}
    assert (code, found["good_for"]) == (1, None)
