"""Runs the engine model in real time: steps begin at the model's deadlines, so real time does not
drift."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from lmetric._core import Engine
from lmetric_lab.emulated.generation import Generation
from lmetric_lab.emulated.metrics import EngineMetrics

_LAST, _FROM_PREFILL = 1, 2
_STEPS_A_WAKE = 16  # then the event loop gets its turn, however late the engine is
_LATE_SECONDS = 0.5

_log = logging.getLogger("lmetric.engine")


class Clock:
    """The engine's clock: seconds since it was made, `speed` times as fast as real time."""

    def __init__(self, speed: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()
        self._speed = speed

    def now(self) -> float:
        """The time."""
        return (self._loop.time() - self._origin) * self._speed

    def real_seconds_until(self, time: float) -> float:
        """Real seconds until this time; negative if it is past."""
        return self._origin + time / self._speed - self._loop.time()


class Driver:
    """Feeds requests to the engine, steps it, hands tokens out.

    A late wake-up delays what its step hands out, never the next step: that one begins when its
    predecessor ended on the engine's clock. Where the machine cannot keep up at all, the delay
    grows and is logged.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        metrics: EngineMetrics,
        publish: Callable[[list[Any]], None] | None,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self._metrics = metrics
        self._publish = publish
        self._live: dict[int, Generation] = {}
        self._start = 0.0  # of the step that runs
        self._end: float | None = None
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._warned_late = False

    def submit(
        self,
        generation: Generation,
        *,
        priority: int = 0,
        salt: str | None = None,
        report_cached: bool = False,
        token_slo_seconds: float | None = None,
    ) -> None:
        """Puts a request into the engine's queue."""
        now = self.clock.now()
        prompt = generation.shape.prompt
        generation.key = self.engine.submit(
            prompt,
            generation.max_tokens,
            now,
            priority=priority,
            salt=salt,
            report_cached=report_cached,
            fetched_tokens=generation.fetched_tokens,
            token_slo_seconds=token_slo_seconds,
        )
        generation.arrived = now
        self._live[generation.key] = generation
        if self._end is None:
            self._start_step(now)
            self._schedule()

    def drop(self, generation: Generation) -> None:
        """Removes a request. Does nothing if it has ended."""
        if self._live.pop(generation.key, None) is not None:
            self.engine.abort(generation.key)

    def stop(self) -> None:
        """Ends every request with finish_reason abort, and the stepping."""
        for generation in self._end_all():
            generation.abort()

    def die(self) -> None:
        """Ends every request without an end, and the stepping."""
        for generation in self._end_all():
            generation.die()

    def _end_all(self) -> list[Generation]:
        if self._timer is not None:
            self._timer.cancel()
        ended = list(self._live.values())
        for generation in ended:
            self.drop(generation)
        return ended

    def _start_step(self, now: float) -> None:
        self._start, self._end = now, self.engine.start_step(now)

    @property
    def _due(self) -> float | None:
        """When the engine has something to do: the end of its step, or of a load from the host."""
        return self.engine.next_load() if self._end is None else self._end

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (due := self._due) is None:
            self._timer = None
            return
        # Event loops count in milliseconds. Rounded up, a wake-up is late by less than one instead
        # of early.
        delay = math.ceil(self.clock.real_seconds_until(due) * 1e3) / 1e3
        self._timer = (
            self._loop.call_later(delay, self._wake) if delay > 0 else self._loop.call_soon(self._wake)
        )

    def _wake(self) -> None:
        touched: dict[int, Generation] = {}
        if (due := self._due) is not None:
            self._metrics.woke(max(0.0, -self.clock.real_seconds_until(due)))
        now = self.clock.now()
        for _ in range(_STEPS_A_WAKE):
            if (due := self._due) is None or due > now:
                break
            if self._end is None:
                self._start_step(due)
                continue
            end = self._end
            self._finish_step(end, touched)
            self._start_step(end)
            if self._end is None and self._live:
                # Nothing was left at the step's end: the first that came since found an idle
                # engine.
                self._start_step(max(end, min(generation.arrived for generation in self._live.values())))
        for generation in touched.values():
            generation.flush()
        self._watch_lateness()
        self._schedule()

    def _finish_step(self, end: float, touched: dict[int, Generation]) -> None:
        tokens, admitted, preempted, prefill_tokens = self.engine.finish_step()
        live, metrics, start = self._live, self._metrics, self._start
        for key, cached_tokens, first_time in admitted:
            if first_time and key in live:
                live[key].cached_tokens = cached_tokens
                live[key].scheduled = start
        for key in preempted:
            if key in live:
                live[key].interrupted = live[key].interrupted or start
        decoded = 0
        for key, token, flags in tokens:
            generation = live[key]
            generation.push(token, bool(flags & _LAST))
            touched[key] = generation
            if flags & _FROM_PREFILL:
                metrics.prefilled(generation, end)
            else:
                decoded += 1
            if flags & _LAST:
                del live[key]
                metrics.finished(generation, end)
            elif generation.finish_reason == "stop":
                self.drop(generation)
                metrics.finished(generation, end)
            if generation.broken:
                self.drop(generation)
        metrics.step(end - start, decoded, prefill_tokens)
        if self._publish is not None:
            events = self.engine.take_kv_events()
            if events:
                self._publish(events)

    def _watch_lateness(self) -> None:
        late = -self.clock.real_seconds_until(self._end) if self._end is not None else 0.0
        self._metrics.late_seconds = max(0.0, late)
        if late > _LATE_SECONDS and not self._warned_late:
            self._warned_late = True
            _log.warning(
                "%.2f s behind the engine's clock: the machine does not keep up; lower --clock-speed", late
            )
