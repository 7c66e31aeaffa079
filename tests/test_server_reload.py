"""The server as a process: reloads by signals, and operation without free file descriptors."""

import asyncio
import resource
import signal
from pathlib import Path

import aiohttp
import orjson
import yaml

from server_world import FakeEngine
from test_server_process import Process, engine, router
from waiting import PATIENCE_SECONDS

BODY = {"model": "tiny", "prompt": "a long prompt that will be cached " * 100}


async def logged(process: Process, text: str) -> str:
    """Waits for a line of the log."""
    assert process.process.stderr is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        while line := (await process.process.stderr.readline()).decode():
            process.log.append(line)
            if text in line:
                return line
    raise AssertionError("".join(process.log))


class Site:
    """A configuration file and a key file, which change while a router runs."""

    def __init__(self, folder: Path, fake: FakeEngine) -> None:
        self.keys = folder / "keys.yaml"
        self.config = folder / "config.yaml"
        self.fake = fake

    def write(
        self, keys: dict[str, str], engine_key: str, tenants: list[str], index_bytes: int = 2**28
    ) -> None:
        self.keys.write_text(yaml.safe_dump(keys))
        values = {
            "index_bytes": index_bytes,
            "auth": {"keys_file": str(self.keys)},
            "engines": [{"url": self.fake.url, "name": "e0", "api_key": engine_key}],
            "tenants": {name: {"weight": 2.0} for name in tenants},
        }
        self.config.write_text(yaml.safe_dump(values))


async def status(client: aiohttp.ClientSession, url: str, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    async with client.post(f"{url}/v1/completions", json=BODY, headers=headers) as response:
        await response.read()
        return response.status


async def test_sighup_reloads_keys_tenants_and_engine_keys(tmp_path: Path) -> None:
    """Reliability M3: SIGHUP once ended the router, and a leaked key required a restart."""
    async with engine() as fake, aiohttp.ClientSession() as client:
        site = Site(tmp_path, fake)
        site.write({"sk-old": "one", "sk-same": "two"}, "engine-old", ["one"])
        async with router("--config", str(site.config)) as r:
            await r.listening()
            assert await status(client, r.url, "sk-old") == 200
            assert fake.requests[-1].headers["authorization"] == "Bearer engine-old"
            site.write({"sk-new": "one", "sk-same": "two"}, "engine-new", ["one", "two"], index_bytes=2**29)
            r.process.send_signal(signal.SIGHUP)
            line = orjson.loads(await logged(r, "configuration reloaded"))
            assert (line["keys_added"], line["keys_removed"]) == (1, 1)
            assert (line["tenants_changed"], line["engine_keys_changed"]) == (["two"], ["e0"])
            assert orjson.loads(await logged(r, "only with a restart"))["settings"] == ["index_bytes"]
            answers = [await status(client, r.url, key) for key in ("sk-old", "sk-same", "sk-new")]
            assert answers == [401, 200, 200]
            assert fake.requests[-1].headers["authorization"] == "Bearer engine-new"
            # An unreadable configuration changes nothing.
            site.keys.write_text("- not\n- a mapping\n")
            r.process.send_signal(signal.SIGHUP)
            assert "sk-" not in await logged(r, "cannot reload the configuration")
            site.config.write_text("port: [")
            r.process.send_signal(signal.SIGHUP)
            await logged(r, "cannot reload the configuration")
            # A writer without room on the disk leaves an empty file. It once turned off the keys.
            site.config.write_text("")
            r.process.send_signal(signal.SIGHUP)
            assert "the file is empty" in await logged(r, "cannot reload the configuration")
            answers = [await status(client, r.url, key) for key in ("none", "sk-old", "sk-new")]
            assert answers == [401, 401, 200]
            assert "sk-" not in "".join(r.log)


async def test_other_signals_are_ignored() -> None:
    """Reliability M3: SIGUSR1 and SIGUSR2 once ended the router."""
    async with engine() as fake, router("--engine", fake.url) as r, aiohttp.ClientSession() as client:
        await r.listening()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            r.process.send_signal(number)
            assert number.name in await logged(r, "signal ignored")
            assert await status(client, r.url, "none") == 200


async def test_without_file_descriptors_no_engine_is_taken_for_dead() -> None:
    """Reliability M1, Server 7.1: without free file descriptors, the router keeps its engines.

    It answers 503, keeps the known caches, and serves again as soon as it can.
    """
    flags = ("--set", "health.interval=0.1", "--set", "limits.idle_seconds=0.05", "--policy", "lmetric")
    async with engine() as fake, router("--engine", fake.url, *flags) as r:
        await r.listening(60)
        asker = await asyncio.open_connection("127.0.0.1", int(r.url.rsplit(":", 1)[1]))
        assert (await post(asker))[0] == 200
        process = r.process.pid
        before = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (FEW_FILES, before[1]))
        assert "Too many open files" in await logged(r, "the router lacks resources")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (got := await post(asker))[0] == 200:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.2)  # the connection of the last request is still open
        assert (got[0], got[1]["error"]["code"]) == (503, "resources")
        resource.prlimit(process, resource.RLIMIT_NOFILE, before)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (got := await post(asker))[0] != 200:
                assert got[0] == 503
                await asyncio.sleep(0.1)
        metrics = (await get(asker, "/metrics")).decode()
        (line,) = [x for x in metrics.splitlines() if x.startswith("lmetric_predicted_cached_tokens_total")]
        assert float(line.rpartition(" ")[2]) > 500
        r.process.send_signal(signal.SIGTERM)
        assert await r.ended() == 0
        assert "engine down" not in "".join(r.log)
        assert "kind=unknown" not in "".join(r.log)


# Emulates a limit on open files: higher descriptors stay open, lower ones are taken, so no file can
# be opened.
FEW_FILES = 6

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def post(client: Client) -> tuple[int, dict[str, dict[str, str]]]:
    """Returns status and answer, on a connection that stays open."""
    body = orjson.dumps(BODY)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    client[1].write(head + body)
    status, answer = await received(client)
    return status, orjson.loads(answer)


async def get(client: Client, path: str) -> bytes:
    client[1].write(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())
    return (await received(client))[1]


async def received(client: Client) -> tuple[int, bytes]:
    head = (await client[0].readuntil(b"\r\n\r\n")).decode().lower()
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
    return int(head.split(" ")[1]), await client[0].readexactly(int(fields["content-length"]))
