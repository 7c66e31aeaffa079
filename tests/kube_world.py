"""A real Kubernetes API server with its etcd, on loopback, built by scripts/kube_tools.

There is no kubelet, scheduler or controller: objects are checked and stored, and nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import chart_world
from lmetric_lab.ports import free_ports
from tls_world import Authority

PROGRAMS = chart_world.ROOT / ".cache" / "kube" / "bin"
ADMIN = "admin-token"
START_SECONDS = 240.0  # on a busy machine
STRICT = "fieldValidation=Strict"


class Cluster:
    """An API server.

    ``warnings``: in its answers, for example about deprecated fields.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._context = ssl.create_default_context(cafile=folder / "ca.pem")
        self.folder = folder
        self.url = f"https://127.0.0.1:{port}"
        self.warnings: list[str] = []

    def call(
        self, method: str, path: str, body: Any = None, token: str = ADMIN, kind: str = "json"
    ) -> tuple[int, dict[str, Any]]:
        """Returns the status and the answer. ``kind``: of the body, for example of a patch."""
        headers = {"authorization": f"Bearer {token}", "content-type": f"application/{kind}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            answer = urllib.request.urlopen(request, context=self._context, timeout=60)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            self.warnings += answer.headers.get_all("warning", [])
            text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else {"text": text}

    def get(self, path: str) -> dict[str, Any]:
        status, answer = self.call("GET", path)
        assert status == 200, answer
        return answer

    def create(self, path: str, body: dict[str, Any], query: str = "", token: str = ADMIN) -> dict[str, Any]:
        status, answer = self.call("POST", f"{path}?{STRICT}{query}", body, token)
        assert status == 201, answer
        return answer

    def patch(self, path: str, body: dict[str, Any]) -> None:
        status, answer = self.call("PATCH", f"{path}?{STRICT}", body, kind="merge-patch+json")
        assert status == 200, answer

    def delete(self, path: str) -> None:
        status, answer = self.call("DELETE", f"{path}?gracePeriodSeconds=0")
        assert status == 200, answer

    def namespace(self, name: str) -> str:
        """Makes a namespace for pods of the restricted profile, and returns its path."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        self.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        path = f"/api/v1/namespaces/{name}"
        self.create(f"{path}/serviceaccounts", {"metadata": {"name": "default"}})  # as a controller does
        return path

    def path_of(self, each: dict[str, Any], namespace: str) -> str:
        """Returns the path of all objects of a kind, by the API server's own list of kinds."""
        version = each["apiVersion"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        kinds = {one["kind"]: one["name"] for one in self.get(root)["resources"] if "/" not in one["name"]}
        return f"{root}/namespaces/{each['metadata'].get('namespace', namespace)}/{kinds[each['kind']]}"

    def apply(self, each: dict[str, Any], namespace: str) -> dict[str, Any]:
        """Applies an object as `kubectl apply --server-side --validate=strict` does."""
        path = f"{self.path_of(each, namespace)}/{each['metadata']['name']}"
        query = f"?fieldManager=test&force=true&{STRICT}"
        status, answer = self.call("PATCH", path + query, each, kind="apply-patch+yaml")
        assert status in (200, 201), answer
        return answer

    def token(self, namespace: str, account: str) -> str:
        """Returns a token of a service account, as its pods get one."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.create(path, {"spec": {"expirationSeconds": 3600}})["status"]["token"])

    def kubeconfig(self, namespace: str = "default", token: str = ADMIN) -> Path:
        context = {"cluster": "c", "user": "u", "namespace": namespace}
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "ca.pem")}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": context}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        file = self.folder / f"kubeconfig-{namespace}"
        file.write_text(yaml.safe_dump(content))
        file.chmod(0o600)
        return file


def _program(name: str) -> str:
    if not (found := PROGRAMS / name).exists():
        pytest.skip(f"{name} is not installed: run scripts/kube_tools")
    return str(found)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts etcd and the API server, with the custom resources that the chart uses."""
    etcd, server = _program("etcd"), _program("kube-apiserver")
    definitions = chart_world.definitions()
    port, store, peers = free_ports(3)
    (folder / "tokens.csv").write_text(f"{ADMIN},admin,admin,system:masters\n")
    own = Authority(folder).issue("apiserver")
    here, peer = f"http://127.0.0.1:{store}", f"http://127.0.0.1:{peers}"
    store_flags = {
        "data-dir": folder / "etcd",
        "listen-client-urls": here,
        "advertise-client-urls": here,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    server_flags = {
        "etcd-servers": here,
        "secure-port": port,
        "bind-address": "127.0.0.1",
        "advertise-address": "127.0.0.1",
        "endpoint-reconciler-type": "none",
        "tls-cert-file": own.certificate,
        "tls-private-key-file": own.key,
        "authorization-mode": "RBAC",
        "token-auth-file": folder / "tokens.csv",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": own.certificate,
        "service-account-signing-key-file": own.key,
        "service-cluster-ip-range": "10.0.0.0/16",
    }
    made = Cluster(folder, port)
    with _running(etcd, store_flags, folder / "etcd.log") as alive:
        _until(lambda: _ready(f"{here}/health", None), alive)
        with _running(server, server_flags, folder / "apiserver.log") as alive:
            _until(lambda: _ready(f"{made.url}/readyz", made._context), alive)
            for each in definitions:
                made.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", each)
            for each in definitions:
                group, version = each["spec"]["group"], each["spec"]["versions"][0]["name"]
                path = f"/apis/{group}/{version}/{each['spec']['names']['plural']}"
                _until(lambda path=path: made.call("GET", path)[0] == 200, alive)  # type: ignore[misc]
            yield made


@contextlib.contextmanager
def _running(program: str, flags: dict[str, Any], log: Path) -> Iterator[Callable[[], None]]:
    """Runs a program. Yields a check that it still runs."""
    with log.open("wb") as file:
        words = [program, *(f"--{name}={value}" for name, value in flags.items())]
        process = subprocess.Popen(words, stdout=file, stderr=file)

    def alive() -> None:
        assert process.poll() is None, log.read_text()[-4000:]

    try:
        yield alive
    finally:
        process.kill()
        process.wait()


def _ready(url: str, context: ssl.SSLContext | None) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, context=context, timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def _until(true: Callable[[], bool], alive: Callable[[], None]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not true():
        alive()
        assert time.monotonic() < deadline, "the API server did not start"
        time.sleep(0.1)
