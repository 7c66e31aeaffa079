"""Check of priorities and, with `--thorough`, of the order of the engine's queue: priority.

The trial sends requests of the lowest priority until some are queued. Then an urgent request must
begin before the queued requests. All requests are canceled as soon as the result is known.
"""

from __future__ import annotations

import asyncio
import time

from lmetric.doctor.load import POLL_SECONDS, read_load, until
from lmetric.doctor.reach import PROMPT
from lmetric.doctor.subject import Subject
from lmetric.engines.http import Unanswered

MOST_REQUESTS, AT_ONCE = 64, 8
QUEUE = 8
"""Number of queued requests that the trial needs."""
OUTPUT_TOKENS = 1024  # upper bound: requests are canceled long before
LOT_SECONDS, QUEUED_SECONDS, TRIAL_SECONDS = 2.0, 0.5, 20.0
"""Time limits, seconds: without a further request that begins, for a stable queue, for the urgent
request to begin."""
MIN_LOOKS = 10
"""Number of looks at the engine that each of the first two takes at least: on a busy machine, a
time without a change may be one in which neither the doctor nor the engine ran."""
CLEAR = 0.75
"""Share of queued requests that the urgent request must overtake if the queue follows
priorities."""


async def check_priority(subject: Subject, *, thorough: bool) -> None:
    """Checks that an urgent request is accepted; ``thorough``: and that it begins first."""
    priority, scheduler = subject.capabilities.priority, subject.capabilities.scheduler
    if scheduler is not None and scheduler.boosts:
        subject.passed("priority", f"{scheduler.name} computes the order of its queue")
        return
    if priority is None:
        subject.not_offered("priority", "requests have no known field for a priority")
        return
    if priority.honoured is False:
        subject.not_offered("priority", "its queue ignores priorities", subject.flag("priority"))
        return
    urgent, patient = priority.field(1), priority.field(-1)
    body = {"model": subject.model, "prompt": PROMPT, "max_tokens": 1, "priority": urgent}
    accepted = f"accepted, {priority.order.replace('_', ' values ')}"
    try:
        answer = await subject.client.post("/v1/completions", body)
        if answer.status != 200:
            subject.failed("priority", f"priority {urgent}: {answer.error()}", subject.flag("priority"))
        elif not thorough:
            subject.passed("priority", f"{accepted}; --thorough also tests the queue")
        elif subject.capabilities.load_path is None:
            subject.passed(
                "priority", f"{accepted}; order not tested: the engine does not report queued requests"
            )
        else:
            trial = _Trial(subject, subject.capabilities.load_path)
            try:
                if await trial.fill(patient):
                    await trial.overtake(urgent)
            finally:
                await trial.end()
            _judge(subject, accepted, trial)
    except Unanswered as error:
        subject.failed("priority", str(error))


def _judge(subject: Subject, accepted: str, trial: _Trial) -> None:
    waited, overtook = trial.waited, trial.overtook
    seen = f"an urgent request overtook {overtook} of the {waited} that waited"
    if waited == 0 or overtook is None:
        late = f"the urgent request did not begin within {TRIAL_SECONDS:g} s"
        why = trial.refused or (late if waited else f"{trial.sent} concurrent requests caused no queue")
        subject.passed("priority", f"{accepted}; order not tested: {why}")
    elif overtook >= CLEAR * waited:
        subject.passed("priority", f"{accepted}, and its queue follows them: {seen}")
    elif overtook <= (1 - CLEAR) * waited:
        subject.failed("priority", f"accepted, but the queue ignores them: {seen}", subject.flag("priority"))
    else:
        subject.passed("priority", f"{accepted}; order not tested: {seen}")


class _Since:
    """The time and the looks since something has changed."""

    def __init__(self) -> None:
        self._at, self._looks = time.monotonic(), 0

    def over(self, seconds: float) -> bool:
        """Returns whether that was longer ago, at a further look."""
        self._looks += 1
        return self._looks > MIN_LOOKS and time.monotonic() > self._at + seconds


class _Trial:
    """The requests of a trial."""

    def __init__(self, subject: Subject, path: str) -> None:
        self._subject = subject
        self._path = path
        self._tasks: list[asyncio.Task[None]] = []
        self._begun: list[
            asyncio.Event
        ] = []  # of the begun requests, in order; setting one cancels its request
        self._urgent_after: int | None = None  # number of requests that began before the urgent one
        self.sent = 0
        self.refused: str | None = None
        self.waited = 0
        """Number of queued requests when the urgent request was sent."""
        self.overtook: int | None = None
        """Number of those requests that began after the urgent one; None: unknown."""

    @property
    def _waiting(self) -> int:
        """Requests of low priority without an event so far."""
        return self.sent - len(self._begun)

    async def fill(self, priority: int | None) -> bool:
        """Sends requests of low priority until `QUEUE` of them wait. False: they do not queue."""
        while self.sent < MOST_REQUESTS and self.refused is None:
            self._tasks += [asyncio.create_task(self._run(priority)) for _ in range(AT_ONCE)]
            self.sent += AT_ONCE
            began, queued = _Since(), _Since()
            waiting = self._waiting
            while self._waiting and self.refused is None and not began.over(LOT_SECONDS):
                is_queue = waiting >= QUEUE and await self._queue() >= QUEUE
                if self._waiting != waiting:
                    began, queued, waiting = _Since(), _Since(), self._waiting
                elif not is_queue:
                    queued = _Since()
                elif queued.over(QUEUED_SECONDS):
                    return True
                await asyncio.sleep(POLL_SECONDS)
        return False

    async def overtake(self, priority: int | None) -> None:
        """Sends the urgent request, and cancels others until it begins."""
        before, begun = await self._queue(), len(self._begun)
        self.waited = self._waiting
        self._tasks.append(asyncio.create_task(self._run(priority, urgent=True)))
        await until(self._subject, self._path, lambda load: (load.waiting or 0.0) > before, 1.0)
        deadline = time.monotonic() + TRIAL_SECONDS
        while self._urgent_after is None and time.monotonic() < deadline and self.refused is None:
            for leave in self._begun:
                if not leave.is_set():
                    leave.set()
                    break
            # One request gets each free place: of several that begin at once, the order is unknown.
            left, now_begun = _Since(), len(self._begun)
            while not left.over(QUEUED_SECONDS) and self._urgent_after is None:
                if len(self._begun) > now_begun:
                    break
                await asyncio.sleep(POLL_SECONDS)
        if self._urgent_after is not None:
            self.overtook = self.waited - (self._urgent_after - begun)

    async def end(self) -> None:
        """Cancels all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _queue(self) -> float:
        return (await read_load(self._subject, self._path)).waiting or 0.0

    async def _run(self, priority: int | None, *, urgent: bool = False) -> None:
        body = {
            "model": self._subject.model,
            "prompt": PROMPT,
            "max_tokens": max(min(OUTPUT_TOKENS, self._subject.max_tokens - 64), 16),
            "ignore_eos": True,
            "priority": priority,
        }
        leave = asyncio.Event()
        try:
            async with self._subject.client.stream(body) as stream:
                if (error := stream.error) is not None:
                    adapter = self._subject.adapter
                    raise Unanswered(f"refused: {adapter.error(error) if adapter else 'an error'}")
                if urgent:
                    self._urgent_after = len(self._begun)
                    return
                self._begun.append(leave)
                await leave.wait()
        except Unanswered as error:
            self.refused = str(error)
