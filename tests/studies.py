"""The modules of a study in `bench`, for tests of what its figures rest on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path


def importable(driver: Path) -> Iterator[None]:
    """What lies beside a driver can be imported for a while: studies have modules of the same names."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(driver.parent), str(driver.parents[1])]
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(driver.parents[1]) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
