"""Counts the turns of a process's event loop by CPU time, in a file per process.

Python imports this file when it starts, if `TURNS_FOLDER` and its folder are in the environment. A
turn is one pass over the ready callbacks. The loop is asyncio's own, because turns of uvloop cannot
be timed. `TURNS_FOLDER/PID.json` has the number of turns of each tenth of a millisecond so far.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

BIN_SECONDS = 1e-4
WRITE_SECONDS = 1.0


def _count_turns(folder: Path) -> None:
    sys.modules["uvloop"] = None  # type: ignore[assignment]
    from asyncio.base_events import BaseEventLoop

    run, turns, written = BaseEventLoop._run_once, Counter[int](), 0.0  # type: ignore[attr-defined]
    file = folder / f"{os.getpid()}.json"

    def timed(loop: Any) -> None:
        nonlocal written
        begun = time.thread_time()
        run(loop)
        used = time.thread_time() - begun
        if threading.current_thread() is not threading.main_thread():
            return
        turns[int(used / BIN_SECONDS)] += 1
        if (now := time.monotonic()) - written > WRITE_SECONDS:
            written = now
            part = file.with_suffix(".part")
            part.write_text(json.dumps(turns))
            part.replace(file)

    BaseEventLoop._run_once = timed  # type: ignore[attr-defined]


if "TURNS_FOLDER" in os.environ:
    _count_turns(Path(os.environ["TURNS_FOLDER"]))
