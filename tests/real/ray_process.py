"""Ray Serve with emulated engines as replicas, for tests. TEST_RAY_VENV names an environment with
Ray; else one is made."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
LMETRIC = "lmetric.gateways.ray_serve.LmetricRequestRouter"


def ray_venv() -> Path:
    """The environment: $TEST_RAY_VENV, or that of the example, made on first use."""
    named = os.environ.get("TEST_RAY_VENV")
    venv = Path(named) if named else ROOT / ".cache" / "ray"
    if not (venv / "bin" / "python").exists():
        if named:
            raise FileNotFoundError(f"TEST_RAY_VENV={named}: no virtual environment there")
        subprocess.run([ROOT / "examples" / "ray_serve" / "run", "--install-only"], check=True)
    return venv


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class RayServe:
    """A local Ray with the example's application."""

    def __init__(self, replicas: int, router: str = LMETRIC, policy: str | None = "lmetric") -> None:
        self._words = ["--router", router, "--replicas", str(replicas)]
        self._words += ["--policy", policy] if policy else []
        self.metrics_port = free_port()
        self.url = ""

    def __enter__(self) -> RayServe:
        folders = (ROOT / "python", ROOT / "examples" / "ray_serve")
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, folders)), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_metrics_report_interval_ms": "1000",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [
                ray_venv() / "bin" / "python", ROOT / "bench" / "gateways" / "ray_world.py", *self._words,
                "--metrics-port", str(self.metrics_port),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self._answer('ready').split()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def scale(self, replicas: int) -> None:
        """Changes the number of replicas, and waits until they serve."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{replicas}\n")
        self._process.stdin.flush()
        self._answer("scaled")

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise AssertionError(f"Ray ended before it was {word}: exit status {self._process.wait()}")
