"""Public traces by name: their address and checksum, and the folder that keeps them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lmetric.defaults import TRACE_DIR
from lmetric_lab.packed import SUFFIXES, open_packed

_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PublicTrace:
    """A published trace file.

    Attributes:
        size_bytes: size of the file, decompressed.
        sha256: checksum of the file, decompressed.
    """

    name: str
    file: str
    url: str
    size_bytes: int
    sha256: str
    license: str
    about: str

    @property
    def path(self) -> Path:
        """The place of the file: in `folder`, compressed if only that file exists."""
        plain = folder() / self.file
        packed = (plain.with_name(plain.name + suffix) for suffix in ("", *SUFFIXES))
        return next((path for path in packed if path.exists()), plain)

    def facts(self) -> str:
        """Address, size and checksum, a line each."""
        return f"address: {self.url}\nsize: {self.size_bytes:,} bytes\nsha256: {self.sha256}"


PUBLIC_TRACES = {
    trace.name: trace
    for trace in (
        PublicTrace(
            name="mooncake-conversation",
            file="mooncake-conversation.jsonl",
            url="https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
            "a2a4b18ac537fd798d50e6e9f57031ce86419a37/FAST25-release/traces/conversation_trace.jsonl",
            size_bytes=3_029_533,
            sha256="b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
            license="Apache-2.0",
            about="One hour of a chat service, 12,031 requests with prefixes (Mooncake, FAST '25).",
        ),
        PublicTrace(
            name="mooncake-toolagent",
            file="mooncake-toolagent.jsonl",
            url="https://raw.githubusercontent.com/kvcache-ai/Mooncake/"
            "3cca71daccf2a7afb8fe3f0295358f70e3a69fdb/FAST25-release/traces/toolagent_trace.jsonl",
            size_bytes=4_415_857,
            sha256="48a2db1a13d3bc05e6330140c64f604ba366df20d3c9e128b5c35a01c1fa5f71",
            license="Apache-2.0",
            about="One hour of tools and agents, 23,608 requests with prefixes (Mooncake, FAST '25).",
        ),
        PublicTrace(
            name="azure-conversation-2023",
            file="azure-conversation-2023.csv",
            url="https://raw.githubusercontent.com/Azure/AzurePublicDataset/"
            "790921015d50dd6aae7f7e47f39ba0e235ad6b08/data/AzureLLMInferenceTrace_conv.csv",
            size_bytes=719_188,
            sha256="2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
            license="CC-BY 4.0",
            about="One hour of Azure's conversation service, 19,366 requests without prefixes.",
        ),
    )
}
"""The public traces by name."""


def folder() -> Path:
    """The folder of public traces: `LMETRIC_TRACE_DIR`, else a folder in the user's cache."""
    if own := os.environ.get(TRACE_DIR):
        return Path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "lmetric-router" / "traces"


def available(path: Path) -> Path:
    """Returns a path at which the trace can be read.

    A public trace that is not in `folder` is downloaded. Other paths are returned unchanged.

    Raises:
        TraceError: the trace cannot be downloaded, or its checksum is wrong.
    """
    trace = next(
        (each for each in PUBLIC_TRACES.values() if path.parent == folder() and _is(each, path)), None
    )
    if trace is None:
        return path
    if not trace.path.exists():
        _download(trace)
    elif (found := _digest(trace.path)) != trace.sha256:
        raise _error(trace, f"{trace.path} has the sha256 {found}; delete the file")
    return trace.path


def _is(trace: PublicTrace, path: Path) -> bool:
    return path.name in (trace.file, *(trace.file + suffix for suffix in SUFFIXES))


def _digest(path: Path) -> str:
    import hashlib

    with open_packed(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(trace: PublicTrace) -> None:
    """Downloads a trace into the folder. The file appears only if its checksum is right."""
    from http.client import HTTPException
    from tempfile import TemporaryDirectory
    from urllib.request import urlopen

    from lmetric.connection_errors import reason_of

    print(f"downloading {trace.name} ({trace.size_bytes / 1e6:.1f} MB) from {trace.url}", file=sys.stderr)
    target = folder() / trace.file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent) as scratch:
            part = Path(scratch) / trace.file
            with urlopen(trace.url, timeout=_TIMEOUT_SECONDS) as answer:
                part.write_bytes(answer.read(trace.size_bytes + 1))
            if (found := _digest(part)) != trace.sha256:
                raise _error(trace, f"the address returned a file with the sha256 {found}")
            part.replace(target)
    except (OSError, HTTPException) as error:
        raise _error(trace, f"cannot be downloaded: {reason_of(error)}") from None


def _error(trace: PublicTrace, problem: str) -> Exception:
    from lmetric_lab.errors import TraceError

    return TraceError(
        f"trace {trace.name}: {problem}\n{trace.facts()}\n"
        f"Download the file on a machine with network access and put it at {folder() / trace.file}"
    )
