"""Records of requests on disk: their lines, their files, and a disk that refuses them."""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import itertools
import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from constants import with_constants
from lmetric._core import BadValueError
from lmetric.config import ConfigError, RecordsConfig, ServerConfig, load_config
from lmetric.record_files import convert_records, read_records
from lmetric.record_schema import ENGINE, FLEET, HEADER, LINES, REQUEST, RecordError, Records, hashes_of
from lmetric.server.fleet.fleet import Fleet
from lmetric.server.observe import record_writer
from lmetric.server.observe.record_writer import BATCH, RecordWriter
from lmetric.server.observe.recorder import Hasher, Recorder
from log_watch import MARKED_PROMPT
from server_world import FakeEngine, World, hang, plain, reset, says, world
from test_server_process import engine, router
from waiting import until, until_threads


def content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def recorded(it: World) -> Records:
    """Ends the router's recorder and reads its files."""
    recorder = it.server.recorder
    assert recorder is not None
    recorder.close()
    return read_records(recorder.writer._folder)


async def test_a_record_has_decision_and_outcome_and_no_text(tmp_path: Path) -> None:
    prefix = MARKED_PROMPT * 40  # 720 bytes: 2 whole blocks of 256 and a rest
    async with world(2, policy="lmetric", records={"path": str(tmp_path)}) as it:
        for end in ("a", "b"):
            body = {"model": "tiny", "prompt": prefix + end, "max_tokens": 7}
            status, _, _ = await it.post(
                body, headers={"x-session-id": "my-session", "x-request-id": "my-id"}
            )
            assert status == 200
        status, _, _ = await it.post({"model": "tiny", "prompt": "z" * 300, "stream": True})
        assert status == 200
        await it.settled()
        records = recorded(it)
    whole, again, stream = records.requests
    assert (whole["cached_tokens"], whole["output_tokens"], whole["prompt_tokens"]) == (4, 3, 10)
    assert (whole["status"], whole["outcome"], whole["retries"]) == (200, "finished", 0)
    assert whole["policy"] == "lmetric"
    assert set(whole["terms"]) == {"bs", "p_token"}
    assert whole["load"]["bs"] == 1  # with this request
    assert whole["max_tokens"] == 7
    assert "ttft_seconds" not in whole
    assert 0 < stream["ttft_seconds"] <= stream["e2e_seconds"]
    assert stream["tpot_seconds"] == pytest.approx(
        (stream["e2e_seconds"] - stream["ttft_seconds"]) / 2, abs=1e-6
    )
    # Equal prefixes have equal hashes, other prompts have others.
    assert hashes_of(whole).tolist() == hashes_of(again).tolist()
    assert len(hashes_of(whole)) == 2
    assert hashes_of(stream)[0] not in hashes_of(whole)
    assert whole["session"] == again["session"]
    assert "session" not in stream
    assert again["predicted_cached_tokens"] > 0
    written = content(tmp_path)
    for text in (MARKED_PROMPT, "my-session", "my-id", "zzz"):
        assert text.encode() not in written
    (fleet,) = records.fleets
    assert [each["name"] for each in fleet["engines"]] == ["e0", "e1"]
    assert fleet["policy"] == "lmetric"
    # The lines have only keys of the schema, and every key that is always there.
    for line in (*records.headers, *records.fleets, *records.requests):
        assert line.keys() <= LINES[line["type"]].keys()
    assert fleet["engines"][0].keys() <= ENGINE.keys()


@pytest.mark.parametrize(
    "policy", ["preble", "where(kv_usage > 0.9, p_token + bs, p_token)"], ids=["preble", "where"]
)
async def test_an_indicator_without_a_value_is_left_out(tmp_path: Path, policy: str) -> None:
    """Such records were written with null, and no command could read their folder."""
    async with world(2, policy=policy, records={"path": str(tmp_path)}) as it:
        assert (await it.post())[0] == 200
        await it.settled()
        (line,) = recorded(it).requests
        decision: Any = it.server.fleet.models[0].router.explain(line["decision"])
    best = decision["best"][0]["terms"]
    assert None in best.values(), "the policy reads no indicator without a value"
    assert line["terms"] == {name: value for name, value in best.items() if value is not None}
    assert orjson.loads(content(tmp_path).splitlines()[-1])["terms"] == line["terms"]  # as written
    # Files of earlier releases have the null values. Both formats read them alike.
    old = line | {"terms": best, "load": {"bs": 1, "q_bs": None}}
    (folder := tmp_path / "old").mkdir()
    found = read_records(file_of(folder, old))
    assert (found.requests[0]["terms"], found.requests[0]["load"]) == (line["terms"], {"bs": 1})
    pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")
    convert_records([folder], out := tmp_path / "old.parquet")
    assert read_records(out).requests == found.requests


async def test_retries_refusals_and_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-alice: alice\n")
    engines = [FakeEngine(behave=reset), FakeEngine()]
    settings = {"path": str(tmp_path / "records"), "request_ids": True}
    async with world(engines, records=settings, auth={"keys_file": str(keys)}) as it:
        alice = {"authorization": "Bearer sk-alice", "x-request-id": "id-1"}
        status, _, _ = await it.post({"model": "tiny", "prompt": "abc"}, headers=alice)
        assert status == 200
        for fake in engines:
            fake.behave = reset
        status, _, _ = await it.post({"model": "tiny", "prompt": "abc"}, headers=alice)
        assert status == 502
        await it.settled()
        first, second = recorded(it).requests
    assert (first["tried"], first["retries"], first["request_id"]) == (["e0", "e1"], 1, "id-1")
    assert first["instance"] == "e1"
    assert "reason" not in first
    assert (second["status"], second["outcome"]) == (502, "reset")
    assert second["reason"]
    assert first["tenant"] == second["tenant"] != "alice"


async def test_the_runner_up_belongs_to_the_first_attempt(tmp_path: Path) -> None:
    """The record of a retry lacks it: its instance is not that of the decision."""
    engines = [FakeEngine() for _ in range(3)]
    async with world(engines, policy="kv_usage", records={"path": str(tmp_path)}) as it:
        for name, share in (("e0", 0.0), ("e1", 0.25), ("e2", 0.75)):
            it.server.fleet.models[0].router.report_load(name, kv_usage=share)
        for _ in range(2):
            assert (await it.post({"model": "tiny", "prompt": "abc"}))[0] == 200
            engines[0].behave = reset
        await it.settled()
        first, again = recorded(it).requests
    assert (first["instance"], first["score"], first["margin"], first["runner_up"]) == ("e0", 0, 0.25, "e1")
    assert (again["tried"], again["instance"], again["score"]) == (["e0", "e1"], "e1", 0.25)
    assert again.keys().isdisjoint({"margin", "runner_up"})


async def test_the_terms_of_a_decision_have_no_hash_of_the_tenant(tmp_path: Path) -> None:
    """Its hash has no key, so a guess of the name could be checked."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("sk-acme: acme\n")
    score = "bs + where(tenant == 'acme', 1, 2) + where(length_class == 'x', 1, 0)"
    settings: dict[str, Any] = {"records": {"path": str(tmp_path / "r")}, "auth": {"keys_file": str(keys)}}
    async with world(2, policy=score, **settings) as it:
        headers = {"authorization": "Bearer sk-acme"}
        status, answered, _ = await it.post({"model": "tiny", "prompt": "abc"}, headers=headers)
        assert status == 200
        await it.settled()
        label = answered["x-lmetric-decision"]
        async with it.client.get(f"{it.url}/debug/decisions/{label}", headers=headers) as response:
            shown = orjson.loads(await response.read())
        (line,) = recorded(it).requests
    assert line["terms"].keys() == {"bs"}
    assert [each["terms"].keys() for each in shown["best"]] == [{"bs"}] * 2
    assert ": 1 (requests 0), as 1 other" in shown["because"]


async def test_the_record_of_a_hedge_that_answered_has_its_decision(tmp_path: Path) -> None:
    engines = [FakeEngine(behave=hang), FakeEngine()]
    hedging = {"after_seconds": 0.1, "budget_ratio": 1.0}
    async with world(engines, records={"path": str(tmp_path)}, hedging=hedging) as it:
        assert (await it.post({"model": "tiny", "prompt": "abc", "stream": True}))[0] == 200
        await it.settled()
        (line,) = recorded(it).requests
    assert (line["instance"], line["hedged"], line["outcome"]) == ("e1", True, "finished")
    assert line["decision"] == 2


async def test_the_words_of_an_engine_are_in_no_record(tmp_path: Path) -> None:
    said = plain(500, {"error": {"message": f"cannot serve {MARKED_PROMPT}"}})
    engines = [FakeEngine(behave=says(said, then="keep")) for _ in range(2)]
    async with world(engines, records={"path": str(tmp_path)}) as it:
        assert (await it.post({"model": "tiny", "prompt": "abc"}))[0] >= 500
        await it.settled()
        (line,) = recorded(it).requests
    assert "status 500" in line["reason"]
    assert MARKED_PROMPT.encode() not in content(tmp_path)


async def test_sessions_are_sampled_whole(tmp_path: Path) -> None:
    async with world(1, records={"path": str(tmp_path), "sample": 0.5}) as it:
        for number in range(60):
            await it.post({"model": "tiny", "prompt": "a"}, headers={"x-session-id": f"s{number % 20}"})
        await it.settled()
        records = recorded(it)
    counts = [
        len(list(group))
        for _, group in itertools.groupby(sorted(request["session"] for request in records.requests))
    ]
    assert set(counts) == {3}
    assert 2 <= len(counts) <= 18
    assert records.sample == 0.5


async def test_no_records_without_the_setting(tmp_path: Path) -> None:
    async with world(1) as it:
        await it.post()
        assert it.server.recorder is None
        assert b"lmetric_records" not in (await it.get("/metrics"))[1]


async def test_an_unwritable_folder_costs_records_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "records"
    monkeypatch.chdir(tmp_path)
    async with world(1, records={"path": "file/records"}) as it:
        for _ in range(3):
            assert (await it.post())[0] == 200
        await it.settled()
        recorder = it.server.recorder
        assert recorder is not None
        await until(lambda: recorder.writer.outcomes["disk"] == 3)
        (problem,) = (each for each in it.server.fleet.own_problems() if each.what == "records")
        assert str(folder) in problem.reason
        assert problem.fix.startswith("a part of the path is a file: move it, or set records.path to another")
        assert b'lmetric_records_total{outcome="disk"} 3.0' in (await it.get("/metrics"))[1]
    assert (caplog.text + "".join(capsys.readouterr())).count(
        "records cannot be written; traffic continues"
    ) == 1


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space there"),
        (errno.EACCES, "write permission"),
        (errno.EROFS, "mount it for writing"),
        (errno.EMFILE, "limit of open files"),
        (errno.ELOOP, "check the folder and its disk"),
    ],
)
def test_each_reason_has_its_own_fix(tmp_path: Path, number: int, fix: str) -> None:
    writer = RecordWriter(RecordsConfig(path=tmp_path), tmp_path, list, dict)
    writer._fail(OSError(number, os.strerror(number)), 1)
    assert writer.failure is not None
    assert fix in writer.failure.fix


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


async def test_a_full_disk_costs_one_log_line_and_the_files_stay_readable(tmp_path: Path) -> None:
    """Files above 2 KiB fail as on a full disk, in the middle of a line."""
    # Python cuts files of byte code at the limit, too, and other tests read them.
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    async with (
        engine() as fake,
        router("--engine", fake.url, "--records", str(tmp_path), preset=limit_files, environ=environ) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()
        for _ in range(12):
            body = {"model": "tiny", "prompt": "a" * 400}
            async with client.post(r.url + "/v1/completions", json=body) as answer:
                assert answer.status == 200
        async with client.get(r.url + "/metrics") as answer:
            assert "lmetric_records_total" in await answer.text()
            assert answer.status == 200
        async with asyncio.timeout(20):
            while True:
                async with client.get(r.url + "/ready") as answer:
                    if warnings := [
                        each for each in (await answer.json())["warnings"] if each["what"] == "records"
                    ]:
                        break
                await asyncio.sleep(0.05)
        assert warnings[0]["reason"] == f"{tmp_path}: File too large"
        r.process.terminate()
        assert await r.ended() == 0
        log = "".join(r.log)
    assert log.count("records cannot be written; traffic continues") == 1
    assert "File too large" in log
    records = read_records(tmp_path)
    assert len(records.headers) == 1
    assert len(records.requests) < 12
    assert "truncated" in records.notes[0]


def writer_of(folder: Path, line: Any = None, workers: int = 1, **settings: Any) -> RecordWriter:
    config = with_constants(RecordsConfig, path=folder, **settings)
    head = [{"type": "header", "schema": 1, "router_version": "", "at": 1.0, "key_id": "", "sample": 1.0}]
    return RecordWriter(config, folder, lambda: head, line or (lambda item: item), workers=workers)


def request_line(number: int) -> dict[str, Any]:
    zeros: dict[str, Any] = {"integer": 0, "number": 0.0, "text": "", "true or false": False}
    needed = {name: zeros[key.kind] for name, key in REQUEST.items() if key.always}
    return needed | {"type": "request", "at": float(number), "decision": number}


ENGINE_LINE = {"name": "e0", "kind": "vllm", "role": "both", "mode": "exact", "usable": True}


def fleet_line(*engines: Any) -> dict[str, Any]:
    return {"type": "fleet", "at": 1.0, "model": "", "policy": "vllm", "knobs": {}, "block_tokens": 16} | {
        "engines": engines
    }


def test_files_rotate_and_the_oldest_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_writer, "FLUSH_SECONDS", 0.01)
    writer = writer_of(tmp_path, file_bytes=4096, total_bytes=12_288)
    writer.start()
    for number in range(300):
        writer.put(request_line(number), 0)
        while writer.waiting > 20:
            time.sleep(0.001)
    writer.close()
    assert writer.outcomes["written"] == 300
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 1
    assert max(sizes) <= 4096 + 64 * 300
    assert sum(sizes) <= 12_288 + 64 * 300
    kept = [request["decision"] for request in read_records(tmp_path).requests]
    assert kept == list(range(kept[0], 300))
    assert 0 < kept[0] < 300
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_busy_writer_deletes_no_file_of_a_quiet_one(tmp_path: Path) -> None:
    """Several workers have one folder. The oldest file may have the newest records."""
    quiet = writer_of(tmp_path, file_bytes=4096, total_bytes=16_384)
    quiet._write_lines([orjson.dumps(request_line(1)) + b"\n"])
    busy = writer_of(tmp_path, file_bytes=4096, total_bytes=16_384)
    busy._number = 1000  # both have this process's ID in the names of their files
    for number in range(200):
        busy._write_lines([orjson.dumps(request_line(1000 + number)) + b"\n"])
        if number % 10 == 0:
            quiet._write_lines([orjson.dumps(request_line(2 + number)) + b"\n"])
    decisions = {request["decision"] for request in read_records(tmp_path).requests}
    assert {182, 192} <= decisions
    # Somebody deletes the open file: the next records have one of their own.
    for path in tmp_path.iterdir():
        path.unlink()
    quiet._write_lines([orjson.dumps(request_line(7)) + b"\n"])
    assert [request["decision"] for request in read_records(tmp_path).requests] == [7]
    quiet._close_file()
    busy._close_file()


@pytest.mark.parametrize("batch", [1, BATCH])
def test_the_files_of_all_workers_stay_below_the_total(tmp_path: Path, batch: int) -> None:
    """Files that all workers open at the same time grow after the last look at the total."""
    total = 1 << 17
    writers = [writer_of(tmp_path, workers=4, file_bytes=1 << 12, total_bytes=total) for _ in range(4)]
    sums = []
    for number, writer in enumerate(writers):
        writer._number = 1000 * number  # all have this process's ID in the names of their files
    for first in range(0, 500, batch):
        for writer in writers:
            writer._write_lines(
                [orjson.dumps(request_line(first + number)) + b"\n" for number in range(batch)]
            )
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert max(sizes) <= 1 << 12, "all may open at the same moment"
        sums.append(sum(sizes))
    for writer in writers:
        writer._close_file()
    assert 0.75 * total < max(sums) <= total
    decisions = {request["decision"] for request in read_records(tmp_path).requests}
    assert min(decisions) > 0, "the oldest files are deleted"


@pytest.mark.parametrize(("workers", "most"), [(1, 64 << 20), (8, 16 << 20)])
def test_many_workers_write_smaller_files(tmp_path: Path, workers: int, most: int) -> None:
    config = ServerConfig.model_validate({"workers": workers, "records": {"path": tmp_path}})
    assert Recorder(config.records, Fleet(config)).writer._file_bytes == most


def test_a_full_disk_keeps_no_file_without_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: RecordWriter, file: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", len(data))

    monkeypatch.setattr(record_writer, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(RecordWriter, "_write", refuse)
    writer = writer_of(tmp_path)
    writer.start()
    for number in range(5):
        writer.put(request_line(number), 0)
        before = writer.outcomes["disk"]
        until_threads(lambda: writer.outcomes["disk"] > before)  # noqa: B023
    writer.close()
    assert writer.outcomes["disk"] == 5
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_json_cannot_hold_ends_no_thread(tmp_path: Path) -> None:
    """Security F10: an engine's 1e300 blocks once ended the writer, and nothing was counted."""
    values: list[Any] = [10**300, 10**300]

    def head() -> list[dict[str, Any]]:
        return [{"type": "header", "blocks": values.pop() if values else 1}]

    writer = RecordWriter(RecordsConfig(path=tmp_path), tmp_path, head, lambda item: item)
    writer.start()
    for number in range(3):
        writer.put(request_line(number), 0)
        until_threads(lambda: not writer.waiting)
    writer.close()
    assert writer.outcomes["written"] >= 1
    assert writer.outcomes["written"] + writer.outcomes["error"] == 4  # the first file's head, too
    assert len(list(tmp_path.iterdir())) == 1


def test_a_slow_disk_fills_the_queue_and_delays_nobody(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(item: Any) -> Any:
        gate.wait(10)
        return item

    writer = writer_of(tmp_path, slow, queue_records=64, queue_bytes=1 << 16)
    writer.start()
    for number in range(500):
        writer.put(request_line(number), 0)
    assert writer.outcomes["queue_full"] > 300
    gate.set()
    writer.close()
    assert writer.outcomes["written"] + writer.outcomes["queue_full"] == 500
    bytes_bound = writer_of(tmp_path, queue_bytes=1 << 16)
    for number in range(5):
        bytes_bound.put(request_line(number), 30_000)
    assert bytes_bound.outcomes["queue_full"] == 3


def test_hashes_chain_and_depend_on_the_key_and_on_the_domain() -> None:
    hasher, other = Hasher(b"k" * 32), Hasher(b"j" * 32)
    data = b"a" * 64 + b"b" * 64
    one = hasher.chain(data, 64, "tokens", "model", None, None)
    assert len(one) == 16
    assert one == Hasher(b"k" * 32).chain(data + b"c", 64, "tokens", "model", None, None)
    assert hasher.id != other.id
    different = [
        other.chain(data, 64, "tokens", "model", None, None),
        hasher.chain(data, 64, "tokens", "model", "adapter", None),
        hasher.chain(data, 64, "tokens", "model", None, "salt"),
        hasher.chain(b"x" + data[1:], 64, "tokens", "model", None, None),
    ]
    for hashes in different:
        assert hashes[:8] != one[:8]
        assert hashes[8:] != one[8:]


@pytest.mark.parametrize(("size", "block"), [(0, 64), (63, 64), (64 * 3 + 5, 64), (700, 100), (4096, 256)])
def test_hashes_are_those_of_the_standard_library(size: int, block: int) -> None:
    """The values stay comparable with files of earlier releases."""
    data = bytes(number * 7 % 251 for number in range(size))
    hasher = Hasher(b"k" * 32)
    last = hashlib.blake2b(repr(("text", "m")).encode(), key=hasher._key, digest_size=8).digest()
    expected = b""
    for begin in range(0, size - block + 1, block):
        last = hashlib.blake2b(hasher._key + last + data[begin : begin + block], digest_size=8).digest()
        expected += last
    assert hasher.chain(data, block, "text", "m") == expected
    with pytest.raises(BadValueError, match="block: 0 is not valid"):
        hasher.chain(data, 0)


def test_hashing_lets_other_threads_run() -> None:
    """Other threads run while 64 MB are hashed: the call releases the interpreter lock."""
    hasher, data, done = Hasher(b"k" * 32), bytes(64_000_000), threading.Event()

    hashing = []

    def run() -> None:
        hasher.chain(data, 64)
        hashing.append(time.thread_time())
        done.set()

    thread = threading.Thread(target=run)
    began = time.thread_time()
    thread.start()
    while not done.is_set():
        pass
    thread.join()
    # Python switches threads after 5 ms. With the lock, the hashing thread would take all the rest.
    assert time.thread_time() - began > hashing[0] / 10


def file_of(folder: Path, *lines: Any, end: bytes = b"\n", schema: int = 1) -> Path:
    header = {
        "type": "header",
        "schema": schema,
        "router_version": "9.9",
        "at": 1.0,
        "key_id": "a",
        "sample": 1.0,
    }
    path = folder / "records-1.jsonl"
    texts = [line if isinstance(line, bytes) else orjson.dumps(line) for line in (header, *lines)]
    path.write_bytes(b"\n".join(texts) + end)
    return path


def test_a_data_frame_has_a_row_per_request(tmp_path: Path) -> None:
    lines = [request_line(number) | {"load": {"bs": number}} for number in range(3)]
    frame = read_records(file_of(tmp_path, *lines)).to_pandas()
    assert frame["load.bs"].tolist() == [0, 1, 2]
    assert frame["decision"].tolist() == [0, 1, 2]


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"schema version 2; this release reads version 1.*9.9"):
        read_records(file_of(tmp_path, schema=2))


def test_a_truncated_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    path = file_of(tmp_path, request_line(1), orjson.dumps(request_line(2))[:40], end=b"")
    records = read_records(tmp_path)
    assert [request["decision"] for request in records.requests] == [1]
    assert records.notes == [f"{path}, line 3: skipped: it is truncated (40 bytes)"]
    archive = tmp_path / "records-2.jsonl.gz"
    archive.write_bytes(gzip.compress(path.read_bytes())[:-20])
    assert "truncated" in read_records(archive).notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "line 2: the line is not valid JSON"),
        ([1], "line 2: expected an object, got list"),
        ({"type": "other"}, "line 2: type 'other' is unknown"),
        ({"type": "request", "at": 1.0}, "line 2: the request has no 'model'"),
        (request_line(1) | {"at": "today"}, "line 2: the request has 'at': 'today'; expected number"),
        (request_line(1) | {"at": None}, "line 2: the request has no 'at'"),
        (request_line(1) | {"status": True}, "the request has 'status': True; expected integer"),
        (request_line(1) | {"load": [1]}, r"the request has 'load': \[1\]; expected mapping"),
        (fleet_line({}), "line 2: an engine has no 'name'"),
        (fleet_line("e0"), "line 2: the fleet has the engine 'e0'; expected a mapping"),
        (fleet_line(ENGINE_LINE | {"usable": 1}), "an engine has 'usable': 1; expected true or false"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_records(file_of(tmp_path, line, request_line(3)))


def test_null_is_like_an_absent_key(tmp_path: Path) -> None:
    line = fleet_line(ENGINE_LINE | {"block_tokens": None})
    records = read_records(file_of(tmp_path, line, request_line(1) | {"score": None}))
    assert records.requests == [request_line(1)]
    assert len(records.fleets) == 1


@pytest.mark.parametrize("hashes", ["a", "AAAA"])
def test_invalid_hashes_are_named(hashes: str) -> None:
    with pytest.raises(RecordError, match=r"the request at 3\.0: hashes are not valid"):
        hashes_of(request_line(3) | {"hashes": hashes})


def test_files_that_are_no_records(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="has no record file"):
        read_records(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"timestamp": 1}\n')
    with pytest.raises(RecordError, match="no header of records"):
        read_records(tmp_path)


def test_the_model_must_be_chosen_among_several(tmp_path: Path) -> None:
    lines = [request_line(number) | {"model": name} for number, name in enumerate("aab")]
    records = read_records(file_of(tmp_path, *lines))
    with pytest.raises(RecordError, match="models a, b; choose one with --model"):
        records.of(None)
    assert len(records.of("a").requests) == 2
    with pytest.raises(RecordError, match="no model 'c'; known: a, b"):
        records.of("c")


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"total_bytes \(1048576\) must be at least 134217728"):
        load_config(overrides={"records.total_bytes": 1 << 20}, environ={})


def test_the_schema_has_a_meaning_for_each_key() -> None:
    for table in (HEADER, FLEET, ENGINE, REQUEST):
        assert all(len(key.meaning) > 5 for key in table.values())


async def test_routers_with_one_key_share_hashes(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-secret-of-the-fleet\n")
    found = []
    for name, settings in (("a", {"hash_key_file": str(key)}), ("b", {"hash_key_file": str(key)}), ("c", {})):
        folder = tmp_path / name
        async with world(1, records={"path": str(folder), **settings}) as it:
            await it.post({"model": "tiny", "prompt": "x" * 600}, headers={"x-session-id": "s"})
            await it.settled()
            records = recorded(it)
        found.append(
            (records.headers[0]["key_id"], records.requests[0]["hashes"], records.requests[0]["session"])
        )
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))
