"""Tokenizers from the Hugging Face Hub: cache, downloads, failures, and what is not downloaded."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_world import TOKEN, WEIGHTS, Hub, commit_of, hub_world
from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor import Target, examine
from lmetric.tokens.download import HubError, download, fetch
from lmetric.tokens.hub import FILES, cached, configured_folder, find_folder, is_hub_id
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated import EngineOptions, app
from lmetric_lab.emulated.server import EngineServer
from lmetric_lab.emulated.text import TOKENIZER_PATH
from token_folders import CHATML, byte_level, write_folder

NAME = "owner/name"


@pytest.fixture
async def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    async with hub_world(tmp_path / "cache", monkeypatch) as hub:
        hub.add(NAME, write_folder(tmp_path / "model", byte_level(), CHATML))
        yield hub


async def here(repository: str, revision: str | None = None) -> Path:
    """Downloads like `fetch`, in this process."""
    return await asyncio.to_thread(download, repository, revision)


async def test_a_download_has_the_tokenizers_files_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.private.add(NAME)
    assert find_folder(NAME) is None
    folder = await fetch(NAME)
    assert (
        PromptTokenizer.load(folder).completion("the router").tolist()
        == byte_level().encode("the router").ids
    )
    published = set(hub.repositories[NAME]["main"])
    assert hub.files == published - {WEIGHTS} <= set(FILES)
    assert {token for _, token in hub.requests} == {f"Bearer {TOKEN}"}
    # Next time, the cache has it, and nothing is asked.
    asked = len(hub.requests)
    assert folder == find_folder(NAME) == configured_folder(NAME)
    assert len(hub.requests) == asked


async def test_a_revision(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, write_folder(tmp_path / "v2", byte_level(), "{{ bos_token }}"), "v2")
    for revision in ("v2", commit_of("v2")):
        folder = await here(NAME, revision)
        assert (folder.name, folder) == (commit_of("v2"), cached(NAME, revision))
    assert cached(NAME) is None, "another revision is not main"
    with pytest.raises(HubError, match=r"owner/name, revision v3: the repository .* has no such revision"):
        await here(NAME, "v3")


async def test_why_a_download_fails(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        HubError, match=r"no such folder, and no such repository on 127.0.0.1; check the name"
    ):
        await here("owner/other")
    hub.gated.add(NAME)
    with pytest.raises(
        HubError, match=r"access to the repository is restricted; accept its license .* HF_TOKEN"
    ):
        await here(NAME)
    hub.gated.clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.down = True
    with pytest.raises(HubError, match="503") as failed:
        await here(NAME)
    assert TOKEN not in str(failed.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"not in the Hugging Face cache .*, and HF_HUB_OFFLINE is set"):
        await here(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # A password in the address of a mirror, and nothing there.
    monkeypatch.setattr(constants, "ENDPOINT", f"http://me:{TOKEN}@127.0.0.1:9")
    with pytest.raises(HubError, match=r"cannot reach 127.0.0.1: ConnectError") as failed:
        await here(NAME)
    assert TOKEN not in str(failed.value)
    hub.down = False
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(HubError, match="set HF_HOME to a folder that the router can write"):
        await here(NAME)


async def test_a_download_that_hangs_ends_and_blocks_nothing(hub: Hub) -> None:
    hub.hangs = True
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    ticks = asyncio.create_task(tick())
    with pytest.raises(HubError, match="the download did not end within 3 s"):
        await fetch(NAME, seconds=3)
    assert turns > 10, "the event loop went on"
    ticks.cancel()
    # Canceled: nothing is left running, either.
    task = asyncio.create_task(fetch(NAME))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cache_without_all_files_does_not_count(hub: Hub) -> None:
    folder = await here(NAME)
    (folder / "tokenizer_config.json").unlink()
    assert cached(NAME) is None
    assert (await here(NAME) / "tokenizer_config.json").exists()


def test_names_of_repositories() -> None:
    for name in ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "a/b"):
        assert is_hub_id(name)
    for name in (
        "",
        "gpt2",
        "/models/x",
        "./a/b",
        "a/b/c",
        "../x",
        "a/..",
        "a /b",
        "a/b\n",
        "a/b@main",
        "~/a",
    ):
        assert not is_hub_id(name), name


def test_a_folder_comes_before_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert configured_folder(NAME) is None
    Path(NAME).mkdir(parents=True)
    assert configured_folder(NAME) == Path(NAME)
    assert configured_folder("/nowhere") == Path("/nowhere")


async def test_doctor_downloads_what_the_operator_names(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories.clear()
    hub.add(NAME, TOKENIZER_PATH.parent)
    monkeypatch.setattr(app, "TOKENIZER_PATH", Path(NAME, "tokenizer.json"))  # reported as root
    cases: tuple[tuple[dict[str, object], str, str], ...] = (
        ({}, "not offered", f"set tokenizer to it.* tokenizer: {NAME} in the configuration"),
        ({"tokenizer": NAME, "tokenizer_download": False}, "not offered", "tokenizer_download is off"),
        ({"tokenizer": "owner/gone"}, "fail", "no such repository on 127.0.0.1"),
        ({"tokenizer_download": "any"}, "pass", "hub/models--owner--name"),
    )
    async with EngineServer(EngineOptions(port=0, clock_speed=20)) as engine:
        for settings, outcome, text in cases:
            target = Target(EngineConfig(url=engine.url), None, PoolSettings.model_validate(settings))
            (found,) = await examine([target])
            verdict = found.verdicts["tokenizer"]
            assert verdict.outcome == outcome, verdict
            assert re.search(text, f"{verdict.seen} {verdict.remedy}"), verdict
            assert outcome != "not offered" or hub.requests == []
