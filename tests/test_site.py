"""The documentation site: a strict build, navigation, search, and no external resources."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from browser_world import browser, needs_browser

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
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site, built once for all processes of the tests."""
    shared = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        shared = shared.parent
    out = shared / "site"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            done = build(ROOT, shared / "built")
            assert done.returncode == 0, done.stderr
            (shared / "built").rename(out)
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


@needs_browser
@pytest.mark.timeout(180)
async def test_pages_fit_a_phone_and_search_and_both_color_schemes_work(site: Path) -> None:
    handler = functools.partial(SilentHandler, directory=str(site))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    front = f"http://127.0.0.1:{server.server_port}/"
    try:
        async with browser() as chromium:
            for width, scheme, expected in ((390, "dark", "slate"), (1440, "light", "default")):
                page = await chromium.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
                for path in ("how-to/replace_round_robin/", "how-to/kubernetes/", "faq/", ""):
                    await page.goto(front + path)
                    assert await page.evaluate("document.documentElement.scrollWidth") <= width, path
                    assert await page.evaluate("document.body.dataset.mdColorScheme") == expected
                if width < 1000:
                    await page.click("label.md-header__button[for=__search]")
                await page.locator("input.md-search__input").press_sequentially("round robin")
                first = page.locator(".md-search-result__item h1").first
                await first.wait_for(timeout=60_000)
                assert await first.inner_text() == "Replace round robin in an afternoon"
                await page.goto(front + "faq/")
                await page.locator("form[data-md-component=palette] label:visible").first.click()
                assert await page.evaluate("document.body.dataset.mdColorScheme") != expected
    finally:
        server.shutdown()
        server.server_close()


class SilentHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: object) -> None:
        """Writes nothing."""
