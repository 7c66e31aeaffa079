"""Ray Serve with emulated engines as replicas, for tests and benchmarks.

TEST_RAY_VENV names an environment with Ray. Without it, the example makes one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import TracebackType

from lmetric_lab.ports import free_ports

ROOT = Path(__file__).parents[2]
WORLD = ROOT / "bench" / "gateways" / "ray_world.py"


def ray_venv() -> Path:
    """The environment: $TEST_RAY_VENV, or that of the example, made on first use."""
    named = os.environ.get("TEST_RAY_VENV")
    venv = Path(named) if named else ROOT / ".cache" / "ray"
    if not (venv / "bin" / "python").exists():
        if named:
            raise FileNotFoundError(f"TEST_RAY_VENV={named}: no virtual environment there")
        subprocess.run([ROOT / "examples" / "ray_serve" / "run", "--install-only"], check=True)
    return venv


def environ(**more: str) -> dict[str, str]:
    """Returns the environment variables of processes with Ray, which find this source tree."""
    folders = (ROOT / "python", ROOT / "examples" / "ray_serve", WORLD.parent)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)), "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_metrics_report_interval_ms": "1000",
        "RAY_raylet_start_wait_time_s": "300", **more,
    }  # fmt: skip


class RayServe:
    """A local Ray with the example's application.

    Args:
        flags: further flags of ray_world.py.
        more: further environment variables.
    """

    def __init__(self, replicas: int, *flags: str, **more: str) -> None:
        (self.metrics_port,) = free_ports(1)
        self._flags = ["--replicas", str(replicas), "--metrics-port", str(self.metrics_port), *flags]
        self._environ = environ(**more)
        self.url = ""

    def __enter__(self) -> RayServe:
        self._process = subprocess.Popen(
            [ray_venv() / "bin" / "python", WORLD, *self._flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environ, text=True,
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

    def scale(self, replicas: int, arm: str = "") -> None:
        """Changes the number of replicas, and waits until they serve."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{arm} {replicas}\n")
        self._process.stdin.flush()
        self._answer("scaled")

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise AssertionError(f"Ray ended before it was {word}: exit status {self._process.wait()}")
