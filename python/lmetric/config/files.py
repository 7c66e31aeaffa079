"""Reads YAML and JSON files. Errors name the file and the line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from lmetric._core import LmetricError
from lmetric.config.kinds import token_problem


class ConfigError(LmetricError):
    """An invalid configuration. The message gives the place, the value, and what was expected."""


class UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


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
        raise ConfigError(f"{file}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: {error.msg}") from None


def read_yaml_mapping(file: Path) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises ConfigError, which names the file and the line."""
    with reading(file):
        content = yaml.load(file.read_text(encoding="utf-8"), UniqueKeys)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a mapping, found {type(content).__name__}")
    return content


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
