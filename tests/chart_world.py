"""Renders the Helm chart. helm and kubeconform come from scripts/chart_tools, or from the path."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy" / "helm" / "lmetric-router"
TOOLS = ROOT / ".cache" / "chart"
VARIANTS = {"default": None, **{path.stem: path for path in sorted((CHART / "ci").glob("*.yaml"))}}
NAMESPACE = "gateway"
Objects = list[dict[str, Any]]


def tool(name: str) -> str:
    """Returns the path of a program. Skips the test if scripts/chart_tools has not run."""
    found = shutil.which(name, path=os.pathsep.join((str(TOOLS / "bin"), os.environ["PATH"])))
    if found is None:
        pytest.skip(f"{name} is not installed: run scripts/chart_tools")
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *arguments], capture_output=True, text=True, check=False)


def _values(variant: str) -> list[str]:
    path = VARIANTS[variant]
    return ["--values", str(path)] if path else []


def lint(variant: str) -> subprocess.CompletedProcess[str]:
    return helm("lint", "--strict", str(CHART), *_values(variant))


@functools.cache
def rendered(variant: str, *settings: str, chart: Path = CHART) -> str:
    """Returns the objects of a variant as YAML. ``settings``: further KEY=JSON values."""
    done = template(variant, *settings, chart=chart)
    assert done.returncode == 0, done.stderr
    return done.stdout


def template(variant: str, *settings: str, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    further = [text for setting in settings for text in ("--set-json", setting)]
    command = ("template", "lm", str(chart), "--namespace", NAMESPACE, *_values(variant), *further)
    return helm(*command)


def objects(variant: str, *settings: str, chart: Path = CHART) -> Objects:
    return [each for each in yaml.safe_load_all(rendered(variant, *settings, chart=chart)) if each]


def of_kind(found: Objects, kind: str) -> Objects:
    return [each for each in found if each["kind"] == kind]


def only(found: Objects, kind: str) -> dict[str, Any]:
    (one,) = of_kind(found, kind)
    return one


def pod(found: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = only(found, "Deployment")["spec"]["template"]["spec"]
    return spec


def router(found: Objects) -> dict[str, Any]:
    (container,) = pod(found)["containers"]
    assert container["name"] == "router"
    return dict(container)


def definitions() -> Objects:
    """Returns the definitions of custom resources. Skips the test without scripts/chart_tools."""
    files = sorted((TOOLS / "crds").glob("*.yaml"))
    if not files:
        pytest.skip("the definitions of custom resources are missing: run scripts/chart_tools")
    return [yaml.safe_load(file.read_text()) for file in files]


def write_schemas(folder: Path) -> None:
    """Writes JSON schemas of the custom resources, in which unknown fields are errors."""

    def strict(schema: dict[str, Any]) -> dict[str, Any]:
        made = dict(schema)
        for key in ("properties", "items", "additionalProperties"):
            if isinstance(inner := schema.get(key), dict):
                made[key] = (
                    {name: strict(each) for name, each in inner.items()}
                    if key == "properties"
                    else strict(inner)
                )
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
        return made

    for definition in definitions():
        kind = definition["spec"]["names"]["kind"].lower()
        for version in definition["spec"]["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            (folder / f"{kind}_{version['name']}.json").write_text(json.dumps(schema))


def on_pages() -> Objects:
    """Returns the whole objects in the code blocks of the how-to pages."""
    blocks = [
        block
        for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    return [
        each
        for block in blocks
        if block.lstrip().startswith("apiVersion: ")
        for each in yaml.safe_load_all(block)
    ]


PAGE = ROOT / "docs" / "how-to" / "kubernetes.md"


def write_page_values(folder: Path) -> None:
    """Writes the files of Helm values that the steps of the page show."""
    for name, text in re.findall(
        r"^```yaml\n# (\w+\.yaml)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    ):
        if not (folder / name).exists():  # another section shows other values
            (folder / name).write_text(text)


def page_commands(program: str) -> list[list[str]]:
    """Returns the arguments of a program's commands on the page, in order."""
    found = re.findall(rf"^\$ {program} (.*)$", PAGE.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in found]


def router_yaml(found: Objects) -> str:
    (text,) = (
        each["data"]["router.yaml"] for each in of_kind(found, "ConfigMap") if "router.yaml" in each["data"]
    )
    return str(text)
