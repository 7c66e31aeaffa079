"""Does its clock agree with this machine's: clock.

The times in its KV events tell to milliseconds; the `Date` of its answers, where no events come, to seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from email.utils import parsedate_to_datetime

from lmetric.doctor.subject import Subject

TOLERANCE_SECONDS = 1.0
"""The clocks may differ by this much, beyond what is not known of it."""
DATE_SECONDS = 2.0
"""`Date` may be this much older than its answer: it has whole seconds, and servers keep it for one."""
Ahead = tuple[float, float]
"""By how many seconds a clock is ahead of this machine's: at least, and at most."""


def judge_date(subject: Subject, date: str | None, before: float, after: float) -> None:
    """By the `Date` of an answer that was asked for at ``before`` and there at ``after``."""
    try:
        told = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        subject.not_offered("clock", "its answers carry no Date")
        return
    _judge(subject, (told - after, told + DATE_SECONDS - before), "its Date, which has whole seconds")


def ahead_by_events(least_delay: float, took: float) -> Ahead:
    """By the least delay of event batches, by the times in them, of which one was made and heard within
    ``took`` seconds: so much at most did that batch, and so the least delayed, take in truth."""
    return -least_delay, took - least_delay


def judge_events(subject: Subject, ranks: Sequence[Ahead]) -> None:
    """By the times in the events of its ranks: the worst counts."""
    _judge(subject, max(ranks, key=lambda ahead: max(ahead[0], -ahead[1])), "the times in its KV events")


def _judge(subject: Subject, ahead: Ahead, by: str) -> None:
    low, high = ahead
    told = f"it is between {_way(low)} and {_way(high)} this machine's, by {by}"
    if low > TOLERANCE_SECONDS or high < -TOLERANCE_SECONDS:
        subject.failed(
            "clock",
            f"{told}: its log's times and ours do not match",
            "synchronise both machines' clocks (NTP)",
        )
    else:
        subject.passed("clock", told)


def _way(ahead: float) -> str:
    amount = f"{abs(ahead):.1f} s" if abs(ahead) >= 1 else f"{abs(ahead) * 1e3:.0f} ms"
    return f"{amount} {'ahead of' if ahead > 0 else 'behind'}"
