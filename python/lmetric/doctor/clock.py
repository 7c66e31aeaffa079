"""Check of the engine's clock: clock.

Times in KV events have a precision of milliseconds. Without events, the check uses the `Date` of
answers, with a precision of seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from email.utils import parsedate_to_datetime

from lmetric.doctor.subject import Subject

TOLERANCE_SECONDS = 1.0
"""Maximum difference of the clocks, in addition to the uncertainty of the measurement, seconds."""
DATE_SECONDS = 2.0
"""Maximum age of `Date`, seconds: it has whole seconds, and servers cache it for one second."""
Ahead = tuple[float, float]
"""Seconds by which a clock is ahead of this machine's clock: minimum and maximum."""


def judge_date(subject: Subject, date: str | None, before: float, after: float) -> None:
    """Checks the clock by the `Date` of an answer. The request was sent at ``before``; it arrived
    at ``after``."""
    try:
        told = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError, OSError):  # also a year or a zone beyond all bounds
        subject.not_offered("clock", "its answers carry no valid Date")
        return
    _judge(subject, (told - after, told + DATE_SECONDS - before), "its Date, which has whole seconds")


def ahead_by_events(min_delay: float, took: float) -> Ahead:
    """Bounds of the clock difference from event batches.

    Args:
        min_delay: shortest delay of a batch according to both clocks, seconds.
        took: upper bound of the true delay of one batch, and so of the shortest delay, seconds.
    """
    return -min_delay, took - min_delay


def judge_events(subject: Subject, ranks: Sequence[Ahead]) -> None:
    """Checks the clock by the times in the events of the ranks: the largest difference counts."""
    _judge(subject, max(ranks, key=lambda ahead: max(ahead[0], -ahead[1])), "the times in its KV events")


def _judge(subject: Subject, ahead: Ahead, by: str) -> None:
    low, high = ahead
    told = f"it is between {_way(low)} and {_way(high)} this machine's, by {by}"
    if low > TOLERANCE_SECONDS or high < -TOLERANCE_SECONDS:
        subject.failed(
            "clock",
            f"{told}: times in its log do not match times in the router's log",
            "synchronize the clocks of both machines (NTP)",
        )
    else:
        subject.passed("clock", told)


def _way(ahead: float) -> str:
    amount = f"{abs(ahead):.1f} s" if abs(ahead) >= 1 else f"{abs(ahead) * 1e3:.0f} ms"
    return f"{amount} {'ahead of' if ahead > 0 else 'behind'}"
