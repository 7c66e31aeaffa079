"""Reads a file of another router and finds out which router it belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lmetric.config import ConfigError, ServerConfig, reading
from lmetric.config.files import BoundedLoader, TooLarge
from lmetric.config.problems import explain
from lmetric_lab.migrate import epp, litellm, nginx, production_stack, service, smg
from lmetric_lab.migrate.commands import Command, commands
from lmetric_lab.migrate.draft import Draft

MAX_BYTES = 1 << 20  # of a file; Kubernetes stores smaller objects, too
MAX_TEXTS = 2  # depth of YAML texts inside YAML: a ConfigMap in Helm values

KINDS = (
    "sglang-router",
    "smg",
    "vllm-router",
    "production-stack",
    "llm-d",
    "litellm",
    "nginx",
    "kubernetes",
)

_EXPECTED = (
    "expected one of: the command line of sglang-router, smg or vllm-router (a script, or a Kubernetes "
    "manifest with args); values of production-stack's Helm chart (routerSpec); an EndpointPickerConfig "
    "of llm-d; a LiteLLM config (model_list); an nginx configuration with an upstream; a Kubernetes "
    "Service. Name the kind "
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
        with file.open("rb") as source:
            content = source.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{file}: larger than {MAX_BYTES:,} bytes; import the router's part of it")
        try:
            draft = _translate(file, content.decode(), kind)
        except UnicodeDecodeError:
            raise
        # Files of others have any shape, and translators read the expected one.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{file}: a value is missing or has another shape than in the documentation of that router "
                f"({type(error).__name__}: {error})"
            ) from None
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
    mappings = list(_nested(documents, set()))
    for each, marks, translate in _MAPPINGS:
        if kind in (None, each) and (matching := [d for d in mappings if marks & d.keys()]):
            chosen = [d for d in matching if each != "llm-d" or d.get("kind") == epp.KIND]
            if chosen:
                draft = Draft(str(file), each)
                translate(draft, chosen[0], documents)
                return draft
    found = commands(text, documents)
    services = [each for each in mappings if each.get("kind") == service.KIND]
    # A manifest of a router has a Service, too: its command says more.
    if services and (kind == "kubernetes" or (kind is None and not any(each.kind for each in found))):
        if len(services) > 1:
            raise ConfigError(f"{file}: {len(services)} Services; expected one: the one of the engines")
        draft = Draft(str(file), "kubernetes")
        service.translate(draft, services[0])
        return draft
    return _from_command(file, kind, found)


_MAPPINGS: tuple[tuple[str, set[str], Callable[[Draft, dict[str, Any], list[Any]], None]], ...] = (
    ("llm-d", {"kind"}, epp.translate),
    ("litellm", {"model_list"}, litellm.translate),
    ("production-stack", {"routerSpec", "servingEngineSpec"}, production_stack.translate_values),
    ("production-stack", {"routing_logic"}, production_stack.translate_dynamic),
)


def _from_command(file: Path, kind: str | None, found: list[Command]) -> Draft:
    if kind in ("llm-d", "litellm", "kubernetes"):
        raise ConfigError(f"{file}: not a {kind} file; {_EXPECTED}")
    if kind is not None:  # a manifest can have other containers, and a script other commands
        found = [each for each in found if each.kind in (None, kind)] or found
    else:
        found = [each for each in found if each.kind is not None]
    if not found or not any(each.flags for each in found):
        raise ConfigError(f"{file}: no router's configuration; {_EXPECTED}")
    if len(found) > 1:
        shown = ", ".join(f"{each.program!r}" for each in found[:3]) + (", ..." if len(found) > 3 else "")
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
    block = r"(?:upstream\s++[^\s{]++|server|http|location\s++[^\s{][^{\n]*+)\s*+\{"
    return re.search(rf"^[ \t]*+{block}", text, re.MULTILINE) is not None


def _documents(text: str) -> list[Any]:
    """The YAML documents; none if the file is not YAML. Raises TooLarge."""
    try:
        return [each for each in yaml.load_all(text, BoundedLoader) if each is not None]
    except TooLarge:
        raise
    except yaml.YAMLError:
        return []


def _nested(documents: list[Any], seen: set[str], texts: int = 0) -> Iterator[dict[str, Any]]:
    """The mappings in documents: also those in texts, as in a ConfigMap or in Helm values.

    ``seen``: texts that were read. ``texts``: how many texts are around the documents.
    """
    for document in documents:
        if isinstance(document, Mapping):
            yield dict(document)
            yield from _nested(list(document.values()), seen, texts)
        elif isinstance(document, list):
            yield from _nested(document, seen, texts)
        elif (
            isinstance(document, str)
            and "\n" in document
            and ":" in document
            and texts < MAX_TEXTS
            and document not in seen
        ):
            seen.add(document)
            inside = [each for each in _documents(document) if not isinstance(each, str)]
            yield from _nested(inside, seen, texts + 1)
