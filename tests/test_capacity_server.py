"""The capacity twin of a running router: its process, /advice, its metrics, and its failures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from lmetric.config import ConfigError, load_config
from lmetric.record_files import RecordError
from lmetric_lab.capacity import tail as tail_module
from lmetric_lab.capacity.tail import Tail
from record_world import PROFILE, make_trace, simulated, write_records
from test_server_process import Process, engine, router

SLO = "ttft_p95=400ms,tpot_p95=40ms"
SECONDS = 200.0  # for a first advice on a busy machine


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """Lines of records of two minutes until now, as a router wrote them before."""
    import tempfile

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


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "records-1.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def flags(folder: Path, url: str, **further: Any) -> list[str]:
    values = {"slo": SLO, "interval": 5, "stale_after": 600, "max_batch_tokens": PROFILE.max_batch_tokens}
    values |= {
        "prices": "{H100: 4, L40S: 1}",
        "types": "{L40S: x0.5}",
        "max_error": 5,
    }  # the stand-in reports no cache size
    made = ["--engine", url, "--records", str(folder)]
    for name, value in (values | further).items():
        made += ["--set", f"capacity.{name}={value}"]
    return made


async def until(found: Callable[[], Awaitable[Any]], seconds: float = SECONDS) -> Any:
    end = time.monotonic() + seconds
    while not (value := await found()):
        assert time.monotonic() < end, "nothing came in time"
        await asyncio.sleep(0.2)
    return value


async def page(client: aiohttp.ClientSession, r: Process, path: str = "/advice") -> Any:
    async with client.get(r.url + path) as answer:
        return await answer.json() if path == "/advice" else await answer.text()


def worker_of(r: Process) -> int | None:
    """The process id of the twin."""
    pid = r.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"lmetric_lab.capacity.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


@pytest.mark.timeout(300)
async def test_a_router_publishes_advice_and_outlives_its_twin(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    write(tmp_path / "r", lines)
    async with (
        engine() as fake,
        router(*flags(tmp_path / "r", fake.url)) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()

        async def advised() -> Any:
            return (await page(client, r))["models"].get("tiny", {}).get("advice")

        advice = await until(advised)
        wanted, other = advice["wanted"]
        assert (wanted["type"], other["type"], other["replicas"]) == ("H100", "L40S", 0)
        assert advice["cheapest"]["running_cost_per_hour"] >= advice["cheapest"]["cost_per_hour"]
        assert wanted["low"] <= wanted["replicas"] <= wanted["high"]
        assert advice["candidates"][0]["cost_per_hour"] == 4.0 * advice["candidates"][0]["engines"]
        assert advice["removals"]
        text = await page(client, r, "/metrics")
        labels = '{model="tiny",role="both",type="H100"}'
        assert f"lmetric_wanted_replicas{labels} {float(wanted['replicas'])}" in text
        assert f"lmetric_wanted_replicas_low{labels} {float(wanted['low'])}" in text
        assert f"lmetric_wanted_replicas_high{labels} {float(wanted['high'])}" in text
        assert 'lmetric_wanted_replicas{model="tiny",role="both",type="L40S"} 0.0' in text
        assert 'lmetric_capacity_advice_age_seconds{model="tiny"}' in text
        first = worker_of(r)
        assert first is not None
        assert os.getpriority(os.PRIO_PROCESS, first) >= 10 + os.nice(0)
        os.kill(first, signal.SIGKILL)

        async def again() -> Any:
            pid = worker_of(r)
            return pid is not None and pid != first

        await until(again)
        # The last advice stays until it is too old, and traffic goes on.
        told = await page(client, r)
        assert "ended with -9" in told["error"]
        assert told["models"]["tiny"]["advice"]["wanted"] == advice["wanted"]
        async with client.get(r.url + "/v1/models") as answer:
            assert answer.status == 200
        r.process.terminate()
        assert await r.ended() == 0
        logged = [line for line in "".join(r.log).splitlines() if "capacity twin failed" in line]
        assert len(logged) == 1


async def test_refused_advice_has_a_reason_and_no_metric(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    write(tmp_path / "r", lines[:60])
    async with (
        engine() as fake,
        router(*flags(tmp_path / "r", fake.url)) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()

        async def refused() -> Any:
            return (await page(client, r))["models"].get("tiny", {}).get("refused")

        assert "at least 100 are needed" in await until(refused)
        text = await page(client, r, "/metrics")
        assert "lmetric_wanted_replicas{" not in text
        assert 'lmetric_capacity_rounds_total{model="tiny",outcome="refused"} ' in text


async def test_a_twin_that_hangs_is_replaced(tmp_path: Path) -> None:
    async with (
        engine() as fake,
        router(*flags(tmp_path / "r", fake.url, timeout=1)) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()

        async def started() -> Any:
            return worker_of(r)

        first = await until(started)
        os.kill(first, signal.SIGSTOP)

        async def failed() -> Any:
            return "longer than 1 s" in ((await page(client, r))["error"] or "")

        await until(failed, 20.0)
        assert worker_of(r) != first
        assert 'outcome="failed"} 1.0' in await page(client, r, "/metrics")


async def test_a_router_without_a_twin_says_so() -> None:
    async with (
        engine() as fake,
        router("--engine", fake.url) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()
        async with client.get(r.url + "/advice") as answer:
            assert answer.status == 404
            assert "set capacity.slo and records.path" in await answer.text()
        assert "lmetric_wanted" not in await page(client, r, "/metrics")
        assert worker_of(r) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("capacity: {slo: ttft=1s}", "capacity.slo needs records of all requests"),
        ("records: {path: r, sample: 0.5}\ncapacity: {slo: ttft=1s}", "needs records of all requests"),
        (
            "records: {path: r}\ncapacity: {slo: ttft=1s}\nreplicas: {urls: ['http://127.0.0.1:1']}",
            "other routers .replicas.urls. send requests, too",
        ),
        ("records: {path: r}\ncapacity: {slo: fast}", "SLO 'fast' is not valid"),
        ("records: {path: r}\ncapacity: {slo: ttft=1s, interval: 200}", "must be at least two intervals"),
        ("records: {path: r}\ncapacity: {slo: ttft=1s, prices: {A: 1, B: 2}}", "type 'B' has a price and no"),
        ("records: {path: r}\ncapacity: {slo: ttft=1s, roles: [2P]}", "2 prefill, 0 decode, 0 both is not"),
        ("records: {path: r}\ncapacity: {slo: ttft=1s, min_engines: 9, max_engines: 3}", "9 to 3 engines"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


# -- following the files


def test_the_tail_keeps_a_bounded_number_of_requests(
    tmp_path: Path, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "KEPT_REQUESTS", 50)
    write(tmp_path / "r", lines[:90])
    found = Tail(tmp_path / "r", 1e6).read(float(lines[89]["at"]) + 1.0)
    assert found.requests == lines[40:90]
    assert found.notes == ["only the newest 50 requests are used; a shorter window has fewer"]


def test_new_lines_are_read_once(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    now = float(lines[-1]["at"]) + 1.0
    path = write(tmp_path / "r", lines[:90])
    tail = Tail(tmp_path / "r", 60.0)
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
        Tail(tmp_path / "missing", 60.0).read(0.0)
    with pytest.raises(RecordError, match="no record file yet"):
        Tail(tmp_path, 60.0).read(0.0)
    path = write(tmp_path / "r", [lines[0] | {"schema": 99}])
    tail = Tail(tmp_path / "r", 60.0)
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
    tail = Tail(tmp_path / "r", 600.0)
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
    tail = Tail(tmp_path / "r", 600.0)
    for rounds in (1, 2):
        with path.open("ab") as file:
            file.write(b"".join(orjson.dumps(line) + b"\n" for line in wrong))
        found = tail.read(now)
        assert found.requests == lines[2:]
        assert found.notes == [f"{3 * rounds} lines of records are not valid and are skipped"]
