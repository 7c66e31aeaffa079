"""Warm fleet changes.

Engines that join first fetch prefixes. The prefixes and the streams of engines that leave first go
to other engines.

The core router plans the fetches (`Router.begin_join`, `Router.begin_leave`). This module makes
them, by the requests of `transfer`, without a client's request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import structlog

from lmetric._core import Router, Warming
from lmetric.engines.handover import COMPLETIONS, HandoverError, one_token
from lmetric.server.fleet.engine import Engine, blocks_differ
from lmetric.server.fleet.rebalancer import Rebalancer
from lmetric.server.fleet.transfer import KvTransfer, hold, serves
from lmetric.server.upstream.connection import UpstreamError

log = structlog.get_logger("lmetric.changes")

MAX_TOKENS = 1 << 23  # of remembered prompts, with `PROMPT_TOKENS`: 4 bytes each
PROMPT_TOKENS = 128  # as much memory as the objects of a prompt
ANSWER_SECONDS = 30.0  # longest wait for each of the two engines
LEAST_SECONDS = 1.0  # for a fetch that begins near the end of a change
LOOK_SECONDS = 0.25  # time between two looks at the streams of an engine that leaves


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: Any  # an array of uint32
    model: str
    salt: str | None

    @property
    def fields(self) -> Mapping[str, str]:
        """The fields of the body that the prefix cache depends on."""
        return {"model": self.model} | ({} if self.salt is None else {"cache_salt": self.salt})

    @property
    def size(self) -> int:
        """The memory of the prompt, in tokens."""
        return PROMPT_TOKENS + len(self.tokens) + len(self.salt or "")


@dataclass(slots=True)
class _Change:
    joins: bool
    warming: Warming
    task: asyncio.Task[None] | None = None


class FleetChanges:
    """The warm changes of a model."""

    def __init__(self, model: str, router: Router, engines: Mapping[str, Engine], mover: Rebalancer) -> None:
        self._model = model
        self._router = router
        self._engines = engines
        self._mover = mover
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()  # by `Ticket.prompt_key`
        self._tokens = 0
        self._changes: dict[str, _Change] = {}  # by the name of the engine
        self.outcomes: Counter[str] = Counter()  # of fetches
        self.fetched_tokens = 0

    def note(self, key: int | None, tokens: Any, model: str, salt: str | None) -> None:
        """Remembers the prompt of a request. `key`: `Ticket.prompt_key`."""
        if key is None or tokens is None:
            return
        old = self._prompts.pop(key, None)
        if old is None:
            # A copy: the buffer belongs to the request.
            old = _Prompt(np.array(tokens, np.uint32), model, salt)
            self._tokens += old.size
        self._prompts[key] = old
        while self._tokens > MAX_TOKENS and self._prompts:
            self._tokens -= self._prompts.popitem(last=False)[1].size

    def warms(self, name: str) -> bool:
        """Whether an engine fetches prefixes before it gets requests."""
        change = self._changes.get(name)
        return change is not None and change.joins

    def sends(self, name: str) -> bool:
        """Whether other engines still fetch the prefixes of an engine that leaves."""
        change = self._changes.get(name)
        return change is not None and not change.joins and not change.warming.is_over(time.monotonic())

    def joins(self, engine: Engine) -> None:
        """Begins to warm an engine with an empty cache."""
        self._begin(engine, self._router.begin_join(engine.name), joins=True)

    def leaves(self, engine: Engine) -> None:
        """Begins to copy the prefixes of an engine that gets no more requests."""
        if self.sends(engine.name):
            return
        self._begin(engine, self._router.begin_leave(engine.name), joins=False)

    def forget(self, name: str) -> None:
        """Ends the change of an engine."""
        change = self._changes.pop(name, None)
        if change is not None and change.task is not None:
            change.task.cancel()

    async def stop(self) -> None:
        """Ends all changes."""
        tasks = [change.task for change in self._changes.values() if change.task is not None]
        for name in list(self._changes):
            self.forget(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, engine: Engine, warming: Warming, *, joins: bool) -> None:
        self.forget(engine.name)
        if joins and warming.is_over(time.monotonic()):
            self._router.end_warming(engine.name)  # nothing to fetch, as at the start of the router
            return
        change = self._changes[engine.name] = _Change(joins, warming)
        what = "joins" if joins else "leaves"
        log.info(f"engine {what} warm", model=self._model, engine=engine.name, fetches=warming.planned)
        change.task = asyncio.create_task(self._run(engine, change), name=f"{engine.name} {what}")

    async def _run(self, engine: Engine, change: _Change) -> None:
        began = time.monotonic()
        try:
            await self._fetch_all(change.warming)
            fetches, tokens = change.warming.fetched
            log.info(
                "prefixes fetched",
                model=self._model,
                engine=engine.name,
                joins=change.joins,
                fetches=fetches,
                tokens=tokens,
                seconds=round(time.monotonic() - began, 3),
            )
            if not change.joins:
                await self._move_streams(engine)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a fleet change failed", model=self._model, engine=engine.name)
        finally:
            later = self._changes.get(engine.name)
            again = later is not None and later is not change and later.joins
            if change.joins and not again and self._engines.get(engine.name) is engine:
                self._router.end_warming(engine.name)
            if self._changes.get(engine.name) is change:
                del self._changes[engine.name]

    async def _fetch_all(self, warming: Warming) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                now = time.monotonic()
                while (planned := warming.begin(now)) is not None:
                    running.add(asyncio.create_task(self._fetch(warming, *planned), name="warm fetch"))
                if warming.is_over(now):
                    return
                wakes = warming.wakes(now)
                seconds = None if wakes is None else max(wakes - now, 0.001)
                if not running:
                    await asyncio.sleep(seconds or LOOK_SECONDS)
                    continue
                _, running = await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in running:
                task.cancel()

    async def _fetch(
        self, warming: Warming, number: int, prompt: int, tokens: int, source: str, target: str
    ) -> None:
        arrived = 0
        outcome: str | None = "failed"
        reason = ""
        try:
            known = self._prompts.get(prompt)
            pair = self._engines.get(source), self._engines.get(target)
            if known is None or len(known.tokens) < tokens:
                outcome, reason = "forgotten", "the tokens of the prompt are not known"
            elif pair[0] is None or pair[1] is None:
                outcome, reason = "gone", "an engine is gone"
            elif refused := refusal(pair[0], pair[1]):
                outcome, reason = refused
            else:
                left = warming.until - time.monotonic()
                async with asyncio.timeout(max(left, LEAST_SECONDS)):
                    await self._copy(pair[0], pair[1], known, tokens=tokens)
                outcome, arrived = "fetched", tokens
                self.fetched_tokens += tokens
        except TimeoutError:
            outcome, reason = "late", "it did not end within `max_seconds` of the change"
        except (UpstreamError, HandoverError) as error:
            reason = str(error)
        except asyncio.CancelledError:
            outcome = None  # its change has ended, or the router stops
            raise
        finally:
            if outcome is not None:
                self.outcomes[outcome] += 1
            if outcome not in ("fetched", None):
                log.warning(
                    "a prefix was not fetched for a fleet change",
                    model=self._model, outcome=outcome, source=source, target=target, reason=reason,
                )  # fmt: skip
            warming.ended(number, arrived, time.monotonic())

    async def _copy(self, source: Engine, target: Engine, prompt: _Prompt, tokens: int) -> None:
        """Copies a prefix. Raises UpstreamError and HandoverError."""
        ids = prompt.tokens[:tokens]
        kv = KvTransfer(self._model, Counter())  # `outcomes` counts the whole copy
        kv.tokens = tokens
        body = hold(kv, source, prompt.fields, tokens=ids)
        answer = _answer(source, *await source.upstream.post(COMPLETIONS, body, ANSWER_SECONDS))
        now = time.monotonic()
        kv.accept(source, answer, tokens=tokens, now=now)
        body = one_token(prompt.fields, ids, kv.take(target, now, goes_on=False, total=tokens))
        if not kv.used:
            raise HandoverError(kv.reason)
        seconds = min(ANSWER_SECONDS, kv.until - now)
        _answer(target, *await target.upstream.post(COMPLETIONS, body, seconds, once=True))

    async def _move_streams(self, engine: Engine) -> None:
        """Moves the streams of an engine until it is idle or gets requests again."""
        while engine.held and self._engines.get(engine.name) is engine and engine.running:
            now = time.monotonic()
            for ticket, target in self._router.moves_from(engine.name):
                self._mover.begin(ticket, target, now)
            await asyncio.sleep(LOOK_SECONDS)


def refusal(source: Engine, target: Engine) -> tuple[str, str] | None:
    """Returns the outcome and the reason if an engine cannot fetch a prefix from another one."""
    for engine in (source, target):
        if engine.connector is None or engine.handover is None:
            why = engine.capabilities.no_handover or "it reports none"
            return "no_transfer", f"{engine.name} has no KV transfer: {why}"
    if not serves(source, target):
        return "no_transfer", f"the connector of {source.name} does not serve prefixes to {target.name}"
    why_not = blocks_differ(source, target)
    if why_not is None:
        return None
    return ("other_blocks" if source.revision == target.revision else "other_revision"), why_not


def _answer(engine: Engine, status: int, answer: bytes) -> bytes:
    if status != 200:
        with contextlib.suppress(orjson.JSONDecodeError):
            if "error" in orjson.loads(answer):
                raise HandoverError(f"{engine.name} answered status {status}: {answer[:200]!r}")
        raise HandoverError(f"{engine.name} answered status {status}")
    return answer
