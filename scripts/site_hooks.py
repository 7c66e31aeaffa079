"""Hooks of the documentation site: pages for linked files of the repository outside of docs/.

A link such as `../../deploy/kubernetes.yaml` works in the repository but leaves the site. The hooks
add each linked file below `files/` and point the links there. Markdown and source files become
pages, data files are copied, and a folder becomes its README or a list of its files.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LANGUAGES = {
    ".yaml": "yaml",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".service": "ini",
    ".rs": "rust",
}
DATA = {".csv", ".json", ".gz", ".png", ".svg"}
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def _links(markdown: str, change: Callable[[str], str]) -> str:
    """Returns the page with changed link targets; leaves URLs and fenced blocks as they are."""

    def one(match: re.Match[str]) -> str:
        before, target, anchor, after = match.groups()
        if not re.match(r"[a-z]+:", target):
            target = change(target)
        return f"{before}{target}{anchor or ''}{after}"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(one, part) for part in parts[::2]]
    return "".join(parts)


def _source(uri: str) -> Path:
    """The file of the repository behind a page of the site."""
    if not uri.startswith("files/"):
        return DOCS / uri
    path = ROOT / uri.removeprefix("files/")
    return path if path.exists() else path.with_suffix("")


def _uri(path: Path) -> str:
    """The page of the site for a file of the repository."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    if path.is_dir() and (path / "README.md").exists():
        path /= "README.md"
    uri = f"files/{path.relative_to(ROOT)}"
    return uri if path.suffix in DATA or path.suffix == ".md" else f"{uri}.md"


def _resolve(uri: str, target: str) -> Path:
    path = Path(os.path.normpath(_source(uri).parent / target))
    if not path.exists():
        raise SystemExit(f"site: {uri}: the link {target} leads to no file")
    return path


def _content(path: Path) -> str:
    """The Markdown of a page for a file outside of docs/."""
    if path.suffix == ".md":
        return path.read_text()
    name = path.relative_to(ROOT)
    head = f"---\nsearch: {{ exclude: true }}\n---\n\n# {name}\n\n"
    if path.is_dir():
        listed = subprocess.run(
            ["git", "ls-files", "."], cwd=path, check=True, capture_output=True, text=True
        ).stdout.split()
        return f"{head}This folder of the repository holds:\n\n" + "".join(f"- `{each}`\n" for each in listed)
    return f"{head}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the linked files, and the files that those link in turn."""
    todo = [(file.src_uri, file.content_string) for file in files.documentation_pages()]

    def visit(uri: str, markdown: str) -> None:
        def note(target: str) -> str:
            path = _resolve(uri, target)
            added = _uri(path)
            if not path.is_relative_to(DOCS) and files.get_file_from_path(added) is None:
                if path.suffix in DATA:
                    files.append(File.generated(config, added, abs_src_path=str(path)))
                else:
                    content = _content(_source(added))
                    files.append(File.generated(config, added, content=content))
                    if added.endswith("README.md") or path.suffix == ".md":
                        todo.append((added, content))
            return target

        _links(markdown, note)

    while todo:
        visit(*todo.pop())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files outside of docs/ to their pages."""
    uri = page.file.src_uri
    folder = PurePosixPath(uri).parent

    def change(target: str) -> str:
        path = _resolve(uri, target)
        if path.is_relative_to(DOCS) and not uri.startswith("files/"):
            return target
        return os.path.relpath(_uri(path), folder)

    return _links(markdown, change)
