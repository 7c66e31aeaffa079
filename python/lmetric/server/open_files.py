"""How many files the process may have open: every connection, to a client or to an engine, is one."""

import resource

import structlog

log = structlog.get_logger("lmetric.server")

# Connections that listen, logs, the KV feed's sockets, and what Python itself keeps open.
OTHERS = 256


def raise_open_files(connections: int) -> None:
    """Raises the soft limit to the hard one; says so where ``connections`` at once would still not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < connections + OTHERS:
        log.warning(
            "the limit of open files is lower than what the configuration allows to be open at once",
            limit=hard,
            needed=connections + OTHERS,
            mend="raise it (ulimit -n, LimitNOFILE=) or lower limits.max_concurrent_requests",
        )
