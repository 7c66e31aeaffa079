"""A configuration in progress: settings, notes on them, and remarks."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
import yaml

from lmetric.config import ConfigError
from lmetric.defaults import DEFAULT_POLICY
from lmetric.printable import printable

WIDTH = 100
OLD_RULE = f"The old rule. `{DEFAULT_POLICY}` is this router's default"  # a note on `policy`
SECRET = re.compile(
    r"(api|master|salt|access)[-_]?key|password|secret|dsn|credential|(^|[-_.])(token|url)$", re.IGNORECASE
)
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_SECONDS = {"ms": 0.001, "": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class Draft:
    """Settings of this router, collected from a file of another router.

    Args:
        source: the file's name, for error messages.
        kind: the other router, as in `KINDS`.

    Attributes:
        settings: the settings, as in a configuration file.
        notes: comments for top-level keys.
        remarks: as keys, pairs of a setting of the other router and why it has no equivalent.
    """

    def __init__(self, source: str, kind: str) -> None:
        self.source = source
        self.kind = kind
        self.settings: dict[str, Any] = {}
        self.notes: dict[str, list[str]] = {}
        self.remarks: dict[tuple[str, str], None] = {}  # in their order
        self._engines: set[bytes] = set()

    def set(self, path: str, value: Any, note: str | None = None) -> None:
        """Sets `path`, such as ``timeouts.request``, with a note for readers."""
        *sections, key = path.split(".")
        into = self.settings
        for section in sections:
            into = into.setdefault(section, {})
        into[key] = value
        if note is not None:
            self.note(path.partition(".")[0], note)

    def note(self, key: str, text: str) -> None:
        """Adds a comment for the top-level key `key`."""
        self.notes.setdefault(key, []).append(text)

    def set_aliases(self, found: Mapping[str, Mapping[str, float]]) -> None:
        """Sets `aliases` from weights by model, by alias. The only model of an alias needs none."""
        if found:
            one = {name: next(iter(models)) if len(models) == 1 else models for name, models in found.items()}
            self.set("aliases", one)

    def remark(self, what: str, why: str, value: object = None) -> None:
        """Notes that the setting `what` has no equivalent. The value of a secret is not shown."""
        shown = what
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            text = "***" if SECRET.search(what) else str(value)
            shown = f"{what} {text}" if len(text) <= 60 and "\n" not in text else what
        self.remarks[shown, why] = None

    def add_engine(self, url: str, what: str, **settings: Any) -> None:
        """Adds an engine, or a remark if the router cannot use its URL."""
        engine = self.engine(url, what, **settings)
        if engine is not None and self.is_new(engine):
            self.settings.setdefault("engines", []).append(engine)

    def is_new(self, engine: dict[str, Any], *, model: str = "") -> bool:
        """Whether no engine of the model with the same settings has been added before."""
        key = orjson.dumps([model, engine], option=orjson.OPT_SORT_KEYS)
        new = key not in self._engines
        self._engines.add(key)
        return new

    def engine(self, url: str, what: str, **settings: Any) -> dict[str, Any] | None:
        """The entry of an engine; None, and a remark, if the router cannot use its URL."""
        url = url.rstrip("/").removesuffix("/v1")
        if url.startswith("grpc"):
            self.remark(what, "engines need HTTP; start an HTTP server on the engine", url)
            return None
        if "://" not in url and not url.startswith("unix:"):
            url = f"http://{url}"
        if not re.fullmatch(r"(https?://[^/\s<>$]+(/[^\s<>$]*)?|unix:\S+)", url):
            self.remark(what, "not an address; add the engine to `engines`", url)
            return None
        return {"url": url, **settings}

    def text(self, what: str, value: object) -> str:
        """`value` as text. Raises ConfigError."""
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise self.error(what, value, "a text")

    def number(self, what: str, value: object, *, whole: bool = False) -> float | int:
        """`value` as a number. Raises ConfigError."""
        try:
            number = float(self.text(what, value))
        except ValueError:
            raise self.error(what, value, "a number") from None
        if not math.isfinite(number):
            raise self.error(what, value, "a finite number")
        return int(number) if whole or number == int(number) else number

    def seconds(self, what: str, value: str) -> float | int:
        """A time such as 30s, 10m or 500ms, in seconds. Raises ConfigError."""
        parts = re.findall(r"(\d+)(ms|[smhd]?)", value)
        if not parts or "".join(n + unit for n, unit in parts) != value:
            raise self.error(what, value, "a time such as 30s")
        total = sum(int(n) * _SECONDS[unit] for n, unit in parts)
        return int(total) if total == int(total) else total

    def size_bytes(self, what: str, value: str) -> int:
        """A size such as 512m, in bytes. Raises ConfigError."""
        parts = re.fullmatch(r"(\d+)([kmg]?)", value.lower())
        if parts is None:
            raise self.error(what, value, "a size such as 32m")
        return int(parts[1]) * _UNITS[parts[2]]

    def error(self, what: str, value: object, expected: str) -> ConfigError:
        """The error of a value that cannot be read."""
        shown = "***" if SECRET.search(what) else repr(value)
        if isinstance(value, dict | list):  # its values may be secrets
            shown = "a mapping" if isinstance(value, dict) else "a list"
        return ConfigError(f"{self.source}: {what} = {shown}: expected {expected}")

    def render(self) -> str:
        """The configuration as YAML, with notes and remarks as comments."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _comment(f"Imported from {self.source} ({self.kind}).")
        if self.remarks:
            yield from _comment("Without an equivalent:")
        for what, why in self.remarks:
            yield from _comment(f"{what}: {why}", head="# - ")
        if self.remarks:
            yield ""
        for key, value in self.settings.items():
            for note in self.notes.get(key, ()):
                yield from _comment(note)
            yield from _yaml({key: value})
        if not self.settings:
            yield "{}"


def _yaml(value: dict[str, Any]) -> list[str]:
    """A mapping as lines of YAML, with escapes for characters that a terminal would not show."""
    lines = yaml.safe_dump(value, sort_keys=False, allow_unicode=True).split("\n")[:-1]
    if all(line.isprintable() for line in lines):
        return lines
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=False).split("\n")[:-1]


def _comment(text: str, head: str = "# ") -> list[str]:
    rest = "#" + " " * (len(head) - 1)
    return textwrap.wrap(
        printable(" ".join(text.split())),
        WIDTH,
        initial_indent=head,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
