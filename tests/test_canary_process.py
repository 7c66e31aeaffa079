"""A canary of a real router with embedded engines, controlled by the command line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from cli_world import call
from lmetric.record_files import read_records
from lmetric_lab.replay import Client, Player
from lmetric_lab.sim.prompts import PromptWriter
from studies import canary_bench
from test_server_process import Process, router

RUN = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"


async def cli(*words: str) -> tuple[int, str, str]:
    """Runs ``lmetric-router canary``; returns exit code, stdout and stderr."""
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "canary", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await done.communicate()
    assert done.returncode is not None
    return done.returncode, out.decode(), err.decode()


async def replay(process: Process) -> int:
    """Sends conversations; returns the number of failed requests."""
    trace = canary_bench.conversations(70, 2, 12.0, seed=3)
    async with Client(process.url) as client:
        names = trace.sessions.tolist()
        player = Player(
            trace,
            client,
            PromptWriter(seed=3).prompt,
            fields=lambda index: {"user": f"session {names[index]}"},
        )
        await player.run()
    return sum(not record.completed for record in player.records)


@pytest.mark.nightly
async def test_a_policy_without_affinity_is_found_and_rolled_back_by_command(tmp_path: Path) -> None:
    flags = ["--embedded", "4", "--set", "admin=true", "--records", str(tmp_path / "records")]
    async with router(*flags, "--shadow", "vllm") as r:
        await r.listening(60)
        start = ["start", r.url, "--policy", "round_robin", "--share", "0.5", "--salt", "test"]
        more = ["--set", "warmup_seconds=0", "--set", "rollback_ttft_increase=null"]
        code, out, err = await cli(*start, *more)
        assert (code, err) == (0, "")
        assert "running" in out
        code, _, err = await cli(*start)
        assert code == 1
        assert "a canary runs already; promote it or roll it back first" in err
        code, _, err = await cli("start", r.url, "--policy", "vlllm")
        assert code == 2
        assert "did you mean" in err
        assert await replay(r) == 0
        code, out, _ = await cli("status", r.url, "--json")
        (state,) = orjson.loads(out)
        hits: dict[str, Any] = state["canary"]["metrics"]["hit_ratio"]
        assert hits["clear"], state
        assert hits["interval"][1] < 0, "turns miss their cache"
        assert state["canary"]["errors"] == {"stable": 0, "canary": 0}
        assert state["shadow"]["differed"] > 0
        code, out, _ = await cli("status", r.url)
        assert "hit rate" in out
        assert "worse" in out
        assert "shadow vllm: same engine for" in out
        code, out, _ = await cli("rollback", r.url)
        assert "rolled back by command" in out
        code, _, err = await cli("promote", r.url)
        assert code == 1
        assert "start it again first" in err
        r.process.terminate()
        assert await r.ended() == 0
    records = read_records(tmp_path / "records")
    arms: dict[str, set[str]] = {}
    for each in records.requests:
        arms.setdefault(each["session"], set()).add(each["arm"])
        assert each["policy"] == ("round_robin" if each["arm"] == "canary" else "total_delay")
    assert all(len(found) == 1 for found in arms.values()), "a session stays in its arm"
    counts = [sum(each["arm"] == arm for each in records.requests) for arm in ("stable", "canary")]
    assert counts == list(state["canary"]["requests"].values())


def test_a_router_that_does_not_answer() -> None:
    done = call("canary", "status", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no answer from a router" in done.stderr
    done = call("canary", "status", "127.0.0.1:1")
    assert done.returncode == 2
    assert "did you mean http://127.0.0.1:1?" in done.stderr
