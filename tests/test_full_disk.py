"""A disk that is full while results are written: the error names the file.

A limit of the size of files stands for the full disk: files can be opened, and each write fails.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmetric.cli import describe
from lmetric.lengths import save_predictor, write_onnx
from lmetric.record_files import convert_records
from lmetric_lab.sim.figures import draw, save_pngs
from lmetric_lab.sim.setups import Result, run
from lmetric_lab.sim.store import Store, write_csv, write_parquet
from lmetric_lab.sim.traces import write_trace
from record_world import make_trace, simulated, write_records
from test_lengths import tiny
from test_study import setup_of
from test_whatif import call


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refuses(path: Path, write: Callable[[], Any]) -> None:
    with full_disk(), pytest.raises(OSError, match="File too large") as failed:
        write()
    assert describe(failed.value) == f"{path}: File too large"


def add(path: Path, result: Result) -> None:
    with Store(path) as store:
        store.add(result)


@pytest.mark.parametrize("extension", ["jsonl", "csv", "parquet"])
def test_results_of_studies(tmp_path: Path, extension: str) -> None:
    if extension == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra: lmetric-router[parquet]")
    setup = setup_of(instances=1)
    result = run(setup, setup.trace.load())
    path = tmp_path / f"runs.{extension}"
    write: dict[str, Callable[[], None]] = {
        "jsonl": lambda: add(path, result),
        "csv": lambda: write_csv(path, [result]),
        "parquet": lambda: write_parquet(path, [result]),
    }
    refuses(path, write[extension])


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra: lmetric-router[plots]")
    drawing = draw("empty", "Title", "", lambda figure: None, (1, 1))
    refuses(tmp_path / "empty.png", lambda: save_pngs([("", drawing)], tmp_path))


def test_traces_and_predictors(tmp_path: Path) -> None:
    trace = make_trace(20)
    refuses(tmp_path / "t.jsonl", lambda: write_trace(trace, tmp_path / "t.jsonl"))
    refuses(tmp_path / "p.npz", lambda: save_predictor(tiny(), tmp_path / "p.npz"))
    pytest.importorskip("onnx", reason="needs the extra: lmetric-router[lengths]")
    refuses(tmp_path / "p.onnx", lambda: write_onnx(tiny(), tmp_path / "p.onnx"))


def test_records_and_profiles(tmp_path: Path) -> None:
    trace = make_trace(200)
    records = write_records(tmp_path, trace, simulated(trace, "round_robin"))
    ended = call(str(records), "--policy", "round_robin", "--seeds", "1", "--profile-out", "/dev/full")
    assert isinstance(ended.exception, OSError)
    assert describe(ended.exception) == "/dev/full: No space left on device"
    pytest.importorskip("pyarrow", reason="needs the extra: lmetric-router[parquet]")
    out = tmp_path / "r.parquet"
    refuses(out, lambda: convert_records([records], out))
