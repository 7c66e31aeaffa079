"""The Compose file: its commands and files run as processes, with other addresses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

import chart_world
from lmetric.config import load_config
from lmetric_lab.ports import free_ports
from test_docs import GROUP
from test_monitoring import known, program

ROOT = Path(__file__).parent.parent
COMPOSE = ROOT / "deploy" / "compose"
ADDRESS = re.compile(r"\b([a-z]+-\d):(?:8000|8080)\b")  # of an engine and of a router


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


def mounts(service: str) -> dict[str, Path]:
    """Returns the mounted files of the repository, by their paths in the container."""
    pairs = (text.split(":") for text in services()[service]["volumes"])
    return {pair[1]: (COMPOSE / pair[0]).resolve() for pair in pairs if pair[0].startswith(".")}


def test_the_parser_of_docker_compose_accepts_the_file() -> None:
    command = [chart_world.tool("cmd"), "-format", "json", "compose.yaml"]
    done = subprocess.run(command, cwd=COMPOSE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    project = json.loads(done.stdout)
    assert project["services"].keys() == services().keys()
    for service in project["services"].values():
        for volume in service.get("volumes", ()):
            assert volume["type"] == "volume" or Path(volume["source"]).is_file(), volume
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1"


def test_the_image_is_one_version() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    images = {service["image"] for name, service in services().items() if name[-1].isdigit()}
    assert images == {f"lmetric-router:{version}"}


def test_each_file_is_where_the_programs_look() -> None:
    """Mounted paths are those in commands, Prometheus's rule_files and Grafana's providers."""
    assert [name.split("-")[0] for name in services()].count("engine") == 4
    for name in ("router-1", "router-2"):
        command = services()[name]["command"]
        assert command[command.index("--config") + 1] in mounts(name)
        assert services()[name]["tmpfs"] == ["/tmp"], "workers exchange over sockets"
    prometheus = mounts("prometheus")
    (config,) = (text.split("=")[1] for text in services()["prometheus"]["command"] if "config.file" in text)
    rules = yaml.safe_load(prometheus[config].read_text())["rule_files"]
    assert {str(Path(config).parent / rule) for rule in rules} <= prometheus.keys()
    grafana = mounts("grafana")
    (provider,) = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in grafana
    assert home.startswith(provider["options"]["path"] + "/")
    (source,) = yaml.safe_load((COMPOSE / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_the_commands_parse_and_the_routers_know_all_engines() -> None:
    names = [name for name in services() if name.startswith(("engine", "router"))]
    for name in names:
        command, *words = services()[name]["command"]
        GROUP.commands[command].make_context(command, words)
    config = load_config(COMPOSE / "router.yaml", environ={"LMETRIC__REPLICAS__TOKEN": "token"})
    urls = {engine.url for engine in config.engines} | set(config.replicas.urls)
    assert urls == {f"http://{name}:{8000 if 'engine' in name else 8080}" for name in names}


@dataclass
class Stack:
    """The running services."""

    client: aiohttp.ClientSession
    ports: dict[str, int]
    folder: Path

    def here(self, text: str) -> str:
        """Replaces the services' names by addresses of this machine."""
        return ADDRESS.sub(lambda found: f"127.0.0.1:{self.ports[found[1]]}", text)

    async def text(self, service: str, path: str) -> str:
        try:
            url = f"http://127.0.0.1:{self.ports[service]}{path}"
            async with self.client.get(url) as response:
                return await response.text() if response.status == 200 else ""
        except aiohttp.ClientConnectionError:
            return ""


async def until(true: Callable[[], Awaitable[bool]], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < deadline, "did not come true"
        await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def started(folder: Path) -> AsyncIterator[Stack]:
    """Runs the engines and the routers with the commands and the files of the Compose file."""
    names = [name for name in services() if name.startswith(("engine", "router"))]
    async with aiohttp.ClientSession() as client:
        stack = Stack(client, dict(zip(names, free_ports(len(names)), strict=True)), folder)
        (folder / "router.yaml").write_text(stack.here((COMPOSE / "router.yaml").read_text()))
        processes, log = [], (folder / "log").open("wb")
        try:
            for name in names:
                service = services()[name]
                port = str(stack.ports[name])
                places = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1", "8000": port, "8080": port}
                places["/etc/lmetric/router.yaml"] = "router.yaml"
                command = [places.get(word, word) for word in service["command"]]
                pairs = service.get("environment", {}).items()
                environ = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for key, value in pairs}
                processes.append(
                    await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "lmetric.cli", *command),
                        cwd=folder,
                        env={**os.environ, **environ},
                        stdout=log,
                        stderr=log,
                    )
                )

            async def ready() -> bool:
                dead = [process.returncode for process in processes if process.returncode is not None]
                assert not dead, (folder / "log").read_text()
                return all([await stack.text(name, "/ready") for name in names if "router" in name])

            await until(ready)
            yield stack
        finally:
            for process in processes:
                if process.returncode is None:
                    process.terminate()
            await asyncio.gather(*(process.wait() for process in processes))
            log.close()


async def complete(stack: Stack, router: str, prompt: str) -> str:
    body = {"model": "emulated", "prompt": prompt, "max_tokens": 2}
    url = f"http://127.0.0.1:{stack.ports[router]}/v1/completions"
    async with stack.client.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["object"])


@pytest.mark.nightly
async def test_two_routers_share_four_engines(tmp_path: Path) -> None:
    """Both routers serve requests, use all engines, and know each other's load."""
    async with started(tmp_path) as stack:
        for number in range(16):
            assert (
                await complete(stack, f"router-{number % 2 + 1}", f"{number} {'word ' * 40}")
                == "text_completion"
            )
        engines = {f"127.0.0.1:{stack.ports[f'engine-{each}']}" for each in range(1, 5)}

        async def uses_all(router: str) -> bool:
            metrics = await stack.text(router, "/metrics")
            found = re.findall(r'lmetric_instance_healthy\{instance="([^"]*)".*\} 1\.0', metrics)
            return set(found) == engines

        async def knows_the_other(router: str) -> bool:
            return "lmetric_replicas 1.0" in await stack.text(router, "/metrics")

        # Not both at once: a busy machine may delay the messages between routers beyond 2 s, when
        # they lapse, and answers of engines beyond their time limit.
        for router in ("router-1", "router-2"):
            await until(partial(uses_all, router))
            await until(partial(knows_the_other, router))


@pytest.mark.nightly
async def test_prometheus_reads_routers_and_engines(tmp_path: Path) -> None:
    """Prometheus runs with the file of the Compose file: all targets are up, all rules load."""
    prometheus, port = program("prometheus"), free_ports(1)[0]
    async with started(tmp_path) as stack:
        stack.ports["prometheus"] = port
        files = mounts("prometheus")
        (tmp_path / "rules.yaml").write_text(files["/etc/prometheus/rules.yaml"].read_text())
        text = stack.here(files["/etc/prometheus/prometheus.yaml"].read_text())
        (tmp_path / "prometheus.yaml").write_text(text)
        places = {"/etc/prometheus": str(tmp_path), "/prometheus": str(tmp_path / "data")}
        command = [
            re.sub("=(/etc/prometheus|/prometheus)", lambda found: "=" + places[found[1]], word)
            for word in services()["prometheus"]["command"]
        ]
        process = await asyncio.create_subprocess_exec(
            *(prometheus, *command, f"--web.listen-address=127.0.0.1:{port}"),
            stdout=(log := (tmp_path / "prometheus.log").open("wb")),
            stderr=log,
        )
        try:

            async def scraped() -> bool:
                assert process.returncode is None, (tmp_path / "prometheus.log").read_text()
                answer = await stack.text("prometheus", "/api/v1/query?query=up==1")
                return bool(answer) and len(json.loads(answer)["data"]["result"]) == 6

            await until(scraped)
            groups = json.loads(await stack.text("prometheus", "/api/v1/rules"))["data"]["groups"]
            assert sum(len(group["rules"]) for group in groups) > 30
            assert "lmetric_replicas" in known()
        finally:
            process.terminate()
            await process.wait()
            log.close()
