"""Engines in Kubernetes pods, found by a label selector: listed once, then watched.

Running pods with an address are engines. A pod that is not ready (its condition ``Ready``) gets no
requests but stays in the fleet, with its cache. A pod that is being deleted leaves the fleet.
"""

import asyncio
import ipaddress
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from pydantic import ValidationError

from lmetric.config import ConfigError, DiscoverySource, EngineConfig, KubernetesSource
from lmetric.config.problems import explain
from lmetric.extras import install
from lmetric.server.discovery.members import Found
from lmetric.server.discovery.source import Sink, SourceError
from lmetric.server.upstream.request_errors import request_error

try:
    from kubernetes_asyncio import client
    from kubernetes_asyncio.config import (
        KUBE_CONFIG_DEFAULT_LOCATION,
        ConfigException,
        load_incluster_config,
        load_kube_config,
    )
except ImportError as missing:
    raise ConfigError(
        f"discovery by kubernetes needs another package ({missing}): {install('kubernetes')}"
    ) from None

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
WATCH_SECONDS = 240  # length of one watch; the next watch continues after its last event
PATIENCE_SECONDS = 10.0  # limit for a connection, and for a watch to end after WATCH_SECONDS
PACE_SECONDS = 1.0  # shortest time between two requests to the API server
# Pods of one answer, each with up to 20 KiB. To read those of a large fleet at once would stop the
# event loop, also in a thread: the parser of JSON keeps the interpreter.
PAGE_PODS = 100
_READ_BUFFER_BYTES = 1 << 21  # a line of a watch has an object: 1.5 MiB in etcd, at most
_HINTS = {
    401: "; the credentials are not accepted",
    403: "; give the router's service account a Role that allows list and watch on pods",
}


class Pods:
    """A source: the pods that a label selector matches in one namespace.

    If the API server is not reachable, refuses, or has lost its history, the last engines stay.
    ``suffix``: of the engines' names.
    """

    def __init__(self, config: KubernetesSource, defaults: DiscoverySource, suffix: str = "") -> None:
        self._config = config
        self._suffix = suffix
        self._defaults = defaults
        self._asked_at = float("-inf")

    async def follow(self, sink: Sink) -> None:
        """Reports the engines to ``sink`` after each change of a pod, until canceled.

        Raises SourceError.
        """
        settings = client.Configuration()
        namespace = await load_credentials(self._config, settings)
        try:
            async with api_client(settings) as api:
                request = client.CoreV1Api(api).list_namespaced_pod
                while True:
                    await self._follow(sink, request, namespace)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = request_error(error)
            raise SourceError(f"the API server at {settings.host} does not answer: {why}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"invalid answer of the API server at {settings.host}: {error!r}") from None

    async def _follow(self, sink: Sink, request: Any, namespace: str) -> None:
        """Lists and watches the pods until the API server has dropped its history (status 410)."""
        pods, version = await self._list(request, namespace)
        self._tell(sink, pods)
        async for kind, pod in self._events(request, namespace, version):
            name = pod["metadata"]["name"]
            found = None if kind == "DELETED" else self._found(pod)
            if found != pods.get(name):
                pods[name] = found
                self._tell(sink, pods)
            if kind == "DELETED":
                pods.pop(name, None)

    async def _list(self, request: Any, namespace: str) -> tuple[dict[str, Found | str | None], str]:
        """Returns what `_found` returns for each pod, by name, and the version of the list."""
        pods: dict[str, Found | str | None] = {}
        more: dict[str, str] = {}
        while True:
            async with await self._ask(request, namespace, limit=PAGE_PODS, **more) as answer:
                listed = orjson.loads(await answer.read())
            for pod in listed["items"] or ():
                pods[pod["metadata"]["name"]] = self._found(pod)
            if not (position := listed["metadata"].get("continue")):
                return pods, listed["metadata"]["resourceVersion"]
            more = {"_continue": position}

    async def _events(
        self, request: Any, namespace: str, version: str
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yields kind and pod of each change since ``version``; ends if ``version`` is too old."""
        while True:
            answer = await self._ask(
                *(request, namespace),
                watch=True,
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=WATCH_SECONDS,
            )
            async with answer:
                if answer.status == 410:
                    return
                async for line in answer.content:
                    event = orjson.loads(line)
                    kind, pod = event["type"], event["object"]
                    if kind == "ERROR":
                        if pod.get("code") == 410:
                            return
                        raise SourceError(f"watching the pods of {namespace}: {pod.get('message')}")
                    version = pod["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield kind, pod

    async def _ask(self, request: Any, namespace: str, **options: Any) -> aiohttp.ClientResponse:
        if "_continue" not in options:
            now = time.monotonic()
            await asyncio.sleep(self._asked_at + PACE_SECONDS - now)
            self._asked_at = max(now, self._asked_at + PACE_SECONDS)
        watches = "watch" in options
        silence = WATCH_SECONDS + PATIENCE_SECONDS if watches else PATIENCE_SECONDS
        answer: aiohttp.ClientResponse = await request(
            namespace,
            label_selector=self._config.selector,
            _preload_content=False,  # the client's parser makes objects of all parts of a pod
            _request_timeout=(PATIENCE_SECONDS, silence),
            **options,
        )
        if answer.status != 200 and not (answer.status == 410 and watches):
            async with answer:
                body = await answer.read()
            try:
                message = orjson.loads(body)["message"]
            except (orjson.JSONDecodeError, KeyError, TypeError):
                message = body[:200].decode(errors="replace")
            hint = _HINTS.get(answer.status, "")
            raise SourceError(f"the pods of {namespace}: status {answer.status}: {message}{hint}")
        return answer

    def _tell(self, sink: Sink, pods: dict[str, Found | str | None]) -> None:
        wrong = sorted(found for found in pods.values() if isinstance(found, str))
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        sink.found(
            [found for found in pods.values() if isinstance(found, Found)],
            wrong[0] + more if wrong else None,
        )

    def _found(self, pod: dict[str, Any]) -> Found | str | None:
        """Returns the engine of a pod, None if it has none, or the reason why it is not usable."""
        metadata, status = pod["metadata"], pod.get("status") or {}
        address = status.get("podIP")
        if metadata.get("deletionTimestamp") or status.get("phase") != "Running" or not address:
            return None
        port = self._port(pod["spec"])
        if port is None:
            return f"pod {metadata['name']} has no container port named {self._config.port!r}"
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        said = {**(metadata.get("labels") or {}), **(metadata.get("annotations") or {})}
        try:
            config = EngineConfig.model_validate(
                {
                    "url": f"{self._defaults.scheme}://{host}:{port}",
                    "name": f"{metadata['name']}.{metadata['namespace']}{self._suffix}",
                    "role": said.get(self._config.role_key) or None,
                }
            )
        except ValidationError as error:
            return f"pod {metadata['name']}: {'; '.join(explain(error, {}, EngineConfig))}"
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or ()
        )
        return Found(config, said.get(self._config.model_key) or self._defaults.model, ready)

    def _port(self, spec: dict[str, Any]) -> int | None:
        port = self._config.port
        if isinstance(port, int):
            return port
        for container in (*spec["containers"], *(spec.get("initContainers") or ())):
            for listed in container.get("ports") or ():
                if listed.get("name") == port:
                    return int(listed["containerPort"])
        return None


def api_client(settings: Any) -> Any:
    """Returns a client of the API server. Only a kubeconfig's `proxy-url` sets a proxy.

    The client's own session uses HTTPS_PROXY, and ignores networks in NO_PROXY.
    """
    api = client.ApiClient(settings)
    session = api.rest_client.pool_manager
    api.rest_client.pool_manager = aiohttp.ClientSession(
        connector=session.connector, read_bufsize=_READ_BUFFER_BYTES
    )
    session.detach()
    return api


async def load_credentials(config: KubernetesSource, settings: Any) -> str:
    """Loads the credentials into ``settings``. Returns the namespace. Raises SourceError."""
    try:
        if config.kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=settings)
            return config.namespace or NAMESPACE_FILE.read_text().strip()  # noqa: ASYNC240 (short)
        files = _kubeconfigs(config.kubeconfig)
        loader = await load_kube_config(files, client_configuration=settings, persist_config=False)
        return config.namespace or loader.current_context["context"].get("namespace") or "default"
    except (ConfigException, OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise SourceError(f"no credentials for the API server: {error}") from None


def _kubeconfigs(given: Path | None) -> str:
    """Returns the path of the kubeconfig, by default kubectl's (one or more files).

    Raises FileNotFoundError if none of the files exists.
    """
    files = str(given or KUBE_CONFIG_DEFAULT_LOCATION)
    if not any(os.path.exists(os.path.expanduser(file)) for file in files.split(os.pathsep)):
        raise FileNotFoundError(f"not running in a pod, and there is no {files}")
    return files
