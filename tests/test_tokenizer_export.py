"""`lmetric-router tokenizer`: exports of tokenizers as the engines' library loads them."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cli_world import call, process
from hub_world import commit_of, hub_world
from lmetric.config import EngineConfig, PoolSettings
from lmetric.doctor import Target, examine
from lmetric.tokens.errors import TokenizerError
from lmetric.tokens.prompt import PromptTokenizer
from lmetric_lab.emulated import EngineOptions
from lmetric_lab.emulated.server import EngineServer
from lmetric_lab.emulated.text import TOKENIZER_PATH
from token_folders import CHATML, INST, byte_level, metaspace, write_folder

TEXT = "the router sends  12345 to 日本語"
RUN = "import sys; from lmetric.cli import main; sys.argv = ['lmetric-router', *sys.argv[1:]]; main()"


WITHOUT = "import sys; sys.modules['transformers'] = None; "
LOAD = (
    "from lmetric.tokens.prompt import PromptTokenizer; folder, text = sys.argv[1:]; "
    "print(PromptTokenizer.load(folder).completion(text).tolist())"
)


def python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Exports in this process, which has transformers: a new one takes seconds to import it."""
    return call("tokenizer", *map(str, words))


def exported(model: Path, out: Path) -> dict[str, Any]:
    done = run(model, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tokenizer: {out}\n"
    return dict(json.loads((out / "lmetric_tokenizer.json").read_text()))


def model(folder: Path, tokenizer: Tokenizer, template: str, model_type: str, **config: Any) -> Path:
    """A folder with a model type, for which transformers has a tokenizer class."""
    write_folder(folder, tokenizer, template, **config)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def test_a_tokenizer_that_the_engines_library_rebuilds(tmp_path: Path) -> None:
    """transformers gives Qwen2 a regular expression that this file does not have."""
    folder, out = model(tmp_path / "m", byte_level(), CHATML, "qwen2"), tmp_path / "out" / "deep"
    about = exported(folder, out)
    assert about["tokenizer_class"] == "Qwen2Tokenizer"
    assert about["model"] == str(folder)
    ours, raw = PromptTokenizer.load(out), PromptTokenizer.load(folder)
    assert ours.exported_with == f"transformers {about['transformers']}"
    assert raw.exported_with is None
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.completion(TEXT).tolist() == theirs.encode(TEXT)
    assert raw.completion(TEXT).tolist() != theirs.encode(TEXT)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat({"messages": messages}).tolist() == chat
    loaded = python(WITHOUT + LOAD, out, TEXT)
    assert json.loads(loaded.stdout) == theirs.encode(TEXT), loaded.stderr
    # Again, over the old export; then the file is damaged.
    template = (out / "chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text("old")
    exported(folder, out)
    assert (out / "chat_template.jinja").read_text() == template
    content = (out / "tokenizer.json").read_bytes()
    (out / "tokenizer.json").write_bytes(content.replace(b"NFC", b"NFD"))
    with pytest.raises(TokenizerError, match=r"tokenizer.json has changed since the export; export it again"):
        PromptTokenizer.load(out)
    (out / "lmetric_tokenizer.json").write_text(json.dumps(about | {"format": 2}))
    with pytest.raises(TokenizerError, match="format 2 is not 1; export the tokenizer again"):
        PromptTokenizer.load(out)


def test_special_tokens_of_the_class(tmp_path: Path) -> None:
    """Templates get the special tokens that transformers has, BOS around texts included."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    folder = model(tmp_path / "m", metaspace(), INST, "llama", tokenizer_class="LlamaTokenizerFast", **config)
    about = exported(folder, tmp_path / "out")
    assert about["special_tokens"]["bos_token"] == "<s>"
    ours = PromptTokenizer.load(tmp_path / "out")
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.completion(TEXT).tolist() == theirs.encode(TEXT)
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat({"messages": messages}).tolist() == chat


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", byte_level(), CHATML, "qwen2")
    done = run(folder, "--out", folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{folder}: has other files (config.json); name a new or empty folder" in done.stderr
    assert (folder / "tokenizer.json").exists()
    done = run(tmp_path / "gone", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "gone: expected a folder, or a Hub repository OWNER/NAME" in done.stderr
    done = python(WITHOUT + RUN, "tokenizer", folder, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "transformers is not installed; run: pip install 'transformers>=" in done.stderr
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "cannot load it" in done.stderr
    assert "Traceback" not in done.stderr


def test_chats_that_engines_render_by_code(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", byte_level(), CHATML)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    exported(folder, tmp_path / "out")
    for model in ("kimi_k3", "deepseek_v41"):
        (folder / "config.json").write_text(f'{{"model_type": "{model}"}}')
        assert "own encoding" in str(PromptTokenizer.load(folder).no_chat)
    assert "by Harmony" in str(PromptTokenizer.load(tmp_path / "out").no_chat)


async def test_an_export_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hub_world(tmp_path / "cache", monkeypatch) as hub:
        hub.add("owner/name", model(tmp_path / "m", byte_level(), CHATML, "qwen2"), "v1")
        words = ("tokenizer", "owner/name", "--revision", "v1", "--out", str(tmp_path / "out"))
        done = await asyncio.to_thread(process, *words)
        assert done.returncode == 0, done.stderr
        about = json.loads((tmp_path / "out" / "lmetric_tokenizer.json").read_text())
        assert (about["model"], about["commit"]) == ("owner/name", commit_of("v1"))
        done = await asyncio.to_thread(process, "tokenizer", "owner/other", *words[4:])
        assert done.returncode == 1
        assert "no such repository on 127.0.0.1" in done.stderr
    assert "HF_TOKEN" not in os.environ


async def test_doctor_names_the_command(tmp_path: Path) -> None:
    """Against an engine with other tokens: raw and exported folders get different advice."""
    folder, out = model(tmp_path / "m", byte_level(), CHATML, "qwen2"), tmp_path / "out"
    exported(folder, out)
    good = tmp_path / "good"
    shutil.copytree(TOKENIZER_PATH.parent, good, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    exported(good, tmp_path / "same")
    async with EngineServer(EngineOptions(port=0, clock_speed=20)) as engine:
        for setting, outcome, text in (
            (folder, "fail", "--out DIR: it writes the tokenizer as the engine loads it"),
            (out, "fail", "with the engine's revision and transformers (was: transformers 5"),
            (tmp_path / "same", "pass", "exported with transformers 5"),
        ):
            target = Target(EngineConfig(url=engine.url), None, PoolSettings(tokenizer=str(setting)))
            (found,) = await examine([target])
            verdict = found.verdicts["tokenizer"]
            assert verdict.outcome == outcome, verdict
            assert text in f"{verdict.seen} {verdict.remedy}", verdict
