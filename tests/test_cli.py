"""The command line as a user meets it: exit codes, one-line errors, data on stdout, Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml

from cli_world import COMMAND, call, process
from lmetric.cli.app import COMMANDS

NAMES = list(COMMANDS)


def test_help_lists_every_command_quickly() -> None:
    done = process("--help")
    assert done.returncode == 0
    for name in NAMES:
        assert f"\n  {name} " in done.stdout
    # A start must not import slow modules.
    loaded = "import sys; sys.argv[1:] = []; import lmetric.cli.app as a; a.build([]); print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "aiohttp", "yaml", "tokenizers", "lmetric._core"} & set(modules)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself_and_its_options(name: str) -> None:
    done = call(name, "--help", COLUMNS="200")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    options = [index for index, line in enumerate(lines) if line.startswith("  -")]
    assert options
    for index in options:
        # A long option has its help on the line below.
        explained = len(lines[index].split("  ")) > 2 or lines[index + 1].startswith(" " * 10)
        assert explained, f"no help: {lines[index]}"


@pytest.mark.parametrize("words", [["nope"], ["policies", "linear"]], ids=" ".join)
def test_a_process_says_what_a_call_says(words: list[str]) -> None:
    """The other tests here call the command line in their own process."""
    own, here = process(*words), call(*words)
    assert (own.returncode, own.stdout, own.stderr) == (here.returncode, here.stdout, here.stderr)


def test_version() -> None:
    assert call("--version").stdout.startswith("lmetric-router 0.")


@pytest.mark.parametrize(
    ("shell", "begin"), [("zsh", "#compdef lmetric-router"), ("bash", "_lmetric_router_completion()")]
)
def test_the_named_shell_gets_its_completion(shell: str, begin: str) -> None:
    """ux.md 3, smaller: `--show-completion zsh` printed the script of the running shell."""
    done = call("--show-completion", shell)
    assert (done.returncode, done.stdout.startswith(begin)) == (0, True)


REPLAY_NONE = ["replay", "--trace", "none.jsonl", "--target", "http://127.0.0.1:1"]
WRONG = [
    (["nope"], 2, "'nope' is not a command"),
    (["replay"], 2, "--target: missing"),
    (
        ["replay", "--trace", "none.jsonl", "--target", "http://127.0.0.1:1"],
        2,
        "none.jsonl: No such file or directory",
    ),
    (
        ["replay", "--trace", "none.jsonl", "--target", "http://x", "--speed", "0"],
        2,
        "--speed: 0 is not above 0",
    ),
    (["config", "--config", "none.yaml"], 2, "none.yaml: cannot be read: No such file or directory"),
    (["config", "--set", "timeouts.conect=3"], 2, "did you mean 'connect'"),
    (["config", "--knob", "x"], 2, "--knob: expected NAME=VALUE, got 'x'"),
    (["bench", "--policy", "lmetrik", "--instances", "4", "--prompt-tokens", "1000"], 2, "lmetric"),
    (["engine", "--port", "99999"], 2, "--port"),
    (["demo", "--clock-speed", "-1"], 2, "--clock-speed: -1 is not above 0"),
    (["demo", "--priority", "fastest"], 2, "none, uniboost, vtc"),
    (["demo", "--trace", "{synthetic: nothing}"], 2, "requests, sessions or agents"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    WRONG,
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_is_said_without_a_traceback(arguments: list[str], code: int, message: str) -> None:
    done = call(*arguments)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


UNUSABLE = [
    (["--policy", "lmetrik"], "did you mean the policy 'lmetric'?"),
    (["--policy", "p_tokne * (bs+1)"], "did you mean `p_token`?"),
    (["--policy", "p_token * (bs+1"], "this bracket is never closed"),
    (["--experimental", "--policy", "linear", "--knob", "lamda=1"], 'did you mean "lam"?'),
    (["--policy", "lmetric", "--knob", "lam=1"], 'policy lmetric "lam"'),
    (["--decode-policy", "least_request"], "did you mean the policy 'least_requests'?"),
    (
        ["--programs", "auto", "--set", "programs.thet=2"],
        "programs.thet = '2': unknown setting; did you mean 'theta'?",
    ),
    (["--profile", "h100"], "profile 'h100'"),
    (["--api-keys", "none.yaml"], "none.yaml: cannot be read"),
]


@pytest.mark.parametrize(("flags", "message"), UNUSABLE, ids=str)
def test_config_refuses_what_serve_refuses(flags: list[str], message: str) -> None:
    """UX C1: `config` printed YAML and exited 0 for a policy or parameter that `serve` refuses."""
    done = call("config", *flags)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_config_says_what_serve_says() -> None:
    """UX C1: the same message, whichever command finds the mistake."""
    flags = ["--engine", "http://127.0.0.1:1", "--port", "0", "--experimental"]
    flags += ["--policy", "linear", "--knob", "lamda=1"]
    said = {(done.returncode, done.stderr) for done in (call("config", *flags), call("serve", *flags))}
    assert len(said) == 1


def test_config_refuses_a_wrong_policy_of_one_model(tmp_path: Path) -> None:
    """UX C1: a model's own policy is checked, too; a good configuration still prints YAML alone."""
    file = tmp_path / "router.yaml"
    engines = "[{url: 'http://127.0.0.1:1'}]"
    file.write_text(f"models: [{{name: a, policy: lmetrik, engines: {engines}}}]")
    done = call("config", "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    file.write_text(f"models: [{{name: a, policy: 'p_token * (bs + 1)', engines: {engines}}}]")
    done = call("config", "--config", str(file), "--set", "tokenizer=off")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["models"][0]["policy"] == "p_token * (bs + 1)"


def test_a_half_written_trace_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n{"timesta')
    done = process("replay", "--trace", str(path), "--target", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith(f"lmetric-router: {path}, line 2: not JSON")
    assert len(done.stderr.splitlines()) == 1
    skipped = call("replay", "--trace", str(path), "--target", "http://127.0.0.1:1", "--skip-bad-lines")
    assert f"skipped {path}, line 2" in skipped.stderr
    assert "cannot reach http://127.0.0.1:1" in skipped.stderr
    assert skipped.returncode == 1


def test_a_trace_is_made_shown_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.gz"
    lengths = "input_tokens: 300, output_tokens: 100, turns: 2"
    text = f"{{synthetic: sessions, rate: 1, duration_seconds: 30, {lengths}}}"
    assert call("trace", "make", text, "--out", str(path), "--seed", "7").returncode == 0
    first = path.read_bytes()
    (tmp_path / "d.yaml").write_text(text.replace("rate: 1", "rate: 1, seed: 7"))
    assert call("trace", "make", str(tmp_path / "d.yaml"), "--out", str(path)).returncode == 0
    assert path.read_bytes() == first
    shown = json.loads(call("trace", "show", str(path), "--json").stdout)
    assert shown["requests"] == 2 * shown["sessions"] == 2 * shown["waiting_requests"]
    assert shown["input_tokens"]["max"] == 700
    assert f"{shown['requests']} requests in" in call("trace", "show", str(path)).stdout
    open_loop = call("trace", "show", str(path), "--no-closed-loop", "--json")
    assert json.loads(open_loop.stdout)["waiting_requests"] == 0
    from_description = call("trace", "show", str(tmp_path / "d.yaml"), "--json")
    assert json.loads(from_description.stdout)["requests"] == shown["requests"]
    (tmp_path / "d.jsonl").write_text(text)
    (tmp_path / "wrong.yaml").write_text("{synthetic: session}")
    for arguments, code, message in (
        (["make", "{synthetic: sessions", "--out", "x"], 2, "not YAML"),
        (["make", "{synthetic: session}", "--out", "x"], 2, "synthetic: requests, sessions or agents"),
        (["make", str(tmp_path / "none.yaml"), "--out", "x"], 2, "No such file"),
        (["show", str(tmp_path / "d.jsonl")], 1, "is no request; known formats"),
        (["show", str(tmp_path / "wrong.yaml")], 2, "synthetic: requests, sessions or agents"),
        (["show", str(path), "--format", "mooncak"], 1, "did you mean 'mooncake'?"),
        (["show", str(path), "--block-tokens", "8"], 1, "line 1: block_tokens is 16, read with blocks of 8"),
    ):
        done = call("trace", *arguments)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_tables_and_json_of_policies_and_indicators() -> None:
    names = {row["name"] for row in json.loads(call("policies", "--json").stdout)}
    assert {"lmetric", "round_robin", "vllm"} <= names
    table = call("policies").stdout
    assert all(name in table for name in names)
    rows = json.loads(call("indicators", "--json").stdout)
    assert {"bs", "p_token", "kv_hit"} <= {row["name"] for row in rows}
    assert "p_token" in call("indicators").stdout


def test_piped_policies_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """UX C3: piped, the list was a table 530 columns wide, mostly blanks."""
    monkeypatch.delenv("COLUMNS", raising=False)
    rows = json.loads(call("policies", "--json").stdout)
    lines = process("policies").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line.split()[:2] for line in lines if not line.startswith(" ")]
    assert heads == [[row["name"], row["maturity"]] for row in rows]
    wide = call("policies", COLUMNS="400").stdout.splitlines()
    assert len(wide) == len(rows)
    assert all(line == line.rstrip() for line in wide + lines)
    assert "".join("".join(wide).split()) == "".join("".join(lines).split())


def test_one_policy_is_shown_with_its_parameters() -> None:
    """UX C3: there was no `policies NAME`."""
    shown = call("policies", "linear", COLUMNS="80").stdout
    assert "lam * (1 - kv_hit) + (1 - lam) * bs / max(bs), lowest" in shown
    assert "maturity    experimental" in shown
    assert "parameter   lam = 0.7 (0 to 1): weight of misses" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert json.loads(call("policies", "linear", "--json").stdout)["name"] == "linear"
    wrong = call("policies", "liner")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "'liner' is not a policy; did you mean 'linear'?" in wrong.stderr


def test_profiles_are_listed_and_one_is_shown() -> None:
    listed = call("profiles")
    assert listed.returncode == 0
    assert re.search(r"(?m)^llama-3.1-70b-2xh200 +397,488 ", listed.stdout)
    shown = yaml.safe_load(call("profiles", "llama-3.1-70b-2xh200").stdout)
    assert shown["cache_blocks"] * shown["block_tokens"] == 397_488
    wrong = call("profiles", "lama-3.1-8b-h100")
    assert wrong.returncode == 2
    assert "did you mean 'llama-3.1-8b-h100'?" in wrong.stderr


def test_bench_prints_each_stage() -> None:
    cell = ["--policy", "lmetric", "--instances", "4", "--prompt-tokens", "1000", "--iterations", "20"]
    done = call("bench", *cell, "--stored-pairs", "1000", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [row["stage"] for row in answer["results"]] == ["hash", "match", "score", "commit", "total"]
    for row in answer["results"]:
        assert row["policy"] == "lmetric"
        assert (row["instances"], row["prompt_tokens"]) == (4, 1000)
        assert 0 <= row["p50_us"] <= row["p99_us"]
    assert answer["machine"]["cores"] >= 1
    assert "total" in call("bench", *cell, "--stored-pairs", "1000").stdout


class Slow(BaseHTTPRequestHandler):
    """One model; answers completions with one token, then nothing for a long time."""

    protocol_version = "HTTP/1.0"
    asked = Event()

    def do_GET(self) -> None:
        self.answer("application/json", b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer("text/event-stream", b'data: {"choices": [{"text": " a", "finish_reason": null}]}\n\n')
        self.asked.set()
        time.sleep(20)

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def slow_server() -> Iterator[str]:
    Slow.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_ctrl_c_prints_what_there_is(tmp_path: Path, slow_server: str) -> None:
    path = tmp_path / "t.jsonl"
    row = '{{"timestamp": {}, "input_length": 5, "output_length": 2, "hash_ids": [1]}}\n'
    path.write_text("".join(row.format(1 + 100 * k) for k in range(1000)))
    replay = subprocess.Popen(
        [*COMMAND, "replay", "--trace", str(path), "--target", slow_server, "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert Slow.asked.wait(30)
    replay.send_signal(signal.SIGINT)
    out, err = replay.communicate(timeout=30)
    assert replay.returncode == 130, err
    assert "Traceback" not in err
    report = json.loads(out)["report"]
    assert report["interrupted"] is True
    assert report["requests"] == report["unfinished"] > 0


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{' '.join(COMMAND)} policies --json | true", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
