"""From per-request records to the figures people compare: latencies, hit rate, goodput, errors, own lag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmetric.replay.client import Record

# A request that left this much after its time was sent into another load than the trace's.
LATE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None where there is nothing to describe."""
        if not values:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
        return Spread(float(np.mean(values)), p50, p90, p99, float(np.max(values)))


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer keeps; None: no bound."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Completed requests that kept the SLO, and their output tokens, per second of the run."""

    slo_ttft_seconds: float | None
    slo_tpot_seconds: float | None
    requests_per_second: float
    tokens_per_second: float
    share: float  # of the requests sent


@dataclass(frozen=True, slots=True)
class ErrorCount:
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures. Seconds are wall seconds x `clock_speed`; `lag_seconds` alone is plain wall time."""

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
    hit_rate: float | None  # cached / prompt tokens of the answers that told both; None: none did
    output_tokens: int
    requests_per_second: float
    tokens_per_second: float
    goodput: Goodput
    errors: dict[str, ErrorCount]
    lag_seconds: Spread | None  # sent after its time
    late_requests: int  # by more than LATE_SECONDS


def summarize(
    records: Sequence[Record],
    seconds: float,
    *,
    slo: Slo,
    clock_speed: float = 1.0,
    interrupted: bool = False,
) -> Report:
    """Report on a run that took `seconds` of wall time against engines `clock_speed` times as fast."""
    done = [record for record in records if record.completed and record.first_token is not None]
    failed = [record for record in records if record.error is not None]
    ttft = [_ttft(record) * clock_speed for record in done]
    tpot = [_tpot(record) * clock_speed for record in done]
    e2e = [((record.last_token or 0.0) - (record.sent or 0.0)) * clock_speed for record in done]
    duration = max(seconds * clock_speed, 1e-9)
    good = [
        record
        for record, first, each in zip(done, ttft, tpot, strict=True)
        if (slo.ttft_seconds is None or first <= slo.ttft_seconds)
        and (slo.tpot_seconds is None or not each > slo.tpot_seconds)  # a single token has no TPOT to miss
    ]
    told = [record for record in done if record.cached_tokens is not None and record.prompt_tokens]
    cached = sum(record.cached_tokens or 0 for record in told)
    kinds = Counter(record.error for record in failed if record.error is not None)
    examples = {record.error: record.detail for record in reversed(failed)}
    lag = [record.sent - record.due for record in records if record.sent is not None]
    output = sum(record.output_tokens for record in done)
    return Report(
        requests=len(records),
        completed=len(done),
        failed=len(failed),
        unfinished=len(records) - len(done) - len(failed),
        interrupted=interrupted,
        clock_speed=clock_speed,
        duration_seconds=duration,
        ttft_seconds=Spread.of(ttft),
        tpot_seconds=Spread.of([each for each in tpot if each == each]),
        e2e_seconds=Spread.of(e2e),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in done),
        cached_tokens=cached if told else None,
        hit_rate=cached / sum(record.prompt_tokens or 0 for record in told) if told else None,
        output_tokens=output,
        requests_per_second=len(done) / duration,
        tokens_per_second=output / duration,
        goodput=Goodput(
            slo.ttft_seconds,
            slo.tpot_seconds,
            len(good) / duration,
            sum(record.output_tokens for record in good) / duration,
            len(good) / max(1, len(records)),
        ),
        errors={kind: ErrorCount(count, examples[kind]) for kind, count in kinds.most_common()},
        lag_seconds=Spread.of(lag),
        late_requests=sum(each > LATE_SECONDS for each in lag),
    )


def _ttft(record: Record) -> float:
    assert record.first_token is not None, "completed records have a first token"
    return record.first_token - (record.sent or 0.0)


def _tpot(record: Record) -> float:
    """Seconds a token after the first; NaN for an answer of one token."""
    if record.output_tokens < 2 or record.last_token is None or record.first_token is None:
        return float("nan")
    return (record.last_token - record.first_token) / (record.output_tokens - 1)
