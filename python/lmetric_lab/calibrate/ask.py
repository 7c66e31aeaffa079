"""Reads an engine's description of itself, before the measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import orjson

from lmetric.engines.adapter import Adapter, Load, count_of
from lmetric.engines.http import EngineClient, Unanswered
from lmetric.engines.identify import identify
from lmetric.engines.sglang import LOADS
from lmetric_lab.calibrate.plan import CalibrationError

# Endpoints with an engine's settings: vLLM in development mode, and SGLang.
_SETTINGS = "/server_info?config_format=json"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The values that an engine reports; None: not reported. Sizes have the units of the
    profile."""

    model: str
    engine: str  # kind and version
    kind: str  # name of the adapter
    max_model_len: int | None = None
    block_tokens: int | None = None
    cache_blocks: int | None = None
    max_sequences: int | None = None
    max_batch_tokens: int | None = None


class Asker:
    """Sends queries to one engine. `session` has the credentials."""

    def __init__(self, session: aiohttp.ClientSession, root: str) -> None:
        self._engine = EngineClient(session, root)
        self._adapter: Adapter | None = None
        self._load_path: str | None = None

    async def facts(self, model: str | None) -> EngineFacts:
        """All reported values. `model`: the model to probe, if the engine serves several.

        Raises:
            CalibrationError: the engine is not reachable, has no list of models, lacks the model,
                or has several data-parallel ranks.
        """
        try:
            self._adapter, can = await identify(self._get)
        except ValueError as error:
            raise CalibrationError(f"{self._engine.url}: {error}") from None
        if len(can.ranks) > 1:
            raise CalibrationError(
                f"{self._engine.url} has the data-parallel ranks {', '.join(map(str, can.ranks))}, each with "
                "a queue and steps of its own: calibrate an engine with one rank (vLLM "
                "--data-parallel-size 1, SGLang --dp-size 1); the profile of a dense model fits each rank"
            )
        self._load_path = can.load_path
        bases = [served.name for served in can.models if served.parent is None]
        if model is None:
            if len(bases) != 1:
                raise CalibrationError(
                    f"{self._engine.url} serves {', '.join(bases)}; choose one with --model"
                )
            model = bases[0]
        served = {each.name: each for each in can.models}
        if model not in served:
            raise CalibrationError(f"{self._engine.url} serves {', '.join(served)}, not {model!r}")
        settings = await self._settings(_SETTINGS)
        if self._load_path == LOADS:  # SGLang's settings have max_running_requests only if a flag sets it
            settings |= await self._settings(LOADS)
        return EngineFacts(
            model=model,
            kind=can.engine,
            engine=f"{can.engine} {can.version or 'of unknown version'}",
            max_model_len=served[model].max_model_len or settings.get("context_length"),
            block_tokens=can.block_size,
            cache_blocks=can.cache_blocks,
            max_sequences=settings.get("max_num_seqs") or settings.get("max_running_requests"),
            max_batch_tokens=settings.get("max_num_batched_tokens") or settings.get("chunked_prefill_size"),
        )

    async def load(self) -> Load:
        """The current load, as far as the engine reports it."""
        if self._adapter is None or self._load_path is None:
            return Load()
        status, body = await self._get(self._load_path)
        return self._adapter.load(body) if status == 200 else Load()

    async def settle(self, seconds: float = 5.0) -> Load:
        """Waits until the engine is idle, for at most `seconds`. Returns the last load."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            load = await self.load()
            if load.running is None:
                await asyncio.sleep(0.3)  # no load report: canceled requests end soon
            if not busy(load) or asyncio.get_running_loop().time() > deadline:
                return load
            await asyncio.sleep(0.1)

    async def _settings(self, path: str) -> dict[str, int]:
        """Integers of a page: the first of each name at any depth, because versions differ in
        depth."""
        status, body = await self._get(path)
        try:
            return dict(reversed(list(_counts(orjson.loads(body))))) if status == 200 else {}
        except orjson.JSONDecodeError:
            return {}

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            return await self._engine.page(path)
        except Unanswered as error:
            raise CalibrationError(f"cannot reach {self._engine.url}: {error}") from None


def busy(load: Load) -> bool:
    """Whether the engine has requests."""
    return bool(load.running or load.waiting)


def _counts(tree: object) -> Iterator[tuple[str, int]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if (count := count_of(tree, key)) is not None:
                yield key, count
            else:
                yield from _counts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _counts(value)
