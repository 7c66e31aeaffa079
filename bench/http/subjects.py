"""The subjects: how each router starts over the mock engines, alone on its core, with one
worker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
Command = Callable[
    [Path, int, list[str], Path], list[str]
]  # Arguments: rivals' python, port, engines, scratch directory.


def _nginx(python: Path, port: int, engines: list[str], scratch: Path) -> list[str]:
    places = " ".join(f"server {engine.removeprefix('http://')};" for engine in engines)
    text = (HERE / "nginx.conf").read_text()
    for key, value in {"PORT": str(port), "ENGINES": places, "DIR": str(scratch)}.items():
        text = text.replace(key, value)
    conf = scratch / "nginx.conf"
    conf.write_text(text)
    return ["nginx", "-e", str(scratch / "error.log"), "-p", str(scratch), "-c", str(conf)]


def _floor(script: str) -> Command:
    return lambda python, port, engines, scratch: [str(python), str(HERE / script), str(port), *engines]


def _module(module: str, policy: str, *more: str) -> Command:
    """sglang-router and its descendants share their flags; their metrics exporters are on."""

    def command(python: Path, port: int, engines: list[str], scratch: Path) -> list[str]:
        flags = ["--host", "127.0.0.1", "--port", str(port), "--policy", policy, "--worker-urls", *engines]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1000)]
        return [str(python), "-m", *module.split(), *flags, *metrics, "--log-level", "error", *more]

    return command


def ours(policy: str, *more: str) -> Command:
    """Returns the installed router with a policy and further flags."""

    def command(python: Path, port: int, engines: list[str], scratch: Path) -> list[str]:
        flags = [flag for engine in engines for flag in ("--engine", engine)]
        program = Path(sys.executable).parent / "lmetric-router"
        return [
            str(program),
            "serve",
            "--port",
            str(port),
            "--experimental",
            "--policy",
            policy,
            *flags,
            *more,
        ]

    return command


def checkout(root: Path) -> Command:
    """Returns the router of a checkout of this repository, with policy lmetric."""

    def command(python: Path, port: int, engines: list[str], scratch: Path) -> list[str]:
        flags = [flag for engine in engines for flag in ("--engine", engine)]
        program = "from lmetric.cli import main; main()"
        place = f"PYTHONPATH={root / 'python'}"
        return ["env", place, sys.executable, "-c", program, "serve", "--port", str(port), *flags]

    return command


SUBJECTS: dict[str, Command | None] = {
    "direct": None,
    "nginx": _nginx,
    "aio-std": _floor("floor_std.py"),
    "aio-raw": _floor("floor_raw.py"),
    "sglang-rr": _module("sglang_router.launch_router", "round_robin"),
    "sglang-ca": _module("sglang_router.launch_router", "cache_aware"),
    "smg-ca": _module("smg.cli launch", "cache_aware"),
    "vllm-ca": _module("vllm_router.launch_router", "cache_aware"),
    "lmetric": ours("lmetric"),
}
