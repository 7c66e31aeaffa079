"""Calls the worker paths of vllm-router, sglang-router and this router, and compares the answers.

python bench/rivals/worker_paths.py --rivals VENV [--write]

Each router runs over two emulated engines, and a third one is added and removed. All routers get
the same calls in the same order (`CALLS`). For each call, the script compares the status, the
content type and the keys of a JSON body. Further keys of ours are no difference.

`worker_paths.csv` has the answers (``--write`` replaces it), `worker_paths.yaml` the differences
with their reasons. The script fails if a difference has no reason, or a reason no difference.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import yaml

from lmetric_lab.ports import free_ports

HERE = Path(__file__).parent
OURS, VLLM, SGLANG = "lmetric-router", "vllm-router", "sglang-router"
ANSWERS, REASONS = HERE / "worker_paths.csv", HERE / "worker_paths.yaml"
START_SECONDS = 60.0
SETTLE_SECONDS = 20.0
UNKNOWN = "http://127.0.0.1:1"


class Call(NamedTuple):
    """A call. ``{url}`` is the third engine, ``{quoted}`` its URL in a path, ``{id}`` its ID.

    ``there``: whether the third engine is listed afterwards; None: the call does not change that.
    """

    name: str
    method: str
    path: str
    body: Any = None
    there: bool | None = None


CALLS = (
    Call("liveness", "GET", "/liveness"),
    Call("readiness", "GET", "/readiness"),
    Call("health", "GET", "/health"),
    Call("health_generate", "GET", "/health_generate"),
    Call("models", "GET", "/v1/models"),
    Call("completion", "POST", "/v1/completions", {"model": "emulated", "prompt": "a", "max_tokens": 1}),
    Call("list urls", "GET", "/list_workers"),
    Call("list", "GET", "/workers"),
    Call("finish an unknown session", "POST", "/finish_session?session_id=s"),
    Call("finish it again", "POST", "/finish_session?session_id=s"),
    Call("finish no session", "POST", "/finish_session"),
    Call("add by URL", "POST", "/add_worker?url={url}", there=True),
    Call("add a known URL", "POST", "/add_worker?url={url}"),
    Call("add no URL", "POST", "/add_worker"),
    Call("remove by URL", "POST", "/remove_worker?url={url}", there=False),
    Call("remove an unknown URL", "POST", "/remove_worker?url={url}"),
    Call("remove no URL", "POST", "/remove_worker"),
    Call("create", "POST", "/workers", {"url": "{url}", "worker_type": "regular"}, there=True),
    Call("create a known one", "POST", "/workers", {"url": "{url}", "worker_type": "regular"}),
    Call("create with priority", "POST", "/workers", {"url": "{url}", "priority": 50, "cost": 1.0}),
    Call("create without URL", "POST", "/workers", {}),
    Call("create with a number", "POST", "/workers", {"url": 3}),
    Call("create from no JSON", "POST", "/workers", "nonsense"),
    Call("show by ID", "GET", "/workers/{id}"),
    Call("show by URL", "GET", "/workers/{quoted}"),
    Call("show an unknown URL", "GET", f"/workers/{quote(UNKNOWN, safe='')}"),
    Call("show an unknown ID", "GET", "/workers/6f1e4b0e-0000-4000-8000-000000000000"),
    Call("delete an unknown ID", "DELETE", "/workers/6f1e4b0e-0000-4000-8000-000000000000"),
    Call("delete by ID", "DELETE", "/workers/{id}", there=False),
    Call("create again", "POST", "/workers", {"url": "{url}", "worker_type": "regular"}, there=True),
    Call("delete by URL", "DELETE", "/workers/{quoted}", there=False),
    Call("wrong method", "PUT", "/workers", {}),
)


class Answer(NamedTuple):
    """The compared parts of an answer: its status, its content type, and its keys.

    ``keys``: names, separated by spaces; ``workers.KEY`` for the first worker of a list.
    """

    status: int
    media: str
    keys: str


class Difference(NamedTuple):
    """A part of an answer that clients of another router may miss."""

    call: str
    router: str
    what: str


def request(method: str, url: str, body: Any = None, timeout: float = 20.0) -> tuple[int, str, bytes]:
    """Returns status, content type and body."""
    data = None if body is None else json.dumps(body).encode()
    if body == "nonsense":
        data = b"nonsense"
    asked = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(asked, timeout=timeout) as got:
            return got.status, got.headers.get_content_type(), got.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get_content_type(), error.read()


def keys_of(media: str, body: bytes) -> str:
    """Returns the keys of a JSON object."""
    if media != "application/json":
        return ""
    value = json.loads(body)
    if not isinstance(value, dict):
        return ""
    keys = set(value)
    if isinstance(workers := value.get("workers"), list) and workers:
        keys |= {f"workers.{key}" for key in workers[0]}
    return " ".join(sorted(keys))


def workers(base: str) -> dict[str, str]:
    """Returns the IDs of the listed workers by URL; a worker without one has its quoted URL."""
    listed = json.loads(request("GET", f"{base}/workers")[2])["workers"]
    return {each["url"]: each.get("id", quote(each["url"], safe="")) for each in listed}


def wait(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Waits until it is done. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while True:
        try:
            if done():
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


def drive(base: str, url: str) -> dict[str, Answer]:
    """Makes all calls to a router. Returns the answers by the names of the calls."""
    answers, gone = {}, "6f1e4b0e-0000-4000-8000-000000000001"
    for call in CALLS:
        names = {"url": url, "quoted": quote(url, safe=""), "id": workers(base).get(url, gone)}
        body = call.body
        if isinstance(body, dict):
            body = {name: url if value == "{url}" else value for name, value in body.items()}
        status, media, got = request(call.method, base + call.path.format_map(names), body)
        answers[call.name] = Answer(status, media if got else "", keys_of(media, got))
        if call.there is not None and status < 300:
            there = call.there
            wait(lambda there=there: (url in workers(base)) is there, SETTLE_SECONDS, call.name)
        elif call.there is not None:  # this router lacks the call: others need its effect
            ensure(base, url, call.there)
    return answers


def ensure(base: str, url: str, there: bool) -> None:
    """Adds or removes a worker by the calls that all routers have."""
    if there and url not in workers(base):
        request("POST", f"{base}/workers", {"url": url})
    elif not there and url in workers(base):
        request("DELETE", f"{base}/workers/{workers(base)[url]}")
    wait(lambda: (url in workers(base)) is there, SETTLE_SECONDS, "the state for the next call")


def commands(rivals: Path, ports: list[int], engines: list[str], scratch: Path) -> dict[str, list[str]]:
    """Returns the commands that start the routers."""
    config = scratch / "router.yaml"
    config.write_text(
        yaml.safe_dump(
            {"engines": engines, "admin": {"enabled": True}, "port": ports[0], "host": "127.0.0.1"}
        )
    )
    program = "from lmetric.cli import main; main()"
    started = {OURS: [sys.executable, "-c", program, "serve", "--config", str(config)]}
    names = {VLLM: ["vllm-router"], SGLANG: ["sglang-router", "launch"]}
    policies = {VLLM: "sticky_least_loaded", SGLANG: "cache_aware"}
    for name, port, metrics in zip(names, ports[1:3], ports[3:5], strict=True):
        place = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        more = ["--policy", policies[name], "--worker-urls", *engines]
        started[name] = [str(rivals / "bin" / names[name][0]), *names[name][1:], *place, *more]
    return started


@contextmanager
def process(command: list[str], log: Path) -> Iterator[None]:
    """Runs a process until the end of the block."""
    with log.open("wb") as file:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def compare(rivals: Path, scratch: Path) -> dict[str, dict[str, Answer]]:
    """Starts engines and routers, and returns the answers by router and call."""
    ports = free_ports(8)
    engines = [f"http://127.0.0.1:{port}" for port in ports[5:]]
    program = "from lmetric.cli import main; main()"
    with ExitStack() as stack:
        for url in engines:
            flags = ["engine", "--port", url.rpartition(":")[2], "--clock-speed", "10"]
            command = [sys.executable, "-c", program, *flags]
            stack.enter_context(process(command, scratch / f"engine{flags[2]}.log"))
        for url in engines:
            wait(lambda url=url: request("GET", f"{url}/health")[0] == 200, START_SECONDS, url)
        found = {}
        for (name, command), port in zip(
            commands(rivals, ports, engines[:2], scratch).items(), ports[:3], strict=True
        ):
            base = f"http://127.0.0.1:{port}"
            with process(command, scratch / f"{name}.log"):
                wait(lambda base=base: _is_ready(base), START_SECONDS, f"{name} ({scratch / name}.log)")
                found[name] = drive(base, engines[2])
        return found


def _is_ready(base: str) -> bool:
    status, _, body = request("GET", f"{base}/readiness")
    return status == 200 and json.loads(body)["healthy_workers"] == 2


def differences(found: dict[str, dict[str, Answer]]) -> list[Difference]:
    """Returns where an answer of ours differs from another router's."""
    different = []
    for router in (VLLM, SGLANG):
        for call, theirs in found[router].items():
            ours = found[OURS][call]
            missing = set(theirs.keys.split()) - set(ours.keys.split())
            parts = []
            if ours.status != theirs.status:
                parts.append(f"status {ours.status}, not {theirs.status}")
            if ours.media != theirs.media and theirs.media:
                parts.append(f"{ours.media}, not {theirs.media}")
            if missing:
                parts.append(f"without {', '.join(sorted(missing))}")
            if parts:
                different.append(Difference(call, router, "; ".join(parts)))
    return different


def reasons() -> dict[Difference, str]:
    """Returns the listed differences with their reasons."""
    listed = yaml.safe_load(REASONS.read_text())
    return {
        Difference(call, router, each["what"]): each["reason"]
        for each in listed
        for router, calls in each["calls"].items()
        for call in calls
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, required=True, help="environment with the other routers")
    parser.add_argument("--write", action="store_true", help=f"write {ANSWERS.name}")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(given.rivals, Path(scratch))
    rows = [(call, router, *answer) for router, answers in found.items() for call, answer in answers.items()]
    if given.write:
        with ANSWERS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([("call", "router", *Answer._fields), *rows])
    here, listed = differences(found), reasons()
    for each in here:
        print(f"{each.call} | {each.router} | {each.what} | {listed.get(each, 'NO REASON')}")
    unexplained = [each for each in here if each not in listed]
    outdated = [each for each in listed if each not in here]
    for each in outdated:
        print(f"{each.call} | {each.router} | {each.what} | NO DIFFERENCE ANY MORE")
    print(
        f"{len(CALLS)} calls, {len(here)} differences, {len(unexplained)} without a reason", file=sys.stderr
    )
    return 1 if unexplained or outdated else 0


if __name__ == "__main__":
    sys.exit(main())
