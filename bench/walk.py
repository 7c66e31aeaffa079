"""Counts the Python files and functions of the router that one request visits, by kind of request.

    python bench/walk.py [KIND ...] [--names] [--json]

Kinds: chat, stream, pair, split, migration, failover. A router before emulated engines runs in this
process. Each kind sends warm-up requests, then the counted one, all on one client connection.

Columns: different files; different functions; the functions among them that call another one
(inner); calls; and how often the next call is in another file.

Rules that decide whether a call belongs to the request:

- Only functions below `python/lmetric` count. Comprehensions count as part of their function.
- The router, the engines and the client have a thread each. Only the router's thread is traced, so
  no call of an emulated engine counts.
- No other request is in flight. So every call counts from the first byte of the request until the
  router has ended it, but for periodic work: calls below a function of `server/background`,
  `server/discovery`, `server/fleet/periodic.py` or `server/upstream/fetch.py`.
- The rebalancer's round is periodic work, too. So the script itself begins the migration, by
  `Rebalancer.begin`, as a round does.

A generator or coroutine that continues counts as one more call. Functions of Rust, and logs below
the level error, do not count. The bodies are small, so that the router uses no further thread.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import uvloop

import lmetric
from lmetric import SplitAt, option_values
from lmetric.config import Log, ServerConfig
from lmetric.server import Server
from lmetric.server.observe.logs import configure_logging
from lmetric_lab.emulated import EngineOptions, EngineServer

T = TypeVar("T")

ROOT = f"{Path(lmetric.__file__).parent}/"
PERIODIC = tuple(
    ROOT + name
    for name in ("server/background/", "server/discovery/", "server/fleet/periodic", "server/upstream/fetch")
)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "the history of the quiet river and of all who lived by it " * 12
SECONDS = 30.0
MIN_TOKENS = 8
MOVE_AFTER = 10  # pieces of the answer

KV = {"kv_connector": "nixl", "kv_load_failure_policy": "recompute"}
BOTH = KV | {"kv_bidirectional": True}
# Servers refuse `SplitAt`. Here, a request shall split.
option_values._STUDIED.pop("force")
FAILING = {"fail_after_tokens": 20, "fail_with": "reset"}


@dataclass(frozen=True)
class Kind:
    """One kind of request.

    ``engines``: options of each emulated engine. ``proof``: whether the record of the decision and
    the headers of the answer show that the request ran in this way.
    """

    title: str
    engines: tuple[Mapping[str, Any], ...]
    path: str
    stream: bool
    tokens: int
    proof: Callable[[Mapping[str, Any], Mapping[str, str]], bool]
    config: Mapping[str, Any] = field(default_factory=dict)
    moves: bool = False


KINDS = {
    "chat": Kind("plain chat", ({}, {}), CHAT, False, 8, lambda record, _: not record["cuts"]),
    "stream": Kind(
        "streamed completion", ({}, {}), COMPLETIONS, True, 8, lambda record, _: not record["cuts"]
    ),
    "pair": Kind(
        "prefill/decode pair",
        (KV | {"role": "prefill"}, KV | {"role": "decode"}),
        *(CHAT, False, 8),
        lambda _, headers: "x-lmetric-prefill" in headers,
    ),
    "split": Kind(
        "split",
        (BOTH, BOTH, BOTH),
        *(CHAT, True, 24),
        lambda record, _: bool(record["cuts"]),
        {"split": SplitAt(fraction=0.9), "experimental": True},
    ),
    "migration": Kind(
        "migration",
        (BOTH, BOTH, BOTH),
        *(CHAT, True, 60),
        lambda record, _: bool(record["migrations"]),
        {"rebalance": "star", "migration_by": "fetch"},
        moves=True,
    ),
    "failover": Kind(
        "failover in mid-stream",
        (FAILING, FAILING, FAILING, FAILING),  # two for each request: repeated failures count
        *(CHAT, True, 30),
        lambda record, _: bool(record["migrations"]),
    ),
}


@dataclass(frozen=True)
class Visit:
    """A call: its file below `python/lmetric`, and its function with its class."""

    file: str
    function: str


@dataclass(frozen=True)
class Walk:
    """The calls of one request, in order, and the functions that called others."""

    visits: list[Visit]
    inner: set[Visit]

    def counts(self) -> dict[str, int]:
        """Returns the numbers of the table."""
        functions = dict.fromkeys(self.visits)
        return {
            "files": len({visit.file for visit in functions}),
            "functions": len(functions),
            "inner": len(self.inner),
            "calls": len(self.visits),
            "changes of file": sum(1 for _ in groupby(visit.file for visit in self.visits)) - 1,
        }

    def names(self) -> list[dict[str, Any]]:
        """Returns the functions in the order of their first call, with the number of calls."""
        return [
            {"file": visit.file, "function": visit.function, "calls": calls, "inner": visit in self.inner}
            for visit, calls in Counter(self.visits).items()
        ]


class LoopThread:
    """A thread with an event loop, as the router runs one."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the thread, and returns its result."""

        async def called() -> T:
            return function(*arguments)

        return self.run(called())


class Tracer:
    """The calls of a thread that belong to the request."""

    def __init__(self) -> None:
        self._visits: list[Visit] = []
        self._inner: set[Visit] = set()

    def start(self) -> None:
        """Traces the calling thread."""
        sys.setprofile(self._event)

    def stop(self) -> Walk:
        """Ends the trace."""
        sys.setprofile(None)
        return Walk(self._visits, self._inner)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not counts(frame):
            return
        caller: FrameType | None = frame
        inner = None
        while caller is not None:
            if caller.f_code.co_filename.startswith(PERIODIC):
                return
            if inner is None and caller is not frame and counts(caller):
                inner = caller
            caller = caller.f_back
        if inner is not None:
            self._inner.add(visit(inner))
        self._visits.append(visit(frame))


def counts(frame: FrameType) -> bool:
    """Whether it is a frame of a function of the router."""
    code = frame.f_code
    return code.co_filename.startswith(ROOT) and code.co_name not in COMPREHENSIONS


def visit(frame: FrameType) -> Visit:
    """Returns the visit that a frame is."""
    code = frame.f_code
    return Visit(code.co_filename.removeprefix(ROOT), code.co_qualname.replace(".<locals>", ""))


class Scene:
    """A router before the engines of a kind, and one client connection."""

    def __init__(self, kind: Kind, stack: ExitStack) -> None:
        self.kind = kind
        self.router = stack.enter_context(LoopThread())
        engines_thread = stack.enter_context(LoopThread())
        engines = []
        for changes in kind.engines:
            engine = EngineServer(EngineOptions.model_validate({"port": 0, "clock_speed": 2.0} | changes))
            engines_thread.run(engine.start())
            stack.callback(lambda engine=engine: engines_thread.run(engine.stop()))
            engines.append(engine.url)
        config = {"port": 0, "model": "emulated", "policy": "round_robin", "engines": engines, **kind.config}
        config |= {"load": {"interval": None}, "health": {"interval": 3600.0}}
        self.server = Server(ServerConfig.model_validate(config))
        self.router.run(self.server.start())
        stack.callback(lambda: self.router.run(self.server.stop()))
        self.model = self.server.fleet.models[0]
        wait(lambda: all(engine.identified for engine in self.model.engines.values()))
        wait(lambda: self.model.tokenizers.current is not None)
        self.client = stack.enter_context(socket.create_connection(("127.0.0.1", self.server.port), SECONDS))

    def ask(self, number: int, whole: bool = True) -> None:
        """Sends a request and reads its answer. Raises RuntimeError without a whole answer.

        ``whole``: with all tokens and the move, else as short as a warm-up.
        """
        kind = self.kind
        tokens = kind.tokens if whole else MIN_TOKENS
        text = f"{number} {PROMPT}"
        content = {"messages": [{"role": "user", "content": text}]} if kind.path == CHAT else {"prompt": text}
        body = {"model": "emulated", "max_tokens": tokens, "stream": kind.stream, **content}
        data = json.dumps(body).encode()
        head = f"POST {kind.path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
        # In one piece: `http.client` sends head and body apart.
        self.client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        answer = http.client.HTTPResponse(self.client, method="POST")
        answer.begin()
        said = b""
        for count, line in enumerate(answer, 1):
            said += line
            if whole and kind.moves and count == 2 * MOVE_AFTER:  # each piece ends in an empty line
                self._move()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        if answer.status != 200 or b'"error"' in said:
            raise RuntimeError(f"{kind.title}: the router answered {answer.status}: {said[-500:]!r}")
        self._decision = int(headers["x-lmetric-decision"].split("-")[-2])
        self._headers = headers

    def _move(self) -> None:
        mover, now = self.model.mover, time.monotonic()
        assert mover is not None
        ((ticket, request),) = list(mover.running.items())
        target = next(name for name in self.model.engines if name != request.ticket.instance)
        self.router.call(mover.begin, ticket, target, now)
        if not mover.moves:
            raise RuntimeError(f"the request did not begin to move: {dict(mover.outcomes)}")

    def walk(self) -> Walk:
        """Traces a request after the warm-up."""
        warm_up = 2 * len(self.kind.engines)
        for number in range(warm_up):  # all engines have connections then
            self.ask(number, whole=number == warm_up - 1)
            self._settle()
        tracer = Tracer()
        self.router.call(tracer.start)
        try:
            self.ask(warm_up)
            self._settle()
        finally:
            found = self.router.call(tracer.stop)
        record = self.model.router.explain(self._decision)
        if record is None or not self.kind.proof(record, self._headers):
            raise RuntimeError(f"{self.kind.title}: the request ran in another way: {record}")
        return found

    def _settle(self) -> None:
        """Waits until the router has ended the request, and the callbacks that this scheduled."""
        relays, core = self.server.front.relays, self.model.router
        wait(lambda: not relays and not core.in_flight())
        for _ in range(3):
            self.router.call(lambda: None)


def wait(true: Callable[[], object]) -> None:
    """Waits until a condition is true."""
    end = time.monotonic() + SECONDS
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the router did not get ready, or did not end a request")
        time.sleep(0.01)


def walk(kind: Kind) -> Walk:
    """Runs one kind."""
    with ExitStack() as stack:
        return Scene(kind, stack).walk()


def table(walks: Mapping[str, Walk], names: bool) -> str:
    """Returns the numbers as a table, and the functions of each kind."""
    columns = ("files", "functions", "inner", "calls", "changes of file")
    lines = ["| kind | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, each in walks.items():
        counts = each.counts()
        lines.append(f"| {KINDS[name].title} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    for name, each in walks.items() if names else ():
        lines += ["", f"{KINDS[name].title}:"]
        lines += [
            f"{number:4d} {visit['file']}: {visit['function']}"
            + (f" ({visit['calls']} calls)" if visit["calls"] > 1 else "")
            for number, visit in enumerate(each.names(), 1)
        ]
    return "\n".join(lines)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help="default: all")
    parser.add_argument("--names", action="store_true", help="list the functions in order")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    configure_logging(Log(level="error"))
    walks = {name: walk(KINDS[name]) for name in given.kinds or KINDS}
    if given.json:
        found = {
            name: each.counts() | ({"names": each.names()} if given.names else {})
            for name, each in walks.items()
        }
        print(json.dumps(found, indent=2))
    else:
        print(table(walks, given.names))


if __name__ == "__main__":
    main()
