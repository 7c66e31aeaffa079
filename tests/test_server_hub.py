"""The server with tokenizers from the Hugging Face Hub."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs

from hub_world import TOKEN, Hub, hub_world
from lmetric.config import ServerConfig
from lmetric.server import Server
from lmetric.server.background import downloads
from lmetric.server.fleet.fleet import Fleet
from lmetric.tokens.errors import TokenizerError
from lmetric_lab.emulated.options import EngineOptions
from lmetric_lab.emulated.server import EngineServer
from lmetric_lab.emulated.text import TOKENIZER_PATH
from server_world import World, world
from waiting import until

NAME = "owner/name"
SECONDS = 60.0  # for child processes on a busy machine


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    async with hub_world(tmp_path / "cache", monkeypatch) as hub:
        hub.add(NAME, TOKENIZER_PATH.parent)
        yield hub


async def page(w: World) -> dict[str, Any]:
    (engine,) = orjson.loads((await w.get("/debug/engines"))[1])
    return dict(engine)


async def test_a_failed_download_is_repeated_and_leads_to_exact(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0.2)
    hub.down = True
    options = EngineOptions(port=0, kv_events=True, kv_events_endpoint=f"ipc://{tmp_path}/events")
    with capture_logs() as logs:
        async with EngineServer(options) as engine:
            engines, health = [{"url": engine.url, "name": "e0"}], {"interval": 0.1}
            async with world(0, engines=engines, health=health, tokenizer=NAME) as w:
                (model,) = w.server.fleet.models
                assert "owner/name is not downloaded yet" in str(model.tokenizers.note)
                assert (await page(w))["mode"] == "approximate"
                await until(lambda: "next try in" in str(model.tokenizers.note), SECONDS)
                assert "503" in str(model.tokenizers.note)
                assert model.tokenizers.current is None
                hub.down = False
                await until(lambda: model.tokenizers.current is not None, SECONDS)
                deadline = asyncio.get_running_loop().time() + SECONDS
                while (found := await page(w))["mode"] != "exact" or not found["tokenizer"]["compared"]:
                    assert asyncio.get_running_loop().time() < deadline, found
                    await asyncio.sleep(0.05)
                assert found["tokenizer"]["differs"] is None
    warned = [log for log in logs if log["log_level"] == "warning" and "503" in str(log.get("reason"))]
    assert warned
    assert TOKEN not in str(logs)


@pytest.mark.parametrize("allowed", ["off", "configured", "any"])
async def test_what_an_engine_names_is_downloaded_only_if_the_operator_allows_it(
    hub: Hub, allowed: str
) -> None:
    async with world(1, tokenizer_download=allowed) as w:
        (model,) = w.server.fleet.models
        await model.tokenizers.follow(NAME)
        if allowed == "any":
            await until(lambda: model.tokenizers.current is not None, SECONDS)
            assert model.tokenizers.wanted is None
        else:
            assert model.tokenizers.wanted is None
            assert "the engine's model owner/name: not in the Hugging Face cache" in str(
                model.tokenizers.note
            )
            await asyncio.sleep(1.5)  # longer than the period of the downloads
            assert hub.requests == []
        await model.tokenizers.follow("not a repository")


async def test_a_configured_repository_that_must_not_be_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": "tiny", "engines": [{"url": "http://127.0.0.1:9"}], "tokenizer": NAME}
    with pytest.raises(TokenizerError, match=r"owner/name: not in the .*, and tokenizer_download is off"):
        Server(ServerConfig.model_validate({**config, "tokenizer_download": False})).fleet.build()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerError, match="and HF_HUB_OFFLINE is set"):
        Server(ServerConfig.model_validate(config)).fleet.build()


async def test_the_server_stops_while_a_download_hangs(hub: Hub) -> None:
    hub.hangs = True
    async with world(1, tokenizer=NAME) as w:
        await until(lambda: hub.requests, SECONDS)
        assert (await w.post({"model": "tiny", "prompt": "x"}))[0] == 200


async def test_a_tokenizer_that_breaks_after_the_start_stops_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that the first engine makes loads the tokenizer again; then the folder is gone."""
    folder = tmp_path / "model"
    shutil.copytree(TOKENIZER_PATH.parent, folder)
    options = EngineOptions(port=0, kv_events=True, kv_events_endpoint=f"ipc://{tmp_path}/events")
    async with EngineServer(options) as engine:
        config = {"engines": [{"url": engine.url, "name": "e0"}], "tokenizer": str(folder), "port": 0}
        build = Fleet.build

        def and_break(fleet: Fleet) -> None:
            build(fleet)
            shutil.rmtree(folder)

        monkeypatch.setattr(Fleet, "build", and_break)
        server = Server(ServerConfig.model_validate(config))
        await server.start()
        try:
            (model,) = server.fleet.models
            (found,) = model.engines.values()
            assert found.healthy
            assert "model: no such folder" in str(model.tokenizers.note)
            assert found.mode.name == "approximate"
        finally:
            await server.stop()
