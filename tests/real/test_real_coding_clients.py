"""Coding clients run as docs/how-to/coding_clients.md shows them, before real vLLM engines.

The model says scripted answers (`scripted_answers.py`): clients with tools first get a tool call,
run it, and send its result. TEST_CODING_CLIENTS names the folder of install_coding_clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router_world import Served, served
from vllm_process import HERE, ROOT, VllmEngine

CLIENTS = os.environ.get("TEST_CODING_CLIENTS")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not CLIENTS,
        reason="TEST_CODING_CLIENTS names no folder; make one with tests/real/install_coding_clients",
    ),
]
Start = Callable[..., list[VllmEngine]]

PAGE = (ROOT / "docs" / "how-to" / "coding_clients.md").read_text()
MODEL, ADDRESS = "qwen3-coder", "http://127.0.0.1:8080"  # of the page
FILE = "the parser fails on two files"
# The tool with which a client reads a file: a tool that only this client has, the call, and
# arguments.
TOOLS: dict[str, tuple[str, str, dict[str, str]]] = {
    "Claude Code": ("ScheduleWakeup", "Read", {"file_path": "note.txt"}),
    "Codex": ("exec_command", "exec_command", {"cmd": "cat note.txt"}),
    "Continue": ("CheckBackgroundJob", "Read", {"filepath": "note.txt"}),
    "OpenHands": ("file_editor", "terminal", {"command": "cat note.txt", "summary": "read"}),
}
NAMES = ["Claude Code", "Codex", "Aider", "Continue", "OpenHands"]
# Answers of several seconds. An engine is killed in one.
WORDS, SEEN = 700, 20
CALL = 90  # more than the tokens of reasoning and a tool call
# Outcomes of the failover. Clients whose stream no engine could continue repeated the request;
# OpenHands does not stream.
CONTINUE = ("Aider", "Continue")
FAILOVERS = {name: ["continued" if name in CONTINUE else "not_resumable"] for name in NAMES} | {
    "OpenHands": []
}


def answer(words: int) -> str:
    return "I see: " + " ".join(f"word {number}" for number in range(words)) + " end."


def flags(words: int, reasoning: str = "") -> dict[str, Any]:
    """Flags of engines whose answers have this number of words, after a tool call if possible.

    ``reasoning``: comes before each answer, if not empty.
    """
    thinks = f"<think>{reasoning}</think>" if reasoning else ""
    answers: list[Any] = []
    for marker, name, arguments in TOOLS.values():
        call = json.dumps({"name": name, "arguments": arguments})
        answers.append(
            [f'"{marker}"', [f"{thinks}<tool_call>\n{call}\n</tool_call>", thinks + answer(words)]]
        )
    answers.append(["", [thinks + answer(words)]])
    return {
        "environ": {"PYTHONPATH": str(HERE), "ANSWERS": json.dumps(answers)},
        "logits_processors": ["scripted_answers:Scripted"],
        "reasoning_parser": "qwen3" if reasoning else None,
        "enable_scale_out": True,
        "served_model_name": MODEL,
        "max_model_len": 65536,
        "hf_overrides": {"max_position_embeddings": 65536},
        "num_gpu_blocks_override": 4096,
        "max_num_batched_tokens": 4096,
    }


@dataclass
class Client:
    """A client of the page, with a home and a project of its own."""

    name: str
    home: Path
    url: str

    @property
    def project(self) -> Path:
        return self.home / "project"

    def blocks(self, language: str) -> list[str]:
        """Returns the page's blocks for this client, with the address of the router."""
        section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
        (mine,) = [each for each in section if each.startswith(f"{self.name}\n")]
        found = re.findall(rf"^```{language}\n(.*?)^```", mine, re.MULTILINE | re.DOTALL)
        return [block.replace(ADDRESS, self.url) for block in found]

    async def prepare(self) -> None:
        """Writes the client's files, and a project with a file to read."""
        self.project.mkdir(parents=True)
        (self.project / "note.txt").write_text(FILE)
        for block in [*self.blocks("yaml"), *self.blocks("toml")]:
            name = block.partition("\n")[0].removeprefix("# ")
            file = self.home / name[2:] if name.startswith("~/") else self.project / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)
        await self.shell("git init -q && git add . && git -c user.name=a -c user.email=a@b commit -qm first")

    async def turn(self, number: int) -> str:
        """Runs command `number` of the page; returns its output."""
        (block,) = self.blocks("sh")
        lines = block.splitlines()
        exports = [line for line in lines if line.startswith("export ")]
        commands = [line for line in lines if line not in exports]
        return await self.shell("\n".join([*exports, commands[number]]))

    async def shell(self, script: str) -> str:
        """Runs a script without variables of this process. It must succeed."""
        folders = ["node_modules/.bin", "aider-chat/bin", "openhands/bin"]
        path = ":".join([*(f"{CLIENTS}/{folder}" for folder in folders), os.environ["PATH"]])
        # LiteLLM must not look for prices in the network.
        own = {"PATH": path, "HOME": str(self.home), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-euc", script),
            cwd=self.project,
            env=own,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), 600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, (script, out.decode()[-3000:], err.decode()[-3000:])
        return out.decode()


def says(output: str, words: int) -> None:
    """Fails if an output lacks the whole answer. Clients break lines and draw frames."""
    letters = re.sub(r"[^\w.:]", "", re.sub(r"\x1b\[[0-9;]*m", "", output))
    assert re.sub(r"\s", "", answer(words)) in letters, output[-4000:]


async def records(world: Served) -> list[dict[str, Any]]:
    """Returns the decision records that have ended, oldest first."""
    found: list[dict[str, Any]] = await world.page("/debug/decisions?limit=100")
    return [record for record in reversed(found) if record.get("outcome")]


async def counter(engines: Sequence[VllmEngine], world: Served, name: str) -> dict[str, float]:
    """Returns a counter of vLLM by engine; dead engines are left out."""
    found = {}
    for engine in engines:
        with contextlib.suppress(OSError):
            async with world.session.get(f"{engine.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            found[engine.name] = sum(
                float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}_total{{")
            )
    return found


@pytest.mark.parametrize("name", NAMES)
async def test_two_turns_with_a_tool_call(vllm_engines: Start, name: str, tmp_path: Path) -> None:
    """The second turn continues on the engine of the first; predicted equals reported hits."""
    engines = vllm_engines(2, **flags(words := 20, reasoning="The file has the reason."))
    async with served(engines) as world:
        it = Client(name, tmp_path / "home", world.url)
        await it.prepare()
        hits = await counter(engines, world, "prefix_cache_hits")
        says(await it.turn(0), words)
        first = await records(world)
        assert len(first) == (2 if name in TOOLS else 1), "a client with tools sends a tool's result"
        says(await it.turn(1), words)
        second = (await records(world))[len(first) :]
        assert second
        assert len({record["instance"] for record in first + second}) == 1
        after = await counter(engines, world, "prefix_cache_hits")
        for record in first + second:
            print(
                name, *(record.get(n) for n in ("prompt_tokens", "predicted_cached_tokens", "cached_tokens"))
            )
            # Aider may leave after the finish_reason, before the end of the stream.
            assert record["outcome"] == "finished" or (name, record["outcome"]) == ("Aider", "cancelled")
            if name != "Aider":  # it does not ask for usage
                assert record["cached_tokens"] == record["predicted_cached_tokens"]
        predicted = [record["predicted_cached_tokens"] for record in first + second]
        assert sum(predicted) == sum(after.values()) - sum(hits.values())
        assert second[0]["predicted_cached_tokens"] > 0.4 * second[0]["prompt_tokens"]


@pytest.mark.parametrize("name", ["Claude Code", "Codex"])
async def test_turns_at_two_workers(vllm_engines: Start, name: str, tmp_path: Path) -> None:
    """All requests go to one engine, and the second turn finds the cache of the first."""
    engines = vllm_engines(2, **flags(words := 20, reasoning="The file has the reason."))
    async with served(engines, "--set", "workers=2") as world:
        it = Client(name, tmp_path / "home", world.url)
        await it.prepare()
        names = ("request_success", "prefix_cache_hits", "prefix_cache_queries")
        counts = [[await counter(engines, world, each) for each in names]]
        for number in range(2):
            says(await it.turn(number), words)
            counts.append([await counter(engines, world, each) for each in names])
        begin, middle, end = counts
        busy = [engine for engine, requests in begin[0].items() if end[0][engine] > requests]
        assert len(busy) == 1
        requests, hits, tokens = (end[n][busy[0]] - middle[n][busy[0]] for n in range(3))
        assert (requests, hits > 0.9 * tokens) == (1, True), (hits, tokens)


@pytest.mark.parametrize("name", NAMES)
async def test_an_engine_dies_in_an_answer(vllm_engines: Start, name: str, tmp_path: Path) -> None:
    """The client ends without an error, and has the whole answer. It comes after some reasoning."""
    engines = vllm_engines(2, **flags(WORDS, reasoning="The file has the reason."))
    async with served(engines) as world:
        it = Client(name, tmp_path / "home", world.url)
        await it.prepare()
        before = await counter(engines, world, "generation_tokens")
        turn = asyncio.create_task(it.turn(0))
        killed = None
        while killed is None:
            assert not turn.done(), turn.result()
            now = await counter(engines, world, "generation_tokens")
            killed = next((e for e in engines if now[e.name] - before[e.name] > CALL + SEEN), None)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(killed.kill)
        says(await turn, WORDS)
        recovered = await records(world)
        assert (recovered[-1]["instance"] == killed.name) == (name in CONTINUE), recovered
        metrics = await world.page("/metrics")
        found = re.findall(r'^lmetric_stream_failovers_total{.*outcome="(\w+)"} 1.0', metrics, re.MULTILINE)
        assert found == FAILOVERS[name]
