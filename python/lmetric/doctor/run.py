"""Runs all checks of all engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from lmetric.config import unix_path
from lmetric.doctor.cache import check_cache
from lmetric.doctor.client import StreamingClient
from lmetric.doctor.ears import Ears
from lmetric.doctor.handover import check_handovers
from lmetric.doctor.load import check_load_and_cancel
from lmetric.doctor.priority import check_priority
from lmetric.doctor.reach import check_model, check_reachable
from lmetric.doctor.subject import Subject, Target
from lmetric.doctor.token_gaps import check_token_gaps, read_metrics
from lmetric.doctor.tokens import check_tokenizer
from lmetric.doctor.verdict import CHECKS, OF_ENCODERS, Level, Verdict, needed
from lmetric.server.tls.contexts import engine_context


@dataclass(frozen=True, slots=True)
class Examination:
    """The verdicts on one engine."""

    engine: str
    url: str
    model: str | None
    role: str
    has_connector: bool
    """Whether the engine reports a KV connector."""
    verdicts: dict[str, Verdict]
    """Verdicts by check, in the order of `CHECKS`. Checks that could not run have none."""

    def wanting(self, level: Level) -> list[str]:
        """The checks for `level` that did not pass."""
        parts = self.role in ("prefill", "decode")
        return [
            name
            for name in CHECKS
            if (needed(name, level) or (name == "handover" and parts))
            and (self.role != "encode" or name in OF_ENCODERS)
            and (name not in self.verdicts or self.verdicts[name].outcome != "pass")
        ]

    @property
    def level(self) -> Level | None:
        """The best level that the engine reaches; None if it reaches none."""
        return next((level for level in Level if not self.wanting(level)), None)


async def examine(targets: Sequence[Target], *, thorough: bool = False) -> list[Examination]:
    """Examines engines concurrently.

    Each engine gets a few dozen short requests, and a long stream that is canceled. ``thorough``:
    also up to 64 concurrent requests of the lowest priority for a few seconds.
    """
    ears = Ears()
    async with contextlib.AsyncExitStack() as sessions:
        try:
            subjects = [
                _subject(target, await sessions.enter_async_context(_session(target))) for target in targets
            ]
            await asyncio.gather(*(_examine(subject, ears, thorough) for subject in subjects))
            await check_handovers([subject for subject in subjects if subject.has("reachable")])
        finally:
            await asyncio.to_thread(ears.close)
    return [
        Examination(
            subject.name,
            subject.client.url,
            subject.model or None,
            subject.role,
            subject.capabilities.handover is not None,
            {name: subject.verdicts[name] for name in CHECKS if name in subject.verdicts},
        )
        for subject in subjects
    ]


def _subject(target: Target, session: aiohttp.ClientSession) -> Subject:
    engine = target.engine
    key = engine.api_key.get_secret_value() if engine.api_key else None
    tls = engine.tls or target.settings.engine_tls
    name = tls.server_name if tls is not None else None
    return Subject(target, StreamingClient(session, engine.url, key, engine.data_parallel_rank, name))


def _session(target: Target) -> aiohttp.ClientSession:
    """Returns a session of an engine. Raises ConfigError if files of its TLS are invalid.

    No connection is reused: errors of a pool's keep-alive would look like errors of the engine.
    """
    path = unix_path(target.engine.url)
    if path is not None:
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, force_close=True))
    tls = target.engine.tls or target.settings.engine_tls
    if not target.engine.url.startswith("https:") or tls is None:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
    connector = aiohttp.TCPConnector(force_close=True, ssl=engine_context(tls))
    return aiohttp.ClientSession(connector=connector)


async def _examine(subject: Subject, ears: Ears, thorough: bool) -> None:
    with subject.attempt("reachable"):
        await check_reachable(subject)
    if not subject.has("reachable"):
        return
    metrics = await read_metrics(subject)
    with subject.attempt("model"):
        await check_model(subject)
    with subject.attempt("token_gaps"):
        check_token_gaps(subject, metrics)
    if not subject.has("model") or subject.halves or subject.role == "encode":
        return
    with subject.attempt("load"):
        await check_load_and_cancel(subject)
    with subject.attempt("tokenizer"):
        await check_tokenizer(subject)
    with subject.attempt("prefix_cache"):
        await check_cache(subject, ears)
    with subject.attempt("priority"):
        await check_priority(subject, thorough=thorough)
