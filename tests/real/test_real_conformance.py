"""Suites of others against the router and its engine: the router's own kinds of failures have
reasons.

TEST_CONFORMANCE names the folder of the suites; else `install_conformance` makes one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from router_world import served
from vllm_process import CACHE, HERE, ROOT, VllmEngine, locked

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

RUN = ROOT / "bench" / "conformance" / "run.py"


def suites() -> Path:
    """The folder with the installed suites."""
    if named := os.environ.get("TEST_CONFORMANCE"):
        if not Path(named).is_dir():
            raise FileNotFoundError(f"TEST_CONFORMANCE={named}: no folder there")
        return Path(named)
    target = CACHE.parent / "conformance"
    with locked("conformance"):
        if not (target / "installed").exists():
            subprocess.run([sys.executable, HERE / "install_conformance", target], check=True, timeout=3000)
            (target / "installed").touch()
    return target


async def test_failures_of_the_router_alone_have_reasons(
    vllm_engines: Callable[..., list[VllmEngine]],
) -> None:
    # Random weights: these settings make answers short and repeatable, and end JSON objects.
    (engine,) = vllm_engines(
        environ={
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # or it closes connections that a slow client uses again
        },
        enable_scale_out=True,
        override_generation_config={"max_new_tokens": 160, "temperature": 0.0, "repetition_penalty": 10.0},
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    home = await asyncio.to_thread(suites)
    async with served([engine], "--set", "admin.enabled=true") as world:
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, str(RUN), "--router", world.url, "--engine", engine.url, "--home", str(home)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        )
        out, _ = await asyncio.wait_for(run.communicate(), 3000)
    print(out.decode())
    assert run.returncode == 0
    assert "passed/failed" in out.decode()
