"""Begins the turn guard in router processes that tests start (`conftest.py` sets the environment).

Python imports this file when it starts. It costs nothing until `lmetric.server.app` is imported.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_SERVER = "lmetric.server.app"


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _SERVER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader: Any = None if spec is None else spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            from turn_guard import watch_servers

            watch_servers(module.Server, _report, own=True)

        loader.exec_module = exec_module
        return spec


def _report(text: str) -> None:
    with open(os.environ["TURN_GUARD_FILE"], "a") as file:
        file.write(f"{text}\n")


if "TURN_GUARD_FILE" in os.environ:
    sys.meta_path.insert(0, _Finder())
