"""Does it take priorities and, where that is to be tried (`--thorough`), does its queue follow: priority.

The trial fills the engine with requests that yield to all others, until some have to wait; then one urgent
request must begin before those. All are left as soon as that is known.
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
"""So many must wait for their order to show."""
OUTPUT_TOKENS = 1024  # at most: they are left long before
LOT_SECONDS, QUEUED_SECONDS, TRIAL_SECONDS = 2.0, 0.5, 20.0
"""For `AT_ONCE` requests to begin; for a queue to stand still, which is then no passing one; for the urgent
request to begin."""
CLEAR = 0.75
"""The urgent one overtakes at least this share of those who wait, where the queue follows priorities."""


async def check_priority(subject: Subject, *, thorough: bool) -> None:
    """A request with the most urgent of priorities is taken; ``thorough``: and begins first."""
    priority = subject.capabilities.priority
    if priority is None:
        subject.not_offered("priority", "no field of a request is known to carry one")
        return
    if priority.honoured is False:
        subject.not_offered("priority", "its queue is not ordered by it", subject.flag("priority"))
        return
    urgent, patient = priority.field(1), priority.field(-1)
    body = {"model": subject.model, "prompt": PROMPT, "max_tokens": 1, "priority": urgent}
    accepted = f"accepted, {priority.order.replace('_', ' values ')}"
    try:
        answer = await subject.client.post("/v1/completions", body)
        if answer.status != 200:
            subject.failed("priority", f"priority {urgent}: {answer.error()}", subject.flag("priority"))
        elif not thorough:
            subject.passed("priority", f"{accepted}; whether its queue follows them, --thorough tries")
        elif subject.capabilities.load_path is None:
            subject.passed("priority", f"{accepted}; order not shown: nothing tells when requests wait")
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
        why = trial.refused or (late if waited else f"{trial.sent} requests at once made no queue")
        subject.passed("priority", f"{accepted}; order not shown: {why}")
    elif overtook >= CLEAR * waited:
        subject.passed("priority", f"{accepted}, and its queue follows them: {seen}")
    elif overtook <= (1 - CLEAR) * waited:
        subject.failed("priority", f"accepted, and not followed: {seen}", subject.flag("priority"))
    else:
        subject.passed("priority", f"{accepted}; order not shown: {seen}")


class _Trial:
    """Requests that are under way."""

    def __init__(self, subject: Subject, path: str) -> None:
        self._subject = subject
        self._path = path
        self._tasks: list[asyncio.Task[None]] = []
        self._begun: list[asyncio.Event] = []  # of each that began, in that order; set, it is left
        self._urgent_after: int | None = None  # how many had begun when the urgent one did
        self.sent = 0
        self.refused: str | None = None
        self.waited = 0
        """How many waited when the urgent one was sent."""
        self.overtook: int | None = None
        """How many of those began after it; None: it is not known."""

    @property
    def _waiting(self) -> int:
        """Patient requests without a sign of life yet."""
        return self.sent - len(self._begun)

    async def fill(self, priority: int | None) -> bool:
        """Sends patient requests until `QUEUE` of them have to wait. False: they need not."""
        while self.sent < MOST_REQUESTS and self.refused is None:
            self._tasks += [asyncio.create_task(self._run(priority)) for _ in range(AT_ONCE)]
            self.sent += AT_ONCE
            began, queued_at, queued = time.monotonic(), time.monotonic(), -1
            while (now := time.monotonic()) < began + LOT_SECONDS and self._waiting and self.refused is None:
                if self._waiting != queued or await self._queue() < QUEUE:
                    queued_at, queued = now, self._waiting
                elif queued >= QUEUE and now > queued_at + QUEUED_SECONDS:
                    return True
                await asyncio.sleep(POLL_SECONDS)
        return False

    async def overtake(self, priority: int | None) -> None:
        """Sends the urgent request, and makes room until it begins."""
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
            await asyncio.sleep(2 * POLL_SECONDS)
        if self._urgent_after is not None:
            self.overtook = self.waited - (self._urgent_after - begun)

    async def end(self) -> None:
        """Leaves all."""
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
