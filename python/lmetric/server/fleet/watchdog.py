"""The watchdog of an engine: finds an engine that has stopped generating.

A vLLM whose engine core is stopped, paused or asleep answers 200 on /health, and its requests hang.
Only streams that have produced tokens count, since a prefill may take minutes. Silence alone is no
proof: a tool call of the engine or another request's prefill may pause a stream. So a silent engine
gets a small request, and is taken out only if it leaves that unanswered, too.

Pure logic: time is an argument, in seconds on the monotonic clock.
"""

from __future__ import annotations

from math import inf

# Usual pauses of a healthy engine are at most the limit divided by this.
USUAL_PAUSES = 10
KEEP = 0.9  # share of the average pause that stays at each new pause


class Watchdog:
    """The latest signs of life of one engine. Each check of an attempt reports to it."""

    __slots__ = ("_seen", "_streams", "_usual_pause", "_waiting", "prefilling", "token_at")

    def __init__(self) -> None:
        self.token_at = -inf  # when a token came last, to half a second
        self.prefilling = False  # whether an attempt of the last sweep had no first token
        self._waiting = False
        self._streams = 0  # streams of the last sweep past their first token
        self._seen = False  # a token came in this sweep
        self._usual_pause = 0.0  # average time between two sweeps with tokens, seconds

    def stream(self, progressed: bool) -> None:
        """Reports a stream past its first token, and whether a token came since its last check."""
        self._streams += 1
        if progressed:
            self._seen = True

    def wait(self) -> None:
        """Reports an attempt without a token."""
        self._waiting = True

    def sweep(self, now: float) -> float | None:
        """Ends a sweep over all attempts. Returns the seconds without a token.

        None: no stream waits for a token.
        """
        streams, seen = self._streams, self._seen
        self.prefilling = self._waiting
        self._streams, self._seen, self._waiting = 0, False, False
        if seen:
            if now - self.token_at < 60.0 and streams:
                self._usual_pause = self._usual_pause * KEEP + (now - self.token_at) * (1 - KEEP)
            self.token_at = now
        elif not streams:
            self.token_at = now  # it is not expected to generate
            return None
        return now - self.token_at

    def limit(self, stall_seconds: float, prefill_seconds: float) -> float:
        """Returns the seconds without a token after which the engine is probed.

        `prefill_seconds`: the expected time of the prefills under way, during which some engines
        generate nothing.
        """
        return max(stall_seconds, USUAL_PAUSES * self._usual_pause, 4 * prefill_seconds)
