"""Reads a file of another router and finds out which router it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lmetric.config import ConfigError, ServerConfig, explain, reading
from lmetric.migrate import epp, litellm, nginx, production_stack, smg
from lmetric.migrate.commands import Command, commands
from lmetric.migrate.draft import Draft

KINDS = ("sglang-router", "smg", "vllm-router", "production-stack", "llm-d", "litellm", "nginx")

_EXPECTED = (
    "expected one of: the command line of sglang-router, smg or vllm-router (a script, or a Kubernetes "
    "manifest with args); values of production-stack's Helm chart (routerSpec); an EndpointPickerConfig "
    "of llm-d; a LiteLLM config (model_list); an nginx configuration with an upstream. Name the kind "
    f"with --from: {', '.join(KINDS)}"
)


def import_config(file: Path, kind: str | None = None) -> Draft:
    """Translates a file of another router.

    Args:
        kind: the other router, as in `KINDS`; None: found out from the file.

    Raises:
        ConfigError: the file cannot be read, is not a file of one of the routers, or has a value
            that is invalid here.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--from = {kind!r}: unknown kind; expected one of {', '.join(KINDS)}")
    with reading(file):
        text = file.read_text(encoding="utf-8")
    draft = _translate(file, text, kind)
    try:
        ServerConfig.model_validate(draft.settings)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{file}: {line}" for line in explain(error, {}, ServerConfig))) from None
    return draft


def _translate(file: Path, text: str, kind: str | None) -> Draft:

    if kind == "nginx" or (kind is None and _is_nginx(text)):
        draft = Draft(str(file), "nginx")
        nginx.translate(draft, file, text)
        return draft
    documents = _documents(text)
    for each, marks, translate in _MAPPINGS:
        if kind in (None, each) and (matching := [d for d in _nested(documents) if marks & d.keys()]):
            chosen = [d for d in matching if each != "llm-d" or d.get("kind") == epp.KIND]
            if chosen:
                draft = Draft(str(file), each)
                translate(draft, chosen[0], documents)
                return draft
    return _from_command(file, kind, commands(text, documents))


_MAPPINGS: tuple[tuple[str, set[str], Callable[[Draft, dict[str, Any], list[Any]], None]], ...] = (
    ("llm-d", {"kind"}, epp.translate),
    ("litellm", {"model_list"}, litellm.translate),
    ("production-stack", {"routerSpec", "servingEngineSpec"}, production_stack.translate_values),
    ("production-stack", {"routing_logic"}, production_stack.translate_dynamic),
)


def _from_command(file: Path, kind: str | None, found: list[Command]) -> Draft:
    if kind in ("llm-d", "litellm"):
        raise ConfigError(f"{file}: not a {kind} file; {_EXPECTED}")
    if kind is not None:  # a manifest can have other containers, and a script other commands
        found = [each for each in found if each.kind in (None, kind)] or found
    else:
        found = [each for each in found if each.kind is not None]
    if not found or not any(each.flags for each in found):
        raise ConfigError(f"{file}: no router's configuration; {_EXPECTED}")
    if len(found) > 1:
        shown = ", ".join(f"{each.program!r}" for each in found)
        raise ConfigError(
            f"{file}: {len(found)} router commands ({shown}); expected one: import one command per file"
        )
    [command] = found
    chosen = kind or command.kind or ""
    draft = Draft(str(file), chosen)
    if chosen == "production-stack":
        production_stack.translate_flags(draft, command.flags)
    else:
        smg.translate(draft, command.flags, launches_engines=command.launches_engines)
    return draft


def _is_nginx(text: str) -> bool:
    return re.search(r"^[ \t]*+upstream\s++[^\s{]++\s*+\{", text, re.MULTILINE) is not None


def _documents(text: str) -> list[Any]:
    """The YAML documents; none if the file is not YAML."""
    try:
        return [each for each in yaml.safe_load_all(text) if each is not None]
    except yaml.YAMLError:
        return []


def _nested(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """The mappings in documents: also those in texts, as in a ConfigMap or in Helm values."""
    for document in documents:
        if isinstance(document, Mapping):
            yield dict(document)
            yield from _nested(list(document.values()))
        elif isinstance(document, list):
            yield from _nested(document)
        elif isinstance(document, str) and "\n" in document and ":" in document:
            yield from _nested([each for each in _documents(document) if not isinstance(each, str)])
