"""Summarizes per-request columns: latencies, hit rates, goodput, imbalance.

Simulated runs and live replays use the same definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lmetric._core import BadValueError
from lmetric_lab.sim.programs import PROGRAM_SHARE, ProgramFigures, program_figures

if TYPE_CHECKING:
    from lmetric_lab.sim.columns import Columns

Floats = NDArray[np.float64]

# Window length of Figures 10 and 27 of the LMETRIC paper.
WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A quantity over requests, in seconds; percentiles are interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float

    @staticmethod
    def of(values: ArrayLike) -> Spread | None:
        """The spread of `values` without NaNs (requests without the quantity); None if no value is
        left."""
        known = np.asarray(values, np.float64)
        known = known[~np.isnan(known)]
        if not known.size:
            return None
        p50, p90, p99, p999 = (float(p) for p in np.percentile(known, (50, 90, 99, 99.9)))
        return Spread(float(known.mean()), p50, p90, p99, p999, float(known.max()))


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds of a good answer; None: no bound."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    def kept(self, ttft_seconds: Floats, tpot_seconds: Floats) -> NDArray[np.bool_]:
        """Whether each completed request met the SLO. Answers of one token have no TPOT (NaN)."""
        good = np.ones(len(ttft_seconds), np.bool_)
        if self.ttft_seconds is not None:
            good &= ttft_seconds <= self.ttft_seconds
        if self.tpot_seconds is not None:
            good &= ~(tpot_seconds > self.tpot_seconds)
        return good

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_seconds), ("TPOT", self.tpot_seconds))
        return ", ".join(f"{name} <= {bound:g} s" for name, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Goodput:
    """Completed requests that met the SLO, and their output tokens, per second of the run."""

    slo_ttft_seconds: float | None
    slo_tpot_seconds: float | None
    requests_per_second: float
    tokens_per_second: float
    share: float  # of the sent requests

    @staticmethod
    def of(
        slo: Slo, ttft_seconds: Floats, tpot_seconds: Floats, output_tokens: NDArray[np.int64], *,
        sent: int, seconds: float,
    ) -> Goodput:  # fmt: skip
        """The goodput of completed requests (columns of shape (n,)), of `sent` requests in
        `seconds`."""
        good = slo.kept(ttft_seconds, tpot_seconds)
        kept = int(good.sum())
        tokens = int(output_tokens[good].sum())
        return Goodput(
            slo.ttft_seconds, slo.tpot_seconds, kept / seconds, tokens / seconds, kept / max(1, sent)
        )


def tpot_seconds(first_token_seconds: Floats, last_token_seconds: Floats, output_tokens: ArrayLike) -> Floats:
    """Seconds per token after the first: (last - first) / (output - 1); NaN for answers of one
    token."""
    tokens = np.asarray(output_tokens, np.float64)
    each = np.full(len(tokens), np.nan)
    np.divide(last_token_seconds - first_token_seconds, tokens - 1, out=each, where=tokens > 1)
    return each


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a simulated run, over the measured requests only."""

    policy: str
    seed: int
    requests: int  # measured
    failed: int  # measured requests that never finish (refused, or on or behind a stalled engine)
    hit_ratio: float | None  # prompt tokens found cached / all; None: no prompt
    block_hit_ratio: float | None  # prompt blocks found cached / all
    goodput: Goodput
    imbalance: float | None  # result of `imbalance`; None: no prefill work
    ttft_seconds: Spread | None
    tpot_seconds: Spread | None
    e2e_seconds: Spread | None
    requests_per_second: float  # completed, first arrival to last end
    tokens_per_second: float  # their output tokens
    wall_seconds: float
    decode_policy: str | None = None  # with pools: decode policy
    optimal_assignment_ratio: float | None = (
        None  # share of KV transfers to the least loaded instance, by context tokens
    )
    stalled: int = 0  # engines that stopped forever
    local_order: str = "fcfs"  # of the engines
    preemptions: int = 0  # preemptions of measured requests
    split: str = "none"  # method of splits without roles
    splits: int = 0  # number of split measured requests
    rebalance: str = "none"  # method of migrations
    moves: int = 0  # migrations of measured requests
    fetches: int = 0  # measured requests with a prefix fetch
    fetched_ratio: float | None = None  # fetched prompt tokens / all
    step_variance: float = 0.0  # of decode step times over instances, mean over the run, s^2
    oom: int = 0  # number of out-of-memory events in the whole run
    token_slo_seconds: float = 0.1
    token_goodput: float = 0.0  # tokens/s of measured requests with gaps within the SLO
    slow_token_share: float | None = None  # share of token gaps above the SLO; None: no gap
    tbt_p50_seconds: float | None = None  # time between tokens, over the whole run, to 1%
    tbt_p99_seconds: float | None = None
    programs: ProgramFigures | None = None  # None: no program has several requests


def measured(arrival_seconds: Floats, share: tuple[float, float]) -> NDArray[np.int64]:
    """Indices of the requests between two shares, by arrival: ``(0.1, 0.9)`` drops a tenth at each
    end. Requests that never arrive (NaN) are the last."""
    order = np.argsort(arrival_seconds, kind="stable")
    return order[round(share[0] * len(order)) : round(share[1] * len(order))]


def arrival_span(arrival_seconds: Floats) -> tuple[float, float]:
    """The first and the last arrival of requests in order of arrival; 0 and 0 without any.

    Requests that wait for a request on a stalled engine never arrive (NaN) and do not count.
    """
    known = arrival_seconds[~np.isnan(arrival_seconds)]
    return (float(known[0]), float(known[-1])) if len(known) else (0.0, 0.0)


def figures(
    run: Columns,
    slo: Slo,
    share: tuple[float, float] = (0.0, 1.0),
    program_share: tuple[float, float] = PROGRAM_SHARE,
) -> RunFigures:
    """The figures of a `share` of a run's requests, and of a share of its programs.

    Times are on the simulated clock. TTFT and end to end start at the arrival. Rates cover the time
    from the first measured arrival to the last measured end.
    """
    kept = measured(run.arrival_seconds, share)
    done = kept[~np.isnan(run.finished_seconds[kept])]
    begin, last = arrival_span(run.arrival_seconds[kept])
    end = float(run.finished_seconds[done].max()) if len(done) else begin
    seconds = max(end - begin, 1e-9)
    ttft, tpot, output = run.ttft_seconds[done], run.tpot_seconds[done], run.output_tokens[done]
    slow, gaps = run.slow_tokens[done], int((output - 1).sum())
    return RunFigures(
        policy=run.policy,
        seed=run.seed,
        requests=len(kept),
        failed=len(kept) - len(done),
        hit_ratio=_ratio(run.hit_tokens[done], run.input_tokens[done]),
        block_hit_ratio=_ratio(run.hit_blocks[done], run.prompt_blocks[done]),
        goodput=Goodput.of(slo, ttft, tpot, output, sent=len(kept), seconds=seconds),
        imbalance=imbalance(prefill_windows(run, begin, last)),
        ttft_seconds=Spread.of(ttft),
        tpot_seconds=Spread.of(tpot),
        e2e_seconds=Spread.of(run.e2e_seconds[done]),
        requests_per_second=len(done) / seconds,
        tokens_per_second=int(output.sum()) / seconds,
        wall_seconds=run.wall_seconds,
        decode_policy=run.decode_policy,
        optimal_assignment_ratio=optimal_assignment_ratio(run.handoff_least_loaded[kept]),
        stalled=run.stalled,
        local_order=run.local_order,
        preemptions=int(run.preemptions[kept].sum()),
        split=run.split,
        splits=int((run.cut_tokens[kept] >= 0).sum()),
        rebalance=run.rebalance,
        moves=int(run.moves[kept].sum()),
        fetches=int((run.fetch_instance[kept] >= 0).sum()),
        fetched_ratio=_ratio(run.fetched_tokens[done], run.input_tokens[done]),
        step_variance=run.step_variance,
        oom=run.oom,
        token_slo_seconds=run.token_slo_seconds,
        token_goodput=int((output - slow).sum()) / seconds,
        slow_token_share=int(slow.sum()) / gaps if gaps else None,
        tbt_p50_seconds=run.gap_seconds(0.5),
        tbt_p99_seconds=run.gap_seconds(0.99),
        programs=program_figures(run, program_share),
    )


def optimal_assignment_ratio(least_loaded: NDArray[np.int64]) -> float | None:
    """The share of KV transfers to the instance with the fewest context tokens at the end of
    prefill.

    `least_loaded` has the entries of `Columns.handoff_least_loaded`. None: no transfer. Source:
    SIBYL, Table 1.
    """
    known = least_loaded[least_loaded >= 0]
    return float(known.mean()) if len(known) else None


def prefill_windows(run: Columns, begin: float, end: float) -> Floats:
    """Prompt tokens computed by each prefill instance per window, shape (instances, windows)."""
    timeline, tokens = run.timeline, run.timeline.prefill_tokens
    if run.roles is not None:
        tokens = tokens[[role != "decode" for role in run.roles.each()]]
    return windows(tokens, timeline.bucket_seconds, WINDOW_SECONDS, begin, end)


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float | None:
    total = int(whole.sum())
    return int(part.sum()) / total if total else None


def parse_share(text: str) -> tuple[float, float]:
    """``0.1:0.9`` as two numbers with 0 <= first < second <= 1; raises `BadValueError`."""
    parts = text.split(":")
    try:
        first, last = (float(part) for part in parts)
    except ValueError:
        raise BadValueError(
            f"share of requests {text!r} is not valid; expected two numbers, e.g. 0.1:0.9"
        ) from None
    if not 0 <= first < last <= 1:
        raise BadValueError(f"share of requests {text!r} is not valid; expected 0 <= first < last <= 1")
    return first, last


def imbalance(prefill: Floats) -> float | None:
    """The imbalance of work between instances; None: no work.

    It is the standard deviation across instances per window, summed over windows, divided by the
    sum of the means. That is a coefficient of variation with windows weighted by their work, so
    that windows with a single request count little. 0: perfectly even; (n - 1) ** 0.5: one of n
    instances does all the work. The paper's Figures 10 and 27 show the same quantity for two
    instances.

    Args:
        prefill: prefill work in any unit, shape (instances, windows).
    """
    mean = float(prefill.mean(axis=0).sum())
    return float(prefill.std(axis=0).sum()) / mean if mean > 0 else None


def windows(values: Floats, period: float, window: float, begin: float, end: float) -> Floats:
    """`values` (instances, buckets of `period` seconds) summed to windows of `window` seconds.

    The result has only whole windows inside [begin, end) of the run's clock, and at least one.
    Windows are whole numbers of buckets, at least `window` long.
    """
    each = max(1, int(np.ceil(window / period - 1e-9)))
    first = int(np.ceil(begin / period - 1e-9))
    last = min(int(end / period + 1e-9), values.shape[1])
    count = (last - first) // each
    if count < 1:
        short: Floats = values[:, first : max(last, first + 1)].sum(axis=1, keepdims=True)
        return short
    whole: Floats = values[:, first : first + count * each].reshape(len(values), count, each).sum(axis=2)
    return whole
