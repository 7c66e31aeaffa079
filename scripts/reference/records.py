"""docs/reference/records.md, from the schema in `lmetric.record_schema`."""

from __future__ import annotations

from lmetric.record_schema import ENGINE, FLEET, HEADER, REQUEST, SCHEMA_VERSION, Key

HEAD = f"""\
# Records

The router can write a record of each request to disk: the decision, its reasons, and the outcome. `scripts/make_reference records`
generates this page. [Its section](settings.md#records) lists the settings; `serve --records DIR` sets the folder alone.

- A folder belongs to one router. Its files have the names `records-TIME-PROCESS-NUMBER.jsonl`, and only the router's user can read them.
- A new file begins when one is full. The oldest files are deleted so that all files together stay below `total_bytes`, also those that
  workers still write.
- Each file is complete in itself: a header, the state of the fleet, then one line of JSON per request, in the order of their ends.
- Commands take files and folders, also files that you have compressed (`.jsonl.gz`). A request in several files counts once. In Python, `lmetric.record_files.read_records` reads them.
- If the queue of the writer is full, or the disk refuses a write, the router loses records, never requests. `lmetric_records_total`
  counts the records by outcome. After a failed write, the router waits 5 s and begins a new file.
- The last line of a file is truncated if the router was killed or the disk was full. Readers skip it and report it. An invalid line
  elsewhere is an error with file and line.

## Parquet

`records convert` writes records as one [Parquet](https://parquet.apache.org) file with one row per request and one column per key. An absent
key is null. `load` and `terms` are maps, `hashes` is a list of integers. It needs the extra `parquet`. `whatif`, `report` and
`read_records` read the file, too.

```console
$ lmetric-router records convert records --out requests.parquet
```

## Privacy

Records contain no text. Prompts, sessions and tenants appear as 64-bit hashes under a secret key, so nobody without the key can check a
guess. By default, the key is random and is lost when the router stops. Set `hash_key_file` if files of several runs or
routers must share hashes. Then keep the file as safe as the prompts: its owner can check guesses of prompts.

Equal hashes at equal positions mean equal prompts up to that block. Lengths, times and adapters are in plain text.
`tenant_names` and `request_ids` add the names of tenants and the ids of requests.

## Schema

The header has the version of the schema, now {SCHEMA_VERSION}. A release may add keys without a new version; readers ignore unknown
keys. If a key changes its meaning, the version grows, and readers refuse other versions.

Keys marked with a star are always present. An absent key means: unknown, or not applicable. Times are seconds, lengths are tokens.
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
        f"| `{name}`{star if key.always else ''} | {key.kind} | {key.meaning} |\n"
        for name, key in keys.items()
    )
    return f"| key | type | meaning |\n| --- | --- | --- |\n{rows}"


def files() -> dict[str, str]:
    """Returns the page."""
    page = HEAD
    for title, (keys, about) in SECTIONS.items():
        page += f"\n### {title}\n\n{about}\n\n{table(keys)}"
    return {"docs/reference/records.md": page}
