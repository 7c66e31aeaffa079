"""Records as Parquet: one row per request, for tools such as DuckDB, Spark and pandas.

A column holds a key of the schema. Absent keys are null, hashes are lists of 64-bit integers, and
keys that this release does not know are JSON in `OTHER`. Headers and states of the fleet are JSON
in the metadata of the file. Needs pyarrow: the extra `parquet`.
"""

from __future__ import annotations

import base64
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from lmetric.extras import install
from lmetric.file_errors import naming
from lmetric.record_schema import REQUEST, RecordError, Records, check_header, check_line, hashes_of

SUFFIX = ".parquet"
OTHER = "other"  # column of keys that are not in the schema
# Keys of the metadata. `NEWEST`: the last arrival in the file of each header; null: none.
HEADERS, FLEETS, NEWEST = b"lmetric.headers", b"lmetric.fleets", b"lmetric.newest"
ROWS = 1_024  # rows that are read at once
MAPPINGS = {name for name, key in REQUEST.items() if key.kind == "mapping"}  # columns with JSON


def write_parquet(files: Iterable[tuple[Path, Records]], out: Path) -> tuple[Records, int]:
    """Writes all requests of some record files to one Parquet file, file by file.

    ``files``: the name of each file, and its records. The Parquet file appears whole, or not at
    all. Returns headers, states of the fleet and notes of the input without its requests, and the
    number of requests.

    Raises:
        RecordError: an invalid value, or pyarrow is not installed.
        OSError: the file cannot be written.
    """
    parquet = _parquet()
    found, requests = Records([], [], []), 0
    schema = _schema()
    partial = out.with_name(f".{out.name}.partial")
    try:
        with naming(out), parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
            for path, records in files:
                writer.write_table(_table(records.requests, schema, path))
                requests += len(records.requests)
                found.headers.extend(records.headers)
                found.newest.extend(records.newest)
                found.fleets.extend(records.fleets)
                found.notes.extend(records.notes)
            lines = {HEADERS: found.headers, FLEETS: found.fleets, NEWEST: found.newest}
            writer.add_key_value_metadata({name: orjson.dumps(each) for name, each in lines.items()})
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return found, requests


def read_parquet(path: Path, read: Records) -> None:
    """Adds the records of a Parquet file.

    Raises:
        RecordError: no Parquet file of records, another schema version, or no pyarrow.
        OSError: the file cannot be read.
    """
    parquet = _parquet()
    from pyarrow import ArrowException

    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.metadata.metadata or {}
            if HEADERS not in metadata or FLEETS not in metadata:
                raise RecordError(
                    f"{path}: no header of records; the file is no record file of lmetric-router"
                )
            headers = [check_header(str(path), each) for each in orjson.loads(metadata[HEADERS])]
            for header, at in zip(headers, orjson.loads(metadata[NEWEST]), strict=True):
                read.headers.append(header)
                read.newest.append(-math.inf if at is None else float(at))
            for fleet in orjson.loads(metadata[FLEETS]):
                read.fleets.append(check_line(str(path), fleet, kinds=("fleet",)))
            row = 0
            for batch in file.iter_batches(ROWS):
                for line in _lines(batch):
                    row += 1
                    read.requests.append(check_line(f"{path}, row {row}", line))
    # Of the file, of JSON in it, or of keys of a mapping that are there twice.
    except (ArrowException, ValueError, TypeError, KeyError, OverflowError) as error:
        raise RecordError(f"{path}: no valid Parquet file: {error}; convert the records again") from None


def _lines(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the lines of the rows."""
    hashes: Iterable[str | None] = itertools.repeat(None)
    if "hashes" in batch.schema.names:
        hashes = _hashes(batch.column("hashes"))
        batch = batch.drop_columns(["hashes"])
    for row, text in zip(batch.to_pylist(maps_as_pydicts="strict"), hashes, strict=False):
        other = row.pop(OTHER, None)
        line = {name: value for name, value in row.items() if value is not None}
        if text is not None:
            line["hashes"] = text
        for name in MAPPINGS & line.keys():
            line[name] = orjson.loads(line[name])
        line |= orjson.loads(other) if other else {}
        yield line | {"type": "request"}


def _hashes(column: Any) -> Iterator[str | None]:
    """Yields the hashes of each row as in JSON. One number is no Python object: rows have many.

    Raises ArrowException for a column of another type, and ValueError for a hash that is null.
    """
    import pyarrow

    column = column.cast(pyarrow.list_(pyarrow.uint64()))
    if column.values.null_count:
        raise ValueError("a row has the hash null")
    values, offsets = column.values.to_numpy().astype("<u8", copy=False), column.offsets.to_numpy()
    for row, valid in enumerate(column.is_valid().to_numpy(zero_copy_only=False)):
        part = values[offsets[row] : offsets[row + 1]]
        yield base64.b64encode(part.tobytes()).decode() if valid else None


def _table(requests: list[dict[str, Any]], schema: Any, path: Path) -> Any:
    """Returns requests as a table. Raises RecordError for a value of another type."""
    import pyarrow

    columns = []
    for field in schema:
        if field.name == OTHER:
            values: list[Any] = [_other(request) for request in requests]
        elif field.name == "hashes":
            values = [hashes_of(request) if "hashes" in request else None for request in requests]
        else:
            values = [request.get(field.name) for request in requests]
            if field.name in MAPPINGS:
                values = [None if value is None else orjson.dumps(value).decode() for value in values]
            if pyarrow.types.is_map(field.type):
                values = [None if value is None else list(value.items()) for value in values]
        try:
            columns.append(pyarrow.array(values, field.type))
        except (pyarrow.ArrowException, TypeError, AttributeError, OverflowError) as error:
            kind = REQUEST[field.name].kind
            raise RecordError(
                f"{path}: a request has an invalid {field.name!r}; expected {kind}: {error}"
            ) from None
    return pyarrow.table(columns, schema=schema)


def _other(request: Mapping[str, Any]) -> str | None:
    found = {name: value for name, value in request.items() if name not in REQUEST}
    return orjson.dumps(found).decode() if found else None


def _schema() -> Any:
    """Returns the columns: the keys of `REQUEST` except `type`, then `OTHER`."""
    import pyarrow

    kinds = {
        "number": pyarrow.float64(),
        "integer": pyarrow.int64(),
        "text": pyarrow.string(),
        "true or false": pyarrow.bool_(),
        "list of texts": pyarrow.list_(pyarrow.string()),
        "mapping": pyarrow.string(),  # JSON
        "mapping of numbers": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
    }
    types = {name: kinds[key.kind] for name, key in REQUEST.items() if name != "type"}
    types["hashes"] = pyarrow.list_(pyarrow.uint64())
    return pyarrow.schema([*types.items(), (OTHER, pyarrow.string())])


def _parquet() -> Any:
    """Returns the module `pyarrow.parquet`. Raises RecordError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise RecordError(
            f"Parquet files need pyarrow, which is not installed: {install('parquet')}"
        ) from None
    return pyarrow.parquet
