"""The records of a gateway, on a disk that is full."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lmetric.gateways.record_file import RecordFile


def test_a_full_disk_loses_records_and_fails_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "records.jsonl"
    file = RecordFile(path)
    file.add({"id": 1})
    path.unlink()
    path.symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, "lmetric"):
        file.add({"id": 2})
        file.add({"id": 3})
    [line] = caplog.messages
    assert "No space left on device" in line
    assert "free space" in line
    path.unlink()
    path.write_bytes(b'{"id": 2, "cu')
    file.add({"id": 4})
    file.add({"id": 5})
    assert path.read_bytes() == b'{"id": 2, "cu\n{"id":4}\n{"id":5}\n'


def test_a_wrong_path_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RecordFile(tmp_path / "missing" / "records.jsonl")
