"""The documentation site: a strict build, navigation, search, and no external resources."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_in_the_navigation_and_in_the_search(site: Path) -> None:
    front = (site / "index.html").read_text()
    for section in ("How-to guides", "Reference", "Explanation", "Research"):
        assert section in front
    indexed = {
        each["location"].partition("#")[0]
        for each in json.loads((site / "search" / "search_index.json").read_text())["docs"]
    }
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        name = name.parent if name.name == "index" else name
        location = "" if name == Path() else f"{name}/"
        assert location in indexed, page
        assert f'href="{location or "."}"' in front, f"{page} is in no navigation"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(r'<(?:script|img|iframe)[^>]+src="(https?:)?//|<link[^>]+href="(https?:)?//')
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        assert not loads.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


def test_files_outside_of_docs_are_part_of_the_site(site: Path) -> None:
    assert "PodDisruptionBudget" in (site / "files" / "deploy" / "kubernetes.yaml" / "index.html").read_text()
    assert (site / "files" / "CHANGELOG" / "index.html").exists()
    assert (site / "files" / "bench" / "libra" / "results" / "5.csv").read_bytes() == (
        ROOT / "bench" / "libra" / "results" / "5.csv"
    ).read_bytes()


@pytest.mark.parametrize(
    ("link", "problem"),
    [("access.md#no-such-part", "no-such-part"), ("../../deploy/nothing.yaml", "leads to no file")],
)
def test_a_broken_link_fails_the_build(link: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "docs" / "how-to").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    (tmp_path / "scripts" / "site_hooks.py").write_text((ROOT / "scripts" / "site_hooks.py").read_text())
    (tmp_path / "docs" / "index.md").write_text(
        f"# Front\n\n[One]({link})\n".replace("access", "how-to/access")
    )
    (tmp_path / "docs" / "how-to" / "access.md").write_text("# Access\n")
    done = build(tmp_path, tmp_path / "out")
    assert done.returncode != 0
    assert problem in done.stderr
