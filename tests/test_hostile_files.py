"""Data files from others: they run no code, and bad ones get a message within bounds.

Security F6 (records, studies and stored results ran code that they named) and the rows `whatif`
and `import-config` of security L.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from lmetric import plugins
from lmetric.capacity.worker import Worker
from lmetric.cli.app import build
from lmetric.policies import is_code
from lmetric.record_files import read_records
from lmetric.sim.traces import Trace
from lmetric.whatif import WhatIfError, recording_of
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
    plugins._points.cache_clear()
    return folder


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(requests=200)


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


def test_the_twin_runs_only_code_of_the_routers_configuration(evil: Path, trace: Trace) -> None:
    records = records_of(evil / "records", trace, "evil.py:score")
    found = read_records(records).of(None)
    with pytest.raises(WhatIfError, match="Python code"):
        recording_of(found, code=["other.py:score"])
    assert recording_of(found, code=["evil.py:score"]).policy.policy == "evil.py:score"
    settings = {
        "slo": "ttft_p99=2s", "policies": [], "prices": {}, "types": {}, "startup": 1.0, "interval": 10.0,
        "headroom": 0.1, "min_engines": 1, "max_engines": 4, "roles": [], "transfer": None, "max_error": None,
        "path": str(records), "window": 86_400.0, "max_batch_tokens": None, "max_sequences": None,
        "cache_blocks": None, "kv_bytes_per_token": None,
    }  # fmt: skip
    now = max(float(line["at"]) for line in found.requests) + 1.0
    answer = Worker(settings).round({"now": now, "running": {"m": 0}, "code": []})
    assert "Python code" in answer["models"]["m"]["refused"]


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
