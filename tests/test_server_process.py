"""The server as a process: start, drain on SIGTERM, exit codes."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import orjson
import pytest

from cli_world import call
from server_world import STREAM_HEAD, STREAM_TAIL, FakeEngine, chunk, hang, says, token
from waiting import PATIENCE_SECONDS

RUN = (
    "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', 'serve', *sys.argv[1:]]; main()"
)

# A router whose constants of options can be set, as in `constants.constant_options`.
RUN_TUNED = f"from lmetric_lab.tuned import accept_constants; accept_constants(); {RUN}"

# Such a router that splits every request at a fraction: servers refuse this planner in
# configurations.
RUN_FORCED = f"from lmetric import option_values; del option_values._STUDIED['force']; {RUN_TUNED}"


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""

    async def listening(self, seconds: float = PATIENCE_SECONDS) -> None:
        assert self.process.stderr is not None
        async with asyncio.timeout(seconds):
            while line := (await self.process.stderr.readline()).decode():
                self.log.append(line)
                if '"listening"' in line:
                    self.url = orjson.loads(line)["url"]
                    return
        raise AssertionError("".join(self.log))

    async def ended(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            self.log.append((await self.process.stderr.read()).decode())
            return await self.process.wait()


@contextlib.asynccontextmanager
async def router(
    *flags: str,
    preset: Callable[[], None] | None = None,
    environ: Mapping[str, str] | None = None,
    run: str = RUN,
) -> AsyncIterator[Process]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", run, "--log-json", "--port", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**inherited, **(environ or {})},
        preexec_fn=preset,
    )
    try:
        yield Process(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def engine(**values: Any) -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(**values)
    await fake.start()
    try:
        yield fake
    finally:
        await fake.stop()


BODY = {"model": "tiny", "prompt": "a", "stream": True}


async def test_sigterm_lets_streams_finish_and_refuses_new_requests() -> None:
    gate = asyncio.Event()

    async def gated(_: FakeEngine, __: object, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD + chunk(token("a")))
        await gate.wait()
        writer.write(chunk(token("b", "stop")) + STREAM_TAIL)
        return True

    async with (
        engine(behave=gated) as fake,
        router("--engine", fake.url) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()
        async with client.get(r.url + "/ready") as idle:
            assert idle.status == 200
        stream = await client.post(r.url + "/v1/completions", json=BODY)
        assert await stream.content.readany() == token("a")
        # Connections that stay open, for requests after the signal.
        port = int(r.url.rsplit(":", 1)[1])
        kept = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in kept:
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        r.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        body = orjson.dumps(BODY)
        post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        for (reader, writer), request in zip(
            kept, (b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n", post), strict=True
        ):
            writer.write(request)
            answer = (await reader.read()).lower()
            assert b" 503 " in answer
            assert b"connection: close" in answer
            assert b"retry-after: " in answer
            assert b"shutting down" in answer
            writer.close()
        # New connections see that the router is not ready, and every request gets an answer.
        async with aiohttp.ClientSession() as newcomer:
            async with newcomer.get(r.url + "/ready") as red:
                assert red.status == 503
            async with newcomer.post(r.url + "/v1/completions", json=BODY) as refused:
                assert refused.status == 503
        gate.set()
        rest = await stream.read()
        assert rest.endswith(b"[DONE]\n\n")
        assert b"error" not in rest
        assert await r.ended() == 0


async def test_streams_that_outlast_the_deadline_end_with_an_error() -> None:
    behave = says(STREAM_HEAD, chunk(token("a")), then="hang")
    flags = ("--set", "timeouts.drain=0.3")
    async with (
        engine(behave=behave) as fake,
        router("--engine", fake.url, *flags) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()
        stream = await client.post(r.url + "/v1/completions", json=BODY)
        plain = asyncio.create_task(client.post(r.url + "/v1/completions", json=BODY | {"stream": False}))
        assert await stream.content.readany() == token("a")
        await fake.asked(2)
        r.process.send_signal(signal.SIGTERM)
        rest = await stream.read()
        assert b"shutting down" in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert (await plain).status in (200, 503)
        assert await r.ended() == 0


async def test_ctrl_c_twice_hurries() -> None:
    async with (
        engine(behave=hang) as fake,
        router("--engine", fake.url) as r,
        aiohttp.ClientSession() as client,
    ):
        await r.listening()
        waiting = asyncio.create_task(client.post(r.url + "/v1/completions", json=BODY))
        await fake.asked(1)
        r.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert r.process.returncode is None, "drains"
        r.process.send_signal(signal.SIGINT)
        assert (await waiting).status == 503
        assert await r.ended() == 130
        assert "Traceback" not in "".join(r.log)


async def test_a_port_in_use() -> None:
    """UX C7: a port in use was found only after the start and check of the engines."""
    async with engine() as fake, engine() as other:
        for flags in (("--engine", fake.url), ("--embedded", "2")):
            async with router(*flags, "--port", str(other.port)) as r:
                assert await r.ended() == 3
                said = "".join(r.log)
                address = f"127.0.0.1:{other.port}"
                assert said == (
                    f"lmetric-router: cannot listen on {address}: Address already in use; "
                    "stop the process that uses the port, or set another --port\n"
                )
        assert fake.connections == other.connections == 0


async def test_a_wrong_configuration_ends_the_process() -> None:
    async with router() as r:
        code = await r.ended()
        said = "".join(r.log)
        assert code == 2, said
        assert "no engines: set --engine URL" in said
        assert "Traceback" not in said


def test_wrong_configurations() -> None:
    for flags, says_so in (
        (("--engine", "http://127.0.0.1:1", "--policy", "lmetrik"), "lmetric"),
        (("--engine", "http://127.0.0.1:1", "--policy", "p_token * (bsx + 1)"), "bsx"),
        (("--engine", "http://127.0.0.1:1/v1"), "leave out the /v1"),
        (("--config", "/nowhere.yaml"), "/nowhere.yaml: cannot be read"),
    ):
        done = call("serve", "--port", "0", *flags)
        assert done.returncode == 2, done.stderr
        assert says_so in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.nightly
async def test_a_full_pipe_of_the_log_stops_nothing() -> None:
    """Security F8: with `log.access`, a stuck reader of stderr once stopped all requests."""
    read, write = os.pipe()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LMETRIC_")}
    async with engine() as fake:
        flags = ("--log-json", "--port", "0", "--set", "log.access=true", "--engine", fake.url)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RUN, *flags, stderr=write, env=environ
        )
        os.close(write)
        try:
            log = ""
            while '"listening"' not in log:
                log += (await asyncio.to_thread(os.read, read, 65536)).decode()
            url = next(orjson.loads(line)["url"] for line in log.splitlines() if '"listening"' in line)
            headers = {"x-request-id": "x" * 256}  # so that fewer lines fill the pipe and the queue

            async def ask() -> None:
                for _ in range(60):
                    async with client.post(
                        f"{url}/v1/completions", json={"model": "none", "prompt": "a"}, headers=headers
                    ) as got:
                        assert got.status == 404

            async with aiohttp.ClientSession() as client:
                await asyncio.gather(*(ask() for _ in range(50)))
                async with client.get(f"{url}/metrics") as answer:
                    metrics = await answer.text()
            dropped = next(
                line for line in metrics.splitlines() if line.startswith("lmetric_log_lines_dropped_total")
            )
            assert float(dropped.split()[1]) > 0
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):  # the last lines are waited for only shortly
                assert await process.wait() == 0
        finally:
            os.close(read)
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_running_server_loads_no_module_of_the_laboratory(tmp_path: Any) -> None:
    told = (
        "import atexit, sys\n"
        "def tell(): print('loaded:', *(m for m in sys.modules if 'lmetric_lab' in m), file=sys.stderr)\n"
        f"atexit.register(tell)\n{RUN}"
    )
    flags = ("--embedded", "1", "--records", str(tmp_path), "--set", "shadow.policy=lmetric")
    async with router(*flags, run=told) as r, aiohttp.ClientSession() as client:
        await r.listening()
        async with client.post(r.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}) as answer:
            assert answer.status == 200
            await answer.read()
        r.process.send_signal(signal.SIGTERM)
        assert await r.ended() == 0
        (line,) = [line for line in r.log[-1].splitlines() if line.startswith("loaded:")]
        assert line == "loaded:"
