"""The contents and dependencies of the package: licenses, locked libraries, workflow checks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")


def linked_crates() -> set[str]:
    """`name version` of the foreign crates that users' builds of the extension are made from."""
    linked: set[str] = set()
    for target in TARGETS:
        command = ["cargo", "tree", "--locked", "--offline", "-p", "lmetric-py", "--edges", "normal,build"]
        command += ["--prefix", "none", "--format", "{p}", "--target", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            name, version = line.split()[:2]
            if "(/" not in line:  # a crate of this repository
                linked.add(f"{name} {version.removeprefix('v')}")
    return linked


def test_users_builds_hold_no_release_candidate() -> None:
    """Reliability M8: a release candidate is linked only with a feature that is off by default."""
    assert [crate for crate in linked_crates() if re.search(r"-(alpha|beta|rc|pre)", crate)] == []


def test_the_notice_names_what_is_linked_and_nothing_else() -> None:
    """Reliability M8: NOTICE is current with Cargo.lock."""
    notice = (ROOT / "NOTICE").read_text()
    named = set(re.findall(r"^  (\S+ \d\S*)$", notice, re.MULTILINE))
    assert named == linked_crates(), "run scripts/make_notice"
    assert "Oniguruma LICENSE" in notice
    assert "LESSER GENERAL PUBLIC" not in notice


def test_the_wheel_ships_the_notice(tmp_path: Path) -> None:
    """Reliability M8: what `pip install` puts beside the package."""
    maturin = Path(sys.executable).parent / "maturin"
    command = [maturin, "pep517", "write-dist-info", "--metadata-directory", tmp_path]
    subprocess.run([*command, "--interpreter", sys.executable], cwd=ROOT, capture_output=True, check=True)
    (shipped,) = tmp_path.glob("*.dist-info/licenses/NOTICE")
    assert shipped.read_bytes() == (ROOT / "NOTICE").read_bytes()


def steps(workflow: str) -> list[dict[str, Any]]:
    jobs = yaml.safe_load((WORKFLOWS / workflow).read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_advisory_checks_cannot_pass_without_their_data() -> None:
    """Reliability M8: both checks run daily, on all locked packages, and no failure is ignored."""
    text = (WORKFLOWS / "advisories.yml").read_text()
    commands = [step["run"] for step in steps("advisories.yml") if "run" in step]
    (rust,) = (command for command in commands if command.startswith("cargo deny"))
    (python,) = (command for command in commands if command.startswith("pip-audit"))
    assert "advisories" in rust.split()
    assert {"--strict", "--require-hashes"} <= set(python.split())
    for tolerant in ("continue-on-error", "|| true", "--offline", "--disable-fetch", "--ignore-vuln"):
        assert tolerant not in text
    assert "schedule:" in text
    locks = yaml.safe_load(text)["jobs"]["python"]["strategy"]["matrix"]["lock"]
    assert set(locks) == {path.name for path in ROOT.glob("requirements*.lock")}


def test_nightly_checks_licenses_sources_and_the_notice() -> None:
    """Reliability M8: what needs no data from outside runs every night; a release has an SBOM."""
    nightly = (ROOT / "scripts" / "nightly").read_text()
    assert re.search(r"^[^#\n]*cargo deny .*check licenses bans sources$", nightly, re.MULTILINE)
    assert re.search(r"^scripts/make_notice --check$", nightly, re.MULTILINE)
    runs = [step["run"] for step in steps("release.yml") if "run" in step]
    assert any("make_notice --check --sbom" in run for run in runs)


@pytest.mark.parametrize("workflow", sorted(path.name for path in WORKFLOWS.glob("*.yml")))
def test_workflows_get_no_more_rights_than_they_name(workflow: str) -> None:
    """Reliability M8: read-only by default, pinned actions, no credentials in checkouts."""
    content = yaml.safe_load((WORKFLOWS / workflow).read_text())
    assert content["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if "uses" in step:
            assert re.search(r"@(v\d+|[0-9a-f]{40})$", step["uses"])
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
