"""The commands that documents show: they run in a temporary folder, in the order of their page.

`lmetric-router serve` and `engine` stay in the background until the page ends. Ports are replaced
by free ones, and engines at addresses such as 10.0.0.1:8000 by emulated engines on this machine.
A client of an address without a server gets a server there. tests/docs_commands.yaml lists the
pages that run in the gate, and the commands that run nightly or never, with the reason. Commands
that never run are checked for syntax and flags. It also names the pages whose shown outputs are
compared: numbers and IDs may differ.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_world import call
from lmetric_lab.ports import free_ports
from test_docs import DOCUMENTS, NAMES, ROOT, blocks, commands, steps

TREATMENT: dict[str, Any] = yaml.safe_load((ROOT / "tests" / "docs_commands.yaml").read_text())
SHOWN = {name: list(commands(path)) for name, path in zip(NAMES, DOCUMENTS, strict=True)}
STEPS = {name: list(steps(path)) for name, path in zip(NAMES, DOCUMENTS, strict=True)}
PAGES = [name for name, lines in SHOWN.items() if lines]
LINKED = ("bench", "deploy", "docs", "examples", "python", "scripts", "tests")
SERVER_SECONDS, COMMAND_SECONDS, OUTPUT_SECONDS = 60, 900, 60
VARIES = r"(?:\b(?:\d+-)?[0-9a-f]{16}\b|[+-]?\d[\d,.]*)"  # decision IDs, tokens and numbers
ADDRESS = re.compile(r"\b(127\.0\.0\.1|localhost|10(?:\.\d{1,3}){3}|[ab])(:)(\d{4,5})\b")
GATE = TREATMENT["gate"]
READS = ("curl -s http", "lmetric-router canary status")  # commands that change nothing
PORT_TAKEN = re.compile(r"Address already in use|port \d+ on \S+ is in use")
PORT_TRIALS = 3
OTHER_PORTS = re.compile(r"(--port[ =]|tcp://\*:|\bport: )(\d{4,5})\b")


def normal(line: str) -> str:
    return " ".join(line.split())


def missing(shown: list[str], output: str) -> list[str]:
    """The shown lines from the first line that the output lacks.

    Numbers, decision IDs and the lengths of rules may differ. `...` ends a shortened line, or
    stands for any lines.
    """
    lines = iter(output.splitlines())
    for index, line in enumerate(shown):
        if line.strip() == "...":
            continue
        start, more = re.subn(r"\s*\.\.\.$", "", plain(line))
        pattern = re.compile(VARIES.join(re.escape(part) for part in re.split(VARIES, start)))
        match = pattern.match if more else pattern.fullmatch
        if not any(match(plain(each)) for each in lines):
            return shown[index:]
    return []


def plain(line: str) -> str:
    return re.sub("─+", "─", normal(line))


def treatment(page: str, line: str) -> dict[str, Any]:
    """The entry of a command: of its page, else of its program, else none."""
    for start, entry in TREATMENT["pages"].get(page, {}).get("commands", {}).items():
        if normal(line).startswith(start):
            return dict(entry)
    for start, entry in TREATMENT["programs"].items():
        if normal(line).startswith(start):
            return dict(entry)
    return {}


def when(page: str, line: str) -> str:
    """When a command runs: gate, nightly or never."""
    return str(treatment(page, line).get("when", "gate" if page in GATE else "nightly"))


class PortTaken(AssertionError):
    """Another process took a port before the page's server bound it."""


class Page:
    """A folder, its servers, and the shell variables of the commands of one page."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.ports: dict[str, int] = {}
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        tools = folder / "tools"
        tools.mkdir()
        for tool, line in (
            ("lmetric-router", f'{shlex.quote(sys.executable)} -m lmetric.cli "$@"'),
            ("python", f'{shlex.quote(sys.executable)} "$@"'),
            ("curl", f'{shutil.which("curl")} --silent --show-error --fail-with-body --max-time 60 "$@"'),
        ):
            (tools / tool).write_text(f"#!/bin/sh\nexec {line}\n")
            (tools / tool).chmod(0o755)
        (folder / "home").mkdir()
        self.work = folder / "work"
        self.work.mkdir()
        for each in LINKED:
            (self.work / each).symlink_to(ROOT / each)
        for file, content in files_of(name).items():
            (self.work / file).write_text(self.local(content))
        self.env = {
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'bench'}",
            "HOME": str(folder / "home"),
            "COLUMNS": "120",
        }

    def port(self, key: str) -> int:
        if key not in self.ports:
            (self.ports[key],) = free_ports(1)
        return self.ports[key]

    def local(self, text: str) -> str:
        """The text with free ports, and with addresses of this machine."""

        def address(found: re.Match[str]) -> str:
            here = found[1] in ("127.0.0.1", "localhost")
            return f"127.0.0.1:{self.port(found[3] if here else found[0])}"

        def port(found: re.Match[str]) -> str:
            return f"{found[1]}{self.port(found[2])}"

        return OTHER_PORTS.sub(port, ADDRESS.sub(address, text))

    def start(self, line: str, port: int) -> None:
        """Starts a server and waits until it answers."""
        self.stop(port)
        log = self.folder / f"server-{port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.work,
                env=self.env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.servers[port] = process
        deadline = time.monotonic() + SERVER_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass
            if process.poll() is not None:
                told = log.read_text()
                raise (PortTaken if PORT_TAKEN.search(told) else AssertionError)(
                    f"{self.name}: {line}\n{told}"
                )
            assert time.monotonic() < deadline, f"{self.name}: no answer: {line}\n{log.read_text()}"
            time.sleep(0.1)

    def stop(self, port: int) -> None:
        process = self.servers.pop(port, None)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def emulated(self, port: int) -> None:
        events, replay = self.port(f"events {port}"), self.port(f"replay {port}")
        flags = f"--kv-events-endpoint 'tcp://*:{events}' --kv-events-replay-endpoint 'tcp://*:{replay}'"
        if TREATMENT["pages"].get(self.name, {}).get("engines") == "stock":
            flags = "--no-cached-tokens"
        self.start(f"lmetric-router engine --port {port} {flags} --clock-speed 20", port)

    def run(self, line: str, expected: int, shown: list[str] | None = None) -> None:
        """Runs a command. Starts what it needs first.

        ``shown``: lines of the output. A server, or a command that only reads, has some time to
        print them: engines are identified and requests end soon, but not at once.
        """
        if line.startswith(("lmetric-router canary", "lmetric-router top")) and "http" not in line:
            line += " http://127.0.0.1:8080"  # its default, which becomes a free port
        serves = re.match(r"lmetric-router (serve|engine)\b", line)
        text = line
        if serves:
            config = re.search(r"--config (\S+)", line)
            own = "port:" in (self.work / config[1]).read_text() if config else False
            if "--port" not in line and not own:
                text += " --port 1000000"
                self.ports.pop("1000000", None)
        # Engines that the command names but the page does not start.
        files = "".join(content for file, content in files_of(self.name).items() if file in line)
        for found in ADDRESS.finditer(f"{line}\n{files}"):
            here = found[1] in ("127.0.0.1", "localhost")
            port = self.port(found[3] if here else found[0])
            if port in self.servers or line.startswith("lmetric-router import-config"):
                continue
            if not here or serves or "doctor" in line or "calibrate" in line:
                self.emulated(port)
            else:
                self.start(f"lmetric-router serve --embedded 2 --port {port}", port)
        text = re.sub(r"--port 1000000\b", lambda _: f"--port {self.port('1000000')}", self.local(text))
        if serves:
            flag = re.search(r"--port[ =](\d+)", text)
            if flag is None:
                assert config is not None
                flag = re.search(r"\bport: (\d+)", (self.work / config[1]).read_text())
            assert flag is not None, line
            self.start(text, int(flag[1]))
            log = self.folder / f"server-{flag[1]}.log"
            self.wait(line, shown or [], log.read_text)
            if "--port" not in line and not own:  # no later command knows this port
                self.stop(int(flag[1]))
            return
        reads = bool(shown) and text.startswith(READS)

        def output() -> str:
            return self.shell(text, expected)

        first = output()
        self.wait(line, shown or [], output if reads else lambda: first, OUTPUT_SECONDS if reads else 0)

    def wait(
        self, line: str, shown: list[str], output: Callable[[], str], seconds: float = OUTPUT_SECONDS
    ) -> None:
        """Waits until the output has the shown lines."""
        deadline = time.monotonic() + seconds
        while lacks := missing(shown, seen := output()):
            assert time.monotonic() < deadline, (
                f"{self.name}: {line}\nlacks:\n" + "\n".join(lacks) + (f"\nin:\n{seen[-5000:]}")
            )
            time.sleep(0.5)

    def shell(self, text: str, expected: int) -> str:
        """Runs a command in the page's shell, and returns its output."""
        state = self.folder / "variables"
        state.touch()
        keep = f"declare -px | grep -v ' PATH=' >{state}"
        script = f"set -a -o pipefail; . {state}; {text}\ncode=$?; {keep}; exit $code"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.work,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        shown = f"{self.name}: {text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == expected, f"exit {done.returncode}, expected {expected}: {shown}"
        return f"{done.stdout}\n{done.stderr}"

    def close(self) -> None:
        for port in list(self.servers):
            self.stop(port)


def files_of(page: str) -> dict[str, str]:
    """The files that a page assumes: texts of docs_commands.yaml, or blocks of the page."""
    made = {}
    for file, content in TREATMENT["pages"].get(page, {}).get("files", {}).items():
        shown = (
            content if isinstance(content, str) else blocks(ROOT / page, content["block"])[content["number"]]
        )
        made[file] = shown
    return made


def played(name: str, folder: Path, whens: tuple[str, ...]) -> None:
    """Runs the commands of a page, again with other ports if another process took one."""
    for trial in range(PORT_TRIALS):
        (here := folder / str(trial)).mkdir()
        try:
            played_once(name, here, whens)
        except PortTaken:
            if trial == PORT_TRIALS - 1:
                raise
        else:
            return


def played_once(name: str, folder: Path, whens: tuple[str, ...]) -> None:
    page = Page(name, folder)
    runs: Counter[str] = Counter()
    try:
        compared = TREATMENT["pages"].get(name, {}).get("outputs", False)
        for line, shown in STEPS[name]:
            entry = treatment(name, line)
            expected, text = entry.get("exit", 0), normal(line.partition(" #")[0])
            if isinstance(expected, list):  # one exit code for each time that the page shows it
                expected = expected[runs[text]]
            runs[text] += 1
            if when(name, line) in whens:
                page.run(text, expected, shown if compared else None)
    finally:
        page.close()


def has(name: str, time: str) -> bool:
    return any(when(name, line) == time for line in SHOWN[name])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", GATE)
def test_shown_commands_run(name: str, tmp_path: Path) -> None:
    played(name, tmp_path, ("gate",))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [page for page in PAGES if has(page, "nightly")])
def test_long_commands_run(name: str, tmp_path: Path) -> None:
    played(name, tmp_path, ("gate", "nightly"))


def test_outputs_are_compared_by_line_and_order() -> None:
    output = "URL      http://127.0.0.1:8123\nmean TTFT  -12.5 ms\ndecision 1-4aa9f99738651b32\nend: a, b"
    assert not missing(["URL http://127.0.0.1:8080", "...", "mean TTFT +3 ms", "end: a ..."], output)
    assert not missing(["decision 7-4adbd429212f2edb"], output)
    assert missing(["end: a, c"], output) == ["end: a, c"]
    assert missing(["mean TTFT 3 ms", "URL http://127.0.0.1:8080"], output) == ["URL http://127.0.0.1:8080"]


def figures(line: str) -> list[str]:
    """The decimals of a line, without spreads over seeds."""
    return re.findall(r"\d+\.\d+", re.sub(r"±[\d.]+", "", line))


@pytest.mark.parametrize("name", ["docs/how-to/deploying.md", "docs/tutorials/your_own_policy.md"])
def test_shown_simulations_have_the_present_figures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulations are deterministic, so each shown line has exactly the figures of the output."""
    page, checked = Page(name, tmp_path), 0
    monkeypatch.chdir(page.work)
    for line, shown in STEPS[name]:
        rows = [each for each in map(figures, shown) if each]
        if line.startswith("lmetric-router simulate") and rows:
            done = call(*shlex.split(line)[1:], COLUMNS="200")
            assert done.returncode == 0, f"{line}: {done.stderr}"
            output = [figures(each) for each in f"{done.stdout}\n{done.stderr}".splitlines()]
            for row in rows:
                assert row in output, f"{line}: {row}"
            checked += len(rows)
    assert checked


def test_every_kind_of_block_is_known() -> None:
    for name, path in zip(NAMES, DOCUMENTS, strict=True):
        kinds = set(re.findall(r"^ *```(\w*)\n.*?^ *```", path.read_text(), re.MULTILINE | re.DOTALL))
        assert kinds <= TREATMENT["blocks"].keys(), name


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [n for n, path in zip(NAMES, DOCUMENTS, strict=True) if blocks(path, "python")]
)
def test_shown_python_runs(name: str, tmp_path: Path) -> None:
    if name in TREATMENT["python"]:
        pytest.skip(TREATMENT["python"][name])
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    for block in blocks(ROOT / name, "python"):
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name}:\n{block}\n{done.stderr[-3000:]}"


# Commands that do not run here


def excluded() -> Iterator[tuple[str, str]]:
    """Commands that never run, and blocks that start vLLM or SGLang."""
    for page, lines in SHOWN.items():
        yield from ((page, normal(line)) for line in lines if treatment(page, line).get("when") == "never")
    for name, path in zip(NAMES, DOCUMENTS, strict=True):
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL
        ):
            text = normal(block.replace("\\\n", " "))
            if not language and re.match(r"(\w+=\S+ )*(vllm serve|python -m (vllm|sglang))\b", text):
                yield name, text


def bare(line: str) -> str:
    """The command without the variables before it."""
    return re.sub(r"^(?:[A-Z_0-9]+=\S* )+", "", line)


def flags(line: str) -> list[str]:
    return [word.partition("=")[0] for word in shlex.split(line) if re.match(r"-{1,2}[a-zA-Z]", word)]


def test_commands_for_clusters_containers_and_gpus_have_known_flags() -> None:
    checked = 0
    for page, line in excluded():
        syntax = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
        assert syntax.returncode == 0, f"{page}: {line}: {syntax.stderr}"
        command = bare(line).partition(" -- ")[0]  # behind it stands a command of the container
        if not re.match(r"(docker|kubectl|vllm|python -m (vllm|sglang))(?![\w-])", command):
            continue
        known = [entry for start, entry in TREATMENT["flags"].items() if command.startswith(f"{start} ")]
        assert known, f"{page}: {line}: no list of flags for this command in docs_commands.yaml"
        options = flags(command.removeprefix("python -m "))
        unknown = [flag for flag in options if not any(flag in entry for entry in known)]
        assert not unknown, f"{page}: {line}: unknown flags {unknown}"
        words = shlex.split(command)
        for word in words:
            if word.startswith("{") and not word.startswith("{{"):
                json.loads(word)
        for flag, word in pairwise(words):
            if flag in ("-f", "-k") and "kubectl logs" not in command:
                assert (ROOT / word).exists(), f"{page}: {line}: {word} is not in the repository"
        checked += 1
    assert checked > 5


def test_scripts_of_benchmarks_have_the_flags_that_are_shown() -> None:
    for page, line in excluded():
        found = re.match(r"(?:python )?(bench/\S+)", line)
        if found is None:
            continue
        script = ROOT / found[1]
        assert script.exists(), f"{page}: {line}"
        sources = "".join(path.read_text() for path in [script, *(ROOT / "bench").glob("*.py")])
        for flag in flags(line):
            assert flag in sources, f"{page}: {line}: {flag}"


def test_extras_that_are_shown_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page, line in excluded():
        for found in re.findall(r"lmetric[-_]router\S*?\[([\w,]+)\]", line):
            assert set(found.split(",")) <= set(extras), f"{page}: {line}"


@pytest.mark.nightly
def test_flags_of_vllm_are_those_of_its_parser() -> None:
    venv = os.environ.get("TEST_VLLM_VENV")
    if venv is None:
        pytest.skip("TEST_VLLM_VENV names no environment with vLLM")
    program = (
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "print(' '.join(make_arg_parser(P())._option_string_actions))"
    )
    done = subprocess.run(
        [f"{venv}/bin/python", "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(TREATMENT["flags"]["vllm serve"]) <= set(done.stdout.split())


def test_a_command_or_server_that_fails_is_an_error(tmp_path: Path) -> None:
    page = Page("README.md", tmp_path)
    try:
        with pytest.raises(AssertionError, match="p_tokne"):
            page.run("lmetric-router config --policy p_tokne", 0)
        with pytest.raises(AssertionError, match="p_tokne"):
            page.run("lmetric-router serve --embedded 1 --policy p_tokne --port 8080", 0)
        page.run("ONE=1", 0)
        page.run('test "$ONE" = 1', 0)
    finally:
        page.close()


def test_every_exclusion_has_a_reason_and_fits_a_command() -> None:
    for entry in TREATMENT["programs"].values():
        assert set(entry) == {"when", "reason"}, entry
    assert all(has(page, "gate") for page in GATE)
    for page, own in TREATMENT["pages"].items():
        assert set(own) <= {"files", "commands", "outputs", "engines"}, page
        for start, entry in own.get("commands", {}).items():
            assert any(normal(line).startswith(start) for line in SHOWN[page]), (
                f"{page}: {start}: no such command"
            )
            assert entry.get("when") in (None, "nightly", "never"), start
            assert entry.get("when") is None or entry.get("reason"), start
            assert "exit" in entry or "when" in entry, start
