"""Runs lmetric-router, and writes down each callback of its event loop with over 20 ms of CPU time.

The seconds are those of the reference machine of `tests/in_router/turn_guard.py`: a measurement
after each such callback scales them, so that a slow or busy machine breaks no rule.

    python bench/chaos/watched.py FILE serve ...

FILE gets a line per callback: the monotonic clock, CPU seconds, the callback. The router runs on
asyncio's own loop, because callbacks of uvloop cannot be timed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests" / "in_router"))
from turn_guard import of_reference

SHOWN_SECONDS = 0.02


def main() -> None:
    """Runs the router."""
    out = Path(sys.argv[1]).open("w", buffering=1)  # noqa: SIM115 - open as long as the process
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        run(handle)
        seconds = time.thread_time() - begun
        if seconds > SHOWN_SECONDS:
            task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
            what = task.get_coro() if isinstance(task, asyncio.Task) else handle
            out.write(f"{time.monotonic()} {of_reference(seconds)} {what!r}\n")

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    from lmetric.cli import main as run_cli

    sys.argv = ["lmetric-router", *sys.argv[2:]]
    run_cli()


if __name__ == "__main__":
    main()
