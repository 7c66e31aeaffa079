"""A present problem of the fleet or of the router, for its pages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

_UNIX = time.time() - time.monotonic()  # fixed, so that a time is shown the same each second


def unix_of(at: float | None) -> float | None:
    """Returns a monotonic time as Unix time, both in seconds; None stays None."""
    return None if at is None else round(_UNIX + at, 1)


@dataclass(slots=True)
class Problem:
    """A problem that several engines may share.

    what: the mode below `exact`, "not usable", the setting that has no effect, or the part of the
    router that fails. cause: the reason for any client. reason: the reason with addresses and
    names. since: Unix time in seconds; None: not known. is_bad: whether requests fail because of
    it.
    """

    what: str
    cause: str
    reason: str
    fix: str | None
    engines: list[str] = field(default_factory=list)
    since: float | None = None
    is_bad: bool = False

    def shown(self, names: bool) -> dict[str, Any]:
        """Returns its JSON object, with ``names``: with the engines' names and the whole reason."""
        public = {
            "what": self.what,
            "cause": self.cause,
            "since": self.since,
            "fix": self.fix,
            "engines": len(self.engines),
        }
        return {**public, "reason": self.reason, "names": self.engines} if names else public
