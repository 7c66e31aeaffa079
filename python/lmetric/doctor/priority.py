"""Check of priorities and, with `--thorough`, of the order of the engine's queue: priority.

The trial sends requests of the lowest priority until some are queued. Then an urgent request must
begin before the queued requests. All requests are canceled as soon as the result is known.

The trial frees one place at a time, so that the order in which requests begin is known. If several
places are free at once, it is not: requests that begin in one step of the engine have no order, and
their first events can arrive in any. The trial then gives bounds, and a verdict needs both of them.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from lmetric.doctor.client import Stream
from lmetric.doctor.load import MIN_LOOKS, POLL_SECONDS, read_load, until
from lmetric.doctor.reach import PROMPT
from lmetric.doctor.subject import Subject
from lmetric.engines.http import Unanswered

MOST_REQUESTS, AT_ONCE = 64, 8
QUEUE = 8
"""Number of queued requests that the trial needs."""
OUTPUT_TOKENS = 16384
"""Upper bound, longer than a trial takes on a busy machine: requests are canceled before, and an
answer that ends by itself frees a place that the trial did not mean to free."""
LOT_SECONDS, QUEUED_SECONDS, TRIAL_SECONDS = 2.0, 0.5, 20.0
"""Time limits, seconds: without a further request that begins, for a stable queue, for the next
request to begin. Each takes `MIN_LOOKS` looks at least."""
CLEAR = 0.75
"""Share of queued requests that the urgent request must overtake if the queue follows
priorities."""
TRIALS = 3
"""Number of trials until one is certain: other requests, or a busy machine, can disturb some."""


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
            for _ in range(TRIALS):
                trial = _Trial(subject, subject.capabilities.load_path)
                await trial.run(patient, urgent)
                if _judge(subject, accepted, trial):
                    break
    except Unanswered as error:
        subject.failed("priority", str(error))


def _judge(subject: Subject, accepted: str, trial: _Trial) -> bool:
    """Records the verdict. Returns whether a further trial would give the same one."""
    waited, overtook = trial.waited, trial.overtook
    if waited == 0 or overtook is None:
        why = trial.refused or trial.stuck or f"{trial.sent} concurrent requests caused no queue"
        subject.passed("priority", f"{accepted}; order not tested: {why}")
        return trial.stuck is None
    least, most = overtook
    count = f"{least}" if least == most else f"{least} to {most}"
    seen = f"an urgent request overtook {count} of the {waited} that waited"
    if least >= CLEAR * waited:
        subject.passed("priority", f"{accepted}, and its queue follows them: {seen}")
    elif most <= (1 - CLEAR) * waited:
        subject.failed("priority", f"accepted, but the queue ignores them: {seen}", subject.flag("priority"))
    else:
        why = f"{seen}, in the last of {TRIALS} trials; repeat the check when the engine is idle"
        subject.passed("priority", f"{accepted}; order not certain: {why}")
        return False
    return True


class _Since:
    """The time and the looks since something has changed."""

    def __init__(self) -> None:
        self._at, self._looks = time.monotonic(), 0

    def over(self, seconds: float) -> bool:
        """Returns whether that was longer ago, at a further look."""
        self._looks += 1
        return self._looks > MIN_LOOKS and time.monotonic() > self._at + seconds


@dataclass(slots=True)
class _Begun:
    """A request of low priority that has begun, and so has a place of the engine."""

    stream: Stream
    leave: asyncio.Event
    """Setting it cancels the request."""


class _Trial:
    """The requests of a trial."""

    def __init__(self, subject: Subject, path: str) -> None:
        self._subject = subject
        self._path = path
        self._tasks: list[asyncio.Task[None]] = []
        self._begun: list[_Begun] = []  # in their order
        self._urgent_after: int | None = None  # number of requests that began before the urgent one
        self.sent = 0
        self.refused: str | None = None
        self.stuck: str | None = None
        """Why this trial has no result, though another one might."""
        self.waited = 0
        """Number of queued requests when the urgent request was sent."""
        self.overtook: tuple[int, int] | None = None
        """Bounds of the number of those requests that began after the urgent one; None: unknown."""

    async def run(self, patient: int | None, urgent: int | None) -> None:
        """Runs the trial with requests of a low priority, and one of a high priority."""
        try:
            if await self._fill(patient):
                await self._overtake(urgent)
        except Unanswered as error:
            self.stuck = str(error)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _waiting(self) -> int:
        """Requests of low priority without an event so far."""
        return self.sent - len(self._begun)

    @property
    def _ended(self) -> int:
        """Begun requests that have ended by themselves."""
        return sum(each.stream.ended and not each.leave.is_set() for each in self._begun)

    async def _fill(self, priority: int | None) -> bool:
        """Sends requests of low priority until `QUEUE` of them wait. False: they do not queue."""
        while self.sent < MOST_REQUESTS and self.refused is None:
            self._tasks += [asyncio.create_task(self._run(priority)) for _ in range(AT_ONCE)]
            self.sent += AT_ONCE
            began, queued = _Since(), _Since()
            waiting = self._waiting
            while self._waiting and self.refused is None:
                # All of them: a request on its way would come to the queue after the urgent one.
                is_queue = await self._queue() >= waiting >= QUEUE
                if self._waiting != waiting:
                    began, queued, waiting = _Since(), _Since(), self._waiting
                elif is_queue:
                    if queued.over(QUEUED_SECONDS):
                        return True
                else:
                    queued = _Since()
                    if began.over(LOT_SECONDS):
                        break
                await asyncio.sleep(POLL_SECONDS)
        return False

    async def _overtake(self, priority: int | None) -> None:
        """Sends the urgent request, and frees places until it begins."""
        before = await self._queue()
        begun, ended, canceled = len(self._begun), self._ended, 0
        self.waited = self._waiting
        self._tasks.append(asyncio.create_task(self._run(priority, urgent=True)))
        queued = await until(
            self._subject,
            self._path,
            lambda load: (load.waiting or 0.0) > before or self._urgent_after is not None or self.refused,
            TRIAL_SECONDS,
        )
        if queued is None:
            self.stuck = f"the urgent request was not reported as queued within {TRIAL_SECONDS:g} s"
            return
        settled = 0  # of the queued requests, those that began before the last place became free
        progress, latest = _Since(), begun
        while self._urgent_after is None and self.refused is None:
            for each in self._begun:
                if not each.leave.is_set() and not each.stream.ended:
                    each.leave.set()
                    canceled += 1
                    break
            freed = _Since()
            while self._urgent_after is None and self.refused is None and not freed.over(LOT_SECONDS):
                await self._queue()
                if (now := len(self._begun)) > latest:
                    progress, latest = _Since(), now
                if now - begun == canceled:
                    settled = canceled
                await asyncio.sleep(POLL_SECONDS)
                if settled == canceled:
                    break
            if self._urgent_after is None and progress.over(TRIAL_SECONDS):
                self.stuck = f"no queued request began within {TRIAL_SECONDS:g} s"
                return
        if self._urgent_after is None:
            return
        earlier = self._urgent_after - begun
        if self._ended > ended or earlier > canceled:
            # Places became free that the trial did not free, maybe several at once.
            self.overtook = 0, self.waited
        else:
            latest_possible = min(max(earlier, canceled - 1), self.waited)
            self.overtook = self.waited - latest_possible, self.waited - settled

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
        try:
            async with self._subject.client.stream(body, queues=True) as stream:
                if (error := stream.error) is not None:
                    adapter = self._subject.adapter
                    raise Unanswered(f"refused: {adapter.error(error) if adapter else 'an error'}")
                if not stream.seen:
                    raise Unanswered("a stream ended without an event")
                if urgent:
                    self._urgent_after = len(self._begun)
                    return
                self._begun.append(begun := _Begun(stream, asyncio.Event()))
                await begun.leave.wait()
        except Unanswered as error:
            self.refused = str(error)
