"""Missing optional packages: their errors and the documentation."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from lmetric.extras import install

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = [
    file
    for folder in ("python", "docs", "bench", "scripts", "deploy", "examples")
    for suffix in ("py", "md", "j2", "yaml")
    for file in (ROOT / folder).rglob(f"*.{suffix}")
]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_installs_the_packages_of_the_extra(extra: str) -> None:
    assert shlex.split(install(extra)) == ["pip", "install", *EXTRAS[extra]]


def test_no_text_installs_the_router_by_its_name() -> None:
    """The package is on no index, so such a command fails; see `lmetric.extras`."""
    unpublished = re.compile(r"pip install [^`\n]*(?<![\w/])lmetric-router\b|lmetric-router\[")
    found = {str(file.relative_to(ROOT)) for file in TEXTS if unpublished.search(file.read_text())}
    assert found == set()
