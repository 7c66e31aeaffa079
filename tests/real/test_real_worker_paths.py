"""The worker paths of vllm-router and sglang-router, beside ours. TEST_RIVALS_VENV names an
environment with both; else bench/rivals/install.sh makes one with all rivals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def test_every_difference_has_a_reason_and_every_reason_a_difference() -> None:
    rivals = ROOT / "bench" / "rivals"
    venv = Path(os.environ.get("TEST_RIVALS_VENV") or rivals / ".venv")
    if not (venv / "bin" / "vllm-router").exists():
        if "TEST_RIVALS_VENV" in os.environ:
            raise FileNotFoundError(f"TEST_RIVALS_VENV={venv}: no vllm-router there")
        subprocess.run([rivals / "install.sh", venv], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, rivals / "worker_paths.py", "--rivals", venv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert ", 0 without a reason" in done.stderr
