"""The emulated engine as a process of its own, and several as children."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lmetric.engines.errors import EngineStartError
from lmetric.profiles import Profile, ProfileError, load_profile, shipped_profiles
from lmetric_lab.embedded import EmbeddedEngines
from lmetric_lab.emulated import EngineOptions, EngineServer
from lmetric_lab.emulated.__main__ import main
from waiting import PATIENCE_SECONDS

ENGINE = [sys.executable, "-m", "lmetric_lab.emulated"]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_embedded_engines_start_answer_alike_and_stop() -> None:
    options = EngineOptions(clock_speed=100, kv_events_endpoint="tcp://*:0", model="m")
    async with EmbeddedEngines(2, options) as engines, aiohttp.ClientSession() as http:
        assert len(set(engines.urls)) == 2
        assert all(engine.kv_events_endpoint for engine in engines.engines)
        texts = []
        for url in engines.urls:
            async with http.post(f"{url}/v1/completions", json={"prompt": "a", "model": "m"}) as response:
                texts.append((await response.json())["choices"][0]["text"])
        assert texts[0] == texts[1]
        pids = [engine.process.pid for engine in engines.engines]
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)
    assert [engine.process.returncode for engine in engines.engines] == [0, 0]


async def test_an_embedded_engine_that_does_not_start_says_why() -> None:
    with pytest.raises(EngineStartError, match="engine 1 ended with code 1: error: profile 'nowhere'"):
        async with EmbeddedEngines(options=[EngineOptions(), EngineOptions(profile="nowhere")]):
            pass


def test_children_go_when_their_parent_is_killed() -> None:
    program = """
import asyncio
from lmetric_lab.embedded import EmbeddedEngines
async def main():
    async with EmbeddedEngines(1) as engines:
        print(engines.engines[0].process.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_streams_and_the_process(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(*ENGINE, "--port", "0", stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert (ready["event"], ready["pid"]) == ("ready", process.pid)
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "a", "max_tokens": 5000, "stream": True}
        async with http.post(f"{ready['url']}/v1/completions", json=body) as response:
            await response.content.readline()
            process.send_signal(number)
            *_, last, done, rest = (await response.text()).split("\n\n")
    assert json.loads(last.strip().removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert (done, rest) == ("data: [DONE]", "")
    assert await asyncio.wait_for(process.wait(), PATIENCE_SECONDS) == 0


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*ENGINE, "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 1
    message = f"error: port {port} on 127.0.0.1 is in use; choose another, or 0 for any free one\n"
    assert (result.stdout, result.stderr) == ("", message)


def run(flags: list[str]) -> int | str | None:
    """The exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(flags))
    return ended.value.code


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--clock-speed", "-1"], 2, "--clock-speed '-1': expected above 0"),
        (
            ["--order", "random"],
            2,
            "--order 'random': local order: \"random\" is not valid; expected one of fcfs",
        ),
        (["--preempt", "swap:x"], 2, "--preempt 'swap:x': preempt 'swap:x' is not valid"),
        (["--preempt", "swap", "--admission", "reserve"], 2, "--preempt 'swap': swap only with"),
        (["--order", "slo", "--order-slo", "0"], 2, "--order-slo '0': expected above 0"),
        (["--profile", "qwen3-30b-a3b-h2"], 1, "did you mean 'qwen3-30b-a3b-h20'?"),
        (["--max-sequences", "5000"], 1, "max_batch_tokens must be max_sequences (5000) or more"),
        (["--max-model-len", "9000000"], 1, "the KV blocks hold 2048000"),
        (["--kv-events-endpoint", "nonsense"], 1, "cannot connect to KV events endpoint 'nonsense'"),
        (["--host", "203.0.113.1", "--port", "0"], 1, "cannot listen on 203.0.113.1:0"),
    ],
)
def test_bad_flags_are_one_clear_line(
    flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(flags) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]


async def test_a_replay_endpoint_in_use_is_refused_and_frees_the_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        replay = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        options = EngineOptions(port=0, kv_events_endpoint="tcp://*:0", kv_events_replay_endpoint=replay)
        with pytest.raises(EngineStartError, match=r"cannot bind KV events endpoint .*in use"):
            await EngineServer(options).start()


def test_every_option_is_described_and_becomes_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(field.description for field in EngineOptions.model_fields.values())
    options = EngineOptions(port=0, metrics=False, cache_blocks=7, exit_with_parent=True)
    assert options.flags() == ["--port", "0", "--cache-blocks", "7", "--no-metrics", "--exit-with-parent"]
    assert run(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in help_text for name in EngineOptions.model_fields)


def test_shipped_profiles_load_and_overrides_keep_the_capacity(tmp_path: Path) -> None:
    assert "qwen3-30b-a3b-h20" in shipped_profiles()
    for name in shipped_profiles():
        profile = load_profile(name)
        assert profile.source
        assert profile.note
    live = EngineOptions().resolved_profile()
    assert (live.block_tokens, live.cache_blocks) == (16, 128_000)
    assert EngineOptions(cache_blocks=9).resolved_profile().cache_blocks == 9
    path = tmp_path / "mine.yaml"
    content: dict[str, Any] = load_profile("independent-sim").constants()
    path.write_text(json.dumps(content))
    assert load_profile(str(path)) == Profile.model_validate(content)
    for broken, message in [
        (content | {"fixed_second": 1}, "fixed_second: Extra inputs"),
        (content | {"fixed_seconds": "fast"}, "fixed_seconds: expected a number"),
        ([1], "expected a mapping"),
    ]:
        path.write_text(json.dumps(broken))
        with pytest.raises(ProfileError, match=message):
            load_profile(str(path))
    path.write_text("a: [")
    with pytest.raises(ProfileError, match="not YAML"):
        load_profile(str(path))
