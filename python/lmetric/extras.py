"""Optional packages: the command that installs them, for errors about a missing one."""

from __future__ import annotations

import shlex
from importlib.metadata import requires


def install(extra: str) -> str:
    """The command that installs the packages of an extra of pyproject.toml.

    It names the packages themselves, so it also works for a wheel file or a clone.
    """
    found = [requirement.partition(";") for requirement in requires("lmetric-router") or ()]
    packages = [package.strip() for package, _, marker in found if f"extra == '{extra}'" in marker]
    return f"pip install {shlex.join(packages)}"
