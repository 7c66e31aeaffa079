"""Tokenizers of Hugging Face Hub repositories: in the local cache.

`lmetric.tokens.download` downloads them. The library huggingface_hub reads HF_HOME, HF_HUB_CACHE,
HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN.
"""

from __future__ import annotations

import re
from pathlib import Path

# The files of a tokenizer. The runtime needs the first rows, `lmetric-router tokenizer` all.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model*", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "*.tiktoken"),
)
_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hub repository: OWNER/NAME."""
    return _ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def cached(repository: str, revision: str | None = None) -> Path | None:
    """The folder of a repository in the local cache; None if its tokenizer is not there.

    ``revision``: branch, tag or commit; None: main.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(FILES), local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return found if (found / "tokenizer.json").exists() else None


def find_folder(root: str, revision: str | None = None) -> Path | None:
    """The folder of a model by the name that an engine reports; None if it does not exist here.

    The name is an absolute path on this machine, or a repository in the local Hugging Face cache.
    ``revision``: of the repository; None: main.
    """
    if Path(root).is_absolute():
        return Path(root) if Path(root).is_dir() else None
    return cached(root, revision) if is_hub_id(root) else None


def configured_folder(setting: str, revision: str | None = None) -> Path | None:
    """The folder that the setting `tokenizer` names: a path, or that of a cached Hub repository.

    None: the Hub repository is not in the local cache. Paths may not exist.
    """
    folder = Path(setting)
    if folder.is_dir() or not is_hub_id(setting):
        return folder
    return cached(setting, revision)


def why_not_downloaded(repository: str, setting: str | None, downloads: str) -> str | None:
    """The reason why a repository must not be downloaded; None: it may.

    ``setting`` and ``downloads``: the settings `tokenizer` and `tokenizer_download`.
    """
    from huggingface_hub import constants

    if downloads == "off":
        why = "tokenizer_download is off"
    elif constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif downloads == "configured" and repository != setting:
        why = "the configuration does not name it (set tokenizer to it, or tokenizer_download to any)"
    else:
        return None
    return not_cached(repository, why)


def not_cached(named: str, cause: str) -> str:
    """The message that a repository is not here. ``cause``: why it is not downloaded."""
    from huggingface_hub import constants

    return (
        f"{named}: not in the Hugging Face cache {constants.HF_HUB_CACHE}, and {cause}; copy the tokenizer "
        "there, or set tokenizer to its folder"
    )
