"""NVIDIA's load generator aiperf drives the router: over emulated engines, and over real ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router_world import served
from test_server_process import router
from vllm_process import CACHE, HERE, MODEL, NAMED, VllmEngine, environment, locked, model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

SESSIONS, TURNS = 24, 4


def aiperf() -> Path:
    """The aiperf program: in $TEST_AIPERF_VENV, or in a cached environment made on first use."""
    named = NAMED["AIPERF"]
    target = Path(named or CACHE.parent / "aiperf")
    if not named:
        with locked("aiperf"):
            if not (target / "bin" / "aiperf").exists():
                subprocess.run([HERE / "install_aiperf", target], check=True, timeout=900)
    return target / "bin" / "aiperf"


async def drive(url: str, model_name: str, folder: Path, out: Path, *flags: str) -> dict[str, Any]:
    """Runs chats of several turns with a common system prompt, 8 at once; returns the report."""
    words = {
        "--url": url,
        "--model": model_name,
        "--tokenizer": folder,
        "--endpoint-type": "chat",
        "--num-conversations": SESSIONS,
        "--conversation-turn-mean": TURNS,
        "--shared-system-prompt-length": 100,
        "--isl": 60,
        "--osl": 24,
        "--concurrency": 8,
        "--extra-inputs": "ignore_eos:true",
        "--random-seed": 1,
        "--artifact-dir": out,
        "--ui": "none",
    }
    process = await asyncio.create_subprocess_exec(
        *(
            str(await asyncio.to_thread(aiperf)),
            "profile",
            "--no-gpu-telemetry",
            "--no-server-metrics",
            *flags,
        ),
        *(str(part) for pair in words.items() for part in pair),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 600)
    print(said.decode()[-4000:])
    assert process.returncode == 0
    (report,) = out.rglob("profile_export_aiperf.json")  # noqa: ASYNC240
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def check(report: dict[str, Any]) -> None:
    """Every request was answered in full."""
    assert report.get("error_summary", []) == []
    assert report["request_count"]["avg"] == SESSIONS * TURNS
    assert report["output_sequence_length"]["avg"] > 10


@pytest.mark.parametrize("flags", [("--streaming",), ()], ids=["streamed", "plain"])
async def test_over_vllm(
    vllm_engines: Callable[..., list[VllmEngine]], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    engines = vllm_engines(2)
    async with served(engines) as world:
        check(await drive(world.url, MODEL, engines[0].model, tmp_path, *flags))
        assert {name for name, count in (await world.indicator("bs")).items() if count == 0} == {
            engine.name for engine in engines
        }


async def test_over_embedded_engines(tmp_path: Path) -> None:
    folder = model(environment())  # for its tokenizer, which is theirs
    async with router("--embedded", "4") as process:
        await process.listening()
        check(await drive(process.url, "emulated", folder, tmp_path, "--streaming"))
