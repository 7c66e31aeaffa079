"""Stores a study's results: one JSON line per finished run, so that the study can be resumed."""

from __future__ import annotations

import csv
import fcntl
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from pydantic import TypeAdapter, ValidationError

from lmetric._core import LmetricError
from lmetric.extras import install
from lmetric.file_errors import naming
from lmetric.option_values import shown
from lmetric_lab.sim.max_load import MaxLoad
from lmetric_lab.sim.setups import Result

_KINDS: dict[str, TypeAdapter[Any]] = {"run": TypeAdapter(Result), "max_load": TypeAdapter(MaxLoad)}


class StoreError(LmetricError):
    """Results cannot be read or written. The message names the file."""


class Store:
    """Finished runs in a file, by key. Use it in a ``with`` block, in one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Result] = {}
        self.max_loads: dict[str, MaxLoad] = {}

    def __enter__(self) -> Self:
        self._file = self.path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StoreError(f"{self.path}: another study is writing to it") from None
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with naming(self.path):
            self._file.close()

    def add(self, result: Result | MaxLoad) -> None:
        """Store a result. It is flushed to the file on return."""
        kind = "run" if isinstance(result, Result) else "max_load"
        # `asdict` would copy the curves first: a tenth of the time of a short study.
        line = orjson.dumps(
            {"kind": kind} | {each.name: getattr(result, each.name) for each in fields(result)}
        )
        with naming(self.path):
            self._file.write(line + b"\n")
            self._file.flush()
        self._keep(result)

    def _keep(self, result: Result | MaxLoad) -> None:
        if isinstance(result, Result):
            self.runs[result.key] = result
        else:
            self.max_loads[result.key] = result

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break  # incomplete line of a stopped study: the run is repeated
            whole += len(line)
            try:
                told = orjson.loads(line)
                kind = _KINDS[told.pop("kind")]
            except (orjson.JSONDecodeError, KeyError, AttributeError):
                raise StoreError(f"{self.path}, line {number}: not a result of a study") from None
            try:
                self._keep(kind.validate_python(told))
            except ValidationError:
                continue  # from a version with other fields; its key would not match either
        self._file.truncate(whole)


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """Writes one row per run, with settings and flat figures (``ttft_seconds_p99``) as columns."""
    columns = _columns(results)
    with naming(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def require_pyarrow() -> None:
    """Raises `LmetricError` if pyarrow is missing, so that a command can fail before its runs."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise LmetricError(
            f"Parquet files need pyarrow, which is not installed: {install('parquet')}"
        ) from None


def write_parquet(path: Path, results: Iterable[Result]) -> None:
    """Writes the table of `write_csv` as Parquet. Numbers keep their type; a column of mixed types
    is text.

    Raises `LmetricError` if pyarrow is missing.
    """
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    table = {}
    for name, cells in _columns(results).items():
        known = [None if cell == "" else cell for cell in cells]
        kinds = {float if type(cell) is int else type(cell) for cell in known if cell is not None}
        plain = len(kinds) == 1 and kinds <= {float, bool, str}
        table[name] = known if plain else [None if cell is None else str(cell) for cell in known]
    with naming(path):
        pyarrow.parquet.write_table(pyarrow.table(table), path)


def _columns(results: Iterable[Result]) -> dict[str, list[Any]]:
    rows = [_row(result) for result in results]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: ["" if (cell := row.get(name)) is None else cell for row in rows] for name in names}


def _row(result: Result) -> dict[str, Any]:
    setup = result.setup
    row: dict[str, Any] = {
        "trace": setup.trace.label,
        "instances": setup.instances,
        "roles": setup.roles or "",
        "profile": setup.profile,
        "block_tokens": setup.engine.block_tokens,
        **{name: shown(v) if isinstance(v, Mapping) else v for name, v in setup.settings.items()},
        "load": setup.load,
        "speed": setup.speed,
        "arrivals_per_second": result.arrivals_per_second,
    }
    for name, value in asdict(result.figures).items():
        if isinstance(value, dict):
            row |= {f"{name}_{part}": each for part, each in value.items()}
        else:
            row[name] = value
    row["guard_alarms"] = result.guard_alarms
    row["unscored"] = result.unscored
    return row
