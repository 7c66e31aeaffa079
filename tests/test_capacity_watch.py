"""`advise --watch`: a process that follows records, and serves advice and metrics over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from typer.testing import CliRunner

from cli_world import call
from lmetric.cli.app import build
from lmetric.record_files import RecordError, Records
from lmetric_lab.capacity import Advice, Wanted
from lmetric_lab.capacity import tail as tail_module
from lmetric_lab.capacity import watch as watch_module
from lmetric_lab.capacity.tail import Tail
from lmetric_lab.capacity.watch import Watch
from lmetric_lab.whatif import WhatIfError
from record_world import PROFILE, make_trace, simulated, write_records
from waiting import PATIENCE_SECONDS

SLO = "ttft_p95=400ms,tpot_p95=40ms"
SECONDS = 200.0  # for a first advice on a busy machine
RUN = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Lines of records of two minutes until now, as a router wrote them before."""
    trace = make_trace(300, rate=2.3)
    with tempfile.TemporaryDirectory() as folder:
        path = write_records(Path(folder), trace, simulated(trace, "lmetric"))
        made = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    shift = time.time() - 1e9 - float(trace.arrival_seconds[-1]) - 2.0
    for line in made:
        line["at"] += shift
        if "model" in line:
            line["model"] = "tiny"
    return made


def write(folder: Path, lines: list[dict[str, Any]], name: str = "records-1.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


class Process:
    """A command with its log. ``url``: of its HTTP port."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""

    async def logged(self, text: str) -> str:
        """Waits for a line of the log with ``text``."""
        assert self.process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while line := (await self.process.stderr.readline()).decode():
                self.log.append(line)
                if text in line:
                    return line
        raise AssertionError("".join(self.log))

    async def ended(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            self.log.append((await self.process.stderr.read()).decode())
            return await self.process.wait()


@contextlib.asynccontextmanager
async def command(*words: str) -> AsyncIterator[Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, *words), stderr=asyncio.subprocess.PIPE, env=environ
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def watching(folder: Path, *words: str, form: str = "--log-json") -> AsyncIterator[Process]:
    flags = ["--watch", "--port", "0", "--every", "5", "--slo", SLO, form]
    async with command("advise", str(folder), *flags, *words) as w:
        line = await w.logged("capacity advice is served")
        w.url = orjson.loads(line)["url"] if form == "--log-json" else line.rpartition("url=")[2].split()[0]
        yield w


async def until(found: Callable[[], Awaitable[Any]], seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (value := await found()):
        assert time.monotonic() < end, "nothing came in time"
        await asyncio.sleep(0.2)
    return value


async def get(client: aiohttp.ClientSession, w: Process, path: str) -> Any:
    async with client.get(w.url + path) as answer:
        assert answer.status == 200, await answer.text()
        return await (answer.json() if path == "/advice" else answer.text())


@pytest.mark.timeout(300)
async def test_the_process_waits_for_records_and_serves_advice(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    flags = ["--price", "H100=4,L40S=1", "--type", "L40S=x0.5"]
    flags += ["--max-batch-tokens", str(PROFILE.max_batch_tokens), "--max-error", "5"]
    async with watching(folder, *flags) as w, aiohttp.ClientSession() as client:
        assert "no record file yet; send requests" in orjson.loads(await w.logged("waiting"))["reason"]
        told = await get(client, w, "/advice")
        assert (told["models"], told["slo"]) == ({}, SLO)
        assert "no record file yet" in told["waiting"]
        assert "lmetric_wanted_replicas{" not in await get(client, w, "/metrics")
        assert await get(client, w, "/health") == ""
        assert os.getpriority(os.PRIO_PROCESS, w.process.pid) >= 10 + os.nice(0)
        write(folder, lines)

        async def advised() -> Any:
            return (await get(client, w, "/advice"))["models"].get("tiny", {}).get("advice")

        advice = await until(advised)
        wanted, other = advice["wanted"]
        assert (wanted["type"], other["type"], other["replicas"]) == ("H100", "L40S", 0)
        assert advice["cheapest"]["running_cost_per_hour"] >= advice["cheapest"]["cost_per_hour"]
        assert wanted["low"] <= wanted["replicas"] <= wanted["high"]
        assert advice["candidates"][0]["cost_per_hour"] == 4.0 * advice["candidates"][0]["engines"]
        assert advice["removals"]
        text = await get(client, w, "/metrics")
        assert 'lmetric_wanted_replicas{model="tiny",role="both",type="H100"} ' in text
        assert 'lmetric_wanted_replicas_low{model="tiny",role="both",type="H100"} ' in text
        assert 'lmetric_wanted_replicas_high{model="tiny",role="both",type="H100"} ' in text
        assert 'lmetric_wanted_replicas{model="tiny",role="both",type="L40S"} 0.0' in text
        assert 'lmetric_capacity_advice_age_seconds{model="tiny"}' in text
        assert 'lmetric_capacity_rounds_total{model="tiny",outcome="advice"} ' in text
        assert "process_cpu_seconds_total" in text
        shown = orjson.loads(await w.logged("engines wanted"))
        assert (shown["model"], shown["engines"]) == ("tiny", 4)
        w.process.terminate()  # perhaps in the middle of a round
        assert await w.ended() == 0
        assert '"stopped"' in w.log[-1]


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_records_of_a_running_router_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    serve = ["serve", "--embedded", "2", "--port", "0", "--records", str(folder), "--log-json"]
    async with command(*serve) as r, aiohttp.ClientSession() as client:
        r.url = orjson.loads(await r.logged('"listening"'))["url"]
        model = (await get_json(client, r.url + "/v1/models"))["data"][0]["id"]
        async with watching(folder, form="--log-text") as w:
            body = {"model": model, "prompt": "Hello", "max_tokens": 2, "stream": True}
            for _ in range(3):
                async with client.post(r.url + "/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    await answer.read()

            async def refused() -> Any:
                return (await get(client, w, "/advice"))["models"].get(model, {}).get("refused")

            assert "3 requests" in (reason := await until(refused)) or "at least" in reason
            line = await w.logged("no capacity advice")
            assert "[warning  ]" in line
            assert f"model={model}" in line
            text = await get(client, w, "/metrics")
            assert f'lmetric_capacity_rounds_total{{model="{model}",outcome="refused"}} ' in text
            assert "lmetric_wanted_replicas{" not in text
            w.process.send_signal(signal.SIGINT)
            assert await w.ended() == 130
        async with client.get(r.url + "/advice") as answer:
            assert answer.status == 404
        assert "lmetric_wanted" not in await get(client, r, "/metrics")


async def get_json(client: aiohttp.ClientSession, url: str) -> Any:
    async with client.get(url) as answer:
        return await answer.json()


def test_a_port_in_use_ends_the_command(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call("advise", str(tmp_path), "--watch", "--slo", SLO, "--port", str(port))
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in last
    assert "set another --port" in last


def test_missing_records_end_the_command(tmp_path: Path) -> None:
    done = call("advise", str(tmp_path / "missing"), "--watch", "--slo", SLO)
    assert done.returncode == 2, done.stderr
    assert "missing: not found; give record files, or the folder in records.path" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "9400"], "Invalid value for --port: needs --watch"),
        (["--log-json"], "Invalid value for --log-json: needs --watch"),
        (["--watch", "--json", "-"], "Invalid value for --json: not with --watch"),
        (["--watch", "--every", "1"], "1 is not at least 5"),
        (["--watch", "--price", "A=1,B=2"], "type 'B' has a price and no"),
        (["--watch", "--roles", "2P"], "2 prefill, 0 decode, 0 both is not"),
        (["--watch", "--min-engines", "9", "--max-engines", "3"], "9 to 3 engines"),
        (["--watch", "old.jsonl.gz"], "a running router writes *.jsonl"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.jsonl.gz").touch()
    done = CliRunner().invoke(build(["advise"]), ["advise", str(tmp_path), "--slo", "ttft=1s", *words])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


# -- rounds


class FakeTwin:
    """A twin that gives the advice, or raises the error, that a test sets."""

    outcome: Advice | Exception

    def advise(self, records: Records, now: float) -> Advice:
        assert records.models
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return replace(self.outcome, at=now)


ADVICE = Advice(
    at=0.0, model="tiny", engines=4, requests=300, seconds=130.0, within_now=1.0, rate_now=2.0,
    rate_wanted=2.2, rate_low=2.0, rate_high=3.0, headroom=0.1, horizon_seconds=180.0,
    wanted=(Wanted("both", "default", 3, 2, 5),), cheapest=None, reached=True, candidates=(), removals=(),
    fit_errors={},
)  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTwin]:
    monkeypatch.setattr(FakeTwin, "outcome", ADVICE, raising=False)
    return FakeTwin


def watch_of(folder: Path, twin: Any, window: float = 600.0, **further: Any) -> Watch:
    return Watch([folder], window, 60.0, twin, slo=SLO, **further)


def samples(watch: Watch) -> dict[tuple[str, ...], float]:
    """The values by metric, model and outcome."""
    found = {}
    for family in watch.metrics():
        for each in family.samples:
            key = (each.name, each.labels["model"], each.labels.get("outcome", ""))
            found[key] = each.value
    return found


def test_a_refusal_or_a_defect_withdraws_the_advice(
    tmp_path: Path, lines: list[dict[str, Any]], fake: type[FakeTwin]
) -> None:
    write(tmp_path / "r", lines)
    watch, now = watch_of(tmp_path / "r", fake), float(lines[-1]["at"]) + 1.0
    rounds = "lmetric_capacity_rounds_total"
    watch.round(now)
    assert watch.state()["models"]["tiny"]["advice"].wanted[0].replicas == 3
    assert samples(watch)["lmetric_wanted_replicas", "tiny", ""] == 3.0
    fake.outcome = WhatIfError("a poor fit")
    watch.round(now)
    told = watch.state()["models"]["tiny"]
    assert (told["advice"], told["refused"]) == (None, "a poor fit")
    assert ("lmetric_wanted_replicas", "tiny", "") not in samples(watch)
    fake.outcome = ZeroDivisionError("a defect")
    watch.round(now)
    assert watch.state()["models"]["tiny"]["refused"] == "ZeroDivisionError: a defect"
    found = samples(watch)
    assert [found[rounds, "tiny", each] for each in ("advice", "refused", "failed")] == [1, 1, 1]


def test_stale_advice_is_withdrawn(
    tmp_path: Path, lines: list[dict[str, Any]], fake: type[FakeTwin], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "r", lines)
    watch = watch_of(tmp_path / "r", fake)
    watch.round(float(lines[-1]["at"]) + 1.0)
    later = time.monotonic() + watch.stale_seconds + 1.0
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: later)
    told = watch.state()["models"]["tiny"]
    assert (told["advice"], told["refused"]) == (None, "the last advice is too old")
    assert ("lmetric_wanted_replicas", "tiny", "") not in samples(watch)
    assert samples(watch)["lmetric_capacity_rounds_total", "tiny", "advice"] == 1.0


def test_models_come_from_the_records_and_go_with_them(
    tmp_path: Path, lines: list[dict[str, Any]], fake: type[FakeTwin]
) -> None:
    """A model is known while requests of it are in the window."""
    folder, now = tmp_path / "r", float(lines[-1]["at"]) + 1.0
    write(folder, lines)
    other = [
        line | ({"model": "other", "at": line["at"] - 500.0} if "model" in line else {}) for line in lines
    ]
    write(folder, other, "records-2.jsonl")
    both, only = watch_of(folder, fake), watch_of(folder, fake, model="tiny")
    both.round(now)
    only.round(now)
    assert (set(both.state()["models"]), set(only.state()["models"])) == ({"tiny", "other"}, {"tiny"})
    both.round(now + 300.0)  # the window of 600 s has no request of `other` any more
    assert set(both.state()["models"]) == {"tiny"}
    assert {key[1] for key in samples(both)} == {"tiny"}
    both.round(now + 700.0)
    assert both.state()["models"] == {}
    assert both.state()["waiting"] == "no request in the last 600 s of the records; send requests"
    assert samples(both) == {}
    only.round(now)
    for path in folder.iterdir():
        path.unlink()
    only.round(now)
    assert only.state()["models"] == {}
    assert only.state()["waiting"] == f"{folder}: no record file yet; send requests"


def test_records_that_cannot_be_read_for_a_while_keep_the_twins(
    tmp_path: Path, lines: list[dict[str, Any]], fake: type[FakeTwin]
) -> None:
    folder, made = tmp_path / "r", []
    write(folder, lines)

    def twin() -> FakeTwin:
        made.append(fake())
        return made[-1]

    watch, now = watch_of(folder, twin), float(lines[-1]["at"]) + 1.0
    watch.round(now)
    folder.rename(tmp_path / "moved")
    watch.round(now)
    told = watch.state()
    assert told["models"]["tiny"]["refused"] == told["waiting"]
    assert told["waiting"] == f"{folder}: not found; give record files, or the folder in records.path"
    (tmp_path / "moved").rename(folder)
    watch.round(now)
    assert watch.state()["models"]["tiny"]["advice"] is not None
    assert len(made) == 1


def test_advice_is_for_a_bounded_number_of_models(
    tmp_path: Path, lines: list[dict[str, Any]], fake: type[FakeTwin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "MAX_MODELS", 1)
    write(tmp_path / "r", [*lines, lines[-1] | {"model": "other"}])
    watch = watch_of(tmp_path / "r", fake)
    watch.round(float(lines[-1]["at"]) + 1.0)
    assert watch.state()["models"]["other"]["refused"] == "only 1 models get advice; set --model"


# -- following the files


def test_the_tail_keeps_a_bounded_number_of_requests(
    tmp_path: Path, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "KEPT_REQUESTS", 50)
    write(tmp_path / "r", lines[:90])
    found = Tail([tmp_path / "r"], 1e6).read(float(lines[89]["at"]) + 1.0)
    assert found.requests == lines[40:90]
    assert found.notes == ["only the newest 50 requests are used; a shorter window has fewer"]


def test_new_lines_are_read_once(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    now = float(lines[-1]["at"]) + 1.0
    path = write(tmp_path / "r", lines[:90])
    tail = Tail([tmp_path / "r"], 60.0)
    first = tail.read(now)
    inside = [each for each in lines[2:90] if each["at"] >= now - 60.0]
    assert first.requests == inside
    assert [each["model"] for each in first.fleets] == ["tiny"]
    with path.open("ab") as file:
        for line in lines[90:]:
            file.write(orjson.dumps(line) + b"\n")
        file.write(b'{"type":"request","at":')  # the router is in the middle of a line
    second = tail.read(now)
    assert len(second.requests) == len([each for each in lines[2:] if each["at"] >= now - 60.0])
    assert tail.read(now).requests == second.requests
    assert tail.skipped == 0
    with path.open("ab") as file:
        file.write(b"1\n")
    tail.read(now)
    assert tail.skipped == 1
    assert tail.read(now + 3600.0).requests == []


def test_files_that_the_tail_cannot_read(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    with pytest.raises(FileNotFoundError):
        Tail([tmp_path / "missing"], 60.0).read(0.0)
    empty = Tail([tmp_path], 60.0).read(0.0)
    assert (empty.requests, empty.notes) == ([], [f"{tmp_path}: no record file yet; send requests"])
    path = write(tmp_path / "r", [lines[0] | {"schema": 99}])
    tail = Tail([tmp_path / "r"], 60.0)
    for line in lines[1:3]:  # a line that follows is no header
        with pytest.raises(RecordError, match="schema version 99"):
            tail.read(0.0)
        with path.open("ab") as file:
            file.write(orjson.dumps(line) + b"\n")


@pytest.mark.parametrize("first", [b'{"type":"header","schema":99}\n', b"no JSON\n"])
def test_a_foreign_file_costs_its_own_lines_alone(
    tmp_path: Path, lines: list[dict[str, Any]], first: bytes
) -> None:
    now = float(lines[-1]["at"]) + 1.0
    write(tmp_path / "r", lines)
    tail = Tail([tmp_path / "r"], 600.0)
    foreign = tmp_path / "r" / "records-0.jsonl"
    foreign.write_bytes(first)
    notes = []
    for _ in range(2):
        found = tail.read(now)
        assert found.requests == lines[2:]
        assert len(found.headers) == 1
        notes.append(found.notes)
        with foreign.open("ab") as file:
            file.write(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert notes[0] == notes[1]
    assert notes[0][0].startswith(f"1 files are skipped: {foreign}: ")
    foreign.unlink()
    assert tail.read(now).notes == []


def test_lines_with_wrong_types_are_skipped_and_counted(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    now = float(lines[-1]["at"]) + 1.0
    path = write(tmp_path / "r", lines)
    wrong = [lines[2] | {"at": "today"}, lines[2] | {"ttft_seconds": []}, lines[1] | {"engines": [1]}]
    tail = Tail([tmp_path / "r"], 600.0)
    for rounds in (1, 2):
        with path.open("ab") as file:
            file.write(b"".join(orjson.dumps(line) + b"\n" for line in wrong))
        found = tail.read(now)
        assert found.requests == lines[2:]
        assert found.notes == [f"{3 * rounds} lines of records are not valid and are skipped"]


def test_folders_of_several_routers_and_single_files_are_followed(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    now = float(lines[-1]["at"]) + 1.0
    write(tmp_path / "a", [*lines[:2], *lines[2::2]])
    file = write(tmp_path / "b", [*lines[:2], *lines[3::2]])
    (tmp_path / "empty").mkdir()
    found = Tail([tmp_path / "a", tmp_path / "empty", file], 600.0).read(now)
    assert found.requests == lines[2:]
    assert len(found.headers) == 2


def test_the_newest_requests_of_all_files_are_kept(
    tmp_path: Path, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file has the newest requests."""
    monkeypatch.setattr(tail_module, "KEPT_REQUESTS", 20)
    write(tmp_path / "a", [*lines[:2], *lines[60:90]])
    write(tmp_path / "b", lines[:60])
    found = Tail([tmp_path / "a", tmp_path / "b"], 1e6).read(float(lines[89]["at"]) + 1.0)
    assert found.requests == lines[70:90]


def test_headers_of_files_without_recent_requests_do_not_count(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    """A sample of all requests counts as soon as the window has no other."""
    sampled = [lines[0] | {"sample": 0.1, "key_id": "old"}, *lines[1:60]]
    write(tmp_path / "r", sampled, "records-1.jsonl")
    write(tmp_path / "r", [*lines[:2], *lines[60:]], "records-2.jsonl")
    tail, now = Tail([tmp_path / "r"], 600.0), float(lines[-1]["at"]) + 1.0
    assert tail.read(now).between(now - 600.0, now).sample == 0.1
    now = float(lines[60]["at"]) + 600.0
    found = tail.read(now).between(now - 600.0, now)
    assert found.requests == lines[60:]
    assert found.sample == 1.0
    assert len(found.headers) == 1
