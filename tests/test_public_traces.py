"""Public traces by name: download, checksum, and the message without a network."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from lmetric.cli.app import build
from lmetric.config import load_config
from lmetric_lab import public_traces
from lmetric_lab.defaults import SLICE, trace_path
from lmetric_lab.demo import named_trace
from lmetric_lab.public_traces import PUBLIC_TRACES, available
from lmetric_lab.sim.setups import TraceChoice
from lmetric_lab.sim.study_file import load_study
from lmetric_lab.sim.traces import TraceError, load_trace
from train_lengths.from_trace import load_trace as load_for_lengths

NAME = "mooncake-conversation"
CONTENT = gzip.decompress(SLICE.read_bytes())


class Files(BaseHTTPRequestHandler):
    """Serves the slice, or a truncated file at /short."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)  # type: ignore[attr-defined]
        body = CONTENT[:1000] if self.path == "/short" else CONTENT
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.paths = []  # type: ignore[attr-defined]
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def publish(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Publishes the slice at `url` under the name of a public trace."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    trace = replace(PUBLIC_TRACES[NAME], url=url, size_bytes=len(CONTENT), sha256=digest)
    monkeypatch.setitem(PUBLIC_TRACES, NAME, trace)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMETRIC_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def test_a_trace_is_downloaded_once(
    server: ThreadingHTTPServer, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(monkeypatch, f"http://127.0.0.1:{server.server_port}/trace")
    words = ["simulate", "--trace", NAME, "--requests", "20", "--json", "-"]
    done = CliRunner().invoke(build(["simulate"]), words)
    assert done.exit_code == 0, done.exception
    assert f"downloading {NAME}" in done.stderr
    assert [path.name for path in cache.iterdir()] == [f"{NAME}.jsonl"]
    assert (cache / f"{NAME}.jsonl").read_bytes() == CONTENT
    study = tmp_path / "study.yaml"
    study.write_text(f"traces: [{NAME}]\npolicies: [vllm]\n")
    (setup,) = load_study(study).setups
    assert setup.trace.label == NAME
    assert len(setup.trace.load()) == len(load_trace(NAME)) == len(named_trace(NAME)) == 1000
    assert setup.trace.digest() == hashlib.sha256(CONTENT).hexdigest()
    assert server.paths == ["/trace"]  # type: ignore[attr-defined]


def test_a_wrong_file_is_refused(
    server: ThreadingHTTPServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, f"http://127.0.0.1:{server.server_port}/short")
    with pytest.raises(TraceError, match="returned a file with the sha256"):
        load_trace(NAME)
    assert list(cache.iterdir()) == []
    # A file from elsewhere is checked, too, compressed or not.
    with gzip.open(cache / f"{NAME}.jsonl.gz", "wb") as file:
        file.write(CONTENT)
    assert len(load_trace(NAME)) == 1000
    (cache / f"{NAME}.jsonl.gz").unlink()
    (cache / f"{NAME}.jsonl").write_bytes(CONTENT[:-1])
    with pytest.raises(TraceError, match=r"has the sha256 \w+; delete the file"):
        load_trace(NAME)


def test_without_a_network_the_message_has_all_facts(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "http://127.0.0.1:9/conversation_trace.jsonl")  # no server
    with pytest.raises(TraceError) as refused:
        load_trace(NAME)
    message = str(refused.value)
    assert "cannot be downloaded: Connection refused" in message
    for line in PUBLIC_TRACES[NAME].facts().splitlines():
        assert line in message.splitlines()
    assert message.endswith(f"put it at {cache / NAME}.jsonl")
    shown = CliRunner().invoke(build(["trace"]), ["trace", "list"])
    for trace in PUBLIC_TRACES.values():
        assert all(f"    {line}\n" in shown.stdout for line in trace.facts().splitlines())


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMETRIC_TRACE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert public_traces.folder() == tmp_path / "lmetric-router" / "traces"
    assert trace_path(NAME, Path("studies")) == tmp_path / "lmetric-router" / "traces" / f"{NAME}.jsonl"
    # The variable is no setting of the server.
    assert load_config(environ={"LMETRIC_TRACE_DIR": "/x"}).port == load_config(environ={}).port
    other = tmp_path / f"{NAME}.jsonl"
    assert available(other) == other  # a file of this name elsewhere


def test_slice_is_a_trace_everywhere(tmp_path: Path) -> None:
    """UX C4: the trace in the package had no name."""
    study = tmp_path / "study.yaml"
    study.write_text("traces: [slice]\npolicies: [vllm]\n")
    (setup,) = load_study(study).setups
    (given,) = load_study(study, [Path("slice")]).setups
    assert setup.trace.path == given.trace.path == str(SLICE)
    for trace in (
        load_trace("slice"),
        named_trace("slice"),
        load_for_lengths(Path("slice")),
        setup.trace.load(),
    ):
        assert len(trace) == 1000
    assert TraceChoice("slice", "slice").load().input_tokens[0] == 6758
    for words in (["trace", "show", "slice"], ["simulate", "--trace", "slice", "--requests", "5"]):
        assert CliRunner().invoke(build([words[0]]), words).exit_code == 0
