"""The command lines of routers in a script, or in the containers of Kubernetes manifests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Flags = dict[str, list[list[str]]]
"""The values of each flag, one list for each time that it was given."""

_ENDS = {"&&", "||", ";", "|", "&", ">", ">>", "2>&1", "<"}

# In this order: the first pattern that matches a word decides.
_PROGRAMS = (
    ("sglang-router", re.compile(r"(^|/)sglang[-_]router$|^sglang_router\.launch_(router|server)$")),
    ("sglang-router", re.compile(r"(^|/)sgl-model-gateway$")),
    ("smg", re.compile(r"(^|/)smg$")),
    ("production-stack", re.compile(r"^vllm_router\.app$")),
    ("vllm-router", re.compile(r"(^|/)vllm-router$|^vllm_router\.launch_(router|server)$")),
)
# Flags that only one router has: a manifest's args do not name the program.
_OWN_FLAGS = (
    ("production-stack", {"--routing-logic", "--static-backends", "--k8s-label-selector"}),
    (
        "vllm-router",
        {"--vllm-pd-disaggregation", "--vllm-discovery-address", "--intra-node-data-parallel-size"},
    ),
    ("sglang-router", {"--pd-disaggregation", "--dp-aware"}),
)
_IMAGES = (("vllm-router", "vllm-router"), ("smg", "/smg"), ("sglang-router", "sgl"))


@dataclass(frozen=True)
class Command:
    """A command line.

    Attributes:
        program: the word that names the program, or the container's name.
        kind: the router, as in `KINDS`; None: unknown.
        launches_engines: whether the command starts the engines, too.
    """

    program: str
    kind: str | None
    flags: Flags
    launches_engines: bool = False


def commands(text: str, documents: list[Any]) -> list[Command]:
    """The commands in the containers of manifests, or else in the text as a script.

    A text that begins with a flag is the arguments of one command.
    """
    found = [each for container in _containers(documents) for each in _of_container(container)]
    if found:
        return found
    found = _of_script(text)
    if not found and re.match(r"\s*--\w", text):
        flags = flags_of(_words(text))
        found = [Command("arguments", _kind_of_flags(flags), flags)]
    return found


def flags_of(words: list[str]) -> Flags:
    """The flags of a command line. Words before the first flag are left out."""
    flags: Flags = {}
    values: list[str] | None = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            flags.setdefault(name, []).append(values)
        elif values is not None:
            values.append(word)
    return flags


def _containers(documents: list[Any]) -> Iterator[Mapping[str, Any]]:
    for document in documents:
        if isinstance(document, Mapping):
            for key, value in document.items():
                if key == "containers" and isinstance(value, list):
                    yield from (each for each in value if isinstance(each, Mapping))
                else:
                    yield from _containers([value])
        elif isinstance(document, list):
            yield from _containers(document)


def _of_container(container: Mapping[str, Any]) -> list[Command]:
    words: list[str] = []
    for key in ("command", "args"):
        value = container.get(key) or []
        words += [str(each) for each in (value if isinstance(value, list) else [value])]
    for word in words:
        if "\n" in word or " --" in word:  # bash -c SCRIPT
            return _of_script(word)
    named = next((found for word in words if (found := _kind_of_program(word))), None)
    flags = flags_of(words)
    by_image = (kind for kind, part in _IMAGES if part in str(container.get("image", "")))
    kind = _kind_of_flags(flags, named) or next(by_image, None)
    if kind is None:
        return []
    return [Command(str(container.get("name", "container")), kind, flags, _launches(words))]


def _of_script(text: str) -> list[Command]:
    found = []
    words = _words(text)
    for index, word in enumerate(words):
        kind = _kind_of_program(word)
        after = words[index + 1 : index + 2]
        if kind is None or (after and not after[0].startswith("-") and after[0] != "launch"):
            continue
        end = next((at for at in range(index, len(words)) if words[at] in _ENDS), len(words))
        flags = flags_of(words[index + 1 : end])
        found.append(Command(word, _kind_of_flags(flags, kind), flags, _launches([word])))
    return found


def _words(text: str) -> list[str]:
    """The words of a script. Each end of a command becomes a word of its own."""
    lines = re.sub(r"\\\s*\n", " ", text).splitlines()
    words: list[str] = []
    for line in lines:
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
            lexer.whitespace_split = True
            words += [*lexer, ";"]
        except ValueError:  # an open quote: not a command line
            words.append(";")
    # Arguments on several lines, without a backslash.
    return [word for word in words if word != ";"] if re.match(r"\s*--\w", text) else words


def _kind_of_program(word: str) -> str | None:
    return next((kind for kind, pattern in _PROGRAMS if pattern.search(word)), None)


def _kind_of_flags(flags: Flags, named: str | None = None) -> str | None:
    """The kind by the flags that only one router has. Two routers are named vllm-router."""
    if named not in (None, "vllm-router"):
        return named
    return next((kind for kind, own in _OWN_FLAGS if own & flags.keys()), named)


def _launches(words: list[str]) -> bool:
    return any(word.endswith("launch_server") for word in words)
