"""The JSON objects of the live page and of `lmetric-router top`.

An administrator's view has all engines and requests. A tenant's view has its own requests, and
counts of engines without their names, as the pages in docs/how-to/access.md do.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from lmetric._core import __version__, policy_table
from lmetric.server.fleet.activity import ActivityEvent
from lmetric.server.fleet.engine import Engine
from lmetric.server.fleet.model import Model
from lmetric.server.fleet.problem import unix_of
from lmetric.server.fleet.recent import SMALL
from lmetric.server.observe.hot import hot_spots
from lmetric.server.observe.live import (
    FAILURES_SECONDS,
    EndedRequest,
    Live,
    Point,
    RunningRequest,
    point,
)
from lmetric.server.observe.live_problems import (
    LEVELS,
    EngineState,
    of_engines,
    of_requests,
    of_router,
    ordered,
)

REQUESTS_SHOWN = 50
RUNNING_SHOWN = 20  # of them, requests that have not ended
EVENTS_SHOWN = 50
POINTS_SHOWN = 10  # points in each update: a viewer that skips updates misses no second of these
NOW_SECONDS = 10.0  # window of the present values
MINUTE_SECONDS = 60.0
TENANTS_KEPT = 64
ENGINES_IN_TURN = 128  # engines that are described in one turn of the event loop
SLOW_SECONDS = 10.0  # age of the guard's and the programs' counts in a large fleet
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY

# Columns of the engines that change all the time, with the indicator and the decimals of each.
_COLUMNS = {
    "batch": ("bs", 0),
    "queue": ("q_bs", 0),
    "queued_tokens": ("queued_prefill_tokens", 0),
    "context_tokens": ("tokens", 0),
    "cache": ("kv_usage", 3),
    "age_seconds": ("report_age_seconds", 1),
}
Rows = dict[str, list[Any]]
_FORMULAS = {row["name"]: row["formula"] for row in policy_table()}


def encode(value: Any) -> bytes:
    """Returns a value as JSON in one line."""
    return orjson.dumps(value, option=_OPTIONS)


class LiveView:
    """Builds the objects, at most once for each second and kind of viewer."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._made: dict[str | None, tuple[int, bytes]] = {}
        self._slow: dict[str, tuple[float, dict[str, Any]]] = {}
        self.fleet_version = 0
        self._fleet = b""
        self._rows: Rows = {}  # of the engines, as in `_fleet`
        self._columns: dict[str, Any] = {}  # what changes all the time, in the order of `_rows`
        self._problems: list[dict[str, Any]] = []  # of the engines
        self._counts: dict[str, Any] = {}  # of the engines
        self._described = -1  # the point at which the fleet was described
        self._describing = asyncio.Lock()

    def history(self, tenant: str | None) -> dict[str, Any]:
        """Returns the points of the last minutes. A tenant's history begins when it looks."""
        points = list(self._live.points) if tenant is None else []
        return {"fields": list(Point._fields), "points": [_round(each) for each in points]}

    async def describe_fleet(self) -> None:
        """Describes models and engines, at most once for each point. Called before `update`."""
        async with self._describing:
            if self._described != (tick := self._live.ticks):
                await self._describe_engines()
                self._described = tick

    async def _describe_engines(self) -> None:
        """Describes all engines as they are now, `ENGINES_IN_TURN` in a turn of the event loop."""
        fleet, models = self._live.fleet, list(self._live.fleet.models)
        listed: list[tuple[str, Model | None, Engine | None]] = [
            (name, model, model.engines.get(name)) for model in models for name in model.router.instances()
        ]
        unplaced = list(fleet.unplaced.values())
        listed += [(engine.name, None, engine) for engine in unplaced]
        minute = self._live.within(MINUTE_SECONDS, time.monotonic())
        columns = _columns(models, len(unplaced), minute)
        rows: Rows = {
            name: []
            for name in ("name", "model", "role", "mode", "state", "reason", "mode_reason", "scheduler")
        }
        states: list[EngineState] = []
        usable, modes = 0, Counter[str]()
        for place, (name, model, engine) in enumerate(listed, start=1):
            states += self._describe(rows, name, model, engine=engine)
            if engine is not None and engine.unusable is None:
                usable += 1
                modes[engine.mode.name] += 1
            if place % ENGINES_IN_TURN == 0:
                await asyncio.sleep(0)
        self._problems = of_engines(states)
        self._counts = {"engines": fleet.size, "usable": usable, "modes": dict(modes)}
        described = [
            {
                "model": model.name,
                "policy": _policy(model.policies.settings.policy),
                "formula": _formula(model),
                "guard": model.guard,
                "guard_reason": model.router.guard_reason,
            }
            for model in models
        ]
        self._rows, self._columns = rows, columns
        body = encode({"router": __version__, "models": described, "engines": rows})
        if body != self._fleet:
            self._fleet = body
            self.fleet_version += 1

    def _describe(
        self, rows: Rows, name: str, model: Model | None, engine: Engine | None
    ) -> Iterable[EngineState]:
        """Adds an engine to the rows. Returns why it gets no requests, or why it is not exact."""
        why = engine.unusable if engine is not None else None
        state = "usable"
        if engine is None:
            state = "removed"
        elif why is not None:
            held, ejected = engine.held, engine.healthy and engine.service.state == "EJECTED"
            state = "draining" if held else "ejected" if ejected else "full" if engine.healthy else "down"
        elif model is not None and model.changes is not None and model.changes.warms(name):
            state = "warming"
        inexact = engine is not None and engine.identified and engine.inexact
        rows["name"].append(name)
        rows["model"].append(model.name if model is not None else None)
        rows["role"].append(engine.role if engine is not None else None)
        rows["mode"].append(engine.mode.name if engine is not None and engine.identified else None)
        rows["state"].append(state)
        rows["reason"].append(why.reason if why is not None else None)
        rows["mode_reason"].append(engine.mode.reason if engine is not None and inexact else None)
        scheduler = engine.capabilities.scheduler if engine is not None else None
        rows["scheduler"].append(str(scheduler) if scheduler is not None else None)
        if engine is None:
            return ()
        if why is not None:
            level = LEVELS.get(state, "note")
            return (EngineState(name, state, why.reason, why.fix, unix_of(engine.problem_since), level),)
        if inexact:
            mode, since = engine.mode, unix_of(engine.problem_since)
            level = "warn" if engine.was_exact else "note"
            return (EngineState(name, mode.name, mode.reason, mode.fix, since, level),)
        return ()

    def update(self, tenant: str | None) -> dict[str, Any]:
        """Returns what changes each second. ``tenant``: None: for an administrator."""
        live, now = self._live, time.monotonic()
        models = live.fleet.models
        recent = live.within(NOW_SECONDS, now, tenant)
        window = min(NOW_SECONDS, max(now - live.began, 1.0))
        if len(live.requests) == live.requests.maxlen:  # older ones were dropped
            window = min(window, max(now - live.requests[0].ended, 1e-3))
        in_flight = live.points[-1].in_flight if live.points else 0
        shown: dict[str, Any] = {
            "t": round(time.time(), 3),
            "tick": live.ticks,
            "now": _named(point(recent, window, in_flight, unix=time.time())),
            "requests": self._requests(now, tenant),
            "events": self._events(now, tenant),
            "summary": self._counts,
        }
        if tenant is not None:
            fresh = [each for each in live.fresh if each.tenant == tenant]
            shown["now"]["in_flight"] = None
            shown["points"] = [_round(point(fresh, live.fresh_seconds, 0, unix=time.time()))]
            return shown
        shown["summary"] = {**self._counts, "models": len(models)}
        shown["points"] = [_round(each) for each in list(live.points)[-POINTS_SHOWN:]]
        shown["fleet"] = self.fleet_version
        own = of_router(live.fleet.own_problems())
        failed = of_requests(live.counts(FAILURES_SECONDS)[1], FAILURES_SECONDS // 60)
        # The share of refusals names its most frequent reason, which needs no second line.
        named = {each["fix"] for each in own}
        failed = [each for each in failed if each["fix"] is None or each["fix"] not in named]
        shown["problems"] = ordered([*self._problems, *own, *failed])
        slow = {model.name: self._slow_of(model, now) for model in models}
        shown["guard"] = {name: each["guard"] for name, each in slow.items()}
        shown["programs"] = {name: each["programs"] for name, each in slow.items() if each["programs"]}
        shown["engines"] = self._columns
        shown["hot_spots"] = hot_spots(self._rows, self._columns["batch"])
        return shown

    async def frames(self, tenant: str | None, known_fleet: int | None) -> tuple[int, bytes]:
        """Returns the fleet's version and the events of one update.

        Viewers of one kind share the bytes.

        Args:
            known_fleet: the version that the viewer has; None: a new viewer.
        """
        update, parts = await self._update(tenant), []
        if tenant is None and known_fleet != self.fleet_version:
            body = b'{"version":%d,%b' % (self.fleet_version, self._fleet[1:])
            parts.append(b"event: fleet\ndata: %b\n\n" % body)
        if known_fleet is None:
            parts.append(b"event: history\ndata: %b\n\n" % encode(self.history(tenant)))
        parts.append(b"event: update\ndata: %b\n\n" % update)
        return self.fleet_version, b"".join(parts)

    async def snapshot(self, tenant: str | None) -> bytes:
        """Returns everything as one JSON object."""
        update = await self._update(tenant)
        access = "admin" if tenant is None else "tenant"
        more = encode({"access": access, "history": self.history(tenant)})
        static = b'"static":%b,' % self._fleet if tenant is None else b""
        return b"{%b%b,%b" % (static, more[1:-1], update[1:])

    async def _update(self, tenant: str | None) -> bytes:
        """Returns `update` as JSON, made at most once for each point and tenant."""
        await self.describe_fleet()
        made = self._made.get(tenant)
        if made is None or made[0] != self._described:
            if len(self._made) > TENANTS_KEPT:  # some of them no longer watch
                self._made.clear()
            made = self._made[tenant] = (self._described, encode(self.update(tenant)))
        return made[1]

    def _names(self, tenant: str | None) -> bool:
        """Returns whether a viewer reads the names of engines."""
        return tenant is None or self._live.fleet.config.errors.show_engines

    def _label(self, index: int, number: int, tenant: str | None) -> str | None:
        model = next((model for model in self._live.fleet.models if model.index == index), None)
        return model.labels.label(number, tenant or "") if model is not None and number else None

    def _requests(self, now: float, tenant: str | None) -> list[dict[str, Any]]:
        found = [self._running(each, now, tenant) for each in self._live.running(RUNNING_SHOWN, tenant)]
        names = self._names(tenant)
        for each in reversed(self._live.requests):
            if tenant is not None and each.tenant != tenant:
                continue
            found.append(
                {
                    "id": self._label(each.model_index, each.number, tenant),
                    "at": round(time.time() - now + each.started, 2),
                    "request_id": each.request_id,
                    "model": each.model,
                    "alias": each.alias,
                    "fallback_from": each.fallback_from,
                    "fallback_reason": each.fallback_reason,
                    "tenant": each.tenant or None,
                    "instance": each.instance if names else None,
                    "status": each.status,
                    "prompt_tokens": each.prompt_tokens,
                    "cached_tokens": each.cached_tokens,
                    "predicted": each.predicted,
                    "output_tokens": each.output_tokens,
                    "ttft_seconds": _rounded(each.ttft_seconds),
                    "tpot_seconds": _rounded(each.tpot_seconds),
                    "seconds": _rounded(each.ended - each.started),
                    "code": each.code,
                }
            )
            if len(found) == REQUESTS_SHOWN:
                break
        return found

    def _running(self, running: RunningRequest, now: float, tenant: str | None) -> dict[str, Any]:
        """Returns a request that has not ended. Its status is null."""
        return {
            "id": self._label(running.model_index, running.number, tenant),
            "at": round(time.time() - now + running.started, 2),
            "request_id": running.request_id,
            "model": running.model,
            "alias": running.alias,
            "fallback_from": running.fallback_from,
            "fallback_reason": running.fallback_reason,
            "tenant": running.tenant or None,
            "instance": running.instance if self._names(tenant) else None,
            "status": None,
            "prompt_tokens": running.prompt_tokens,
            "seconds": _rounded(now - running.started),
        }

    def _events(self, now: float, tenant: str | None) -> list[dict[str, Any]]:
        found: list[tuple[Model, ActivityEvent]] = []
        for model in self._live.fleet.models:
            of_model = 0
            for event in reversed(model.activity.events):
                if tenant is not None and (event.tenant != tenant or event.kind == "guard"):
                    continue
                found.append((model, event))
                of_model += 1
                if of_model == EVENTS_SHOWN:
                    break
        found.sort(key=lambda each: each[1].at, reverse=True)
        names = self._names(tenant)
        return [
            {
                "key": f"{model.index}-{event.sequence}",
                "at": round(time.time() - now + event.at, 2),
                "id": self._label(model.index, event.number, tenant),
                "model": model.name,
                **event.shown(names),
            }
            for model, event in found[:EVENTS_SHOWN]
        ]

    def _slow_of(self, model: Model, now: float) -> dict[str, Any]:
        """Returns the guard's counts, and whether programs are held (None: not followed)."""
        at, shown = self._slow.get(model.name, (-SLOW_SECONDS, {}))
        if not shown or now - at >= (SLOW_SECONDS if len(model.engines) > SMALL else 0.9):
            stats = model.router.stats(instances=False)
            told = model.programs.snapshot()
            shown = {
                "guard": {
                    "on": stats["guard_on"],
                    "suspected": stats["guard_suspected"],
                    "filtering": stats["guard_filtering"],
                },
                "programs": told
                and {
                    "holds": told["holds"],
                    "held": told["states"]["held"],
                    "longest_hold_seconds": round(told["longest_hold_seconds"], 1),
                },
            }
            self._slow[model.name] = now, shown
        return shown


def _policy(setting: str | dict[str, Any]) -> str:
    return setting if isinstance(setting, str) else str(setting.get("name") or setting.get("score", setting))


def _formula(model: Model) -> str | None:
    """Returns the score of a model's policy as text; None: it has none, or is itself the text."""
    name = _policy(model.policies.settings.policy)
    text = _FORMULAS.get(name, model.policies.first.formula)
    return None if text == name else text


def _columns(models: Iterable[Model], unplaced: int, minute: Iterable[EndedRequest]) -> dict[str, Any]:
    """Returns the columns of the engines, in the order of `LiveView.fleet`."""
    cached: defaultdict[tuple[int, str | None], list[int]] = defaultdict(lambda: [0, 0])
    for each in minute:
        if each.cached_tokens is not None and each.prompt_tokens:
            sums = cached[each.model_index, each.instance]
            sums[0] += each.cached_tokens
            sums[1] += each.prompt_tokens
    parts: dict[str, list[NDArray[np.float64]]] = {name: [] for name in _COLUMNS}
    hits: list[float | None] = []
    running: list[int] = []
    for model in models:
        wanted = [indicator for indicator, _ in _COLUMNS.values()]
        columns, names = model.router.indicators(names=wanted), model.router.instances()
        for name, (indicator, decimals) in _COLUMNS.items():
            parts[name].append(np.round(columns[indicator], decimals))
        for name in names:
            hit, prompt = cached.get((model.index, name), (0, 0))
            hits.append(round(hit / prompt, 3) if prompt else None)
            engine = model.engines.get(name)
            running.append(engine.running if engine is not None else 0)
    absent = np.full(unplaced, np.nan)
    shown: dict[str, Any] = {name: np.concatenate([*each, absent]) for name, each in parts.items()}
    shown["hit_rate"] = hits + [None] * unplaced
    shown["running"] = running + [0] * unplaced
    return shown


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _round(each: Point) -> list[float | None]:
    return [_rounded(value) for value in each]


def _named(each: Point) -> dict[str, Any]:
    return dict(zip(Point._fields, _round(each), strict=True))
