"""docs/reference/records.md, from the schema in `lmetric.record_files`."""

from __future__ import annotations

from lmetric.record_files import ENGINE, FLEET, HEADER, REQUEST, SCHEMA_VERSION, Key

HEAD = f"""\
# Records

The router can write a record of each request to disk: the decision, its reasons, and the outcome. `scripts/make_reference records`
generates this page from `python/lmetric/record_files.py`. See also
[see what another policy would have done](../how-to/what_if.md).

```yaml
records:
  path: /var/lib/lmetric/records
```

[Configuration](configuration.md#records) lists all settings. `serve --records DIR` sets the folder alone.

## Files

- A folder belongs to one router. Its files have the names `records-TIME-PROCESS-NUMBER.jsonl`, and only the router's user can read them.
- A new file begins at `file_bytes`. The oldest files are deleted so that all files together stay below `total_bytes`.
- Each file is complete in itself: a header, the state of the fleet, then one line of JSON per request, in the order of their ends.
- Commands take files and folders, also files that you have compressed (`.jsonl.gz`).
- In Python, `lmetric.record_files.read_records` reads them. `Records.to_pandas` makes a data frame.

## Parquet

`records convert` writes records as one [Parquet](https://parquet.apache.org) file, for DuckDB, Spark or pandas. It needs the extra `parquet`.

```console
$ pip install 'lmetric-router[parquet]'
$ lmetric-router records convert records --out requests.parquet
```

- The file has one row per request and one column per key. An absent key is null. `load` and `terms` are maps, and `hashes` is a list of integers.
- `whatif`, `report` and `read_records` read it like the files of the router.
- The router itself writes JSON only: after a crash, each complete line is readable, and a Parquet file without its end is not.
- The command works file by file, so it needs memory for the largest file. It may run while the router writes: it takes the lines so far.

## Cost

[Monitor a router](../how-to/monitoring.md#cost) has the CPU time of a record. The event loop keeps references to sampled requests and
reads the load of the chosen engine: 1 µs with 4 engines and 2 µs with 1,000. A thread hashes prompts
(about 0.3 µs per block), reads decision records (15 to 160 µs) and writes. While it hashes, the event loop runs: hashing does not hold the
interpreter lock.

A queue connects the two. If it is full, or if the disk refuses a write, the router loses records, never requests.
`lmetric_records_total` counts the records by outcome, and one log line reports the first failed write. After a failed write, the
router waits 5 seconds and then begins a new file. With `records.path: null`, the router does none of this.

## Privacy

Records contain no text. Prompts, sessions and tenants appear as 64-bit hashes under a secret key, so nobody without the key can check a
guess. By default, the key is random and is lost when the router stops. Set `hash_key_file` if files of several runs or
routers must share hashes. Then keep the file as safe as the prompts: its owner can check guesses of prompts.

Equal hashes at equal positions mean equal prompts up to that block. Lengths, times and adapters are in plain text.
`tenant_names` and `request_ids` add the names of tenants and the ids of requests.

## Versions

The header has the version of the schema, now {SCHEMA_VERSION}. A release may add keys without a new version; readers ignore unknown
keys. If a key changes its meaning, the version grows. A reader refuses other versions and names the release that wrote the file.

The last line of a file is truncated if the router was killed or the disk was full. Readers skip it and report it. An invalid line
elsewhere is an error with file and line.

An absent key means: unknown, or not applicable. Keys marked with a star are always present.
"""

SECTIONS = {
    "Header": (HEADER, "The first line of each file."),
    "State of the fleet": (FLEET, "A line for each model at the start of a file, and when the fleet has changed."),
    "Engines in the state of the fleet": (ENGINE, "The entries of `engines`."),
    "Requests": (
        REQUEST,
        "A line for each request that reached routing, written at its end. Refused requests are included.",
    ),
}  # fmt: skip


def table(keys: dict[str, Key]) -> str:
    """Returns the keys as a Markdown table."""
    star = " \\*"
    rows = "".join(
        f"| `{name}`{star if key.always else ''} | {key.kind} | {key.unit} | {key.meaning} |\n"
        for name, key in keys.items()
    )
    return f"| key | type | unit | meaning |\n| --- | --- | --- | --- |\n{rows}"


def files() -> dict[str, str]:
    """Returns the page."""
    page = HEAD
    for title, (keys, about) in SECTIONS.items():
        page += f"\n## {title}\n\n{about}\n\n{table(keys)}"
    return {"docs/reference/records.md": page}
