"""Downloads of tokenizers of Hugging Face Hub repositories to the local cache."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from lmetric._core import LmetricError
from lmetric.tokens.hub import FILES, not_cached

DOWNLOAD_SECONDS = 300.0  # time limit of a download
# A child process downloads: it can be killed when it hangs, and the server does not wait for it.
_CHILD = "from lmetric.tokens.download import _child; _child()"


class HubError(LmetricError):
    """A tokenizer cannot be downloaded. The message has the cause and what to do."""


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
            raise HubError(not_cached(named, "HF_HUB_OFFLINE is set")) from None
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
