"""Checks of load reports and of cancellation after a disconnect: load, cancel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lmetric.doctor.subject import Subject
from lmetric.engines.adapter import Load
from lmetric.engines.http import Unanswered

FRESH_SECONDS = 3.0
CANCEL_SECONDS = 3.0
POLL_SECONDS = 0.02
MIN_LOOKS = 10
"""Number of looks at the engine that each time limit takes at least: on a busy machine, a time
without a change may be one in which neither the doctor nor the engine ran."""
OUTPUT_TOKENS = 4096
ATTEMPTS = 3  # an engine in use has other requests, which begin and end


async def check_load_and_cancel(subject: Subject) -> None:
    """Checks that a long stream appears in the reports, and disappears after its cancellation."""
    path = subject.capabilities.load_path
    if path is None:
        subject.not_offered("load", "no endpoint with load gauges was found", subject.flag("load"))
        subject.not_offered(
            "cancel", "load reports are needed to see whether a request runs", subject.flag("load")
        )
        return
    try:
        before = await read_load(subject, path)
        if before.running is None or before.waiting is None:
            missing = "running" if before.running is None else "waiting"
            subject.failed("load", f"{path} has no number of {missing} requests", subject.flag("load"))
            return
        for attempt in range(ATTEMPTS):
            if await _follow(subject, path, last=attempt == ATTEMPTS - 1):
                return
    except Unanswered as error:
        subject.failed("load", str(error))


async def _follow(subject: Subject, path: str, *, last: bool) -> bool:
    """Tests with one stream. Returns True if the verdict is final.

    On an engine with other traffic, only the last attempt can fail.
    """
    before = await read_load(subject, path)
    last = last or _total(before) == 0
    tokens = max(min(OUTPUT_TOKENS, subject.max_tokens - 64), 16)
    body = {"model": subject.model, "prompt": "Go on and on.", "max_tokens": tokens, "ignore_eos": True}
    others = (
        f" beside {before.running:.0f} other requests: repeat the check when the engine is idle"
        if before.running
        else ""
    )
    async with subject.client.stream(body) as stream:
        rose = await until(subject, path, lambda load: _total(load) > _total(before), FRESH_SECONDS)
        ran = not stream.ended
    if rose is None:
        if last:
            cause = (
                f"{path} did not show the test request of {tokens} tokens within {FRESH_SECONDS:g} s{others}"
            )
            remedy = "connect the router to the engine directly, without a cache in between"
            subject.failed("load", cause, remedy)
        return last
    names = ", ".join(before.names[:3])
    subject.passed("load", f"{path} ({names}): the test request appeared after {rose * 1e3:.0f} ms")
    fell = await until(subject, path, lambda load: _total(load) <= _total(before), CANCEL_SECONDS)
    if fell is not None and ran:
        subject.passed(
            "cancel", f"a canceled stream of {tokens} tokens disappeared after {fell * 1e3:.0f} ms"
        )
        return True
    if last:
        cause = (
            f"a canceled stream still runs after {CANCEL_SECONDS:g} s{others}"
            if ran
            else f"a stream of {tokens} tokens ended before its cancellation{others}"
        )
        subject.failed(
            "cancel", cause, "remove proxies between router and engine that keep the connection open"
        )
    return last


def _total(load: Load) -> float:
    return (load.running or 0.0) + (load.waiting or 0.0)


async def read_load(subject: Subject, path: str) -> Load:
    """The current load report of the engine. Raises Unanswered."""
    answer = await subject.client.get(path)
    if answer.status != 200 or subject.adapter is None:
        raise Unanswered(f"GET {path}: {answer.error()}")
    return subject.adapter.load(answer.body)


async def until(subject: Subject, path: str, true: Callable[[Load], object], seconds: float) -> float | None:
    """Seconds until the report satisfies `true`; None: not within the time limit.

    The limit takes `MIN_LOOKS` looks at least.
    """
    began, looks = time.monotonic(), 0
    while (waited := time.monotonic() - began) < seconds or looks < MIN_LOOKS:
        if true(await read_load(subject, path)):
            return waited
        looks += 1
        await asyncio.sleep(POLL_SECONDS)
    return None
