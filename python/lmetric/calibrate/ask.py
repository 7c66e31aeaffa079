"""What an engine says about itself, before anything is measured. Field names: vLLM 0.32, SGLang 0.5.23."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from lmetric.calibrate.plan import CalibrationError

_SECONDS = 10.0
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine told; None: it did not say. Sizes in tokens or blocks as the profile's fields."""

    model: str
    engine: str = "unknown engine"  # kind and version
    max_model_len: int | None = None
    block_tokens: int | None = None
    cache_blocks: int | None = None
    max_sequences: int | None = None
    max_batch_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in the engine, as its /metrics tell; None: they do not."""

    running: int | None = None
    waiting: int | None = None

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)


class Asker:
    """Asks one engine. `session` carries the credentials."""

    def __init__(self, session: aiohttp.ClientSession, root: str) -> None:
        self._session = session
        self._root = root

    async def facts(self, model: str | None) -> EngineFacts:
        """Everything the engine says; `model`: the one to probe, where it serves several.

        Raises:
            CalibrationError: not reachable, no list of models, the model is not among them.
        """
        cards = self._cards(await self._get("/v1/models", needed=True))
        served = {str(card["id"]): card for card in cards}
        if model is None:
            bases = [name for name, card in served.items() if not card.get("parent")]
            if len(bases) != 1:
                raise CalibrationError(
                    f"{self._root} serves {', '.join(bases) or 'no model'}: name one with --model"
                )
            model = bases[0]
        if model not in served:
            raise CalibrationError(f"{self._root} serves {', '.join(served)}, not {model!r}")
        card = served[model]
        facts = EngineFacts(model=model, max_model_len=_integer(card.get("max_model_len")))
        version = _json(await self._get("/version")).get("version")
        info = _json(await self._get("/server_info?config_format=json"))
        samples = {name: labels for name, labels, _ in await self._samples()}
        if version is not None:
            emulated = str(version).startswith("lmetric-")
            facts = replace(facts, engine=f"emulated {version}" if emulated else f"vllm {version}")
        elif found := _find(info, "version"):
            facts = replace(facts, engine=f"sglang {found}")
        cache = samples.get("vllm:cache_config_info", {})
        slots = _integer(_find(info, "max_total_num_tokens")) if not cache else None
        block = _integer(cache.get("block_size")) or _integer(_find(info, "page_size"))
        return replace(
            facts,
            max_model_len=facts.max_model_len or _integer(_find(info, "context_length")),
            block_tokens=block,
            cache_blocks=_integer(cache.get("num_gpu_blocks"))
            or (slots // block if slots and block else None),
            max_sequences=_integer(_find(info, "max_num_seqs"))
            or _integer(_find(info, "max_running_requests")),
            max_batch_tokens=_integer(_find(info, "max_num_batched_tokens"))
            or _integer(_find(info, "chunked_prefill_size")),
        )

    async def load(self) -> Load:
        """What runs and waits there now."""
        running: int | None = None
        waiting: int | None = None
        for name, _, value in await self._samples():
            if name in _RUNNING:
                running = (running or 0) + int(value)
            elif name in _WAITING:
                waiting = (waiting or 0) + int(value)
        return Load(running, waiting)

    async def settle(self, seconds: float = 5.0) -> Load:
        """Waits until nothing runs there, at most so long; gives the last load seen."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            load = await self.load()
            if load.running is None:
                await asyncio.sleep(0.3)  # it does not tell: what was cancelled ends soon
            if not load.busy or asyncio.get_running_loop().time() > deadline:
                return load
            await asyncio.sleep(0.1)

    async def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        text = (await self._get("/metrics")).decode(errors="replace")
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError:  # not Prometheus text
            return []
        return [(s.name, dict(s.labels), float(s.value)) for family in families for s in family.samples]

    async def _get(self, path: str, *, needed: bool = False) -> bytes:
        """The answer's body; nothing where the engine has no such page, unless it is `needed`."""
        problem: str
        try:
            timeout = aiohttp.ClientTimeout(total=_SECONDS)
            async with self._session.get(self._root + path, timeout=timeout) as answer:
                body = await answer.read()
            if answer.status == 200:
                return body
            problem = f"{self._root}{path} answered {answer.status}: {body[:200].decode(errors='replace')}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"cannot reach {self._root}: {error or type(error).__name__}"
        if needed:
            raise CalibrationError(problem)
        return b""

    def _cards(self, body: bytes) -> list[dict[str, Any]]:
        cards = _json(body).get("data")
        if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
            raise CalibrationError(f"{self._root}/v1/models is no list of models: {body[:80]!r}")
        return cards


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _integer(value: object) -> int | None:
    """A count of at least 1, from a number or a label; None for anything else, `None` and -1 included."""
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if number >= 1 else None


def _find(tree: object, key: str) -> object:
    """The first value under `key`, at whatever depth: the pages nest their settings differently by
    version."""
    return next(_values(tree, key), None)


def _values(tree: object, key: str) -> Iterator[object]:
    if isinstance(tree, dict):
        if tree.get(key) is not None:
            yield tree[key]
        for value in tree.values():
            yield from _values(value, key)
    elif isinstance(tree, list):
        for value in tree:
            yield from _values(value, key)
