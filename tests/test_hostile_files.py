"""Data files from others: they run no code, and bad ones get a message within bounds.

Security F6 (records, studies and stored results ran code that they named) and the rows `whatif`
and `import-config` of security L.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import ConfigError
from lmetric.policies import is_code
from lmetric.record_files import read_records
from lmetric.record_parquet import write_parquet
from lmetric.record_schema import RecordError, Records
from lmetric_lab.capacity import Goal, Question, Twin
from lmetric_lab.capacity.watch import Watch
from lmetric_lab.migrate import Draft, detect, import_config
from lmetric_lab.sim.traces import Trace
from lmetric_lab.whatif import Limits, WhatIfError, recording_of
from record_world import make_trace, simulated, write_records

RAN = "code ran"


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file, and a package on the path, that print a line when they
    run."""
    folder = tmp_path / "work"
    (folder / "pack").mkdir(parents=True)
    (folder / "evil.py").write_text(f"print({RAN!r})\nscore = 'bs'\n")
    (folder / "pack" / "__init__.py").write_text(f"print({RAN!r})\n")
    (folder / "pack" / "inner.py").write_text("score = 'bs'\n")
    (folder / "evil-1.dist-info").mkdir()
    (folder / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
    (folder / "evil-1.dist-info" / "entry_points.txt").write_text(
        "[lmetric.policies]\nof_a_package = pack.inner:score\n"
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(requests=100)


def run(*words: str) -> Any:
    return CliRunner().invoke(build(words[:1]), list(words))


def records_of(folder: Path, trace: Trace, policy: object) -> Path:
    """Records of a fleet whose policy is ``policy``."""
    folder.mkdir()
    (file,) = [write_records(folder, trace, simulated(trace, "round_robin"))]
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    lines[1]["policy"] = policy
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return folder


REFERENCES = ["evil.py:score", "{folder}/evil.py:score", "pack.inner:score", "of_a_package"]


@pytest.mark.parametrize("policy", REFERENCES)
@pytest.mark.parametrize(
    "words", [("whatif",), ("report", "--slo", "ttft_p99=1ms"), ("advise", "--slo", "ttft_p99=1ms")]
)
def test_records_run_no_code(evil: Path, trace: Trace, policy: str, words: tuple[str, ...]) -> None:
    records = records_of(evil / "records", trace, policy.format(folder=evil))
    done = run(words[0], str(records), *words[1:])
    said = done.output + str(done.exception)
    assert RAN not in said
    assert "Python code" in said
    assert "--allow-code" in said


def test_a_flag_runs_the_code_of_records(evil: Path, trace: Trace) -> None:
    records = records_of(evil / "records", trace, "evil.py:score")
    done = run("whatif", str(records), "--allow-code", "--seeds", "1", "--max-batch-tokens", "4096")
    assert RAN in done.output
    assert "evil.py:score" in done.output


def test_records_of_expressions_and_names_need_no_flag(evil: Path, trace: Trace) -> None:
    for number, policy in enumerate(["lmetric", "p_token * bs", {"score": "bs", "filter": "bs < 9"}]):
        recording_of(read_records(records_of(evil / f"records{number}", trace, policy)).of(None))
        assert not is_code(policy)


def test_the_twin_runs_only_allowed_code(evil: Path, trace: Trace) -> None:
    records = records_of(evil / "records", trace, "evil.py:score")
    found = read_records(records).of(None)
    with pytest.raises(WhatIfError, match="Python code"):
        recording_of(found, code=["other.py:score"])
    assert recording_of(found, code=["evil.py:score"]).policy.policy == "evil.py:score"
    slo = "ttft_p99=2s"
    watch = Watch(
        [records], 86_400.0, 60.0, lambda: Twin(Question(Goal.of(slo)), Limits(), 86_400.0), slo=slo
    )
    watch.round(max(float(line["at"]) for line in found.requests) + 1.0)
    assert "Python code" in watch.state()["models"]["m"]["refused"]


STUDY = "traces: {{path: slice, requests: 20}}\npolicies: {policies}\ninstances: 2\n{more}"


@pytest.mark.parametrize(
    ("policies", "more"),
    [
        ("evil.py:score", ""),
        ("[lmetric, {policy: pack.inner:score}]", ""),
        ("of_a_package", ""),
        ("lmetric", "max_load: {reference: evil.py:score}"),
        ("lmetric", "settings: {rebalance: {kind: star, forecast: evil.py:score}}"),
        ("lmetric", "roles: 1P1D\ndecode_policies: evil.py:score"),
    ],
)
def test_study_files_run_no_code(evil: Path, policies: str, more: str) -> None:
    file = evil / "study.yaml"
    file.write_text(STUDY.format(policies=policies, more=more))
    done = run("study", str(file), "--no-report")
    assert RAN not in done.output
    assert "is Python code" in str(done.exception)
    assert "--allow-code" in str(done.exception)


def test_policies_on_the_command_line_and_the_flag_run_code(evil: Path) -> None:
    file = evil / "study.yaml"
    file.write_text(STUDY.format(policies="evil.py:score", more=""))
    assert RAN in run("study", str(file), "--no-report", "--allow-code").output
    file.write_text(STUDY.format(policies="lmetric", more=""))
    assert RAN in run("study", str(file), "--no-report", "--policy", "evil.py:score").output


def test_stored_results_run_no_code(evil: Path) -> None:
    """A study that continues with another's results reads their policies and builds none."""
    file = evil / "study.yaml"
    file.write_text(STUDY.format(policies="lmetric", more=""))
    assert run("study", str(file), "--no-report").exit_code == 0
    stored = evil / "study-results" / "runs.jsonl"
    line = json.loads(stored.read_text().splitlines()[0])
    line["setup"]["policy"] = {"policy": "evil.py:score", "knobs": {}, "label": "evil.py:score"}
    stored.write_text(json.dumps(line) + os.linesep)
    done = run("study", str(file), "--no-report")
    assert done.exit_code == 0
    assert RAN not in done.output


# -- whatif


def changed(folder: Path, trace: Trace, line: str, **values: Any) -> Path:
    """Records with other values in the fleet's line, in the first engine, or in a request."""
    (file,) = [write_records(folder, trace, simulated(trace, "round_robin"))]
    lines = [orjson.loads(text) for text in file.read_bytes().splitlines()]
    where = {"header": lines[0], "fleet": lines[1], "engine": lines[1]["engines"][0], "request": lines[50]}[
        line
    ]
    where |= values
    file.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in lines))
    return folder


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("request", {"at": 1e300}),
        ("request", {"at": -1.0}),
        ("request", {"prompt_tokens": -5}),
        ("request", {"prompt_tokens": 2**63}),
        ("request", {"output_tokens": 2**40}),
        ("request", {"cached_tokens": -1}),
        ("request", {"hash_block": 2**40}),
        ("request", {"hash_block": 0}),
        ("request", {"ttft_seconds": -1.0}),
        ("request", {"e2e_seconds": 1e300}),
        ("request", {"load": {"queued_prefill_tokens": "many"}}),
        ("request", {"terms": {"bs": [1]}}),
        ("request", {"tried": [1]}),
        ("request", {"status": 2**70}),
        ("fleet", {"knobs": {"bs_offset": "text"}}),
        ("fleet", {"block_tokens": 2**40}),
        ("fleet", {"at": 1e300}),
        ("engine", {"block_tokens": 2**40}),
        ("engine", {"cache_blocks": 2**63}),
        ("engine", {"cache_blocks": -1}),
        ("header", {"sample": -1.0}),
        ("header", {"at": 1e300}),
    ],
)
def test_values_out_of_range_get_a_message(
    tmp_path: Path, trace: Trace, line: str, values: dict[str, Any]
) -> None:
    folder = changed(tmp_path, trace, line, **values)
    with pytest.raises(RecordError, match=f"has {next(iter(values))!r}.*; expected"):
        read_records(folder)


def test_a_load_without_a_key_is_no_traceback(tmp_path: Path, trace: Trace) -> None:
    folder = changed(tmp_path, trace, "request", load={"bs": 1}, ttft_seconds=9.0)
    done = run("report", str(folder), "--slo", "ttft_p99=1ms", "--no-simulate")
    assert done.exit_code == 0, done.output + str(done.exception)


def test_a_long_line_of_an_archive_is_read_in_bounds(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as out:
        for _ in range(64):
            out.write(b"x" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(RecordError, match="a line has more than 16,777,216 bytes"):
        read_records(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * (16 << 20)


def some_requests(count: int, blocks: int) -> Records:
    hashes = base64.b64encode(bytes(range(256)) * (blocks // 32)).decode()
    line = {"type": "request", "model": "m", "path": "/", "stream": True, "status": 200}
    line |= {"prompt_tokens": 1, "e2e_seconds": 1.0, "hash_unit": "tokens", "hash_block": 16}
    return Records([], [], [line | {"at": float(number), "hashes": hashes} for number in range(count)])


def test_hashes_of_parquet_are_read_in_bounds(tmp_path: Path) -> None:
    """Each hash was a Python integer, of up to 65,536 rows at once: five times the memory."""
    pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")
    records = some_requests(600, 3_200)
    write_parquet([(tmp_path, records)], file := tmp_path / "a.parquet")
    tracemalloc.start()
    read = read_records(file)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read.requests == records.requests
    assert peak < kept + (2 << 20)


@pytest.mark.parametrize(
    ("metadata", "columns", "message"),
    [
        ({"lmetric.headers": [1]}, {}, "expected an object, got int"),
        ({"lmetric.newest": [1.0]}, {}, "no valid Parquet file"),
        ({"lmetric.headers": 1}, {}, "no valid Parquet file"),
        ({"lmetric.fleets": ["a"]}, {}, "expected an object, got str"),
        ({"lmetric.fleets": [some_requests(1, 32).requests[0]]}, {}, "type 'request' is unknown"),
        ({}, {"terms": ([("bs", 1.0), ("bs", 2.0)], "map")}, "no valid Parquet file"),
        ({}, {"hashes": ([1, None], "hashes")}, "a row has the hash null"),
        ({}, {"hashes": ("text", None)}, "no valid Parquet file"),
        ({}, {"hashes": ([-1], None)}, "no valid Parquet file"),
        ({}, {"other": ("[1]", None)}, "no valid Parquet file"),
        ({}, {"other": ('{"type": "fleet"}', None)}, "row 1: the request has no 'at'"),
        ({}, {"shadow": (5, None)}, "no valid Parquet file"),
    ],
)
def test_hostile_parquet_gets_a_message(
    tmp_path: Path, metadata: dict[str, Any], columns: dict[str, Any], message: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")
    import pyarrow

    types = {
        "map": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
        "hashes": pyarrow.list_(pyarrow.uint64()),
        None: None,
    }
    table = pyarrow.table(
        {name: pyarrow.array([value], types[kind]) for name, (value, kind) in columns.items()} or {"a": [1]}
    )
    texts = {"lmetric.headers": [], "lmetric.fleets": [], "lmetric.newest": [], **metadata}
    texts = {name: orjson.dumps(value) for name, value in texts.items()}
    parquet.write_table(table.replace_schema_metadata(texts), file := tmp_path / "a.parquet")
    with pytest.raises(RecordError, match=message):
        read_records(file)


def test_a_column_that_is_there_twice_gets_a_message(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra: lmetric-router[parquet]")
    import pyarrow

    both = pyarrow.array([[1]], pyarrow.list_(pyarrow.uint64()))
    table = pyarrow.table([both, both], names=["hashes", "hashes"])
    texts = dict.fromkeys(("lmetric.headers", "lmetric.fleets", "lmetric.newest"), b"[]")
    parquet.write_table(table.replace_schema_metadata(texts), file := tmp_path / "a.parquet")
    with pytest.raises(RecordError, match="no valid Parquet file"):
        read_records(file)


# -- import-config

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


def texts_in_texts(depth: int) -> str:
    text = "model_list: []\nx: y"
    for _ in range(depth):
        text = json.dumps({"a": text + "\n"})
    return "a: " + text


@pytest.mark.parametrize(
    "text",
    [
        BOMB + "model_list: []",
        "model_list: &m [*m]",
        "model_list: " + "[" * 50_000,
        "router_settings: {num_retries: .inf}\nmodel_list: []",
        "router_settings: {timeout: 1e999}\nmodel_list: []",
        "router_settings: {timeout: .nan}\nmodel_list: []",
        "router_settings: [1]\nmodel_list: []",
        "kind: EndpointPickerConfig\nplugins: [{type: a}]\nschedulingProfiles: [1]",
        "kind: EndpointPickerConfig\nplugins: [{type: token-producer, parameters: [1]}]",
        "kind: EndpointPickerConfig\nplugins: 5",
        "routerSpec: [1]",
        "routerSpec: {replicaCount: [1], staticBackends: 5, routingLogic: x}",
        "routing_logic: [1]",
        "upstream a { server; }",
        "upstream { server 1; }",
        "upstream a { server x; }\nserver { location / { proxy_pass; } }",
        "upstream a { server x; }\nserver { listen; }",
        "upstream a { server x max_fails=" + "9" * 5_000 + "; }",
        "upstream a { server x fail_timeout=x; }",
        "upstream a { " + "b { " * 5_000,
        "x" * (1 << 20) + "y",
        "smg --worker-urls " + "http://a " * 2 + "--port x",
        "\xff",
    ],
    ids=range(23),
)
def test_hostile_configurations_get_a_message(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.conf"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"other\.conf"):
        import_config(file)


def test_nested_texts_are_read_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    documents = detect._documents
    monkeypatch.setattr(detect, "_documents", lambda text: read.append(len(text)) or documents(text))
    file = tmp_path / "other.yaml"
    file.write_text(texts_in_texts(12))
    with pytest.raises(ConfigError, match="no router's configuration"):
        import_config(file)
    assert len(read) <= 1 + detect.MAX_TEXTS
    read.clear()
    file.write_text("a: &t |\n  x: y\n  z: 1\nb: [" + "*t, " * 1_000 + "*t]\n")
    with pytest.raises(ConfigError, match="no router's configuration"):
        import_config(file)
    assert len(read) == 2, "a repeated text is read once"


def test_engines_are_compared_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 URLs took more than 40 s: each was compared with all others."""
    urls = [f"http://10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000" for n in range(20_000)]
    file = tmp_path / "run.sh"
    file.write_text("python -m sglang_router.launch_router --worker-urls " + " ".join(urls + urls[:100]))
    compared: list[None] = []

    class Compared(dict[str, Any]):
        def __eq__(self, other: object) -> bool:
            compared.append(None)
            return super().__eq__(other)

        __hash__ = None  # type: ignore[assignment]

    entry = Draft.engine
    monkeypatch.setattr(Draft, "engine", lambda *a, **more: Compared(entry(*a, **more) or {}))
    draft = import_config(file)
    assert len(draft.settings["engines"]) == 20_000
    assert len(compared) < 1_000


def test_escapes_of_a_file_are_shown_and_not_sent(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model_list:\n- model_name: m\n  litellm_params: {model: openai/m, api_base: 'http://h:1'}\n"
        '"\\e[31mred\\u202e": 1\nrouter_settings: {"\\e]0;title\\a": "\\e[2J"}\n'
    )
    text = import_config(file).render()
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b[31mred" in text
