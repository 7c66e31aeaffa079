"""Engines from a watched file: YAML or JSON, a list of engines or ``{engines: [...]}``."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import yaml
from pydantic import Field, ValidationError
from watchfiles import awatch

from lmetric.config import ConfigError, DiscoverySource, EngineConfig, UniqueKeys, reading
from lmetric.config.problems import explain
from lmetric.server.discovery.members import Found
from lmetric.server.discovery.source import Sink, SourceError

# A changed file is read after SETTLE_MS without a further change, and every POLL_MS in any case:
# some network file systems report no changes.
SETTLE_MS = 50
POLL_MS = 10_000


class ListedEngine(EngineConfig):
    """One engine of the file."""

    model: str | None = Field(None, min_length=1, description="its model; default: the model of the source")


class WatchedFile:
    """A source: the engines in a file. If the file becomes invalid, the last valid engines stay.

    The folder is watched, not the file, to see replaced files too (an editor, a renamed file, a
    mounted ConfigMap).
    """

    def __init__(self, file: Path, defaults: DiscoverySource) -> None:
        self._file = file
        self._defaults = defaults
        self._read: bytes | None = None

    async def follow(self, sink: Sink) -> None:
        """Reports the engines to ``sink`` after each change of the file, until canceled.

        Raises SourceError.
        """
        self._read = None
        if not await asyncio.to_thread(self._file.parent.is_dir):
            raise SourceError(f"{self._file}: cannot be read: there is no folder {self._file.parent}")
        changes = awatch(
            self._file.parent,
            watch_filter=None,
            step=SETTLE_MS,
            rust_timeout=POLL_MS,
            yield_on_timeout=True,
            recursive=False,
        )
        change: asyncio.Task[Any] | None = None
        try:
            while True:
                # The watch begins before the read, so no change is missed.
                change = asyncio.ensure_future(anext(changes))
                await asyncio.sleep(0)
                try:
                    found = await asyncio.to_thread(self._changed)
                except ConfigError as error:
                    sink.problem(str(error))
                else:
                    if found is not None:
                        sink.found(found)
                await change
        except OSError as error:
            raise SourceError(f"{self._file.parent}: cannot be watched: {error.strerror or error}") from None
        finally:
            if change is not None:
                change.cancel()
                await asyncio.gather(change, return_exceptions=True)
            await changes.aclose()

    def _changed(self) -> list[Found] | None:
        """Returns the engines; None if the file equals its last valid content.

        Raises ConfigError.
        """
        before, self._read = self._read, None
        with reading(self._file):
            content = self._file.read_bytes()
            if content != before:
                entries = (_of_json if self._file.suffix == ".json" else _of_yaml)(content.decode())
        found = None if content == before else self._engines(entries)
        self._read = content
        return found

    def _engines(self, entries: list[tuple[str, Any]]) -> list[Found]:
        found: dict[str, Found] = {}
        for place, value in entries:
            try:
                listed = ListedEngine.model_validate(value)
            except ValidationError as error:
                lines = explain(error, {}, ListedEngine)
                raise ConfigError("\n".join(f"{self._file}{place}: {line}" for line in lines)) from None
            if listed.label in found:
                raise ConfigError(f"{self._file}{place}: a second engine named {listed.label!r}")
            values = {name: getattr(listed, name) for name in EngineConfig.model_fields}
            config = EngineConfig.model_construct(**values | {"name": listed.label})
            found[listed.label] = Found(config, listed.model or self._defaults.model)
        return list(found.values())


_SHAPE = "expected a list of engines, or {engines: [...]} (no engines: [])"


def _of_yaml(text: str) -> list[tuple[str, Any]]:
    """Returns the entries of the list, each with its position in the file. Raises YAMLError."""
    loader = UniqueKeys(text)
    try:
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode) and [key.value for key, _ in node.value] == ["engines"]:
            node = node.value[0][1]
        if not isinstance(node, yaml.SequenceNode):
            raise yaml.MarkedYAMLError(problem=_SHAPE, problem_mark=node.start_mark if node else None)
        return [
            (f":{item.start_mark.line + 1}", loader.construct_object(item, deep=True)) for item in node.value
        ]
    finally:
        loader.dispose()


def _of_json(text: str) -> list[tuple[str, Any]]:
    """Returns the entries of the list, each with its position.

    Raises JSONDecodeError, YAMLError.
    """
    content = orjson.loads(text)
    if isinstance(content, dict) and content.keys() == {"engines"}:
        content = content["engines"]
    if not isinstance(content, list):
        raise yaml.YAMLError(_SHAPE)
    return [(f": [{number}]", value) for number, value in enumerate(content)]
