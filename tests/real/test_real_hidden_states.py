"""A vLLM engine that writes hidden states: a share, the right ones, bounded, with equal answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from hidden_states import play, running, workload
from make_model import HIDDEN
from train_lengths.collect import collect
from train_lengths.samples import Samples, load_samples
from vllm_process import ENVIRONMENT, MODEL, VllmEngine, environment, hidden_states
from vllm_process import model as model_folder

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

PLAIN: dict[str, Any] = {"kv_events_config": None, "scheduling_policy": "fcfs"}
LAYERS = [2]  # the last one of the model: the state before the last norm
Start = Callable[..., list[VllmEngine]]


async def answers(engine: VllmEngine, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of greedy answers, all requests at once; nothing in them names a file."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=900)) as session:

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            whole = {"model": MODEL, "temperature": 0, "return_token_ids": True, **body}
            async with session.post(f"{engine.url}/v1/completions", json=whole) as answer:
                found = await answer.json()
                assert answer.status == 200, found
                assert found.get("kv_transfer_params") is None
                choice: dict[str, Any] = found["choices"][0]
                return choice

        return await asyncio.gather(*map(one, bodies))


async def preemptions(engine: VllmEngine) -> float:
    """Requests that the engine took back since its start."""
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as page:
        lines = (await page.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "num_preemptions_total{" in line)


def requests(count: int) -> list[dict[str, Any]]:
    """Prompts with a common beginning, and answers that all have another length."""
    bodies = []
    for number in range(count):
        prompt = "a common beginning " * 40 + f"number {number * 7919}" + " more" * (number % 50)
        bodies.append({"prompt": prompt, "max_tokens": 5 + number, "ignore_eos": True})
    return bodies


def finished(folder: Path, count: int) -> list[Path]:
    """The files, when there are `count` of them, or after a minute."""
    deadline = time.monotonic() + 60
    while len(files := list(folder.glob("*.safetensors"))) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return files


async def test_states_are_those_of_the_model(vllm_engines: Start, tmp_path: Path) -> None:
    """Each state gives the next token of its answer, and answers are those without collection."""
    bodies = requests(100)
    (stock,) = vllm_engines(**PLAIN)
    expected = await answers(stock, bodies)
    (tmp_path / "states").mkdir()
    # Few blocks: requests go back and are computed again.
    flags = PLAIN | {"num_gpu_blocks_override": 100, "max_model_len": 1024}
    (engine,) = vllm_engines(**flags, **hidden_states(tmp_path / "states", LAYERS, share=1))
    # A client can choose neither the files nor which requests.
    own = {"hidden_states_path": str(tmp_path / "own.safetensors"), "include_output_tokens": False}
    bodies[0]["kv_transfer_params"] = own
    got = await answers(engine, bodies)
    differ = [number for number, pair in enumerate(zip(expected, got, strict=True)) if differs(*pair)]
    assert not differ, f"answers {differ[:10]} differ"
    assert await preemptions(engine) > 0, "no request went back"
    assert len(finished(tmp_path / "states", len(bodies))) == len(bodies)
    assert collect(tmp_path / "states", tmp_path / "samples.npz", [], hidden_size=HIDDEN) == len(bodies)
    assert list((tmp_path / "states").iterdir()) == [], "files stay after reading"
    assert not (tmp_path / "own.safetensors").exists()
    samples = load_samples(tmp_path / "samples.npz")
    assert len(samples) == sum(-(-body["max_tokens"] // 20) for body in bodies)
    generated = np.rint(np.expm1(samples.column("log_generated_tokens"))).astype(int)
    by_length = {len(choice["token_ids"]): choice for choice in got}
    lengths = (generated + samples.remaining).astype(int).tolist()
    prompts = [len(by_length[length]["prompt_token_ids"]) for length in lengths]
    assert np.rint(np.expm1(samples.column("log_prompt_tokens"))).tolist() == prompts
    wanted = [by_length[n]["token_ids"][at] for n, at in zip(lengths, generated, strict=True)]
    assert next_tokens(samples, model_folder(engine.venv)).tolist() == wanted


def differs(expected: dict[str, Any], got: dict[str, Any]) -> bool:
    return bool(expected["token_ids"] != got["token_ids"])


def next_tokens(samples: Samples, model: Path) -> NDArray[np.int64]:
    """The likeliest token after each state, by the model's last norm and its head."""
    states = samples.features[:, :-2].astype(np.float64)
    norm, head = (weights(model, name) for name in ("model.norm.weight", "lm_head.weight"))
    scaled = states / np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    found: NDArray[np.int64] = (scaled @ head.T).argmax(axis=1)
    return found


def weights(model: Path, name: str) -> NDArray[np.float32]:
    """A matrix of the model's file, of 16-bit numbers."""
    data = (model / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    about = json.loads(data[8:begin])[name]
    low, high = about["data_offsets"]
    upper = np.frombuffer(data[begin + low : begin + high], "<u2").astype(np.uint32)
    found: NDArray[np.float32] = (upper << 16).view(np.float32).reshape(about["shape"])
    return found


async def test_a_share_within_the_limit_of_bytes(vllm_engines: Start, tmp_path: Path) -> None:
    """Half of the requests are written until the disk is full, and again after reading. Requests
    that end early are not."""
    most = 8000  # 20 to 30 files
    states, out = tmp_path / "states", tmp_path / "samples.npz"
    states.mkdir()
    (engine,) = vllm_engines(**PLAIN, **hidden_states(states, LAYERS, share=0.5, max_bytes=most))
    bodies = [body | {"max_tokens": 3} for body in requests(150)]
    few = bodies[:30]
    await answers(engine, few)
    files = settled(states)
    assert 6 <= len(files) <= 24, "not half of 30"
    assert collect(states, out, [], hidden_size=HIDDEN) == len(files)
    await answers(engine, bodies)
    files = settled(states)
    assert most - 1000 < sum(path.stat().st_size for path in files) <= most
    assert len(files) < 50
    said = engine.log.read_text()
    assert said.count("the files have max_bytes; no state is written until some are deleted") == 1
    assert collect(states, out, [], hidden_size=HIDDEN) == len(files)
    await answers(engine, few)
    assert len(settled(states)) == collect(states, out, [], hidden_size=HIDDEN) > 0
    await aborted(engine)
    assert settled(states) == [], "an aborted request was written"


def settled(folder: Path) -> list[Path]:
    """The files, when none was added for a second."""
    files: list[Path] = []
    while True:
        time.sleep(1)
        if len(found := list(folder.glob("*.safetensors"))) == len(files):
            return found
        files = found


async def aborted(engine: VllmEngine) -> None:
    """Twenty streams that their clients leave after the first tokens."""
    async with aiohttp.ClientSession() as session:

        async def one(number: int) -> None:
            body = {"model": MODEL, "prompt": f"leave {number}", "max_tokens": 3000, "stream": True}
            async with session.post(
                f"{engine.url}/v1/completions", json=body | {"ignore_eos": True}
            ) as answer:
                await answer.content.readline()

        await asyncio.gather(*map(one, range(20)))


def test_the_bench_names_the_cause_of_an_engines_end(tmp_path: Path) -> None:
    """Each request in flight gets the same 500, and thousands of lines in the log."""
    (tmp_path / "states").mkdir()
    with pytest.raises(RuntimeError, match="the engine answered 500") as failed:
        play_while_the_worker_ends(tmp_path / "states")
    (note,) = failed.value.__notes__
    assert "died unexpectedly" in note


def play_while_the_worker_ends(folder: Path) -> None:
    with running(environment(), folder, 1.0) as engine:
        threading.Thread(target=kill_worker, args=(engine, folder)).start()
        asyncio.run(play(engine.url, workload(0, 800, "end")))


def kill_worker(engine: VllmEngine, folder: Path) -> None:
    """Kills the process that computes, when the first requests have ended."""
    while not any(folder.iterdir()):
        time.sleep(0.1)
    (worker,) = [pid for pid in engine.processes() if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(worker, signal.SIGKILL)


ASYNCHRONOUS = """\
import json, sys
from vllm.engine.arg_utils import EngineArgs
from lmetric_vllm.checks import check_collection
config = EngineArgs(**json.loads(sys.argv[1])).create_engine_config()
check_collection("HiddenStatesConnector", config)
print("accepted")
config.scheduler_config.async_scheduling = True  # no flag does this on CPU
check_collection("HiddenStatesConnector", config)
"""


def test_asynchronous_scheduling_is_refused(tmp_path: Path) -> None:
    flags = hidden_states(tmp_path, LAYERS, share=1)
    venv, own = environment(), flags.pop("environ")
    given = json.dumps(flags | {"model": str(model_folder(venv)), "dtype": "float32"})
    command = [venv / "bin" / "python", "-c", ASYNCHRONOUS, given]
    done = subprocess.run(command, env=ENVIRONMENT | own, capture_output=True, text=True, timeout=600)
    assert "accepted" in done.stdout, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "NotSupportedError: lmetric_vllm.HiddenStatesConnector is not tested with asynchronous" in last
    assert last.endswith(
        "add --no-async-scheduling; start it without --kv-transfer-config for "
        "lmetric_vllm.HiddenStatesConnector, or without that"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 2}, "kv_connector_extra_config.share: expected at most 1, got 2"),
        ({"shared_storage_path": "/nowhere", "share": 1}, "a folder that the engine can write to"),
        ({"layers": [1, 2], "share": 1}, "one layer in eagle_aux_hidden_state_layer_ids, got 2 layers"),
    ],
)
def test_a_wrong_setting_ends_the_start(
    vllm_engines: Start, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match="ended") as refused:
        vllm_engines(**PLAIN, **hidden_states(**({"folder": tmp_path, "layers": LAYERS} | change)))
    assert message in str(refused.value)


FULL_DISK = """\
import sys
from pathlib import Path
import torch
from lmetric_vllm.folder import StatesFolder, name_of
from lmetric_vllm.hidden import FinishedRequest, HiddenStatesConnector, _Copied
folder = Path(sys.argv[1])
connector = object.__new__(HiddenStatesConnector)  # without an engine
connector._folder, connector._logged = StatesFolder(folder, 1 << 20), set()
for request in ("first", "second"):
    (folder / f"{name_of(request)}.partial").symlink_to("/dev/full")
    connector._write(FinishedRequest(request, 3, 1, [0]), torch.zeros(1, 8), _Copied())
print(list(folder.iterdir()))
"""


def test_a_full_disk_is_logged_once(tmp_path: Path) -> None:
    """And leaves no file, and ends no thread."""
    venv, own = environment(), hidden_states(tmp_path, LAYERS)["environ"]
    command = [venv / "bin" / "python", "-c", FULL_DISK, tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT | own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
    said = done.stdout + done.stderr
    assert said.count("HiddenStatesConnector: states cannot be written: No space left on device") == 1, said
