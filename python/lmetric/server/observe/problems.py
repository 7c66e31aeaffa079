"""Fixes and meanings of errors, for the problems that a router logs and shows."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = 3  # most engines named in a problem
FIX_FAILING = "restart or drain the engines that fail; the access log names them (engine)"
_FIX_NO_CONNECTION = "start the engines, or correct their URLs"
FIX_FULL = "add engines: they refuse requests"
# By code of an error: what an operator can do about it, if it is always the same.
FIXES = {
    "deadline": "add engines, or raise admission.ttft_seconds",
    "queue_full": "add engines, or raise admission.max_waiting",
    "rate_limit_exceeded": "raise the tenant's budgets, if the fleet has room",
    "caches_full": "add engines: the running agent programs fill the KV caches",
    "too_many": "raise limits.max_concurrent_requests, or start another router",
    "too_many_bytes": "raise limits.max_body_bytes_total, or start another router",
    "too_many_connections": "raise limits.max_connections, or start another router",
    "timeout": "add engines, or raise timeouts.request",
    "no_engine": "start the engines that are down",
    "retry_budget": FIX_FAILING,
    "reset": FIX_FAILING,
    "engine_error": FIX_FAILING,
    "refused": _FIX_NO_CONNECTION,
    "dns": _FIX_NO_CONNECTION,
    "tls": _FIX_NO_CONNECTION,
    "unreachable": _FIX_NO_CONNECTION,
    "failed_twice": "find the client in the access log (code=failed_twice): its requests break engines",
    "too_many_invalid_tokens": "find the client in the access log: its tokens have invalid signatures",
    "issuer_unreachable": "check that the router reaches the jwks address of auth.jwt",
    "replicas_unreachable": "check the other routers and the network; /debug/replicas names lost routers",
    "too_many_searches": "find the client in the access log: it asks for many unknown responses",
    "router_broken": "restart the router",
    "resources": "raise the limit of open files of the router, or start another router",
}


def first_of(names: Sequence[str]) -> str:
    """Returns the first `NAMES` names, and how many more there are."""
    more = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {more} more" if more > 0 else "")


def meaning_of(code: str | None) -> str:
    """Returns the meaning of an error code; None: the error of an engine."""
    from lmetric.server.api.error_codes import ERRORS

    _, meaning = ERRORS.get(code or "", ("", "the engine's own error"))
    return meaning[0].lower() + meaning[1:].removesuffix(".").replace("`", "")
