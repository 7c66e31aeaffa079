"""The documents' examples work: command lines parse, links resolve, Python compiles and runs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lmetric.cli.app import COMMANDS, build
from lmetric.config import load_config
from lmetric.config.schema import ServerConfig
from lmetric_lab.sim.synthetic import check_synthetic

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "RELEASING.md",
     *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("examples/*.md"),
     *ROOT.glob("bench/*.md"), *ROOT.glob("fuzz/*.md"), *ROOT.glob("python/**/*.md")]
)  # fmt: skip
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
GROUP = typer.main.get_command(build(COMMANDS))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def steps(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Command lines of a page, in order, with the output that the page shows.

    Commands are the lines of `sh` blocks, and the prompts of `console` blocks.
    """
    fences = re.compile(r"^( *)```(console|sh)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
    for _, language, block in fences.findall(path.read_text()):
        found: list[tuple[str, list[str]]] = []
        for line in textwrap.dedent(block).replace("\\\n", " ").splitlines():
            if language == "sh" and line:
                found.append((line, []))
            elif line.startswith("$ "):
                found.append((line[2:], []))
            elif language == "console" and found and line:
                found[-1][1].append(line)
        yield from found


def commands(path: Path) -> Iterator[str]:
    """Command lines of a page, in order."""
    yield from (line for line, _ in steps(path))


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_shown_commands_parse(path: Path) -> None:
    for line in commands(path):
        program, *words = itertools.takewhile(lambda word: word not in (">", ">>", "|"), shlex.split(line))
        if program.startswith("scripts/"):
            assert (ROOT / program).stat().st_mode & 0o100, f"{line}: not executable"
        elif program == "lmetric-router" and not words[0].startswith("-"):
            assert words[0] in GROUP.commands, line
            # Parses the options without running the command; wrong ones raise.
            command, words = GROUP.commands[words[0]], words[1:]
            if nested := getattr(command, "commands", None):
                assert words[0] in nested, line
                command, words = nested[words[0]], words[1:]
            command.make_context(command.name, words)


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_shown_python_compiles(path: Path) -> None:
    for block in blocks(path, "python"):
        compile(block, str(path), "exec")


def test_the_readmes_score_expressions_run() -> None:
    shown = [block for block in blocks(ROOT / "README.md", "python") if "import lmetric as lm" in block]
    assert shown
    for block in shown:
        exec(compile(block, "README.md", "exec"), {})


def test_the_shown_way_through_a_trace_runs(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "docs" / "research" / "traces.md"
    (shown,) = blocks(path, "python")
    exec(compile(shown, "traces.md", "exec"), {})
    assert 0 < float(capsys.readouterr().out) < 1
    (described,) = blocks(path, "yaml")
    assert len(check_synthetic(yaml.safe_load(described) | {"duration_seconds": 60}, "traces.md").make())


def test_deployment_files_run_commands_that_exist_with_settings_that_load(tmp_path: Path) -> None:
    unit = (ROOT / "deploy" / "lmetric-router.service").read_text()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    manifest = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    by_kind = {document["kind"]: document for document in manifest}
    (others,) = [each for each in manifest if each["kind"] == "Service" and each is not by_kind["Service"]]
    container = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    (init,) = by_kind["Deployment"]["spec"]["template"]["spec"]["initContainers"]
    for words in (
        shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart=")))[1:],
        json.loads(next(line for line in dockerfile.splitlines() if line.startswith("CMD "))[4:]),
        container["args"],
        init["args"],
    ):
        GROUP.commands[words[0]].make_context(words[0], words[1:])
    (tmp_path / "router.yaml").write_text(by_kind["ConfigMap"]["data"]["router.yaml"])
    config = load_config(tmp_path / "router.yaml", environ={"LMETRIC__REPLICAS__TOKEN": "from-the-Secret"})
    (replicas,) = config.replicas.urls
    assert replicas == f"http://{others['metadata']['name']}:{others['spec']['ports'][0]['port']}"
    assert (others["spec"]["clusterIP"], others["spec"]["selector"]) == (
        "None",
        by_kind["Service"]["spec"]["selector"],
    )
    (source,) = config.discovery
    assert source.kubernetes is not None
    (rule,) = by_kind["Role"]["rules"]
    assert (rule["apiGroups"], rule["resources"], rule["verbs"]) == ([""], ["pods"], ["list", "watch"])
    account = by_kind["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"]
    binding = by_kind["RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert by_kind["ServiceAccount"]["metadata"]["name"] == account
    assert binding["roleRef"]["name"] == by_kind["Role"]["metadata"]["name"]
    names = {by_kind["ConfigMap"]["metadata"]["name"], container["volumeMounts"][0]["name"]}
    volume = by_kind["Deployment"]["spec"]["template"]["spec"]["volumes"][0]
    assert names == {volume["configMap"]["name"], volume["name"]}
    assert by_kind["Service"]["spec"]["selector"] == by_kind["Deployment"]["spec"]["selector"]["matchLabels"]


SITE = ROOT / "docs"
PRODUCT = [path for path in DOCUMENTS if SITE in path.parents and SITE / "research" not in path.parents]
# Files that are not the router's: their blocks begin with a comment that names them.
FOREIGN = re.compile(r"# (?!router\.yaml)[~\w./-]+\.ya?ml\b")


def words(path: Path) -> int:
    """Words of a page: what stands between spaces and has a letter or a digit."""
    return sum(any(sign.isalnum() for sign in word) for word in path.read_text().split())


def test_the_readme_stays_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"(?<!!)\[[^\]]*\]\(", text)) <= 20


def test_the_products_pages_stay_few_and_short() -> None:
    assert len(PRODUCT) <= 35, [str(path.relative_to(SITE)) for path in PRODUCT]
    assert sum(map(words, PRODUCT)) <= 60_000


def settings() -> Iterator[Any]:
    """The YAML blocks of the product's pages that set keys of the server."""
    for path in PRODUCT:
        for number, (indent, text) in enumerate(
            re.findall(r"^( *)```yaml\n(.*?)^ *```", path.read_text(), re.MULTILINE | re.DOTALL)
        ):
            block = textwrap.dedent(text) if indent else text
            content = None if FOREIGN.match(block) else yaml.safe_load(block)
            if isinstance(content, dict) and content.keys() & ServerConfig.model_fields.keys():
                yield pytest.param(block, id=f"{path.relative_to(SITE)}-{number}")


@pytest.mark.parametrize("block", list(settings()))
def test_shown_settings_load(block: str, tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(block)
    environ = dict.fromkeys(re.findall(r"\$\{(\w+)\}", block), "a-secret-of-the-environment")
    load_config(tmp_path / "router.yaml", environ=environ)


def test_the_map_of_the_house_names_files_that_exist() -> None:
    page = (SITE / "explanation" / "architecture.md").read_text()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [f"/{file}" for file in tracked.stdout.split()]
    for name in re.findall(r"`([\w./]+\.(?:py|rs))`", page):
        assert any(file.endswith(f"/{name}") for file in files), name


def test_research_is_small_and_each_page_can_be_reached_from_its_index() -> None:
    """A reader finds every study from one page; 33,000 words leave out what does not decide."""
    folder = ROOT / "docs" / "research"
    pages = {page: page.read_text() for page in folder.glob("**/*.md")}
    assert len(pages) <= 31
    assert sum(map(words, pages)) <= 33_000
    reached, todo = set(), [folder / "index.md"]
    while todo:
        if (page := todo.pop()) in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)\s]*)?\)", pages[page])
        todo += [path for link in links if (path := (page.parent / link).resolve()) in pages]
    assert reached == set(pages)


def test_each_entry_of_the_menu_names_pages() -> None:
    """UX 6: a pattern that matched nothing once moved pages to the end of the menu, silently."""
    for file in (ROOT / "docs").glob("**/.nav.yml"):
        for entry in yaml.safe_load(file.read_text()).get("nav", []):
            if entry != {"glob": "*", "ignore_no_matches": True}:
                name = next(iter(entry.values())) if isinstance(entry, dict) else entry
                assert (file.parent / name).exists(), f"{file}: {entry}"
    listed = yaml.safe_load((ROOT / "docs/how-to/.nav.yml").read_text())["nav"]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs/how-to").glob("*.md"))
