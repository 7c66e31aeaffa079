"""Records as Parquet: the same records as from lines of JSON, and its errors."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from lmetric.cli.app import build
from lmetric.record_files import convert_records, read_records
from lmetric.record_schema import REQUEST, RecordError, Records, hashes_of
from record_world import make_trace, simulated, write_records

TRACE = make_trace(60)
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")


def some_records(folder: Path) -> Path:
    """Records of a simulated fleet. Some requests have all keys, and some have further ones."""
    values: dict[str, Any] = {
        "number": 1.5,
        "integer": 7,
        "text": "a ü",
        "true or false": True,
        "list of texts": ["e0", "e1"],
        "mapping": {"policy": "vllm", "instance": None, "predicted_cached_tokens": 3},
        "mapping of numbers": {"bs": 3, "p_token": 0.25},
    }

    def change(index: int, line: dict[str, Any]) -> None:
        if index % 3 == 0:
            line |= {name: values[key.kind] for name, key in REQUEST.items() if name not in line}
        if index % 5 == 0:
            line["key_of_a_later_release"] = {"deep": [index]}

    return write_records(folder, TRACE, simulated(TRACE, "lmetric"), change)


def convert(source: Path, out: Path) -> Result:
    return CliRunner().invoke(build(["records"]), ["records", "convert", str(source), "--out", str(out)])


def same(one: Records, other: Records) -> bool:
    return (one.headers, one.fleets, one.requests) == (other.headers, other.fleets, other.requests)


def test_both_formats_have_the_same_records(tmp_path: Path) -> None:
    (folder := tmp_path / "records").mkdir()
    path = some_records(folder)
    second = folder / "records-z.jsonl.gz"
    later = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    later = [line | {"at": line["at"] + 3_600} for line in later]
    second.write_bytes(gzip.compress(b"\n".join(map(orjson.dumps, later)) + b"\n"))
    out = tmp_path / "requests.parquet"
    assert convert(folder, out).exit_code == 0
    lines, rows = read_records(folder), read_records(out)
    assert len(lines.requests) == 2 * len(TRACE)
    assert same(lines, rows)
    assert rows.of(None).models == ["m"]
    table = parquet.read_table(out)
    assert table.num_rows == len(lines.requests)
    # Other tools get typed columns.
    assert str(table.schema.field("hashes").type) == "list<element: uint64>"
    with_hashes = hashes_of(lines.requests[0]).tolist()
    assert with_hashes in table.column("hashes").to_pylist()
    assert sum(table.column("ttft_seconds").to_pylist()) > 0
    # A folder may have both suffixes. A request in both counts once.
    (both := tmp_path / "both").mkdir()
    out.rename(both / "a.parquet")
    path.rename(both / "b.jsonl")
    found = read_records(both)
    assert found.requests == lines.requests
    assert found.notes == [
        f"{both / 'b.jsonl'}: {len(TRACE)} requests are in another file, too; each counts once"
    ]


def test_a_request_in_several_files_counts_once(tmp_path: Path) -> None:
    (folder := tmp_path / "records").mkdir()
    path = some_records(folder)
    once = read_records(path)
    assert once.notes == []
    # The router wrote one more request after the file was compressed.
    lines = path.read_bytes().splitlines()
    archive = folder / "records-z.jsonl.gz"
    archive.write_bytes(gzip.compress(b"\n".join(lines[:-1]) + b"\n"))
    note = f"{archive}: {len(TRACE) - 1} requests are in another file, too; each counts once"
    out = tmp_path / "requests.parquet"
    for found in (read_records(folder), read_records([path, archive])):
        assert (found.requests, found.notes) == (once.requests, [note])
        assert found.newest[1] < found.newest[0], "the copy keeps its last arrival"
    assert len(read_records([folder, path]).requests) == len(TRACE)
    converted = convert(folder, out)
    assert note in converted.stderr.replace("\n", " ")
    assert read_records(out).requests == once.requests


def test_a_truncated_line_is_reported_and_the_rest_converted(tmp_path: Path) -> None:
    path = some_records(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "a.parquet"
    assert "truncated" in convert(path, out).stderr
    assert same(read_records(path), read_records(out))


def test_a_failed_conversion_leaves_no_file(tmp_path: Path) -> None:
    path = some_records(tmp_path)
    out = tmp_path / "out.parquet"
    out.write_bytes(b"an earlier file")
    lines = path.read_bytes().splitlines()
    line = orjson.loads(lines[-1]) | {"load": {"bs": "many"}}
    path.write_bytes(b"\n".join([*lines, orjson.dumps(line)]) + b"\n")
    with pytest.raises(RecordError, match=r"'load': .*; expected mapping of numbers"):
        convert_records([path], out)
    assert out.read_bytes() == b"an earlier file"
    assert sorted(each.name for each in tmp_path.iterdir()) == [out.name, path.name]


def test_files_that_are_no_parquet_of_records(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(RecordError, match=r"broken\.parquet: no valid Parquet file"):
        read_records(broken)
    import pyarrow

    parquet.write_table(pyarrow.table({"a": [1]}), broken)
    with pytest.raises(RecordError, match="no header of records"):
        read_records(broken)
    keys = {"lmetric.headers": orjson.dumps([{"type": "header", "schema": 9}]), "lmetric.fleets": b"[]"}
    parquet.write_table(pyarrow.table({"a": [1]}).replace_schema_metadata(keys), broken)
    with pytest.raises(RecordError, match="schema version 9; this release reads version 1"):
        read_records(broken)
    keys["lmetric.headers"] = b"[]"
    parquet.write_table(pyarrow.table({"at": [1.0]}).replace_schema_metadata(keys), broken)
    with pytest.raises(RecordError, match=r"lmetric\.newest.*; convert the records again"):
        read_records(broken)
    keys["lmetric.newest"] = b"[]"
    parquet.write_table(pyarrow.table({"at": [1.0]}).replace_schema_metadata(keys), broken)
    with pytest.raises(RecordError, match="row 1: the request has no 'model'"):
        read_records(broken)


@pytest.mark.parametrize(
    ("out", "message"),
    [("a.json", "expected a name that ends in .parquet"), ("records/a.parquet", "choose another folder")],
)
def test_outputs_that_are_refused(tmp_path: Path, out: str, message: str) -> None:
    (folder := tmp_path / "records").mkdir()
    some_records(folder)
    assert message in str(convert(folder, tmp_path / out).exception)
    assert not (tmp_path / out).exists()


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.parquet"
    convert_records([some_records(tmp_path)], out)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for call in (lambda: read_records(out), lambda: convert_records([tmp_path], out)):
        with pytest.raises(RecordError, match=r"pip install 'pyarrow>="):
            call()
