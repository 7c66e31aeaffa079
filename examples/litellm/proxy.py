"""A LiteLLM proxy as a child process, over engines at given addresses."""

import asyncio
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import aiohttp
import yaml

START_SECONDS = 300.0


class Proxy:
    """``async with Proxy(urls, folder) as proxy``. Send requests to `proxy.url` with its `headers`.

    Args:
        engines: base URLs of the engines.
        folder: where the configuration and the log go.
        strategy: LiteLLM's own routing strategy.
        callback: Python file with our `strategy`; None: LiteLLM's own strategy routes.
        env: further environment variables.

    Raises:
        RuntimeError: the proxy did not start; the message ends with its log.
    """

    def __init__(
        self,
        engines: list[str],
        folder: Path,
        *,
        strategy: str = "simple-shuffle",
        callback: Path | None = None,
        model: str = "emulated",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._env, self._callback = folder, dict(env or {}), callback
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self._key = f"sk-{secrets.token_hex(32)}"
        self.headers = {"authorization": f"Bearer {self._key}"}
        self.url = f"http://127.0.0.1:{self._port}"
        self._engines = {f"engine-{n}": url.removeprefix("http://") for n, url in enumerate(engines)}
        self._config = {
            "model_list": [
                {
                    "model_name": model,
                    "litellm_params": {
                        "model": f"hosted_vllm/{model}",
                        "api_base": f"{url}/v1",
                        "api_key": "none",
                    },
                    "model_info": {"id": f"engine-{number}"},
                }
                for number, url in enumerate(engines)
            ],
            "router_settings": {"routing_strategy": strategy, "num_retries": 2},
            "litellm_settings": {"callbacks": f"{callback.stem}.strategy"} if callback else {},
        }

    @property
    def log(self) -> str:
        """The output of the proxy so far."""
        return (self._folder / "proxy.log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Process id of the running proxy."""
        return self._process.pid

    def engine_of(self, answer: aiohttp.ClientResponse) -> str:
        """Address of the engine of an answer, host:port."""
        return self._engines[answer.headers["x-litellm-model-id"]]

    async def __aenter__(self) -> Self:
        if self._callback is not None:
            shutil.copy(self._callback, self._folder)
        config = self._folder / "config.yaml"
        config.write_text(yaml.safe_dump(self._config, sort_keys=False))
        local = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
            "NO_DOCS": "True",
            "LITELLM_MASTER_KEY": self._key,
        }
        self._process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).parent / "litellm"),
            *("--config", str(config), "--host", "127.0.0.1", "--port", str(self._port)),
            env={**os.environ, **local, **self._env},
            stdout=(self._folder / "proxy.log").open("wb"),
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            await self._ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _ready(self) -> None:
        end = asyncio.get_running_loop().time() + START_SECONDS
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{self.url}/health/liveliness") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                if self._process.returncode is not None or asyncio.get_running_loop().time() > end:
                    raise RuntimeError(f"LiteLLM did not start:\n{self.log[-3000:]}")
                await asyncio.sleep(0.2)

    async def _stop(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), 10)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
