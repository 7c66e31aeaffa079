"""Summarizes request records: latencies, hit rate, goodput, errors, and delay of the generator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmetric_lab.replay.client import Record
from lmetric_lab.replay.programs import ProgramReport
from lmetric_lab.sim.summary import Goodput, Slo, Spread, tpot_seconds

# Requests sent later than this count as late: the load then differs from the trace.
LATE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ErrorCount:
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run. Seconds are wall seconds x `clock_speed`, except `lag_seconds` (wall
    time)."""

    requests: int  # sent
    completed: int
    failed: int
    unfinished: int  # in flight when the run was interrupted
    interrupted: bool
    clock_speed: float
    duration_seconds: float
    ttft_seconds: Spread | None
    tpot_seconds: Spread | None
    e2e_seconds: Spread | None
    prompt_tokens: int
    cached_tokens: int | None
    hit_rate: float | None  # cached / prompt tokens of answers with both; None: no answer
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    goodput: Goodput
    errors: dict[str, ErrorCount]
    lag_seconds: Spread | None  # delay of sending
    late_requests: int  # sent more than LATE_SECONDS late
    first_token_share: float = 1.0  # requests with their first token when the last one was sent
    programs: ProgramReport | None = None  # None: agent programs were not summarized
    # Part of the mean TTFT that the engines did not count: of router, client and a busy machine.
    added_ttft_seconds: float | None = None  # None: the engines were not asked


def summarize(
    records: Sequence[Record],
    seconds: float,
    *,
    slo: Slo,
    clock_speed: float = 1.0,
    interrupted: bool = False,
) -> Report:
    """The report of a run of `seconds` wall time, with engine clocks at `clock_speed` x real
    time."""
    done = [record for record in records if record.completed and record.first_token is not None]
    failed = [record for record in records if record.error is not None]
    sent, first, last = (
        np.array([getattr(record, name) or 0.0 for record in done], np.float64)
        for name in ("sent", "first_token", "last_token")
    )
    tokens = np.array([record.output_tokens for record in done], np.int64)
    ttft = (first - sent) * clock_speed
    tpot = tpot_seconds(first, last, tokens) * clock_speed
    duration = max(seconds * clock_speed, 1e-9)
    told = [record for record in done if record.cached_tokens is not None and record.prompt_tokens]
    cached = sum(record.cached_tokens or 0 for record in told)
    kinds = Counter(record.error for record in failed if record.error is not None)
    examples = {record.error: record.detail for record in reversed(failed)}
    lag = [record.sent - record.due for record in records if record.sent is not None]
    return Report(
        requests=len(records),
        completed=len(done),
        failed=len(failed),
        unfinished=len(records) - len(done) - len(failed),
        interrupted=interrupted,
        clock_speed=clock_speed,
        duration_seconds=duration,
        ttft_seconds=Spread.of(ttft),
        tpot_seconds=Spread.of(tpot),
        e2e_seconds=Spread.of((last - sent) * clock_speed),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        cached_tokens=cached if told else None,
        hit_rate=cached / sum(record.prompt_tokens or 0 for record in told) if told else None,
        output_tokens=int(tokens.sum()),
        requests_per_second=len(done) / duration,
        tokens_per_second=int(tokens.sum()) / duration,
        goodput=Goodput.of(slo, ttft, tpot, tokens, sent=len(records), seconds=duration),
        errors={kind: ErrorCount(count, examples[kind]) for kind, count in kinds.most_common()},
        lag_seconds=Spread.of(lag),
        late_requests=sum(each > LATE_SECONDS for each in lag),
        first_token_share=_first_token_share(records),
    )


def _first_token_share(records: Sequence[Record]) -> float:
    last = max((record.sent for record in records if record.sent is not None), default=0.0)
    early = sum(record.first_token is not None and record.first_token <= last for record in records)
    return early / len(records) if records else 1.0
