"""Reads YAML and JSON files. Errors name the file and the line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import Resolver

from lmetric._core import LmetricError
from lmetric.config.kinds import token_problem


class ConfigError(LmetricError):
    """An invalid configuration. The message gives the place, the value, and what was expected."""


# Secret keys: messages do not show their values.
SECRETS = frozenset({"api_key", "token", "salt_secret", "redis_url"})
MAX_DEPTH = 64  # of nested lists and mappings: readers of values are recursive
MAX_ALIASED = 100_000  # values that aliases may repeat: a few lines can name billions

try:
    from yaml.cyaml import CParser  # type: ignore[attr-defined]
except ImportError:  # PyYAML without libyaml
    _Loader: Any = yaml.SafeLoader
else:

    class _Loader(CParser, Composer, SafeConstructor, Resolver):  # type: ignore[no-redef]
        """`yaml.SafeLoader` with the scanner of libyaml, which is several times as fast.

        `yaml.CSafeLoader` also composes nodes in C. Deep nesting ends the process there.
        """

        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

        check_node, get_node = Composer.check_node, Composer.get_node
        get_single_node = Composer.get_single_node


class TooLarge(ComposerError):
    """A YAML file beyond the bounds of `BoundedLoader`."""


class BoundedLoader(_Loader):  # type: ignore[misc]
    """A YAML loader for files of others.

    It refuses deep nesting, and aliases that repeat many values or contain themselves. Every error
    is a YAMLError with the line.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._nodes = self._aliased = 0
        self._sizes: dict[int, int] = {}  # nodes below a node, aliases included

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark: Any = event.start_mark
        before = self._nodes
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooLarge(None, None, f"nested more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._nodes += 1
            self._sizes[id(node)] = self._nodes - before
            return node
        size = self._sizes.get(id(node))
        if size is None:
            raise TooLarge(None, None, f"alias {event.anchor!r} contains itself", mark)
        self._nodes += size
        self._aliased += size
        if self._aliased > MAX_ALIASED:
            raise TooLarge(None, None, f"aliases repeat more than {MAX_ALIASED:,} values", mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError) as error:  # such as a date in month 13
            raise ConstructorError(None, None, str(error), node.start_mark) from None


class UniqueKeys(BoundedLoader):
    """A bounded YAML loader that refuses duplicate keys."""

    secret_keys = False  # errors do not show them

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # an error in the base class
            if key.value in seen:
                named = "" if self.secret_keys else f" {key.value!r}"
                raise ConstructorError(None, None, f"duplicate key{named}", key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


# Problems of the YAML reader, by the start of its message.
_YAML_PROBLEMS = {
    "mapping values are not allowed": "a second colon in one line; put the value in quotes",
    "found character": "a tab, or a sign such as @ or %, where a value begins; use spaces, or quotes",
    "did not find expected ',' or ']'": "a list in [ ] lacks a comma or its end",
    "did not find expected ',' or '}'": "a mapping in { } lacks a comma or its end",
    "expected ',' or": "a list in [ ] or a mapping in { } lacks a comma or its end",
    "did not find expected": "the indentation does not fit the lines above",
    "expected <block end>": "the indentation does not fit the lines above",
    "could not find expected ':'": "a key without a colon; write KEY: VALUE",
    "found unexpected end of stream": "a quote is not closed",
    "could not determine a constructor": "a tag (!) is not supported; put the value in quotes",
}


def _yaml_problem(text: str) -> str:
    return next((words for begin, words in _YAML_PROBLEMS.items() if text.startswith(begin)), text)


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Converts errors of reading a YAML or JSON file to ConfigErrors that name the file and the
    line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{file}{line}: {_yaml_problem(error.problem or 'not YAML')}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: {error.msg}") from None


KeyPath = tuple[str | int, ...]
Lines = dict[KeyPath, int]
"""Line numbers in a YAML file, by the path of keys and list positions."""


def read_yaml_mapping(file: Path, *, secret_keys: bool = False) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises ConfigError, which names the file and the line.

    `secret_keys`: errors do not show the keys.
    """
    return read_yaml_lines(file, secret_keys=secret_keys)[0]


def read_yaml_lines(
    file: Path, *, secret_keys: bool = False, if_empty: str | None = None
) -> tuple[dict[Any, Any], Lines]:
    """The mapping in a YAML file, and the lines of its keys and list items.

    `secret_keys`: errors do not show the keys. `if_empty`: an empty file is an error, with this
    hint. Raises ConfigError, which names the file and the line.
    """
    lines: Lines = {}
    with reading(file):
        text = file.read_text(encoding="utf-8")
        if if_empty is not None and not text.strip("\ufeff \t\r\n"):
            raise ConfigError(f"{file}: the file is empty; {if_empty}")
        loader = UniqueKeys(text)
        loader.secret_keys = secret_keys
        try:
            node = loader.get_single_node()
            content = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        _find_lines(node, (), lines, set())
    if content is None:
        return {}, lines
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a mapping, found {type(content).__name__}")
    return content, lines


def _find_lines(node: yaml.Node | None, path: KeyPath, lines: Lines, seen: set[int]) -> None:
    """Adds the lines of the keys and items below a node. Values of aliases have one place."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                here = (*path, key.value)
                lines[here] = key.start_mark.line + 1
                _find_lines(value, here, lines, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _find_lines(item, (*path, index), lines, seen)


def place_of(
    loc: Sequence[str | int], origin: Mapping[tuple[str, ...], str], lines: Mapping[str, Lines]
) -> str:
    """The source of a key, as the prefix of a message: `file:line: `; empty if it is unknown."""
    names = tuple(str(part) for part in loc if isinstance(part, str))
    source = next((origin[names[:n]] for n in range(len(names), -1, -1) if names[:n] in origin), None)
    line = _line_of(loc, lines.get(source or "", {}))
    return "".join(f"{part}:" for part in (source, line) if part) + " " if source else ""


def _line_of(loc: Sequence[str | int], lines: Lines) -> int | None:
    """The line of the innermost part of a path that is in the file."""
    return next((lines[part] for n in range(len(loc), 0, -1) if (part := tuple(loc[:n])) in lines), None)


def read_secret(secret: SecretStr | None, file: Path | None) -> str | None:
    """The secret, or the content of the file with the secret; None if neither is set.

    Raises ConfigError, which names the file and never its content.
    """
    if file is None:
        return secret.get_secret_value() if secret is not None else None
    with reading(file):
        text = file.read_text(encoding="utf-8").strip()
    if (problem := token_problem(text)) is not None:
        raise ConfigError(f"{file}: the content is not a token: {problem}")
    return text
