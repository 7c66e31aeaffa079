"""Engines of an InferencePool, and the priorities of its InferenceObjectives (Gateway API).

The pool names a label selector and ports. Its pods are followed as `kubernetes.py` follows pods.
Pool and objectives change seldom, so they are read every few seconds. Each port of a pod is an
engine, as the extension has it: data-parallel ranks have a port each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson
import structlog

from lmetric.config import DiscoverySource, KubernetesSource
from lmetric.server.discovery.kubernetes import PATIENCE_SECONDS, Pods, api_client, load_credentials
from lmetric.server.discovery.members import Found
from lmetric.server.discovery.source import Sink, SourceError
from lmetric.server.upstream.request_errors import request_error

# The import of `kubernetes` has reported a missing package.
from kubernetes_asyncio import client  # isort: skip

log = structlog.get_logger("lmetric.discovery")

POLL_SECONDS = 5.0
POOLS = "inference.networking.k8s.io", "v1", "inferencepools"
# llm-d has moved the kind to a group of its own.
OBJECTIVES = (
    ("inference.networking.x-k8s.io", "v1alpha2", "inferenceobjectives"),
    ("llm-d.ai", "v1alpha2", "inferenceobjectives"),
)


class PoolEngines:
    """A source: the pods of one InferencePool.

    ``objectives``: gets the priorities of the pool's InferenceObjectives, by name.
    """

    def __init__(
        self, config: KubernetesSource, defaults: DiscoverySource, objectives: dict[str, int]
    ) -> None:
        self._config = config
        self._defaults = defaults
        self._objectives = objectives
        self._own: set[str] = set()  # names in `objectives`
        self._denied: set[str] = set()  # groups of InferenceObjectives without permission

    async def follow(self, sink: Sink) -> None:
        """Reports the engines to ``sink`` after each change, until canceled. Raises SourceError."""
        settings = client.Configuration()
        namespace = await load_credentials(self._config, settings)
        pods: asyncio.Task[None] | None = None
        reports: _Reports | None = None
        followed: tuple[str, tuple[int, ...]] | None = None
        try:
            async with api_client(settings) as api:
                while True:
                    wanted = _pods_of(await self._pool(api, namespace), str(self._config.inference_pool))
                    problem = await self._read_objectives(api, namespace)
                    if wanted != followed:
                        followed = wanted
                        await _end(pods)
                        reports = _Reports(sink, len(wanted[1]))
                        pods = asyncio.create_task(self._follow_pods(reports, namespace, *wanted))
                    assert pods is not None
                    assert reports is not None
                    reports.set_problem(problem)
                    await asyncio.wait([pods], timeout=POLL_SECONDS)
                    if pods.done():
                        await pods  # raises its error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            why = request_error(error)
            raise SourceError(f"the API server at {settings.host} does not answer: {why}") from None
        finally:
            await _end(pods)

    async def _pool(self, api: Any, namespace: str) -> Mapping[str, Any]:
        group, version, plural = POOLS
        path = f"/apis/{group}/{version}/namespaces/{namespace}/{plural}/{self._config.inference_pool}"
        status, answer = await _get(api, path)
        if status != 200:
            hint = "; give the router's service account a Role that allows get on inferencepools"
            raise SourceError(
                f"the InferencePool {self._config.inference_pool} of {namespace}: status {status}: "
                f"{_message(answer)}{hint if status == 403 else ''}"
            )
        return answer

    async def _read_objectives(self, api: Any, namespace: str) -> str | None:
        """Replaces the priorities. Returns the reason why they cannot be read, and stay; else None.

        A cluster without the kind has none. Without permission to read them, there are none either,
        and the log has one warning.
        """
        found: dict[str, int] = {}
        name = f"the InferenceObjectives of {namespace}"
        for group, version, plural in OBJECTIVES:
            try:
                status, answer = await _get(api, f"/apis/{group}/{version}/namespaces/{namespace}/{plural}")
                if status == 200:
                    found |= self._priorities(answer)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                return f"{name}: {request_error(error)}"
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                return f"{name} are not valid: {error!r}"
            if status not in (200, 403, 404):
                return f"{name}: status {status}: {_message(answer)}"
            if status == 403 and group not in self._denied:
                self._denied.add(group)
                log.warning(
                    "no permission to list InferenceObjectives, so they set no priorities; give the router's "
                    "service account a Role that allows list on inferenceobjectives",
                    group=group,
                    namespace=namespace,
                )
        for gone in self._own - found.keys():
            self._objectives.pop(gone, None)
        self._own = set(found)
        self._objectives.update(found)
        return None

    def _priorities(self, answer: Mapping[str, Any]) -> dict[str, int]:
        """Returns the priorities of the pool's InferenceObjectives, by name."""
        found: dict[str, int] = {}
        for each in answer.get("items") or ():
            spec = each.get("spec") or {}
            if (spec.get("poolRef") or {}).get("name") == self._config.inference_pool:
                found[each["metadata"]["name"]] = int(spec.get("priority") or 0)
        return found

    async def _follow_pods(
        self, reports: _Reports, namespace: str, selector: str, ports: tuple[int, ...]
    ) -> None:
        """Follows the pods once for each port, and reports all of them together."""
        try:
            async with asyncio.TaskGroup() as group:
                for part, port in zip(reports.parts, ports, strict=True):
                    update = {"selector": selector, "port": port, "namespace": namespace}
                    config = self._config.model_copy(update=update)
                    suffix = f"-{port}" if len(ports) > 1 else ""
                    group.create_task(Pods(config, self._defaults, suffix).follow(part))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


class _Reports:
    """The reports of all ports, as one report for the source's sink."""

    def __init__(self, sink: Sink, ports: int) -> None:
        self.sink = sink
        self.parts = [_Part(self) for _ in range(ports)]
        self._problem: str | None = None  # of the InferenceObjectives

    def set_problem(self, problem: str | None) -> None:
        """Sets the reason why the InferenceObjectives cannot be read. None: they can."""
        if problem != self._problem:
            self._problem = problem
            self.send()

    def send(self) -> None:
        """Reports the engines of all ports, once each port has a report."""
        found: list[Found] = []
        for part in self.parts:
            if part.engines is None:
                return
            found += part.engines
        problems = [*(part.fault for part in self.parts), self._problem]
        self.sink.found(found, next(filter(None, problems), None))


class _Part:
    """The sink of one port."""

    def __init__(self, reports: _Reports) -> None:
        self._reports = reports
        self.engines: Sequence[Found] | None = None
        self.fault: str | None = None  # of entries left out

    def found(self, engines: Sequence[Found], problem: str | None = None) -> None:
        """Reports the engines of the port."""
        self.engines, self.fault = engines, problem
        self._reports.send()

    def problem(self, reason: str) -> None:
        """Reports that the pods cannot be read now."""
        self._reports.sink.problem(reason)


def _pods_of(pool: Mapping[str, Any], name: str) -> tuple[str, tuple[int, ...]]:
    """Returns the label selector and the ports of a pool. Raises SourceError."""
    try:
        spec = pool["spec"]
        labels = spec["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        ports = tuple(int(port["number"]) for port in spec["targetPorts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"the InferencePool {name} is not valid: {error!r}") from None
    if not selector or not ports:
        raise SourceError(f"the InferencePool {name} has no matchLabels, or no targetPorts")
    return selector, ports


async def _get(api: Any, path: str) -> tuple[int, dict[str, Any]]:
    answer = await api.call_api(
        path,
        "GET",
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
        _preload_content=False,
        _return_http_data_only=True,
        _request_timeout=(PATIENCE_SECONDS, PATIENCE_SECONDS),
    )
    async with answer:
        body = await answer.read()
    with contextlib.suppress(orjson.JSONDecodeError):
        if isinstance(found := orjson.loads(body), dict):
            return answer.status, found
    return answer.status, {"message": body[:200].decode(errors="replace")}


def _message(answer: Mapping[str, Any]) -> str:
    return str(answer.get("message", "no message"))


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
