"""The house: what the scripts say where something is missing, and what the lock files hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("script", ["demo", "test", "gate"])
def test_without_rust_one_line_says_what_to_install(script: str, tmp_path: Path) -> None:
    for tool in ("bash", "env", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        [ROOT / "scripts" / script],
        env={"PATH": str(tmp_path), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "install Rust 1.88 or newer" in last
    assert len([line for line in done.stderr.splitlines() if not line.startswith("gate:")]) == 1
    assert not (tmp_path / "venv").exists()


def test_every_dependency_is_locked_with_hashes_and_names_no_registry() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    wanted = [*project["project"]["dependencies"], *groups["build"], *groups["dev"]]
    texts = [text for text in wanted if isinstance(text, str)]
    names = {re.split(r"[<>=!~;\[ ]", text)[0].lower().replace("_", "-") for text in texts}
    locked = dict(re.findall(r"^([a-z0-9.-]+)==[^\n]*\\\n((?:    --hash[^\n]*\n?)+)", lock, re.MULTILINE))
    assert names <= set(locked), f"run scripts/lock: {names - set(locked)}"
    assert "://" not in lock


def test_the_users_packages_are_among_the_developers() -> None:
    """So that an environment for tests also serves a user, and both try the same versions."""
    users, developers = (
        set(re.findall(r"^([a-z0-9.-]+==[^ ;]+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in ("requirements-user.lock", "requirements.lock")
    )
    assert len(users) > 40
    assert users <= developers


def test_the_oldest_rust_is_the_same_everywhere() -> None:
    oldest = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["rust-version"]
    assert f"Rust {oldest}" in (ROOT / "README.md").read_text()
    assert f"Rust {oldest} or newer" in (ROOT / "scripts" / "setup").read_text()


def test_paths_of_the_api_have_one_definition() -> None:
    """Server 7.10 f: `CHAT` and `COMPLETIONS` were defined three times."""
    sources = "\n".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    for name in ("CHAT", "COMPLETIONS"):
        assert len(re.findall(rf"^{name} = ", sources, re.MULTILINE)) == 1, name
