"""Tokenizers of Hugging Face Hub repositories: found in the local cache, or downloaded.

The library huggingface_hub reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from lmetric._core import LmetricError

DOWNLOAD_SECONDS = 300.0  # time limit of a download
# The files of a tokenizer. The runtime needs the first rows, `lmetric-router tokenizer` all.
FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model*", "tekken.json"),
    *("spiece.model", "sentencepiece.bpe.model", "*.tiktoken"),
)
_ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
# A child process downloads: it can be killed when it hangs, and the server does not wait for it.
_CHILD = "from lmetric.tokens.hub import _child; _child()"


class HubError(LmetricError):
    """A tokenizer cannot be downloaded. The message has the cause and what to do."""


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


def download(repository: str, revision: str | None = None) -> Path:
    """Downloads the tokenizer's files of a repository to the local cache, and returns the folder.

    Blocks, without a limit for the whole download; `fetch` has one. Raises HubError.
    """
    from huggingface_hub import constants, errors, snapshot_download

    named = repository if revision is None else f"{repository}, revision {revision}"
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except errors.GatedRepoError:
        fix = "accept its license on the Hub, and set HF_TOKEN to a token of that account"
        raise HubError(f"{named}: access to the repository is restricted; {fix}") from None
    except errors.RepositoryNotFoundError:
        fix = "check the name; for a private repository, set HF_TOKEN"
        raise HubError(f"{named}: no such folder, and no such repository on {host}; {fix}") from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{named}: the repository on {host} has no such revision") from None
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise HubError(_not_cached(named, "HF_HUB_OFFLINE is set")) from None
        cause = _clean(error.__cause__ or error)
        fix = "check the network, HF_ENDPOINT and HTTPS_PROXY, or copy the tokenizer to a folder"
        raise HubError(f"{named}: cannot reach {host}: {cause}; {fix}") from None
    except errors.HfHubHTTPError as error:
        raise HubError(f"{named}: {host} refuses: {_clean(error)}") from None
    except OSError as error:
        if error.filename is None:
            raise HubError(f"{named}: download from {host} failed: {_clean(error)}") from None
        fix = "set HF_HOME to a folder that the router can write"
        raise HubError(f"{named}: {error.filename}: {error.strerror}; {fix}") from None
    except Exception as error:  # of HTTP and transfer libraries, which change between versions
        raise HubError(f"{named}: download from {host} failed: {_clean(error)}") from None


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
    return _not_cached(repository, why)


def _not_cached(named: str, cause: str) -> str:
    from huggingface_hub import constants

    return (
        f"{named}: not in the Hugging Face cache {constants.HF_HUB_CACHE}, and {cause}; copy the tokenizer "
        "there, or set tokenizer to its folder"
    )


async def fetch(repository: str, revision: str | None = None, seconds: float = DOWNLOAD_SECONDS) -> Path:
    """Downloads like `download`, in a child process, for at most ``seconds``. Raises HubError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, repository, revision or ""),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        fix = "check the network, or copy the tokenizer to a folder"
        raise HubError(f"{repository}: the download did not end within {seconds:g} s; {fix}") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = json.loads(out)
    except ValueError:
        raise HubError(f"{repository}: the download ended with status {process.returncode}") from None
    del err  # warnings of libraries; failures are in the answer
    if "error" in answer:
        raise HubError(answer["error"])
    return Path(answer["folder"])


def _child() -> None:
    """Downloads for `fetch`: prints the folder or the error as JSON."""
    repository, revision = sys.argv[1:]
    try:
        answer = {"folder": str(download(repository, revision or None))}
    except HubError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def _clean(error: BaseException) -> str:
    """The first line of an error, without the token and without passwords in addresses."""
    from huggingface_hub import get_token

    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    if token := get_token():
        text = text.replace(token, "***")
    return re.sub(r"//[^/@\s]+@", "//***@", text)
