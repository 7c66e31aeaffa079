"""The files in a model's folder: tokenizer, its configuration, chat templates."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmetric.tokens.errors import TokenizerError
from lmetric.tokens.template import ChatTemplate, TemplateError, compiled

# An added token as tokenizer.json has it.
_TOKEN = {
    "content": "",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
# Models whose engines render chats with their own code instead of the folder's template.
_OWN_CHAT = {
    "gpt_oss": "Harmony",
    "deepseek_v32": "DeepSeek's own encoding",
    "deepseek_v4": "DeepSeek's own encoding",
    "deepseek_v41": "DeepSeek's own encoding",
    "kimi_k3": "Kimi's own encoding",
}


# Marks a folder that `lmetric-router tokenizer` wrote, and holds what is not in tokenizer.json.
EXPORT_FILE = "lmetric_tokenizer.json"
EXPORT_FORMAT = 1
EXPORT_COMMAND = "lmetric-router tokenizer MODEL --out DIR"


@dataclass(slots=True)
class ModelFiles:
    """The files of a folder, read."""

    folder: Path
    tokenizer: bytes
    # Added tokens of tokenizer_config.json, in their order, as tokenizer.json writes them.
    added_tokens: list[dict[str, Any]] = field(default_factory=list)
    # Special tokens by name, for templates: bos_token and so on.
    special: dict[str, Any] = field(default_factory=dict)
    # Tokens around a text, if the configuration (not the tokenizer) defines them.
    around: tuple[list[str], list[str]] | None = None
    # Templates: for chats without tools, and for those with tools; None: there is none.
    template: ChatTemplate | None = None
    tool_template: ChatTemplate | None = None
    # The reason if chats cannot be rendered.
    no_chat: str | None = None
    # The library that has loaded and exported the tokenizer, with its version; None: the files are
    # the model's own.
    exported_with: str | None = None


def read_folder(folder: str | os.PathLike[str], chat_template: str | None = None) -> ModelFiles:
    """Reads a model's folder; ``chat_template`` (a file) replaces its own. Raises
    TokenizerError."""
    path = Path(folder)
    if not path.is_dir():
        raise TokenizerError(
            f"{path}: no such folder; set tokenizer to a folder with a tokenizer.json, or to a Hub "
            "repository OWNER/NAME"
        )
    try:
        tokenizer = (path / "tokenizer.json").read_bytes()
    except FileNotFoundError:
        others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (path / name).exists()]
        found = f" ({', '.join(others)} cannot be used; {EXPORT_COMMAND} makes one)" if others else ""
        raise TokenizerError(f"{path}: no tokenizer.json{found}") from None
    except OSError as error:
        raise TokenizerError(f"{path / 'tokenizer.json'}: {error.strerror}") from None
    files = ModelFiles(path, tokenizer)
    if (path / EXPORT_FILE).exists():
        # tokenizer.json has the tokens of tokenizer_config.json already.
        _read_export(files)
        if files.no_chat is None:
            _find_templates(files, {}, chat_template)
        return files
    config = _json(path / "tokenizer_config.json")
    files.added_tokens = _added_tokens(path, config)
    files.special = _special_tokens(path, config)
    files.around = _around(config, files.special)
    files.no_chat = own_chat(path)
    if files.no_chat is None:
        _find_templates(files, config, chat_template)
    return files


def own_chat(path: Path) -> str | None:
    """The reason if engines render a model's chats with their own code; None: by a template.

    Raises TokenizerError.
    """
    model = _json(path / "config.json").get("model_type")
    if isinstance(model, str) and model in _OWN_CHAT:
        return f"engines render chats of {model} by {_OWN_CHAT[model]}, not by a template"
    if (path / "tekken.json").exists():
        return "with a tekken.json, engines render chats by Mistral's own library"
    return None


def digest(tokenizer: bytes) -> str:
    """The SHA-256 digest of a tokenizer.json, as `lmetric_tokenizer.json` has it."""
    return hashlib.sha256(tokenizer).hexdigest()


def _read_export(files: ModelFiles) -> None:
    """Reads what the export has written beside tokenizer.json. Raises TokenizerError."""
    path = files.folder / EXPORT_FILE
    export = _json(path)
    if export.get("format") != EXPORT_FORMAT:
        raise TokenizerError(
            f"{path}: format {export.get('format')!r} is not {EXPORT_FORMAT}; export the tokenizer again: "
            f"{EXPORT_COMMAND}"
        )
    if export.get("sha256") != digest(files.tokenizer):
        raise TokenizerError(
            f"{files.folder}: tokenizer.json has changed since the export; export it again: {EXPORT_COMMAND}"
        )
    special, no_chat = export.get("special_tokens"), export.get("no_chat")
    if not isinstance(special, dict) or not isinstance(no_chat, str | None):
        raise TokenizerError(f"{path}: special_tokens or no_chat is malformed; export the tokenizer again")
    files.special, files.no_chat = special, no_chat
    files.exported_with = f"transformers {export.get('transformers')}"


def _find_templates(files: ModelFiles, config: dict[str, Any], given: str | None) -> None:
    try:
        _templates(files, config, given)
    except TemplateError as error:
        raise TokenizerError(str(error)) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _added_tokens(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    listed = config.get("added_tokens_decoder") or {}
    try:
        rows = sorted(((int(number), token) for number, token in listed.items()), key=lambda row: row[0])
        return [{name: token.get(name, default) for name, default in _TOKEN.items()} for _, token in rows]
    except (TypeError, ValueError, AttributeError):
        raise TokenizerError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder is malformed") from None


def _special_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    special = {}
    for source in (_json(path / "special_tokens_map.json"), config):
        for name, value in source.items():
            if name.endswith("_token"):
                content = value.get("content") if isinstance(value, dict) else value
                if isinstance(content, str):
                    special[name] = content
    return special


def _around(config: dict[str, Any], special: dict[str, str]) -> tuple[list[str], list[str]] | None:
    """Tokens before and after a text, if the configuration (not the tokenizer) defines them."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return None
    bos, eos = special.get("bos_token"), special.get("eos_token")
    return (
        [bos] if bos is not None and config.get("add_bos_token") else [],
        [eos] if eos is not None and config.get("add_eos_token") else [],
    )


def _templates(files: ModelFiles, config: dict[str, Any], given: str | None) -> None:
    """Finds the templates, in the order in which Hugging Face's library and the engines look for
    them."""
    path = files.folder
    if given is not None:
        files.template = files.tool_template = _compiled(Path(given))
        return
    named: dict[str, ChatTemplate] = {}
    listed = config.get("chat_template")
    source = f"{path / 'tokenizer_config.json'}: chat_template"
    if isinstance(listed, str):
        named["default"] = compiled(listed, source)
    elif isinstance(listed, list):
        for row in listed:
            if not isinstance(row, dict) or not isinstance(row.get("template"), str):
                raise TokenizerError(f"{source}: expected a text, or a list of name and template")
            named[str(row.get("name"))] = compiled(row["template"], f"{source}: {row.get('name')}")
    if (path / "chat_template.jinja").exists():
        named = {"default": _compiled(path / "chat_template.jinja")}
    if (path / "additional_chat_templates").is_dir():
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            named[file.stem] = _compiled(file)
    files.template = named.get("default")
    files.tool_template = named.get("tool_use", files.template)
    # Vision models: the template of the processor has priority, except with tools.
    processor = _json(path / "chat_template.json").get("chat_template")
    if isinstance(processor, str):
        files.template = compiled(processor, str(path / "chat_template.json"))
    if files.template is None and files.tool_template is None:
        files.no_chat = f"{path}: no chat template (chat_template.jinja, or in tokenizer_config.json)"


def _compiled(file: Path) -> ChatTemplate:
    try:
        return compiled(file.read_text(encoding="utf-8"), str(file))
    except OSError as error:
        raise TokenizerError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file}: not UTF-8 at byte {error.start}") from None
