"""Policies that are code: their test call, and their files. Routers with such policies load it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lmetric._core import BadValueError, Request, Router
from lmetric.policies import Policy, PolicyFunction

# Modification time (ns) and size of files; None: a file does not exist.
Stamps = dict[Path, tuple[int, int] | None]

# Time limit of the test call of a Python policy: more than in decisions, because a first call may
# import modules. It ends a function that would hang the server.
REHEARSAL_SECONDS = 5.0


def rehearse(policy: PolicyFunction, fallback: Policy | str) -> None:
    """Calls a Python policy once, on an idle fleet of two engines.

    Raises `BadValueError` if it fails. Without this call, an error in its body would show only
    when its fallback decides.
    """
    limit = max(policy.time_limit_seconds or 0.0, REHEARSAL_SECONDS)
    timed = PolicyFunction(policy.fn, policy.reads, policy.name, policy.guard, fallback, limit)
    router = Router(timed, block_size=16, index_bytes=1 << 20, offers="experimental")
    for name in ("engine-0", "engine-1"):
        router.add_instance(name, cache_blocks=1000)
    router.score(Request(range(64), max_tokens=16))
    if problem := router.policy_fallbacks()["problem"]:
        raise BadValueError(f"a test call on two idle engines failed: {problem}")


def stamps(files: Iterable[Path]) -> Stamps:
    """Returns the stamps of files."""
    found: Stamps = {}
    for file in files:
        try:
            status = file.stat()
        except OSError:
            found[file] = None
        else:
            found[file] = (status.st_mtime_ns, status.st_size)
    return found
