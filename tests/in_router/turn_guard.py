"""Measures the CPU time of each turn of a router's event loop.

A turn above `LIMIT_SECONDS` of a reference machine stops all clients of the router for that long.
The guard runs from the end of `Server.start` to the begin of `Server.stop`. In the tests' process,
a fixture of `conftest.py` begins it; in a router's own process, `sitecustomize.py` does.

- **Turns.** A timer of the loop reads the thread's CPU time each `TICK_SECONDS`. The loop runs a
  due timer in its next turn, so between two readings at most one turn is longer than a tick. CPU
  time does not grow while other processes run.
- **Who.** A thread looks at the loop's stack while a turn is long, and adds the CPU time since its
  last look to the callback that it sees. In the tests' process, only callbacks of the product
  count: not those of the test, its client or its engines.
- **Garbage collection** is counted and named. In the tests' process it does not count against the
  limit: nearly all objects there belong to pytest.
- **Speed.** Short measurements directly after a long turn scale the limit. So a turn may take
  longer on a machine that is slower than the reference, or that other work makes slower.
"""

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# CPU seconds of one turn on the reference machine.
LIMIT_SECONDS = 0.050
TICK_SECONDS = 0.005
LOOK_SECONDS = 0.010
# In the tests' process, one look proves no more of a callback. Native code of a test can keep the
# looking thread from running. The next look then sees a callback of the product.
MOST_SECONDS_OF_A_LOOK = 3 * LOOK_SECONDS
# CPU seconds that `speed` takes on the reference machine: an idle core of an AMD EPYC 9004, Python
# 3.11.
REFERENCE_SECONDS = 0.003

_TESTS = str(Path(__file__).parent.parent)
_LOOP_FUNCTIONS = frozenset({"run", "run_until_complete", "run_forever", "_run_once", "_run"})
_LOOP_FILES = ("/asyncio/runners.py", "/asyncio/base_events.py", "/asyncio/events.py")
_DEEPEST = 8  # frames that a report shows

Report = Callable[[str], None]


def speed() -> float:
    """Returns the CPU seconds of a fixed piece of work, now."""
    begun = time.thread_time()
    values = {}
    for number in range(20_000):
        values[f"{number % 997}"] = [number, number * 3 % 7]
    return time.thread_time() - begun


def of_reference(seconds: float) -> float:
    """Returns the CPU seconds that work, which has just ended, takes on the reference machine."""
    return seconds / max(1.0, max(speed(), speed()) / REFERENCE_SECONDS)


class TurnGuard:
    """Watches the running loop. ``own``: the process belongs to the router alone."""

    def __init__(self, report: Report, own: bool) -> None:
        self._report = report
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._product = str(Path(sys.modules["lmetric"].__file__ or "").parent)
        # The tests' engines: the outermost function of the product is theirs.
        self._emulated = str(Path(f"{self._product}_lab", "emulated"))
        self._stopped = threading.Event()
        self._looked: Counter[str] = Counter()  # CPU seconds by callback, since the last tick
        self._gc_begun = self._gc_seconds = 0.0
        self._gc_generation = 0
        self._ticked = self._seen = time.thread_time()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        gc.callbacks.append(self._collects)
        threading.Thread(target=self._look, name="turn guard", daemon=True).start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()
        self._timer.cancel()
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def _tick(self) -> None:
        now = time.thread_time()
        used, collected = now - self._ticked, self._gc_seconds
        if used > LIMIT_SECONDS + TICK_SECONDS:
            self._judge(used, collected)
        self._looked.clear()
        self._gc_seconds, self._gc_generation = 0.0, 0
        self._ticked = self._seen = time.thread_time()
        if not self._stopped.is_set():
            self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _judge(self, used: float, collected: float) -> None:
        turn = used if self._own else min(sum(self._looked.values()), used - collected)
        scale = max(speed(), speed(), speed()) / REFERENCE_SECONDS
        limit = LIMIT_SECONDS * max(1.0, scale)
        if turn - TICK_SECONDS <= limit:
            return
        heaviest = self._looked.most_common(1)
        name, seconds = heaviest[0] if heaviest else ("unknown: no Python code ran", 0.0)
        self._report(
            f"a turn of the event loop took {turn * 1000:.0f} ms of CPU time; limit: {limit * 1000:.0f} ms "
            f"({LIMIT_SECONDS * 1000:.0f} ms on the reference machine, here times {scale:.2f}). Garbage "
            f"collection: {collected * 1000:.0f} ms, generation {self._gc_generation}. Heaviest callback, "
            f"{seconds * 1000:.0f} ms: {name}"
        )

    def _collects(self, phase: str, info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._gc_begun = time.thread_time()
        else:
            self._gc_seconds += time.thread_time() - self._gc_begun
            self._gc_generation = max(self._gc_generation, info["generation"])

    def _look(self) -> None:
        """Runs in a thread of its own."""
        while not self._stopped.wait(LOOK_SECONDS):
            try:
                now = time.clock_gettime(self._clock)
            except OSError:
                return  # the loop's thread has ended
            since, self._seen = self._seen, now
            if now - self._ticked > 2 * TICK_SECONDS:
                name = self._callback(sys._current_frames().get(self._thread))
                if name is not None:
                    spent = now - max(since, self._ticked)
                    # A look that comes late does not know who ran before it.
                    self._looked[name] += spent if self._own else min(spent, MOST_SECONDS_OF_A_LOOK)

    def _callback(self, frame: FrameType | None) -> str | None:
        """Returns the callback on this stack; None: there is none, or it is not the product's."""
        inside: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            if code.co_name in _LOOP_FUNCTIONS and code.co_filename.endswith(_LOOP_FILES):
                break
            inside.append((code, frame.f_lineno))
            frame = frame.f_back
        if not inside or frame is None:
            return None
        files = [code.co_filename for code, _ in inside]
        of_product = [file for file in files if file.startswith(self._product)]
        if not self._own and (
            files[-1].startswith(_TESTS) or not of_product or of_product[-1].startswith(self._emulated)
        ):
            return None
        return " < ".join(
            f"{Path(code.co_filename).name}:{line} {code.co_name}" for code, line in inside[:_DEEPEST]
        )


def watch_servers(server: Any, report: Report, own: bool) -> Callable[[], None]:
    """Makes each `Server` watch its loop. Returns the function that undoes it.

    Args:
        server: the class.
        report: called with the text of each violation.
        own: each process belongs to one router alone.
    """
    start, stop = server.start, server.stop
    guards: dict[int, TurnGuard] = {}

    async def watched_start(self: Any, *values: Any, **named: Any) -> None:
        await start(self, *values, **named)
        await asyncio.sleep(0)  # the start itself may take longer
        guards[id(self)] = TurnGuard(report, own)

    async def watched_stop(self: Any) -> None:
        if (guard := guards.pop(id(self), None)) is not None:
            guard.stop()
        await stop(self)

    def undo() -> None:
        for guard in guards.values():
            guard.stop()
        guards.clear()
        server.start, server.stop = start, stop

    server.start, server.stop = watched_start, watched_stop
    return undo
