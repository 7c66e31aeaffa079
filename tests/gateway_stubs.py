"""Stand-ins for the modules of gateways that tests cannot install beside the router.

The gateways themselves run in `tests/real`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest


class Base:
    """A base class of a gateway, or one of its metrics."""

    def __init__(self, *_: Any) -> None: ...

    def set_default_tags(self, _: Any) -> None: ...

    def set(self, _: Any) -> None: ...

    def inc(self, _: Any) -> None: ...

    def select_available_replicas(self, candidates: Any) -> Any:
        return candidates


_MODULES = {
    "ray.serve.metrics": ("Counter", "Gauge"),
    "ray.serve.request_router": ("PendingRequest", "ReplicaID", "RequestRouter", "RunningReplica"),
    "litellm": (),
    "litellm.integrations.custom_logger": ("CustomLogger",),
    "litellm.types.router": ("CustomRoutingStrategyBase",),
}


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a module of `lmetric.gateways` over the stand-ins."""
    for module, classes in _MODULES.items():
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        for each in classes:
            monkeypatch.setattr(sys.modules[module], each, type(each, (Base,), {}), raising=False)
    monkeypatch.setattr(sys.modules["litellm"], "callbacks", [], raising=False)
    monkeypatch.delitem(sys.modules, f"lmetric.gateways.{name}", raising=False)
    loaded = importlib.import_module(f"lmetric.gateways.{name}")
    monkeypatch.delitem(sys.modules, f"lmetric.gateways.{name}")
    return loaded
