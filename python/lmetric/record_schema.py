"""The schema of records of requests, and the records in memory.

The tables `HEADER`, `FLEET`, `ENGINE` and `REQUEST` are the schema of a line, and
docs/reference/records.md shows them. `record_files` reads files of lines, and `record_parquet`
reads and writes Parquet.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric._core import LmetricError
from lmetric.extras import install
from lmetric.reasons import BY_CLIENT

if TYPE_CHECKING:
    import pandas

SCHEMA_VERSION = 1
TOO_MANY, CLIENT_LEFT = 429, 499  # HTTP statuses

# Ranges by unit: readers allocate and count with these values. Times are up to the year 5138.
RANGES = {"s": (0.0, 1e11), "tokens": (0, 1 << 31), "blocks": (0, 1 << 40)}
MAX_INTEGER = (1 << 63) - 1
BLOCK = (1, 1 << 20)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a line: its type in JSON, its unit, and its meaning.

    ``within``: the lowest and the highest value; None: as `RANGES` says for the unit.
    """

    kind: str  # number, integer, text, true or false, list of ..., mapping of ...
    meaning: str
    unit: str = ""
    always: bool = False  # whether each line of its type has the key
    within: tuple[float, float] | None = None

    def expected(self, value: Any) -> str | None:
        """The expected type or range of a value; None: the value is good."""
        if type(value) not in KINDS[self.kind]:
            return self.kind
        if self.kind == "list of texts":
            return None if all(isinstance(each, str) for each in value) else self.kind
        if self.kind == "mapping of numbers":
            numbers = value.values()
            return (
                None
                if all(type(each) in (int, float) and abs(each) <= MAX_INTEGER for each in numbers)
                else self.kind
            )
        if self.kind not in ("number", "integer"):
            return None
        low, high = self.within or RANGES.get(self.unit) or (-MAX_INTEGER - 1, MAX_INTEGER)
        return None if low <= value <= high else f"{self.kind} from {low:g} to {high:g}"


HEADER = {
    "type": Key("text", "`header`", always=True),
    "schema": Key("integer", "version of this schema", always=True),
    "router_version": Key("text", "version of the router that wrote the file", always=True),
    "at": Key("number", "time of the first line, Unix time", "s", always=True),
    "key_id": Key("text", "names the key of all hashes; files with equal ids share hashes", always=True),
    "sample": Key(
        "number",
        "share of the requests with a record, above 0 and at most 1",
        always=True,
        within=(1e-9, 1.0),
    ),
}
FLEET = {
    "type": Key("text", "`fleet`", always=True),
    "at": Key("number", "Unix time", "s", always=True),
    "model": Key("text", "model of the engines", always=True),
    "policy": Key("text or mapping", "policy of the router, as in its configuration", always=True),
    "knobs": Key("mapping of numbers", "parameters of the policy by name", always=True),
    "guard": Key("mapping", "settings of the hot-spot guard; absent: the policy decides"),
    "shadow": Key("mapping", "settings of the shadow: `policy`, `knobs`"),
    "canary": Key("mapping", "settings of the running canary: `policy`, `knobs`, `share`"),
    "block_tokens": Key("integer", "block size of the router's index", "tokens", always=True, within=BLOCK),
    "engines": Key("list of mappings", "engines of the model", always=True),
}
ENGINE = {
    "name": Key("text", "name of the engine", always=True),
    "kind": Key("text", "kind of the engine: vllm, sglang or unknown", always=True),
    "role": Key("text", "both, prefill or decode", always=True),
    "mode": Key("text", "mode of its KV index: exact, approximate or load_only", always=True),
    "usable": Key("true or false", "whether it accepts new requests", always=True),
    "block_tokens": Key("integer", "tokens of a KV block", "tokens", within=BLOCK),
    "cache_blocks": Key("integer", "KV blocks that it holds", "blocks"),
}
REQUEST = {
    "type": Key("text", "`request`", always=True),
    "at": Key("number", "arrival, Unix time", "s", always=True),
    "model": Key("text", "model of the request", always=True),
    "alias": Key("text", "name in the request, if it is an alias"),
    "fallback_from": Key("text", "model before the first fallback; `model` served the request in its place"),
    "fallback_reason": Key("text", "why that model did not serve it, as in `lmetric_model_fallbacks_total`"),
    "path": Key("text", "path of the API", always=True),
    "stream": Key("true or false", "whether the client requested a stream", always=True),
    "status": Key("integer", "HTTP status; 499: the client left", always=True),
    "outcome": Key(
        "text",
        "as in decision records: finished, dropped, or the kind of failure. `cancelled`: the client left, or "
        "an order to its engine (vLLM's `/pause`) aborted the answer",
    ),
    "reason": Key("text", "why the request ended with an error, without the engine's words"),
    "hedged": Key("true or false", "whether a hedge answered; the decision is the hedge's, without `load`"),
    "request_id": Key("text", "id of the request; only with `request_ids: true`"),
    "tenant": Key("text", "keyed hash of the tenant; its name with `tenant_names: true`"),
    "session": Key("text", "keyed hash of the session that the client named"),
    "adapter": Key("text", "LoRA adapter"),
    "prompt_tokens": Key("integer", "prompt length: by the engine, else estimated", "tokens", always=True),
    "extra_tokens": Key("integer", "tokens of further prompts in the request", "tokens"),
    "max_tokens": Key("integer", "largest answer that the client accepts", "tokens"),
    "hash_unit": Key("text", "unit of `hash_block`: `tokens` or `bytes`"),
    "hash_block": Key("integer", "size of a hashed prompt block, in `hash_unit`", within=BLOCK),
    "hashes": Key(
        "text",
        "base64 of one keyed 64-bit hash per whole block of the prompt, little-endian. A hash covers all "
        "blocks before it, the model, the adapter and the cache salt",
    ),
    "decision": Key("integer", "number of the decision since the router's start"),
    "policy": Key("text", "policy of the decision"),
    "arm": Key("text", "`canary` or `stable`; only while a canary runs"),
    "shadow": Key(
        "mapping",
        "choice of the shadow: `policy`, `instance` (null: it failed), `predicted_cached_tokens`, "
        "`predicted_ttft_seconds`; and `chosen_predicted_ttft_seconds`, of the engine that got the request",
    ),
    "instance": Key("text", "engine that answered, or was tried last"),
    "tried": Key("list of texts", "engines in the order of the attempts, if there were several"),
    "decode_instance": Key("text", "engine of the second segment"),
    "score": Key("number", "score of the instance at the decision, before any retry"),
    "margin": Key("number", "distance of the score to the runner-up; only without retries"),
    "terms": Key(
        "mapping of numbers",
        "indicators in the score of the instance, by name; without texts and those that it lacked",
    ),
    "runner_up": Key("text", "second-best engine; only without retries"),
    "load": Key(
        "mapping of numbers",
        "indicators of the instance right after the decision, this request included: `bs`, `q_bs`, "
        "`queued_prefill_tokens`, `tokens`",
    ),
    "predicted_cached_tokens": Key("integer", "prompt tokens expected in the instance's cache", "tokens"),
    "cached_tokens": Key("integer", "prompt tokens found there, if the engine reports them", "tokens"),
    "output_tokens": Key("integer", "tokens of the answer", "tokens"),
    "predicted_ttft_seconds": Key(
        "number", "queued prefill tokens of the instance divided by its learned prefill rate", "s"
    ),
    "held_seconds": Key("number", "wait in the router before the decision", "s"),
    "level": Key("integer", "priority level in the queue; only with levels"),
    "aged_levels": Key("integer", "by how many levels aging had raised its level when it was its turn"),
    "ttft_seconds": Key("number", "arrival to first token; only of streams", "s"),
    "tpot_seconds": Key("number", "mean time per further token; only of streams", "s"),
    "e2e_seconds": Key("number", "arrival to the end of the answer", "s", always=True),
    "retries": Key("integer", "further attempts after the first"),
    "migrations": Key("integer", "moves while it ran"),
    "handoff_seconds": Key("number", "time of a KV transfer between two segments", "s"),
    "fetched_tokens": Key("integer", "prompt tokens fetched from another engine", "tokens"),
}  # fmt: skip
LINES = {"header": HEADER, "fleet": FLEET, "request": REQUEST}
# Mappings whose null values are like absent ones: an indicator without a value.
_INDICATORS = tuple(name for name, key in REQUEST.items() if key.kind == "mapping of numbers")
KINDS: dict[str, tuple[type, ...]] = {
    "number": (float, int),
    "integer": (int,),
    "text": (str,),
    "true or false": (bool,),
    "mapping": (dict,),
    "mapping of numbers": (dict,),
    "text or mapping": (str, dict),
    "list of texts": (list,),
    "list of mappings": (list,),
}


class RecordError(LmetricError):
    """Records cannot be read. The message has the file, the line, and what to do."""


@dataclass(frozen=True, slots=True)
class Records:
    """All lines of some files, ordered by time.

    Requests and states of the fleet are mappings with the keys of `REQUEST` and `FLEET`.
    """

    headers: list[dict[str, Any]]
    fleets: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)  # skipped lines, with file, line and reason
    newest: list[float] = field(default_factory=list)  # last arrival in the file of each header

    @property
    def models(self) -> list[str]:
        """Models of the requests, the most frequent first."""
        counts: dict[str, int] = {}
        for request in self.requests:
            counts[request["model"]] = counts.get(request["model"], 0) + 1
        return sorted(counts, key=lambda name: (-counts[name], name))

    @property
    def sample(self) -> float:
        """The smallest sampled share of all files."""
        return min((float(header["sample"]) for header in self.headers), default=1.0)

    def column(self, name: str) -> NDArray[np.float64]:
        """A numeric key of all requests, shape (n,); NaN: absent."""
        return np.array([request.get(name, math.nan) for request in self.requests], np.float64)

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with one row per request and one column per key.

        `load` and `terms` become columns such as `load.bs`. Raises ImportError without pandas.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError(
                f"Records.to_pandas needs pandas, which is not installed; run: {install('pandas')}"
            ) from None
        return pandas.json_normalize(self.requests, max_level=1)

    def of(self, model: str | None) -> Records:
        """The records of one model; None: of the only model. Raises RecordError."""
        models = self.models
        if not models:
            raise RecordError("the records have no requests; send requests to a router with `records` set")
        if model is None and len(models) > 1:
            raise RecordError(f"the records have the models {', '.join(models)}; choose one with --model")
        name = models[0] if model is None else model
        if name not in models:
            raise RecordError(f"the records have no model {name!r}; known: {', '.join(models)}")
        return Records(
            self.headers,
            [fleet for fleet in self.fleets if fleet["model"] == name],
            [request for request in self.requests if request["model"] == name],
            self.notes,
            self.newest,
        )

    def between(self, begin: float, end: float) -> Records:
        """The requests that arrived in a time, Unix time, with the headers of files since then."""
        files = list(zip(self.headers, self.newest, strict=True))
        return Records(
            [header for header, newest in files if newest >= begin],
            self.fleets,
            [request for request in self.requests if begin <= request["at"] <= end],
            self.notes,
            [newest for _, newest in files if newest >= begin],
        )


def newest_of(requests: Sequence[Mapping[str, Any]]) -> float:
    """The last arrival of requests, Unix time; -infinite without any."""
    return max((float(request["at"]) for request in requests), default=-math.inf)


def invalid(request: Mapping[str, Any]) -> bool:
    """Whether the request itself was at fault: no engine would have served it."""
    return 400 <= request["status"] < 500 and request["status"] not in (TOO_MANY, CLIENT_LEFT)


def failed(request: Mapping[str, Any]) -> bool:
    """Whether a request failed: it has no answer, or an error that its client did not cause ended
    the answer."""
    reason = request.get("reason", "")
    return request["status"] != 200 or (reason != "" and not reason.startswith(BY_CLIENT))


def hashes_of(request: Mapping[str, Any]) -> NDArray[np.uint64]:
    """The block hashes of a request's prompt, shape (blocks,); empty without hashes.

    Raises RecordError if they are not valid.
    """
    try:
        return np.frombuffer(base64.b64decode(request.get("hashes", "")), dtype="<u8").astype(np.uint64)
    except ValueError as error:
        raise RecordError(f"the request at {request['at']}: hashes are not valid: {error}") from None


def parse_line(place: str, text: bytes, *, header: bool) -> dict[str, Any]:
    """Returns a line of a file, checked. ``header``: whether it must be one. Raises RecordError."""
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RecordError(f"{place}: the line is not valid JSON ({error}); remove it") from None
    return check_header(place, line) if header else check_line(place, line)


def check_line(
    place: str, line: dict[str, Any], *, kinds: Collection[str] = ("fleet", "request")
) -> dict[str, Any]:
    """Returns a line of a request or of the fleet without its null keys and null indicators.

    ``place``: for errors. ``kinds``: the types that may be there. Raises RecordError, also for a
    value of another type.
    """
    _check_object(place, line)
    kind: Any = line.get("type")
    if kind not in kinds:
        raise RecordError(f"{place}: type {kind!r} is unknown; expected {' or '.join(kinds)}")
    if None in line.values():
        line = _present(line)
    for name in _INDICATORS if kind == "request" else ():
        if isinstance(values := line.get(name), dict) and None in values.values():
            line[name] = _present(values)
    _check_keys(f"{place}: the {kind}", line, LINES[kind])
    for engine in line["engines"] if kind == "fleet" else ():
        if not isinstance(engine, dict):
            raise RecordError(f"{place}: the fleet has the engine {engine!r}; expected a mapping")
        _check_keys(f"{place}: an engine", engine, ENGINE)
    return line


def _check_object(place: str, line: object) -> None:
    if not isinstance(line, dict):
        raise RecordError(f"{place}: expected an object, got {type(line).__name__}")


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def check_header(place: str, line: dict[str, Any]) -> dict[str, Any]:
    """Returns a header. ``place``: for errors. Raises RecordError, also for another version."""
    _check_object(place, line)
    if line.get("type") != "header":
        raise RecordError(f"{place}: no header of records; the file is no record file of lmetric-router")
    if (version := line.get("schema")) != SCHEMA_VERSION:
        raise RecordError(
            f"{place}: schema version {version!r}; this release reads version {SCHEMA_VERSION}. Use the "
            f"release that wrote the file: {line.get('router_version', 'unknown')}"
        )
    _check_keys(f"{place}: the header", line, HEADER)
    return line


def _check_keys(what: str, line: Mapping[str, Any], table: Mapping[str, Key]) -> None:
    """Raises RecordError for a missing key, or a value of another type. ``what``: for errors."""
    for name, key in table.items():
        if name not in line:
            if key.always:
                raise RecordError(f"{what} has no {name!r}")
        elif (value := line[name]) is None and not key.always:
            continue
        elif (expected := key.expected(value)) is not None:
            raise RecordError(f"{what} has {name!r}: {value!r:.80}; expected {expected}")
