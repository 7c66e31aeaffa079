"""Commands whose standard streams are closed at their start, and servers whose log is rotated."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from cli_world import COMMAND
from waiting import PATIENCE_SECONDS, until

CLOSED = "standard output is closed; open it, or redirect it to a file or /dev/null"


def run(command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line of a shell, in which `$ROUTER` is the command."""
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=os.environ | {"ROUTER": " ".join(COMMAND)},
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def opened_by(pid: int) -> list[str]:
    """The files of a process's standard streams."""
    return [os.readlink(f"/proc/{pid}/fd/{descriptor}") for descriptor in range(3)]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.asynccontextmanager
async def serving(
    folder: Path, workers: int, closed: tuple[int, ...] = ()
) -> AsyncIterator[tuple[asyncio.subprocess.Process, aiohttp.ClientSession]]:
    """A server with these streams closed; the others are the file `output` of the folder."""
    path, output = folder / "router.sock", folder / "output"
    flags = ["--engine", "http://127.0.0.1:9", "--host", f"unix:{path}", "--workers", str(workers)]

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    with output.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "serve", *flags, "--set", "log.access=true"),
            stdin=file,
            stdout=file,
            stderr=file,
            preexec_fn=close,
        )
    status = None
    try:
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client:
            while status != 200:
                assert process.returncode is None, output.read_text()
                await asyncio.sleep(0.05)
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get("http://localhost/ui") as answer:
                        status = answer.status
            yield process, client
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("closed", [(2,), (0, 1), (0, 1, 2)])
async def test_no_socket_of_a_server_becomes_its_log(
    tmp_path: Path, workers: int, closed: tuple[int, ...]
) -> None:
    async with serving(tmp_path, workers, closed) as (process, _):
        for pid in (process.pid, *(children(process.pid) if workers > 1 else ())):
            opened = ["/dev/null" if each in closed else str(tmp_path / "output") for each in range(3)]
            assert opened_by(pid) == opened


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_log_that_is_truncated_goes_on_at_its_begin(tmp_path: Path, workers: int) -> None:
    """As by `copytruncate` of logrotate, for a log that the shell opened with `2>`."""
    output = tmp_path / "output"
    async with serving(tmp_path, workers) as (_, client):
        await until(lambda: b"listens on" in output.read_bytes())
        os.truncate(output, 0)
        body = {"model": "tiny", "prompt": "a"}
        async with client.post("http://localhost/v1/completions", json=body) as answer:
            assert answer.status == 503
        await until(lambda: b"status=503" in output.read_bytes())
        assert b"\0" not in output.read_bytes()


@pytest.mark.parametrize("words", ["policies", "policies --json", "--version", "simulate --help", "engine"])
def test_data_that_cannot_be_written_is_a_failure(words: str) -> None:
    done = run(f"$ROUTER {words} >&-")
    assert (done.returncode, done.stderr) == (1, f"lmetric-router: {CLOSED}\n")


def test_a_message_without_standard_error_is_no_data() -> None:
    done = run("$ROUTER policies --no-such-option 2>&-")
    assert (done.returncode, done.stdout) == (2, "")
    done = run(f"{sys.executable} -m lmetric_lab.emulated --no-such-option 2>&-")
    assert (done.returncode, done.stdout) == (2, "")
