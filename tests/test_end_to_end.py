"""The commands together: the README's quickstart, a replay through the router, the demo, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_world import call
from lmetric_lab.ports import free_ports
from waiting import until_threads

ROOT = Path(__file__).parent.parent
SLICE = ROOT / "python/lmetric_lab/data/mooncake_conversation_slice.jsonl.gz"
COMMAND = [sys.executable, "-m", "lmetric.cli"]
README = (ROOT / "README.md").read_text()


def children(pid: int) -> list[int]:
    """The processes started by `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def served_port(pid: int) -> str | None:
    """The `--port` of a router process; None for other processes."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    return words[words.index("--port") + 1] if "serve" in words else None


def routed(url: str) -> bool:
    """Whether requests went to engines."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            return re.search(rb"(?m)^lmetric_instance_decisions_total\S* [1-9]", answer.read()) is not None
    except (urllib.error.URLError, OSError):
        return False


def wait_until_ready(url: str, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        assert process.poll() is None, "serve ended"
        time.sleep(0.1)
    raise AssertionError("not ready after a minute")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The README's `serve --embedded` with two engines; test_docs_run.py runs it as it is shown."""
    (port,) = free_ports(1)
    shown = next(line for line in README.splitlines() if line.startswith("lmetric-router serve --embedded 4"))
    words = shlex.split(shown.replace("8080", str(port)).replace("--embedded 4", "--embedded 2"))
    with (tmp_path_factory.mktemp("serve") / "log").open("w") as log:
        process = subprocess.Popen([*COMMAND, *words[1:]], stdout=log, stderr=log, text=True)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process)
            started = children(process.pid)
            assert len(started) >= 2
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=45)
    assert code in (0, 130)
    assert not any(alive(pid) for pid in started), "engines outlive the router"


def test_the_readmes_curl_lines_get_answers(router: str) -> None:
    text = README.replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("curl ")]
    assert lines
    for line in lines:
        command = line.replace("http://127.0.0.1:8080", router).replace("curl ", "curl -sSf ", 1)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        if '"stream": true' in line:
            events = [event for event in done.stdout.split("\n\n") if event]
            assert events[-1] == "data: [DONE]"
            texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]]
            assert len(texts) == 16
            assert all(texts)
        else:
            assert json.loads(done.stdout)["data"]


def test_an_openai_client_gets_an_answer(router: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{router}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="emulated", messages=[{"role": "user", "content": "Hello"}], max_tokens=16
        )
    text = answer.choices[0].message.content
    assert text is not None
    assert len(text.split()) >= 10


def test_replay_through_the_router(router: str) -> None:
    arguments = ["--trace", str(SLICE), "--target", router, "--requests", "12", "--speed", "20", "--json"]
    done = subprocess.run(
        [*COMMAND, "replay", *arguments, "--max-input-tokens", "3000", "--slo-ttft", "60"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    report = answer["report"]
    assert answer["model"] == "emulated"
    assert report["completed"] == report["requests"] == answer["chosen_requests"] == 12
    assert report["errors"] == {}
    assert report["goodput"]["share"] == 1
    # The trace's lengths arrive unchanged: a word is a token, and answers end at the given length.
    with subprocess.Popen(["gzip", "-dc", str(SLICE)], stdout=subprocess.PIPE, text=True) as lines:
        assert lines.stdout is not None
        rows = [json.loads(line) for line in lines.stdout]
    rows = [row for row in rows if row["input_length"] <= 3000][:12]
    assert report["prompt_tokens"] == sum(row["input_length"] for row in rows)
    assert report["output_tokens"] == sum(row["output_length"] for row in rows)
    assert 0 <= report["hit_rate"] <= 1
    again = subprocess.run(
        [*COMMAND, "replay", *arguments, "--max-input-tokens", "3000", "--requests", "4"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert json.loads(again.stdout)["report"]["hit_rate"] > 0.5, "the same prompts a second time are cached"


def test_a_port_in_use_has_its_exit_code() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = call("engine", "--port", port)
    assert done.returncode == 3, done.stderr
    assert port in done.stderr
    assert "Traceback" not in done.stderr


SHORT = ["demo", "--requests", "10", "--engines", "2", "--max-input-tokens", "2000", "--clock-speed", "50"]


@pytest.mark.parametrize(
    ("flags", "policies"),
    [
        # Two policies over one router, then one over two routers side by side.
        (["--policy", "round_robin", "--policy", "lmetric"], ["round_robin", "lmetric"]),
        pytest.param(["--policy", "lmetric", "--routers", "2"], ["lmetric"], marks=pytest.mark.nightly),
    ],
)
def test_a_short_demo(flags: list[str], policies: list[str]) -> None:
    done = subprocess.run(
        [*COMMAND, *SHORT, *flags, "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert list(answer["reports"]) == policies
    for report in answer["reports"].values():
        assert report["completed"] == 10
        assert report["clock_speed"] == 50
    assert "50x real time" in done.stderr
    assert re.search(r"^The demo plays about \d+ s: \d runs? of 10 requests\.$", done.stderr, re.MULTILINE)
    # On a busy machine, the two policies cannot be compared.
    verdicts = ("round_robin: mean TTFT", "lmetric: mean TTFT", "No verdict: ")
    assert any(line.startswith(verdicts) for line in done.stderr.splitlines())


@pytest.mark.nightly
def test_a_short_demo_of_agents() -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "--agents", "--engines", "2", "--clock-speed", "50", "--json"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["reports"]
    assert list(reports) == ["lmetric", "sticky sessions", "lmetric, admission"]
    figures = [report["programs"] for report in reports.values()]
    assert all(each["failed"] == 0 and each["programs"] > 15 for each in figures)
    lmetric, sticky, admission = figures
    # The engines count: without admission, programs evict each other.
    assert lmetric["recomputed_share"] > 0.2
    assert admission["recomputed_share"] < lmetric["recomputed_share"] / 2
    assert lmetric["longest_hold_seconds"] == sticky["longest_hold_seconds"] == 0
    assert admission["longest_hold_seconds"] > 10
    # Behind it may come warnings about a slow machine.
    assert any("mean job completion time" in line for line in done.stderr.splitlines())


def test_ctrl_c_ends_the_demo_and_all_it_started() -> None:
    process = subprocess.Popen(
        # Short prompts: the longest of the slice would take seconds of CPU time.
        [*COMMAND, "demo", "--policy", "lmetric", "--engines", "2", "--max-input-tokens", "2000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip
    router: list[str] = []
    while not router:
        assert process.poll() is None
        time.sleep(0.1)
        router = [port for pid in children(process.pid) if (port := served_port(pid)) is not None]
    until_threads(lambda: routed(f"http://127.0.0.1:{router[0]}"), 60)
    started = children(process.pid)
    assert len(started) >= 3  # two engines and the router
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "lmetric (interrupted)" in out
    assert not any(alive(pid) for pid in started)
