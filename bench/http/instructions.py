"""What a change costs in instructions of the router's process, which repeat on a busy machine: two checkouts.

    python bench/http/instructions.py --before CHECKOUT [--requests 300] [--set KEY=VALUE]

CHECKOUT is another working tree of this repository, with its extension built in the same cargo profile as
this one's. Each runs under valgrind's callgrind before four engines that answer at once (mock.py); 100
requests warm it up. Counted are plain chats of 1 and 32 KB, one after the other on one connection, and a
chunk: the difference between streams of 220 and of 20 tokens. What an idle router does in the same time is
taken off. Needs valgrind; takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from load import request

HERE = Path(__file__).resolve().parent
WARM_REQUESTS = 100
STREAMS = 30  # with a token every 5 ms they take long
SERVE = "from lmetric.cli import main; main()"
QUIET = ["--set", "load.interval=3600", "--set", "health.interval=3600"]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def ask(connection: socket.socket, ordinal: int, size: int, tokens: int | None) -> None:
    """Sends a chat, streamed where ``tokens`` says how many, and reads the whole answer."""
    extra = f'"stream":true,"max_tokens":{tokens},' if tokens else ""
    connection.sendall(request(size, "x", ordinal, extra))
    answer = b""
    while True:
        answer += connection.recv(1 << 20)
        if tokens:
            if answer.endswith(b"0\r\n\r\n"):
                break
        else:
            head, _, body = answer.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if length and len(body) >= int(length[1]):
                break
    if b" 200 " not in answer[:20]:
        sys.exit(f"the router answered {answer[:200]!r}; expected status 200")


def connect(port: int) -> socket.socket:
    """A connection to a process that may still be starting."""
    for _ in range(240):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=300)
        except OSError:
            time.sleep(0.5)
    sys.exit(f"nobody listens at port {port} after 120 s")


def dump(router: subprocess.Popen[bytes]) -> None:
    """Has callgrind write what it counted since the last time."""
    subprocess.run(["callgrind_control", "-d", str(router.pid)], capture_output=True, check=True)


def counted(out: Path, part: int) -> int:
    """Instructions of one of the files that `dump` has written."""
    found = re.search(r"^(?:summary|totals): (\d+)", Path(f"{out}.{part}").read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"{out}.{part} has no total; expected a file of callgrind")
    return int(found[1])


def measure(checkout: Path, count: int, size: int, tokens: int | None, settings: list[str]) -> float:
    """Instructions of a request."""
    *engines, port = free_ports(5)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "callgrind")
        mock = subprocess.Popen([sys.executable, HERE / "mock.py", *map(str, engines)])
        connect(engines[-1]).close()
        valgrind = ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={out}"]
        flags = [word for each in engines for word in ("--engine", f"http://127.0.0.1:{each}")]
        flags += [word for setting in settings for word in ("--set", setting)]
        router = subprocess.Popen(
            [*valgrind, sys.executable, "-c", SERVE, "serve", "--port", str(port), *QUIET, *flags],
            env=os.environ | {"PYTHONPATH": str(checkout / "python"), "PYTHONHASHSEED": "0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(port) as connection:
                for ordinal in range(WARM_REQUESTS):
                    ask(connection, ordinal, size, tokens)
                dump(router)
                began = time.monotonic()
                for ordinal in range(count):
                    ask(connection, WARM_REQUESTS + ordinal, size, tokens)
                took = time.monotonic() - began
                dump(router)
                time.sleep(took)
                dump(router)
            return (counted(out, 2) - counted(out, 3)) / count
        finally:
            router.send_signal(signal.SIGKILL)
            mock.kill()
            router.wait()
            mock.wait()


def costs(checkout: Path, count: int, settings: list[str]) -> dict[str, float]:
    """Instructions by kind of work."""
    short, long = (measure(checkout, STREAMS, 1024, tokens, settings) for tokens in (20, 220))
    return {
        "plain chat, 1 KB": measure(checkout, count, 1024, None, settings),
        "plain chat, 32 KB": measure(checkout, count, 32_768, None, settings),
        "chunk of a stream": (long - short) / 200,
    }


def main() -> None:
    """Measures both and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], help="a setting of both routers, KEY=VALUE")
    options = parser.parse_args()
    before = costs(options.before.resolve(), options.requests, options.set)
    after = costs(HERE.parent.parent, options.requests, options.set)
    print("| work | before | after | difference |\n|---|---:|---:|---:|")
    for work, was in before.items():
        print(f"| {work} | {was:,.0f} | {after[work]:,.0f} | {after[work] / was - 1:+.1%} |")


if __name__ == "__main__":
    main()
