"""Reads the records of requests that a router writes: the settings `records` of `serve`.

A file of the router has one JSON object per line: first a header, then states of the fleet and
requests. `record_parquet` reads the same records as Parquet, and `record_schema` has their keys.
"""

from __future__ import annotations

import errno
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from lmetric.file_errors import naming
from lmetric.record_parquet import read_parquet, write_parquet
from lmetric.record_schema import RecordError, Records, newest_of, parse_line

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
MAX_LINE_BYTES = 16 << 20  # longer than any request: its prompt has 16 bytes of hash per block
# Keys that together differ between any two requests, since times have microseconds.
_IDENTITY = ("at", "decision", "instance", "status", "prompt_tokens", "e2e_seconds")


def read_records(paths: str | Path | Iterable[str | Path]) -> Records:
    """Reads files of records, or all such files of folders.

    A truncated last line of a file is skipped: the router that wrote it ended, or its disk was
    full. A request that several files have counts once: a compressed copy may lie beside its
    original. `Records.notes` names both.

    Raises:
        RecordError: no file, another schema version, or an invalid line.
        OSError: a file cannot be read.
    """
    return _read([paths] if isinstance(paths, str | Path) else list(paths), set())


def record_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Returns the files, and the record files in the folders. Raises RecordError."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise not_found(path)
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(each for each in path.iterdir() if each.name.endswith(SUFFIXES))
        if not inside:
            raise RecordError(
                f"{path}: the folder has no record file (*.jsonl, *.parquet); set records.path of the "
                "router, and send requests"
            )
        found += inside
    return found


def not_found(path: Path) -> FileNotFoundError:
    """The error for a missing file or folder of records."""
    advice = "not found; give record files, or the folder in records.path"
    return FileNotFoundError(errno.ENOENT, advice, str(path))


def convert_records(paths: Iterable[Path], out: Path) -> tuple[Records, int]:
    """Writes all requests of some record files to one Parquet file, as `write_parquet` does.

    A request that several files have is written once.

    Raises:
        RecordError: an invalid input, or pyarrow is not installed.
        OSError: a file cannot be read or written.
    """
    seen: set[int] = set()
    return write_parquet(((path, _read([path], seen)) for path in paths), out)


def _read(paths: Sequence[str | Path], seen: set[int]) -> Records:
    """Reads files of records without the requests in `seen`, and adds the others to it."""
    read = Records([], [], [])
    for path in record_paths(paths):
        before = len(read.requests)
        if path.suffix == ".parquet":
            read_parquet(path, read)
        else:
            _read_file(path, read)
        newest = newest_of(read.requests[before:])
        _keep_new(path, read, before, seen)
        read.newest.extend(newest for _ in range(len(read.headers) - len(read.newest)))
    files = sorted(zip(read.headers, read.newest, strict=True), key=lambda file: float(file[0]["at"]))
    read.headers[:], read.newest[:] = [header for header, _ in files], [newest for _, newest in files]
    for lines in (read.fleets, read.requests):
        lines.sort(key=lambda line: float(line["at"]))
    return read


def _keep_new(path: Path, read: Records, before: int, seen: set[int]) -> None:
    """Removes the requests of a file, from the index `before` on, that an earlier file had, too."""
    requests = read.requests[before:]
    # Hashes have 64 bits: they need a fourth of the memory of the values.
    keys = [hash(tuple(map(request.get, _IDENTITY))) for request in requests]
    read.requests[before:] = [request for key, request in zip(keys, requests, strict=True) if key not in seen]
    seen.update(keys)
    if again := before + len(requests) - len(read.requests):
        read.notes.append(f"{path}: {again} requests are in another file, too; each counts once")


def _read_file(path: Path, read: Records) -> None:
    for number, (text, whole) in enumerate(_lines(path), start=1):
        if not whole and _truncated(text):
            read.notes.append(f"{path}, line {number}: skipped: it is truncated ({len(text)} bytes)")
            return
        line = parse_line(f"{path}, line {number}", text, header=number == 1)
        {"header": read.headers, "fleet": read.fleets, "request": read.requests}[line["type"]].append(line)


def _truncated(text: bytes) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return True
    return False


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yields the lines of a file, and whether each has its end."""
    with naming(path), gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
        try:
            while line := file.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    raise RecordError(f"{path}: a line has more than {MAX_LINE_BYTES:,} bytes; remove it")
                if line.strip():
                    yield line.rstrip(b"\n"), line.endswith(b"\n")
        except EOFError:
            yield b"{", False  # a truncated archive
        except (gzip.BadGzipFile, zlib.error) as error:
            raise RecordError(f"{path}: no valid gzip file: {error}") from None
