"""A server with the protocol of the Hugging Face Hub, as the library huggingface_hub uses it."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from huggingface_hub import constants

TOKEN = "hf_MARKED-TOKEN-0001"
WEIGHTS = "model.safetensors"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


@dataclass
class Hub:
    """Repositories by name, each with the files of its revisions."""

    url: str = ""
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # path, Authorization
    private: set[str] = field(default_factory=set)  # without TOKEN: as if there were none
    gated: set[str] = field(default_factory=set)  # the files need TOKEN
    down: bool = False  # each request gets status 503
    hangs: bool = False  # no request gets an answer

    def add(self, name: str, folder: Path, revision: str = "main") -> None:
        """Publishes the files of a folder, and weights."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        self.repositories.setdefault(name, {})[revision] = {**files, WEIGHTS: b"weights"}

    @property
    def files(self) -> set[str]:
        """The names of the files that clients got."""
        return {
            path.split("/resolve/")[1].split("/", 1)[1] for path, _ in self.requests if "/resolve/" in path
        }

    async def _start(self, request: web.Request) -> None:
        self.requests.append((request.path, request.headers.get("authorization", "")))
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise web.HTTPServiceUnavailable

    def _files(self, request: web.Request) -> tuple[str, dict[str, bytes]]:
        name = f"{request.match_info['owner']}/{request.match_info['name']}"
        revisions = self.repositories.get(name)
        known = request.headers.get("authorization") == f"Bearer {TOKEN}"
        if revisions is None or (name in self.private and not known):
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        wanted = request.match_info["revision"]
        for revision, files in revisions.items():
            if wanted in (revision, commit_of(revision)):
                if name in self.gated and not known and "/resolve/" in request.path:
                    raise web.HTTPForbidden(headers={"X-Error-Code": "GatedRepo"})
                return commit_of(revision), files
        raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})

    async def info(self, request: web.Request) -> web.Response:
        """Answers GET /api/models/OWNER/NAME/revision/REVISION."""
        await self._start(request)
        commit, files = self._files(request)
        siblings = [{"rfilename": path} for path in files]
        return web.json_response({"id": "x", "sha": commit, "siblings": siblings, "private": False})

    async def tree(self, request: web.Request) -> web.Response:
        """Answers GET /api/models/OWNER/NAME/tree/REVISION."""
        await self._start(request)
        _, files = self._files(request)
        rows = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in files.items()
        ]
        return web.json_response(rows)

    async def file(self, request: web.Request) -> web.Response:
        """Answers HEAD and GET /OWNER/NAME/resolve/REVISION/PATH."""
        await self._start(request)
        commit, files = self._files(request)
        data = files.get(request.match_info["path"])
        if data is None:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        return web.Response(body=data, headers=headers)


@contextlib.asynccontextmanager
async def hub_world(cache: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    """Starts a Hub. This process and its children use it, with an empty cache and no token."""
    hub = Hub()
    app = web.Application()
    repository = "/{owner}/{name}"
    app.router.add_get(f"/api/models{repository}/revision/{{revision}}", hub.info)
    app.router.add_get(f"/api/models{repository}/tree/{{revision}}", hub.tree)
    app.router.add_get(f"{repository}/resolve/{{revision}}/{{path:.+}}", hub.file)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    hub.url = f"http://127.0.0.1:{port}"
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache / "hub"))
    # The library has read the environment of this process already.
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield hub
    finally:
        await runner.cleanup()
